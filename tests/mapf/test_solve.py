"""`solve_paths` against brute force and the checker."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.checker.dispatch import check
from planner.mapf import PathMethod, solve_paths
from planner.mapf.schedule_by_rank import chain_of
from planner.mapf.waves import repeats_evenly, wave_problem
from planner.problems import PathProblem, ProblemError
from planner.problems.answers import PathPlan
from planner.search.certificate import Status
from planner.search.stop import MaxIterations, MaxRuntime
from tests.mapf.conftest import random_problem, reference


def swaps_of(stages: tuple[int, ...]) -> int | None:
    """Swapped neighbours of a path, None if its order is something else."""
    todo, swaps = list(stages), 0
    for k in range(len(todo) - 1):
        if todo[k] == todo[k + 1] + 1:
            todo[k], todo[k + 1] = todo[k + 1], todo[k]
            swaps += 1
    return swaps if todo == sorted(todo) else None


def brute_force(problem: PathProblem) -> float:
    """Smallest makespan over all paths and all orders: every sequence of appended operations."""
    stage = problem.stage_of
    paths_of = []
    for start in problem.starts:
        others = [d for d in range(len(problem)) if stage[d] > 0]
        paths_of.append(
            [
                (start, *rest)
                for rest in itertools.permutations(others, problem.path_stages - 1)
                if len({stage[d] for d in rest}) == len(rest)
                and (swaps := swaps_of(tuple(stage[d] for d in rest))) is not None
                and swaps <= problem.max_swaps
            ]
        )
    fewest, most = problem.visits
    best = math.inf
    for paths in itertools.product(*paths_of):
        through = [0] * len(problem)
        for d in itertools.chain(*paths):
            through[d] += 1
        visits = [sum(through[d] for d in g) for g in problem.stage_devices[1:]]
        if not all(fewest <= v <= most for v in visits):
            continue
        if not problem.live_memory and (np.array(through) > problem.memory).any():
            continue
        best = min(best, best_schedule_s(problem, paths, best))
    return best


def best_schedule_s(
    problem: PathProblem, paths: tuple[tuple[int, ...], ...], limit: float
) -> float:
    """Shortest schedule of given paths: branch on the microbatch whose operation is next."""
    seconds = {"F": problem.forward_s, "B": problem.backward_s, "H": problem.head_s}
    chains = [chain_of(path) for path in paths]
    best = limit

    def tail(b: int, k: int) -> float:
        rest = 0.0
        for j in range(k, len(chains[b])):
            kind, d = chains[b][j]
            rest += float(seconds[kind][d])
            if j + 1 < len(chains[b]):
                rest += float(problem.transfer_s[d, chains[b][j + 1][1]])
        return rest

    tails = [[tail(b, k) for k in range(len(chain))] for b, chain in enumerate(chains)]
    seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def branch(
        step: list[int],
        ready: list[float],
        free: list[float],
        live: list[int],
        links: dict[tuple[int, int], float],
    ) -> None:
        nonlocal best
        left = [b for b in range(len(chains)) if step[b] < len(chains[b])]
        if not left:
            best = min(best, max(free))
            return
        for b in left:
            if max(ready[b], free[chains[b][step[b]][1]]) + tails[b][step[b]] >= best:
                return
        # the same steps have sent the same messages
        state, times = tuple(step), (*ready, *free, *(links[uv] for uv in sorted(links)))
        known = seen.setdefault(state, [])
        if any(all(x <= y for x, y in zip(old, times, strict=True)) for old in known):
            return
        known.append(times)
        for b in left:
            kind, d = chains[b][step[b]]
            if kind == "F" and problem.live_memory and live[d] >= problem.memory[d]:
                continue
            end = max(ready[b], free[d]) + float(seconds[kind][d])
            there, after = end, links
            if step[b] + 1 < len(chains[b]):
                v = chains[b][step[b] + 1][1]
                if problem.link_s is not None and v != d:
                    there = max(end, links.get((d, v), 0.0))
                    after = {**links, (d, v): there + float(problem.link_s[d, v])}
                there += float(problem.transfer_s[d, v])
            branch(
                [*step[:b], step[b] + 1, *step[b + 1 :]],
                [*ready[:b], there, *ready[b + 1 :]],
                [*free[:d], end, *free[d + 1 :]],
                [*live[:d], live[d] + {"F": 1, "H": 0, "B": -1}[kind], *live[d + 1 :]],
                after,
            )

    n = len(problem)
    branch([0] * len(chains), [0.0] * len(chains), [0.0] * n, [0] * n, {})
    return best


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_optimum_of_small_instances(seed: int, live: bool) -> None:
    """Two microbatches, every path and order tried."""
    problem = random_problem(seed, (1, 2, 1, 1), memory=1 if live else 2, live_memory=live)
    result = solve_paths(problem, MaxIterations(60), seed=seed)
    assert result.plan is not None and check(result.plan, problem) == []
    assert result.objective == pytest.approx(brute_force(problem), rel=1e-9)
    assert result.status is Status.OPTIMAL
    assert result.bound is not None and result.bound <= result.objective * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    each=st.integers(1, 4),
    memory=st.integers(0, 4),
    max_swaps=st.integers(0, 2),
    live=st.booleans(),
    data=st.data(),
)
def test_valid_or_infeasible(
    seed: int,
    sizes: list[int],
    each: int,
    memory: int,
    max_swaps: int,
    live: bool,
    data: st.DataObject,
) -> None:
    """Either a plan that the checker accepts, or INFEASIBLE if brute force agrees."""
    problem = random_problem(
        seed,
        tuple(sizes),
        path_stages=data.draw(st.integers(1, len(sizes))),
        memory=memory,
        each=each,
        max_swaps=max_swaps,
        live_memory=live,
    )
    result = solve_paths(problem, MaxIterations(10), seed=seed)
    if result.status is Status.INFEASIBLE:
        assert result.plan is None
        assert not fits(problem)
        return
    assert fits(problem)
    assert result.plan is not None and check(result.plan, problem) == []
    assert result.objective == result.plan.makespan_s
    assert result.bound is not None and 0 <= result.bound <= result.objective * (1 + 1e-9)


def fits(problem: PathProblem) -> bool:
    """Whether CC3 and TC1 allow any visits per stage, by brute force."""
    memory = problem.memory
    room = np.where(memory > 0, len(problem.starts), 0) if problem.live_memory else memory
    if any(room[d] < problem.microbatches_per_start for d in problem.stage_devices[0]):
        return False
    fewest, most = problem.visits
    wanted = len(problem.starts) * (problem.path_stages - 1)
    ranges = [
        range(fewest, min(most, int(room[list(g)].sum())) + 1) for g in problem.stage_devices[1:]
    ]
    return any(sum(v) == wanted for v in itertools.product(*ranges))


def test_infeasible_memory_is_explained() -> None:
    """The stop reason names the device or stage."""
    result = solve_paths(reference(memory=2), MaxRuntime(5))
    assert result.status is Status.INFEASIBLE and "memory allows 2" in result.stop_reason
    stage = [1 if d in (8, 10, 11) else 3 for d in range(20)]
    result = solve_paths(reference(memory=stage), MaxRuntime(5))
    assert result.status is Status.INFEASIBLE and "stage 1" in result.stop_reason


def test_reference_instance_improves_on_the_published_paths() -> None:
    """41.5 s for the public code's paths."""
    problem = reference()
    result = solve_paths(problem, MaxIterations(9), seed=1)
    assert result.plan is not None and check(result.plan, problem) == []
    assert result.objective is not None and result.objective < 38.1
    assert result.bound is not None and 30 < result.bound < 33.4628


