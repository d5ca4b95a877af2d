"""Small instances that can be checked by hand."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import shape_of
from planner.problems.answers import AssignmentPlan
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

# machines are noisy: how long an example takes proves nothing
settings.register_profile("planner", deadline=None, derandomize=True)
settings.load_profile("planner")

# whoever starts the tests in the background has them ignore interrupts, also those under test
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of every folder evenly, since tests of some folders mostly wait.

    While one worker waits for processes, another can then compute.
    """
    files: defaultdict[Path, dict[Path, None]] = defaultdict(dict)
    for item in items:
        files[item.path.parent][item.path] = None
    position = {
        path: (k + 0.5) / len(folder) for folder in files.values() for k, path in enumerate(folder)
    }
    items.sort(key=lambda item: position[item.path])


@pytest.fixture
def line4() -> Network:
    """Devices a b c d on a line: latency 1 s a hop, bandwidth 100 bytes/s everywhere."""
    position = np.arange(4.0)
    return Network(
        np.abs(position[:, None] - position), np.full((4, 4), 100.0), ["a", "b", "c", "d"]
    )


def tiny_workload(
    kind: str = "gpt2", *, tied: bool = False, words: int = 61, **changes: int
) -> Workload:
    """A transformer that trains in milliseconds, 4 layers, batch 8."""
    arch = Architecture(Family(kind), 4, 32, 4, 2 if kind == "llama" else 4, 64, words, 16, tied)
    fields = {"batch_samples": 8, "microbatch_samples": 1} | changes
    return Workload.transformer(f"tiny-{kind}", arch, precision="fp32", **fields)


def random_network(n: int, seed: int = 0) -> Network:
    """Every pair different, in the range of real wide-area links."""
    rng = np.random.default_rng(seed)
    return Network(rng.uniform(0.005, 0.25, (n, n)), rng.uniform(3e7, 3e8, (n, n)))


def regional_network(sizes: Sequence[int], seed: int = 0) -> Network:
    """Regions of some devices each: links between regions all different, alike within."""
    sites = random_network(len(sizes), seed)
    return sites.replicate(
        dict(zip(sites.ids, sizes, strict=True)),
        intra_latency_s=0.001,
        intra_bandwidth_bytes_per_s=1e9,
    )


def make_plan(
    grid: list[list[int]],
    *,
    workload: Workload | None = None,
    network: Network | None = None,
    head: str = "last",
    schedule: str = "eager-1f1b",
    seed: int = 0,
    clip: float | None = None,
) -> TrainingPlan:
    """A plan around a given grid, without any solver."""
    workload = workload or tiny_workload()
    network = network or random_network(len(grid) * len(grid[0]))
    cluster = Cluster(network, Devices(1e12, 16e9))
    request = PlanRequest(
        stages=len(grid[0]), schedule=schedule, head=head, network_name="random", clip=clip
    )
    problem = PlanningProblem(cluster, workload, request, seed)
    return straight_plan(problem, shape_of(problem), AssignmentPlan.of_grid(grid))


def levels(
    sites: Sequence[tuple[int, ...]],
    between: tuple[float, ...],
    first: Phase = Phase.REDUCE,
) -> tuple[tuple[AveragingGroup, ...], ...]:
    """Sums within sites, of which as many devices hold slices as the smallest site has.

    On two clocks with `Phase.WITHIN` first.
    """
    slices = min(map(len, sites))
    ends = [k / slices for k in range(slices + 1)]
    every = {len(site): (True,) * len(site) for site in (*sites, sites)}
    shares = [(1 / slices,) * slices + (0.0,) * (len(site) - slices) for site in sites]
    inner = [(site, share, every[len(site)]) for site, share in zip(sites, shares, strict=True)]
    return (
        tuple(AveragingGroup(*one, phase=first) for one in inner),
        tuple(
            AveragingGroup(
                tuple(site[k] for site in sites),
                between,
                every[len(sites)],
                slice=(ends[k], ends[k + 1]),
                phase=Phase.EXCHANGE,
            )
            for k in range(slices)
        ),
        tuple(AveragingGroup(*one, phase=Phase.SPREAD) for one in inner),
    )
