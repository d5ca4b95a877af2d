"""The checker of microbatch paths on an instance small enough to follow by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.checker.dispatch import check
from planner.checker.paths import even_visits_violations
from planner.network.cluster import Cluster, Devices
from planner.problems import ArrangedPathProblem, PathProblem, ProblemError
from planner.problems.answers import AssignmentPlan, PathOp, PathPlan
from planner.problems.path_file import load_path_file
from planner.search.fingerprint import fingerprint
from planner.workload.workload import Workload
from tests.conftest import random_network

pytestmark = pytest.mark.interpreted

INSTANCE = Path(__file__).parents[2] / "datasets" / "instances" / "gcp20_skip33.json"


def small(**changes: object) -> PathProblem:
    """Start device 0, stages {1}, {2}, {3}; every transfer 1 s, F 1 s, H 1 s, B 2 s."""
    fields: dict[str, object] = {
        "transfer_s": np.ones((4, 4)),
        "stage_devices": [[0], [1], [2], [3]],
        "forward_s": 1,
        "backward_s": 2,
        "head_s": 1,
        "path_stages": 3,
        "memory": 3,
        "microbatches_per_start": 1,
    }
    return PathProblem(**{**fields, **changes})  # type: ignore[arg-type]


def timed(paths: list[list[int]]) -> PathPlan:
    """One microbatch after the other, as early as its own chain allows."""
    ops, now = [], 0.0
    for b, path in enumerate(paths):
        at = path[0]
        chain = [*(("F", d) for d in path), ("H", path[0]), *(("B", d) for d in path[::-1])]
        for kind, d in chain:
            now += 0 if d == at else 1
            end = now + {"F": 1, "H": 1, "B": 2}[kind]
            ops.append(PathOp(b, d, kind, now, end))
            now, at = end, d
    return PathPlan.of(paths, ops)


def rules(plan: PathPlan, problem: PathProblem) -> set[str]:
    """Names of the broken rules."""
    return {v.rule for v in check(plan, problem)}


def test_valid_paths_and_makespan() -> None:
    """F 1, hop, F 1, hop, F 1, hop, H 1, hop, B 2, hop, B 2, hop, B 2: 16 s."""
    plan = timed([[0, 1, 2]])
    assert rules(plan, small(stage_devices=[[0], [1, 3], [2]])) == set()
    assert plan.makespan_s == 16


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ([1, 0, 2], "CC1"),
        ([0, 1], "skip"),
        ([0, 3, 1], "CC2"),
        ([0, 1, 1], "paths"),
    ],
)
def test_broken_paths_are_reported(path: list[int], rule: str) -> None:
    """Wrong start device, too short, a swap of distant stages, a stage visited twice."""
    assert rule in rules(timed([path]), small(stage_devices=[[0], [1], [2], [3]]))


def test_swaps_are_counted() -> None:
    """2, 1 is one swap; 2, 1, 4, 3 are two; 3, 2, 1 is not a sequence of swaps."""
    wide = small(transfer_s=np.ones((5, 5)), stage_devices=[[0], [1], [2], [3], [4]], path_stages=5)
    assert rules(timed([[0, 2, 1, 3, 4]]), wide) == set()
    assert rules(timed([[0, 2, 1, 4, 3]]), wide) == {"CC2"}
    assert rules(timed([[0, 2, 1, 4, 3]]), wide.replace(max_swaps=2)) == set()
    assert "CC2" in rules(timed([[0, 3, 2, 1, 4]]), wide.replace(max_swaps=2))


def test_swaps_of_all_paths_are_counted() -> None:
    """Two paths with a swap each, and a third with none (D.2)."""
    problem = small(
        transfer_s=np.ones((3, 3)), stage_devices=[[0], [1], [2]], microbatches_per_start=3
    )
    plan = timed([[0, 2, 1], [0, 2, 1], [0, 1, 2]])
    assert rules(plan, problem) == set()
    assert rules(plan, problem.replace(max_total_swaps=2)) == set()
    assert rules(plan, problem.replace(max_total_swaps=1)) == {"CC2"}


def test_stages_are_skipped_equally() -> None:
    """Three paths through two of three stages: each stage twice."""
    problem = small(microbatches_per_start=3)
    assert rules(timed([[0, 1, 2], [0, 2, 3], [0, 1, 3]]), problem) == set()
    assert rules(timed([[0, 1, 2], [0, 1, 3], [0, 1, 3]]), problem) == {"CC3"}


def test_even_visits_of_a_schedule() -> None:
    """Seven visits to three stages are distributed 2, 2, 3 in any order."""
    stage_of = {0: 0, 1: 1, 2: 2, 3: 3}
    paths = [[0, 1, 2, 3], [0, 1, 2], [0, 1, 3]]
    assert list(even_visits_violations(paths, stage_of, 4)) == []
    paths[1] = [0, 1]
    found = list(even_visits_violations([*paths, [0, 1]], stage_of, 4))
    assert [(v.rule, v.where) for v in found] == [
        ("CC3", "stage 1"),
        ("CC3", "stage 2"),
    ]
    assert list(even_visits_violations([[0], [0]], {0: 0}, 1)) == []


def test_derived_properties_of_the_problem_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker derives starts, stages and visits from the problem's fields itself."""
    problem = small(microbatches_per_start=3)
    monkeypatch.setattr(PathProblem, "starts", (1, 1, 1))
    monkeypatch.setattr(PathProblem, "stage_of", (0, 0, 0, 0))
    monkeypatch.setattr(PathProblem, "visits", (0, 9))
    assert rules(timed([[0, 1, 2], [0, 2, 3], [0, 1, 3]]), problem) == set()
    assert rules(timed([[0, 1, 2], [0, 1, 3], [0, 1, 3]]), problem) == {"CC3"}


