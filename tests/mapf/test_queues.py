"""Links that carry one message at a time (``link_s``): every solver, bound and the checker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.checker.dispatch import check
from planner.checker.path_bounds import recomputed_bound_s
from planner.mapf import arrange_paths, job_shop_model, solve_paths
from planner.mapf.anneal import critical_path, overtake
from planner.mapf.arrays import PathArrays
from planner.mapf.bounds import simple_bound
from planner.mapf.cbs import CbsOptions, ConflictObjective, ConflictSearch
from planner.mapf.construction import construct, construction_order
from planner.mapf.entry_times import entry_and_return_s
from planner.mapf.fixed_order import FOLLOW_TIMES, compute_schedule, schedule_paths
from planner.mapf.intervals import Constraint
from planner.mapf.link_bounds import link_bounds
from planner.mapf.list_scheduling import ScheduleData, ScheduleState, build_plan
from planner.mapf.path_enumeration import all_paths
from planner.mapf.router import PathRouter, link_resource
from planner.mapf.schedule_by_rank import schedule_by_rank
from planner.mapf.skippipe_cbs import CapacityConflict, SkipPipeDomain
from planner.problems import ArrangedPathProblem, PathProblem
from planner.search.arrays import Floats
from planner.search.certificate import Status
from planner.search.cp_sat import solver_for
from planner.search.stop import MaxIterations
from tests.mapf.conftest import random_problem
from tests.mapf.test_solve import brute_force


def busy_links(problem: PathProblem, seed: int, work: float = 1.0) -> PathProblem:
    """A link is busy for a third to all of a transfer; operations take ``work`` times as long."""
    share = np.random.default_rng(seed).uniform(0.3, 1.0, problem.transfer_s.shape)
    return problem.replace(
        link_s=problem.transfer_s * share,
        forward_s=problem.forward_s * work,
        backward_s=problem.backward_s * work,
        head_s=problem.head_s * work,
    )


def one_pair(**changes: object) -> PathProblem:
    """Two microbatches, F 1 s, H 1 s, B 2 s; a message takes 4 s, its link is busy for 3 s."""
    fields: dict[str, object] = {
        "transfer_s": [[0, 4], [4, 0]],
        "stage_devices": [[0], [1]],
        "forward_s": 1,
        "backward_s": 2,
        "head_s": 1,
        "path_stages": 2,
        "memory": 9,
        "microbatches_per_start": 2,
        "link_s": [[0, 3], [3, 0]],
    }
    return PathProblem(**{**fields, **changes})  # type: ignore[arg-type]


def fifo_schedule(problem: PathProblem) -> tuple[PathArrays, np.ndarray, Floats]:
    """Both microbatches over the pair, first in, first out: arrays, paths and starts."""
    arrays = PathArrays.of(problem)
    paths = np.array([[0, 1]] * arrays.microbatches)
    return arrays, paths, schedule_paths(arrays, paths, tail_weight=0.0)[1]


def test_two_messages_on_one_link_by_hand() -> None:
    """Handed over at 1 and 2 s, they leave at 1 and 4 s and are there at 5 and 8 s."""
    arrays, paths, begin = fifo_schedule(one_pair())
    assert begin.tolist() == [[0, 5, 10, 15, 21], [1, 8, 13, 18, 24]]
    plan = build_plan(arrays, paths, begin)
    assert check(plan, one_pair()) == []
    assert plan.makespan_s == 26 == brute_force(one_pair())
    rank = {(op.microbatch, op.kind, op.device): op.start_s for op in plan.ops}
    assert schedule_by_rank(one_pair(), plan.paths, rank) == plan
    assert {v.rule for v in check(plan, one_pair(link_s=[[0, 4], [4, 0]]))} == {"links"}


def test_checker_detects_overlap_on_a_link() -> None:
    """The paper's plan has two messages on the link at a time."""
    free = one_pair(link_s=None)
    plan = build_plan(*fifo_schedule(free))
    assert check(plan, free) == []
    wrong = check(plan, one_pair())
    assert {v.rule for v in wrong} == {"links"} and wrong[0].where == "link 0 -> 1"
    assert "leaves at 4 s and is there at 8 s, found a start at 6 s" in wrong[0].message


@pytest.mark.parametrize(("forward_s", "found"), [(1.0, {"links", "timeline"}), (0.0, set())])
def test_links_are_fifo(forward_s: float, found: set[str]) -> None:
    """The second microbatch cannot overtake on the link; it may where both end together."""
    problem = one_pair(forward_s=[forward_s, 1])
    arrays, paths, begin = fifo_schedule(problem)
    assert check(build_plan(arrays, paths, begin), problem) == []
    later = begin[:, 1:].copy()
    begin[0, 1:], begin[1, 1:] = later[1], later[0]
    assert {v.rule for v in check(build_plan(arrays, paths, begin), problem)} == found


