"""`solve_assignment` on instances small enough to enumerate, and what must hold on any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.checker.dispatch import check
from planner.genetic import solve_assignment
from planner.genetic.solve import Method
from planner.matching import open_path
from planner.network.network import Network
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Status
from planner.search.result import Result
from planner.search.stop import MaxIterations, MaxRuntime

SHAPES = [
    {"stages": 1, "pipelines": 4},
    {"stages": 4, "pipelines": 1},
    {"stages": 2, "pipelines": 3},
    {"stages": 3, "pipelines": 2},
    {"stages": 2, "pipelines": 4},
    {"stage_sizes": (3, 2, 1)},
    {"stage_sizes": (1, 3, 1)},
    {"stage_sizes": (2, 1, 2), "activation_bytes": (1e8, 9e8), "gradient_bytes": (1e8, 4e8, 9e8)},
    {"stages": 2, "pipelines": 2, "gradient_bytes": (1e7, 9e8)},
]


def random_network(n: int, seed: int, *, sites: int | None = None) -> Network:
    """Every pair different, or ``sites`` groups of interchangeable devices."""
    rng = np.random.default_rng(seed)
    at = np.arange(n) if sites is None else rng.integers(0, sites, n)
    latency = rng.uniform(0.001, 0.1, (n, n))[np.ix_(at, at)]
    bandwidth = rng.uniform(1e8, 5e9, (n, n))[np.ix_(at, at)]
    return Network((latency + latency.T) / 2, (bandwidth + bandwidth.T) / 2)


def partitions(devices: Sequence[int], sizes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to fill stages of the given sizes in order."""
    if not sizes:
        yield []
        return
    for group in combinations(devices, sizes[0]):
        rest = [d for d in devices if d not in group]
        for tail in partitions(rest, sizes[1:]):
            yield [group, *tail]


def brute_force(problem: AssignmentProblem) -> float:
    """Cost of the best plan by the definitions of `AssignmentProblem`."""
    devices = range(len(problem.network))
    return min(problem.cost(groups) for groups in partitions(list(devices), problem.stage_sizes))


def problem_of(shape: dict[str, object], seed: int, sites: int | None = None) -> AssignmentProblem:
    sizes = shape.get("stage_sizes")
    n = sum(sizes) if sizes else shape["stages"] * shape["pipelines"]  # type: ignore
    data: dict[str, object] = {"activation_bytes": 3e8, "gradient_bytes": 5e8, **shape}
    return AssignmentProblem(random_network(n, seed, sites=sites), **data)  # type: ignore[arg-type]


def assert_consistent(problem: AssignmentProblem, result: Result[AssignmentPlan]) -> None:
    """The plan uses every device once, and objective, grid and bound agree with the definitions."""
    plan = result.plan
    assert plan is not None
    assert result.objective is not None and result.bound is not None
    assert check(result, problem) == []
    assert result.objective == problem.cost(plan.groups)
    assert result.bound <= result.objective
    if problem.pipelines is not None:
        assert plan.grid is not None
        for j in range(problem.stages - 1):
            hops = problem.hop_s(j)[plan.grid[:, j], plan.grid[:, j + 1]]
            assert hops.max() == problem.boundary_s(j, plan.groups[j], plan.groups[j + 1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sites", [None, 2])
def test_auto_is_optimal_on_small_instances(shape: dict[str, object], sites: int | None) -> None:
    """Brute force agrees, and the status says that it is proven."""
    problem = problem_of(shape, 7, sites)
    result = solve_assignment(problem, MaxRuntime(20))
    assert_consistent(problem, result)
    assert result.objective == pytest.approx(brute_force(problem), rel=1e-9)
    assert result.status is Status.OPTIMAL


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[6]], ids=str)
def test_every_method_returns_a_valid_bound(method: Method, shape: dict[str, object]) -> None:
    """No method claims more than brute force allows."""
    problem = problem_of(shape, 3)
    result = solve_assignment(problem, MaxIterations(30), method=method)
    assert_consistent(problem, result)
    best = brute_force(problem)
    assert result.bound <= best * (1 + 1e-9) <= result.objective * (1 + 2e-9)  # type: ignore


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES), st.sampled_from([None, 1, 3]))
def test_random_networks(seed: int, shape: dict[str, object], sites: int | None) -> None:
    """Generated networks, with and without interchangeable devices."""
    problem = problem_of(shape, seed, sites)
    result = solve_assignment(problem, MaxIterations(40), seed=seed % 5)
    assert_consistent(problem, result)
    best = brute_force(problem)
    assert result.bound <= best * (1 + 1e-9)  # type: ignore[operator]
    assert result.objective == pytest.approx(best, rel=1e-6)


