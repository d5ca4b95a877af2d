"""Assignment of devices to stages (DT-FM): instances and methods."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.bench.assignment_instances import dtfm_case, jittered, skyplane
from planner.bench.method import BenchMethod, MethodKind
from planner.bench.network_generator import random_network
from planner.bench.problem import BenchInstance, ProblemFamily
from planner.genetic.solve import solve_assignment
from planner.network.catalogue import intra_link, load_network
from planner.network.network import Network
from planner.planning.baselines.rank_order import Outermost, ranks_grid, region_order
from planner.problems import AssignmentProblem
from planner.search.stop import Effort
from planner.workload.workload import Workload


def _copies(name: str, copies: int) -> Network:
    """Return a bundled network with ``each`` devices per region and its stated link within a
    region."""
    inside = intra_link(name)
    assert inside is not None
    network = load_network(name).complete()
    return network.replicate(
        dict.fromkeys(network.ids, copies),
        intra_latency_s=inside.latency_s,
        intra_bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s,
    )


def _of_workload(network: Network, preset: str, stages: int) -> AssignmentProblem:
    """Build a problem from a preset split evenly into stages."""
    work = Workload.preset(preset)
    layers = work.even_split(stages)
    microbatch_samples = work.microbatch_samples
    return AssignmentProblem(
        network,
        stages,
        len(network) // stages,
        [size * microbatch_samples for size in work.activation_bytes(layers)],
        work.gradient_bytes(layers, stages - 1),
    )


def _even(network: Network, stages: int) -> AssignmentProblem:
    """Build a problem with the message sizes of gpt3-1.3b in eight stages."""
    return AssignmentProblem(network, stages, len(network) // stages, 0.47e9, 0.65e9)


def _sized(network: Network, sizes: tuple[int, ...]) -> AssignmentProblem:
    return AssignmentProblem(
        network, stage_sizes=sizes, activation_bytes=0.47e9, gradient_bytes=0.65e9
    )


def _skyplane_copies(devices: int) -> AssignmentProblem:
    """Return `jittered` rounded to microseconds and bytes per second, for reproducibility."""
    problem = jittered(devices)
    network = problem.network
    return problem.replace(
        network=network.replace(
            latency_s=np.round(network.latency_s, 6),
            bandwidth_bytes_per_s=np.round(network.bandwidth_bytes_per_s),
        )
    )


def _instance(name: str, about: str, make: Any, quick: bool = False) -> BenchInstance:
    return BenchInstance(f"{ProblemFamily.ASSIGNMENT}/{name}", about, make, quick)


INSTANCES = (
    *(
        _instance(
            f"dtfm{case}-8x8",
            f"DT-FM's case {case} with its code's constants, 8 stages of 8",
            lambda case=case: dtfm_case(case),
            quick=case == 3,
        )
        for case in range(1, 6)
    ),
    _instance(
        "aws8-gpt3-8x8",
        "aws8_dtfm_worldwide_2022 x 8, gpt3-1.3b, 8 stages of 8",
        lambda: _of_workload(_copies("aws8_dtfm_worldwide_2022", 8), "gpt3-1.3b", 8),
    ),
    _instance(
        "gcp12-llama-6x6",
        "gcp12_skippipe_2025_repaired x 3, llama-1.5b, 6 stages of 6",
        lambda: _of_workload(_copies("gcp12_skippipe_2025_repaired", 3), "llama-1.5b", 6),
    ),
    _instance(
        "gcp12-unequal",
        "gcp12_skippipe_2025_repaired, stages of 4, 3, 3 and 2",
        lambda: _sized(load_network("gcp12_skippipe_2025_repaired").complete(), (4, 3, 3, 2)),
        quick=True,
    ),
    _instance("skyplane56-8x7", "56 regions of skyplane_60_20220129, 8 stages of 7", skyplane),
    _instance(
        "skyplane128-8x16",
        "128 jittered copies of Skyplane's regions, 8 stages of 16",
        lambda: _skyplane_copies(128),
    ),
    _instance(
        "world4-16-4x4",
        "random_network(4, 16, seed 1), 4 stages of 4",
        lambda: _even(random_network(4, 16, 1), 4),
        quick=True,
    ),
    _instance(
        "world12-48-6x8",
        "random_network(12, 48, seed 2), 6 stages of 8",
        lambda: _even(random_network(12, 48, 2), 6),
    ),
    _instance(
        "world16-64-unequal",
        "random_network(16, 64, seed 3, jitter 0.2), stages of 16, 12, 12, 8, 8 and 8",
        lambda: _sized(random_network(16, 64, 3, 0.2), (16, 12, 12, 8, 8, 8)),
    ),
    _instance(
        "world24-96-8x12",
        "random_network(24, 96, seed 4, jitter 0.2), 8 stages of 12",
        lambda: _even(random_network(24, 96, 4, 0.2), 8),
    ),
    _instance(
        "world40-240-12x20",
        "random_network(40, 240, seed 5, jitter 0.2), 12 stages of 20",
        lambda: _even(random_network(40, 240, 5, 0.2), 12),
    ),
)


def _solver(method: str) -> Any:
    def run(problem: AssignmentProblem, seed: int, effort: float) -> Any:
        return solve_assignment(problem, Effort(effort), seed, method)

    return run


def ranks_by_region(problem: AssignmentProblem, seed: int, effort: float) -> Any:
    """Number ranks region by region, pipelines outermost: stages are neighbours."""
    del seed, effort
    return _consecutive(problem, region_order(problem.network))


def ranks_data_outermost(problem: AssignmentProblem, seed: int, effort: float) -> Any:
    """Number ranks region by region, with data parallelism as the outer dimension.

    Pipelines are neighbours; stages of unequal size are dealt in turn.
    """
    del seed, effort
    order = region_order(problem.network)
    if problem.pipelines is not None:
        grid = ranks_grid(order, problem.stages, Outermost.DATA)
        return {"groups": grid.T.tolist()}
    groups: list[list[int]] = [[] for _ in problem.stage_sizes]
    for d in order:
        # the stage with the lowest fill level; ties go to the first
        fill = [len(g) / size for g, size in zip(groups, problem.stage_sizes, strict=True)]
        groups[int(np.argmin(fill))].append(d)
    return {"groups": groups}


def at_random(problem: AssignmentProblem, seed: int, effort: float) -> Any:
    """Draw one placement at random."""
    del effort
    order = np.random.default_rng(seed).permutation(len(problem.network))
    return _consecutive(problem, order.tolist())


def _consecutive(problem: AssignmentProblem, order: Any) -> Any:
    cuts = np.cumsum(problem.stage_sizes)[:-1]
    return {"groups": [group.tolist() for group in np.split(np.array(order), cuts)]}


def _method(name: str, run: Any, kind: MethodKind, about: str, seeded: bool = False) -> BenchMethod:
    return BenchMethod.for_family(ProblemFamily.ASSIGNMENT, name, run, kind, about, seeded=seeded)


METHODS = (
    _method("ours", _solver("auto"), MethodKind.OURS, "solve_assignment, auto", seeded=True),
    _method(
        "DT-FM's GA",
        _solver("genetic"),
        MethodKind.PAPER,
        "DT-FM, section 3.2",
        seeded=True,
    ),
    _method(
        "Kernighan-Lin",
        _solver("kl"),
        MethodKind.PAPER,
        "its local search, DT-FM's Figure 4",
        seeded=True,
    ),
    _method(
        "region greedy", _solver("region-greedy"), MethodKind.RULE, "regions together, greedily"
    ),
    _method("ranks, a stage near", ranks_by_region, MethodKind.RULE, "consecutive ranks by region"),
    _method("ranks, a pipeline near", ranks_data_outermost, MethodKind.RULE, "data outermost"),
    _method("random", at_random, MethodKind.RULE, "one placement, drawn", seeded=True),
)
