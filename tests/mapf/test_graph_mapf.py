"""MAPF on graphs against a joint search, the checker and costs computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.mapf.cbs import CbsOptions, ConflictObjective
from planner.problems import ProblemError
from planner.search.certificate import Status
from planner.search.incumbent import ROUNDING
from planner.search.stop import MaxIterations, SearchRun, StoppingCriterion
from tests.mapf.graph_check import check_graph_plan
from tests.mapf.graph_mapf import GraphMove, GraphPlan, GraphProblem, solve_graph_mapf
from tests.mapf.graphs import grid, joint_optimum, random_graph, solvable
from tests.mapf.sipp import Move, safe_path, seconds_to
from tests.mapf.sipp_windows import EntryConstraint

OPEN_3 = ["...", "...", "..."]


def line(*seconds: float) -> nx.Graph[Any]:
    """Vertices 0, 1, ... in a row."""
    graph: nx.Graph[Any] = nx.Graph()
    for k, s in enumerate(seconds):
        graph.add_edge(k, k + 1, seconds=s)
    return graph


def cross(seconds: float = 1.0) -> nx.Graph[Any]:
    """Four arms and a centre that all must pass."""
    graph: nx.Graph[Any] = nx.Graph()
    graph.add_edges_from(("c", arm, {"seconds": seconds}) for arm in "nesw")
    return graph


def siding() -> nx.Graph[Any]:
    """A corridor of five with a siding in the middle."""
    graph = line(1, 1, 1, 1)
    graph.add_edge(2, "side", seconds=1.0)
    return graph


PUBLISHED = {
    "bottleneck": GraphProblem(cross(), (("n", "s"), ("e", "w"))),
    "bottleneck of three": GraphProblem(cross(0.7), (("n", "s"), ("e", "w"), ("s", "e"))),
    "corridor with a siding": GraphProblem(siding(), ((0, 4), (4, 0))),
    "a parked agent makes way": GraphProblem(siding(), ((0, 4), (2, 2))),
    "4-connected": GraphProblem(
        grid(OPEN_3), (((0, 0), (2, 2)), ((2, 2), (0, 0)), ((0, 2), (2, 0)))
    ),
    "4-connected with a wall": GraphProblem(
        grid(["...", "@.@", "..."]), (((0, 0), (2, 2)), ((2, 0), (0, 2)))
    ),
    "8-connected": GraphProblem(grid(OPEN_3, diagonals=True), (((0, 0), (2, 2)), ((2, 2), (0, 0)))),
    "8-connected with a wall": GraphProblem(
        grid(["..", ".@", ".."], diagonals=True), (((0, 0), (2, 1)), ((2, 1), (0, 1)))
    ),
}


@pytest.mark.parametrize("objective", list(ConflictObjective))
@pytest.mark.parametrize("name", PUBLISHED)
def test_small_published_style_instances(name: str, objective: ConflictObjective) -> None:
    """Every option finds the optimum of the joint problem."""
    problem = PUBLISHED[name]
    wanted = joint_optimum(problem, objective)
    for bypass, max_classified in [(True, 8), (False, 1)]:
        options = CbsOptions(objective, bypass=bypass, max_classified=max_classified)
        result = solve_graph_mapf(problem, MaxIterations(20_000), options)
        assert result.plan is not None and check_graph_plan(result.plan, problem) == []
        assert result.status is Status.OPTIMAL and result.objective == pytest.approx(wanted)
        assert result.objective == pytest.approx(objective.of(result.plan.ends_s))


def test_costs_by_hand() -> None:
    """One waits until the other has left the centre: 2 and 4 s."""
    two = solve_graph_mapf(PUBLISHED["bottleneck"], MaxIterations(100))
    assert two.objective == 6.0
    latest = solve_graph_mapf(
        PUBLISHED["bottleneck"], MaxIterations(100), CbsOptions(ConflictObjective.MAKESPAN)
    )
    assert latest.objective == 4.0
    # the conflict is cardinal: one expansion raises the bound from 4 s
    start = solve_graph_mapf(PUBLISHED["bottleneck"], MaxIterations(0))
    assert start.status is Status.UNKNOWN and start.bound == 4.0 - ROUNDING * 4.0
    once = solve_graph_mapf(PUBLISHED["bottleneck"], MaxIterations(1))
    assert once.status is Status.UNKNOWN and once.bound == 6.0 - ROUNDING * 6.0
    assert once.stop_reason == "iteration limit"


@pytest.mark.parametrize(
    ("seed", "agents"), [*((seed, 2) for seed in range(12)), *((seed, 3) for seed in range(6))]
)
def test_optimum_of_random_graphs(seed: int, agents: int) -> None:
    """Any seconds for two agents, whole ones for three; directed and not."""
    problem = random_graph(seed, 6, agents, agents == 3, seed % 2 == 1)
    assert solvable(problem)
    result = solve_graph_mapf(problem, MaxIterations(3000))
    assert result.status is Status.OPTIMAL and result.plan is not None
    assert check_graph_plan(result.plan, problem) == []
    assert result.objective == pytest.approx(joint_optimum(problem, "sum"))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vertices=st.integers(2, 6),
    objective=st.sampled_from(list(ConflictObjective)),
    slack=st.sampled_from([1.0, 1.1, 1.5]),
    bypass=st.booleans(),
    integral=st.booleans(),
    directed=st.booleans(),
)
def test_bounds_and_plans_of_random_graphs(
    seed: int,
    vertices: int,
    objective: ConflictObjective,
    slack: float,
    bypass: bool,
    integral: bool,
    directed: bool,
) -> None:
    """Bound <= optimum <= plan <= w times the bound; nothing is called infeasible that is not."""
    problem = random_graph(seed, vertices, 2, integral, directed)
    options = CbsOptions(objective, slack, bypass)
    result = solve_graph_mapf(problem, MaxIterations(300), options)
    if not solvable(problem):
        assert result.plan is None and result.status is Status.UNKNOWN
        return
    assert result.status is not Status.INFEASIBLE and result.bound is not None
    wanted = joint_optimum(problem, objective)
    assert wanted is not None and result.bound <= wanted * (1 + 1e-6)
    if result.plan is not None:
        assert check_graph_plan(result.plan, problem) == []
        assert result.objective is not None and result.objective >= wanted * (1 - 1e-6)
        assert result.objective <= slack * result.bound * (1 + 1e-6)


def test_unreachable_goal_and_unsolvable_problem() -> None:
    """An agent without a path is infeasible; two that can never pass end at the limit."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_edge("a", "b", seconds=1.0)
    alone = solve_graph_mapf(GraphProblem(graph, (("b", "a"),)), MaxIterations(10))
    assert alone.status is Status.INFEASIBLE and "agent 0 has no way from b to a" in (
        alone.stop_reason
    )
    swap = solve_graph_mapf(GraphProblem(line(1, 2), ((0, 2), (2, 0))), MaxIterations(500))
    assert swap.status is Status.UNKNOWN and swap.plan is None
    assert swap.bound is not None and swap.bound > 6 and swap.stop_reason == "iteration limit"