def test_renaming_devices_keeps_the_optimum() -> None:
    """The order in which devices are listed does not matter."""
    problem = problem_of(SHAPES[2], 11)
    turn = np.random.default_rng(0).permutation(len(problem.network))
    turned = problem.replace(network=problem.network.subset(turn.tolist()))
    first, second = (solve_assignment(p, MaxRuntime(20)) for p in (problem, turned))
    assert first.objective == pytest.approx(second.objective, rel=1e-9)


def test_scaling_time_scales_the_optimum() -> None:
    """Three times the latency and a third of the bandwidth: three times the cost."""
    problem = problem_of(SHAPES[3], 12)
    net = problem.network
    slow = problem.replace(
        network=Network(
            3 * net.latency_s, np.where(np.eye(len(net)), 1, net.bandwidth_bytes_per_s) / 3
        )
    )
    first, second = (solve_assignment(p, MaxRuntime(20)) for p in (problem, slow))
    assert 3 * first.objective == pytest.approx(second.objective, rel=1e-9)  # type: ignore


def test_constant_latency_adds_a_known_amount() -> None:
    """A latency c on every pair costs 2 c per partner in a group and per boundary."""
    problem = problem_of(SHAPES[3], 13)
    shifted = problem.replace(
        network=Network(
            problem.network.latency_s + 0.5,
            np.where(np.eye(6), 1, problem.network.bandwidth_bytes_per_s),
        )
    )
    first, second = (solve_assignment(p, MaxRuntime(20)) for p in (problem, shifted))
    extra = 2 * 0.5 * (2 - 1) + 2 * 0.5 * (3 - 1)
    assert first.objective + extra == pytest.approx(second.objective, rel=1e-9)  # type: ignore


def test_one_device() -> None:
    """The trivial plan costs nothing and is optimal."""
    problem = AssignmentProblem(Network([[0.0]], [[1.0]]), 1, 1, 1e8, 1e8)
    result = solve_assignment(problem, MaxRuntime(5))
    assert result.objective == 0.0
    assert result.status is Status.OPTIMAL
    assert result.plan is not None and result.plan.groups == ((0,),)


def test_one_pipeline_is_an_open_path() -> None:
    """Groups of one: Held-Karp solves the rest of the problem."""
    problem = AssignmentProblem(random_network(13, 4), 13, 1, 3e8, 5e8)
    result = solve_assignment(problem, MaxRuntime(20))
    assert_consistent(problem, result)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(open_path(2 * problem.hop_s(0)).objective)


def test_unknown_method_is_refused() -> None:
    """The message lists the methods."""
    with pytest.raises(ValueError, match="must be one of auto, search"):
        solve_assignment(problem_of(SHAPES[2], 0), MaxIterations(1), method="magic")


def test_tiny_time_limit_still_gives_a_plan() -> None:
    """Whatever the limit, the plan is valid."""
    problem = AssignmentProblem(random_network(24, 0), 4, 6, 1e8, 1e8)
    assert_consistent(problem, solve_assignment(problem, MaxRuntime(0.01)))


SCRIPT = """
import numpy as np
from planner.checker.dispatch import check
from planner.genetic import solve_assignment
from planner.network.network import Network
from planner.problems import AssignmentProblem
from planner.search.stop import MaxIterations
rng = np.random.default_rng(5)
network = Network(rng.uniform(0.001, 0.1, (24, 24)), rng.uniform(1e8, 5e9, (24, 24)))
problem = AssignmentProblem(network, 4, 6, 3e8, 5e8)
for method in ("auto", "search", "genetic"):
    result = solve_assignment(problem, MaxIterations(25), seed=3, method=method)
    print(result.plan.grid.tolist(), result.objective.hex(), result.bound.hex())
"""


def test_same_seed_same_bytes_in_another_process() -> None:
    """Plans, objectives and bounds agree to the last bit under a limit on iterations."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1
    assert next(iter(outputs)).count("\n") == 3
