"""Random jobs: what people have, from machines in data centres to homes, and what they train.

All draws come from NumPy's ``default_rng([number, 4])`` in the order below. Only sums, products,
quotients and square roots are used and results are rounded, so every machine generates the same
job.

1. Kind of places: the number modulo 4 is an index of `PLACES`.
2. Number of places, their positions, uniform on a map of as many kilometres, and the GPU of each.
3. Number of machines of each place, GPUs of each machine, and lines of machines, in Gb/s.
4. One-way latency between places: 1 ms plus 1.5 times the straight line at 200,000 km/s, rounded to
   microseconds; within a place 0.1 ms, within a machine 5 us. A pair of machines has the smaller of
   their lines, divided by 1 + latency / 25 ms, since one connection is slower over a distance.
5. Model: uniform among those of `MODELS` whose state, 18 bytes a parameter, takes at most a third
   of all memory, or the smallest; batch uniform among `BATCHES`. Samples have 2,048 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.bench.network_generator import HALVING_LATENCY_S, latency_between
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

MODELS = {
    "1B": (16, 2048, 32, 8, 8192, 128256),
    "3B": (28, 3072, 24, 8, 8192, 128256),
    "8B": (32, 4096, 32, 8, 14336, 128256),
    "32B": (64, 5120, 40, 8, 25600, 151936),
    "70B": (80, 8192, 64, 8, 28672, 128256),
}
"""Layers, hidden size, heads, key-value heads, feed-forward size and vocabulary."""
BATCHES = (64, 128, 256)
SEQUENCE = 2048
STATE_BYTES, MOST_STATE = 18.0, 1 / 3
PLACE_S, MACHINE_S, MACHINE_GBPS = 1e-4, 5e-6, 200.0


@dataclass(frozen=True)
class Places:
    """Distribution of places of one kind.

    Attributes
    ----------
    name
        For people.
    places, machines
        Least and largest number of places, and of machines in a place.
    gpus
        GPUs of a machine, any of these numbers.
    kinds
        GPUs, one kind for each place.
    lines_gbps
        Upload and download of a machine, any of these pairs.
    km
        Width and height of the map.
    """

    name: str
    places: tuple[int, int]
    machines: tuple[int, int]
    gpus: tuple[int, ...]
    kinds: tuple[str, ...]
    lines_gbps: tuple[tuple[float, float], ...]
    km: float


PLACES = (
    Places(
        "data centres",
        (1, 3),
        (2, 5),
        (8,),
        ("A100-80GB", "H100"),
        ((25.0, 25.0), (50.0, 50.0), (100.0, 100.0)),
        5_000.0,
    ),
    Places(
        "three sites",
        (3, 3),
        (2, 6),
        (1, 2, 4),
        ("L40S", "A40", "RTX4090"),
        ((1.0, 1.0), (10.0, 10.0)),
        3_000.0,
    ),
    Places(
        "homes",
        (10, 24),
        (1, 1),
        (1, 2),
        ("RTX3090", "RTX4090", "RTX5090"),
        ((0.05, 0.25), (0.1, 0.1), (0.5, 1.0), (1.0, 1.0)),
        2_500.0,
    ),
    Places(
        "mixed clouds",
        (3, 5),
        (2, 4),
        (1, 4),
        ("A10G", "L4", "A100", "A100-80GB"),
        ((5.0, 5.0), (10.0, 10.0), (25.0, 25.0)),
        12_000.0,
    ),
)


@dataclass(frozen=True)
class Job:
    """A cluster, a workload, and a description of both."""

    about: str
    cluster: Cluster
    workload: Workload


def places_of(number: int) -> Places:
    """Return the distribution that a job is drawn from."""
    return PLACES[number % len(PLACES)]


def random_job(number: int) -> Job:
    """Generate a job."""
    rng, kind = np.random.default_rng([number, 4]), places_of(number)
    count = int(rng.integers(kind.places[0], kind.places[1] + 1))
    position = rng.random((count, 2)) * kind.km
    gpu_of = rng.integers(len(kind.kinds), size=count)
    machines = rng.integers(kind.machines[0], kind.machines[1] + 1, size=count)
    place = np.repeat(np.arange(count), machines)
    gpus = np.array(kind.gpus)[rng.integers(len(kind.gpus), size=len(place))]
    lines = np.array(kind.lines_gbps)[rng.integers(len(kind.lines_gbps), size=len(place))]
    machine = np.repeat(np.arange(len(place)), gpus)
    network = _network(position, place, machine, lines * 1e9 / 8)
    cluster = Cluster(network, _devices([kind.kinds[k] for k in gpu_of], place, machine, lines))
    memory = float(cluster.memory_bytes.sum())
    models = {name: _workload(name, BATCHES[0]) for name in MODELS}
    fits = [
        name
        for name, model in models.items()
        if model.parameters * STATE_BYTES <= MOST_STATE * memory
    ]
    name = (fits or list(MODELS)[:1])[int(rng.integers(max(len(fits), 1)))]
    batch = BATCHES[int(rng.integers(len(BATCHES)))]
    about = (
        f"random_job({number}): {len(cluster)} GPUs in {len(place)} machines, {count} places "
        f"({kind.name}), {name}, batch {batch}"
    )
    return Job(about, cluster, _workload(name, batch))


def _network(
    position: np.ndarray, place: np.ndarray, machine: np.ndarray, lines: np.ndarray
) -> Network:
    """Links of all pairs of GPUs."""
    between_s = latency_between(position)
    of = place[machine]
    same_place, same_machine = of[:, None] == of[None, :], machine[:, None] == machine[None, :]
    latency = np.where(same_place, PLACE_S, between_s[np.ix_(of, of)])
    up, down = lines[machine].T
    rate = np.minimum(up[:, None], down[None, :]) / (1 + latency / HALVING_LATENCY_S)
    return Network(
        np.where(same_machine, MACHINE_S, latency),
        np.where(same_machine, MACHINE_GBPS * 1e9 / 8, np.round(rate)),
        ids=[f"g{k}" for k in range(len(machine))],
        regions=[f"p{k}" for k in of.tolist()],
    )


def _devices(gpus: list[str], place: np.ndarray, machine: np.ndarray, lines: np.ndarray) -> Devices:
    """The GPUs of all machines, which share their machine's line."""
    kinds = [Devices.of_gpu(gpus[p]) for p in place[machine]]
    sites = [f"m{k}" for k in machine.tolist()]
    limits = [
        {f"m{k}": float(rate) for k, rate in enumerate(column)} for column in (lines * 1e9 / 8).T
    ]
    return Devices(
        np.array([float(np.asarray(kind.flops)) for kind in kinds]),
        np.array([float(np.asarray(kind.memory_bytes)) for kind in kinds]),
        sites=sites,
        site_upload_bytes_per_s=limits[0],
        site_download_bytes_per_s=limits[1],
    )


def _workload(name: str, batch: int) -> Workload:
    layers, hidden, heads, kv_heads, ffn, vocabulary = MODELS[name]
    arch = Architecture(Family.LLAMA, layers, hidden, heads, kv_heads, ffn, vocabulary, SEQUENCE)
    return Workload.transformer(name, arch, batch_samples=batch)
