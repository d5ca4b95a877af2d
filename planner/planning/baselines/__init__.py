"""Planners to compare with: consecutive ranks, random placements, and other systems."""
