"""Averaging of a plan: groups and rounds, hierarchies, aggregators and peers."""
