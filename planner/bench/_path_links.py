"""The reference path instance on links that carry one message at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.mapf.arrays import PathArrays
from planner.mapf.baselines import first_in_first_out
from planner.mapf.dispatch import plan_of
from planner.mapf.timing import timed_by_rank
from planner.network.catalogue import load_network
from planner.problems import PathProblem
from planner.problems.answers import PathPlan

FLAT_S = 0.35
"""What the public code adds to every transfer."""

INSIDE_LATENCY_S = 0.001
"""Latency within a location, in the public code."""


def reference_link_s(path: Path, problem: PathProblem) -> NDArray[np.float64]:
    """For how long a message keeps its link busy: the transfer less latency and flat seconds.

    Parameters
    ----------
    path
        Of the instance's file, which names the devices' locations.
    problem
        Of the file.

    Returns
    -------
    ndarray
        ``float[N, N]``, seconds: the message's bytes over the bandwidth.
    """
    network = load_network("gcp12_skippipe_2025")
    locations = json.loads(path.read_text(encoding="utf-8"))["locations"]
    at = np.array([network.ids.index(name) for name in locations])
    same = at[:, None] == at[None, :]
    latency = np.where(same, INSIDE_LATENCY_S, network.latency_s[np.ix_(at, at)])
    return np.maximum(problem.transfer_s - latency - FLAT_S, 0.0)


def retimed(problem: PathProblem, plan: PathPlan) -> PathPlan:
    """The same paths with every device working in the same order, on the problem's links.

    Parameters
    ----------
    problem
        With ``link_s``.
    plan
        Of the problem without.

    Returns
    -------
    PathPlan
        Valid for ``problem``.
    """
    rank = {(op.microbatch, op.kind, op.device): op.start_s for op in plan.ops}
    made = timed_by_rank(problem, plan.paths, rank)
    assert made is not None
    return made


def in_arrival_order_s(problem: PathProblem, paths: Sequence[Sequence[int]]) -> float:
    """Makespan of given paths, every device taking what can begin first.

    Parameters
    ----------
    problem
        With or without ``link_s``.
    paths
        Devices of every microbatch; TC1 is not asked.

    Returns
    -------
    float
        Seconds.
    """
    arrays = PathArrays.of(problem)
    rows = np.array(paths, dtype=np.int64)
    return plan_of(arrays, rows, first_in_first_out(arrays, rows)[1]).makespan_s


ASSUMED = (
    "`link_s` = `transfer_s` - latency - 0.35 s, the latency that of `gcp12_skippipe_2025` (0.001 "
    "s within a location). That is the message's 32 MiB over the bandwidth (within 0.02 ms; the "
    "public code's Gb are 2^30 bits, within a location 16 of them); the flat 0.35 s is taken for "
    "work beside the link. A link is an ordered pair of devices, not of locations. It carries one "
    "message at a time, in the order in which the operations before them end."
)
