"""Instances of path problems."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from planner.problems import PathProblem

INSTANCE = Path(__file__).parents[2] / "datasets" / "instances" / "gcp20_skip33.json"


def reference(**changes: object) -> PathProblem:
    """20 devices over 12 Google Cloud locations, a third of the stages skipped."""
    data = json.loads(INSTANCE.read_text())
    names = (
        "transfer_s stage_devices forward_s backward_s head_s path_stages memory "
        "microbatches_per_start max_swaps"
    )
    return PathProblem(**{**{name: data[name] for name in names.split()}, **changes})


def random_problem(
    seed: int,
    sizes: tuple[int, ...] = (2, 2, 2, 1),
    path_stages: int = 3,
    memory: object = 4,
    each: int = 2,
    **changes: object,
) -> PathProblem:
    """A problem with random durations and transfers."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    names = iter(rng.permutation(n).tolist())
    groups = [[next(names) for _ in range(size)] for size in sizes]
    transfer = rng.uniform(0.1, 3.0, (n, n))
    fields: dict[str, object] = {
        "transfer_s": transfer,
        "stage_devices": groups,
        "forward_s": rng.uniform(0.5, 1.5, n),
        "backward_s": rng.uniform(1.0, 3.0, n),
        "head_s": rng.uniform(0.1, 0.5, n),
        "path_stages": path_stages,
        "memory": memory,
        "microbatches_per_start": each,
    }
    return PathProblem(**{**fields, **changes})  # type: ignore[arg-type]
