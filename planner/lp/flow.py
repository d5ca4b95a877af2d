"""Linear program for the flow of microbatches through stages.

Variables are the share of microbatches on each edge, and the period: the mean seconds between
microbatches. No device or link is busy for longer than the period per microbatch on average. By
Little's law the number of microbatches in flight is delay over period, which memory limits. The
delay beyond a node depends on the flow itself, so that the program is solved repeatedly with the
delays of the previous flow.
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

EXTRA_ITERATIONS = 2
"""Number of times that the program is solved again."""


class SharedLines(NamedTuple):
    """Site lines shared by several edges.

    Attributes
    ----------
    line, edge
        ``int[X]``: pairs of a line and an edge that uses it.
    busy_s
        ``float[X]``: seconds per microbatch that the line is busy if all microbatches take the
        edge.
    """

    line: Ints
    edge: Ints
    busy_s: Floats


@dataclass(frozen=True)
class StageFlow:
    """Flow network: nodes in stages and edges between neighbouring stages.

    Edges may also lead from the last stage to the first, where the head then is.

    Attributes
    ----------
    stage
        ``int[V]``: stage of every node, 0..S-1, ascending. A node is a device or a device class.
    busy_s
        ``float[V]``: seconds per microbatch that the node's devices (or their up- or downlinks) are
        busy if all microbatches pass it.
    compute_s
        ``float[V]``: computing time of a microbatch on the node.
    source, target
        ``int[E]``: nodes of neighbouring stages.
    pair_s
        ``float[E]``: as ``busy_s`` for the edge's pairs of devices.
    delay_s
        ``float[E]``: transfer time of activations and gradients together, and computing time of a
        head on the first stage.
    room
        ``float[V]``: memory capacity in microbatches in flight between F and B; may be infinite.
    waiting
        Factor on the delay beyond a node that accounts for queueing.
    lines
        Site lines shared by edges, or None.
    headroom, headroom_penalty
        Soft constraint: every pair should be busy for at most a share 1 / ``headroom`` of the
        period; the penalty on the largest violation is relative to that of the period.
    """

    stage: Ints
    busy_s: Floats
    compute_s: Floats
    source: Ints
    target: Ints
    pair_s: Floats
    delay_s: Floats
    room: Floats
    waiting: float = 1.0
    lines: SharedLines | None = None
    headroom: float = 1.0
    headroom_penalty: float = 0.0

    def onward_s(self, edges: Ints, remaining_s: Floats) -> Floats:
        """Seconds from some edges on, given those from every node on."""
        source, target = self.source[edges], self.target[edges]
        turns = self.stage[target] <= self.stage[source]
        return np.asarray(self.delay_s[edges] + np.where(turns, 0.0, remaining_s[target]))


class RowKind(enum.StrEnum):
    """Kind of an inequality of the program."""

    BUSY = "busy"
    PAIR = "pair"
    SPARE = "spare"
    LINE = "line"
    MEMORY = "memory"


class FlowLinearProgram(NamedTuple):
    """Minimise ``cost @ x`` with ``a_ub @ x <= 0``, ``a_eq @ x == b_eq`` and x >= 0.

    Attributes
    ----------
    cost
        ``float[V + E + 2]``: columns are the nodes, the edges, the period, and the violation of the
        soft constraint.
    a_ub, a_eq
        Sparse matrices of inequalities and equalities. The equalities are flow conservation: V rows
        for outgoing edges, V for incoming ones, and one for the total of stage 0.
    b_eq
        ``float[2 V + 1]``.
    rows
        Kind of each row of ``a_ub``, and its node, edge or line.
    """

    cost: Floats
    a_ub: Any
    a_eq: Any
    b_eq: Floats
    rows: list[tuple[RowKind, int]]


@dataclass(frozen=True)
class FlowRates:
    """Optimal flow.

    Attributes
    ----------
    period_s
        Mean seconds between microbatches.
    round_trip_s
        Mean seconds of a microbatch forward and back, without queueing.
    node_share
        ``float[V]``: share of microbatches through each node; 1 in total in every stage.
    edge_share
        ``float[E]``: share of microbatches over each edge.
    remaining_s
        ``float[V]``: mean round trip from a node on, without queueing.
    """

    period_s: float
    round_trip_s: float
    node_share: Floats
    edge_share: Floats
    remaining_s: Floats


def solve_flow(flow: StageFlow, microbatches: float) -> FlowRates:
    """Flow that minimises ``microbatches * period + round trip``, plus the soft penalty."""
    return _iterate(flow, microbatches)[1]


def flow_linear_program(flow: StageFlow, microbatches: float) -> FlowLinearProgram:
    """The linear program whose optimum `solve_flow` gives."""
    return _iterate(flow, microbatches)[0]


def _iterate(flow: StageFlow, microbatches: float) -> tuple[FlowLinearProgram, FlowRates]:
    # initially, assume the fastest route from every node
    remaining_s = _remaining_s(flow, np.zeros(len(flow.source)))
    for _ in range(1 + EXTRA_ITERATIONS):
        program = _build_program(flow, microbatches, remaining_s)
        rates = _solve(flow, program)
        remaining_s = rates.remaining_s
    return program, rates


def _remaining_s(flow: StageFlow, edge_share: Floats) -> Floats:
    """Mean round trip from every node on; the fastest for nodes without flow."""
    remaining_s = flow.compute_s.copy()
    for v in range(len(flow.stage) - 1, -1, -1):
        out = np.flatnonzero(flow.source == v)
        if len(out) == 0:
            continue
        onward_s = flow.onward_s(out, remaining_s)
        total = edge_share[out].sum()
        remaining_s[v] += edge_share[out] @ onward_s / total if total > 1e-12 else onward_s.min()
    return remaining_s


def _build_program(flow: StageFlow, microbatches: float, remaining_s: Floats) -> FlowLinearProgram:
    """Build the linear program for given round trips from each node on."""
    from scipy.sparse import coo_array

    nodes, edges = len(flow.stage), len(flow.source)
    ends = (int(flow.stage[-1]), 0)
    if bool((flow.stage[flow.target] < flow.stage[flow.source]).any()):
        ends = (-1, -1)  # every stage has incoming and outgoing edges
    # columns: node shares, edge shares, the period, and the soft constraint's violation
    period = nodes + edges
    slack_column = period + 1
    a_ub: list[tuple[Ints, Ints, Floats]] = []
    kinds: list[tuple[RowKind, int]] = []

    def add_bounded_rows(kind: RowKind, columns: Ints, values: Floats, first_row: int) -> int:
        """Add a row per column: value * column <= period."""
        kinds.extend((kind, k) for k in range(len(columns)))
        row_of = first_row + np.arange(len(columns))
        a_ub.append((row_of, columns, values))
        a_ub.append((row_of, np.full(len(columns), period), np.full(len(columns), -1.0)))
        return first_row + len(columns)

    count = add_bounded_rows(RowKind.BUSY, np.arange(nodes), flow.busy_s, 0)
    count = add_bounded_rows(RowKind.PAIR, nodes + np.arange(edges), flow.pair_s, count)
    if flow.headroom > 1:
        a_ub.append((count + np.arange(edges), np.full(edges, slack_column), np.full(edges, -1.0)))
        count = add_bounded_rows(
            RowKind.SPARE, nodes + np.arange(edges), flow.headroom * flow.pair_s, count
        )
    if flow.lines is not None:
        shared, row = np.unique(flow.lines.line, return_inverse=True)
        a_ub.append((count + row, nodes + flow.lines.edge, flow.lines.busy_s))
        row = count + np.arange(len(shared))
        a_ub.append((row, np.full(len(shared), period), np.full(len(shared), -1.0)))
        kinds += ((RowKind.LINE, k) for k in shared.tolist())
        count += len(shared)
    limited = np.flatnonzero(np.isfinite(flow.room))
    row_of = np.full(nodes, -1)
    row_of[limited] = count + np.arange(len(limited))
    # between F and B on a node, a microbatch is there or on a later node
    outgoing = np.flatnonzero(row_of[flow.source] >= 0)
    delay_s = flow.waiting * flow.onward_s(outgoing, remaining_s)
    a_ub.append((row_of[limited], limited, flow.compute_s[limited]))
    a_ub.append((row_of[flow.source[outgoing]], nodes + outgoing, delay_s))
    a_ub.append((row_of[limited], np.full(len(limited), period), -flow.room[limited]))
    kinds += ((RowKind.MEMORY, v) for v in limited.tolist())
    count += len(limited)
    a_eq: list[tuple[Ints, Ints, Floats]] = []
    b_eq = np.zeros(2 * nodes + 1)
    # flow conservation: the shares of a node's outgoing and incoming edges equal its own
    for side, row, end in (
        (flow.source, np.arange(nodes), ends[0]),
        (flow.target, nodes + np.arange(nodes), ends[1]),
    ):
        inner = np.flatnonzero(flow.stage != end)
        a_eq.append((row[inner], inner, np.full(len(inner), -1.0)))
        a_eq.append((row[side], nodes + np.arange(edges), np.ones(edges)))
    first_stage = np.flatnonzero(flow.stage == 0)
    a_eq.append((np.full(len(first_stage), 2 * nodes), first_stage, np.ones(len(first_stage))))
    b_eq[-1] = 1.0

    def matrix(parts: list[tuple[Ints, Ints, Floats]], height: int) -> Any:
        row, column, value = (np.concatenate([part[k] for part in parts]) for k in range(3))
        return coo_array((value, (row, column)), shape=(height, slack_column + 1)).tocsr()

    cost = np.concatenate(
        [flow.compute_s, flow.delay_s, [microbatches, flow.headroom_penalty * microbatches]]
    )
    return FlowLinearProgram(cost, matrix(a_ub, count), matrix(a_eq, 2 * nodes + 1), b_eq, kinds)


def _solve(flow: StageFlow, program: FlowLinearProgram) -> FlowRates:
    from scipy.optimize import LinearConstraint, milp

    nodes, period = len(flow.stage), len(flow.stage) + len(flow.source)
    # without integers `milp` calls HiGHS with less overhead than `linprog`
    solution = milp(
        program.cost,
        constraints=[
            LinearConstraint(program.a_ub, -np.inf, 0.0),
            LinearConstraint(program.a_eq, program.b_eq, program.b_eq),
        ],
    )
    if solution.status != 0:
        raise ProblemError(
            "no flow of microbatches fits the devices' memory; use more stages, smaller "
            "microbatches or larger devices"
        )
    node_share, edge_share = (
        np.maximum(solution.x[:nodes], 0),
        np.maximum(solution.x[nodes:period], 0),
    )
    delay_s = float(flow.compute_s @ node_share + flow.delay_s @ edge_share)
    return FlowRates(
        float(solution.x[period]), delay_s, node_share, edge_share, _remaining_s(flow, edge_share)
    )
