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
from planner.planning.joint.device_classes import Floats
from planner.planning.joint.layout_flow import FlowNodes

MIN_SHARE = 1e-12


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
    share_of_device = rates.node_share / nodes.devices
    starts = share_of_device[list(node_of[0])]
    return starts, [
        _boundary(
            np.array(group), np.array(next_group), share_of_device, nodes, flow, rates, spread
        )
        for group, next_group in pairwise(node_of)
    ]


def _boundary(
    nodes_out: Floats,
    nodes_in: Floats,
    share_of_device: Floats,
    nodes: FlowNodes,
    flow: StageFlow,
    rates: FlowRates,
    spread: PairSpread,
) -> Floats:
    """Fractions over the pairs of devices of two neighbouring stages."""
    shares = np.zeros((len(nodes_out), len(nodes_in)))
    unsent, unreceived = share_of_device[nodes_out].copy(), share_of_device[nodes_in].copy()
    stage = flow.stage[nodes_out[0]]
    edges = np.flatnonzero((flow.stage[flow.source] == stage) & (rates.edge_share > MIN_SHARE))
    for e in edges[np.argsort(flow.delay_s[edges], kind="stable")].tolist():
        u, v, share = flow.source[e], flow.target[e], float(rates.edge_share[e])
        senders, receivers = np.flatnonzero(nodes_out == u), np.flatnonzero(nodes_in == v)
        pairs = len(senders) * len(receivers)
        max_share = rates.period_s / (flow.pair_s[e] * pairs) if flow.pair_s[e] > 0 else math.inf
        if spread is PairSpread.FEWEST:
            sent = _nearest(unsent[senders], unreceived[receivers], share, max_share)
        elif spread is PairSpread.FEW:
            sent = _few(len(senders), len(receivers), share, max_share)
        else:
            sent = np.full((len(senders), len(receivers)), share / pairs)
        shares[np.ix_(senders, receivers)] = sent
        unsent[senders] = np.maximum(unsent[senders] - sent.sum(axis=1), 0.0)
        unreceived[receivers] = np.maximum(unreceived[receivers] - sent.sum(axis=0), 0.0)
    return shares


def _few(before: int, after: int, share: float, max_share: float) -> Floats:
    """Equal parts per device; the pairing is rotated as often as the load of a pair requires."""
    rotations = max(1, math.ceil(share / max(before, after) / max_share - 1e-6))
    if rotations >= min(before, after):
        return np.full((before, after), share / (before * after))
    overlap = _overlaps(np.full(before, share / before), np.full(after, share / after))
    step = max(1, after // before)
    rotated = [np.roll(overlap, k * step, axis=1) for k in range(rotations)]
    return np.asarray(np.mean(rotated, axis=0))


def _nearest(unsent: Floats, unreceived: Floats, share: float, max_share: float) -> Floats:
    """From the first devices with flow left to send, to the first that still need some."""
    if share / max(len(unsent), len(unreceived)) > max_share * (1 + 1e-6):
        product = max(float(unsent.sum() * unreceived.sum()), MIN_SHARE)
        return np.outer(unsent, unreceived) * (share / product)
    return _overlaps(_take_first(unsent, share), _take_first(unreceived, share))


def _take_first(values: Floats, total: float) -> Floats:
    """The first values, as far as they add up to ``total``."""
    cumulative = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(np.diff(np.minimum(cumulative, total)))


def _overlaps(rows: Floats, columns: Floats) -> Floats:
    """Overlap of every row's interval with every column's, both laid end to end."""
    row_ends, column_ends = (
        np.concatenate([[0.0], np.cumsum(lengths)]) for lengths in (rows, columns)
    )
    begin = np.maximum(row_ends[:-1, None], column_ends[None, :-1])
    end = np.minimum(row_ends[1:, None], column_ends[None, 1:])
    return np.asarray(np.maximum(end - begin, 0.0))