def test_memory_counts_paths_or_live_microbatches() -> None:
    """Three paths through device 0: too many for 2 at all, not for 1 at a time."""
    plan = timed([[0, 1, 2], [0, 2, 3], [0, 1, 3]])
    problem = small(microbatches_per_start=3, memory=2)
    assert rules(plan, problem) == {"TC1"}
    assert rules(plan, problem.replace(live_memory=True, memory=1)) == set()
    overlapping = PathPlan.of(
        plan.paths,
        [
            op._replace(start_s=op.start_s - 16, end_s=op.end_s - 16) if op.microbatch == 1 else op
            for op in plan.ops
        ],
    )
    assert {"TC2", "TC1"} <= rules(overlapping, problem.replace(live_memory=True, memory=1))


def test_times_must_follow_the_chain() -> None:
    """An early start, a short operation, a missing one, one too many."""
    plan, problem = timed([[0, 1, 2]]), small(stage_devices=[[0], [1, 3], [2]])
    ops = list(plan.ops)
    early = [ops[0], ops[1]._replace(start_s=1.5, end_s=2.5), *ops[2:]]
    assert rules(PathPlan.of(plan.paths, early), problem) == {"timeline"}
    short = [ops[0]._replace(end_s=0.5), *ops[1:]]
    assert rules(PathPlan.of(plan.paths, short), problem) == {"timeline"}
    assert rules(PathPlan.of(plan.paths, ops[:-1]), problem) == {"timeline"}
    more = [*ops, PathOp(0, 3, "F", 50.0, 51.0)]
    assert rules(PathPlan.of(plan.paths, more), problem) == {"timeline"}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_times_must_be_finite(odd: float) -> None:
    """Comparisons with NaN would pass all other rules."""
    plan = timed([[0, 1, 2]])
    first, *others = plan.ops
    never = PathPlan.of(plan.paths, [first, *(op._replace(end_s=odd) for op in others)])
    found = check(never, small())
    assert {v.rule for v in found} == {"timeline"} and len(found) == len(others)
    assert "finite times" in str(found[0])
    late = PathPlan.of(plan.paths, [first._replace(start_s=odd), *others])
    assert any("finite times" in str(v) for v in check(late, small()))


