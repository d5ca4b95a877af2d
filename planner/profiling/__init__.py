"""Measures compute, links and the executor's overhead on the actual devices."""