def test_exhausted_search_proves_infeasibility() -> None:
    """A directed path without a way back: an agent cannot make way for another."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_edge("a", "b", seconds=1.0)
    graph.add_edge("b", "c", seconds=1.0)
    problem = GraphProblem(graph, (("a", "c"), ("b", "b")))
    result = solve_graph_mapf(problem, MaxIterations(1000))
    assert joint_optimum(problem, "sum") is None
    assert result.status is Status.INFEASIBLE and result.stop_reason == "search exhausted"


def test_sipp_waits_for_safe_intervals() -> None:
    """SIPP waits in safe intervals, leaves in time, and takes a detour around closed vertices."""
    arcs = [[(1, 1.0), (2, 5.0)], [(0, 1.0), (3, 1.0)], [(3, 5.0)], [(1, 1.0)]]
    cost_to_go = seconds_to(arcs, 3)
    assert cost_to_go == [2.0, 1.0, 5.0, 0.0]
    free = safe_path(arcs, 0, 3, [], cost_to_go)
    assert free == (Move(0, 1, 0.0, 1.0), Move(1, 3, 1.0, 2.0))
    late = safe_path(arcs, 0, 3, [EntryConstraint(1, 0.0, 2.5, -math.inf)], cost_to_go)
    assert late is not None and late[0].begin == 2.5 and late[-1].end == 4.5
    around = safe_path(arcs, 0, 3, [EntryConstraint(1, 0.0, 50.0, -math.inf)], cost_to_go)
    assert around is not None and [m.target for m in around] == [2, 3] and around[-1].end == 10.0
    # the start must be left before 3 s, while the goal is closed until 7 s
    constraints = [EntryConstraint(0, -math.inf, 1.0, 3.0), EntryConstraint(3, 0.0, 7.0, -math.inf)]
    out = safe_path(arcs, 0, 3, constraints, cost_to_go)
    assert out is not None and out[0].end < 3.0 and out[-1].begin == 7.0
    must = safe_path(arcs, 0, 3, [EntryConstraint(3, 0.0, 5.0, math.inf)], cost_to_go)
    assert must is not None and must[-1].begin >= 5.0
    assert safe_path(arcs, 0, 3, [EntryConstraint(3, 0.0, math.inf, math.inf)], cost_to_go) is None


GOOD = GraphPlan(
    (
        (GraphMove("n", "c", 0.0, 1.0), GraphMove("c", "s", 1.0, 2.0)),
        (GraphMove("e", "c", 2.0, 3.0), GraphMove("c", "w", 3.0, 4.0)),
    )
)


@pytest.mark.parametrize(
    ("rule", "agent", "moves"),
    [
        ("vertices", 1, (GraphMove("e", "c", 1.5, 2.5), GraphMove("c", "w", 2.5, 3.5))),
        ("goal", 1, ()),
        ("moves", 1, (GraphMove("c", "w", 3.0, 4.0),)),
        ("edges", 1, (GraphMove("e", "w", 3.0, 4.0),)),
        ("time", 1, (GraphMove("e", "c", 2.0, 3.0), GraphMove("c", "w", 2.9, 3.9))),
        ("time", 1, (GraphMove("e", "c", 2.0, 3.0), GraphMove("c", "w", 3.0, 3.5))),
        ("time", 0, (GraphMove("n", "c", -1.0, 0.0), GraphMove("c", "s", 0.0, 1.0))),
    ],
)
def test_graph_checker_detects_violations(
    rule: str, agent: int, moves: tuple[GraphMove, ...]
) -> None:
    """One violation each."""
    problem = PUBLISHED["bottleneck"]
    assert check_graph_plan(GOOD, problem) == []
    changed = list(GOOD.moves)
    changed[agent] = moves
    found = check_graph_plan(replace(GOOD, moves=tuple(changed)), problem)
    assert rule in {violation.rule for violation in found}
    few = check_graph_plan(replace(GOOD, moves=GOOD.moves[:1]), problem)
    assert [violation.rule for violation in few] == ["agents"]


@pytest.mark.parametrize(
    ("graph", "agents", "match"),
    [
        (line(1, 0), (), "seconds > 0"),
        (line(1, math.inf), (), "finite"),
        (nx.Graph([(0, 1)]), (), "seconds None"),
        (nx.MultiGraph(), (), "multigraph"),
        (line(1), ((0, 7),), "goal 7 is not a vertex"),
        (line(1), ((0, 1), (0, 0)), "start 0 has 2 agents"),
        (line(1), ((0, 1), (1, 1)), "goal 1 has 2 agents"),
    ],
)
def test_invalid_problems_raise(
    graph: nx.Graph[Any], agents: tuple[tuple[int, int], ...], match: str
) -> None:
    """The message states the rule and the value."""
    with pytest.raises(ProblemError, match=match):
        GraphProblem(graph, agents)


class Interrupted(StoppingCriterion):
    """Ctrl-C in the middle of the search."""

    def reason(self, run: SearchRun) -> str | None:
        if run.iterations >= 5:
            raise KeyboardInterrupt
        return None


def test_interruption_returns_the_bound() -> None:
    """The bound proven so far is returned."""
    result = solve_graph_mapf(GraphProblem(line(1, 2), ((0, 2), (2, 0))), Interrupted())
    assert result.status is Status.UNKNOWN and result.stop_reason == "interrupted"
    assert result.bound is not None and result.bound >= 6


def test_search_is_deterministic() -> None:
    """Two runs give the same plan."""
    problem = PUBLISHED["4-connected"]
    one = solve_graph_mapf(problem, MaxIterations(5000))
    two = solve_graph_mapf(problem, MaxIterations(5000))
    assert one.plan == two.plan and one.plan is not None
