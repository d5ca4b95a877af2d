"""Recomputes the cost of a step, message by message."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.checker.certificates import TOLERANCE, compare_stored
from planner.checker.joint_bound import whole_step_bound_s
from planner.checker.plan_network import averaged_bytes
from planner.checker.violation import Violation
from planner.network.prices import Prices
from planner.training_plan.choices import Head, Phase
from planner.training_plan.model import TrainingPlan
from planner.workload.compute_times import FROM_FLOPS

Floats = NDArray[np.float64]


def cost_violations(plan: TrainingPlan) -> Iterator[Violation]:
    """Report dollars and bytes that do not follow from the messages, prices and step time."""
    cost, hourly = plan.cost, plan.cluster.devices.usd_per_hour
    if cost is None:
        if "cost" in plan.certificates:
            yield Violation("cost", "certificates.cost", "the plan states no cost; plan again")
        return
    if hourly is None:
        yield Violation("cost", "cost", "devices have no prices; give them, or leave cost out")
        return
    paid = dollars = 0.0
    for (source, target), size in _sent_bytes(plan).items():
        price = _price(cost.prices, source, target)
        paid += size if price > 0 else 0.0
        dollars += size * price / 1e9
    devices = sum(float(price) for price in np.asarray(hourly)) * plan.predicted.step_s / 3600
    where = "cost.devices_usd", "cost.messages_usd", "cost.paid_bytes"
    for name, actual, stored, unit in zip(
        where,
        (devices, dollars, paid),
        (cost.devices_usd, cost.messages_usd, cost.paid_bytes),
        ("$", "$", "bytes"),
        strict=True,
    ):
        yield from compare_stored(actual, stored, "cost", name, unit=unit)
    arch = plan.workload.architecture
    tokens = None if arch is None else plan.workload.batch_samples * arch.sequence
    if (tokens is None) != (cost.usd_per_billion_tokens is None):
        yield Violation(
            "cost", "cost.usd_per_billion_tokens", "is known where a sample's tokens are"
        )
    elif tokens is not None:
        per_billion_usd = (devices + dollars) / tokens * 1e9
        stated = cost.usd_per_billion_tokens
        yield from compare_stored(
            per_billion_usd, stated, "cost", "cost.usd_per_billion_tokens", unit="$"
        )
    certificate = plan.certificates.get("cost")
    if certificate is None:
        return
    least = devices + dollars + cost.hour_usd * plan.predicted.step_s / 3600
    objective = "certificates.cost.objective"
    yield from compare_stored(least, certificate.objective, "cost", objective, unit="$")
    bound = certificate.bound
    if bound is not None and not 0 <= bound <= least * (1 + TOLERANCE):
        yield Violation(
            "bound", "certificates.cost.bound", f"must be 0 to {least:g} $, found {bound:g} $"
        )


def cost_bound_usd(witness: Mapping[str, Any], plan: TrainingPlan) -> float | None:
    """Least cost of computing at each price per FLOP, plus waiting for the shortest step."""
    hourly, w = plan.cluster.devices.usd_per_hour, plan.workload
    if hourly is None or plan.cost is None or plan.compute_times.source != FROM_FLOPS:
        return None
    device_kinds = Counter(
        zip(plan.cluster.flops.tolist(), np.asarray(hourly).tolist(), strict=True)
    )
    try:
        listed = Counter[tuple[float, float]]()
        for row in witness["devices"]:
            listed[float(row["flops"]), float(row["usd_per_hour"])] += int(row["count"])
        if any(count > listed[kind] for kind, count in device_kinds.items()):
            return None
        if not all(flops > 0 and price >= 0 for flops, price in listed):
            return None
        least = min(price / 3600 / flops for flops, price in listed)
        layers = [w.stem, *w.layers, w.head]
        dollars = 3 * sum(layer.forward_flops for layer in layers) * w.batch_samples * least
        if "step_s" in witness:
            proven = whole_step_bound_s(witness["step"], plan, float(witness["step_s"]))
            if proven is None:
                return None
            dollars += plan.cost.hour_usd / 3600 * proven
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return dollars


def _sent_bytes(plan: TrainingPlan) -> dict[tuple[str, str], float]:
    """Mean bytes per step by the regions of sender and receiver."""
    w, region_of = plan.workload, plan.cluster.network.regions
    sent: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(d: int, e: int, size: float) -> None:
        if d != e:
            sent[region_of[d], region_of[e]] += size

    stage_of = plan.stage_of
    last = [w.layers[stop - 1] for _, stop in plan.stage_layers]
    output_bytes = [layer.output_bytes * w.microbatch_samples for layer in last]
    for k in plan.cycle:
        schedule = plan.schedules[k]
        for path in schedule.paths:
            route = list(path)
            if schedule.head is Head.FIRST:
                route.append(path[0])
            for d, e in pairwise(route):
                size = output_bytes[stage_of[d]] / len(plan.cycle)
                add(d, e, size)
                add(e, d, size)
    for stage, rounds in enumerate(plan.averaging):
        for groups in rounds:
            for group in groups:
                period_steps = 1 if group.phase is Phase.WITHIN else plan.sync.every_steps
                pair_bytes = averaged_bytes(plan, stage, group) / period_steps
                places: dict[str, list[int]] = {}
                for i, d in enumerate(group.members):
                    places.setdefault(region_of[d], []).append(i)
                for source, senders in places.items():
                    from_source = pair_bytes[senders].sum(axis=0)
                    for target, receivers in places.items():
                        sent[source, target] += float(from_source[receivers].sum())
    return sent


def _price(prices: Prices, source: str, target: str) -> float:
    """Dollars per gigabyte: the first rule that matches, else by region and provider."""
    if source == target:
        # a wildcard is another region
        return next((price for a, b, price in prices.rules if a == b == source), 0.0)
    matching = [
        price
        for a, b, price in prices.rules
        if (a == "*" or a == source) and (b == "*" or b == target)
    ]
    if matching:
        return matching[0]
    provider, other_provider = (
        name.split(":")[0] if ":" in name else "" for name in (source, target)
    )
    return prices.between_regions if provider == other_provider else prices.between_providers
