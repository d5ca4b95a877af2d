"""Division of averaging among peers (DeDLOC): instances and methods."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.bench.averaging_baselines import scalar_bandwidth_shares
from planner.bench.averaging_instances import (
    ALBERT_BATCH,
    ALBERT_LARGE_BYTES,
    GBIT,
    instance,
    table_1_setups,
)
from planner.bench.method import BenchMethod, MethodKind
from planner.bench.network_generator import random_network
from planner.bench.problem import BenchInstance, ProblemFamily
from planner.lp.rates import attained_rates
from planner.lp.solve import build_plan, solve_averaging
from planner.network.catalogue import load_network
from planner.problems import AveragingProblem
from planner.problems.answers import AveragingPlan
from planner.search.stop import Effort

TABLE_1_STEPS_PER_S = (0.66, 0.124, 0.232, 0.207)
"""Computing rate of all peers: 95% of the best averaging to which all of them contribute."""


def _table_1(setup: int) -> AveragingProblem:
    """Build a set-up of Table 1, with computing slightly slower than averaging by all peers."""
    table_setup = list(table_1_setups().values())[setup]
    devices = (
        TABLE_1_STEPS_PER_S[setup] * table_setup.batch_size / float(table_setup.samples_per_s.sum())
    )
    return table_setup.replace(samples_per_s=table_setup.samples_per_s * devices)


def _albert() -> AveragingProblem:
    """Build section 4.2: sixteen slow peers and four aggregators, 20 samples per second on a T4."""
    speeds = np.array([0.2] * 4 + [0.1] * 8 + [0.05] * 4 + [1.0] * 4) * GBIT
    samples = [20.0] * 16 + [0.0] * 4
    return AveragingProblem(samples, speeds, speeds, ALBERT_BATCH, ALBERT_LARGE_BYTES)


def _network(name: str, samples_per_s: float) -> AveragingProblem:
    """Place a peer in every region, with the rate of its fastest pair and limits of pairs."""
    return _of_pairs(load_network(name).complete().bandwidth_bytes_per_s, samples_per_s)


def _of_pairs(pairs: NDArray[np.float64], samples_per_s: float) -> AveragingProblem:
    away = pairs.copy()
    np.fill_diagonal(away, 0.0)
    return AveragingProblem(
        samples_per_s, away.max(axis=1), away.max(axis=0), ALBERT_BATCH, 350e6, pairs
    )


def _world(regions: int, peers: int, seed: int) -> AveragingProblem:
    """Peers on a `random_network`; every third has no accelerator, every fifth no open port."""
    network = random_network(regions, peers, seed, 0.3)
    base = _of_pairs(network.bandwidth_bytes_per_s, 40.0)
    number = np.arange(peers)
    return AveragingProblem(
        np.where(number % 3 == 2, 0.0, 100.0 + 50.0 * (number % 4)),
        base.upload_bytes_per_s,
        base.download_bytes_per_s,
        ALBERT_BATCH,
        350e6,
        base.link_bytes_per_s,
        can_aggregate=number % 5 != 4,
    )


def _instance(name: str, about: str, make: Any, quick: bool = False) -> BenchInstance:
    return BenchInstance(f"{ProblemFamily.AVERAGING}/{name}", about, make, quick)


def _drawn(
    peers: int, seed: int, ratio: float, factor: float = 1.0, quick: bool = False
) -> BenchInstance:
    return _instance(
        f"peers{peers}-r{ratio:g}" + (f"-l{factor:g}" if factor != 1.0 else ""),
        f"benchmarks.averaging.instance({peers}, {seed}, {ratio:g}, link_factor={factor:g})",
        lambda: instance(peers, seed, ratio, link_factor=factor),
        quick,
    )


INSTANCES = (
    *(
        _instance(
            f"table1{letter}",
            f"DeDLOC, Table 1, set-up {letter.upper()}",
            lambda k=k: _table_1(k),
            quick=letter == "d",
        )
        for k, letter in enumerate("abcd")
    ),
    _instance("albert20", "DeDLOC, section 4.2, slow peers and four helpers", _albert, quick=True),
    _drawn(24, 1, 0.3),
    _drawn(24, 2, 1.0, quick=True),
    _drawn(24, 3, 1.0, 0.05),
    _drawn(64, 4, 1.0),
    _drawn(64, 5, 0.8, 0.02),
    _drawn(300, 6, 0.8),
    _instance(
        "aws8",
        "aws8_dtfm_worldwide_2022, a peer a region",
        lambda: _network("aws8_dtfm_worldwide_2022", 120.0),
    ),
    _instance(
        "skyplane57",
        "skyplane_60_20220129, its 57 complete regions",
        lambda: _network("skyplane_60_20220129", 60.0),
    ),
    _instance("world8-24", "random_network(8, 24, seed 6, jitter 0.3)", lambda: _world(8, 24, 6)),
)


def _solver(method: str) -> Any:
    return lambda problem, seed, effort: solve_averaging(problem, method, Effort(effort))


def _with_shares(problem: AveragingProblem, shares: NDArray[np.float64]) -> AveragingPlan:
    """Return the rate that shares attain if all peers with gradients contribute."""
    who = problem.contributors
    return build_plan(problem, who, attained_rates(problem, who, shares))


def all_reduce(problem: AveragingProblem, seed: int, effort: float) -> AveragingPlan:
    """Equal shares for all contributors that can aggregate, or for all aggregators if there are
    none."""
    del seed, effort
    sums = problem.contributors & problem.can_aggregate
    sums = sums if sums.any() else problem.can_aggregate
    return _with_shares(problem, sums / sums.sum())


def parameter_server(problem: AveragingProblem, seed: int, effort: float) -> AveragingPlan:
    """One peer sums everything; the best choice of that peer."""
    del seed, effort
    servers = np.eye(len(problem))[problem.can_aggregate]
    plans = [_with_shares(problem, server) for server in servers]
    return max(plans, key=lambda plan: plan.steps_per_s)


def scalar_bandwidth(problem: AveragingProblem, seed: int, effort: float) -> AveragingPlan:
    """Shares by one bandwidth per peer, as in hivemind's load balancing."""
    del seed, effort
    return _with_shares(problem, scalar_bandwidth_shares(problem))


def _method(name: str, run: Any, kind: MethodKind, about: str) -> BenchMethod:
    return BenchMethod.for_family(ProblemFamily.AVERAGING, name, run, kind, about)


METHODS = (
    _method("ours", _solver("exact"), MethodKind.OURS, "solve_averaging, exact"),
    _method("DeDLOC's rule", _solver("relaxed"), MethodKind.PAPER, "LP (5) and eq. 6"),
    _method("hivemind's balance", scalar_bandwidth, MethodKind.RULE, "one bandwidth a peer"),
    _method("all-reduce", all_reduce, MethodKind.RULE, "equal shares"),
    _method("parameter server", parameter_server, MethodKind.RULE, "the best single peer"),
)
