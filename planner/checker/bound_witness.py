"""What a witness of a bound on any plan states: devices, and the plans that the bound is about."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.checker.plan_network import MessageRates, device_rates
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Head, Phase
from planner.training_plan.model import TrainingPlan
from planner.workload.compute_times import FROM_FLOPS

Floats = NDArray[np.float64]
PRECISION = 1e-9
"""Relative precision: a plan may be faster than a bound by at most this."""
MAX_DEVICES = 100_000
"""A witness with more devices is rejected."""


def applies_to(witness: Mapping[str, Any], plan: TrainingPlan) -> bool:
    """Whether a plan is of the kind that a witness is about."""
    samples, stages = witness["microbatch_samples"], len(plan.stage_layers)
    times = plan.compute_times
    if witness.get("every_steps", 1) != plan.sync.every_steps or plan.sync.delayed:
        return False
    if witness.get("measured") is not True and (times.source != FROM_FLOPS or any(times.update_s)):
        return False
    if type(samples) is not int or samples < 1 or plan.workload.microbatch_samples % samples:
        return False
    sizes = [stop - start for start, stop in plan.stage_layers]
    if witness["recompute"] != "layers" and not all(
        count == 0 or (witness["recompute"] is True and count == size)
        for count, size in zip(plan.recompute, sizes, strict=True)
    ):
        return False
    if plan.schedules[0].head not in heads_of(witness) and stages > 1:
        return False
    all_stages, stage_of = list(range(stages)), plan.stage_of
    if any([stage_of[d] for d in path] != all_stages for s in plan.schedules for path in s.paths):
        return False
    if plan.averages_for and witness.get("helped") is not True:
        return False
    regions = witness.get("regions", 0)
    if type(regions) is not int or (regions > 0) != plan.two_frequency:
        return False
    if regions:
        # with fewer regions more bytes are sent
        reaches = [set(plan.cluster.network.regions), *(rounds[0] for rounds in plan.averaging)]
        is_single_round = [len(rounds) == len(rounds[0]) == 1 for rounds in plan.averaging]
        return max(map(len, reaches)) <= regions and all(
            is_single or _exchanges_at_once(rounds, Phase.WITHIN)
            for is_single, rounds in zip(is_single_round, plan.averaging, strict=True)
        )
    hierarchical = witness.get("levels") is True
    return all(
        (plan.workload.optimizer_shards > 1 and _reduces_to_owners(rounds))
        or (hierarchical and _exchanges_at_once(rounds, Phase.REDUCE))
        or (
            len(rounds) == 1
            and len(rounds[0]) == 1
            and rounds[0][0].contributes == rounds[0][0].receives
        )
        for rounds in plan.averaging
    )


def heads_of(witness: Mapping[str, Any]) -> list[Head]:
    """Ends of the pipeline that may run head and loss in the plans that the witness is about."""
    heads = [Head(name) for name in witness.get("heads", [Head.LAST])]
    if not heads:
        raise ValueError("heads")
    return heads


def _reduces_to_owners(rounds: Sequence[Sequence[AveragingGroup]]) -> bool:
    """Whether all devices of a stage reduce to owners of optimizer state, which then spread."""
    return [[group.phase for group in groups] for groups in rounds] == [
        [Phase.REDUCE],
        [Phase.SPREAD],
    ]


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


class DeviceClass(NamedTuple):
    """What the witness states of a device; rates are per second."""

    flops: float
    memory_bytes: float
    upload: float
    download: float

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> DeviceClass:
        """From a row of the witness's devices."""
        keys = ("flops", "memory_bytes", "upload_bytes_per_s", "download_bytes_per_s")
        return cls(*(number(row[key]) for key in keys))


@dataclass(frozen=True)
class WitnessDevices:
    """The witness's device classes, least latencies, fastest link and dual weights."""

    classes: Counter[DeviceClass]
    rtt_s: Floats
    hop_s: float
    hop_bytes_per_s: float
    weights: tuple[float, float, float]

    @classmethod
    def from_witness(cls, witness: Mapping[str, Any]) -> WitnessDevices:
        classes: Counter[DeviceClass] = Counter()
        for row in witness["devices"]:
            device = DeviceClass.of_row(row)
            if type(row["count"]) is not int or row["count"] < 1:
                raise ValueError("devices")
            classes[device] += row["count"]
        n = sum(classes.values())
        if n > MAX_DEVICES:
            raise ValueError("devices")
        rtt_s = np.zeros(n)
        for m, seconds in witness["return_s"]:
            rtt_s[int(m) - 1 :] = float(seconds)
        # types of devices have prices instead
        price = (0, 0, 1) if "prices" in witness else witness["price"]
        weights = tuple(map(number, price))
        if len(weights) != 3 or not min(weights) >= 0 or not abs(sum(weights) - 1) <= PRECISION:
            raise ValueError("price")
        if not classes or not all(x > 0 for device in classes for x in device):
            raise ValueError("devices")
        hop_s, hop_bytes_per_s = float(witness["hop_s"]), number(witness["hop_bytes_per_s"])
        numbers = [*(x for device in classes for x in device), hop_bytes_per_s]
        # a single device has no links, so links must have weight 0
        if n == 1 and weights[1] == 0:
            numbers = [x for device in classes for x in device[:2]]
        if not (
            np.isfinite([*numbers, *rtt_s, hop_s]).all() and hop_s >= 0 and hop_bytes_per_s > 0
        ):
            raise ValueError("links")
        return cls(classes, rtt_s, hop_s, hop_bytes_per_s, weights)

    def descending(self, field: int) -> Floats:
        """A field of `DeviceClass` for all devices, largest first."""
        return np.sort(np.array([device[field] for device in self.classes.elements()]))[::-1]


