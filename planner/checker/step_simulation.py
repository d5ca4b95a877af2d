"""Recomputes step times from the definition of the step-time model.

A device does one operation at a time in the plan's order. Messages of an ordered pair leave one
after the other; the pairs that send share uploads, downloads and sites' lines max-min fair. A round
of averaging begins with its last member and takes its fullest resource's seconds, with what the
pipeline has queued there, and the longest latency there and back; messages that come later keep
their rates, and it slows down for them. Steps follow without a barrier.

Here a plan is written down as arrays; `planner.checker.event_loop` lets the simulator run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.checker.plan_network import averaged_bytes, averaged_parts, mean_links
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.training_plan.choices import Head, Phase
from planner.training_plan.model import TrainingPlan

if TYPE_CHECKING:
    from planner.checker.event_loop import CheckerLinks, CheckerOperations, CheckerRounds, Happened

Floats = NDArray[np.float64]
NOTHING = -1


class StepTimes(NamedTuple):
    """What the definition gives: means over the cycle from rest, and the third pass's step."""

    pipeline_s: float
    averaging_s: float
    step_s: float


def clock_times(plan: TrainingPlan) -> StepTimes | None:
    """Predicted times of a plan; None where devices wait for each other."""
    clock = _Clock(plan)
    alone = {k: clock.run([k], True) for k in set(plan.cycle)}
    each = len(plan.cycle)
    several = [*plan.cycle, *plan.cycle, *plan.cycle, plan.cycle[0]]
    if any(one is None for one in alone.values()):
        return None
    runs, every = [alone[k] for k in plan.cycle], plan.sync.every_steps
    if plan.sync.delayed:
        odd = 2 if every > 1 else 1
        step = _delayed_step_s(clock, odd)
    else:
        odd, chained = 1, clock.run(several, True)
        step = None if chained is None else _third_pass_s(chained, each)
    if step is None:
        return None
    if every > odd:
        rare = _between(clock).run(several, True)
        assert rare is not None
        step = (odd * step + (every - odd) * _third_pass_s(rare, each)) / every
    return StepTimes(
        math.fsum(float(one.last_operation_s[0]) for one in runs if one) / each,
        math.fsum(clock.longest_averaging_s(one) for one in runs if one) / each,
        step,
    )


def paths_clock_s(plan: TrainingPlan) -> float | None:
    """Mean makespan over the cycle as the path solver counts; None where devices wait in a circle.

    Pairs queue and share nothing; a transfer is the mean of both directions, of the largest layer
    output whatever is sent.
    """
    away, rate = mean_links(plan)
    np.fill_diagonal(away, 0.0)
    np.fill_diagonal(rate, 1.0)
    wide = float(rate.sum())
    cluster = Cluster(
        Network(away, rate), Devices(plan.cluster.flops, plan.cluster.memory_bytes, wide, wide)
    )
    w = plan.workload
    largest = max(layer.output_bytes for layer in w.layers)
    alike = w.replace(layers=tuple(replace(layer, output_bytes=largest) for layer in w.layers))
    times = replace(plan.compute_times, operation_s=0.0, message_s=0.0)
    clock = _Clock(plan.replace(cluster=cluster, workload=alike, compute_times=times))
    spans: dict[int, float] = {}
    for k in set(plan.cycle):
        run = clock.run([k], False)
        if run is None:
            return None
        spans[k] = float(run.last_operation_s[0])
    return math.fsum(spans[k] for k in plan.cycle) / len(plan.cycle)


def _between(clock: _Clock) -> _Clock:
    """With what is averaged in all steps but the H-th: within groups, or nothing."""
    inner = tuple(
        tuple(groups for groups in rounds if {one.phase for one in groups} == {Phase.WITHIN})
        for rounds in clock.plan.averaging
    )
    return _Clock(clock.plan.replace(averaging=inner))


def _third_pass_s(run: Happened, each: int) -> float:
    """Mean distance of step ends in the last of three passes; one more step follows."""
    ends = run.step_end
    return float(ends[3 * each - 1] - ends[2 * each - 1]) / each


def _delayed_step_s(clock: _Clock, odd: int) -> float | None:
    """All steps average beside the next one, or every other one does.

    Passes of whole turns and cycles: the mean over the fourth to the sixth, and a step follows.
    """
    cycle = clock.plan.cycle
    each = len(cycle) if len(cycle) % odd == 0 else odd * len(cycle)
    walk = [cycle[t % len(cycle)] for t in range(6 * each + 1)]
    run = clock.run(walk, [odd == 1 or t % 2 == 1 for t in range(len(walk))])
    if run is None:
        return None
    return float(run.step_end[6 * each - 1] - run.step_end[3 * each - 1]) / (3 * each)


