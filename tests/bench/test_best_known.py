"""Best known solutions: the bundled table is correct, and only valid solutions change a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.bench.bestknown import (
    FOLDER,
    SOLUTIONS,
    TABLE,
    RecordChange,
    load_table,
    record,
    solution_hash,
)
from planner.bench.evaluation import evaluate
from planner.bench.problem import ROUNDING, BenchInstance, ProblemFamily
from planner.bench.problem_files import problem_hash
from planner.bench.registry import INSTANCES
from planner.bench.solution_files import find_solution, read_solution, write_solution
from planner.bench.solution_store import SolutionStore
from planner.bench.task import Task, run_task
from tests.bench.run_bench import bench

TABLE_NOW = load_table()
SMALL = "assignment/gcp12-unequal"
SLOW_BYTES = 20_000
"""Of a solution's file: larger ones take the checker seconds."""


def _slow(name: str) -> bool:
    return (FOLDER / TABLE_NOW[name].solution).stat().st_size > SLOW_BYTES


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if _slow(n) else []) for n in sorted(TABLE_NOW)],
)
def test_entries_match_their_solutions(name: str) -> None:
    """The objective is recomputed on the same problem and does not violate the bound."""
    entry, instance = TABLE_NOW[name], INSTANCES[name]
    path, problem = FOLDER / entry.solution, instance.make()
    assert entry.sha256 == solution_hash(path)
    assert entry.problem == problem_hash(problem), "the instance has changed; give it another name"
    accepted = evaluate(instance.family, problem, read_solution(path)["answer"])
    assert accepted.objective == pytest.approx(entry.objective, rel=ROUNDING)
    assert entry.unit == instance.family.unit
    if entry.bound is not None:
        assert not instance.family.better(entry.objective, entry.bound)


def test_table_is_complete() -> None:
    """Every instance has an entry, there are no other entries or files, and files are small."""
    assert sorted(TABLE_NOW) == sorted(INSTANCES)
    files = [path for path in (FOLDER / SOLUTIONS).rglob("*") if path.is_file()]
    assert {str(path.relative_to(FOLDER)) for path in files} == {
        entry.solution for entry in TABLE_NOW.values()
    }
    assert sum(path.stat().st_size for path in [*files, FOLDER / TABLE]) < 2e6


def _groups(seed: int) -> list[list[int]]:
    order = np.random.default_rng(seed).permutation(12)
    return [part.tolist() for part in np.split(order, [4, 7, 10])]


def _cost(groups: list[list[int]]) -> float:
    return evaluate(ProblemFamily.ASSIGNMENT, INSTANCES[SMALL].make(), {"groups": groups}).objective


def _offer(found: Path, table: Path, answer: dict[str, Any], **wrapped: Any) -> RecordChange:
    data = {"format": "planner.solution", **wrapped, "answer": answer} if wrapped else answer
    write_solution(found / f"{SMALL}.json", data)
    options: dict[str, Any] = {"by": None, "date": "2026-01-01", "bounds": True}
    (change,) = record(found, [INSTANCES[SMALL]], table, **options)
    return change


