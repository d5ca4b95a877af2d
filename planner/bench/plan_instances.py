"""Clusters and models of the benchmark of whole plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.network.catalogue import intra_link, load_network
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.workload.workload import Workload

MIXED = {"Oregon": "A100", "Virginia": "V100", "Frankfurt": "T4"}
"""GPU of each region; eight devices per region."""


def _replicated(name: str, counts: Mapping[str, int]) -> Network:
    inside = intra_link(name)
    assert inside is not None
    return load_network(name).replicate(
        counts,
        intra_latency_s=inside.latency_s,
        intra_bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s,
    )


def regional_cluster(name: str, per_region: int, gpu: str) -> Cluster:
    network = load_network(name).complete()
    if per_region > 1:
        network = _replicated(name, dict.fromkeys(network.ids, per_region))
    return Cluster(network, figures_of(gpu))


def _mixed() -> Cluster:
    network = _replicated("aws8_dtfm_worldwide_2022", dict.fromkeys(MIXED, 8))
    gpus = [Devices.of_gpu(MIXED[region]) for region in network.regions]
    flops = np.array([gpu.flops for gpu in gpus])
    memory = np.array([gpu.memory_bytes for gpu in gpus])
    prices = np.array([gpu.usd_per_hour for gpu in gpus], dtype=float)
    return Cluster(network, Devices(flops, memory, usd_per_hour=prices))


def figures_of(gpu: str) -> Devices:
    """Return a GPU's 16-bit data under no name: V100 and T4 have fp16 only, which plans lack."""
    return replace(Devices.of_gpu(gpu), gpus=None)


MACHINE_S, LAN_S, WAN_S = 5e-6, 1e-4, 0.015

INSIDE, LAN_LINE, WAN_PAIR = 150e9, 25e9 / 8, 5e9 / 8
"""Latency in seconds and bytes per second: within a machine, within and between regions."""


def _machines(regions: Sequence[int]) -> Cluster:
    """Build machines of eight A100 that share one line; ``regions`` lists their regions."""
    machine = np.repeat(np.arange(len(regions)), 8)
    region = np.array(regions)[machine]
    same_machine, same_region = machine[:, None] == machine, region[:, None] == region
    network = Network(
        np.where(same_machine, MACHINE_S, np.where(same_region, LAN_S, WAN_S)),
        np.where(same_machine, INSIDE, np.where(same_region, LAN_LINE, WAN_PAIR)),
        regions=[f"region {k}" for k in region],
    )
    sites = [f"machine {k}" for k in machine]
    lines = dict.fromkeys(sites, LAN_LINE)
    gpu = Devices.of_gpu("A100")
    devices = Devices(
        gpu.flops,
        gpu.memory_bytes,
        sites=sites,
        site_upload_bytes_per_s=lines,
        site_download_bytes_per_s=lines,
        usd_per_hour=gpu.usd_per_hour,
    )
    return Cluster(network, devices)


@dataclass(frozen=True)
class PlanInstance:
    """Cluster and model of an instance.

    Attributes
    ----------
    about
        Short description of devices, network and workload.
    """

    about: str
    cluster: Callable[[], Cluster]
    workload: str
    changes: Mapping[str, int] = field(default_factory=dict)

    def problem(self, request: PlanRequest, seed: int) -> PlanningProblem:
        """Return the planning problem, the same for plans and baselines."""
        return PlanningProblem.of(self.cluster(), self.model(), request, seed, {})

    def model(self) -> Workload:
        """Return the workload."""
        return Workload.preset(self.workload, **self.changes)


INSTANCES = {
    "aws": PlanInstance(
        "aws8_dtfm_worldwide_2022 x 8 V100, gpt3-1.3b",
        lambda: regional_cluster("aws8_dtfm_worldwide_2022", 8, "V100"),
        "gpt3-1.3b",
    ),
    "gcp-t4": PlanInstance(
        "gcp12_skippipe_2025_repaired x 2 T4, llama-1.5b, batch 192",
        lambda: regional_cluster("gcp12_skippipe_2025_repaired", 2, "T4"),
        "llama-1.5b",
        {"batch_samples": 192},
    ),
    "gcp-v100": PlanInstance(
        "gcp12_skippipe_2025_repaired x 4 V100, gpt3-1.3b",
        lambda: regional_cluster("gcp12_skippipe_2025_repaired", 4, "V100"),
        "gpt3-1.3b",
    ),
    "mixed": PlanInstance(
        "aws8_dtfm_worldwide_2022: 8 A100 Oregon, 8 V100 Virginia, 8 T4 Frankfurt, gpt3-1.3b",
        _mixed,
        "gpt3-1.3b",
    ),
    "skyplane": PlanInstance(
        "skyplane_60_20220129, its 57 complete regions x 1 V100, gpt3-1.3b",
        lambda: regional_cluster("skyplane_60_20220129", 1, "V100"),
        "gpt3-1.3b",
    ),
    "two-sites": PlanInstance(
        "dtfm_case3_paper (two sites of 32) V100, gpt3-1.3b",
        lambda: regional_cluster("dtfm_case3_paper", 1, "V100"),
        "gpt3-1.3b",
    ),
    "us": PlanInstance(
        "aws4_dtfm_regional_2022 x 4 A100, gpt3-1.3b",
        lambda: regional_cluster("aws4_dtfm_regional_2022", 4, "A100"),
        "gpt3-1.3b",
    ),
    "fluidstack": PlanInstance(
        "fluidstack_32 (two sites of 16) A40, gpt3-1.3b",
        lambda: regional_cluster("fluidstack_32", 1, "A40"),
        "gpt3-1.3b",
    ),
    "machines": PlanInstance(
        "eight machines of 8 A100, 25 Gb/s each, gpt3-1.3b",
        lambda: _machines([0] * 8),
        "gpt3-1.3b",
    ),
    "machines-wan": PlanInstance(
        "eight machines of 8 A100, 25 Gb/s each, in three regions, 5 Gb/s a pair, gpt3-1.3b",
        lambda: _machines([0, 0, 0, 1, 1, 1, 2, 2]),
        "gpt3-1.3b",
    ),
}
