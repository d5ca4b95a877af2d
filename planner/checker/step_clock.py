"""What a plan's steps take, worked out again in plain Python from the clock's definition.

A device does one operation at a time in the plan's order. Messages of an ordered pair leave one
after the other; the pairs that send share uploads, downloads and sites' lines max-min fair. A round
of averaging begins with its last member and takes its fullest resource's seconds, with what the
pipeline has queued there, and the longest latency there and back; messages that come later keep
their rates, and it slows down for them. Steps follow without a barrier.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.checker.fair_rates import EQUAL, fair_rates
from planner.checker.plan_network import mean_link
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import AveragingGroup, TrainingPlan

Pair = tuple[int, int]
Line = tuple[str, int | str]
"""A shared resource: ``("up", device)``, ``("down", device)``, or a site's."""
OpKey = tuple[int, str, int, int]
"""``(step, kind, microbatch, device)``."""


class Times(NamedTuple):
    """What the definition gives: means over the cycle from rest, and the third pass's step."""

    pipeline_s: float
    averaging_s: float
    step_s: float


def clock_times(plan: TrainingPlan) -> Times | None:
    """Predicted times of a plan; None where devices wait for each other.

    Parameters
    ----------
    plan
        What is judged.

    Returns
    -------
    Times or None
        In seconds.
    """
    alone = {k: _Steps(plan, [k], True).run() for k in set(plan.cycle)}
    several = [*plan.cycle, *plan.cycle, *plan.cycle, plan.cycle[0]]
    chained = _Steps(plan, several, True).run()
    if chained is None or any(one is None for one in alone.values()):
        return None
    runs = [alone[k] for k in plan.cycle]
    step, every = chained.third_pass_s(), plan.sync.every_steps
    if every > 1:
        rare = _Steps(plan, several, False).run()
        assert rare is not None
        step = (step + (every - 1) * rare.third_pass_s()) / every
    return Times(
        math.fsum(one.last_operation_s for one in runs if one) / len(runs),
        math.fsum(one.longest_averaging_s() for one in runs if one) / len(runs),
        step,
    )


def paths_clock_s(plan: TrainingPlan) -> float | None:
    """Mean makespan over the cycle as the path solver counts; None where devices wait in a circle.

    Pairs queue and share nothing; a transfer is the mean of both directions, of the largest layer
    output whatever is sent.

    Parameters
    ----------
    plan
        What is judged.

    Returns
    -------
    float or None
        Seconds.
    """
    n, w = len(plan.cluster), plan.workload
    away, rate = np.zeros((n, n)), np.ones((n, n))
    for i in range(n):
        for j in range(n):
            if i != j:
                away[i, j], rate[i, j] = mean_link(plan, i, j)
    wide = float(rate.sum())
    cluster = Cluster(
        Network(away, rate), Devices(plan.cluster.flops, plan.cluster.memory_bytes, wide, wide)
    )
    largest = max(layer.output_bytes for layer in w.layers)
    alike = w.replace(layers=tuple(replace(layer, output_bytes=largest) for layer in w.layers))
    times = replace(plan.compute_times, operation_s=0.0, message_s=0.0)
    changed = plan.replace(cluster=cluster, workload=alike, compute_times=times)
    spans: dict[int, float] = {}
    for k in set(plan.cycle):
        run = _Steps(changed, [k], False).run()
        if run is None:
            return None
        spans[k] = run.last_operation_s
    return math.fsum(spans[k] for k in plan.cycle) / len(plan.cycle)


