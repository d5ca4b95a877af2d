"""Workers of several GPUs, derived from a cluster of GPUs, for comparison with a plan's."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from planner.checker.plan_network import sites_around
from planner.network.cluster import Cluster
from planner.network.gpus import GPUS
from planner.network.network import Network
from planner.workload.workload import Workload


def worker_cluster(cluster: Cluster, workload: Workload) -> Cluster | None:
    """Cluster of the workers that a workload with tensor parallelism asks for; None without any.

    A worker is the next ``tensor_parallel`` GPUs of a machine. Per sample it computes F and B,
    three times the FLOPs of F, on all its GPUs at the pace of the slowest; and on the slowest of
    its links each GPU receives the activations of all others: four times in F of a layer, six
    times in B, twice for the embedding and twice for the head.
    """
    t, d = workload.tensor_parallel, cluster.devices
    computes = np.asarray(d.can_compute).tolist()
    ids = cluster.network.ids
    machines = [""] * len(ids) if d.machines is None else list(d.machines)
    # a device of no machine may be called as one
    places = [(m, "") if m else ("", name) for m, name in zip(machines, ids, strict=True)]
    kept = [name for name, can in zip(ids, computes, strict=True) if not can]
    by_place = sorted((k for k, can in enumerate(computes) if can), key=lambda k: (places[k], k))
    found: list[tuple[list[int], str]] = []
    for (machine, name), group in groupby(by_place, key=lambda k: places[k]):
        gpus = list(group)
        parts = [gpus[k : k + t] for k in range(0, len(gpus) - t + 1, t)]
        names = [f"{machine or name}/w{k}" for k in range(len(parts))]
        if len(parts) == 1 and (machine or name) not in kept:
            names = [machine or name]
        found += zip(parts, names, strict=True)
    if not found or d.gpu_link_bytes_per_s is None or d.gpu_link_latency_s is None:
        return None
    found += [([k], ids[k]) for k, can in enumerate(computes) if not can]
    found.sort(key=lambda worker: worker[0])
    link, delay = np.asarray(d.gpu_link_bytes_per_s), np.asarray(d.gpu_link_latency_s)
    arch, w = workload.architecture, workload
    assert arch is not None
    work = 3 * sum(part.forward_flops for part in (w.stem, *w.layers, w.head))
    count = (4 + 6) * len(w.layers) + 2 + 2
    part_bytes = arch.sequence * arch.hidden * w.precision.compute.bytes / t
    speed = []
    for gpus, _ in found:
        slowest = float(cluster.flops[gpus].min())
        if len(gpus) == 1:
            speed.append(slowest)
            continue
        exchange_s = part_bytes * (t - 1) / float(link[gpus].min()) + float(delay[gpus].max())
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
    )
    return Cluster(network, devices)
