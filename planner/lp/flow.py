"""Linear program for the flow of microbatches through stages.

Variables are the parts of all microbatches that take each edge, and the period, the seconds in
which one microbatch of all passes. In the mean a device and a link are busy no longer than the
period. By Little's law the microbatches in flight are delay over period, which memory limits. How
long a microbatch is away beyond a node depends on the flow itself, so that the programme is solved
again with the ways that the flow before had.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.problems import ProblemError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AGAIN = 2
"""Programmes after the first."""


class SharedLines(NamedTuple):
    """Lines that several edges share.

    Attributes
    ----------
    line, edge
        ``int[X]``: a line, and an edge over it.
    busy_s
        ``float[X]``: how long the line would be busy with a microbatch if all took that edge.
    """

    line: Ints
    edge: Ints
    busy_s: Floats


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
        ``float[V]``: microbatches that a node holds between their F and B, infinite for any.
    waiting
        By how much longer than alone a microbatch is away beyond a node, since others are there.
    lines
        What edges share; None: nothing.
    spare, lack
        Every pair should have time for ``spare`` times its messages in a period; the most that one
        lacks counts as ``lack`` times as much longer a period.
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
    lines: SharedLines | None = None
    spare: float = 1.0
    lack: float = 0.0


class FlowRow(enum.StrEnum):
    """What a row of the programme limits."""

    BUSY = "busy"
    PAIR = "pair"
    SPARE = "spare"
    LINE = "line"
    MEMORY = "memory"


class FlowProgramme(NamedTuple):
    """Minimise ``cost @ x`` with ``at_most @ x <= 0``, ``equal @ x == wanted`` and x >= 0.

    Attributes
    ----------
    cost
        ``float[V + E + 2]``: a column a node, an edge, the period, and what the spare time lacks.
    at_most, equal
        Sparse matrices; of ``equal``, V rows are what nodes give, V what they get, one is the
        whole.
    wanted
        ``float[2 V + 1]``.
    rows
        Of ``at_most``: what each limits, and of which node, edge or line.
    """

    cost: Floats
    at_most: Any
    equal: Any
    wanted: Floats
    rows: list[tuple[FlowRow, int]]


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
    from_s
        ``float[V]``: mean way from a node on, there and back, when nothing waits.
    """

    period_s: float
    way_s: float
    through: Floats
    part: Floats
    from_s: Floats


def solve_flow(flow: StageFlow, microbatches: float) -> FlowRates:
    """Rates that minimise ``microbatches * period + way``: what a pipeline part takes in the mean.

    Where the flow asks for it, rates nearly as good that leave pairs time to spare.
    """
    return _last(flow, microbatches)[1]


def last_programme(flow: StageFlow, microbatches: float) -> FlowProgramme:
    """The linear program whose optimum `solve_flow` gives."""
    return _last(flow, microbatches)[0]


def _last(flow: StageFlow, microbatches: float) -> tuple[FlowProgramme, FlowRates]:
    # at first as if all went the fastest way from every node on
    from_s = _from_s(flow, np.zeros(len(flow.source)))
    for _ in range(1 + AGAIN):
        programme = _programme(flow, microbatches, from_s)
        rates = _solved(flow, programme)
        from_s = rates.from_s
    return programme, rates


def _from_s(flow: StageFlow, part: Floats) -> Floats:
    """Mean way from every node on; the fastest from those that nothing goes through."""
    from_s = flow.own_s.copy()
    for v in range(len(flow.stage) - 1, -1, -1):
        out = np.flatnonzero(flow.source == v)
        if len(out) == 0:
            continue
        away = flow.delay_s[out] + from_s[flow.target[out]]
        total = part[out].sum()
        from_s[v] += part[out] @ away / total if total > 1e-12 else away.min()
    return from_s


