"""Recomputes the bound on the mean step over all plans.

Between the ends of two of its averaging rounds, every stage does all its work of a step, so in the
mean over many steps each stage has D seconds for it. A step of D seconds is excluded if stages need
more than all devices have, whatever devices are in them; or more than all devices cost, if those of
a type cost the same; or if sites can do less than a step behind their lines.

Quantities have the names of `planner.planning.joint.stage_requirements`, `type_bound` and
`site_bound`, whose inequalities are derived here a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.checker.bound_witness import (
    PRECISION,
    DeviceClass,
    Floats,
    applies_to,
    heads_of,
    measured_flops,
    number,
)
from planner.checker.joint_bound import (
    BUDGET,
    Stage,
    StageSplits,
    proven_s,
    splits_of,
    spreads_in_bf16,
)
from planner.checker.memory import stage_memory
from planner.checker.plan_network import device_rates, sites_around
from planner.checker.wire_ratio import WIRE_RATIO
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan

MAX_COMPOSITIONS = 4_000_000
"""A witness with more compositions of a stage is rejected."""
MAX_PAIRS = 1_000_000
"""Splits of the layers and compositions of the next stage that are compared at once."""
MAX_SPLITS = 64
"""Splits of the layers before a boundary that are distinguished by their windows."""
SITE_ROUNDS = 50
"""Repetitions after which the rounds of a site's layers leave no less time."""


def mean_step_bound_s(
    witness: Mapping[str, Any], plan: TrainingPlan, claimed_s: float
) -> float | None:
    """The bound that a witness proves for the mean step of all plans on its devices."""

    def proof() -> Callable[[float], bool]:
        kind = witness["kind"]
        if kind == "mean of stages":
            splits = splits_of(witness, plan)
            return lambda limit: _stages_exclude(splits, limit)
        if kind == "mean of types":
            splits = splits_of(witness, plan)
            return _Types(splits, witness).exclude
        if kind == "mean of sites" and applies_to(witness, plan):
            return _Sites(witness, plan).exclude
        raise ValueError("kind")

    return proven_s(proof, claimed_s, plan.sync.every_steps)


def _cheapest_split(
    stages: Mapping[tuple[int, int], Stage], layers: int, cost: Callable[[Stage], float]
) -> float:
    """Cost of the cheapest split of the layers into stages."""
    least = [0.0] + [math.inf] * layers
    for b in range(1, layers + 1):
        for a in range(b):
            if least[a] < least[b]:
                least[b] = min(least[b], least[a] + cost(stages[a, b]))
    return least[layers]


def _stages_exclude(splits: StageSplits, limit: float) -> bool:
    """Whether every split weighs more than all devices in a mean step of ``limit`` seconds."""
    return all(
        _cheapest_split(stages, splits.num_layers, lambda stage: _weight(stage, limit)) > BUDGET
        for stages in splits.stages_by_head
    )


class _Times(NamedTuple):
    """Seconds around a stage's operations of a step.

    Attributes
    ----------
    upstream_s
        Passes of one microbatch through all stages before, on the fastest device; with messages.
    away_s
        From the end of F to the begin of B: all passes in the stages after.
    """

    upstream_s: float
    away_s: float

    @classmethod
    def of(cls, stage: Stage) -> _Times:
        common = stage.common
        later = common.forward(stage.stop, common.num_layers)
        away_flops = 3 * later
        if not stage.has_head:
            away_flops += 3 * common.workload.head.forward_flops * common.samples
        return cls(
            3 * stage.upstream_forward_s + 2 * stage.hop_in_s,
            away_flops / common.fastest + 2 * stage.hop_out_s,
        )


