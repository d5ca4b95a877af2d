"""State of the compiled simulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.search.arrays import Bools, Floats, Floats2, Ints, Ints2

UPDATE, IDLE, AVERAGING = -1, -2, -3
"""Values of `DeviceState.current` other than an operation."""
ABSENT: Any = np.int64(-1)
"""An event without a slot, or a slot without an event; typed, see `event_queue.ROOT`."""


class RunOptions(NamedTuple):
    """Options of a run.

    Attributes
    ----------
    steps
        ``int[T]``: the schedule of every step.
    averages
        ``bool[T]``: whether a step ends with averaging.
    delayed
        Whether averaging overlaps with the next step, which cannot end before it.
    message_s
        Seconds between an operation's end and the moment its message is enqueued.
    cores
        Operations and updates that run at full speed at the same time; 0: no limit.
    queues
        False: every message gets its pair's full bandwidth.
    max_live
        ``int[N]``; empty: devices follow the planned order. Otherwise operations are dispatched
        dynamically, B before H before F and first come first served, with at most so many
        microbatches between their F and B on a device.
    recorded
        Number of steps, from the first, whose times are all recorded.
    """

    steps: Ints
    averages: Bools
    delayed: bool
    message_s: float
    cores: float
    queues: bool
    max_live: Ints
    recorded: int


class EventTimes(NamedTuple):
    """Times of events, in seconds; rows are steps.

    Attributes
    ----------
    step_end
        ``float[T]``: last update.
    begin, end
        ``float[recorded, O]``: operations.
    enqueued, send_begin, send_end, arrived
        ``float[recorded, O]``: messages, by the operation that sends them: when each joins its
        queue, becomes first in it, has been sent, arrives.
    ready, update_begin, update_end
        ``float[recorded, N]``: end of a device's last operation; begin and end of its update.
    round_begin, round_end
        ``float[recorded, G]``.
    chosen, num_done
        ``int[O]``, ``int[N]``: with dynamic dispatch, the operations that devices chose, laid out
        like ``order``, and how many each device chose.
    stuck
        ``int[1]``: a device that deadlocked, -1 if none.
    """

    step_end: Floats
    begin: Floats2
    end: Floats2
    enqueued: Floats2
    send_begin: Floats2
    send_end: Floats2
    arrived: Floats2
    ready: Floats2
    update_begin: Floats2
    update_end: Floats2
    round_begin: Floats2
    round_end: Floats2
    chosen: Ints
    num_done: Ints
    stuck: Ints


class FlowState(NamedTuple):
    """Message queues of the pairs, and the rates of their first messages.

    Attributes
    ----------
    head, tail
        ``int[P]``: first and last message of each queue, -1 when it is empty.
    next_message
        ``int[messages]``: the next message of the same queue.
    remaining_bytes, rate, updated_s
        ``float[P]``: unsent bytes of the first message at time ``updated_s``, and its bytes per
        second from then on.
    fair_rate
        ``float[P]``: max-min fair bytes per second; ``rate`` is rounded to 32 significant bits.
    queued_bytes
        ``float[P]``: bytes of the messages behind the first.
    active, num_active, active_index
        Active pairs of each resource: resource r's are ``active[first[r] : first[r] +
        num_active[r]]``; ``active_index[p, k]`` is where pair p is in the list of its k-th
        resource.
    demand
        ``float[R]``: bytes per second that a resource's active pairs could use in total.
    seen_pair, seen_resource, stamp
        Marks of one search for connected pairs: visited where equal to ``stamp[0]``.
    affected, bottlenecks
        Pairs whose rates are recomputed, and the bottlenecks that they share.
    residual, num_rising, fill_level
        ``[R]``: a resource's capacity not yet given to fixed pairs, the number of its rising pairs,
        and the level at which they fill it.
    enqueued_s
        ``float[messages]``: when each message joined its queue.
    changed
        ``int[1]``: 1 if a rate or a first message has changed since rounds were last updated.
    """

    head: Ints
    tail: Ints
    next_message: Ints
    remaining_bytes: Floats
    rate: Floats
    updated_s: Floats
    fair_rate: Floats
    queued_bytes: Floats
    active: Ints
    num_active: Ints
    demand: Floats
    active_index: Ints2
    seen_pair: Ints
    seen_resource: Ints
    stamp: Ints
    affected: Ints
    bottlenecks: Ints
    residual: Floats
    num_rising: Ints
    fill_level: Floats
    enqueued_s: Floats
    changed: Ints


class AveragingState(NamedTuple):
    """Averaging rounds that are sending.

    Attributes
    ----------
    running, num_running, running_index
        The running groups, ``running[: num_running[0]]``, and each group's index in that list.
    begin_s, nominal_s
        ``float[G]``: when the round began; its duration if no more messages are enqueued.
    progress_s, rate, updated_s
        ``float[G]``: how many of these seconds are done at time ``updated_s``, and the speed from
        then on.
    load_bytes
        Per entry of `AveragingRounds.resource_bytes`: the round's bytes plus those queued there
        when the round began.
    demand, num_rounds
        ``float[R]``, ``int[R]``: bytes per second that the running rounds would send over each
        resource in their nominal durations, and the number of rounds that use it.
    step
        ``int[G]``: the step that the round belongs to.
    norm_received, norm_sum_s
        ``int[T]``, ``float[T]``: number of parts of a step's norm that were sent, and when the last
        of them arrives.
    """

    running: Ints
    num_running: Ints
    running_index: Ints
    begin_s: Floats
    nominal_s: Floats
    progress_s: Floats
    rate: Floats
    updated_s: Floats
    load_bytes: Floats
    demand: Floats
    num_rounds: Ints
    step: Ints
    norm_received: Ints
    norm_sum_s: Floats


class EventQueue(NamedTuple):
    """A heap of events, some of which have a slot by which they are rescheduled.

    Attributes
    ----------
    time, number, event, slot
        Entries of the heap: time, push number, the caller's event code, and the slot or `ABSENT`.
    at
        ``int[slots]``: heap index of each slot's event, `ABSENT` if it has none.
    size, pushed
        ``int[1]``: number of events in the heap, and number of pushes so far.
    """

    time: Floats
    number: Ints
    event: Ints
    slot: Ints
    at: Ints
    size: Ints
    pushed: Ints

    @classmethod
    def of(cls, most: int, slots: int) -> EventQueue:
        """An empty queue for at most ``most`` events at a time."""
        # np.empty: memory pages that are never touched cost nothing
        number, event, slot = (np.empty(most, dtype=np.int64) for _ in range(3))
        at = np.full(slots, ABSENT, dtype=np.int64)
        size, pushed = (np.zeros(1, dtype=np.int64) for _ in range(2))
        return cls(np.empty(most), number, event, slot, at, size, pushed)


class DeviceState(NamedTuple):
    """Progress of every device.

    Attributes
    ----------
    step, position
        ``int[N]``: its step, and the number of operations it has begun in that step.
    current
        ``int[N]``: the running operation, or `UPDATE`, `IDLE` or `AVERAGING`.
    round
        ``int[N]``: rounds finished in this step, or in ``delayed_step``.
    delayed_step, in_round
        ``int[N]``, ``bool[N]``: the step whose averaging overlaps with operations, -1 if none, and
        whether the device has joined its next round. With delayed averaging, a device that has
        updated is `AVERAGING` until the averaging of the previous step is over.
    live
        ``int[N]``: microbatches between their F and B on the device.
    ready_head, ready_tail
        ``int[N, 3]``: first and last ready operation by kind; with dynamic dispatch only.
    ready_next
        ``int[messages]``: the next operation of the same ready list.
    num_ready
        ``int[G]``: number of members that are ready for the group's round.
    inputs_ready
        ``bool[messages]``: whether the operation's input is on its device.
    dirty, is_dirty
        List and flags of the devices that had an event at the current time.
    """

    step: Ints
    position: Ints
    current: Ints
    round: Ints
    delayed_step: Ints
    in_round: Bools
    live: Ints
    ready_head: Ints2
    ready_tail: Ints2
    ready_next: Ints
    num_ready: Ints
    inputs_ready: Bools
    dirty: Ints
    is_dirty: Bools


class ProcessorState(NamedTuple):
    """Operations that share processors at equal rates.

    Attributes
    ----------
    until, number, event
        ``[N]``, of which the first ``size[0]`` are used: the value of ``state[0]`` at which the
        operation ends, the order in which operations began, and the event of the end.
    size
        ``int[1]``: number of operations.
    state
        ``float[2]``: processor seconds that each operation has received so far, and the time.
    """

    until: Floats
    number: Ints
    event: Ints
    size: Ints
    state: Floats