class _Sending:
    """The queue of an ordered pair; its first message is on its way."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[float, OpKey, float]] = deque()
        self.left = 0.0
        self.rate = 0.0
        self.since = 0.0
        self.forecast = 0

    def unsent(self, now: float) -> float:
        """Bytes that are still here."""
        rest = max(self.left - self.rate * (now - self.since), 0.0)
        return rest + math.fsum(size for size, _, _ in list(self.waiting)[1:])


class _Round:
    """A round that is sending: seconds that it would take alone, and what its lines carry."""

    def __init__(self, begin: float, alone: float, back: float, load: dict[Line, float]) -> None:
        self.begin, self.to_go, self.back, self.alone, self.load = begin, alone, back, alone, load
        self.pace, self.since, self.forecast = 1.0, begin, 0


class _Steps:
    """Some steps from rest."""

    def __init__(self, plan: TrainingPlan, steps: list[int], averages: bool) -> None:
        self.plan, self.steps, self.averages = plan, steps, averages
        self.cluster, n = plan.cluster, len(plan.cluster)
        self.rate = plan.cluster.network.bandwidth_bytes_per_s.tolist()
        self.latency = plan.cluster.network.latency_s.tolist()
        self.capacity = self._capacities()
        self.known_lines: dict[Pair, list[Line]] = {}
        self.known_most: dict[Pair, float] = {}
        self.places = [self._chains(k) for k in range(len(plan.schedules))]
        self.sent = self._message_bytes()
        self.events: list[tuple[float, int, Callable[..., Iterable[int]], tuple[object, ...]]] = []
        self.counter = 0
        self.now = 0.0
        self.there: set[OpKey] = set()
        self.pairs: dict[Pair, _Sending] = {}
        self.users: dict[Line, dict[Pair, None]] = {line: {} for line in self.capacity}
        self.wanted = dict.fromkeys(self.capacity, 0.0)
        self.step, self.place, self.round = [0] * n, [0] * n, [0] * n
        self.busy = [False] * n
        self.rounds_of: list[list[int]] = [[] for _ in range(n)]
        self.groups: list[tuple[int, int, AveragingGroup]] = []
        for stage, rounds in enumerate(plan.averaging):
            for r, groups in enumerate(rounds):
                for group in groups:
                    for d in group.members:
                        self.rounds_of[d].append(len(self.groups))
                    self.groups.append((stage, r, group))
        self.waiting_in: list[list[int]] = [[] for _ in self.groups]
        self.step_ends: dict[int, float] = {}
        self.last_operation_s = 0.0
        self.round_times: list[tuple[int, int, float, float]] = []
        self.sending: dict[int, _Round] = {}

    def _capacities(self) -> dict[Line, float]:
        cluster, n = self.cluster, len(self.cluster)
        others = [[e for e in range(n) if e != d] for d in range(n)]
        up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
        found: dict[Line, float] = {}
        for d in range(n):
            fastest_out = max((self.rate[d][e] for e in others[d]), default=math.inf)
            fastest_in = max((self.rate[e][d] for e in others[d]), default=math.inf)
            found["up", d] = fastest_out if up is None else float(up[d])
            found["down", d] = fastest_in if down is None else float(down[d])
        for site, limit in (cluster.devices.site_upload_bytes_per_s or {}).items():
            found["site up", site] = limit
        for site, limit in (cluster.devices.site_download_bytes_per_s or {}).items():
            found["site down", site] = limit
        return found

    def lines(self, pair: Pair) -> list[Line]:
        """What a pair shares with others."""
        if pair not in self.known_lines:
            self.known_lines[pair] = self._lines(pair)
        return self.known_lines[pair]

    def all_lines(self, pair: Pair) -> list[Line | Pair]:
        """The pair itself, and what it shares."""
        return [pair, *self.lines(pair)]

    def _lines(self, pair: Pair) -> list[Line]:
        i, j = pair
        found: list[Line] = [("up", i), ("down", j)]
        sites = self.cluster.devices.sites
        if sites is not None and sites[i] != sites[j]:
            found += [("site up", sites[i]), ("site down", sites[j])]
        return [line for line in found if line in self.capacity]

    def _message_bytes(self) -> dict[int, float]:
        w = self.plan.workload
        return {
            d: w.layers[self.plan.stage_layers[j][1] - 1].output_bytes * w.microbatch_samples
            for d, j in self.plan.stage_of.items()
        }

    def _chains(self, k: int) -> dict[tuple[str, int, int], tuple[str, int] | None]:
        """What follows each operation ``(kind, microbatch, device)``."""
        s = self.plan.schedules[k]
        follows: dict[tuple[str, int, int], tuple[str, int] | None] = {}
        for b, path in enumerate(s.paths):
            head = path[-1] if s.head is Head.LAST else path[0]
            chain = [("F", d) for d in path] + [("H", head)] + [("B", d) for d in path[::-1]]
            for (kind, d), after in zip(chain, [*chain[1:], None], strict=True):
                follows[kind, b, d] = after
        return follows

    def at(self, time: float, do: Callable[..., Iterable[int]], *what: object) -> None:
        """Something will happen; it returns the devices that it may set going."""
        self.counter += 1
        heapq.heappush(self.events, (time, self.counter, do, what))

    def run(self) -> _Steps | None:
        """Until all is done; None where devices wait for each other."""
        for t, k in enumerate(self.steps):
            for b, path in enumerate(self.plan.schedules[k].paths):
                self.there.add((t, "F", b, path[0]))
        for d in range(len(self.step)):
            self.go_on(d)
        while self.events:
            self.now = self.events[0][0]
            stirred: dict[int, None] = {}
            while self.events and self.events[0][0] == self.now:
                _, _, do, what = heapq.heappop(self.events)
                stirred |= dict.fromkeys(do(*what))
            self.renew_rounds()
            for d in stirred:
                self.go_on(d)
        return self if all(t == len(self.steps) for t in self.step) else None

    def go_on(self, d: int) -> None:
        """What a free device does next, if it can."""
        times = self.plan.compute_times
        while not self.busy[d] and self.step[d] < len(self.steps):
            t = self.step[d]
            order = self.plan.schedules[self.steps[t]].order[d]
            if self.place[d] < len(order):
                kind, b = order[self.place[d]]
                if (t, kind, b, d) not in self.there:
                    return
                seconds = {"F": times.forward_s, "H": times.head_s, "B": times.backward_s}[kind][d]
                self.place[d] += 1
                self.busy[d] = True
                self.at(self.now + (seconds + times.operation_s), self.computed, (t, kind, b, d))
            elif self.averages and self.round[d] < len(self.rounds_of[d]):
                g = self.rounds_of[d][self.round[d]]
                self.waiting_in[g].append(d)
                self.busy[d] = True
                if len(self.waiting_in[g]) == len(self.groups[g][2].members):
                    self.begin_round(g)
            elif times.update_s[d] > 0:
                self.busy[d] = True
                self.at(self.now + times.update_s[d], self.updated, d)
            else:
                self.end_step(d)

    def computed(self, op: OpKey) -> Iterable[int]:
        """The result stays, or joins its pair's queue."""
        t, kind, b, d = op
        self.busy[d] = False
        self.last_operation_s = max(self.last_operation_s, self.now)
        after = self.places[self.steps[t]][kind, b, d]
        if after is not None:
            next_kind, e = after
            key = (t, next_kind, b, e)
            if e == d:
                self.there.add(key)
            else:
                size = self.sent[e if next_kind == "B" else d]
                wait = self.plan.compute_times.message_s
                if wait > 0:
                    self.at(self.now + wait, self.queued, (d, e), size, key)
                else:
                    self.queued((d, e), size, key)
        return (d,)

    def queued(self, pair: Pair, size: float, key: OpKey) -> Iterable[int]:
        """A message joins its queue."""
        sending = self.pairs.setdefault(pair, _Sending())
        sending.waiting.append((size, key, self.now))
        if len(sending.waiting) == 1:
            sending.left, sending.rate, sending.since = size, 0.0, self.now
            for line in self.lines(pair):
                self.users[line][pair] = None
                self.wanted[line] += self.most(pair)
            self.share([pair])
        return ()

    def left(self, pair: Pair, forecast: int) -> Iterable[int]:
        """The first message of a queue is on its way, unless its rate has changed since."""
        sending = self.pairs[pair]
        if forecast != sending.forecast:
            return ()
        _, key, _ = sending.waiting.popleft()
        self.at(self.now + self.latency[pair[0]][pair[1]], self.arrived, key)
        if sending.waiting:
            sending.left, sending.since = sending.waiting[0][0], self.now
            self.expect(pair)
            return ()
        sending.forecast += 1
        neighbours: dict[Pair, None] = {}
        for line in self.lines(pair):
            scarce = self.scarce(line)
            del self.users[line][pair]
            self.wanted[line] -= self.most(pair)
            if scarce:
                neighbours |= self.users[line]
        self.share(neighbours)
        return ()

    def expect(self, pair: Pair) -> None:
        """When the first message will have left."""
        sending = self.pairs[pair]
        sending.forecast += 1
        self.at(self.now + sending.left / sending.rate, self.left, pair, sending.forecast)

    def most(self, pair: Pair) -> float:
        """What a pair could have by itself."""
        if pair not in self.known_most:
            room = [self.capacity[line] for line in self.lines(pair)]
            self.known_most[pair] = float(min([self.rate[pair[0]][pair[1]], *room]))
        return self.known_most[pair]

    def scarce(self, line: Line) -> bool:
        """Whether its pairs could use more than there is."""
        return self.wanted[line] > self.capacity[line] * (1 + EQUAL)

    def share(self, pairs: Iterable[Pair]) -> None:
        """Fair rates of all that hang together through scarce lines."""
        together = dict.fromkeys(pairs)
        lines: dict[Line, int] = {}
        frontier = list(together)
        while frontier:
            for line in self.lines(frontier.pop()):
                if line not in lines and self.scarce(line):
                    lines[line] = len(lines)
                    fresh = [p for p in self.users[line] if p not in together]
                    together.update(dict.fromkeys(fresh))
                    frontier += fresh
        if not together:
            return
        used = [[lines.get(line, -1) for line in self.lines(p)] for p in together]
        rates = fair_rates(
            np.array([self.most(p) for p in together]),
            np.array([[*row, *(-1,) * (4 - len(row))] for row in used], dtype=np.int64),
            np.array([self.capacity[line] for line in lines], dtype=np.float64),
        )
        for p, rate in zip(together, rates.tolist(), strict=True):
            self.set_rate(p, rate)

    def set_rate(self, pair: Pair, rate: float) -> None:
        """A new rate from now on."""
        sending = self.pairs[pair]
        if sending.rate != rate:
            sending.left = max(sending.left - sending.rate * (self.now - sending.since), 0.0)
            sending.since, sending.rate = self.now, rate
            self.expect(pair)

    def arrived(self, key: OpKey) -> Iterable[int]:
        """What an operation waits for is there."""
        self.there.add(key)
        return (key[3],)

    def begin_round(self, g: int) -> None:
        """All members are ready."""
        plan, (stage, _, group) = self.plan, self.groups[g]
        m = group.members
        # int8: one byte a value and one 4-byte scale per 1024 values, instead of 4 bytes a value
        wire = 1028 / 4096 if plan.codec is Codec.INT8 else 1.0
        vector = self.gradient_bytes(stage) * wire
        load: dict[Line | Pair, float] = {}
        back = 0.0
        for i, share_i, gives_i in zip(m, group.shares, group.contributes, strict=True):
            for j, share_j, gets_j in zip(m, group.shares, group.receives, strict=True):
                if i == j:
                    continue
                part = (share_j if gives_i else 0.0) + (share_i if gets_j else 0.0)
                size = vector * part
                if size > 0:
                    for used in self.all_lines((i, j)):
                        load[used] = load.get(used, 0.0) + size
                if part > 0:
                    back = max(back, self.latency[i][j] + self.latency[j][i])
        for pair, sending in self.pairs.items():
            if sending.waiting:
                for used in self.all_lines(pair):
                    if used in load:
                        load[used] += sending.unsent(self.now)
        room: dict[Line | Pair, float] = {}
        for line, capacity in self.capacity.items():
            room[line] = capacity
        room.update({(i, j): self.rate[i][j] for i in m for j in m if i != j})
        alone = max((size / room[line] for line, size in load.items()), default=0.0)
        if alone == 0.0:
            self.sent_all(g, self.now, back)
            return
        shared = {line: size for line in self.capacity if (size := load.get(line, 0.0)) > 0}
        self.sending[g] = one = _Round(self.now, alone, back, shared)
        self.at(self.now + alone, self.flown, g, one, 0)

    def sent_all(self, g: int, begin: float, back: float) -> None:
        """Its last byte has left."""
        stage, r, _ = self.groups[g]
        self.round_times.append((stage, r, begin, self.now + back))
        self.at(self.now + back, self.averaged, g)

    def flown(self, g: int, one: _Round, forecast: int) -> Iterable[int]:
        """A round's last byte leaves, unless its pace has changed since."""
        if self.sending.get(g) is one and one.forecast == forecast:
            del self.sending[g]
            self.sent_all(g, one.begin, one.back)
        return ()

    def renew_rounds(self) -> None:
        """Messages that were handed over after a round's begin keep their rates."""
        for g, one in self.sending.items():
            pace = 1.0
            for line, size in one.load.items():
                senders = [self.pairs[pair] for pair in self.users[line]]
                taken = math.fsum(s.rate for s in senders if s.waiting[0][2] > one.begin)
                if taken > 0:
                    left = max(self.capacity[line] - taken, 0.0)
                    pace = min(pace, left * one.alone / size)
            if pace != one.pace:
                one.to_go = max(one.to_go - one.pace * (self.now - one.since), 0.0)
                one.pace, one.since = pace, self.now
                one.forecast += 1
                if pace > 0:
                    self.at(self.now + one.to_go / pace, self.flown, g, one, one.forecast)

    def gradient_bytes(self, stage: int) -> float:
        """Of a stage, embedding with the first and head where the schedule puts it."""
        w, (a, b) = self.plan.workload, self.plan.stage_layers[stage]
        count = sum(layer.parameters for layer in w.layers[a:b])
        head_stage = 0 if self.plan.schedules[0].head is Head.FIRST else -1
        count += w.stem.parameters if stage == 0 else 0
        count += w.head.parameters if stage == head_stage % len(self.plan.stage_layers) else 0
        return count * w.gradient_bytes_per_parameter

    def averaged(self, g: int) -> Iterable[int]:
        """A round is over."""
        members, self.waiting_in[g] = self.waiting_in[g], []
        for d in members:
            self.busy[d] = False
            self.round[d] += 1
        return members

    def updated(self, d: int) -> Iterable[int]:
        """The optimizer step is over."""
        self.busy[d] = False
        self.end_step(d)
        return (d,)

    def end_step(self, d: int) -> None:
        """The device's step is over."""
        t = self.step[d]
        self.step_ends[t] = max(self.step_ends.get(t, 0.0), self.now)
        self.step[d], self.place[d], self.round[d] = t + 1, 0, 0

    def third_pass_s(self) -> float:
        """Mean distance of step ends in the last of three passes; one more step follows."""
        each = len(self.plan.cycle)
        return (self.step_ends[3 * each - 1] - self.step_ends[2 * each - 1]) / each

    def longest_averaging_s(self) -> float:
        """The longest from a first round's begin to its stage's last return."""
        ends: dict[int, float] = {}
        for stage, _, _, end in self.round_times:
            ends[stage] = max(ends.get(stage, 0.0), end)
        return max((ends[s] - begin for s, r, begin, _ in self.round_times if r == 0), default=0.0)