def test_two_waves_beat_reuse() -> None:
    """Microbatches of the second wave do not wait for the end of the first."""
    problem = reference(microbatches_per_start=6, live_memory=True)
    reuse = solve_paths(problem, MaxIterations(6), method="reuse")
    ours = solve_paths(problem, MaxIterations(12))
    for result in (reuse, ours):
        assert result.plan is not None and check(result.plan, problem) == []
    assert ours.objective is not None and reuse.objective is not None
    assert ours.objective < reuse.objective


def test_waves_of_uneven_visits() -> None:
    """Repeating a wave's paths would break CC3; they are repaired."""
    problem = random_problem(2, (2, 2, 2, 2), memory=3, each=6, live_memory=True)
    wave = wave_problem(problem)
    assert wave is not None and wave.microbatches_per_start == 3
    uneven = random_problem(2, (1, 2, 2, 2, 2), 4, memory=2, each=14, live_memory=True)
    smaller = wave_problem(uneven)
    assert smaller is not None and not repeats_evenly(smaller)
    result = solve_paths(uneven, MaxIterations(10))
    assert result.plan is not None and check(result.plan, uneven) == []
    with pytest.raises(ProblemError, match="same visits per stage"):
        solve_paths(uneven, MaxIterations(10), method="reuse")


def test_paths_of_one_stage_are_solved_at_once() -> None:
    """F, H and B of 80 microbatches on one device, without gaps."""
    problem = random_problem(0, (1, 2), path_stages=1, memory=80, each=80)
    result = solve_paths(problem, MaxIterations(10**9))
    assert result.status is Status.OPTIMAL
    d = problem.stage_devices[0][0]
    work = problem.forward_s[d] + problem.head_s[d] + problem.backward_s[d]
    assert result.objective == pytest.approx(80 * work)


