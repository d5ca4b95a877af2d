"""Recomputes the bound on the step time over all plans.

The witness lists the devices and prices (dual weights) of compute, upload and device count. A step
of D seconds is excluded if, for every split of the layers into stages, the resources that the
stages need between two step ends cost more than all devices provide. Some stage's averaging round
ends the step. Stages behind it do all of the next step's work after that moment; stages before it
do at least their backward passes and the forward passes that memory cannot hold in advance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.checker.memory import stage_memory
from planner.checker.plan_network import pair_rates
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec, Head, Phase
from planner.training_plan.model import TrainingPlan
from planner.workload.compute_times import FROM_FLOPS
from planner.workload.workload import Workload

Floats = NDArray[np.float64]
PRECISION = 1e-9
"""Relative precision: a plan may be faster than a bound by at most this."""
BISECTIONS = 30
MEMORY_ROUNDING = 1e-6
MOST_DEVICES = 100_000
"""A witness with more devices is rejected."""


def whole_step_bound_s(
    witness: Mapping[str, Any], plan: TrainingPlan, claimed_s: float
) -> float | None:
    """The bound that a witness proves for all plans on its devices."""
    try:
        if not _is_about(witness, plan):
            return None
        devices = _Devices.of(witness)
        if not _covers(devices, plan, witness.get("measured") is True):
            return None
        stages, steps = _Stages(devices, witness, plan), plan.sync.every_steps
        if stages.excluded(steps * claimed_s * (1 - PRECISION)):
            return claimed_s
        low, high = 0.0, steps * claimed_s
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if stages.excluded(middle) else (low, middle)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError, OverflowError):
        return None
    return low / steps


def _is_about(witness: Mapping[str, Any], plan: TrainingPlan) -> bool:
    samples, stages = witness["microbatch_samples"], len(plan.stage_layers)
    times = plan.compute_times
    if witness.get("every_steps", 1) != plan.sync.every_steps or plan.sync.delayed:
        return False
    if witness.get("measured") is not True and (times.source != FROM_FLOPS or any(times.update_s)):
        return False
    if not isinstance(samples, int) or plan.workload.microbatch_samples % samples:
        return False
    if any(plan.recompute) and witness["recompute"] is not True:
        return False
    if plan.schedules[0].head is not Head.LAST and stages > 1:
        return False
    every, stage_of = list(range(stages)), plan.stage_of
    if any([stage_of[d] for d in path] != every for s in plan.schedules for path in s.paths):
        return False
    if plan.averages_for and witness.get("helped") is not True:
        return False
    regions = witness.get("regions", 0)
    if not isinstance(regions, int) or (regions > 0) != plan.two_frequency:
        return False
    if regions:
        # with fewer regions more bytes are sent
        own = [set(plan.cluster.network.regions), *(rounds[0] for rounds in plan.averaging)]
        alone = [len(rounds) == len(rounds[0]) == 1 for rounds in plan.averaging]
        return max(map(len, own)) <= regions and all(
            one or _exchanges_at_once(rounds, Phase.WITHIN)
            for one, rounds in zip(alone, plan.averaging, strict=True)
        )
    levels = witness.get("levels") is True
    return all(
        (levels and _exchanges_at_once(rounds, Phase.REDUCE))
        or (
            len(rounds) == 1
            and len(rounds[0]) == 1
            and rounds[0][0].contributes == rounds[0][0].receives
        )
        for rounds in plan.averaging
    )


def _exchanges_at_once(rounds: Sequence[Sequence[AveragingGroup]], first: Phase) -> bool:
    """Whether a stage averages hierarchically with one member of every site per exchange."""
    if [{group.phase for group in groups} for groups in rounds] != [
        {first},
        {Phase.EXCHANGE},
        {Phase.SPREAD},
    ]:
        return False
    within, between, _ = rounds
    return len(within) > 1 and all(
        len(set(group.members) & set(site.members)) == 1 for group in between for site in within
    )


Kind = tuple[float, float, float, float]
"""FLOP/s, memory, upload and download of a device."""


@dataclass(frozen=True)
class _Devices:
    """The witness's device classes, least latencies, fastest link and prices."""

    classes: Counter[Kind]
    back_s: Floats
    hop_s: float
    hop_rate: float
    price: tuple[float, float, float]

    @classmethod
    def of(cls, witness: Mapping[str, Any]) -> _Devices:
        classes: Counter[Kind] = Counter()
        for row in witness["devices"]:
            key = tuple(
                _number(row[name])
                for name in ("flops", "memory_bytes", "upload_bytes_per_s", "download_bytes_per_s")
            )
            classes[key] += int(row["count"])  # type: ignore[index]
        n = sum(classes.values())
        if n > MOST_DEVICES:
            raise ValueError("devices")
        back = np.zeros(n)
        for m, seconds in witness["return_s"]:
            back[int(m) - 1 :] = float(seconds)
        price = tuple(float(weight) for weight in witness["price"])
        if len(price) != 3 or min(price) < 0 or abs(sum(price) - 1) > PRECISION:
            raise ValueError("price")
        if min(classes.values()) < 1 or not all(x > 0 for key in classes for x in key):
            raise ValueError("devices")
        hop_s, hop_rate = float(witness["hop_s"]), _number(witness["hop_bytes_per_s"])
        numbers = [*(x for key in classes for x in key), hop_rate]
        # a single device has no links, so links must have price 0
        if n == 1 and price[1] == 0:
            numbers = [x for key in classes for x in key[:2]]
        if not (np.isfinite([*numbers, *back, hop_s]).all() and hop_s >= 0 and hop_rate > 0):
            raise ValueError("links")
        return cls(classes, back, hop_s, hop_rate, price)

    def each(self, k: int) -> Floats:
        """Column k of `Kind` for all devices, descending."""
        return np.sort(np.array([key[k] for key in self.classes.elements()]))[::-1]


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


