"""Path problems: SkipPipe's public configuration, and a hundred devices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.network.catalogue import load_network
from planner.problems import PathProblem

FIELDS = (
    "transfer_s stage_devices forward_s backward_s head_s path_stages memory "
    "microbatches_per_start max_swaps"
)


def reference(path: Path, **changes: object) -> PathProblem:
    """Load the public code's configuration: 20 devices, 33% skipped."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return PathProblem(**{**{name: data[name] for name in FIELDS.split()}, **changes})


def unlike(problem: PathProblem, seed: int) -> PathProblem:
    """Return the same network with 0.5 to 2 times the compute speed and memory for 3 to 5."""
    rng = np.random.default_rng(seed)
    n = len(problem)
    slow = np.exp(rng.uniform(np.log(0.5), np.log(2.0), n))
    return problem.replace(
        forward_s=problem.forward_s * slow,
        backward_s=problem.backward_s * slow,
        head_s=problem.head_s * slow,
        memory=rng.integers(3, 6, n),
    )


def hundred(seed: int = 0) -> PathProblem:
    """Build 100 devices in Skyplane's regions, 10 stages of 10, 7 on a path, 200 microbatches."""
    network = load_network("skyplane_60_20220129").complete()
    rng = np.random.default_rng(seed)
    place = rng.integers(0, len(network), 100)
    # devices of a region are close to each other; jitter makes all devices distinct
    seconds = network.symmetrised().transfer_s(32e6)
    same = place[:, None] == place[None, :]
    transfer = np.where(same, 0.03, seconds[place][:, place])
    transfer = transfer * rng.uniform(0.9, 1.1, (100, 100))
    transfer = (transfer + transfer.T) / 2
    np.fill_diagonal(transfer, 0.0)
    order = rng.permutation(100).reshape(10, 10)
    return PathProblem(transfer, order.tolist(), 0.5, 1.0, 0.1, 7, 5, 20, live_memory=True)


FLAT_S = 0.35
"""Seconds that the public code adds to every transfer."""

INSIDE_LATENCY_S = 0.001
"""Latency within a location in the public code, in seconds."""


def reference_link_s(path: Path, problem: PathProblem) -> NDArray[np.float64]:
    """Return the seconds for which a message occupies its link, without latency and `FLAT_S`.

    Returns
    -------
    ndarray
        ``float[N, N]``, seconds: the message's bytes over the bandwidth.
    """
    network = load_network("gcp12_skippipe_2025")
    locations = json.loads(path.read_text(encoding="utf-8"))["locations"]
    index = np.array([network.ids.index(name) for name in locations])
    same = index[:, None] == index[None, :]
    latency = np.where(same, INSIDE_LATENCY_S, network.latency_s[np.ix_(index, index)])
    return np.maximum(problem.transfer_s - latency - FLAT_S, 0.0)