def _programme(flow: StageFlow, microbatches: float, from_s: Floats) -> FlowProgramme:
    """The linear program where microbatches are so long away from each node on."""
    from scipy.sparse import coo_array

    nodes, edges, last = len(flow.stage), len(flow.source), int(flow.stage[-1])
    # columns: through each node, over each edge, the period, and what the spare time lacks
    period = nodes + edges
    lacking = period + 1
    rows: list[tuple[Ints, Ints, Floats]] = []
    limits: list[tuple[FlowRow, int]] = []

    def row_per(kind: FlowRow, columns: Ints, values: Floats, at: int) -> int:
        """One row a column: value x column <= period."""
        limits.extend((kind, k) for k in range(len(columns)))
        number = at + np.arange(len(columns))
        rows.append((number, columns, values))
        rows.append((number, np.full(len(columns), period), np.full(len(columns), -1.0)))
        return at + len(columns)

    count = row_per(FlowRow.BUSY, np.arange(nodes), flow.busy_s, 0)
    count = row_per(FlowRow.PAIR, nodes + np.arange(edges), flow.pair_s, count)
    if flow.spare > 1:
        rows.append((count + np.arange(edges), np.full(edges, lacking), np.full(edges, -1.0)))
        count = row_per(FlowRow.SPARE, nodes + np.arange(edges), flow.spare * flow.pair_s, count)
    if flow.lines is not None:
        shared, row = np.unique(flow.lines.line, return_inverse=True)
        rows.append((count + row, nodes + flow.lines.edge, flow.lines.busy_s))
        row = count + np.arange(len(shared))
        rows.append((row, np.full(len(shared), period), np.full(len(shared), -1.0)))
        limits += ((FlowRow.LINE, k) for k in shared.tolist())
        count += len(shared)
    narrow = np.flatnonzero(np.isfinite(flow.room))
    number = np.full(nodes, -1)
    number[narrow] = count + np.arange(len(narrow))
    # what is between F and B of a node is there or anywhere from there on
    beyond = np.flatnonzero(number[flow.source] >= 0)
    away = flow.waiting * (flow.delay_s[beyond] + from_s[flow.target[beyond]])
    rows.append((number[narrow], narrow, flow.own_s[narrow]))
    rows.append((number[flow.source[beyond]], nodes + beyond, away))
    rows.append((number[narrow], np.full(len(narrow), period), -flow.room[narrow]))
    limits += ((FlowRow.MEMORY, v) for v in narrow.tolist())
    count += len(narrow)
    equal: list[tuple[Ints, Ints, Floats]] = []
    wanted = np.zeros(2 * nodes + 1)
    # every node gives to the next stage what goes through it, and gets it from the one before
    for side, row, edge in (
        (flow.source, np.arange(nodes), last),
        (flow.target, nodes + np.arange(nodes), 0),
    ):
        inner = np.flatnonzero(flow.stage != edge)
        equal.append((row[inner], inner, np.full(len(inner), -1.0)))
        equal.append((row[side], nodes + np.arange(edges), np.ones(edges)))
    ahead = np.flatnonzero(flow.stage == 0)
    equal.append((np.full(len(ahead), 2 * nodes), ahead, np.ones(len(ahead))))
    wanted[-1] = 1.0

    def matrix(parts: list[tuple[Ints, Ints, Floats]], height: int) -> Any:
        row, column, value = (np.concatenate([part[k] for part in parts]) for k in range(3))
        return coo_array((value, (row, column)), shape=(height, lacking + 1)).tocsr()

    cost = np.concatenate([flow.own_s, flow.delay_s, [microbatches, flow.lack * microbatches]])
    return FlowProgramme(cost, matrix(rows, count), matrix(equal, 2 * nodes + 1), wanted, limits)


def _solved(flow: StageFlow, programme: FlowProgramme) -> FlowRates:
    from scipy.optimize import linprog

    nodes, period = len(flow.stage), len(flow.stage) + len(flow.source)
    found = linprog(
        programme.cost,
        A_ub=programme.at_most,
        b_ub=np.zeros(len(programme.rows)),
        A_eq=programme.equal,
        b_eq=programme.wanted,
        method="highs",
    )
    if found.status != 0:
        raise ProblemError(
            "no flow of microbatches fits the devices' memory; use more stages, smaller "
            "microbatches or larger devices"
        )
    through, part = np.maximum(found.x[:nodes], 0), np.maximum(found.x[nodes:period], 0)
    way = float(flow.own_s @ through + flow.delay_s @ part)
    return FlowRates(float(found.x[period]), way, through, part, _from_s(flow, part))
