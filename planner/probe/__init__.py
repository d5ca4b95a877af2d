"""Measures latency and bandwidth between all pairs of devices, over the executor's connections."""

import planner.executor  # noqa: F401  its one line if torch is not installed
