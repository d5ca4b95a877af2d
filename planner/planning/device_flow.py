"""From a flow between device classes to a flow between devices, over many pairs or few.

Alike devices of a place share its work evenly in any case. Over all pairs each link carries least;
over few, microbatches follow one another along the same devices and wait for each other less. Which
of them is faster only the simulator can say.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.lp.flow import FlowRates, StageFlow
from planner.planning.device_classes import Floats
from planner.planning.layout_flow import FlowNodes

TINY = 1e-12


class Spread(enum.StrEnum):
    """Over which pairs of two places' devices a flow goes.

    EVEN: over all of them. FEW: over as few as keep every device's part the same and no pair busier
    than the period. FEWEST: each place's first devices give to the nearest place, the next to the
    next. PAIRED, where all stages have as many devices: the k-th gives to the k-th, and all get the
    same, as straight pipelines do.
    """

    EVEN = "even"
    FEW = "few"
    FEWEST = "fewest"
    PAIRED = "paired"


def device_flow(
    node_of: Sequence[Sequence[int]],
    nodes: FlowNodes,
    flow: StageFlow,
    rates: FlowRates,
    spread: Spread,
) -> tuple[Floats, list[Floats]]:
    """Parts of the microbatches that begin on each device, and that go over each pair.

    Returns
    -------
    tuple[ndarray, list[ndarray]]
        ``float[devices of the first stage]``; per boundary, ``float[devices before, after]``.
    """
    if spread is Spread.PAIRED:
        count = len(node_of[0])
        return np.full(count, 1 / count), [np.eye(count) / count for _ in node_of[1:]]
    each = rates.node_share / nodes.devices
    starts = each[list(node_of[0])]
    return starts, [
        _boundary(np.array(here), np.array(there), each, nodes, flow, rates, spread)
        for here, there in pairwise(node_of)
    ]


def _boundary(
    here: Floats,
    there: Floats,
    each: Floats,
    nodes: FlowNodes,
    flow: StageFlow,
    rates: FlowRates,
    spread: Spread,
) -> Floats:
    """Parts over the pairs of two neighbouring stages' devices."""
    part = np.zeros((len(here), len(there)))
    out, into = each[here].copy(), each[there].copy()
    stage = flow.stage[here[0]]
    edges = np.flatnonzero((flow.stage[flow.source] == stage) & (rates.edge_share > TINY))
    for e in edges[np.argsort(flow.delay_s[edges], kind="stable")].tolist():
        u, v, amount = flow.source[e], flow.target[e], float(rates.edge_share[e])
        before, after = np.flatnonzero(here == u), np.flatnonzero(there == v)
        pairs = len(before) * len(after)
        most = rates.period_s / (flow.pair_s[e] * pairs) if flow.pair_s[e] > 0 else math.inf
        if spread is Spread.FEWEST:
            sent = _nearest(out[before], into[after], amount, most)
        elif spread is Spread.FEW:
            sent = _few(len(before), len(after), amount, most)
        else:
            sent = np.full((len(before), len(after)), amount / pairs)
        part[np.ix_(before, after)] = sent
        out[before] = np.maximum(out[before] - sent.sum(axis=1), 0.0)
        into[after] = np.maximum(into[after] - sent.sum(axis=0), 0.0)
    return part


def _few(before: int, after: int, amount: float, most: float) -> Floats:
    """The same from and to each; turned against each other as often as pairs need to carry it."""
    turns = max(1, math.ceil(amount / max(before, after) / most - 1e-6))
    if turns >= min(before, after):
        return np.full((before, after), amount / (before * after))
    flat = _overlaps(np.full(before, amount / before), np.full(after, amount / after))
    step = max(1, after // before)
    turned = [np.roll(flat, k * step, axis=1) for k in range(turns)]
    return np.asarray(np.mean(turned, axis=0))


def _nearest(out: Floats, into: Floats, amount: float, most: float) -> Floats:
    """What the first devices still have to give, to the first that still have to get."""
    if amount / max(len(out), len(into)) > most * (1 + 1e-6):
        whole = max(float(out.sum() * into.sum()), TINY)
        return np.outer(out, into) * (amount / whole)
    return _overlaps(_first(out, amount), _first(into, amount))


def _first(values: Floats, amount: float) -> Floats:
    """The parts of the first values that make up an amount."""
    upto = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(np.diff(np.minimum(upto, amount)))


def _overlaps(rows: Floats, columns: Floats) -> Floats:
    """How much of each row's stretch lies on each column's when both are laid end to end."""
    row, column = (np.concatenate([[0.0], np.cumsum(side)]) for side in (rows, columns))
    begin = np.maximum(row[:-1, None], column[None, :-1])
    end = np.minimum(row[1:, None], column[None, 1:])
    return np.asarray(np.maximum(end - begin, 0.0))
