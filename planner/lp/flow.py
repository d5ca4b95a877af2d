"""Microbatches as a flow through stages: the rates at which every link and device keeps up.

Variables are the parts of all microbatches that take each edge, and the period, the seconds in
which one microbatch of all passes. In the mean a device and a link are busy no longer than the
period. By Little's law the microbatches in flight are delay over period, which memory limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.problems import ProblemError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StageFlow:
    """Nodes in stages and edges between neighbouring stages.

    Attributes
    ----------
    stage
        ``int[V]``: of every node, 0..S-1, ascending. A node may stand for several alike devices.
    busy_s
        ``float[V]``: if all microbatches went through a node, how long one would keep its devices
        (or their up- or downlinks) busy.
    own_s
        ``float[V]``: what a microbatch spends computing there.
    source, target
        ``int[E]``: nodes of neighbouring stages.
    pair_s
        ``float[E]``: as ``busy_s`` for the edge's pairs of devices.
    delay_s
        ``float[E]``: of activations forth and gradients back.
    room
        ``float[S]``: microbatches that a stage holds between their F and B, infinite for any.
    waiting
        By how much longer than alone a microbatch is away beyond a stage, since others are there.
    """

    stage: Ints
    busy_s: Floats
    own_s: Floats
    source: Ints
    target: Ints
    pair_s: Floats
    delay_s: Floats
    room: Floats
    waiting: float = 1.0


@dataclass(frozen=True)
class FlowRates:
    """How microbatches spread.

    Attributes
    ----------
    period_s
        Seconds a microbatch, of all.
    way_s
        Mean way of a microbatch there and back.
    through
        ``float[V]``: parts of all microbatches through each node, 1 in every stage.
    part
        ``float[E]``: over each edge.
    """

    period_s: float
    way_s: float
    through: Floats
    part: Floats


def solve_flow(flow: StageFlow, microbatches: float) -> FlowRates:
    """Rates that minimise ``microbatches * period + way``: what a pipeline part takes in the mean.

    Parameters
    ----------
    flow
        Every stage has a node, and every node of neighbouring stages an edge between them.
    microbatches
        M of a step.

    Returns
    -------
    FlowRates
        An optimum of the linear programme (HiGHS).

    Raises
    ------
    ProblemError
        Some stage has no room for a microbatch.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    nodes, edges, stages = len(flow.stage), len(flow.source), len(flow.room)
    # columns: through each node, over each edge, and the period
    period = nodes + edges
    first = np.searchsorted(flow.stage, np.arange(stages))
    rows: list[tuple[Ints, Ints, Floats]] = []

    def row_per(columns: Ints, values: Floats, at: int) -> int:
        """One row a column: value x column <= period."""
        number = at + np.arange(len(columns))
        rows.append((number, columns, values))
        rows.append((number, np.full(len(columns), period), np.full(len(columns), -1.0)))
        return at + len(columns)

    count = row_per(np.arange(nodes), flow.busy_s, 0)
    count = row_per(nodes + np.arange(edges), flow.pair_s, count)
    edge_stage = flow.stage[flow.source]
    for j in range(stages):
        if not np.isfinite(flow.room[j]):
            continue
        # what is between F and B of stage j is anywhere from there on
        later = np.flatnonzero(flow.stage >= j)
        beyond = np.flatnonzero(edge_stage >= j)
        number = np.full(len(later) + len(beyond) + 1, count)
        columns = np.concatenate([later, nodes + beyond, [period]])
        longer = np.where(flow.stage[later] == j, 1.0, flow.waiting)
        away = flow.waiting * flow.delay_s[beyond]
        values = np.concatenate([longer * flow.own_s[later], away, [-flow.room[j]]])
        rows.append((number, columns, values))
        count += 1
    equal: list[tuple[Ints, Ints, Floats]] = []
    wanted = np.zeros(2 * nodes + 1)
    # every node gives to the next stage what goes through it, and gets it from the one before
    for side, number, last in (
        (flow.source, np.arange(nodes), stages - 1),
        (flow.target, nodes + np.arange(nodes), 0),
    ):
        inner = np.flatnonzero(flow.stage != last)
        equal.append((number[inner], inner, np.full(len(inner), -1.0)))
        equal.append((number[side], nodes + np.arange(edges), np.ones(edges)))
    ahead = np.arange(first[1] if stages > 1 else nodes)
    equal.append((np.full(len(ahead), 2 * nodes), ahead, np.ones(len(ahead))))
    wanted[-1] = 1.0

    def matrix(parts: list[tuple[Ints, Ints, Floats]], height: int) -> object:
        row, column, value = (np.concatenate([part[k] for part in parts]) for k in range(3))
        return coo_array((value, (row, column)), shape=(height, period + 1)).tocsr()

    cost = np.concatenate([flow.own_s, flow.delay_s, [microbatches]])
    found = linprog(
        cost,
        A_ub=matrix(rows, count),
        b_ub=np.zeros(count),
        A_eq=matrix(equal, 2 * nodes + 1),
        b_eq=wanted,
        method="highs",
    )
    if found.status != 0:
        raise ProblemError(
            "no flow of microbatches fits the devices' memory; use more stages, smaller "
            "microbatches or larger devices"
        )
    through, part = found.x[:nodes], found.x[nodes:period]
    way = float(flow.own_s @ through + flow.delay_s @ part)
    return FlowRates(float(found.x[period]), way, np.maximum(through, 0), np.maximum(part, 0))