def test_critical_path_through_a_queue() -> None:
    """From the last B to the first F through queued messages; the overtake move acts on them."""
    arrays, paths, begin = fifo_schedule(one_pair())
    state, data = ScheduleState.of(arrays, paths, begin), ScheduleData.of(arrays)
    makespan = compute_schedule(data, state, FOLLOW_TIMES, 1e9)
    assert makespan == 26
    # all of the second microbatch but its F: its message waited for that of the first
    critical = np.empty(begin.size, dtype=np.int64)
    assert critical[: critical_path(data, state, makespan, critical)].tolist() == [9, 8, 7, 6, 0]
    assert state.link_pred[1, 1] == 1
    # so its F is put in front of the other's
    offset = state.offset.copy()
    assert overtake(state, offset, 6, FOLLOW_TIMES)
    assert offset[1, 0] < offset[0, 0] and np.array_equal(offset[1, 1:], state.offset[1, 1:])


TIGHT = [
    ((1, 1), 2, 3, 7, 0.5),
    ((1, 1), 2, 3, 5, 0.3),
    ((1, 2, 1, 1), 3, 2, 0, 0.3),
    ((2, 1, 1), 3, 1, 8, 0.2),
    ((1, 1, 1), 3, 2, 1, 0.3),
]
"""Devices per stage, stages on a path, microbatches per start device, seed, work."""


@pytest.mark.parametrize(("sizes", "path_stages", "each", "seed", "work"), TIGHT)
def test_optima_with_queues(
    sizes: tuple[int, ...], path_stages: int, each: int, seed: int, work: float
) -> None:
    """Solvers match brute force, and no bound exceeds it."""
    problem = busy_links(random_problem(seed, sizes, path_stages, each=each, memory=4), seed, work)
    least = brute_force(problem)
    result = solve_paths(problem, MaxIterations(16))
    assert result.plan is not None and check(result, problem) == []
    assert result.objective == pytest.approx(least, rel=1e-9)
    assert result.status is Status.OPTIMAL
    assert result.bound is not None and result.bound <= least * (1 + 1e-9)
    searched = solve_paths(problem, MaxIterations(60), method="cbs")
    assert searched.plan is not None and check(searched, problem) == []
    assert searched.objective is not None and searched.objective >= least * (1 - 1e-9)
    arrays = PathArrays.of(problem)
    ways = entry_and_return_s(arrays, sorted(set(arrays.starts.tolist())))
    for seconds, _, witness in link_bounds(arrays, *ways):
        again = recomputed_bound_s(witness, problem)
        assert again == pytest.approx(seconds, rel=1e-9) and seconds <= least * (1 + 1e-9)


def model_bound_s(problem: PathProblem, horizon_s: float) -> float:
    """CP-SAT's bound with every path as an option, in steps of a ten-thousandth."""
    arrays = PathArrays.of(problem)
    options = {s: all_paths(arrays, s) for s in problem.stage_devices[0]}
    path_model = job_shop_model.build(
        problem, [options[s] for s in problem.starts], horizon_s, 10_000
    )
    solver = solver_for(max_work=20.0)
    return job_shop_model.proven_bound_s(solver, solver.solve(path_model.model), path_model.tick_s)


def test_full_model_with_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's optimum is that of all plans; without the order of messages it is no larger."""
    sizes, path_stages, each, seed, work = TIGHT[0]
    problem = busy_links(random_problem(seed, sizes, path_stages, each=each, memory=4), seed, work)
    least = brute_force(problem)
    assert brute_force(problem.replace(link_s=None)) < 0.99 * least
    exact = model_bound_s(problem, least * 1.001)
    assert 0.99 * least < exact <= least
    monkeypatch.setattr(job_shop_model, "MAX_ORDERED_PAIRS", 0)
    assert model_bound_s(problem, least * 1.001) <= exact * (1 + 1e-9)


