"""Benchmarks of the solvers: instances, baselines, tables."""
