"""Networks and problems of the assignment benchmark."""

from __future__ import annotations

import numpy as np

from planner.network.catalogue import load_network
from planner.network.network import Network
from planner.problems import AssignmentProblem

ACTIVATION_BYTES = 471249222.7554321
"""Activation bytes (c_PP) of the public DT-FM scheduler's five cases."""

GRADIENT_BYTES = 0.65e9
SKYPLANE_ACTIVATION_BYTES = 0.47e9
REGIONS = 56

INTRA_LATENCY_S = 0.5e-3
INTRA_BANDWIDTH_BYTES_PER_S = 10e9 / 8
JITTER = 0.1


def dtfm_case(case: int) -> AssignmentProblem:
    """Return case 1 to 5 of DT-FM with the constants of its public code: 64 devices, 8 x 8."""
    network = load_network(f"dtfm_case{case}_code")
    return AssignmentProblem(network, 8, 8, ACTIVATION_BYTES, GRADIENT_BYTES)


def skyplane_regions() -> Network:
    """Return the first 56 regions by name of the complete part of Skyplane's table."""
    network = load_network("skyplane_60_20220129").complete()
    return network.subset(sorted(network.ids)[:REGIONS])


def skyplane() -> AssignmentProblem:
    """One device in each of 56 cloud regions, 7 pipelines x 8 stages; all pairs differ."""
    return AssignmentProblem(skyplane_regions(), 8, 7, SKYPLANE_ACTIVATION_BYTES, GRADIENT_BYTES)


def jittered(devices: int, stages: int = 8, seed: int = 0) -> AssignmentProblem:
    """Copy the Skyplane regions in turn and multiply every link by lognormal noise.

    Devices of one region are 0.5 ms and 10 Gb/s apart before the noise (sigma 0.1), so no two
    devices are interchangeable.
    """
    base = skyplane_regions()
    count, extra = divmod(devices, len(base))
    counts = {name: count + (i < extra) for i, name in enumerate(base.ids) if count + (i < extra)}
    network = base.replicate(
        counts,
        intra_latency_s=INTRA_LATENCY_S,
        intra_bandwidth_bytes_per_s=INTRA_BANDWIDTH_BYTES_PER_S,
    )
    rng = np.random.default_rng(seed)
    noise = np.exp(JITTER * rng.standard_normal((2, devices, devices)))
    noisy = network.replace(
        latency_s=network.latency_s * noise[0],
        bandwidth_bytes_per_s=np.where(
            np.eye(devices, dtype=bool), 1.0, network.bandwidth_bytes_per_s
        )
        * noise[1],
    )
    return AssignmentProblem(
        noisy, stages, devices // stages, SKYPLANE_ACTIVATION_BYTES, GRADIENT_BYTES
    )
