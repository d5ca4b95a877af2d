"""Scenes that tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.swarm.queueing import Scenario
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.simulator.resources import LinkResources


def even_links(n: int, latency_s: float, bytes_per_s: float) -> LinkResources:
    """Every pair, and every up- and download, alike."""
    network = Network(np.full((n, n), latency_s), np.full((n, n), bytes_per_s))
    devices = Devices(1.0, 1.0, upload_bytes_per_s=bytes_per_s, download_bytes_per_s=bytes_per_s)
    return LinkResources.of(Cluster(network, devices))


def scene(
    speeds: list[list[float]], latency_s: float = 1e-3, bytes_per_s: float = 1e12, **fields: Any
) -> Scenario:
    """A row of speeds a stage; a microbatch takes 0.1 s forth and 0.2 s back at speed 1."""
    speed = np.array([v for row in speeds for v in row])
    stage = tuple(s for s, row in enumerate(speeds) for _ in row)
    links = even_links(len(speed), latency_s, bytes_per_s)
    given: dict[str, Any] = {"activation_bytes": 1e3, "homes": (0,), "in_flight": 1} | fields
    return Scenario(links, stage, 0.1 / speed, 0.2 / speed, **given)
