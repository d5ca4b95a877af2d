"""Benchmarks: quality tables and pictures, each made by one command."""
