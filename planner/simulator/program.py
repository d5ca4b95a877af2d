"""A plan as arrays of operations, messages and averaging rounds for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulator.averaging_rounds import AveragingRounds, compile_rounds
from planner.simulator.pairs import Pairs, pairs_of
from planner.simulator.resources import NONE, Floats, Ints, LinkResources
from planner.training_plan.averaging_group import within
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.workload.compute_times import ComputeTimes
from planner.workload.workload import Workload

OPERATION_KINDS = ("B", "H", "F")
"""Kinds of operations by number, the most urgent first."""


class OperationTable(NamedTuple):
    """Operations of all schedules, concatenated.

    Attributes
    ----------
    device, kind, microbatch
        ``int[O]``; kinds as indices into `OPERATION_KINDS`.
    seconds
        ``float[O]``.
    successor
        ``int[O]``: the microbatch's next operation, -1 for its last.
    pair
        ``int[O]``: the pair over which the result is sent to the successor; -1: same device.
    message_bytes
        ``float[O]``: bytes of the message.
    is_first
        ``bool[O]``: whether it is the first of its microbatch.
    order
        ``int[O]``: operations by schedule and device, in the planned order.
    order_ptr
        ``int[K * N + 1]``: ``order_ptr[k * N + d]`` is where schedule k's operations on device d
        begin in ``order``.
    update_s
        ``float[N]``.
    """

    device: Ints
    kind: Ints
    microbatch: Ints
    seconds: Floats
    successor: Ints
    pair: Ints
    message_bytes: Floats
    is_first: NDArray[np.bool_]
    order: Ints
    order_ptr: Ints
    update_s: Floats


class Program(NamedTuple):
    """A plan compiled to arrays.

    Attributes
    ----------
    pairs, operations
        Messages' pairs, and operations.
    rounds
        Averaging rounds of a step in which all replicas average. With two-frequency averaging,
        those of every step come before the others.
    within
        Averaging rounds of the other steps; empty without two-frequency averaging.
    """

    pairs: Pairs
    operations: OperationTable
    rounds: AveragingRounds
    within: AveragingRounds


def compile_plan(plan: TrainingPlan, links: LinkResources, workload: Workload) -> Program:
    """Compile a plan to arrays on given links."""
    sent = message_bytes(plan, workload)
    pairs, operations = compile_schedules(plan.schedules, plan.compute_times, sent, links)
    vectors = (plan.vector_bytes(workload), plan.codec, links, pairs)
    rounds = compile_rounds(
        plan.averaging,
        *vectors,
        plan.norm_devices,
        plan.norm_reporters,
        updates_shards=plan.shards_optimizer,
    )
    return Program(
        pairs, operations, rounds, compile_rounds(tuple(map(within, plan.averaging)), *vectors)
    )


def message_bytes(plan: TrainingPlan, workload: Workload) -> Floats:
    """Bytes of a microbatch's activations that each device's stage outputs.

    Returns
    -------
    ndarray
        ``float[N]``; 0 where a device holds no stage.
    """
    sent = np.zeros(len(plan.cluster))
    sizes = [workload.stage(*part).output_bytes for part in plan.stage_layers]
    for d, j in plan.stage_of.items():
        sent[d] = sizes[j] * workload.microbatch_samples
    return sent


def compile_schedules(
    schedules: Sequence[Schedule], times: ComputeTimes, sent: Floats, links: LinkResources
) -> tuple[Pairs, OperationTable]:
    """Compile schedules to arrays.

    Parameters
    ----------
    sent
        ``float[N]``: bytes of a microbatch's activations after each device's stage.

    Returns
    -------
    tuple[Pairs, OperationTable]
        Pairs that carry messages, and operations.
    """
    n = len(links)
    cost = times.operation_s
    seconds = [
        np.asarray(column) + cost for column in (times.backward_s, times.head_s, times.forward_s)
    ]
    parts = [_chains(s) for s in schedules]
    orders = [_orders(s, p, n) for s, p in zip(schedules, parts, strict=True)]
    kind = np.concatenate([p.kind for p in parts])
    device = np.concatenate([p.device for p in parts])
    starts = np.cumsum([0, *(len(p.kind) for p in parts)])
    after = np.concatenate(
        [
            np.where(p.last, NONE, np.arange(1, len(p.kind) + 1) + at)
            for p, at in zip(parts, starts, strict=False)
        ]
    )
    target = device[np.maximum(after, 0)]
    travels = (after != NONE) & (target != device)
    codes, index = np.unique((device * n + target)[travels], return_inverse=True)
    pair = np.full(len(kind), NONE)
    pair[travels] = index
    # a gradient has the size of the activations that its receiver sent
    owner = np.where(kind[np.maximum(after, 0)] == OPERATION_KINDS.index("B"), target, device)
    operations = OperationTable(
        device,
        kind,
        np.concatenate([p.microbatch for p in parts]),
        np.select([kind == k for k in range(3)], [column[device] for column in seconds]),
        after,
        pair,
        np.where(travels, sent[owner], 0.0),
        np.concatenate([p.begins for p in parts]),
        np.concatenate([o.ops + at for o, at in zip(orders, starts, strict=False)]),
        np.concatenate([[0], np.cumsum(np.concatenate([o.counts for o in orders]))]),
        np.asarray(times.update_s, dtype=np.float64),
    )
    return pairs_of(codes // n, codes % n, links), operations


class _Chains(NamedTuple):
    """Operations of one schedule by microbatch, in precedence order."""

    device: Ints
    kind: Ints
    microbatch: Ints
    begins: NDArray[np.bool_]
    last: NDArray[np.bool_]


def _chains(schedule: Schedule) -> _Chains:
    lengths = np.array([len(path) for path in schedule.paths], dtype=np.int64)
    flat = [d for b, path in enumerate(schedule.paths) for d in _visits(schedule, b, path)]
    total = 2 * lengths + 1
    ends = np.cumsum(total)
    microbatch = np.repeat(np.arange(len(lengths)), total)
    place = np.arange(int(total.sum())) - np.repeat(ends - total, total)
    length = lengths[microbatch]
    kind = np.select(
        [place < length, place == length],
        [OPERATION_KINDS.index("F"), OPERATION_KINDS.index("H")],
        0,
    )
    return _Chains(
        np.array(flat, dtype=np.int64), kind, microbatch, place == 0, place == 2 * length
    )


def _visits(schedule: Schedule, b: int, path: tuple[int, ...]) -> list[int]:
    return [*path, schedule.head_device(b), *reversed(path)]


class _Orders(NamedTuple):
    """Operations of one schedule by device, as indices into `_Chains`, and their counts."""

    ops: Ints
    counts: Ints


def _orders(schedule: Schedule, chains: _Chains, n: int) -> _Orders:
    """Group operations by device: in the planned order, or in any order if there is none."""
    if not schedule.order:
        return _Orders(
            np.argsort(chains.device, kind="stable"), np.bincount(chains.device, minlength=n)
        )
    counts = np.array([len(row) for row in schedule.order], dtype=np.int64)
    rows = list(chain.from_iterable(schedule.order))
    code = {kind: k for k, kind in enumerate(OPERATION_KINDS)}
    kind = np.array([code[kind] for kind, _ in rows], dtype=np.int64)
    microbatch = np.array([b for _, b in rows], dtype=np.int64)
    device = np.repeat(np.arange(len(counts)), counts)
    # a path visits no device twice, so (microbatch, kind, device) identifies an operation
    keys = (microbatch * len(OPERATION_KINDS) + kind) * n + device
    known = (chains.microbatch * len(OPERATION_KINDS) + chains.kind) * n + chains.device
    by_name = np.argsort(known)
    return _Orders(by_name[np.searchsorted(known, keys, sorter=by_name)], counts)
