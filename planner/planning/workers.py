"""Workers: the GPUs of one machine that hold a stage together, planned as one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from planner.network.cluster import Cluster, Devices
from planner.network.gpus import GPUS
from planner.network.link import Link
from planner.network.network import Network
from planner.problems import ProblemError
from planner.utils.text import counted, joined
from planner.workload.tensor_parallel import worker_flops
from planner.workload.workload import Workload


def degrees(cluster: Cluster, workload: Workload) -> list[int]:
    """GPUs per worker that the model can be split into and some machine has, ascending."""
    arch = workload.architecture
    most = max(map(len, _machines(cluster).values()), default=1)
    return [1] + [t for t in range(2, most + 1) if arch is not None and arch.splits_into(t)]


def kinds_of_machines(cluster: Cluster, workload: Workload) -> list[tuple[list[str], list[int]]]:
    """Machines of several GPUs that are nearly equal, and the degrees of each kind.

    The fastest kind is first. Empty if all devices are machines of one kind.
    """
    devices, possible = cluster.devices, degrees(cluster, workload)
    columns = (
        *(cluster.flops, cluster.memory_bytes, devices.gpus),
        *(devices.gpu_link_bytes_per_s, devices.gpu_link_latency_s),
    )
    kinds: dict[tuple[Any, ...], list[str]] = {}
    gpu_flops: dict[tuple[Any, ...], float] = {}
    for (_, machine), gpus in _machines(cluster).items():
        kind = tuple(
            None if x is None else tuple(_rounded(value) for value in np.asarray(x)[gpus].tolist())
            for x in columns
        )
        kinds.setdefault(kind, []).append(machine)
        gpu_flops[kind] = gpu_flops.get(kind, 0.0) + float(cluster.flops[gpus].sum())
    if len(kinds) == 1:
        return []
    return [
        (kinds[kind], options)
        for kind in sorted(kinds, key=gpu_flops.__getitem__, reverse=True)
        if len(options := [t for t in possible if t <= len(kind[0])]) > 1
    ]


def _rounded(value: float | str) -> str:
    """A measured figure to two digits."""
    return value if isinstance(value, str) else f"{value:.2g}"


def is_mix(cluster: Cluster, degree: Mapping[str, int]) -> bool:
    """Whether workers have different numbers of GPUs."""
    return len(set(_degree_of_machines(_machines(cluster), degree).values())) > 1


def mix_words(cluster: Cluster, mix: Mapping[str, int]) -> str:
    """Numbers of GPUs per worker and the machines that have them, in words."""
    by_number: dict[int, list[str]] = {}
    for (_, machine), number in _degree_of_machines(_machines(cluster), mix).items():
        by_number.setdefault(number, []).append(machine)
    each = [f"{number} in {joined(names)}" for number, names in sorted(by_number.items())]
    return f"GPUs a worker: {'; '.join(each)}"


def tensor_parallel_workers(
    cluster: Cluster, workload: Workload, degree: int | Mapping[str, int]
) -> tuple[Cluster, Workload]:
    """The cluster and the workload for plans whose devices are workers of several GPUs.

    Each machine has as many workers as its GPUs allow, of consecutive ones in the cluster's order;
    GPUs that remain take no part. A worker has the FLOP/s of its GPUs less what the collectives of
    sequence parallelism take, their memory, and to other machines the rate of its machine's fastest
    pair. Devices that cannot compute remain.

    Parameters
    ----------
    cluster
        Devices with ``machines`` and GPU links, one GPU each.
    workload
        What to train.
    degree
        GPUs per worker: of all machines, or by machine, 1 in those that it does not name.

    Returns
    -------
    tuple[Cluster, Workload]
        Workers, named by machine (``a``, or ``a/w0``, ``a/w1`` of several), or by their only GPU;
        the workload with the largest number of GPUs as ``tensor_parallel``, with which memory
        counts for all workers.

    Raises
    ------
    ProblemError
        A model that cannot be split so, or a machine with fewer GPUs, if not any.
    """
    machines = _machines(cluster)
    degree_of = _degree_of_machines(machines, degree)
    try:
        # every number must split the model, and the largest one sizes what GPUs replicate
        numbers = {degree} if isinstance(degree, int) else {1, *degree_of.values()}
        split = {t: workload.replace(tensor_parallel=t) for t in numbers}
    except ValueError as error:
        raise ProblemError(str(error)) from None
    workload = split[max(split)]
    if workload.tensor_parallel == 1:
        return cluster, workload
    devices, ids = cluster.devices, cluster.network.ids
    members: list[tuple[int, ...]] = []
    names: list[str] = []
    # devices that remain keep their names
    taken = {ids[d] for d in np.flatnonzero(~np.asarray(devices.can_compute)).tolist()}
    taken |= {ids[d] for key, gpus in machines.items() if degree_of[key] == 1 for d in gpus}
    for (stated, machine), gpus in machines.items():
        t = degree_of[stated, machine]
        several = len(gpus) // t
        for k in range(several):
            members.append(tuple(gpus[k * t : (k + 1) * t]))
            alone = several == 1 and machine not in taken
            names.append(ids[gpus[k]] if t == 1 else machine if alone else f"{machine}/w{k}")
    if not members:
        most = max(map(len, machines.values()), default=1)
        raise ProblemError(
            f"tensor_parallel is {degree}, and no machine has so many GPUs that can compute: the "
            f"largest has {most}; give fewer, or name machines in the devices file"
        )
    if devices.gpu_link_bytes_per_s is None or devices.gpu_link_latency_s is None:
        raise ProblemError(
            "the links between the GPUs of a machine are unknown; give gpu_link_bytes_per_s and "
            "gpu_link_latency_s to Devices"
        )
    for d in np.flatnonzero(~np.asarray(devices.can_compute)).tolist():
        members.append((d,))
        names.append(ids[d])
    # in the network's order, so that regions stay together
    order = sorted(range(len(members)), key=lambda w: members[w])
    members, names = [members[w] for w in order], [names[w] for w in order]
    links = [
        Link(
            float(np.max(np.asarray(devices.gpu_link_latency_s)[list(gpus)])),
            float(np.min(np.asarray(devices.gpu_link_bytes_per_s)[list(gpus)])),
        )
        for gpus in members
    ]
    flops = [
        worker_flops(split[len(gpus)], float(cluster.flops[list(gpus)].min()), link)
        if len(gpus) > 1
        else float(cluster.flops[gpus[0]])
        for gpus, link in zip(members, links, strict=True)
    ]
    network = _worker_network(cluster, members, names)
    worker_devices = _worker_devices(cluster, members, flops)
    if len(set(degree_of.values())) > 1:
        worker_devices = replace(worker_devices, gpu_counts=[len(gpus) for gpus in members])
    return Cluster(network, worker_devices), workload


def unused_gpus(cluster: Cluster, degree: int | Mapping[str, int]) -> str:
    """A line that names GPUs that are in no worker; empty if there are none."""
    machines = _machines(cluster)
    degree_of = _degree_of_machines(machines, degree)
    remaining = {
        (machine, degree_of[stated, machine]): left
        for (stated, machine), gpus in machines.items()
        if (left := len(gpus) % degree_of[stated, machine])
    }
    if not remaining:
        return ""
    (machine, t), many = next(iter(remaining.items()))
    more = f" (and of {len(remaining) - 1} more)" if len(remaining) > 1 else ""
    return f"{counted(many, 'GPU')} of {machine}{more} in no worker of {t}"


def _degree_of_machines(
    machines: Mapping[tuple[bool, str], Sequence[int]], degree: int | Mapping[str, int]
) -> dict[tuple[bool, str], int]:
    """GPUs per worker of each machine; refuses machines that are unknown or too small."""
    if isinstance(degree, int):
        return dict.fromkeys(machines, degree)
    for machine, t in degree.items():
        if (True, machine) not in machines:
            known = ", ".join(name for stated, name in machines if stated) or "none"
            raise ProblemError(
                f"tensor_parallel names machine {machine!r}, and the machines whose GPUs can "
                f"compute are: {known}; name one of them"
            )
        if t > (have := len(machines[True, machine])):
            raise ProblemError(
                f"tensor_parallel is {t} for machine {machine!r}, which has {counted(have, 'GPU')} "
                "that can compute; give fewer"
            )
    return {key: degree.get(key[1], 1) if key[0] else 1 for key in machines}


def _machines(cluster: Cluster) -> dict[tuple[bool, str], list[int]]:
    """GPUs that can compute, by whether their machine is stated, and its name or the device's."""
    devices, ids = cluster.devices, cluster.network.ids
    machines: dict[tuple[bool, str], list[int]] = {}
    for d in np.flatnonzero(np.asarray(devices.can_compute)).tolist():
        machine = "" if devices.machines is None else devices.machines[d]
        machines.setdefault((bool(machine), machine or ids[d]), []).append(d)
    return machines


