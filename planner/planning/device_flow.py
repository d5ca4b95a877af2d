"""Distributes a flow between device classes over pairs of devices.

Devices of a class always share its work evenly. Using all pairs minimises the load of each link;
using few pairs, consecutive microbatches follow the same devices and queue less. The simulator
decides which is faster.
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


class PairSpread(enum.StrEnum):
    """Which pairs of devices carry the flow between two classes.

    EVEN: all pairs, equally. FEW: the fewest that give every device the same part and keep each
    pair's load within the period. FEWEST: the first devices of a class send to the nearest class,
    the next ones to the second nearest. PAIRED, if all stages have the same number of devices: the
    k-th device sends to the k-th, with equal parts, as in straight pipelines.
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
    spread: PairSpread,
) -> tuple[Floats, list[Floats]]:
    """Fractions of the microbatches that start on each device, and that use each pair.

    Returns
    -------
    tuple[ndarray, list[ndarray]]
        ``float[devices of the first stage]``; per boundary, ``float[devices before, after]``.
    """
    if spread is PairSpread.PAIRED:
        count = len(node_of[0])
        return np.full(count, 1 / count), [np.eye(count) / count for _ in node_of[1:]]
    each = rates.node_share / nodes.devices
    starts = each[list(node_of[0])]
    return starts, [
        _boundary(np.array(group), np.array(next_group), each, nodes, flow, rates, spread)
        for group, next_group in pairwise(node_of)
    ]


def _boundary(
    nodes_out: Floats,
    nodes_in: Floats,
    each: Floats,
    nodes: FlowNodes,
    flow: StageFlow,
    rates: FlowRates,
    spread: PairSpread,
) -> Floats:
    """Fractions over the pairs of devices of two neighbouring stages."""
    part = np.zeros((len(nodes_out), len(nodes_in)))
    unsent, unreceived = each[nodes_out].copy(), each[nodes_in].copy()
    stage = flow.stage[nodes_out[0]]
    edges = np.flatnonzero((flow.stage[flow.source] == stage) & (rates.edge_share > TINY))
    for e in edges[np.argsort(flow.delay_s[edges], kind="stable")].tolist():
        u, v, amount = flow.source[e], flow.target[e], float(rates.edge_share[e])
        before, after = np.flatnonzero(nodes_out == u), np.flatnonzero(nodes_in == v)
        pairs = len(before) * len(after)
        most = rates.period_s / (flow.pair_s[e] * pairs) if flow.pair_s[e] > 0 else math.inf
        if spread is PairSpread.FEWEST:
            sent = _nearest(unsent[before], unreceived[after], amount, most)
        elif spread is PairSpread.FEW:
            sent = _few(len(before), len(after), amount, most)
        else:
            sent = np.full((len(before), len(after)), amount / pairs)
        part[np.ix_(before, after)] = sent
        unsent[before] = np.maximum(unsent[before] - sent.sum(axis=1), 0.0)
        unreceived[after] = np.maximum(unreceived[after] - sent.sum(axis=0), 0.0)
    return part


def _few(before: int, after: int, amount: float, most: float) -> Floats:
    """Equal parts per device; the pairing is rotated as often as the load of a pair requires."""
    turns = max(1, math.ceil(amount / max(before, after) / most - 1e-6))
    if turns >= min(before, after):
        return np.full((before, after), amount / (before * after))
    flat = _overlaps(np.full(before, amount / before), np.full(after, amount / after))
    step = max(1, after // before)
    turned = [np.roll(flat, k * step, axis=1) for k in range(turns)]
    return np.asarray(np.mean(turned, axis=0))


def _nearest(out: Floats, into: Floats, amount: float, most: float) -> Floats:
    """From the first devices with flow left to send, to the first that still need some."""
    if amount / max(len(out), len(into)) > most * (1 + 1e-6):
        whole = max(float(out.sum() * into.sum()), TINY)
        return np.outer(out, into) * (amount / whole)
    return _overlaps(_first(out, amount), _first(into, amount))


def _first(values: Floats, amount: float) -> Floats:
    """The first values, as far as they add up to ``amount``."""
    upto = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(np.diff(np.minimum(upto, amount)))


def _overlaps(rows: Floats, columns: Floats) -> Floats:
    """Overlap of every row's interval with every column's, both laid end to end."""
    row, column = (np.concatenate([[0.0], np.cumsum(side)]) for side in (rows, columns))
    begin = np.maximum(row[:-1, None], column[None, :-1])
    end = np.minimum(row[1:, None], column[None, 1:])
    return np.asarray(np.maximum(end - begin, 0.0))
