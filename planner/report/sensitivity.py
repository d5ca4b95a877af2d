"""What a step takes where a pair of regions or devices of a region are slower, or one is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.clock.simulator import step_s
from planner.network.cluster import Cluster, device_limits
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.without import without

SLOWER = 0.7
"""Rate that is left."""
MOST_PAIRS, MOST_REGIONS = 24, 24
"""Priced at most."""


@dataclass(frozen=True)
class Slower:
    """One thing slower, and the step that the plan then takes, in seconds."""

    what: str
    step_s: float


def sensitivity(
    plan: TrainingPlan, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Slower]:
    """The plan priced again on changed clusters, the worst first.

    Pairs of regions with the most devices that may talk come first; within a region is a pair too.
    A region's lines are its devices' whole up- and downloads, and those of sites that they are at.

    Parameters
    ----------
    plan
        What is reported; its decisions stay.
    progress
        Told after each how many are done, of how many.
    """
    network, names = plan.cluster.network, np.array(plan.cluster.network.regions)
    count = {name: int((names == name).sum()) for name in dict.fromkeys(names.tolist())}
    pairs = [(a, b) for k, a in enumerate(count) for b in list(count)[k:] if a != b or count[a] > 1]
    pairs = sorted(pairs, key=lambda p: -count[p[0]] * count[p[1]])[:MOST_PAIRS]
    regions = sorted(count, key=lambda name: -count[name])[:MOST_REGIONS]
    cluster, found, whole = pinned(plan.cluster), [], len(pairs) + 3 * len(regions)
    for a, b in pairs:
        between = np.outer(names == a, names == b) | np.outer(names == b, names == a)
        rate = network.bandwidth_bytes_per_s * np.where(between, SLOWER, 1.0)
        changed = cluster.replace(network=network.replace(bandwidth_bytes_per_s=rate))
        what = f"links within {a}" if a == b else f"links between {a} and {b}"
        found.append(Slower(what, step_s(plan.replace(cluster=changed))))
        progress(len(found), whole)
    for name in regions:
        found.append(Slower(f"devices of {name}", step_s(slower_devices(plan, names == name))))
        progress(len(found), whole)
        found.append(
            Slower(f"lines of {name}", step_s(_slower_lines(plan, cluster, names == name)))
        )
        progress(len(found), whole)
    lost = [_without(plan, name) for name in regions]
    found += [one for one in lost if one is not None]
    progress(whole, whole)
    return sorted(found, key=lambda one: -one.step_s)


def _without(plan: TrainingPlan, region: str) -> Slower | None:
    """A device of the region lost, the first that others of its stage can stand in for."""
    names = plan.cluster.network.regions
    for d in (d for d in sorted(plan.stage_of) if names[d] == region):
        device = plan.cluster.network.ids[d]
        with suppress(PlanError):
            return Slower(f"without {device}", step_s(without(plan, [device])))
    return None


def _slower_lines(
    plan: TrainingPlan, cluster: Cluster, which: np.typing.NDArray[np.bool_]
) -> TrainingPlan:
    devices, part = cluster.devices, np.where(which, SLOWER, 1.0)
    changes: dict[str, Any] = {}
    for name in ("upload", "download"):
        own, of_sites = f"{name}_bytes_per_s", f"site_{name}_bytes_per_s"
        if getattr(devices, own) is not None:
            changes[own] = np.asarray(getattr(devices, own)) * part
        slower = {s for s, slow in zip(devices.sites or (), which, strict=False) if slow}
        lines = getattr(devices, of_sites) or {}
        if lines:
            changes[of_sites] = {s: r * (SLOWER if s in slower else 1.0) for s, r in lines.items()}
    return plan.replace(cluster=cluster.replace(devices=replace(devices, **changes)))


def pinned(cluster: Cluster) -> Cluster:
    """The same with limits of devices written down.

    Where none are stated the fastest pair is taken for them, which must not change with a pair.
    """
    up, down = device_limits(cluster)
    if not (np.isfinite(up).all() and np.isfinite(down).all()):
        return cluster
    devices = replace(cluster.devices, upload_bytes_per_s=up, download_bytes_per_s=down)
    return cluster.replace(devices=devices)


def slower_devices(plan: TrainingPlan, which: np.typing.NDArray[np.bool_]) -> TrainingPlan:
    """The plan with longer operations on some devices.

    Parameters
    ----------
    plan
        What is reported.
    which
        ``bool[N]``.
    """

    def longer(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(s / SLOWER if slow else s for s, slow in zip(seconds, which, strict=True))

    times = plan.compute_times
    changes: dict[str, Any] = {
        name: longer(getattr(times, name))
        for name in ("forward_s", "backward_s", "head_s", "update_s")
        if len(getattr(times, name)) == len(which)
    }
    return plan.replace(compute_times=replace(times, **changes))