def number(value: float | None) -> float:
    """A number of a witness; null is infinite."""
    if value is None:
        return math.inf
    if type(value) not in (int, float) or math.isnan(value):
        raise ValueError("number")
    return float(value)


def covers(devices: WitnessDevices, plan: TrainingPlan, measured: bool) -> bool:
    """Whether the plan's devices are among the witness's, or no faster and no better linked."""
    cluster, n = plan.cluster, len(plan.cluster)
    latency, (up, down) = cluster.network.latency_table, device_rates(cluster)
    trainers = np.array(sorted(plan.stage_of))
    k = len(trainers)
    flops = measured_flops(plan) if measured else cluster.flops
    columns = (flops, cluster.memory_bytes, up, down)
    plan_devices = Counter(map(DeviceClass, *(column[trainers].tolist() for column in columns)))
    if not (
        _are_no_faster(plan_devices, devices.classes)
        if measured
        else plan_devices <= devices.classes
    ):
        return False
    rates, rtt_s = MessageRates(plan), devices.rtt_s[1:k]
    sites = cluster.devices.sites or [""] * n
    is_trainer = np.isin(np.arange(n), trainers).tolist()
    # devices that differ in none of these have the same links to others
    links = zip(
        latency.class_of.tolist(), up.tolist(), down.tolist(), sites, is_trainer, strict=True
    )
    for d in {row: d for d, row in enumerate(links)}.values():
        others = trainers[trainers != d]
        computes = len(others) < k
        if computes and (
            (latency[d, others] < devices.hop_s).any()
            or (rates.between(d, others) > devices.hop_bytes_per_s).any()
        ):
            return False
        nearest_s = np.sort(latency[d, others] + latency[others, d])
        # a device with a stage has m - 1 partners in a group, an aggregator has m
        if (nearest_s[0 if computes else 1 :] < rtt_s).any():
            return False
    return True


def _are_no_faster(plan_devices: Counter[DeviceClass], classes: Counter[DeviceClass]) -> bool:
    """Whether each device matches one with the same memory and links and at least its FLOP/s."""
    flops_of: dict[tuple[float, ...], list[float]] = {}
    for flops, *others in sorted(classes.elements(), reverse=True):
        flops_of.setdefault(tuple(others), []).append(flops)
    num_used = Counter[tuple[float, ...]]()
    for flops, *others in sorted(plan_devices.elements(), reverse=True):
        fastest = flops_of.get(tuple(others), [])
        k = num_used[tuple(others)]
        if k >= len(fastest) or flops > fastest[k] * (1 + PRECISION):
            return False
        num_used[tuple(others)] += 1
    return True


def measured_flops(plan: TrainingPlan) -> Floats:
    """``float[N]``: the highest FLOP/s of F, B or H in the plan's times; 0 without a stage."""
    w, times = plan.workload, plan.compute_times
    fastest = np.zeros(len(plan.cluster))
    for d, j in plan.stage_of.items():
        start, stop = plan.stage_layers[j]
        forward = math.fsum(layer.forward_flops for layer in w.layers[start:stop])
        forward += w.stem.forward_flops if start == 0 else 0.0
        # B includes F of the layers that are recomputed
        kept = math.fsum(
            layer.forward_flops for layer in w.layers[start + plan.recompute[j] : stop]
        )
        kept += w.stem.forward_flops if start == 0 and not plan.recompute[j] else 0.0
        again = 1 - kept / forward if forward > 0 else 0.0
        operations = [
            (forward, times.forward_s[d]),
            (2 * forward, times.backward_s[d] - again * times.forward_s[d]),
        ]
        # the head may run on this stage in other plans
        if j == plan.head_stage or times.head_s[d] > 0:
            operations.append((3 * w.head.forward_flops, times.head_s[d]))
        fastest[d] = max(
            (
                w.microbatch_samples * flops / s if s > 0 else math.inf
                for flops, s in operations
                if flops > 0
            ),
            default=0.0,
        )
    return fastest
