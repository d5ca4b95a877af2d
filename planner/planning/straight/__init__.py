"""Straight pipelines: shapes, placement of stages on devices, and order of operations."""