class _Clock:
    """A plan's operations, links and rounds, and runs of them."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan, self.n = plan, len(plan.cluster)
        self.rate = plan.cluster.network.bandwidth_bytes_per_s
        self.latency = plan.cluster.network.latency_s
        self.line_of: dict[tuple[str, int | str], int] = {}
        self.room: list[float] = []
        self._lines()
        self.groups = [
            (stage, r, group)
            for stage, rounds in enumerate(plan.averaging)
            for r, groups in enumerate(rounds)
            for group in groups
        ]
        self.pairs: dict[tuple[int, int], int] = {}
        self.work = self._work()
        self.links = self._links()
        self.rounds = self._rounds()

    def run(self, steps: Sequence[int], averages: bool | Sequence[bool]) -> Happened | None:
        """Some steps from rest; None where devices wait for each other."""
        from planner.checker.event_loop import Happened, run  # numba takes a while to load

        g = len(self.rounds.size)
        happened = Happened(
            np.zeros(len(steps)),
            np.zeros(g),
            np.zeros(g),
            np.zeros(1),
            np.zeros(self.n, dtype=np.int64),
        )
        which = np.array(steps, dtype=np.int64)
        delayed = self.plan.sync.delayed
        each = np.full(len(steps), averages)
        run(self.work, self.links, self.rounds, which, each, happened, delayed)
        return happened if (happened.steps == len(steps)).all() else None

    def longest_averaging_s(self, run: Happened) -> float:
        """The longest from a first round's begin to its stage's last return.

        And from there what the averaging takes that first and last stage do together.
        """
        ends: dict[int, float] = {}
        begins: list[tuple[int, float]] = []
        # the last round may be that in which updates wait for the norm
        for (stage, r, _), begin, end in zip(
            self.groups, run.round_begin.tolist(), run.round_end.tolist(), strict=False
        ):
            ends[stage] = max(ends.get(stage, 0.0), end)
            begins += [(stage, begin)] if r == 0 else []
        last = len(self.plan.stage_layers)
        shared = max((ends[stage] - begin for stage, begin in begins if stage == last), default=0.0)
        return max(
            (
                ends[stage] - begin + (shared if stage in (0, last - 1) else 0.0)
                for stage, begin in begins
                if stage < last
            ),
            default=0.0,
        )

    def _lines(self) -> None:
        """Uploads, downloads and sites' lines, and what each can carry."""
        cluster, devices = self.plan.cluster, self.plan.cluster.devices
        pairs = self.rate.copy()
        np.fill_diagonal(pairs, -math.inf)
        alone = self.n == 1
        for name, given, axis in (
            ("up", cluster.upload_bytes_per_s, 1),
            ("down", cluster.download_bytes_per_s, 0),
        ):
            fastest = np.full(1, math.inf) if alone else pairs.max(axis=axis)
            for d, capacity in enumerate((fastest if given is None else given).tolist()):
                self._line((name, d), capacity)
        for site, capacity in (devices.site_upload_bytes_per_s or {}).items():
            self._line(("site up", site), capacity)
        for site, capacity in (devices.site_download_bytes_per_s or {}).items():
            self._line(("site down", site), capacity)

    def _line(self, name: tuple[str, int | str], capacity: float) -> None:
        self.line_of[name] = len(self.room)
        self.room.append(float(capacity))

    def _work(self) -> CheckerOperations:
        from planner.checker.event_loop import CheckerOperations

        plan, times = self.plan, self.plan.compute_times
        w = plan.workload
        sent = {
            d: w.layers[plan.stage_layers[j][1] - 1].output_bytes * w.microbatch_samples
            for d, j in plan.stage_of.items()
        }
        spent = {"F": times.forward_s, "H": times.head_s, "B": times.backward_s}
        device: list[int] = []
        kinds: list[str] = []
        after: list[int] = []
        pair: list[int] = []
        size: list[float] = []
        order: list[int] = []
        first = [0]
        begins: list[int] = []
        for s in plan.schedules:
            place: dict[tuple[str, int, int], int] = {}
            for b, path in enumerate(s.paths):
                head = path[-1] if s.head is Head.LAST else path[0]
                chain = [("F", d) for d in path] + [("H", head)] + [("B", d) for d in path[::-1]]
                begins.append(len(device))
                for k, (kind, d) in enumerate(chain):
                    place[kind, b, d] = len(device)
                    device.append(d)
                    kinds.append(kind)
                    if k + 1 == len(chain):
                        after.append(NOTHING)
                        pair.append(NOTHING)
                        size.append(0.0)
                        continue
                    next_kind, e = chain[k + 1]
                    after.append(len(device))
                    away = self.pairs.setdefault((d, e), len(self.pairs)) if d != e else NOTHING
                    pair.append(away)
                    # a gradient is as large as what its receiver gave
                    size.append(sent[e if next_kind == "B" else d] if d != e else 0.0)
            for d, row in enumerate(s.order):
                order += [place[kind, b, d] for kind, b in row]
                first.append(len(order))
        is_first = np.zeros(len(device), dtype=bool)
        is_first[begins] = True
        seconds = [
            spent[kind][d] + times.operation_s for kind, d in zip(kinds, device, strict=True)
        ]
        return CheckerOperations(
            np.array(device, dtype=np.int64),
            np.array(seconds, dtype=np.float64),
            np.array(after, dtype=np.int64),
            np.array(pair, dtype=np.int64),
            np.array(size, dtype=np.float64),
            is_first,
            np.array(order, dtype=np.int64),
            np.array(first, dtype=np.int64),
            np.array(times.update_s, dtype=np.float64),
            float(times.message_s),
        )

    def _links(self) -> CheckerLinks:
        from planner.checker.event_loop import CheckerLinks

        sites = self.plan.cluster.devices.sites
        lines = np.full((len(self.pairs), 4), NOTHING, dtype=np.int64)
        most = np.zeros(len(self.pairs))
        for (i, j), p in self.pairs.items():
            used: list[tuple[str, int | str]] = [("up", i), ("down", j)]
            if sites is not None and sites[i] != sites[j]:
                used += [("site up", sites[i]), ("site down", sites[j])]
            known = [self.line_of[name] for name in used if name in self.line_of]
            lines[p, : len(known)] = known
            most[p] = min([float(self.rate[i, j]), *(self.room[line] for line in known)])
        pairs = np.array(list(self.pairs), dtype=np.int64).reshape(-1, 2)
        away = self.latency[pairs[:, 0], pairs[:, 1]]
        return CheckerLinks(np.asarray(away), most, lines, np.array(self.room))

    def _rounds(self) -> CheckerRounds:
        from planner.checker.event_loop import CheckerRounds

        of: list[list[int]] = [[] for _ in range(self.n)]
        alone, back = [], []
        loads: list[dict[int, float]] = []
        for g, (stage, _, group) in enumerate(self.groups):
            for d in group.members:
                of[d].append(g)
            sent = averaged_bytes(self.plan, stage, group)
            here = np.ix_(group.members, group.members)
            off = ~np.eye(len(group.members), dtype=bool)
            # members hold the same stage, or are done with the step in both that share a matrix, so
            # that no message of the pipeline is in these queues
            alone.append(float((sent / self.rate[here])[off].max(initial=0.0)))
            parts = averaged_parts(group)
            there = (self.latency[here] + self.latency[here].T)[off & (parts + parts.T > 0)]
            back.append(float(there.max(initial=0.0)))
            loads.append(self._load(group.members, sent))
        members = [len(group.members) for _, _, group in self.groups]
        stages = self.plan.assignment.groups
        every = sorted(d for group in stages for d in group)
        to_sum_s, from_sum_s = np.full(self.n, -1.0), np.zeros(self.n)
        if self.plan.clip is not None and len(stages) > 1:
            # the first of each stage tells its part to the device from which all are nearest
            ways = [
                max(self.latency[i, j] + self.latency[j, i] for j in every if i != j) for i in every
            ]
            adds = every[ways.index(min(ways))]
            for d in every:
                of[d].append(len(members))
                from_sum_s[d] = 0.0 if d == adds else self.latency[adds, d]
            for d in (*(group[0] for group in stages), adds):
                to_sum_s[d] = 0.0 if d == adds else self.latency[d, adds]
            members.append(len(every))
            alone.append(0.0)
            loads.append({})
            back.append(0.0)
        return CheckerRounds(
            np.array(members, dtype=np.int64),
            _ends(of),
            np.array([g for groups in of for g in groups], dtype=np.int64),
            np.array(alone, dtype=np.float64),
            np.array(back, dtype=np.float64),
            _ends(loads),
            np.array([line for load in loads for line in load], dtype=np.int64),
            np.array([x for load in loads for x in load.values()], dtype=np.float64),
            to_sum_s,
            from_sum_s,
        )

    def _load(self, members: Sequence[int], sent: Floats) -> dict[int, float]:
        """What a round sends over every line that it uses."""
        load: dict[tuple[str, int | str], float] = {}
        for d, out, into in zip(members, sent.sum(axis=1), sent.sum(axis=0), strict=True):
            load["up", d], load["down", d] = float(out), float(into)
        sites = self.plan.cluster.devices.sites
        if sites is not None:
            at = np.array([sites[d] for d in members])
            for site in set(at.tolist()):
                inside = at == site
                load["site up", site] = float(sent[inside][:, ~inside].sum())
                load["site down", site] = float(sent[~inside][:, inside].sum())
        return {
            self.line_of[name]: size
            for name, size in load.items()
            if size > 0 and name in self.line_of
        }


def _ends(lists: Sequence[Any]) -> NDArray[np.int64]:
    return np.cumsum([0, *(len(one) for one in lists)]).astype(np.int64)
