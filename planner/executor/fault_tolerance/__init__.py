"""Heartbeats, failure detection and shutdown."""
