"""Workers of several GPUs, derived from a cluster of GPUs, for comparison with a plan's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, islice, product
from typing import Any

import numpy as np

from planner.checker.plan_network import sites_around
from planner.network.cluster import Cluster
from planner.network.gpus import GPUS
from planner.network.network import Network
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

MAX_GUESSES = 64
"""Numbers of GPUs of machines without a part in the plan that are tried."""


def workers_of_plan(plan: TrainingPlan, cluster: Cluster) -> Iterator[Cluster]:
    """Clusters of the workers that a plan with tensor parallelism may have been made for.

    Of machines without a part in the plan, their workers' names decide how many GPUs each has, of
    which several numbers may be possible.
    """
    own, arch = plan.cluster.devices, plan.workload.architecture
    if own.gpu_counts is None:
        found = worker_cluster(cluster, plan.workload)
        yield from () if found is None else (found,)
        return
    computes = np.asarray(own.can_compute).tolist()
    rows = zip(own.machines or (), np.asarray(own.gpu_counts).tolist(), computes, strict=False)
    of_machine = {machine: count for machine, count, can in rows if machine and can}
    sizes = Counter(cluster.devices.machines or ())
    idle, left_out = sorted(sizes.keys() - {"", *of_machine}), set(plan.left_out)
    options: dict[str, list[int]] = {machine: [] for machine in idle}
    for count in range(1, plan.workload.tensor_parallel + 1):
        if count > 1 and (arch is None or not arch.splits_into(count)):
            continue
        members = _members(cluster, of_machine | dict.fromkeys(idle, count))
        in_plan = {_machine(cluster, gpus[0]) for gpus, name in members if name not in left_out}
        for machine in idle:
            if machine not in in_plan and sizes[machine] >= count:
                options[machine].append(count)
    for guess in islice(product(*(counts or [1] for counts in options.values())), MAX_GUESSES):
        found = worker_cluster(
            cluster, plan.workload, of_machine | dict(zip(idle, guess, strict=True))
        )
        if found is not None:
            yield found


def worker_cluster(
    cluster: Cluster, workload: Workload, of_machine: Mapping[str, int] | None = None
) -> Cluster | None:
    """Cluster of workers of ``tensor_parallel`` GPUs, or of so many by machine; None without any.

    Per sample a worker computes F and B, three times the FLOPs of F, on all its GPUs at the pace of
    the slowest; and on the slowest of its links each GPU receives the activations of all others:
    four times in F of a layer, six times in B, twice for the embedding and twice for the head.
    """
    d, computes = cluster.devices, np.asarray(cluster.devices.can_compute).tolist()
    found = _members(cluster, workload.tensor_parallel if of_machine is None else of_machine)
    if not found or d.gpu_link_bytes_per_s is None or d.gpu_link_latency_s is None:
        return None
    found += [([k], cluster.network.ids[k]) for k, can in enumerate(computes) if not can]
    found.sort(key=lambda worker: worker[0])
    link, delay = np.asarray(d.gpu_link_bytes_per_s), np.asarray(d.gpu_link_latency_s)
    arch, w = workload.architecture, workload
    assert arch is not None
    work = 3 * sum(part.forward_flops for part in (w.stem, *w.layers, w.head))
    count = (4 + 6) * len(w.layers) + 2 + 2
    all_bytes = arch.sequence * arch.hidden * w.precision.compute.bytes
    speed = []
    for gpus, _ in found:
        slowest, t = float(cluster.flops[gpus].min()), len(gpus)
        if t == 1:
            speed.append(slowest)
            continue
        exchange_s = all_bytes / t * (t - 1) / float(link[gpus].min()) + float(delay[gpus].max())
        speed.append(work / (work / t / slowest + count * exchange_s))
    first = [gpus[0] for gpus, _ in found]

    def total(values: Any) -> Any:
        return None if values is None else [float(np.asarray(values)[g].sum()) for g, _ in found]

    def chosen(values: Any) -> Any:
        return None if values is None else [values[k] for k in first]

    def held(limits: Any) -> Any:
        around = sites_around(d, len(cluster))
        kept = {site for k in first for site in around[k]}
        return limits and {site: rate for site, rate in limits.items() if site in kept}

    def lowest(gpus: list[int]) -> str:
        slow_first = sorted(gpus, key=lambda k: float(cluster.flops[k]))
        named = [name for name in map(list(d.gpus or ()).__getitem__, slow_first) if name]
        named.sort(key=lambda name: GPUS[name].has_bf16)
        return named[0] if named else ""

    n = len(found)
    away, rate = np.zeros((n, n)), np.ones((n, n))
    for i, (own, _) in enumerate(found):
        for j, (other, _) in enumerate(found):
            if i == j:
                continue
            pairs = np.ix_(own, other)
            away[i, j] = cluster.network.latency_table[pairs].max()
            rate[i, j] = cluster.network.bandwidth_table[pairs].max()
    network = Network(
        away, rate, [name for _, name in found], [cluster.network.regions[k] for k in first]
    )
    devices = replace(
        d,
        flops=speed,
        memory_bytes=[len(g) * float(cluster.memory_bytes[g].min()) for g, _ in found],
        upload_bytes_per_s=total(d.upload_bytes_per_s),
        download_bytes_per_s=total(d.download_bytes_per_s),
        sites=chosen(d.sites),
        site_upload_bytes_per_s=held(d.site_upload_bytes_per_s),
        site_download_bytes_per_s=held(d.site_download_bytes_per_s),
        site_within=held(d.site_within),
        can_compute=[computes[k] for k in first],
        can_aggregate=[bool(np.asarray(d.can_aggregate)[g].all()) for g, _ in found],
        usd_per_hour=total(d.usd_per_hour),
        peak_flops=total(d.peak_flops),
        gpus=None if d.gpus is None else [lowest(g) for g, _ in found],
        interfaces=chosen(d.interfaces),
        machines=chosen(d.machines),
        gpu_link_bytes_per_s=link[first],
        gpu_link_latency_s=delay[first],
        gpu_counts=[len(g) for g, _ in found] if of_machine is not None else None,
    )
    return Cluster(network, devices)


def _members(cluster: Cluster, size: int | Mapping[str, int]) -> list[tuple[list[int], str]]:
    """Workers and their names: the next GPUs of a machine, one where a mapping has no number."""
    ids, computes = cluster.network.ids, np.asarray(cluster.devices.can_compute).tolist()
    # a device of no machine may be called as one
    places = [(m, "") if (m := _machine(cluster, k)) else ("", ids[k]) for k in range(len(ids))]

    def asked(place: tuple[str, str]) -> int:
        return size if isinstance(size, int) else size.get(place[0], 1)

    kept = {ids[k] for k, can in enumerate(computes) if not can or asked(places[k]) == 1}
    workers: list[tuple[list[int], str]] = []
    by_place = sorted((k for k, can in enumerate(computes) if can), key=lambda k: (places[k], k))
    for place, group in groupby(by_place, key=lambda k: places[k]):
        gpus, t, machine = list(group), asked(place), place[0] or place[1]
        if t == 1:
            workers += [([k], ids[k]) for k in gpus]
            continue
        parts = [gpus[k : k + t] for k in range(0, len(gpus) - t + 1, t)]
        single = len(parts) == 1 and machine not in kept
        workers += [(p, machine if single else f"{machine}/w{k}") for k, p in enumerate(parts)]
    return workers


def _machine(cluster: Cluster, device: int) -> str:
    machines = cluster.devices.machines
    return machines[device] if machines else ""
