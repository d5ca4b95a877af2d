"""Planners to compare with: rank order, random placements, and the rules of other systems."""