def test_published_paths_exceed_the_memory_of_one_device() -> None:
    """As the instance documents: device 4 carries 4 paths with memory for 3."""
    data = json.loads(INSTANCE.read_text())
    names = (
        "transfer_s stage_devices forward_s backward_s head_s path_stages memory "
        "microbatches_per_start max_swaps"
    )
    problem = PathProblem(**{name: data[name] for name in names.split()})
    assert problem.visits == (9, 9)
    found = check(PathPlan.of(data["public_paths"], []), problem)
    assert [(v.rule, v.where) for v in found] == [("TC1", "device 4")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transfer_s": np.ones((2, 3))}, "N x N"),
        ({"transfer_s": np.full((4, 4), np.nan)}, "must be >= 0 and finite"),
        ({"stage_devices": [[0], [1], [2]]}, "each of the 4 devices once"),
        ({"stage_devices": [[0], [1], [2, 3], []]}, "no empty stage"),
        ({"path_stages": 5}, "1 to the 4 stages"),
        ({"microbatches_per_start": 0}, "at least 1"),
        ({"memory": 1.5}, "whole numbers"),
        ({"memory": -1}, "whole numbers"),
        ({"forward_s": [1, 2]}, "forward_s must be one number or 4"),
        ({"head_s": -1}, "head_s of device 0 is -1"),
        ({"max_swaps": -1}, "max_swaps is -1"),
        ({"max_total_swaps": -1}, "max_total_swaps is -1"),
        ({"transfer_s": 5}, r"N x N, found shape \(\)"),
        ({"transfer_s": [[0, 1], [1]]}, "N x N numbers, found a value of type list"),
        ({"transfer_s": "fast"}, "N x N numbers, found a value of type str"),
        ({"stage_devices": [[0], [1.5], [2], [3]]}, "a device of stage_devices .* found 1.5"),
        ({"stage_devices": [0, 1, 2, 3]}, "a list of devices for every stage"),
        ({"stage_devices": None}, "a list of devices for every stage"),
        ({"path_stages": 2.5}, "path_stages must be a whole number, found 2.5"),
        ({"microbatches_per_start": 1.5}, "microbatches_per_start must be a whole number"),
        ({"max_swaps": 0.5}, "max_swaps must be a whole number"),
        ({"max_total_swaps": 0.5}, "max_total_swaps must be a whole number"),
        ({"memory": [1, 2]}, r"memory must be one number or 4 of them, found shape \(2,\)"),
        ({"memory": [1, 2, 3, 4.5]}, "memory is 4.5 at 3"),
        ({"memory": np.nan}, "memory is nan"),
        ({"memory": "much"}, "memory must be one number or 4 of them"),
        ({"head_s": [[1], [2]]}, r"head_s must be one number or 4 of them, found shape \(2, 1\)"),
        ({"live_memory": "yes"}, "live_memory must be True or False"),
        ({"link_s": np.ones((3, 3))}, r"link_s must be 4 x 4, as transfer_s is, found .*\(3, 3\)"),
        ({"link_s": np.full((4, 4), 2.0)}, "link_s from 0 to 1 is 2; .* must be 0 to 1"),
        ({"link_s": np.full((4, 4), -1.0)}, "link_s from 0 to 1 is -1; .* must be 0 to 1"),
        ({"link_s": np.full((4, 4), np.nan)}, "link_s from 0 to 1 is nan; .* must be 0 to 1"),
        ({"link_s": "busy"}, "link_s must be N x N numbers or None, found .* str"),
    ],
)
def test_invalid_problems_are_refused(change: dict[str, Any], message: str) -> None:
    """The message has rule, value and remedy."""
    with pytest.raises(ProblemError, match=message):
        small(**change)


def test_problem_from_an_assignment() -> None:
    """Times from FLOPs, memory left beside parameters, both directions of links averaged."""
    network = random_network(5)
    cluster = Cluster(network, Devices(1e13, 16e9))
    workload = Workload.preset("llama-1.5b")
    plan = AssignmentPlan.of_groups([[0, 1], [2], [3], [4]])
    problem = PathProblem.from_assignment(
        cluster, workload, plan, path_stages=3, microbatches_per_start=2
    )
    assert problem.starts == (0, 0, 1, 1)
    np.testing.assert_allclose(problem.backward_s, 2 * problem.forward_s)
    np.testing.assert_allclose(problem.transfer_s, problem.transfer_s.T)
    assert (problem.memory >= 1).all()


def test_queueing_links_from_an_assignment() -> None:
    """A link is busy for a transfer without its latency; without the option it never queues."""
    network = random_network(5)
    cluster = Cluster(network, Devices(1e13, 16e9))
    plan = AssignmentPlan.of_groups([[0, 1], [2], [3], [4]])
    asked: dict[str, Any] = {"path_stages": 3, "microbatches_per_start": 2}
    workload = Workload.preset("llama-1.5b")
    paper = PathProblem.from_assignment(cluster, workload, plan, **asked)
    assert paper.link_s is None
    queued = PathProblem.from_assignment(cluster, workload, plan, queueing=True, **asked)
    latency = (network.latency_s + network.latency_s.T) / 2
    np.fill_diagonal(latency, 0.0)
    assert queued.link_s is not None and not queued.link_s.flags.writeable
    np.testing.assert_allclose(queued.transfer_s - queued.link_s, latency, atol=1e-9)
    np.testing.assert_array_equal(queued.transfer_s, paper.transfer_s)
    free = ArrangedPathProblem.from_workload(
        cluster, workload, [2, 1, 1, 1], queueing=True, **asked
    )
    np.testing.assert_array_equal(free.link_s, queued.link_s)
    assert queued.replace(link_s=None).link_s is None
    assert fingerprint(queued) != fingerprint(queued.replace(link_s=queued.link_s * 0.5))
    nobody = np.where(np.eye(5, dtype=bool), np.nan, queued.link_s)
    assert not np.diag(paper.replace(link_s=nobody).link_s).any()


def test_path_files_with_links(tmp_path: Path) -> None:
    """``link_s`` is optional."""
    problem = small()
    names = [name for name in PathProblem.__dataclass_fields__ if name != "link_s"]
    plain = {
        name: np.array(getattr(problem, name)).tolist() for name in names if name != "stage_devices"
    }
    plain |= {"stage_devices": [[0], [1], [2], [3]]}
    file = tmp_path / "problem.json"
    for more, link in (({}, None), ({"link_s": [[0.5] * 4] * 4}, 0.5)):
        file.write_text(json.dumps({**plain, **more}))
        for made in (load_path_file(file).problem(), load_path_file(file).arranged()):
            assert (made.link_s is None) if link is None else (made.link_s[0, 1] == link)