def _weight(stage: Stage, limit: float) -> float:
    """Least weight of a stage's devices, by any number of recomputed layers."""
    common, times = stage.common, _Times.of(stage)
    n, each = common.microbatches, np.ceil(common.microbatches / common.m)
    # the round, or the passes of the last microbatch in the stages before, follow its operations
    window_s = limit - np.maximum(stage.round_s, times.upstream_s)
    sent_bytes = n * (stage.input_bytes + stage.output_bytes) + stage.averaged_bytes
    first_backward_s = stage.forward_flops / common.fastest + times.away_s
    least = math.inf
    for backward_flops, live in stage.max_live:
        flops = stage.forward_flops + backward_flops + stage.head_flops
        in_flight_s = flops / common.fastest + times.away_s
        with np.errstate(divide="ignore", invalid="ignore"):
            held_s = np.where(live.cumsum() > 0, n * in_flight_s / live.cumsum(), np.inf)
        feasible = (
            stage.fits
            & (each * flops / common.fastest <= window_s)
            & (first_backward_s + each * backward_flops / common.fastest <= window_s)
            & (n * stage.output_bytes <= window_s * common.most_down)
            & (held_s <= window_s)
            & (sent_bytes <= limit * common.most_down)
        )
        flops_within = [(n * flops, window_s), (n * backward_flops, window_s - first_backward_s)]
        least = min(least, float(stage.weights(feasible, flops_within, sent_bytes, limit).min()))
    return least


