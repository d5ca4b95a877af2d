"""Paths of microbatches and their timing (SkipPipe): instances and methods."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import planner
from planner.bench.method import BenchMethod, MethodKind
from planner.bench.network_generator import random_network
from planner.bench.path_instances import hundred, reference, reference_link_s, unlike
from planner.bench.problem import BenchInstance, ProblemFamily
from planner.mapf.solve import solve_paths
from planner.network.catalogue import load_network
from planner.network.network import Network
from planner.problems import PathProblem
from planner.problems.path_method import PathMethod
from planner.search.stop import Effort

_PACKAGE = Path(planner.__file__).parent
_FOLDERS = (_PACKAGE / "instances", _PACKAGE.parent / "datasets/instances")
REFERENCE = next((d for d in _FOLDERS if d.is_dir()), _FOLDERS[0]) / "gcp20_skip33.json"
"""Public configuration: in the package if installed, else in the repository."""

FORWARD_S, BACKWARD_S, HEAD_S = 1.76, 2.64, 0.44
MESSAGE_BYTES = 4 * 8 * 1024 * 1024.0
"""Public configuration: message size; its compute times are of microbatches of 4 samples."""


def _arranged(
    network: Network,
    sizes: tuple[int, ...],
    path_stages: int,
    per_stage: int,
    memory: int,
    *,
    seed: int,
    live: bool = False,
    share: float = 1.0,
) -> PathProblem:
    """Build a problem on a random assignment; ``share`` scales the public configuration's work."""
    order = np.random.default_rng(seed).permutation(len(network)).tolist()
    cuts = np.cumsum((0, *sizes)).tolist()
    groups = [order[a:b] for a, b in pairwise(cuts)]
    return PathProblem(
        network.transfer_s(MESSAGE_BYTES * share),
        groups,
        FORWARD_S * share,
        BACKWARD_S * share,
        HEAD_S * share,
        path_stages,
        memory,
        per_stage,
        live_memory=live,
    )


@cache
def _reference() -> PathProblem:
    return reference(REFERENCE)


def _unlike() -> PathProblem:
    """Return `unlike` with seconds rounded to microseconds, for reproducibility."""
    problem = unlike(_reference(), 0)
    times = ("forward_s", "backward_s", "head_s")
    return problem.replace(**{name: np.round(getattr(problem, name), 6) for name in times})


def _instance(name: str, about: str, make: Any, quick: bool = False) -> BenchInstance:
    return BenchInstance(f"{ProblemFamily.PATHS}/{name}", about, make, quick)


def _aws() -> Network:
    return load_network("aws8_dtfm_worldwide_2022")


INSTANCES = (
    _instance("gcp20-skip33", "SkipPipe's public configuration, 20 devices, 33% skip", _reference),
    _instance(
        "gcp20-skip33-links",
        "the same, a link carries one message at a time",
        lambda: _reference().replace(link_s=reference_link_s(REFERENCE, _reference())),
    ),
    _instance("gcp20-unlike", "the same, devices of half to twice the speed", _unlike),
    _instance(
        "gcp20-skip33-live",
        "the same, 6 microbatches a start, memory freed as they return",
        lambda: _reference().replace(microbatches_per_start=6, live_memory=True),
    ),
    _instance(
        "gcp20-full-live",
        "the same, every stage visited",
        lambda: _reference().replace(path_stages=6, live_memory=True),
    ),
    _instance(
        "aws8-2x4-full",
        "aws8_dtfm_worldwide_2022, 4 stages of 2, all visited, 4 microbatches a start",
        lambda: _arranged(_aws(), (2, 2, 2, 2), 4, 4, 4, seed=1, live=True),
        quick=True,
    ),
    _instance(
        "gcp12-3x4-skip",
        "gcp12_skippipe_2025_repaired, 4 stages of 3, 3 visited, 3 microbatches a start",
        lambda: _arranged(
            load_network("gcp12_skippipe_2025_repaired"), (3, 3, 3, 3), 3, 3, 3, seed=2
        ),
        quick=True,
    ),
    _instance(
        "world6-18-skip",
        "random_network(6, 18, seed 7, jitter 0.2), 6 stages of 3, 5 visited, 2 a start",
        lambda: _arranged(random_network(6, 18, 7, 0.2), (3,) * 6, 5, 2, 4, seed=3),
    ),
    _instance(
        "world8-24-skip-live",
        "random_network(8, 24, seed 8, jitter 0.2), stages of 6, 6, 4, 4, 4, 4 visited, 4 a start",
        lambda: _arranged(
            random_network(8, 24, 8, 0.2), (6, 6, 4, 4, 4), 4, 4, 3, seed=4, live=True, share=0.5
        ),
    ),
    _instance(
        "world10-40-full-live",
        "random_network(10, 40, seed 9, jitter 0.2), 5 stages of 8, all visited, 6 a start",
        lambda: _arranged(
            random_network(10, 40, 9, 0.2), (8,) * 5, 5, 6, 5, seed=5, live=True, share=0.5
        ),
    ),
    _instance(
        "skyplane100-live",
        "100 devices in Skyplane's regions, 10 stages of 10, 7 visited, 200 microbatches",
        hundred,
    ),
)


def _solver(method: PathMethod) -> Any:
    return lambda problem, seed, effort: solve_paths(problem, Effort(effort), seed, method)


def _method(
    name: str, method: PathMethod, kind: MethodKind, about: str, seeded: bool = False
) -> BenchMethod:
    return BenchMethod.for_family(
        ProblemFamily.PATHS, name, _solver(method), kind, about, seeded=seeded
    )


METHODS = (
    _method("ours", PathMethod.AUTO, MethodKind.OURS, "solve_paths, auto", seeded=True),
    _method("SkipPipe's CBS", PathMethod.CBS, MethodKind.PAPER, "Algorithm 1", seeded=True),
    _method(
        "SkipPipe, reuse",
        PathMethod.REUSE,
        MethodKind.PAPER,
        "one wave's paths again, D.1",
        seeded=True,
    ),
    _method(
        "SkipPipe without TC2", PathMethod.NO_TC2, MethodKind.PAPER, "paths that ignore collisions"
    ),
    _method("DT-FM, skipping", PathMethod.DTFM_SKIP, MethodKind.PAPER, "SkipPipe's Appendix B.1"),
    _method(
        "DT-FM, straight",
        PathMethod.STRAIGHT,
        MethodKind.PAPER,
        "matched pipelines, where all is visited",
    ),
)