def _worker_network(
    cluster: Cluster, members: Sequence[tuple[int, ...]], names: Sequence[str]
) -> Network:
    """Links between workers: their fastest pair's bandwidth, their longest latency."""
    network = cluster.network
    first = [gpus[0] for gpus in members]
    latency, bandwidth = (
        table.between(first) for table in (network.latency_table, network.bandwidth_table)
    )
    for u, own in enumerate(members):
        for v, other in enumerate(members):
            if u == v:
                continue
            pairs = np.ix_(own, other)
            latency[u, v] = network.latency_table[pairs].max()
            bandwidth[u, v] = network.bandwidth_table[pairs].max()
    regions = [network.regions[d] for d in first]
    return Network(latency, bandwidth, names, regions)


def _worker_devices(
    cluster: Cluster, members: Sequence[tuple[int, ...]], flops: list[float]
) -> Devices:
    """Properties of workers: sums over their GPUs, of which the smallest memory counts."""
    devices = cluster.devices
    first = [gpus[0] for gpus in members]

    def summed(values: ArrayLike | None) -> list[float] | None:
        """Sums; None if the property is unknown."""
        if values is None:
            return None
        return [float(np.asarray(values)[list(gpus)].sum()) for gpus in members]

    def of_first(values: Sequence[str] | None) -> list[str] | None:
        return None if values is None else [values[d] for d in first]

    def weakest(gpus: tuple[int, ...]) -> str:
        """Name of the GPU whose formats and pace all others must keep to."""
        assert devices.gpus is not None
        names = {d: devices.gpus[d] for d in gpus}
        known = {d: name for d, name in names.items() if name}
        if not known:
            return ""
        return known[min(known, key=lambda d: (GPUS[known[d]].has_bf16, cluster.flops[d]))]

    return replace(
        devices,
        flops=flops,
        memory_bytes=[len(gpus) * cluster.memory_bytes[list(gpus)].min() for gpus in members],
        upload_bytes_per_s=summed(devices.upload_bytes_per_s),
        download_bytes_per_s=summed(devices.download_bytes_per_s),
        **devices.with_sites_of(first),
        can_compute=np.asarray(devices.can_compute)[first],
        can_aggregate=[bool(np.asarray(devices.can_aggregate)[list(g)].all()) for g in members],
        usd_per_hour=summed(devices.usd_per_hour),
        interfaces=of_first(devices.interfaces),
        peak_flops=summed(devices.peak_flops),
        gpus=None if devices.gpus is None else [weakest(gpus) for gpus in members],
        machines=of_first(devices.machines),
        gpu_link_bytes_per_s=np.asarray(devices.gpu_link_bytes_per_s)[first],
        gpu_link_latency_s=np.asarray(devices.gpu_link_latency_s)[first],
        gpu_counts=None,
    )
