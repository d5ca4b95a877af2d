"""Heartbeats, commit of steps, and elastic membership."""
