"""Fixed networks and plans of ``python -m benchmarks.fidelity``, so that runs are comparable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.network.catalogue import load_network
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.solve import plan
from planner.search.stop import MaxIterations
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

SEED = 0
SEARCH = 20
"""Iterations of each plan's search: what matters here is not how good a plan is."""
EIGHT = ("Belgium", "Canada", "Iowa", "Japan", "LA", "London", "Oregon", "Taiwan")
"""Locations of the 12."""
UPLOAD = (40, 20, 60, 30, 25, 50, 15, 35)
"""MB/s of each of eight devices; downloads are half as fast again, the other way round."""


def small_model(
    batch: int, microbatch: int, sequence: int, *, vocabulary: int = 4096, tied: bool = False
) -> Workload:
    """Eight layers of 512."""
    arch = Architecture(Family.GPT2, 8, 512, 8, 8, 2048, vocabulary, sequence, tied)
    return Workload.transformer(
        "8 layers of 512", arch, batch_samples=batch, microbatch_samples=microbatch
    )


def _devices(flops: float, **limits: Any) -> Devices:
    return Devices(flops=flops, memory_bytes=16e9, **limits)


def _bandwidth() -> tuple[Cluster, Workload]:
    full_network = load_network("gcp12_skippipe_2025_repaired")
    at = np.ix_(*[[full_network.ids.index(name) for name in EIGHT]] * 2)
    network = Network(full_network.latency_s[at], full_network.bandwidth_bytes_per_s[at], EIGHT)
    return Cluster(network, _devices(4e12)), small_model(64, 2, 1024)


def _latency() -> tuple[Cluster, Workload]:
    network = load_network("aws8_dtfm_worldwide_2022")
    fast = network.replace(bandwidth_bytes_per_s=8 * network.bandwidth_bytes_per_s)
    return Cluster(fast, _devices(1e12)), small_model(48, 1, 512)


def _averaging() -> tuple[Cluster, Workload]:
    return Cluster(load_network("gcp12_skippipe_2025_repaired"), _devices(4e12)), small_model(
        48, 1, 512
    )


def _limits() -> tuple[Cluster, Workload]:
    upload = np.array(UPLOAD) * 1e6
    limits = {"upload_bytes_per_s": upload, "download_bytes_per_s": 1.5 * upload[::-1]}
    network = load_network("aws8_dtfm_worldwide_2022")
    return Cluster(network, _devices(4e12, **limits)), small_model(64, 2, 1024)


def _server() -> tuple[Cluster, Workload]:
    eight = load_network("aws8_dtfm_worldwide_2022")
    counts = {region: 1 + (region == "Oregon") for region in eight.ids}
    network = eight.replicate(counts, intra_latency_s=5e-4, intra_bandwidth_bytes_per_s=5e8)
    serves = np.arange(9) == network.ids.index("Oregon/1")
    upload, download = np.full(9, 200e6), np.full(9, 200e6)
    upload[~serves] = np.array(UPLOAD) * 1e6
    download[~serves] = 1.5 * upload[~serves][::-1]
    limits = {"upload_bytes_per_s": upload, "download_bytes_per_s": download}
    devices = _devices(4e12, can_compute=(~serves).tolist(), **limits)
    return Cluster(network, devices), small_model(64, 2, 1024)


def _sites() -> tuple[Cluster, Workload]:
    two = load_network("aws8_dtfm_worldwide_2022")
    inside = {"intra_latency_s": 5e-4, "intra_bandwidth_bytes_per_s": 5e8}
    network = two.replicate({"Oregon": 5, "Virginia": 3}, **inside)
    sites = [str(region) for region in network.regions]
    lines = {"Oregon": 6e7, "Virginia": 4e7}
    shared = {"site_upload_bytes_per_s": lines, "site_download_bytes_per_s": lines}
    return Cluster(network, _devices(4e12, sites=sites, **shared)), small_model(64, 2, 1024)


def _nested() -> tuple[Cluster, Workload]:
    two = load_network("aws8_dtfm_worldwide_2022")
    inside = {"intra_latency_s": 5e-4, "intra_bandwidth_bytes_per_s": 5e8}
    network = two.replicate({"Oregon": 4, "Virginia": 4}, **inside)
    machines = [f"{region} {d // 2 % 2}" for d, region in enumerate(network.regions)]
    within = dict(zip(machines, map(str, network.regions), strict=True))
    lines = {"Oregon": 6e7, "Virginia": 4e7} | dict.fromkeys(machines, 5e7)
    shared = {"site_upload_bytes_per_s": lines, "site_download_bytes_per_s": lines}
    devices = _devices(4e12, sites=machines, site_within=within, **shared)
    return Cluster(network, devices), small_model(64, 2, 1024)


def _regions() -> tuple[Cluster, Workload]:
    two = load_network("aws8_dtfm_worldwide_2022")
    inside = {"intra_latency_s": 5e-4, "intra_bandwidth_bytes_per_s": 3e8}
    network = two.replicate({"Oregon": 4, "Virginia": 4}, **inside)
    return Cluster(network, _devices(4e12)), small_model(64, 2, 1024)


def _tied() -> tuple[Cluster, Workload]:
    cluster, _ = _bandwidth()
    return cluster, small_model(64, 2, 1024, vocabulary=16384, tied=True)


@dataclass(frozen=True)
class Setting:
    """A network and what is trained on it."""

    about: str
    make: Callable[[], tuple[Cluster, Workload]]


