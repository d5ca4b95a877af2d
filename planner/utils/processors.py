"""Processors of this machine."""

from __future__ import annotations

import os

MAX_BUSY = 0.85
"""Share of the processors above which ranks wait for them instead of the network."""


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_warning() -> str:
    """A line if other programs keep the processors busy; empty if not."""
    load = os.getloadavg()[0]
    if load <= MAX_BUSY * cores():
        return ""
    return (
        f"the load average is {load:.1f} on {cores()} processors already, so ranks will "
        "wait for them; end other work first"
    )
