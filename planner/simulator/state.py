"""State of the compiled simulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.search.arrays import Bools, Floats, Floats2, Ints, Ints2

UPDATE, IDLE, AVERAGING = -1, -2, -3
"""What a device does where it does no operation."""
ABSENT: Any = np.int64(-1)
"""Of an event without a slot, and of a slot without an event; no literal (see `event_queue`)."""


class RunOptions(NamedTuple):
    """How the simulator runs.

    Attributes
    ----------
    steps
        ``int[T]``: the schedule of every step.
    averages
        ``bool[T]``: whether a step ends with averaging.
    delayed
        Whether averaging overlaps with the next step, which cannot end before it.
    message_s
        Seconds between an operation's end and its message's hand-over.
    cores
        Operations and updates at full speed at the same time; 0: no limit.
    queues
        False: every message has its pair's whole bandwidth.
    room
        ``int[N]``: empty: devices work in the planned order. Else they choose: B before H before F,
        first come first served, with at most so many microbatches between F and B.
    recorded
        Steps, from the first, of which all times are kept.
    """

    steps: Ints
    averages: Bools
    delayed: bool
    message_s: float
    cores: float
    queues: bool
    room: Ints
    recorded: int


class EventTimes(NamedTuple):
    """What happened when, in seconds; rows are steps.

    Attributes
    ----------
    step_end
        ``float[T]``: last update.
    begin, end
        ``float[recorded, O]``: operations.
    handed, leaves, left, arrived
        ``float[recorded, O]``: messages, by the operation that sends them: they join the queue, are
        first in it, have left it, are there.
    ready, update_begin, update_end
        ``float[recorded, N]``: a device's last operation is done; its update.
    round_begin, round_end
        ``float[recorded, G]``.
    chosen, done
        ``int[O]``, ``int[N]``: with free choice, what devices did, filled like ``order``.
    stuck
        ``int[1]``: a device that cannot go on, -1 if none.
    """

    step_end: Floats
    begin: Floats2
    end: Floats2
    handed: Floats2
    leaves: Floats2
    left: Floats2
    arrived: Floats2
    ready: Floats2
    update_begin: Floats2
    update_end: Floats2
    round_begin: Floats2
    round_end: Floats2
    chosen: Ints
    done: Ints
    stuck: Ints


class FlowState(NamedTuple):
    """Queues of the pairs and the rates of what is first in them.

    Attributes
    ----------
    head, tail
        ``int[P]``: first and last message of each queue, -1 when it is empty.
    follow
        ``int[messages]``: the next in the same queue.
    to_go, rate, since
        ``float[P]``: bytes of the first message at ``since``, and bytes per second from then.
    fair
        ``float[P]``: max-min fair bytes per second; ``rate`` is that with 32 binary places.
    behind
        ``float[P]``: bytes of the messages after the first.
    active, users, place
        Active pairs of each resource: resource r's are ``active[first[r] : first[r] + users[r]]``;
        ``place[p, k]`` is where pair p is in the list of its k-th resource.
    wanted
        ``float[R]``: bytes per second that a resource's active pairs could use together.
    seen_pair, seen_resource, stamp
        For one look at connected pairs.
    found, full
        Pairs and resources of that look.
    room, load, level
        ``[R]``: what is left of a resource, for how many pairs, and for each of them.
    handed
        ``float[messages]``: when each joined its queue.
    moved
        ``int[1]``: not 0 if a rate or a first message has changed since rounds were looked at.
    """

    head: Ints
    tail: Ints
    follow: Ints
    to_go: Floats
    rate: Floats
    since: Floats
    fair: Floats
    behind: Floats
    active: Ints
    users: Ints
    wanted: Floats
    place: Ints2
    seen_pair: Ints
    seen_resource: Ints
    stamp: Ints
    found: Ints
    full: Ints
    room: Floats
    load: Ints
    level: Floats
    handed: Floats
    moved: Ints


class AveragingState(NamedTuple):
    """Rounds that are sending.

    Attributes
    ----------
    running, groups, place
        The groups, ``running[: groups[0]]``, and where each is in that list.
    begun, alone_s
        ``float[G]``: when the round began; seconds that its bytes take if no more messages come.
    done, rate, since
        ``float[G]``: of these seconds, how many are over at ``since``, and how fast they go from
        then.
    load
        Per entry of ``Rounds.need``, its bytes and what was queued there at the begin.
    asked, users
        ``float[R]``, ``int[R]``: bytes per second that the running rounds would send over each
        resource if they had it for themselves, and how many use it.
    step
        ``int[G]``: the step it belongs to.
    told, added_s
        ``int[T]``, ``float[T]``: how many parts of a step's norm were told, and when the last of
        them is there.
    """

    running: Ints
    groups: Ints
    place: Ints
    begun: Floats
    alone_s: Floats
    done: Floats
    rate: Floats
    since: Floats
    load: Floats
    asked: Floats
    users: Ints
    step: Ints
    told: Ints
    added_s: Floats


class EventQueue(NamedTuple):
    """A heap of events, and where in it the forecasts are.

    Attributes
    ----------
    time, number, event, slot
        Entries of the heap: when, in which order they were pushed, what the caller knows them by,
        and the slot of a forecast, else `ABSENT`.
    at
        ``int[slots]``: where in the heap each forecast is, `ABSENT` if nowhere.
    size, pushed
        ``int[1]``: how many events there are, and how many were pushed.
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
        """An empty queue for at most so many events at a time."""
        # pages that are never touched cost nothing
        number, event, slot = (np.empty(most, dtype=np.int64) for _ in range(3))
        at = np.full(slots, ABSENT, dtype=np.int64)
        size, pushed = (np.zeros(1, dtype=np.int64) for _ in range(2))
        return cls(np.empty(most), number, event, slot, at, size, pushed)


class DeviceState(NamedTuple):
    """Where every device is.

    Attributes
    ----------
    step, place
        ``int[N]``: its step, and how many of its operations it has begun there.
    doing
        ``int[N]``: the operation at work, `UPDATE`, or `IDLE`, `AVERAGING`.
    round
        ``int[N]``: rounds it has behind it in this step, or in what it averages beside.
    beside, joined
        ``int[N]``, ``bool[N]``: the step whose averaging goes on beside operations, -1 if none, and
        whether the device is in its next round. At its end such a step is `AVERAGING` until none
        goes on.
    live
        ``int[N]``: microbatches between their F and B here.
    waiting, last
        ``int[N, 3]``: first and last operation that could begin, by kind; with free choice only.
    behind
        ``int[messages]``: the operation that could begin next after this one.
    present
        ``int[G]``: members of a group that are ready for its round.
    there
        ``bool[messages]``: what the operation waits for is there.
    touched, mark
        Devices that something happened to at this moment.
    """

    step: Ints
    place: Ints
    doing: Ints
    round: Ints
    beside: Ints
    joined: Bools
    live: Ints
    waiting: Ints2
    last: Ints2
    behind: Ints
    present: Ints
    there: Bools
    touched: Ints
    mark: Bools


class ProcessorState(NamedTuple):
    """Operations that share processors, all at the same rate.

    Attributes
    ----------
    until, number, event
        ``[N]``, of which the first ``size[0]``: work done by each at an operation's end, the order
        in which they began, and the event of that end.
    size
        ``int[1]``: how many there are.
    state
        ``float[2]``: work that each has done so far, and when.
    """

    until: Floats
    number: Ints
    event: Ints
    size: Ints
    state: Floats