def _covers(devices: _Devices, plan: TrainingPlan, measured: bool) -> bool:
    """Whether the plan's devices are among the witness's, or no faster and no better linked."""
    cluster, n = plan.cluster, len(plan.cluster)
    off = ~np.eye(n, dtype=bool)
    rate, latency = cluster.network.bandwidth_bytes_per_s, cluster.network.latency_s
    fastest = np.where(off, rate, 0.0 if n > 1 else math.inf)
    up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
    up = fastest.max(axis=1) if up is None else up
    down = fastest.max(axis=0) if down is None else down
    trains = sorted(plan.stage_of)
    helps = sorted(set(range(n)) - set(trains))
    k = len(trains)
    flops = _measured_flops(plan) if measured else cluster.flops
    columns = (flops, cluster.memory_bytes, up, down)
    own = Counter(zip(*(column[trains].tolist() for column in columns), strict=True))
    if not (_are_no_faster(own, devices.classes) if measured else own <= devices.classes):
        return False
    both = np.ix_(trains, trains)
    apart = ~np.eye(k, dtype=bool)
    if (latency[both][apart] < devices.hop_s).any():
        return False
    if (pair_rates(plan)[both][apart] > devices.hop_rate).any():
        return False
    away = np.sort(np.where(off, latency + latency.T, math.inf)[:, trains], axis=1)
    # a device with a stage has m - 1 partners in a group, an aggregator has m
    less = devices.back_s[1:k]
    return not ((away[trains, : k - 1] < less).any() or (away[helps, 1:k] < less).any())


def _are_no_faster(own: Counter[Kind], classes: Counter[Kind]) -> bool:
    """Whether each device matches one with the same memory and links and at least its FLOP/s."""
    theirs: dict[tuple[float, ...], list[float]] = {}
    for flops, *rest in sorted(classes.elements(), reverse=True):
        theirs.setdefault(tuple(rest), []).append(flops)
    turn = Counter[tuple[float, ...]]()
    for flops, *rest in sorted(own.elements(), reverse=True):
        fastest = theirs.get(tuple(rest), [])
        k = turn[tuple(rest)]
        if k >= len(fastest) or flops > fastest[k] * (1 + PRECISION):
            return False
        turn[tuple(rest)] += 1
    return True


def _measured_flops(plan: TrainingPlan) -> Floats:
    """``float[N]``: the highest FLOP/s of F, B or H in the plan's times; 0 without a stage."""
    w, times = plan.workload, plan.compute_times
    found = np.zeros(len(plan.cluster))
    for d, j in plan.stage_of.items():
        start, stop = plan.stage_layers[j]
        forward = math.fsum(layer.forward_flops for layer in w.layers[start:stop])
        forward += w.stem.forward_flops if start == 0 else 0.0
        # with recomputation, B includes F
        works = [
            (forward, times.forward_s[d]),
            (2 * forward, times.backward_s[d] - plan.recompute[j] * times.forward_s[d]),
        ]
        # the head may run on this stage in other plans
        if j == len(plan.stage_layers) - 1 or times.head_s[d] > 0:
            works.append((3 * w.head.forward_flops, times.head_s[d]))
        found[d] = max(
            (
                w.microbatch_samples * flops / s if s > 0 else math.inf
                for flops, s in works
                if flops > 0
            ),
            default=0.0,
        )
    return found