@pytest.mark.parametrize("method", ["dtfm-skip", "no-tc2", "straight"])
def test_baselines_are_valid(method: str) -> None:
    """Baselines return plans that the checker accepts."""
    changes = {"path_stages": 6, "memory": 5} if method == "straight" else {}
    problem = reference(**changes)
    result = solve_paths(problem, MaxIterations(1), method=method)
    assert result.plan is not None and check(result.plan, problem) == []
    assert result.method is PathMethod(method)


def test_unsuitable_methods_raise() -> None:
    """The message states the rule."""
    with pytest.raises(ProblemError, match="method must be one of"):
        solve_paths(reference(), MaxIterations(1), method="best")
    with pytest.raises(ProblemError, match="straight visits all 6 stages"):
        solve_paths(reference(), MaxIterations(1), method="straight")
    with pytest.raises(ProblemError, match="reuse needs live_memory"):
        solve_paths(reference(), MaxIterations(1), method="reuse")


def test_same_plan_in_another_process_with_other_threads() -> None:
    """Under a limit on iterations, the plan depends on problem and seed alone."""
    code = (
        "import hashlib\n"
        "from planner.mapf import solve_paths\n"
        "from planner.search.stop import MaxIterations\n"
        "from tests.mapf.conftest import random_problem\n"
        "p = random_problem(5, (2, 3, 2, 2), memory=4, each=2)\n"
        "r = solve_paths(p, MaxIterations(20), seed=3)\n"
        "found = repr((r.plan.paths, r.plan.ops, r.objective, r.bound))\n"
        "print(hashlib.sha256(found.encode()).hexdigest())\n"
    )
    prints = []
    for threads in ("1", "3"):
        env = {**os.environ, "NUMBA_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )
        prints.append(done.stdout)
    assert prints[0] == prints[1] and len(prints[0]) == 65


def test_interruption_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the search."""
    problem = reference()
    solve_paths(problem, MaxIterations(1))  # compiled before the clock starts
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), 2))
    timer.start()
    result = solve_paths(problem, MaxRuntime(120))
    timer.join()
    assert result.stop_reason == "interrupted"
    assert result.plan is not None and check(result.plan, problem) == []


@pytest.mark.slow
def test_reference_instance_in_a_minute() -> None:
    """Better than a plain CP-SAT model in 400 s, proven within 3%."""
    problem = reference()
    result = solve_paths(problem, MaxRuntime(60))
    assert isinstance(result.plan, PathPlan) and check(result.plan, problem) == []
    assert result.objective is not None and result.objective <= 33.6
    assert result.gap is not None and result.gap <= 0.03
