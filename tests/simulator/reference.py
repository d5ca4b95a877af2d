"""A slow reference implementation of the simulator: all state is recomputed at every event.

It has no heap, no connected components and no arrays, and serves as the oracle for
`planner.simulator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from planner.network.cluster import Cluster
from planner.training_plan.model import TrainingPlan

Pair = tuple[int, int]
TOLERANCE = 1e-12


def resources(cluster: Cluster) -> dict[object, tuple[float, set[Pair]]]:
    """Capacity and pairs of every resource that pairs share."""
    n, bandwidth = len(cluster), cluster.network.bandwidth_bytes_per_s
    everybody = range(n)
    found: dict[object, tuple[float, set[Pair]]] = {}
    for d in everybody:
        out = {(d, e) for e in everybody if e != d}
        back = {(e, d) for e in everybody if e != d}
        up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
        fastest = max((bandwidth[p] for p in out), default=math.inf)
        found[f"up {d}"] = (float(fastest if up is None else up[d]), out)
        fastest = max((bandwidth[p] for p in back), default=math.inf)
        found[f"down {d}"] = (float(fastest if down is None else down[d]), back)
    outer = cluster.devices.site_within or {}

    def lies_in(device: int, site: str) -> bool:
        here = (cluster.devices.sites or ())[device]
        while here != site and here in outer:
            here = outer[here]
        return here == site

    for site, rate in (cluster.devices.site_upload_bytes_per_s or {}).items():
        leaving = {
            (i, j) for i in everybody for j in everybody if lies_in(i, site) > lies_in(j, site)
        }
        found[f"site up {site}"] = (rate, leaving)
    for site, rate in (cluster.devices.site_download_bytes_per_s or {}).items():
        coming = {
            (i, j) for i in everybody for j in everybody if lies_in(j, site) > lies_in(i, site)
        }
        found[f"site down {site}"] = (rate, coming)
    return found


def fair_rates(
    cluster: Cluster,
    active: set[Pair],
    known: dict[object, tuple[float, set[Pair]]] | None = None,
) -> dict[Pair, float]:
    """Max-min fair: all rates rise together; a pair stops when it or something it uses is full."""
    bandwidth = cluster.network.bandwidth_bytes_per_s
    found = resources(cluster) if known is None else known
    shared = [(capacity, pairs & active) for capacity, pairs in found.values()]
    rates: dict[Pair, float] = {}
    rising = set(active)
    while rising:
        level = min(float(bandwidth[p]) for p in rising)
        for capacity, pairs in shared:
            if pairs & rising:
                fixed = sum(rates[p] for p in pairs - rising)
                level = min(level, (capacity - fixed) / len(pairs & rising))
        stops = {p for p in rising if bandwidth[p] <= level * (1 + 1e-9)}
        for capacity, pairs in shared:
            if pairs & rising:
                fixed = sum(rates[p] for p in pairs - rising)
                if (capacity - fixed) / len(pairs & rising) <= level * (1 + 1e-9):
                    stops |= pairs & rising
        for p in stops:
            rates[p] = min(level, float(bandwidth[p]))
        rising -= stops
    return rates


@dataclass
class Message:
    """A message from one operation to the next; ``left`` counts its unsent bytes."""

    to: tuple[int, int, int]
    pair: Pair
    left: float
    enqueued_s: float = 0.0


@dataclass
class Round:
    """An averaging round that is sending.

    ``loads`` by resource: the round's bytes, the same plus bytes queued at its begin, capacity and
    pairs; ``rest`` counts down from 1.
    """

    group: int
    begin: float
    back_s: float
    alone_s: float
    loads: dict[object, tuple[float, float, float, set[Pair]]]
    rest: float = 1.0


@dataclass
class Reference:
    """State of a simulated plan; operations are ``(step, microbatch, index in its chain)``."""

    plan: TrainingPlan
    steps: list[int]
    averages: bool | list[bool]
    now: float = 0.0
    queue: dict[Pair, list[Message]] = field(default_factory=dict)
    in_flight: list[tuple[float, tuple[int, int, int]]] = field(default_factory=list)
    pending_messages: list[tuple[float, Message]] = field(default_factory=list)
    working: dict[int, tuple[float, tuple[int, int, int] | None]] = field(default_factory=dict)
    there: set[tuple[int, int, int]] = field(default_factory=set)
    step_of: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    round_of: dict[int, int] = field(default_factory=dict)
    in_round: dict[int, set[int]] = field(default_factory=dict)
    sending: list[Round] = field(default_factory=list)
    averaging: list[tuple[float, int]] = field(default_factory=list)
    norm_ready_s: dict[int, dict[int, float]] = field(default_factory=dict)
    step_end: dict[int, float] = field(default_factory=dict)
    op_times: dict[tuple[int, str, int, int], tuple[float, float]] = field(default_factory=dict)
    round_times: list[tuple[int, int, int, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.resources = resources(self.plan.cluster)

    def run(self) -> Reference:
        """Simulate until all steps have ended."""
        n = len(self.plan.cluster)
        self.groups = [
            (stage, r, group)
            for stage, rounds in enumerate(self.plan.averaging)
            for r, groups in enumerate(rounds)
            for group in groups
        ]
        self.step_of = dict.fromkeys(range(n), 0)
        self.done = dict.fromkeys(range(n), 0)
        self.round_of = dict.fromkeys(range(n), 0)
        while any(t < len(self.steps) for t in self.step_of.values()):
            while sum(self.start(d) for d in range(n)) > 0:
                pass
            if any(t < len(self.steps) for t in self.step_of.values()):
                self.advance()
        return self

    def chain(self, t: int, b: int) -> list[tuple[str, int]]:
        """F, H and B operations of a microbatch."""
        return self.plan.schedules[self.steps[t]].chain(b)

    def start(self, d: int) -> bool:
        """Start device d's next activity; returns whether there was one."""
        t = self.step_of[d]
        if d in self.working or t == len(self.steps) or any(d in m for m in self.in_round.values()):
            return False
        times = self.plan.compute_times
        order = self.plan.schedules[self.steps[t]].order[d]
        if self.done[d] < len(order):
            kind, b = order[self.done[d]]
            k = self.chain(t, b).index((kind, d))
            if k > 0 and (t, b, k) not in self.there:
                return False
            seconds = {"F": times.forward_s, "H": times.head_s, "B": times.backward_s}[kind][d]
            self.working[d] = (self.now + seconds + times.operation_s, (t, b, k))
            self.op_times[t, kind, b, d] = (self.now, self.now + seconds + times.operation_s)
            return True
        averages = self.averages if isinstance(self.averages, bool) else self.averages[t]
        mine = [
            g
            for g, (_, _, group) in enumerate(self.groups)
            if d in group.members and (averages or group.phase == "within")
        ]
        if self.round_of[d] < len(mine):
            g = mine[self.round_of[d]]
            members = self.in_round.setdefault(g, set())
            members.add(d)
            group = self.groups[g][2]
            if len(members) == len(group.members):
                self.begin_round(g)
            return True
        if averages and not self.has_norm(t, d):
            return self.request_norm(t, d)
        if times.update_s[d] > 0:
            self.working[d] = (self.now + times.update_s[d], None)
        else:
            self.finish(d)
        return True

    def has_norm(self, t: int, d: int) -> bool:
        """Whether a device may update: where none is needed, or once the norm has arrived."""
        stages, precision = self.plan.assignment.groups, self.plan.workload.precision
        scaled = "fp16" in (precision.compute, precision.messages)
        waits = self.plan.clip is not None or scaled
        if not waits or len(stages) == 1 or not any(d in group for group in stages):
            return True
        return self.now >= self.norm_s(t, d)

    def norm_s(self, t: int, d: int) -> float:
        """When the norm arrives: stages' first devices send to the most central, it broadcasts."""
        stages, way = self.plan.assignment.groups, self.plan.cluster.network.latency_s.copy()
        np.fill_diagonal(way, 0.0)
        every = sorted(e for group in stages for e in group)
        root = min(every, key=lambda i: max(float(way[i, j] + way[j, i]) for j in every))
        here = self.norm_ready_s.get(t, {})
        tell = {group[0] for group in stages} | {root}
        if not tell <= here.keys():
            return math.inf
        return float(max(here[e] + way[e, root] for e in tell) + way[root, d])

    def request_norm(self, t: int, d: int) -> bool:
        """Record when a device is ready for the norm; returns whether that is new."""
        here = self.norm_ready_s.setdefault(t, {})
        if d in here:
            return False
        here[d] = self.now
        return True

    def begin_round(self, g: int) -> None:
        """Begin a round: its most loaded resource with queued bytes, and the longest round trip."""
        stage, _, group = self.groups[g]
        if len(group.members) == 1:
            self.end_round(g, self.now, self.now)
            return
        plan, w, cluster = self.plan, self.plan.workload, self.plan.cluster
        stages = len(plan.stage_layers)
        # a matrix that two stages share comes last and is in neither stage's vector
        tied = w.tied_parameters if len(plan.averaging) > stages else 0
        shared = float(tied * w.gradient_bytes_per_parameter)
        vectors = w.gradient_bytes(plan.stage_layers, plan.head_stage)
        vector = shared
        if stage < stages:
            vector = vectors[stage] - (shared if stage in (0, stages - 1) else 0)
        share = dict(zip(group.members, group.shares, strict=True))
        gives = dict(zip(group.members, group.contributes, strict=True))
        gets = dict(zip(group.members, group.receives, strict=True))
        if group.phase == "reduce":
            gets = dict.fromkeys(gets, False)
        if group.phase == "spread":
            gives = dict.fromkeys(gives, False)
        vector *= group.codec(plan.codec).wire_ratio
        vector *= group.slice[1] - group.slice[0]
        sent = {
            (i, j): vector * (share[j] * gives[i] + share[i] * gets[j])
            for i in group.members
            for j in group.members
            if i != j
        }
        waiting = {p: sum(m.left for m in messages) for p, messages in self.queue.items()}
        bandwidth, latency = cluster.network.bandwidth_bytes_per_s, cluster.network.latency_s
        each: dict[object, tuple[float, set[Pair]]] = {p: (float(bandwidth[p]), {p}) for p in sent}
        each |= resources(cluster)
        loads: dict[object, tuple[float, float, float, set[Pair]]] = {}
        for name, (capacity, pairs) in each.items():
            own = sum(size for p, size in sent.items() if p in pairs)
            queued = sum(size for p, size in waiting.items() if p in pairs)
            if own > 0:
                loads[name] = (own, own + queued, capacity, pairs)
        talk = {frozenset(p) for p in sent if share[p[1]] * gives[p[0]] + share[p[0]] * gets[p[1]]}
        away = max((latency[i, j] + latency[j, i] for i, j in talk), default=0.0)
        alone = max((load / capacity for _, load, capacity, _ in loads.values()), default=0.0)
        if alone == 0.0:
            self.end_round(g, self.now, self.now + float(away))
        else:
            self.sending.append(Round(g, self.now, float(away), alone, loads))

    def end_round(self, g: int, begin: float, end: float) -> None:
        """End the sending of a round."""
        stage, r, group = self.groups[g]
        self.averaging.append((end, g))
        step = self.step_of[group.members[0]]
        self.round_times.append((step, stage, r, begin, end))

    def round_rate(self, one: Round, rates: dict[Pair, float]) -> float:
        """Speed of a round beside messages enqueued after its begin and other rounds."""
        rate = 1 / one.alone_s
        for name, (_, load, capacity, pairs) in one.loads.items():
            new = [p for p in pairs if p in rates and self.queue[p][0].enqueued_s > one.begin]
            company = [r for r in self.sending if r is not one and name in r.loads]
            others = sum(r.loads[name][0] / r.alone_s for r in company)
            if new or company:
                left = max(capacity - sum(rates[p] for p in new), 0.0)
                rate = min(rate, left / (load + others * one.alone_s))
        return rate

    def finish(self, d: int) -> None:
        """End a device's step."""
        t = self.step_of[d]
        self.step_end[t] = max(self.step_end.get(t, 0.0), self.now)
        self.step_of[d], self.done[d], self.round_of[d] = t + 1, 0, 0

    def computed(self, d: int, what: tuple[int, int, int] | None) -> None:
        """End an operation or an update."""
        del self.working[d]
        if what is None:
            self.finish(d)
            return
        t, b, k = what
        self.done[d] += 1
        chain = self.chain(t, b)
        if k + 1 == len(chain):
            return
        kind, e = chain[k + 1]
        if e == d:
            self.there.add((t, b, k + 1))
            return
        owner = e if kind == "B" else d
        w = self.plan.workload
        part = self.plan.stage_layers[self.plan.stage_of[owner]]
        size = w.stage(*part).output_bytes * w.microbatch_samples
        message = Message((t, b, k + 1), (d, e), size)
        self.pending_messages.append((self.now + self.plan.compute_times.message_s, message))

    def advance(self) -> None:
        """Advance to the time of the next event."""
        active = {p for p, messages in self.queue.items() if messages}
        rates = fair_rates(self.plan.cluster, active, self.resources)
        ends = [self.now + self.queue[p][0].left / rates[p] for p in active]
        speed = [self.round_rate(one, rates) for one in self.sending]
        ends += [
            self.now + one.rest / rate
            for one, rate in zip(self.sending, speed, strict=True)
            if rate > 0
        ]
        ends += [end for end, _ in self.in_flight] + [end for end, _ in self.averaging]
        ends += [end for end, _ in self.working.values()] + [
            end for end, _ in self.pending_messages
        ]
        norms = (self.norm_s(t, d) for t, here in self.norm_ready_s.items() for d in here)
        ends += [known for known in norms if self.now < known < math.inf]
        assert ends, "stuck"
        then = max(min(ends), self.now)
        for p in active:
            self.queue[p][0].left -= rates[p] * (then - self.now)
        for one, rate in zip(self.sending, speed, strict=True):
            one.rest -= rate * (then - self.now)
        self.now = then
        for one in [one for one in self.sending if one.rest <= TOLERANCE]:
            self.end_round(one.group, one.begin, then + one.back_s)
            self.sending.remove(one)
        limit = then + TOLERANCE * max(then, 1.0)
        for p in active:
            first = self.queue[p][0]
            if first.left <= TOLERANCE * rates[p] * max(then, 1.0):
                self.queue[p].pop(0)
                flight = float(self.plan.cluster.network.latency_s[p])
                self.in_flight.append((then + flight, first.to))
        self.there |= {to for end, to in self.in_flight if end <= limit}
        self.in_flight = [(end, to) for end, to in self.in_flight if end > limit]
        for d in [d for d, (end, _) in self.working.items() if end <= limit]:
            self.computed(d, self.working[d][1])
        for _, message in [one for one in self.pending_messages if one[0] <= limit]:
            message.enqueued_s = self.now
            self.queue.setdefault(message.pair, []).append(message)
        self.pending_messages = [one for one in self.pending_messages if one[0] > limit]
        for _, g in [one for one in self.averaging if one[0] <= limit]:
            for d in self.in_round.pop(g):
                self.round_of[d] += 1
        self.averaging = [one for one in self.averaging if one[0] > limit]
