"""Random networks and plans for ``python -m benchmarks.fidelity --random``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.fidelity.cases import SEARCH, small_model
from planner.emulate.execution import planned_steps
from planner.network.catalogue import load_network
from planner.network.cluster import Cluster, Devices, device_limits
from planner.network.network import Network
from planner.planning.solve import plan
from planner.problems import ProblemError
from planner.search.stop import MaxIterations
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.model import Routing, TrainingPlan
from planner.workload.workload import Workload

MEASURED = ("aws8_dtfm_worldwide_2022", "gcp12_skippipe_2025_repaired", "skyplane_60_20220129")
MIN_DEVICES, MAX_DEVICES = 4, 8
"""Devices: processes that two cores can serve."""
KEPT = Routing(smoothing=0.0)
LONGEST_S = 120.0
"""Of all steps of a plan together, as predicted."""


@dataclass(frozen=True)
class RandomCase:
    """A plan on a network, both drawn.

    Attributes
    ----------
    seed
        Of every choice; the same case each time.
    """

    seed: int

    def is_of(self, key: str) -> bool:
        """Whether a result with this key is of this case; nothing is drawn for it."""
        return key.startswith(f"random/{self.seed}: ")

    @property
    def key(self) -> str:
        """Seed and what was drawn."""
        return f"random/{self.seed}: {self._drawn[0]}"

    def plan(self) -> TrainingPlan:
        """The plan of this seed."""
        return self._drawn[1]

    @cached_property
    def _drawn(self) -> tuple[str, TrainingPlan]:
        rng = np.random.default_rng(self.seed)
        while True:
            cluster, where = _cluster(rng)
            workload, fields = _workload(rng), _fields(rng, cluster)
            try:
                made = plan(
                    cluster, workload, stop=MaxIterations(SEARCH), seed=self.seed, **fields
                ).plan
            except ProblemError:
                continue  # what was drawn does not go together
            if made is None:
                continue
            step_s = simulate_cycle(made)[0].step_s
            if step_s * sum(planned_steps(made, 5, 5)) <= LONGEST_S:
                named = {name: value for name, value in fields.items() if name != "routing"}
                settings = [f"{name} {_word(value)}" for name, value in named.items()]
                return ", ".join([where, *(settings or ["everything open"])]), made


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _cluster(rng: Generator) -> tuple[Cluster, str]:
    apart = rng.random() < 0.5
    network = _apart(rng) if apart else _regions(rng)
    count = len(network.ids)
    flops = np.full(count, np.exp(rng.uniform(np.log(1e12), np.log(8e12))))
    traits = [f"{count} devices" if apart else f"{count} in {len(set(network.regions))} regions"]
    if rng.random() < 0.5:
        flops *= rng.choice((0.5, 1.0, 2.0), count)
        traits.append("unlike")
    limits: dict[str, Any] = {}
    fastest = device_limits(Cluster(network, Devices(flops=flops, memory_bytes=16e9)))[0]
    drawn = rng.random()
    if drawn < 0.35:
        for direction in ("upload", "download"):
            limits[f"{direction}_bytes_per_s"] = fastest * rng.uniform(0.3, 1.5, count)
        traits.append("limited")
    elif drawn < 0.7 and not apart:
        sites = [str(region) for region in network.regions]
        shared = {
            site: float(fastest[[s == site for s in sites]].max() * rng.uniform(0.2, 1.0))
            for site in dict.fromkeys(sites)
        }
        limits = {f"site_{direction}_bytes_per_s": shared for direction in ("upload", "download")}
        limits["sites"] = sites
        traits.append("shared lines")
    return Cluster(network, Devices(flops=flops, memory_bytes=16e9, **limits)), " ".join(traits)


def _apart(rng: Generator) -> Network:
    """A part of a measured network, its bandwidths scaled."""
    full_network = load_network(str(rng.choice(MEASURED))).complete()
    count = int(rng.integers(MIN_DEVICES, MAX_DEVICES + 1))
    part = full_network.subset(sorted(rng.choice(full_network.ids, count, replace=False).tolist()))
    scale = np.exp(rng.uniform(np.log(0.5), np.log(8)))
    return part.replace(bandwidth_bytes_per_s=scale * part.bandwidth_bytes_per_s)


def _regions(rng: Generator) -> Network:
    """Two or three regions, several devices in each."""
    full_network = load_network("aws8_dtfm_worldwide_2022")
    chosen = rng.choice(full_network.ids, int(rng.integers(2, 4)), replace=False).tolist()
    counts = dict.fromkeys(sorted(chosen), 1)
    for _ in range(int(rng.integers(MIN_DEVICES, MAX_DEVICES + 1)) - len(chosen)):
        counts[str(rng.choice(chosen))] += 1
    return full_network.replicate(
        counts,
        intra_latency_s=float(rng.uniform(3e-4, 5e-3)),
        intra_bandwidth_bytes_per_s=float(rng.uniform(1e8, 5e8)),
    )


def _workload(rng: Generator) -> Workload:
    return small_model(
        int(rng.choice((24, 32, 48, 64))), int(rng.choice((1, 2))), int(rng.choice((512, 1024)))
    )


def _fields(rng: Generator, cluster: Cluster) -> Mapping[str, Any]:
    """What is fixed; the rest is left open."""
    count = len(cluster.network.ids)
    kind = rng.choice(("open", "flow", "straight", "skipping", "stochastic"), p=(0.2,) * 5)
    fields: dict[str, Any] = {}
    stages = int(rng.integers(2, min(count, 5) + 1))
    if kind in ("flow", "stochastic"):
        fields = {"stages": stages, "wiring": str(kind)}
        # a prediction is of the plan's parts; what routers that learn make of it is their own
        fields |= {"routing": KEPT} if kind == "stochastic" else {}
    elif kind == "straight":
        fields = {"stages": int(rng.choice([s for s in range(1, count + 1) if count % s == 0]))}
        fields["schedule"] = str(rng.choice(("eager-1f1b", "1f1b", "gpipe")))
    elif kind == "skipping":
        rest = rng.multinomial(count - stages, [1 / stages] * stages)
        fields = {
            "stages": stages,
            "stage_sizes": tuple(int(1 + extra) for extra in rest),
            "path_stages": int(rng.integers(max(1, stages - 1), stages + 1)),
            "full_every": int(rng.choice((0, 2))),
        }

    def maybe(share: float, **extra: Any) -> None:
        if rng.random() < share:
            fields.update(extra)

    maybe(0.3, averaging=str(rng.choice(("equal", "adaptive"))))
    maybe(0.15, codec="int8")
    maybe(0.15, group_size=int(rng.integers(2, 4)))
    maybe(0.15, boundary_codec=str(rng.choice(("bf16", "int8"))))
    maybe(0.15, recompute="all")
    maybe(0.15, clip=1.0)
    if rng.random() < 0.25:
        fields["sync_every"] = int(rng.integers(2, 4))
        maybe(0.4, delayed=True)
        maybe(0.4, within="region")
    if "group_size" in fields:
        fields.pop("codec", None)
    return fields
