"""Random networks: regions on a map.

All draws come from NumPy's ``default_rng([regions, devices, seed])`` in the order below. Only sums,
products, quotients and square roots are used and results are rounded, so every machine generates
the same network.

1. Regions are uniform on a map of 20,000 x 8,000 km.
2. Each region has a line of 1, 2.5, 5 or 10 Gb/s.
3. One-way latency: 1 ms plus 1.5 times the straight line at 200,000 km/s, rounded to microseconds.
4. Bandwidth from i to j: the smaller line rate, times a factor uniform in [0.6, 1), divided by
   1 + latency / 25 ms, since one connection is slower over a distance; rounded to bytes per second.
5. Devices: one per region, the others in random regions. Within a region: 0.25 ms and 10 Gb/s.
6. With jitter q, the bandwidth of every ordered pair is multiplied by a factor uniform in
   [1 - q, 1 + q) and rounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network

MAP_WIDTH_KM, MAP_HEIGHT_KM = 20_000.0, 8_000.0
LINE_RATES_GBPS = (1.0, 2.5, 5.0, 10.0)
FIBRE_KM_PER_S, DETOUR, MIN_LATENCY_S = 200_000.0, 1.5, 1e-3
HALVING_LATENCY_S = 0.025
SAME_REGION_S, SAME_REGION_BYTES_PER_S = 0.25e-3, 10e9 / 8


def random_network(regions: int, devices: int, seed: int, jitter: float = 0.0) -> Network:
    """Generate a network."""
    if not 1 <= regions <= devices:
        raise ValueError(
            f"{devices} devices in {regions} regions; give a region or more, and a device each"
        )
    rng = np.random.default_rng([regions, devices, seed])
    position = rng.random((regions, 2)) * np.array([MAP_WIDTH_KM, MAP_HEIGHT_KM])
    line = np.array(LINE_RATES_GBPS)[rng.integers(len(LINE_RATES_GBPS), size=regions)] * 1e9 / 8
    latency = latency_between(position)
    share = 0.6 + 0.4 * rng.random((regions, regions))
    narrow = np.minimum(line[:, None], line[None, :])
    bandwidth = np.round(narrow * share / (1 + latency / HALVING_LATENCY_S))
    extra = rng.integers(regions, size=devices - regions)
    region = np.sort(np.concatenate([np.arange(regions), extra]))
    same = region[:, None] == region[None, :]
    pairs = np.ix_(region, region)
    rates = np.where(same, SAME_REGION_BYTES_PER_S, bandwidth[pairs])
    if jitter > 0:
        rates = np.round(rates * (1 - jitter + 2 * jitter * rng.random((devices, devices))))
    return Network(
        np.where(same, SAME_REGION_S, latency[pairs]),
        rates,
        ids=[f"d{k}" for k in range(devices)],
        regions=[f"r{k}" for k in region.tolist()],
    )


def latency_between(position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one-way latencies between places at ``float[P, 2]`` kilometres on a map."""
    offset_km = position[:, None] - position[None, :]
    distance_km = np.sqrt(offset_km[..., 0] ** 2 + offset_km[..., 1] ** 2)
    return np.asarray(np.round(MIN_LATENCY_S + DETOUR * distance_km / FIBRE_KM_PER_S, 6))


def random_cluster(regions: int, devices: int, seed: int, gpus: tuple[str, ...]) -> Cluster:
    """Generate a cluster on a `random_network`; its regions have the given GPUs in turn."""
    network = random_network(regions, devices, seed)
    kinds = [Devices.of_gpu(gpus[int(region[1:]) % len(gpus)]) for region in network.regions]
    return Cluster(
        network,
        Devices(
            np.array([float(np.asarray(kind.flops)) for kind in kinds]),
            np.array([float(np.asarray(kind.memory_bytes)) for kind in kinds]),
        ),
    )
