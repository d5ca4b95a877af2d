"""Checkpoints, resharding them for another layout, and state that a device takes from another."""