def test_only_valid_better_solutions_change_the_table(tmp_path: Path) -> None:
    """New, no better, rejected, better; the solution file is replaced too."""
    found, table = tmp_path / "found", tmp_path / "table"
    worse, better = sorted((_groups(seed) for seed in (0, 1)), key=_cost, reverse=True)
    assert _cost(worse) > _cost(better) * (1 + ROUNDING)
    assert _offer(found, table, {"groups": worse}).what == "new"
    first = (table / TABLE).read_bytes()
    assert _offer(found, table, {"groups": worse}).what == "no better"
    broken = [worse[0], *worse[:3]]
    refused = _offer(found, table, {"groups": broken})
    assert refused.what == "refused" and "stage sizes" in refused.words
    # whatever a file claims of itself
    claimed = _offer(found, table, {"groups": worse}, objective=1e-9, method="me")
    assert claimed.what == "no better" and (table / TABLE).read_bytes() == first
    taken = _offer(found, table, {"groups": better}, objective=1e-9, method="me", seed=7)
    entry = load_table(table)[SMALL]
    assert taken.what == "better" and entry.objective == _cost(better)
    assert (entry.method, entry.seed, entry.date) == ("me", 7, "2026-01-01")
    path = table / entry.solution
    assert solution_hash(path) == entry.sha256
    assert read_solution(path)["answer"]["groups"] == [sorted(g) for g in better]


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": None}, "seed is None"),
        ({"seed": -1}, "seed is -1"),
        ({"effort": float("nan")}, "effort is nan"),
        ({"effort": "inf"}, "effort is 'inf'"),
        ({"effort": [1]}, "effort is [1]"),
        ({"bound": {"value": float("nan")}}, "bound.value is nan"),
        ({"bound": {}}, "bound.value is None"),
        ({"bound": 5.0}, "bound is a float"),
    ],
)
def test_invalid_claims_change_nothing(tmp_path: Path, claim: Any, words: str) -> None:
    """A valid solution with impossible claims leaves table and files unchanged."""
    found, table = tmp_path / "found", tmp_path / "table"
    worse, better = sorted((_groups(seed) for seed in (0, 1)), key=_cost, reverse=True)
    assert _offer(found, table, {"groups": worse}).what == "new"
    files = {path: path.read_bytes() for path in table.rglob("*") if path.is_file()}
    data = {"format": "planner.solution", "answer": {"groups": better}, **claim}
    path = found / f"{SMALL}.json"
    path.write_text(json.dumps(data))
    options: dict[str, Any] = {"by": None, "date": "2026-01-01", "bounds": True}
    (change,) = record(found, [INSTANCES[SMALL]], table, **options)
    assert change.what == "refused" and words in change.words
    assert files == {path: path.read_bytes() for path in table.rglob("*") if path.is_file()}


def test_table_is_written_after_every_instance(tmp_path: Path) -> None:
    """Later failures do not lose it."""
    found, table = tmp_path / "found", tmp_path / "table"
    write_solution(found / f"{SMALL}.json", {"groups": _groups(0)})
    write_solution(found / "assignment/next.json", {"groups": []})

    def broken() -> Any:
        raise RuntimeError("out of memory")

    instances = [INSTANCES[SMALL], BenchInstance("assignment/next", "", broken)]
    with pytest.raises(RuntimeError, match="out of memory"):
        record(found, instances, table, by=None, date="2026-01-01")
    entry = load_table(table)[SMALL]
    assert entry.sha256 == solution_hash(table / entry.solution)


def test_bounds_only_improve(tmp_path: Path) -> None:
    """They never exclude the best solution; a better solution removes a bound that it violates."""
    found, table = tmp_path / "found", tmp_path / "table"
    worse, better = sorted((_groups(seed) for seed in (0, 1)), key=_cost, reverse=True)

    def bound(value: float, groups: list[list[int]] = worse) -> RecordChange:
        raw = {"value": value, "recomputed": True, "basis": "b", "method": "ours"}
        asked = problem_hash(INSTANCES[SMALL].make())
        return _offer(found, table, {"groups": groups}, bound=raw, problem=asked)

    between = (_cost(worse) + _cost(better)) / 2
    assert bound(1.0).what == "new" and load_table(table)[SMALL].bound == 1.0
    assert bound(0.5).what == "no better" and load_table(table)[SMALL].bound == 1.0
    assert bound(between).what == "bound" and load_table(table)[SMALL].bound == between
    assert bound(2 * _cost(worse)).what == "no better"
    found_wrong = _offer(found, table, {"groups": better}, method="me")
    assert found_wrong.what == "better" and "report this" in found_wrong.words
    assert load_table(table)[SMALL].bound is None