def test_link_bound_by_hand() -> None:
    """Eight messages of 3 s leave device 0 after F 0.1 s; a transfer, a B and the way home follow.

    Half of them cannot leave before they came back, so more is needed in truth.
    """
    problem = one_pair(microbatches_per_start=4, forward_s=0.1, backward_s=0.1, head_s=0.1)
    bound = simple_bound(PathArrays.of(problem))
    assert bound.witness["kind"] in ("links out of", "links into")
    # 0.1 + 8 * 3 + the rest of the last transfer 1 + B 0.1 + 4 home + B 0.1
    assert bound.seconds == pytest.approx(29.3, rel=1e-9)
    assert recomputed_bound_s(bound.witness, problem) == pytest.approx(29.3, rel=1e-12)
    result = solve_paths(problem, MaxIterations(8))
    assert result.objective is not None and result.objective >= 29.3
    for witness in (
        {"kind": "links out of"},
        {"kind": "links out of", "device": 1},
        {"kind": "links into", "stage": 0},
        {"kind": "links into", "stage": 1, "device": 0},
    ):
        assert recomputed_bound_s(witness, problem) is None
    assert recomputed_bound_s(bound.witness, problem.replace(link_s=None)) is None


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.sampled_from([(2, 2, 2, 1), (1, 2, 1), (3, 2, 2, 2, 2), (2, 1, 2, 1)]),
    path_stages=st.integers(1, 3),
    live=st.booleans(),
    method=st.sampled_from(["auto", "cbs", "no-tc2", "dtfm-skip"]),
)
def test_every_method_respects_queues(
    seed: int, sizes: tuple[int, ...], path_stages: int, live: bool, method: str
) -> None:
    """Plans and bounds pass the checker; a problem whose links are never busy is the paper's."""
    base = random_problem(seed, sizes, path_stages, memory=6, live_memory=live)
    problem = busy_links(base, seed, 0.3)
    result = solve_paths(problem, MaxIterations(4 if method == "auto" else 40), method=method)
    if result.status is Status.INFEASIBLE:
        assert solve_paths(base, MaxIterations(1)).status is Status.INFEASIBLE
        return
    assert check(result, problem) == []
    arrays, idle = PathArrays.of(problem), problem.replace(link_s=np.zeros(base.transfer_s.shape))
    paths = construct(arrays, construction_order(arrays), 1.0)
    offset = np.random.default_rng(seed).uniform(0, 9, (arrays.microbatches, arrays.steps))
    for tail_weight in (0.1, FOLLOW_TIMES):
        makespan, begin = schedule_paths(arrays, paths, offset, tail_weight)
        if not np.isfinite(makespan):
            continue
        plan = build_plan(arrays, paths, begin)
        assert check(plan, problem) == []
        rank = {(op.microbatch, op.kind, op.device): op.start_s for op in plan.ops}
        assert schedule_by_rank(problem, plan.paths, rank) == plan
        paper = schedule_paths(PathArrays.of(idle.replace(link_s=None)), paths, offset, tail_weight)
        same = schedule_paths(PathArrays.of(idle), paths, offset, tail_weight)
        assert paper[0] == same[0] and np.array_equal(paper[1], same[1])


def test_several_waves_with_queues() -> None:
    """Waves in turn and overlapping, with live memory."""
    problem = busy_links(
        random_problem(2, (2, 2, 2), 3, each=4, memory=2, live_memory=True), 2, 0.5
    )
    for method in ("auto", "reuse"):
        result = solve_paths(problem, MaxIterations(6), method=method)
        assert result.plan is not None and check(result, problem) == []


def test_routes_wait_for_links() -> None:
    """A message barred from its link until 20 s leaves then; directions are separate links."""
    problem = busy_links(random_problem(3, (1, 1), 2, each=1), 3)
    arrays, (u, v) = PathArrays.of(problem), (g[0] for g in problem.stage_devices)
    router, n = PathRouter(arrays), 2
    free = router.route(0, ())
    assert free is not None
    for message in free.messages:
        until = message.end + 20
        held = router.route(0, [Constraint(message.resource, message.begin, until)])
        assert held is not None and held.end_s == pytest.approx(free.end_s + until - message.begin)
    places = [message.resource for message in free.messages]
    assert places == [link_resource(n, *pair) for pair in ((u, v), (v, u)) * 2]


def test_messages_collide_in_conflict_based_search() -> None:
    """Two messages collide; one agent departs later, or runs later on the sending device."""
    problem = one_pair(forward_s=0.5)
    arrays = PathArrays.of(problem)
    domain = SkipPipeDomain(PathRouter(arrays), False)
    search = ConflictSearch(
        domain, MaxIterations(100).start(), CbsOptions(ConflictObjective.MAKESPAN)
    )
    first = [domain.plan(0, ()), domain.plan(1, (Constraint(0, 0.0, 0.5),))]
    routes = tuple(route for route in first if route is not None)
    pairs = [
        c
        for c in domain.conflicts(routes)
        if not isinstance(c, CapacityConflict) and c[0].resource == 3
    ]
    # handed over at 0.5 and at 1 s; the first keeps the link until 3.5 s
    assert [(one.begin, other.begin) for one, other in pairs[:1]] == [(0.5, 1.0)]
    root = search.root()
    assert root is not None
    node = replace(root, routes=routes)
    (branch,) = domain.split(pairs[0], node)
    assert branch == [(0, Constraint(0, 0.0, 1.0))]
    result = solve_paths(problem, MaxIterations(60), method="cbs")
    assert result.objective == brute_force(problem)


def test_arrangements_with_queues() -> None:
    """Devices are exchanged with their links."""
    fixed = busy_links(random_problem(5, (2, 2, 2), 3, memory=6), 5, 0.3)
    free = ArrangedPathProblem.of(fixed)
    assert free.link_s is not None and np.array_equal(free.link_s, fixed.link_s)
    result = arrange_paths(free, MaxIterations(6))
    assert result.plan is not None and check(result, free) == []
    at = free.arranged(result.plan.groups)
    assert check(result.plan.paths, at) == []
