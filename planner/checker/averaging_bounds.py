"""Recomputes bounds on the rate of averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.problems import AveragingProblem


def recomputed_bound(witness: Mapping[str, Any], problem: AveragingProblem) -> float | None:
    """Upper bound on steps per second from a witness; None if it proves none.

    ``kind`` "everyone": all peers that can compute do, and every peer gets the whole average. One
    that is not the only contributor downloads R or more: what it does not sum itself, and at least
    as much of the others' gradients as it sums. The only contributor may save what it sums. So R is
    at most the second smallest download, and at most the smallest plus what a peer may sum; and it
    is at most what all reducers together can return.
    """
    if witness.get("kind") != "everyone":
        return None
    n = len(problem.samples_per_s)
    eligible = [i for i in range(n) if problem.can_compute[i]]
    samples = sum(float(problem.samples_per_s[i]) for i in eligible) / problem.batch_size
    if n == 1:
        return samples
    returned = []
    for i in range(n):
        # r_i to n - 1 peers; a contributor sends r_i to n - 2, and at least as much to reducers
        rate = float(problem.upload_bytes_per_s[i]) / (n - 1)
        if problem.link_bytes_per_s is not None:
            # a reducer returns r_i to every peer, the slowest link included
            slowest = min(float(problem.link_bytes_per_s[i][j]) for j in range(n) if j != i)
            rate = min(rate, slowest)
        returned.append(rate if problem.can_aggregate[i] else 0.0)
    least, second = sorted(float(d) for d in problem.download_bytes_per_s)[:2]
    total = min(second, least + max(returned), sum(returned))
    if total <= 0 or samples <= 0:
        return 0.0
    rate = total / problem.gradient_bytes
    return min(samples, rate) if problem.overlap else 1 / (1 / samples + 1 / rate)