def test_bounds_of_other_problems_are_ignored(tmp_path: Path) -> None:
    """A file's claim that its bound was recomputed is ignored."""
    found, table = tmp_path / "found", tmp_path / "table"
    raw = {"value": 1.0, "recomputed": True, "basis": "b", "method": "ours"}
    for said in ({}, {"problem": "0" * 16}):
        change = _offer(found, table, {"groups": _groups(0)}, bound=raw, **said)
        assert "bound not taken: its problem is" in change.words
        assert load_table(table)[SMALL].bound is None
    asked = problem_hash(INSTANCES[SMALL].make())
    assert _offer(found, table, {"groups": _groups(0)}, bound=raw, problem=asked).what == "bound"
    entry = load_table(table)[SMALL]
    assert entry.bound == 1.0 and not entry.bound_recomputed


def test_bound_recomputed_by_the_checker(tmp_path: Path) -> None:
    """Only as far as the checker proves it."""
    name = "rebalancing/peers40-4"
    problem = INSTANCES[name].make()
    proven = evaluate(ProblemFamily.REBALANCING, problem, {"moves": []})
    assert proven.bound is not None
    # a rate: the lower bound claims more
    between = (proven.objective + proven.bound.value) / 2
    for value, recomputed in ((proven.bound.value, True), (between, False)):
        wrapped = {
            "format": "planner.solution",
            "problem": problem_hash(problem),
            "bound": {"value": value, "recomputed": not recomputed, "basis": "", "method": "me"},
            "answer": {"moves": []},
        }
        write_solution(tmp_path / "found" / f"{name}.json", wrapped)
        options: dict[str, Any] = {"by": None, "date": "2026-01-01", "bounds": True}
        record(tmp_path / "found", [INSTANCES[name]], tmp_path / "table", **options)
        entry = load_table(tmp_path / "table")[name]
        assert (entry.bound, entry.bound_recomputed) == (value, recomputed)


def test_run_keeps_its_best(tmp_path: Path) -> None:
    """The best solution with the best bound, from any method; ``record`` accepts both."""
    kept = SolutionStore(tmp_path / "kept")
    for method, seed in (("random", 0), ("random", 1), ("ours", 0), ("random", 2)):
        kept.offer(run_task(Task(SMALL, method, seed, 0.05, 60.0)))
    again = SolutionStore(tmp_path / "kept")
    again.offer(run_task(Task(SMALL, "random", 3, 0.05, 60.0)))
    path = find_solution(tmp_path / "kept", SMALL)
    data = read_solution(path)
    assert data["method"] == data["bound"]["method"] == "ours"
    assert data["bound"]["value"] <= data["objective"] * (1 + ROUNDING)
    (change,) = record(
        tmp_path / "kept", [INSTANCES[SMALL]], tmp_path / "table", by=None, date="d", bounds=True
    )
    entry = load_table(tmp_path / "table")[SMALL]
    assert change.what == "new" and entry.bound == data["bound"]["value"]


def test_record_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per solution; exit code 1 if one was rejected."""
    found, table = tmp_path / "found", tmp_path / "table"
    write_solution(found / f"{SMALL}.json.gz", {"groups": _groups(0)})
    argv = [
        "--record",
        str(found),
        "--best-known",
        str(table),
        "--by",
        "somebody",
        "--only",
        "assignment/*",
    ]
    assert bench(argv) == 0
    assert capsys.readouterr().out.startswith(f"new       {SMALL}")
    assert load_table(table)[SMALL].method == "somebody"
    write_solution(found / f"{SMALL}.json.gz", {"groups": []})
    assert bench(argv) == 1
    with pytest.raises(ValueError, match="contains no solution of an instance"):
        bench(["--record", str(table)])
    with pytest.raises(ValueError, match="not a folder"):
        bench(["--record", str(tmp_path / "none")])
    (table / TABLE).write_text(json.dumps({"format": "else"}))
    with pytest.raises(ValueError, match="not a table of best known solutions"):
        load_table(table)
