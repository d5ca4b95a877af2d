"""Devices per stage when part of the microbatches skips a stage (SkipPipe, eq. 1)."""

from __future__ import annotations

import math

from planner.problems import ProblemError


def stage_sizes_for_skip(devices: int, stages: int, skip_ratio: float) -> tuple[int, ...]:
    """Stage sizes for a skip ratio: ``|S_i| = |S_0| (1 - s / (s - 1) * k)`` for ``i >= 1``.

    Every microbatch visits stage 0, and skips a share k of all s stages, so each later stage
    processes the share ``1 - s k / (s - 1)`` of the microbatches. Stage 0 gets the rounded size of
    the equation; the other devices are divided evenly among the later stages, earlier ones first.

    References
    ----------
    "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks" (2025), eq. 1.
    """
    if stages < 1 or devices < stages:
        raise ProblemError(
            f"every stage needs a device, found {devices} devices for {stages} stages; "
            "use fewer stages or more devices"
        )
    if stages == 1:
        if skip_ratio != 0:
            raise ProblemError(
                f"one stage cannot be skipped, found skip_ratio {skip_ratio:g}; give 0"
            )
        return (devices,)
    limit = (stages - 1) / stages
    if not (math.isfinite(skip_ratio) and 0 <= skip_ratio < limit):
        raise ProblemError(
            f"skip_ratio must be at least 0 and below (stages - 1) / stages = {limit:g}, "
            f"found {skip_ratio:g}; skip less"
        )
    share = 1 - stages / (stages - 1) * skip_ratio
    exact = devices / (1 + (stages - 1) * share)
    # stage 0 is the largest stage, and every other stage has a device
    head = min(max(round(exact), math.ceil(devices / stages)), devices - (stages - 1))
    base, extra = divmod(devices - head, stages - 1)
    return (head, *(base + (i < extra) for i in range(stages - 1)))
