"""Benchmarks of the solvers, each a module with a ``main``; ``planner bench`` lists them."""