SETTINGS = {
    "bandwidth": Setting("eight of gcp12_skippipe_2025_repaired", _bandwidth),
    "latency": Setting("aws8_dtfm_worldwide_2022 with 8 times the bandwidth", _latency),
    "averaging": Setting("gcp12_skippipe_2025_repaired, twelve devices", _averaging),
    "limits": Setting(
        "aws8_dtfm_worldwide_2022, uploads of 15 to 60 MB/s, downloads of 22 to 90", _limits
    ),
    "shards": Setting("as limits, with a server of 200 MB/s that holds no stage", _server),
    "sites": Setting("five devices behind a line of 60 MB/s, three behind one of 40", _sites),
    "nested": Setting(
        "machines of two behind lines of 50 MB/s, two of them behind one of 60 and one of 40",
        _nested,
    ),
    "tied": Setting("as bandwidth, of a model with 16,384 words and a tied head", _tied),
    "regions": Setting("two regions of four, 300 MB/s and 0.5 ms inside", _regions),
}


@dataclass(frozen=True)
class Case:
    """A plan to run.

    Attributes
    ----------
    fields
        What is asked of `planner.plan`.
    sync
        How often it averages.
    """

    setting: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    sync: Sync = field(default_factory=Sync)

    @property
    def key(self) -> str:
        """Setting and name."""
        return f"{self.setting}/{self.name}"

    def is_of(self, key: str) -> bool:
        """Whether a result with this key is of this case."""
        return key == self.key

    def plan(self) -> TrainingPlan:
        """Search it; the same one every time."""
        cluster, workload = SETTINGS[self.setting].make()
        made = plan(cluster, workload, stop=MaxIterations(SEARCH), seed=SEED, **self.fields).plan
        assert made is not None
        return made.replace(sync=self.sync)


UNEQUAL = ((0, 1), (1, 3), (3, 6), (6, 8))
ONE_STAGE: dict[str, Any] = {"stages": 1, "averaging": "adaptive"}
CASES = (
    Case("bandwidth", "4 x 2", {"stages": 4}),
    Case("bandwidth", "2 x 4", {"stages": 2}),
    Case("bandwidth", "8 x 1", {"stages": 8}),
    Case("bandwidth", "4 x 2, 3 of 4 stages", {"stages": 4, "path_stages": 3, "full_every": 0}),
    Case("bandwidth", "4 x 2, int8 boundaries", {"stages": 4, "boundary_codec": "int8"}),
    Case("latency", "4 x 2", {"stages": 4}),
    Case("latency", "8 x 1", {"stages": 8}),
    Case("latency", "4 x 2, layers 1 2 3 2", {"stages": 4, "stage_layers": UNEQUAL}),
    Case("latency", "4 x 2, 3 of 4 stages", {"stages": 4, "path_stages": 3, "full_every": 2}),
    Case("averaging", "2 x 6", {"stages": 2}),
    Case("averaging", "2 x 6, adaptive", {"stages": 2, "averaging": "adaptive"}),
    Case("averaging", "3 x 4, groups of 2", {"stages": 3, "group_size": 2}),
    Case("averaging", "2 x 6, int8", {"stages": 2, "codec": "int8"}),
    Case("limits", "4 x 2", {"stages": 4}),
    Case("limits", "4 x 2, every 4 steps", {"stages": 4}, Sync(4, OuterOptimizer())),
    Case("limits", "4 x 2, every 2 steps, delayed", {"stages": 4}, Sync(2, delayed=True)),
    Case("limits", "2 x 4, adaptive", {"stages": 2, "averaging": "adaptive"}),
    Case(
        "limits",
        "stages of 4 2 2, 2 of 3",
        {"stages": 3, "stage_sizes": (4, 2, 2), "path_stages": 2, "full_every": 0},
    ),
    Case(
        "limits", "2 x 4, adaptive, int8", {"stages": 2, "averaging": "adaptive", "codec": "int8"}
    ),
    Case("sites", "1 x 8", {"stages": 1}),
    Case("sites", "1 x 8, adaptive", ONE_STAGE),
    Case("sites", "1 x 8, adaptive, int8", {**ONE_STAGE, "codec": "int8"}),
    Case("sites", "2 x 4", {"stages": 2}),
    Case("sites", "everything open", {}),
    Case("sites", "1 x 8, 3 shards, adaptive", {**ONE_STAGE, "optimizer_shards": 3}),
    Case("nested", "1 x 8", {"stages": 1}),
    Case("nested", "1 x 8, adaptive", ONE_STAGE),
    Case("nested", "2 x 4, adaptive", {"stages": 2, "averaging": "adaptive"}),
    Case(
        "limits",
        "1 x 8, 2 shards in 2 copies",
        {**ONE_STAGE, "optimizer_shards": 2, "optimizer_copies": 2},
    ),
    Case("shards", "2 x 4, 4 shards", {"stages": 2, "optimizer_shards": 4}),
    Case(
        "shards",
        "2 x 4, 2 shards, adaptive",
        {"stages": 2, "averaging": "adaptive", "optimizer_shards": 2},
    ),
    Case(
        "shards",
        "1 x 8, 4 shards, adaptive, clipped",
        {**ONE_STAGE, "optimizer_shards": 4, "clip": 1.0},
    ),
    Case("tied", "2 x 4, 2 shards, clipped", {"stages": 2, "optimizer_shards": 2, "clip": 1.0}),
    Case("tied", "4 x 2", {"stages": 4}),
    Case("tied", "2 x 4, adaptive, clipped", {"stages": 2, "averaging": "adaptive", "clip": 1.0}),
    Case("tied", "flow in 3 stages", {"stages": 3, "wiring": "flow"}),
    Case(
        "regions",
        "2 x 4, every 4 steps, regions in each",
        {"stages": 2, "sync_every": 4, "within": "region"},
        Sync(4, OuterOptimizer()),
    ),
)