class _Stages:
    """All possible stages (ranges of layers)."""

    def __init__(self, devices: _Devices, witness: Mapping[str, Any], plan: TrainingPlan) -> None:
        self.devices, self.workload = devices, plan.workload
        self.samples = int(witness["microbatch_samples"])
        self.again = (False, True) if witness["recompute"] is True else (False,)
        self.wire = 1028 / 4096 if plan.codec is Codec.INT8 else 1.0
        self.helped = witness.get("helped") is True
        self.regions = int(witness.get("regions", 0))
        self.levels = witness.get("levels") is True or self.regions > 0
        self.every = plan.sync.every_steps
        # whether tied weights are averaged separately; older plans do not
        splits = len(plan.stage_layers) > 1 and plan.workload.tied_parameters > 0
        self.apart = self.every == 1 and plan.sync.outer is None
        self.apart &= not splits or len(plan.averaging) > len(plan.stage_layers)
        # H steps between two global averages count as one step
        self.count = plan.workload.batch_samples * plan.sync.every_steps // self.samples
        self.last = len(plan.workload.layers)
        self.speed, self.memory, self.up, self.down = (devices.each(k) for k in range(4))
        # before an exchange ends some may have received nothing, but all have sent their vector
        both = [
            key[2] if self.levels else min(key[2], key[3]) for key in devices.classes.elements()
        ]
        self.line = np.sort(np.array(both))[::-1]
        # sums over the m best and the m worst devices
        self.all_lines, self.all_down = self.line.cumsum(), self.down.cumsum()
        self.most_speed, self.most_up = self.speed.cumsum(), self.up.cumsum()
        self.least_speed, self.least_up = self.speed[::-1].cumsum(), self.up[::-1].cumsum()
        self.m = np.arange(1, len(self.speed) + 1)
        self.top = float(self.speed[0])
        self.whole = (float(self.speed.sum()), float(self.up.sum()), len(self.m))
        self.known = {
            (a, b): _Stage(self, a, b)
            for a in range(self.last)
            for b in range(a + 1, self.last + 1)
        }

    def forward(self, a: int, b: int) -> float:
        """Forward FLOPs of one microbatch through layers a to b - 1."""
        w: Workload = self.workload
        stem = w.stem.forward_flops if a == 0 < b else 0.0
        return (stem + math.fsum(x.forward_flops for x in w.layers[a:b])) * self.samples

    def excluded(self, limit: float) -> bool:
        """Whether no split is cheap enough for a step of ``limit`` seconds."""
        # dynamic program over layer prefixes: without the stage that ends the step, with it, and
        # with stage 0 as that stage
        before, beyond, first = ([math.inf] * (self.last + 1) for _ in range(3))
        before[0] = first[0] = 0.0
        for b in range(1, self.last + 1):
            for a in range(b):
                stage = self.known[a, b]
                first[b] = min(first[b], first[a] + stage.cost(limit, "first"))
                beyond[b] = min(beyond[b], beyond[a] + stage.cost(limit, "beyond"))
                if a > 0:
                    beyond[b] = min(beyond[b], before[a] + stage.cost(limit, "ends"))
                if b < self.last:
                    before[b] = min(before[b], before[a] + stage.cost(limit, "before"))
        return min(first[self.last], beyond[self.last]) > 1 + 1e-12