class _Types:
    """Types of devices with their prices, and all compositions of a stage."""

    def __init__(self, splits: StageSplits, witness: Mapping[str, Any]) -> None:
        self.splits = splits
        rows, prices = witness["devices"], witness["prices"]
        self.prices = [[number(price) for price in of_head] for of_head in prices]
        size = len(self.prices[0])
        best, self.available = np.zeros((size, 4)), np.zeros(size)
        for row in rows:
            # a type is as good as each of its devices in everything
            k = row["type"]
            if type(k) is not int or not 0 <= k < size:
                raise ValueError("type")
            best[k] = np.maximum(best[k], DeviceClass.of_row(row))
            self.available[k] += int(row["count"])
        for of_head in self.prices:
            costs = float(np.dot(of_head, self.available))
            is_valid = all(0 <= price < math.inf for price in of_head)
            if len(of_head) != size or not is_valid or not costs <= 1 + PRECISION:
                raise ValueError("prices")
        if len(self.prices) != len(splits.stages_by_head) or min(self.available) < 1:
            raise ValueError("prices")
        if math.prod(int(count) + 1 for count in self.available) > MAX_COMPOSITIONS:
            raise ValueError("devices")
        self.speed, self.memory, self.up, self.down = best.T
        grids = np.meshgrid(*(np.arange(count + 1) for count in self.available), indexing="ij")
        # without the empty composition
        self.counts = np.stack([grid.ravel() for grid in grids], axis=1)[1:]
        self.devices = self.counts.sum(axis=1).astype(int)

    def exclude(self, limit: float) -> bool:
        """Whether every split costs more than all devices in a mean step of ``limit`` seconds."""
        return all(
            self._exclude(stages, limit, prices)
            for stages, prices in zip(self.splits.stages_by_head, self.prices, strict=True)
        )

    def _exclude(
        self, stages: Mapping[tuple[int, int], Stage], limit: float, prices: Sequence[float]
    ) -> bool:
        """As `exclude`, of plans with the head on one end of the pipeline."""
        costs, layers = self.counts @ np.array(prices), self.splits.num_layers
        # splits of the layers before a boundary that may be part of a cheapest one: the longest
        # time from a stage's operations to its next ones, with its passes since, and the cost
        front = [np.zeros((1, 2))] + [np.zeros((0, 2))] * layers
        for b in range(1, layers + 1):
            found = [front[b]]
            for a in range(b):
                if len(front[a]):
                    found.append(self._after(stages[a, b], limit, front[a], costs))
            front[b] = _cheapest(np.concatenate(found))
        return len(front[layers]) == 0

    def _after(self, stage: Stage, limit: float, front: Floats, costs: Floats) -> Floats:
        """The splits that end with this stage, and cost no more than all devices."""
        common = stage.common
        able = np.flatnonzero(costs + front[:, 1].min() <= BUDGET)
        # most compositions are not able after any of the splits
        able = able[self._able(stage, limit, front[:1, :1], able)[0]]
        round_s = self._round_s(stage, able)
        passes_s = 3 * stage.forward_flops / common.fastest + 2 * stage.hop_out_s
        found, block = [], max(MAX_PAIRS // max(len(able), 1), 1)
        for first in range(0, len(front), block):
            before_s, cost = front[first : first + block].T[:, :, None]
            total = costs[able] + cost
            split, k = np.nonzero(self._able(stage, limit, before_s, able) & (total <= BUDGET))
            after_s = np.maximum(before_s[split, 0], round_s[k]) + passes_s
            found.append(_cheapest(np.stack([after_s, total[split, k]], axis=1)))
        return np.concatenate(found)

    def _round_s(self, stage: Stage, rows: Any) -> Floats:
        """Least seconds of a round of some compositions."""
        common, counts, devices = stage.common, self.counts[rows], self.devices[rows]
        averaging_rate = self.up if common.hierarchical else np.minimum(self.up, self.down)
        if common.regions:
            sending_s = 2 * stage.vector_bytes / (counts @ averaging_rate)
        else:
            least_rate = np.where(counts > 0, averaging_rate, np.inf).min(axis=1)
            sending_s = np.maximum(
                self._averaged_bytes(stage, rows) / (counts @ averaging_rate),
                stage.vector_bytes / least_rate,
            )
        round_s = sending_s + common.devices.rtt_s[devices - 1]
        return np.asarray(np.where(devices > 1, round_s, 0.0))

    def _averaged_bytes(self, stage: Stage, rows: Any) -> Floats:
        by_number = np.broadcast_to(stage.averaged_bytes, stage.common.m.shape)
        return np.asarray(by_number[self.devices[rows] - 1])

    def _able(self, stage: Stage, limit: float, before_s: Floats, rows: Any) -> Any:
        """``bool[S, K]``: compositions that can be this stage in a mean step of ``limit`` seconds.

        Parameters
        ----------
        before_s
            ``float[S, 1]``: seconds from operations of a stage before to its next ones, and its
            passes of one microbatch since, with messages.
        rows
            ``int[K]``: of the compositions.
        """
        common, times, counts = stage.common, _Times.of(stage), self.counts[rows]
        n, devices = common.microbatches, self.devices[rows]
        averaged_bytes = self._averaged_bytes(stage, rows)
        window_s = limit - np.maximum(before_s, self._round_s(stage, rows))
        # between operations of the stage before, with the bytes of one message on either side
        messages_s = limit - before_s + stage.hop_in_s - stage.input_latency_s
        fastest = np.where(counts > 0, self.speed, 0.0).max(axis=1)
        least_flops = 3 * stage.forward_flops + stage.head_flops
        message_bytes = stage.input_bytes + stage.output_bytes
        size = np.searchsorted(common.memory_sizes, self.memory)
        lacks = ~stage.holds_state[size]
        able = (
            (devices >= common.workload.optimizer_shards)
            & ~(counts[:, lacks] > 0).any(axis=1)
            & (np.ceil(n / devices) * least_flops / fastest <= window_s)
            & (n * stage.output_bytes <= window_s * (counts @ self.down))
            & (n * message_bytes + averaged_bytes <= limit * (counts @ self.up))
            & (n * message_bytes + averaged_bytes <= limit * (counts @ self.down))
        )
        averages = (devices > 1) & (common.regions == 0)
        taken = np.zeros(window_s.shape)
        for backward_flops, room in stage.room:
            flops, total = stage.forward_flops + backward_flops + stage.head_flops, 0.0 * taken
            types = zip(counts.T, self.speed, self.up, self.down, room[size], strict=True)
            for count, speed, up, down, live in types:
                rate = min(up, down)
                in_flight_s = flops / speed + times.away_s
                late_s = window_s - stage.forward_flops / speed - times.away_s
                limits = [np.full(window_s.shape, float(n))]
                if flops > 0:
                    limits.append(window_s * speed / flops)
                if backward_flops > 0:
                    limits.append(late_s * speed / backward_flops)
                if in_flight_s > 0:
                    limits.append(window_s * live / in_flight_s)
                if message_bytes > 0:
                    limits.append((limit * rate - averages * stage.vector_bytes) / message_bytes)
                    # sent after the first forward pass, received before the last backward pass
                    sending_s = messages_s - stage.forward_flops / speed
                    receiving_s = messages_s - 2 * stage.forward_flops / speed
                    limits.append(sending_s * up / message_bytes)
                    limits.append(receiving_s * down / message_bytes)
                if stage.output_bytes > 0:
                    limits.append(window_s * rate / stage.output_bytes)
                # more than all microbatches are not needed
                most = np.clip(np.min(np.broadcast_arrays(*limits), axis=0), 0.0, n)
                total += np.where(count > 0, count * most, 0.0) if live > 0 else 0.0
            taken = np.maximum(taken, total)
        return able & (taken >= n * (1 - PRECISION))


def _cheapest(splits: Floats) -> Floats:
    """Rows of seconds and costs of which none has more of both, or fewer that are less."""
    splits = splits[np.lexsort(splits.T[::-1])]
    before = np.minimum.accumulate(np.append(np.inf, splits[:, 1]))[:-1]
    splits = splits[splits[:, 1] < before]
    # seconds rise and costs fall, so the first and last of several are no more than these
    ends = np.linspace(0, len(splits), min(len(splits), MAX_SPLITS) + 1).astype(int)
    return np.stack([splits[ends[:-1], 0], splits[ends[1:] - 1, 1]], axis=1)


class _Site(NamedTuple):
    """What a witness states of a site; rates are per second."""

    flops: float
    memory_bytes: float
    slowest_flops: float
    line: float
    final: float


class _Sites:
    """Sites behind lines, and the layers that they may run."""

    def __init__(self, witness: Mapping[str, Any], plan: TrainingPlan) -> None:
        fields = "flops", "memory_bytes", "slowest_flops", "line_bytes_per_s", "final_bytes_per_s"
        self.sites = {
            row["name"]: _Site(*(number(row[field]) for field in fields))
            for row in witness["sites"]
        }
        self.price = number(witness["price"])
        if not 0 <= self.price < math.inf:
            raise ValueError("price")
        for site in self.sites.values():
            if not (all(x > 0 for x in site) and site.slowest_flops <= site.flops < math.inf):
                raise ValueError("sites")
        # the innermost sites, or the outermost; a device without one is a site by itself
        if not any(self._cover(level, plan, witness) for level in (0, -1)):
            raise ValueError("sites")
        self.every_steps, samples = plan.sync.every_steps, int(witness["microbatch_samples"])
        w = plan.workload.replace(microbatch_samples=samples)
        flops = [3.0 * layer.forward_flops for layer in w.layers]
        flops[0] += 3.0 * w.stem.forward_flops
        heads = heads_of(witness)
        # on whichever layer of those with the head, the parts of k layers are the largest
        of_head = {Head.LAST: len(flops) - 1, Head.FIRST: 0}
        k = of_head[heads[0]] if len(heads) == 1 else flops.index(max(flops))
        flops[k] += 3.0 * w.head.forward_flops
        self.flops = sum(flops) * w.batch_samples
        if self.flops <= 0:
            raise ValueError("flops")
        self.part = np.cumsum(sorted(flops, reverse=True)) / sum(flops)
        owned = np.array([float(layer.parameters) for layer in w.layers])
        owned[0] += w.stem.parameters
        ratio = WIRE_RATIO[plan.codec]
        if spreads_in_bf16(w):
            ratio = min(ratio, 0.5)
        self.gradients = np.sort(owned).cumsum() * w.gradient_bytes_per_parameter * ratio
        state = [stage_memory(w, k, k + 1, runs_head=False).state for k in range(len(w.layers))]
        self.state = np.sort(state).cumsum()
        outputs = [layer.output_bytes for layer in w.layers[:-1]]
        self.message_bytes = w.batch_samples * min(outputs, default=0.0)

    def exclude(self, limit: float) -> bool:
        """Whether sites can do less than H steps in ``limit`` seconds, at the price of e."""
        # as a mean step, of which one in H sends gradients
        seconds = limit / self.every_steps
        value = math.fsum(self._value(site, seconds) for site in self.sites.values())
        return value < 1 - 2 * self.price - PRECISION

    def _value(self, site: _Site, seconds: float) -> float:
        """The largest w - p e of a site."""
        work, sent = seconds * site.flops / self.flops, seconds * site.line
        fits = self.state <= site.memory_bytes * (1 + 1e-6)
        gradients = self.gradients / self.every_steps
        lost = site.slowest_flops * gradients / site.final / self.flops
        best = self._all_layers(work, sent, lost, gradients) if fits[-1] else 0.0
        part, lost, gradients, fits = self.part[:-1], lost[:-1], gradients[:-1], fits[:-1]
        if not fits.any():
            return best
        if self.message_bytes == 0:
            return max(best, float(np.minimum(work, part)[fits].max()))
        carried = sent / self.message_bytes
        if carried >= 1:
            end = max(2 - carried, 0.0)
            best = max(best, float((np.minimum(work, part) - self.price * end)[fits].max()))
        spare = (sent - gradients) / self.message_bytes
        most = np.clip(spare, 0.0, 1.0)
        # largest where one of these is reached: concave, and linear between them
        for reached in (spare / 2, (work - lost) / part, most):
            share = np.clip(reached, 0.0, most)
            ends = np.maximum(2 * share - spare, 0.0)
            values = np.minimum(work - lost, share * part) - self.price * ends
            best = max(best, float(values[fits & (spare >= 0)].max(initial=0.0)))
        return best

    def _all_layers(self, work: float, sent: float, lost: Floats, gradients: Floats) -> float:
        """The largest part of a site that runs some of all layers."""
        if work >= 1:
            return 1.0
        done, fewest = work, 0
        for _ in range(SITE_ROUNDS):
            # what it leaves out is in at least so many layers, which it averages
            fewest = int(np.searchsorted(self.part, 1 - done - PRECISION))
            fewest = min(fewest, len(self.part) - 1)
            done = work - lost[fewest]
        carries = sent >= (self.message_bytes * (1 - done) + gradients[fewest]) * (1 - PRECISION)
        in_all = work - lost[-1] if sent >= gradients[-1] * (1 - PRECISION) else 0.0
        return float(max(done if carries else 0.0, in_all, 0.0))

    def _cover(self, level: int, plan: TrainingPlan, witness: Mapping[str, Any]) -> bool:
        """Whether the plan's sites of a level can do no more than those of the witness."""
        cluster, devices = plan.cluster, plan.cluster.devices
        flops = measured_flops(plan) if witness.get("measured") is True else cluster.flops
        trainers = sorted(plan.stage_of)
        around = sites_around(devices, len(cluster))
        total = Counter(site for d in trainers for site in around[d])
        members: dict[str, list[int]] = {}
        for d in trainers:
            site = around[d][level] if around[d] else cluster.network.ids[d]
            members.setdefault(site, []).append(d)
        if not members.keys() <= self.sites.keys():
            return False
        by_devices = witness.get("helped") is not True or devices.sites is None
        of_sites = devices.site_upload_bytes_per_s, devices.site_download_bytes_per_s
        lines: list[dict[str, float]] = []
        for stated, limits in zip(of_sites, device_rates(cluster), strict=True):
            line = {}
            for name, inside in members.items():
                whole = total[name] == len(inside)
                line[name] = (stated or {}).get(name, math.inf) if whole else math.inf
                if by_devices:
                    line[name] = min(line[name], math.fsum(limits[inside].tolist()))
            lines.append(line)
        upload, download = lines
        fastest = max(upload.values())
        for name, inside in members.items():
            has, own = self.sites[name], flops[inside]
            more = 1 + PRECISION
            if (
                own.sum() > has.flops * more
                # computing but for the time of a round
                or own.sum() - own.min() > (has.flops - has.slowest_flops) * more + PRECISION
                or cluster.memory_bytes[inside].sum() > has.memory_bytes * more
                or min(upload[name], download[name]) > has.line * more
                or max(upload[name], min(download[name], fastest)) > has.final * more
            ):
                return False
        return True
