"""Checkpoints, and resharding them for another layout."""
