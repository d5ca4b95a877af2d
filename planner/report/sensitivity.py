"""Step times of a plan with slower links or devices, or without a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from planner.network.cluster import Cluster, Devices, device_limits
from planner.simulator.simulator import predicted_timeline, step_s
from planner.simulator.timeline import Timeline
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import remove_devices

SLOWER = 0.7
"""Speed of a slowed part, relative to its own."""
MAX_PAIRS, MAX_REGIONS, MAX_SINGLE = 24, 24, 12
"""Most cases: pairs of regions; regions; single links, devices and sites."""

Bools = np.typing.NDArray[np.bool_]
Case = tuple[str, str, Callable[[], TrainingPlan]]
"""Kind and name of what is slowed, and a function that returns the changed plan."""


@dataclass(frozen=True)
class Slower:
    """A slowed part of the cluster, and the plan's step time with it."""

    kind: str
    name: str
    step_s: float

    @property
    def what(self) -> str:
        """Kind and name."""
        return f"{self.kind} {self.name}"


def sensitivity(
    plan: TrainingPlan, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Slower]:
    """Predict the plan's step time on changed clusters.

    Links are slowed between pairs of regions (and within a region), devices and their uplinks and
    downlinks per region, and shared links per site. Where a region has several devices, the busiest
    single links and the devices that compute longest are slowed too. Last, one device per region is
    removed.

    Parameters
    ----------
    plan
        The plan, whose decisions stay the same.
    progress
        Called with the number of finished and of all cases.

    Returns
    -------
    list[Slower]
        Slowest step first.
    """
    cluster, timeline = pinned(plan.cluster), predicted_timeline(plan)
    cases = [
        *_pairs(plan, cluster, timeline),
        *_devices(plan, timeline),
        *_lines(plan, cluster, timeline),
        *_lost(plan),
    ]
    effects = []
    for kind, name, changed in cases:
        effects.append(Slower(kind, name, step_s(changed())))
        progress(len(effects), len(cases))
    return sorted(effects, key=lambda effect: -effect.step_s)


def _pairs(plan: TrainingPlan, cluster: Cluster, timeline: Timeline) -> Iterator[Case]:
    """Yield cases for the links of pairs of regions, and for single links."""
    names, count = _regions(plan)
    regions = list(count)
    pairs = [(a, b) for k, a in enumerate(regions) for b in regions[k:] if a != b or count[a] > 1]
    for a, b in sorted(pairs, key=lambda p: -count[p[0]] * count[p[1]])[:MAX_PAIRS]:
        between = np.outer(names == a, names == b) | np.outer(names == b, names == a)
        labels = ("links within", a) if a == b else ("links between", f"{a} and {b}")
        yield *labels, partial(_slower_links, plan, cluster, between)
    ids = plan.cluster.network.ids
    single = (sorted(load.ends) for load in timeline.loads if len(load.ends) == 2)
    connected = [(i, j) for i, j in single if max(count[names[i]], count[names[j]]) > 1]
    for i, j in list(dict.fromkeys(connected))[:MAX_SINGLE]:
        between = np.zeros((len(ids), len(ids)), dtype=bool)
        between[i, j] = between[j, i] = True
        name = f"{ids[i]} and {ids[j]}"
        yield "link between", name, partial(_slower_links, plan, cluster, between)


def _devices(plan: TrainingPlan, timeline: Timeline) -> Iterator[Case]:
    """Yield cases for the devices of a region, and for single devices."""
    (names, count), ids = _regions(plan), plan.cluster.network.ids
    for name in _largest(count):
        yield "devices of", name, partial(slower_devices, plan, names == name)
    busy = np.zeros(len(ids))
    for op in timeline.ops:
        busy[op.device] += op.end_s - op.start_s
    longest = [d for d in np.argsort(-busy, kind="stable").tolist() if count[names[d]] > 1]
    for d in longest[:MAX_SINGLE]:
        if busy[d] > 0:
            yield "device", ids[d], partial(slower_devices, plan, np.arange(len(ids)) == d)