class _Stage:
    """Layers a to b - 1 as a stage; arrays are over its number of devices, 1 to N."""

    def __init__(self, of: _Stages, a: int, b: int) -> None:
        self.of, self.first = of, a == 0
        w, dev, m, samples = of.workload, of.devices, of.m, of.samples
        self.f = of.forward(a, b)
        self.h = 3 * w.head.forward_flops * samples if b == of.last else 0.0
        self.come = w.layers[a - 1].output_bytes * samples if a > 0 else 0.0
        self.go = w.layers[b - 1].output_bytes * samples if b < of.last else 0.0
        owned = sum(x.parameters for x in w.layers[a:b])
        owned += (w.stem.parameters if a == 0 else 0) + (w.head.parameters if b == of.last else 0)
        owned += w.tied_parameters if a > 0 and b == of.last else 0
        # tied weights are averaged after the stages' own parameters
        split = of.apart and (a == 0) != (b == of.last)
        vector = (owned - split * w.tied_parameters) * w.gradient_bytes_per_parameter * of.wire
        # with aggregators the members still send m vectors in total if they reduce nothing; the
        # same holds until sites have exchanged
        least = of.helped or of.levels
        self.averaged = (np.where(m > 1, m, 0) if least else 2 * (m - 1)) * vector
        slowest = np.maximum(self.averaged / of.all_lines, vector / of.line)
        if of.regions:
            # the exchange sends least between two regions, although averaging within regions sends
            # least with more of them: both minima are valid bounds
            slowest = 2 * vector / of.all_lines
            near = np.minimum(m, of.regions)
            inside = 2 * (m - near) * owned * w.gradient_bytes_per_parameter
            self.averaged = 2 * (near - 1) * vector + of.every * inside
        self.averaging_s = np.where(m > 1, slowest + dev.back_s, 0.0)
        # on the fastest device: a first microbatch's way to this stage, the last one's way back,
        # and one's way through the last layers and back, with at least one transfer
        hop_in = dev.hop_s + self.come / dev.hop_rate if self.come else 0.0
        self.lag = dev.hop_s if self.come else 0.0
        self.from_start = of.forward(0, a) / of.top
        self.from_near = of.forward(a - 1, a) / of.top if a else 0.0
        self.hop_in = hop_in
        self.homeward = 2 * self.from_start
        self.hop_out = dev.hop_s + self.go / dev.hop_rate if self.go else 0.0
        turn = of.forward(of.last - 1, of.last) + 3 * w.head.forward_flops * samples
        self.turn = (turn + 2 * of.forward(b, of.last)) / of.top
        self.close = np.maximum(self.averaging_s, hop_in + self.homeward)
        # only a round with bytes to send waits for messages on its links
        self.still = np.where((m > 1) & (vector > 0), dev.back_s, self.lag + self.homeward)
        self._memory(a, b)

    def _memory(self, a: int, b: int) -> None:
        """Microbatches that each device can hold, with and without recomputation."""
        of, w = self.of, self.of.workload
        self.keeps = {}
        for again in of.again:
            needs = stage_memory(w, a, b, runs_head=b == of.last, recomputes=again)
            have = of.memory * (1 + MEMORY_ROUNDING) - needs.state
            each, left = needs.saved, have - needs.operation
            fits = np.floor(left / each) if each > 0 else np.where(left >= 0, math.inf, 0.0)
            self.keeps[again] = np.clip(fits, 0, of.count)
        some = max(keep[0] for keep in self.keeps.values()) >= 1
        self.possible = (have >= 0).cumsum() >= of.m if some else np.zeros(len(have), dtype=bool)

    def cost(self, limit: float, role: str) -> float:
        """The least price of this stage's devices in a step of ``limit`` seconds."""
        options = self._before(limit) if role == "before" else self._all(limit, role)
        return min(float(found.min()) for found in options)

    def _all(self, limit: float, role: str) -> Iterator[Floats]:
        """Prices if F, H and B follow the step end; the ending stage may have its inputs."""
        of = self.of
        start = {"first": self.from_start, "beyond": self.from_near, "ends": 0.0}[role]
        hop, lag, messages = (self.hop_in, self.lag, self.come + self.go)
        good = self.possible
        if role == "ends":
            # a group of one does not average: the previous stage ends no earlier
            hop, lag, messages, good = 0.0, 0.0, self.go, good & (of.m > 1)
        begin, each = start + hop, 3 * self.f + self.h
        left = limit - begin - self.close
        good = good & (np.ceil(of.count / of.m) * each / of.top <= left)
        good &= of.count * messages <= (limit - start - lag - self.close) * of.all_down
        sends = of.count * (self.come + self.go) + self.averaged
        quiet = begin + self.f / of.top + self.still
        yield self._price(good, [(of.count * each, left)], sends, limit - quiet)

    def _before(self, limit: float) -> Iterator[Floats]:
        """Prices if B, and F beyond what memory holds, follow the step end."""
        of = self.of
        x = np.ceil(of.count / of.m)
        for again, keep in self.keeps.items():
            back = (3 if again else 2) * self.f
            more = np.maximum(of.count - keep.cumsum(), 0)
            begin = self.turn + self.hop_out
            left = limit - self.close
            good = self.possible & (x * back / of.top <= left - begin)
            good &= (x * back + np.maximum(x - keep[0], 0) * self.f) / of.top <= left
            good &= of.count * self.go <= (left - self.turn) * of.all_down
            sends = of.count * self.come + more * self.go + self.averaged
            quiet = np.where(more > 0, 0.0, begin + back / of.top) + self.still
            works = [(of.count * back + more * self.f, left), (of.count * back, left - begin)]
            yield self._price(good, works, sends, limit - quiet)

    def _price(
        self,
        good: NDArray[np.bool_],
        works: list[tuple[Any, Floats]],
        sends: Any,
        open_s: Any,
    ) -> Floats:
        of = self.of
        good = good & (open_s > 0)
        speed = np.zeros(len(of.m))
        for _, left in works:
            good &= left > 0
        for flops, left in works:
            speed = np.maximum(speed, flops / np.where(good, left, 1.0))
        rate = sends / np.where(good, open_s, 1.0)
        good &= (speed <= of.most_speed) & (rate <= of.most_up)
        parts = zip(
            of.devices.price,
            (
                np.maximum(speed, of.least_speed),
                np.maximum(rate, of.least_up),
                of.m,
            ),
            of.whole,
            strict=True,
        )
        price = sum(weight * need / all_of_it for weight, need, all_of_it in parts if weight > 0)
        return np.where(good, price, math.inf)
