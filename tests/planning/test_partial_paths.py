"""Plans whose microbatches skip stages: how paths are found, which layers, which devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.mapf import arrange_paths
from planner.planning.evaluation import compute_times, evaluated
from planner.planning.partial_paths.layers import splits
from planner.planning.partial_paths.schedules import arranged_problem, partial_path_schedules
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Layers, shape_of
from planner.planning.step_bound import step_bound
from planner.problems.answers import AssignmentPlan
from planner.problems.path_method import PathMethod
from planner.search.incumbent import ROUNDING
from planner.simulator.averaging_rounds import round_s
from planner.simulator.resources import LinkResources
from planner.training_plan.averaging_group import AveragingGroup
from tests.conftest import random_network, tiny_workload
from tests.mapf.conftest import random_problem

FIELDS: dict[str, Any] = {"stage_sizes": (2, 2, 1, 1), "path_stages": 3, "full_every": 3}


def cluster_of(n: int, seed: int = 0) -> pl.Cluster:
    """Heterogeneous links, equal devices."""
    return pl.Cluster(random_network(n, seed), pl.Devices(1e9, 16e9))


def planned(stop: pl.StoppingCriterion, **changes: Any) -> pl.Result[pl.TrainingPlan]:
    """Six devices, three of four stages a path, every third iteration full."""
    cluster = changes.pop("cluster", None) or cluster_of(6)
    workload = changes.pop("workload", None) or tiny_workload()
    return pl.plan(cluster, workload, stop=stop, **{**FIELDS, **changes})


@pytest.mark.parametrize("method", list(PathMethod))
def test_every_path_method_makes_a_plan(method: PathMethod, tmp_path: Path) -> None:
    """Checked, saved and read again; the certificate names the method."""
    changes: dict[str, Any] = {}
    if method is PathMethod.STRAIGHT:
        changes = {"path_stages": 4, "max_swaps": 0}
    if method is PathMethod.REUSE:
        # two visits a wave to each of three stages
        changes = {"stage_sizes": (3, 1, 1, 1), "in_flight": 2, "full_every": 0}
        changes["workload"] = tiny_workload(batch_samples=12)
    result = planned(pl.MaxIterations(400), path_method=method, **changes)
    assert result.plan is not None and pl.check(result) == []
    assert result.plan.certificates["paths"].method == method
    pl.save_plan(result.plan, tmp_path / "plan.json")
    again = pl.load_plan(tmp_path / "plan.json")
    assert again.content_hash == result.plan.content_hash and pl.check(again) == []


def test_the_papers_search_decides_the_paths() -> None:
    """`cbs` gives the paths that it gives by itself, and the same ones every time."""
    found = [planned(pl.MaxIterations(400), path_method="cbs").plan for _ in range(2)]
    other = planned(pl.MaxIterations(400), path_method="no-tc2").plan
    assert found[0] is not None and found[1] is not None and other is not None
    assert found[0].content_hash == found[1].content_hash
    assert found[0].schedules[0].paths != other.schedules[0].paths


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path_method": "guess"}, "path_method 'guess' is unknown"),
        ({"path_method": "straight"}, "visits all 4 stages, found path_stages 3; take dtfm-skip"),
        ({"path_method": "reuse"}, "method reuse needs live_memory and .* equal waves"),
        (
            {"path_method": "cbs", "path_stages": None, "full_every": None, "stages": 3}
            | {"stage_sizes": None},
            "path_method is 'cbs', which only partial paths can have; give path_stages",
        ),
    ],
)
def test_path_methods_that_do_not_apply(change: dict[str, Any], message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(ValueError, match=message):
        planned(pl.MaxIterations(4), **change)


def test_a_method_that_finds_nothing_says_so() -> None:
    """Conflict-based search that is cut off has no paths; more effort is the remedy."""
    with pytest.raises(ValueError, match="'cbs' found none; give it more effort, or take 'auto'"):
        planned(pl.MaxIterations(1), path_method="cbs")


LAYERS = ((0, 1), (1, 2), (2, 4))


def test_given_layers_are_kept() -> None:
    """With the times, memory and bound of these layers."""
    fields: dict[str, Any] = {"stage_sizes": (2, 2, 2), "path_stages": 2}
    result = planned(pl.MaxIterations(4), stage_layers=LAYERS, **fields)
    even = planned(pl.MaxIterations(4), stage_layers="even", **fields)
    assert result.plan is not None and even.plan is not None
    assert pl.check(result) == [] and pl.check(even) == []
    assert result.plan.stage_layers == LAYERS
    assert even.plan.stage_layers == tiny_workload().even_split(3)
    last = result.plan.assignment.groups[2][0]
    assert result.plan.compute_times.forward_s[last] == pytest.approx(
        sum(layer.forward_flops for layer in tiny_workload().layers[2:]) / 1e9
    )
    assert result.bound is not None and result.bound <= result.plan.predicted.step_s


def test_layers_are_chosen_for_what_visits_them() -> None:
    """A head that takes long, and stages that are skipped half the time: fewer layers beside it."""
    tiny = tiny_workload()
    head = replace(tiny.head, forward_flops=2 * tiny.layers[0].forward_flops)
    workload = tiny.replace(layers=tiny.layers * 3, head=head, architecture=None)
    network = random_network(6)
    fast = network.replace(bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * 1e6)
    cluster = pl.Cluster(fast.replace(latency_s=fast.latency_s * 0 + 1e-6), pl.Devices(1e7, 16e9))
    fields: dict[str, Any] = {"stage_sizes": (2, 2, 2), "path_stages": 2, "full_every": 0}
    fields |= {"cluster": cluster, "workload": workload}
    even = planned(pl.MaxIterations(20), stage_layers="even", **fields)
    chosen = planned(pl.MaxIterations(20), **fields)
    assert even.objective is not None and chosen.objective is not None
    assert even.plan is not None and chosen.plan is not None and pl.check(chosen) == []
    count = [stop - start for start, stop in chosen.plan.stage_layers]
    assert count[0] < 4 and sum(count) == 12
    assert chosen.objective < 0.9 * even.objective


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_layers_worth_a_try_are_the_best_of_all(seed: int) -> None:
    """Every cut of seven layers: none computes less for its microbatches in the slowest stage."""
    rng = np.random.default_rng(seed)
    tiny = tiny_workload()
    layers = [
        replace(tiny.layers[0], forward_flops=float(rng.uniform(1, 5)) * 1e6) for _ in range(7)
    ]
    workload = tiny.replace(layers=tuple(layers), architecture=None)
    flops = rng.uniform(1e8, 1e9, 6)
    cluster = pl.Cluster(random_network(6, seed), pl.Devices(flops, 16e9))
    request = pl.PlanRequest(stage_sizes=(2, 2, 1, 1), path_stages=3, full_every=4)
    problem = PlanningProblem(cluster, workload, request)
    shape, groups = shape_of(problem), ((0, 1), (2, 3), (4,), (5,))
    # of four iterations three visit two of the three later stages
    visits = [8.0, *[8 * (3 * 2 / 3 + 1) / 4] * 3]
    rate = [2 * flops[:2].min(), flops[2:4].sum(), flops[4], flops[5]]

    def slowest_s(cut: Layers) -> float:
        seconds = []
        for j, (a, b) in enumerate(cut):
            forward = sum(layer.forward_flops for layer in workload.layers[a:b])
            work = 3 * forward + (3 * workload.stem.forward_flops if j == 0 else 0)
            work += 3 * workload.head.forward_flops if j == 0 else 0
            seconds.append(visits[j] * work * workload.microbatch_samples / rate[j])
        return float(max(seconds))

    cuts = [((0, a), (a, b), (b, c), (c, 7)) for a, b, c in combinations(range(1, 7), 3)]
    tried = splits(problem, shape, groups)
    assert tried[0] == shape.layers
    assert min(map(slowest_s, tried)) == pytest.approx(min(map(slowest_s, cuts)))
    fixed = replace(problem, request=request.replace(stage_layers="even"))
    assert splits(fixed, shape, groups) == [shape.layers]


@settings(max_examples=6)
@given(st.integers(0, 1000), st.sampled_from([2, 3]))
def test_bound_holds_for_every_arrangement_with_unlike_layers(seed: int, path_stages: int) -> None:
    """All arrangements of four unlike devices on stages of 2, 1 and 1 with 1, 1 and 2 layers."""
    workload, sizes = tiny_workload(batch_samples=6), (2, 1, 1)
    cluster = pl.Cluster(random_network(4, seed), pl.Devices([1e8, 3e8, 1e8, 2e8], 16e9))
    request = pl.PlanRequest(
        stage_sizes=sizes, path_stages=path_stages, stage_layers=LAYERS, full_every=3
    )
    problem = PlanningProblem(cluster, workload, request)
    shape = shape_of(problem)
    bound = step_bound(problem, shape)
    assert bound is not None and shape.layers == LAYERS
    steps = []
    for a, b, c, d in permutations(range(4)):
        if a < b:
            assignment = AssignmentPlan.of_groups([(a, b), (c,), (d,)])
            times = compute_times(problem, shape, assignment)
            schedules, _ = partial_path_schedules(
                problem, shape, assignment, times, lambda _: pl.MaxIterations(0)
            )
            made = evaluated(problem, shape, assignment, times, schedules)
            assert pl.check(made) == []
            steps.append(made.predicted.step_s)
    assert 0.05 * min(steps) <= bound.value * (1 - ROUNDING) <= min(steps)


def test_averaging_counts_in_the_arrangement() -> None:
    """A device whose pairs are slow for gradients does not average, whatever the hops cost."""
    cluster = cluster_of(6, 5)
    request = pl.PlanRequest(stage_sizes=(2, 2, 1, 1), path_stages=3, full_every=0)
    problem = PlanningProblem(cluster, tiny_workload(), request)
    subproblem = arranged_problem(problem, shape_of(problem))
    assert subproblem.averaging is not None and subproblem.fixed_sizes
    heavy = replace(subproblem.averaging, vector_bytes=subproblem.averaging.vector_bytes * 1e7)
    aware = arrange_paths(subproblem.replace(averaging=heavy), pl.MaxIterations(30))
    blind = arrange_paths(subproblem.replace(averaging=None), pl.MaxIterations(10))
    assert aware.plan is not None and blind.plan is not None
    assert pl.check(aware, subproblem.replace(averaging=heavy)) == []

    def rounds_s(groups: Sequence[Sequence[int]]) -> float:
        links, vectors = LinkResources.of(cluster), heavy.vector_bytes.tolist()
        return max(
            round_s(AveragingGroup.equal(tuple(group)), vector, links)
            for group, vector in zip(groups, vectors, strict=True)
        )

    every = [
        rounds_s(((a, b), (c, d), (5,), (4,)))
        for a, b, c, d, *_ in permutations(range(6))
        if a < b and c < d
    ]  # groups of one average with nobody
    assert rounds_s(aware.plan.groups) == pytest.approx(min(every), rel=1e-6)
    assert rounds_s(aware.plan.groups) < rounds_s(blind.plan.groups)
    # an objective that leaves the rounds out is found
    wrong = replace(aware, objective=aware.plan.paths.makespan_s)
    assert "timeline" in {v.rule for v in pl.check(wrong, subproblem.replace(averaging=heavy))}


def test_a_search_goes_on_from_given_paths() -> None:
    """Never worse than they are; paths of something else are passed over."""
    subproblem = random_problem(4, (3, 2, 2, 2), path_stages=3, each=4, memory=4).replace(
        live_memory=True
    )
    short = pl.solve_paths(subproblem, pl.MaxIterations(10))
    on = pl.solve_paths(subproblem, pl.MaxIterations(1), first=short.plan)
    assert short.objective is not None and on.objective is not None
    assert on.objective <= short.objective * (1 + 1e-9) and pl.check(on, subproblem) == []
    fewer = subproblem.replace(microbatches_per_start=2)
    other = pl.solve_paths(fewer, pl.MaxIterations(1), first=short.plan)
    assert other.plan is not None and pl.check(other, fewer) == []
    with pytest.raises(ValueError, match="first must be of type PathPlan"):
        pl.solve_paths(subproblem, pl.MaxIterations(1), first=[(0, 1)])  # type: ignore[arg-type]