def _lines(plan: TrainingPlan, cluster: Cluster, timeline: Timeline) -> Iterator[Case]:
    """Yield cases for the uplinks and downlinks of regions, single devices and sites."""
    (names, count), ids = _regions(plan), plan.cluster.network.ids
    for name in _largest(count):
        yield "uplinks and downlinks of", name, partial(_slower_lines, plan, cluster, names == name)
    single = [x.ends[0] for x in timeline.loads if len(x.ends) == 1 and count[names[x.ends[0]]] > 1]
    for d in list(dict.fromkeys(single))[:MAX_SINGLE]:
        of_it = np.arange(len(ids)) == d
        yield "uplink and downlink of", ids[d], partial(_slower_lines, plan, cluster, of_it, False)
    inside = plan.cluster.inside
    sites = Counter({site: int(members.sum()) for site, members in inside.items()})
    for site, devices in sites.most_common(MAX_SINGLE):
        if devices > 1 and any(site in (x or {}) for x in _site_lines(plan)):
            yield "shared link of site", site, partial(_slower_site, plan, cluster, site)


def _lost(plan: TrainingPlan) -> Iterator[Case]:
    """Yield a case without a device for each region where others of its stage can replace one."""
    names, count = _regions(plan)
    for name in _largest(count):
        for d in (d for d in sorted(plan.stage_of) if names[d] == name):
            device = plan.cluster.network.ids[d]
            with suppress(PlanError):
                remaining = remove_devices(plan, [device])
                yield "without", device, remaining.replace
                break


def _regions(plan: TrainingPlan) -> tuple[np.typing.NDArray[np.str_], dict[str, int]]:
    """Return the region of each device, and the number of devices in each region."""
    names = np.array(plan.cluster.network.regions)
    return names, {name: int((names == name).sum()) for name in dict.fromkeys(names.tolist())}


def _largest(count: dict[str, int]) -> list[str]:
    return sorted(count, key=lambda name: -count[name])[:MAX_REGIONS]


def _slower_links(plan: TrainingPlan, cluster: Cluster, which: Bools) -> TrainingPlan:
    network = cluster.network
    rate = network.bandwidth_bytes_per_s * np.where(which, SLOWER, 1.0)
    slower = network.replace(bandwidth_bytes_per_s=rate)
    return plan.replace(cluster=cluster.replace(network=slower))


def _site_lines(plan: TrainingPlan) -> tuple[Mapping[str, float] | None, ...]:
    devices = plan.cluster.devices
    return devices.site_upload_bytes_per_s, devices.site_download_bytes_per_s


def _slower_lines(
    plan: TrainingPlan, cluster: Cluster, which: Bools, sites: bool = True
) -> TrainingPlan:
    """Slow the uplinks and downlinks of devices, and the shared links of their sites."""
    devices, factor = cluster.devices, np.where(which, SLOWER, 1.0)
    changes: dict[str, Any] = {
        name: np.asarray(getattr(devices, name)) * factor
        for name in ("upload_bytes_per_s", "download_bytes_per_s")
        if getattr(devices, name) is not None
    }
    changed = replace(devices, **changes)
    slower = {s for s, slow in zip(devices.sites or (), which, strict=False) if slow and sites}
    if sites:
        # and of sites around them, where all devices are among these
        slower |= {site for site, members in cluster.inside.items() if not (members & ~which).any()}
    return plan.replace(cluster=cluster.replace(devices=_slower_sites(changed, slower)))


def _slower_site(plan: TrainingPlan, cluster: Cluster, site: str) -> TrainingPlan:
    return plan.replace(cluster=cluster.replace(devices=_slower_sites(cluster.devices, {site})))


def _slower_sites(devices: Devices, which: set[str]) -> Devices:
    changes: dict[str, Any] = {
        name: {site: rate * (SLOWER if site in which else 1.0) for site, rate in lines.items()}
        for name in ("site_upload_bytes_per_s", "site_download_bytes_per_s")
        if (lines := getattr(devices, name))
    }
    return replace(devices, **changes)


def pinned(cluster: Cluster) -> Cluster:
    """Return the cluster with explicit upload and download limits.

    Missing limits default to the fastest measured pair, which must not change with the slowed pair.
    """
    up, down = device_limits(cluster)
    if not (np.isfinite(up).all() and np.isfinite(down).all()):
        return cluster
    devices = replace(cluster.devices, upload_bytes_per_s=up, download_bytes_per_s=down)
    return cluster.replace(devices=devices)


def slower_devices(plan: TrainingPlan, which: Bools) -> TrainingPlan:
    """Return the plan with longer operations on some devices.

    Parameters
    ----------
    plan
        The plan.
    which
        ``bool[N]``, the slowed devices.
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
