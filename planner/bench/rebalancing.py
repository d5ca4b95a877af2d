"""Migration of peers while others join and leave (SWARM): instances and methods."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.bench.method import BenchMethod, MethodKind
from planner.bench.problem import BenchInstance, ProblemFamily
from planner.problems.rebalancing import RebalancingPlan, RebalancingProblem, TimedMove
from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalancing import NoMoves, RebalancePolicy, SwarmPolicy, optimal_counts
from planner.swarm.replay import Enter, RandomDraws, ReplayConfig, replay
from planner.swarm.traces import Market, Trace

DOWNLOAD_S = 120.0
"""Seconds to download 3 GB of a stage's state at 200 Mb/s."""


def traced(
    market: Market,
    seed: int,
    work_s: tuple[float, ...],
    speed: tuple[float, ...],
    download_s: float,
) -> RebalancingProblem:
    """Build an instance from a trace of a `Market`, with new peers at random stages.

    Leaving peers and the stages of joining ones are drawn from NumPy's ``default_rng([seed, 0])``
    and ``default_rng([seed, 1])``, in turn. Times are rounded to milliseconds.
    """
    trace = market.trace(seed)
    change = trace.change
    arrivals, departures = int(change[change > 0].sum()), int(-change[change < 0].sum())
    stages = len(work_s)
    entering = np.random.default_rng([seed, 1])
    work, speeds = np.array(work_s), np.array(speed)
    return RebalancingProblem(
        work,
        speeds,
        _distribute(work, speeds, trace),
        np.ceil(trace.time_s * 1e3) / 1e3,
        trace.kind,
        change,
        [int(entering.integers(stages)) for _ in range(arrivals)],
        np.random.default_rng([seed, 0]).random((departures, 2)),
        download_s,
        trace.end_s,
    )


def _distribute(work: Any, speed: Any, trace: Trace) -> Any:
    """Distribute peers over stages: optimally for one kind, else fastest to slowest stage."""
    if len(speed) == 1:
        return optimal_counts(work, int(trace.start[0]))[:, None]
    counts = np.zeros((len(work), len(speed)), dtype=np.int64)
    for k in np.argsort(-speed, kind="stable").tolist():
        for _ in range(int(trace.start[k])):
            counts[int(np.argmin(counts @ speed / work)), k] += 1
    return counts


EVEN4, UNEVEN4 = (1.0,) * 4, (1.0, 1.5, 1.5, 2.0)


def _instance(
    name: str,
    about: str,
    market: Market,
    seed: int,
    work_s: tuple[float, ...] = EVEN4,
    speed: tuple[float, ...] = (1.0,),
    download_s: float = DOWNLOAD_S,
    quick: bool = False,
) -> BenchInstance:
    return BenchInstance(
        f"{ProblemFamily.REBALANCING}/{name}",
        f"{about}; Market trace, seed {seed}, {market.hours:g} h, download {download_s:g} s",
        lambda: traced(market, seed, work_s, speed, download_s),
        quick,
    )


INSTANCES = (
    _instance("peers40-4", "40 peers, 4 stages", Market(peers=(40,), hours=8), 1, quick=True),
    _instance("peers100-4", "100 peers, 4 stages", Market(peers=(100,), hours=12), 2),
    _instance(
        "peers100-4-free",
        "100 peers, 4 stages",
        Market(peers=(100,), hours=12),
        2,
        download_s=0.0,
    ),
    _instance(
        "peers200-4-uneven",
        "200 peers, 4 uneven stages",
        Market(peers=(200,), hours=12),
        3,
        UNEVEN4,
    ),
    _instance(
        "peers160-16",
        "160 peers, 16 stages",
        Market(peers=(160,), hours=12),
        4,
        (1.0,) * 16,
    ),
    _instance(
        "peers60-8-short",
        "60 peers with lives of 2 h, 8 stages",
        Market(peers=(60,), hours=8, life_s=7200.0),
        5,
        (1.0,) * 8,
    ),
    _instance(
        "kinds90-6",
        "60 slow, 20 faster and 10 fast peers with lives of 2 h, 6 stages",
        Market(peers=(60, 20, 10), hours=2, life_s=7200.0),
        6,
        (1.0,) * 6,
        (1.0, 2.5, 5.0),
    ),
    _instance(
        "kinds40-4-uneven",
        "30 slow and 10 fast peers, 4 uneven stages",
        Market(peers=(30, 10), hours=8),
        7,
        UNEVEN4,
        (1.0, 3.0),
        quick=True,
    ),
)


def played(problem: RebalancingProblem, policy: RebalancePolicy) -> RebalancingPlan:
    """Return the moves of a policy that sees the current stages but not the future."""
    kinds = tuple(f"kind{k}" for k in range(len(problem.speed)))
    trace = Trace(
        kinds,
        problem.serving.sum(axis=0),
        problem.time_s,
        problem.kind,
        problem.change,
        problem.end_s,
    )
    setting = ReplayConfig(
        trace, problem.work_s, problem.speed, problem.download_s, enter=Enter.RANDOM
    )
    drawn = RandomDraws(problem.serving, problem.leaves, problem.enters)
    moves = replay(setting, policy, draws=drawn).move_log
    return RebalancingPlan(tuple(TimedMove(time_s, *move) for time_s, move in moves))


def _policy(name: str, kind: MethodKind, about: str, make: Any) -> BenchMethod:
    def run(problem: RebalancingProblem, seed: int, effort: float) -> RebalancingPlan:
        del seed, effort
        return played(problem, make(problem))

    return BenchMethod.for_family(ProblemFamily.REBALANCING, name, run, kind, about)


METHODS = (
    _policy(
        "ours",
        MethodKind.OURS,
        "planned moves every 60 s",
        lambda problem: PlannedMoves(60.0, horizon_s=1800.0, download_s=problem.download_s),
    ),
    _policy(
        "ours, after every event",
        MethodKind.OURS,
        "planned moves after every event",
        lambda problem: PlannedMoves(0.0, horizon_s=1800.0, download_s=problem.download_s),
    ),
    _policy("SWARM, T = 60", MethodKind.PAPER, "Algorithm 2", lambda _: SwarmPolicy(60.0)),
    _policy("SWARM, T = 300", MethodKind.PAPER, "Algorithm 2", lambda _: SwarmPolicy(300.0)),
    _policy("no moves", MethodKind.RULE, "peers stay where they entered", lambda _: NoMoves()),
)
