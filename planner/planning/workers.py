"""Workers: the GPUs of one machine that hold a stage together, planned as one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from planner.network.cluster import Cluster, Devices
from planner.network.gpus import GPUS
from planner.network.link import Link
from planner.network.network import Network
from planner.problems import ProblemError
from planner.utils.text import counted
from planner.workload.tensor_parallel import worker_flops
from planner.workload.workload import Workload


def degrees(cluster: Cluster, workload: Workload) -> list[int]:
    """GPUs per worker that the model can be split into and some machine has, ascending."""
    arch = workload.architecture
    most = max(map(len, _machines(cluster).values()), default=1)
    return [1] + [t for t in range(2, most + 1) if arch is not None and arch.splits_into(t)]


def tensor_parallel_workers(
    cluster: Cluster, workload: Workload, degree: int
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
        GPUs per worker.

    Returns
    -------
    tuple[Cluster, Workload]
        Workers, named by machine (``a``, or ``a/w0``, ``a/w1`` of several); the workload with
        ``tensor_parallel``.

    Raises
    ------
    ProblemError
        A model that cannot be split so, or no machine with so many GPUs.
    """
    try:
        workload = workload.replace(tensor_parallel=degree)
    except ValueError as error:
        raise ProblemError(str(error)) from None
    if degree == 1:
        return cluster, workload
    devices, ids = cluster.devices, cluster.network.ids
    machines = _machines(cluster)
    members: list[tuple[int, ...]] = []
    names: list[str] = []
    # devices that remain keep their names
    taken = {ids[d] for d in np.flatnonzero(~np.asarray(devices.can_compute)).tolist()}
    for (_, machine), gpus in machines.items():
        several = len(gpus) // degree
        for k in range(several):
            members.append(tuple(gpus[k * degree : (k + 1) * degree]))
            alone = several == 1 and machine not in taken
            names.append(machine if alone else f"{machine}/w{k}")
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
        worker_flops(workload, float(cluster.flops[list(gpus)].min()), link)
        if len(gpus) > 1
        else float(cluster.flops[gpus[0]])
        for gpus, link in zip(members, links, strict=True)
    ]
    network = _worker_network(cluster, members, names)
    return Cluster(network, _worker_devices(cluster, members, flops)), workload


def unused_gpus(cluster: Cluster, degree: int) -> str:
    """A line that names GPUs that are in no worker; empty if there are none."""
    if degree == 1:
        return ""
    remaining = {
        machine: len(gpus) % degree
        for (_, machine), gpus in _machines(cluster).items()
        if len(gpus) % degree
    }
    if not remaining:
        return ""
    machine, many = next(iter(remaining.items()))
    more = f" (and of {len(remaining) - 1} more)" if len(remaining) > 1 else ""
    return f"{counted(many, 'GPU')} of {machine}{more} in no worker of {degree}"


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
    )
