"""Open benchmark: fixed instances, evaluated solutions, stored rows and user methods."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.bench import registry
from planner.bench import task as bench_task
from planner.bench.evaluation import evaluate
from planner.bench.job_generator import random_job
from planner.bench.method import BenchMethod, MethodKind
from planner.bench.network_generator import random_network
from planner.bench.page import page
from planner.bench.problem import BenchInstance, ProblemFamily
from planner.bench.problem_files import instance_data, problem_hash, problem_of
from planner.bench.registry import INSTANCES, METHODS, instances_of
from planner.bench.result_rows import BenchRow, append_row, read_rows
from planner.bench.runner import next_task
from planner.bench.solution_files import AnswerError, answer_data, answer_of
from planner.bench.summary import profile, summarise
from planner.bench.task import Task
from planner.bench.text import markdown, terminal
from planner.cli.main import main as planner_main
from tests.bench.run_bench import bench

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "open-benchmark.md"
SMALL = "assignment/gcp12-unequal"
WAVE = "paths/gcp12-3x4-skip"
PEERS = "rebalancing/peers40-4"
TABLE_1 = "averaging/table1d"
PLAN = "plans/aws4-gpt2-2"


def test_fifty_instances_in_five_families() -> None:
    """Each family has methods, and small instances for --quick."""
    assert len(INSTANCES) >= 50
    for family in ProblemFamily:
        mine = [one for one in INSTANCES.values() if one.family is family]
        assert len(mine) >= 8 and any(one.quick for one in mine)
        names = [m.name for m in METHODS if family in m.families]
        assert len(set(names)) == len(names) >= 4 and "ours" in names


def test_files_hold_the_exact_problems() -> None:
    """They have the same hash after reading; all instances differ."""
    hashes = set()
    for one in INSTANCES.values():
        data = json.loads(json.dumps(instance_data(one), allow_nan=False))
        assert data["hash"] == problem_hash(problem_of(data)), one.id
        hashes.add(data["hash"])
    assert len(hashes) == len(INSTANCES)


def test_instances_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``planner paths`` reads the path instances."""
    assert bench(["--instances", str(tmp_path), "--only", WAVE, SMALL]) == 0
    assert sorted(p.name for p in tmp_path.rglob("*.json")) == [
        "gcp12-3x4-skip.json",
        "gcp12-unequal.json",
    ]
    capsys.readouterr()
    found = planner_main(
        ["paths", str(tmp_path / f"{WAVE}.json"), "--method", "dtfm-skip", "--json"]
    )
    assert found == 0 and json.loads(capsys.readouterr().out)["objective"] > 0


def test_random_jobs_are_reproducible() -> None:
    """Pinned values for independent implementations of the description; they differ and fit."""
    jobs = [random_job(number) for number in range(4)]
    network, devices = jobs[2].cluster.network, jobs[2].cluster.devices
    assert jobs[2].about.startswith("random_job(2): 30 GPUs in 22 machines, 22 places (homes), 1B")
    assert network.latency_s[0, -1] == 0.010199
    assert devices.sites is not None and len(set(devices.sites)) == 22
    for job in jobs:
        state = job.workload.parameters * 18.0
        assert state <= float(job.cluster.memory_bytes.sum()) / 3


def test_generator_is_reproducible() -> None:
    """Pinned values for independent implementations of the description."""
    found = random_network(3, 6, 0)
    assert found.regions == ("r0", "r0", "r1", "r1", "r2", "r2")
    assert found.latency_s[0, 1] == 0.25e-3 and found.bandwidth_bytes_per_s[0, 1] == 1.25e9
    rng = np.random.default_rng([3, 6, 0])
    x, y = (rng.random((3, 2)) * np.array([20_000.0, 8_000.0])).T
    lines = np.array([1, 2.5, 5, 10])[rng.integers(4, size=3)] * 1e9 / 8
    share = 0.6 + 0.4 * rng.random((3, 3))
    latency = round(1e-3 + 1.5 * float(np.hypot(x[0] - x[2], y[0] - y[2])) / 200_000, 6)
    assert found.latency_s[0, 5] == latency
    rate = min(lines[0], lines[2]) * share[0, 2] / (1 + latency / 0.025)
    assert found.bandwidth_bytes_per_s[0, 5] == round(rate)
    with pytest.raises(ValueError, match="5 devices in 6 regions"):
        random_network(6, 5, 0)


def _answer(instance: str, method: str = "ours") -> tuple[Any, Any]:
    one = INSTANCES[instance]
    problem = one.make()
    run = next(m.run for m in METHODS if m.name == method and one.family in m.families)
    return problem, evaluate(one.family, problem, run(problem, 0, 0.2)).plan


@pytest.fixture(scope="module")
def answered() -> dict[str, tuple[Any, Any]]:
    """A valid answer of every family."""
    rules = {
        SMALL: "random",
        WAVE: "DT-FM, skipping",
        PEERS: "SWARM, T = 300",
        TABLE_1: "all-reduce",
        PLAN: "ranks, a stage near",
    }
    return {instance: _answer(instance, method) for instance, method in rules.items()}


def test_solutions_survive_their_files(answered: dict[str, tuple[Any, Any]]) -> None:
    """The objective is the same from the JSON form."""
    for instance, (problem, plan) in answered.items():
        family = INSTANCES[instance].family
        data = json.loads(json.dumps(answer_data(plan), allow_nan=False))
        one, two = (evaluate(family, problem, x).objective for x in (plan, data))
        assert one == pytest.approx(two, rel=1e-12), instance
        assert answer_data(answer_of(family, problem, data)) == data


def _broken(instance: str, data: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Answers that break a rule, with what is said."""
    if instance == SMALL:
        groups = data["groups"]
        return [
            ({"groups": groups[:-1]}, "stage sizes must be"),
            (
                {"groups": [groups[0], groups[1], groups[2], [groups[0][0], 99]]},
                "exactly one group",
            ),
            ({"groups": [["a"]]}, "groups"),
            ({}, "'groups' is missing"),
        ]
    if instance == WAVE:
        faster = [[b, d, k, s / 2, e / 2] for b, d, k, s, e in data["ops"]]
        return [
            ({**data, "ops": faster}, "at"),
            ({**data, "paths": [path[:-1] for path in data["paths"]]}, "at"),
            ({**data, "ops": [[1]]}, "values to unpack"),
        ]
    if instance == PEERS:
        return [
            ({"moves": [[0.0, 0, 1, 0, 1000]]}, "peers at moves"),
            ({"moves": [[0.0, 0, 1, 0]]}, "argument"),
        ]
    if instance == TABLE_1:
        double = [2 * rate for rate in data["rates_bytes_per_s"]]
        return [
            ({**data, "rates_bytes_per_s": double}, "upload"),
            ({**data, "computes": [True]}, "must have 17 entries"),
        ]
    return [({**data, "content_hash": "0" * 64}, "content_hash"), ({"format": "x"}, "format")]


def test_invalid_solutions_are_rejected(answered: dict[str, tuple[Any, Any]]) -> None:
    """In one line, for every family."""
    for instance, (problem, plan) in answered.items():
        family = INSTANCES[instance].family
        for data, words in _broken(instance, answer_data(plan)):
            with pytest.raises(AnswerError, match=re.escape(words)) as caught:
                evaluate(family, problem, data)
            assert "\n" not in str(caught.value)
        for other in (None, 5, [1], object()):
            with pytest.raises(AnswerError, match="found"):
                evaluate(family, problem, other)


def test_non_finite_numbers_are_rejected(answered: dict[str, tuple[Any, Any]]) -> None:
    """As numbers and as text, in every family and position."""
    for instance, (problem, plan) in answered.items():
        family = INSTANCES[instance].family
        text = json.dumps(answer_data(plan))
        for odd in (math.nan, math.inf, -math.inf):
            data = {**json.loads(text), "more": {"of": [odd]}}
            with pytest.raises(AnswerError, match=rf"answer\.more\.of\[0\] is {odd}; numbers must"):
                evaluate(family, problem, data)
    problem, plan = answered[WAVE]
    data = answer_data(plan)
    for text_or_nan in ("nan", "inf", math.nan):
        ops = [data["ops"][0], *([*op[:4], text_or_nan] for op in data["ops"][1:])]
        with pytest.raises(AnswerError, match="finite"):
            evaluate(ProblemFamily.PATHS, problem, {**data, "ops": ops})
    for text_or_nan in ("nan", "-inf", math.nan):
        with pytest.raises(AnswerError, match="finite"):
            moves = {"moves": [[text_or_nan, 0, 1, 0, 1]]}
            evaluate(ProblemFamily.REBALANCING, answered[PEERS][0], moves)
    (flags, rates) = answer_data(answered[TABLE_1][1]).values()
    for computes in ([math.nan, *flags[1:]], [*flags[:-1], math.inf]):
        with pytest.raises(AnswerError, match=r"answer\.computes"):
            evaluate(
                ProblemFamily.AVERAGING,
                answered[TABLE_1][0],
                {"computes": computes, "rates_bytes_per_s": rates},
            )


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in nested lists and objects."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield (*at, key)
        if isinstance(one, (dict, list)):
            yield from _places(one, (*at, key))


def test_damaged_solutions_gain_nothing(answered: dict[str, tuple[Any, Any]]) -> None:
    """One changed entry: rejected in one line, or no better than before."""
    rng = random.Random(0)
    odd = [None, -1, 0, 1.5, 1e308, math.nan, math.inf, 10**400, "x", [], {}, [[]], True]
    for instance, (problem, plan) in answered.items():
        family = INSTANCES[instance].family
        text = json.dumps(answer_data(plan))
        before = evaluate(family, problem, json.loads(text)).objective
        places = list(_places(json.loads(text)))
        refused = 0
        for _ in range(40):
            data = json.loads(text)
            *way, last = rng.choice(places)
            inner = data
            for key in way:
                inner = inner[key]
            inner[last] = rng.choice(odd)
            try:
                assert not family.better(evaluate(family, problem, data).objective, before)
            except AnswerError as error:
                refused += 1
                assert "\n" not in str(error) and "cannot be checked" not in str(error)
        assert refused > 20


def test_plans_that_change_training_are_rejected(answered: dict[str, tuple[Any, Any]]) -> None:
    """The checker alone would accept these plans."""
    problem, plan = answered[PLAN]
    larger = replace(problem, workload=problem.workload.replace(batch_samples=64))
    with pytest.raises(AnswerError, match="only microbatch_samples may differ"):
        evaluate(ProblemFamily.PLANS, larger, plan)
    rare = pl.plan(
        problem.cluster, problem.workload, stop=pl.MaxIterations(1), stages=2, sync_every=4
    )
    assert pl.check(rare.plan, problem.cluster) == []
    with pytest.raises(AnswerError, match="question at"):
        evaluate(ProblemFamily.PLANS, problem, rare)
    first = pl.plan(
        problem.cluster, problem.workload, stop=pl.MaxIterations(1), stages=2, head="first"
    )
    with pytest.raises(AnswerError, match="is on the last stage"):
        evaluate(ProblemFamily.PLANS, problem, first)


def _row(method: str, objective: float | None, seed: int = 0, **changes: Any) -> BenchRow:
    row = BenchRow(
        SMALL, "p", method, "ours", seed, 1.0, objective is not None,
        "" if objective is not None else "it broke", objective, None, False, "", 1.0,
    )  # fmt: skip
    return replace(row, **changes)


def test_wins_compare_methods_not_seeds() -> None:
    """Each method counts with its best seed."""
    rows = [_row("ours", 1.9), _row("ours", 1.8, 1), _row("other", 1.9), _row("other", 2.5, 1)]
    wins = {s.method: s.wins for s in summarise(rows, {}).families[ProblemFamily.ASSIGNMENT]}
    assert wins == {"ours": 1, "other": 0}
    rows.append(_row("other", 1.85, 2))
    wins = {s.method: s.wins for s in summarise(rows, {}).families[ProblemFamily.ASSIGNMENT]}
    assert wins == {"ours": 0, "other": 0}


def test_summary_by_hand() -> None:
    """Gaps are means over seeds; a win needs every seed; failed runs have no gap."""
    rows = [
        _row("ours", 2.0, bound=1.6, bound_recomputed=True),
        _row("ours", 2.0, 1, seconds=3.0),
        _row("lucky", 2.0, seconds=8.0),
        _row("lucky", 3.0, 1, seconds=8.0),
        _row("none", None),
    ]
    summary = summarise(rows, {})
    ours, lucky, none = summary.families[ProblemFamily.ASSIGNMENT]
    assert (ours.method, ours.wins, ours.gaps[SMALL]) == ("ours", 1, 0.0)
    assert ours.bound_gaps[SMALL] == pytest.approx(0.25) and summary.known[
        SMALL
    ].gap == pytest.approx(0.25)
    assert (lucky.method, lucky.wins) == ("lucky", 0)
    assert lucky.gaps[SMALL] == pytest.approx(0.25)
    assert lucky.over_ours == 4.0
    assert (none.asked, none.solved, none.gaps) == (1, 0, {})
    assert profile(lucky) == [(lucky.gaps[SMALL], 1.0)] and profile(none) == []
    rate = [replace(row, instance=TABLE_1) for row in rows]
    faster, slower, _ = summarise(rate, {}).families[ProblemFamily.AVERAGING]
    # of rates the larger is the better
    assert (faster.method, slower.method) == ("lucky", "ours")
    assert slower.gaps[TABLE_1] == pytest.approx(0.5)


@pytest.mark.parametrize("instance", [SMALL, TABLE_1])
def test_solution_beyond_a_bound_is_reported(instance: str) -> None:
    """It is not proven optimal: no gap, and a line in all outputs."""
    of_time = instance == SMALL
    bound, beyond = (1.0, 0.5) if of_time else (1.0, 2.0)
    rows = [
        _row("ours", 1.0, instance=instance, bound=bound, bound_recomputed=True),
        _row("other", beyond, instance=instance),
    ]
    sound, summary = summarise(rows[:1], {}), summarise(rows, {})
    assert sound.known[instance].gap == 0.0 and summary.known[instance].gap is None
    (standings,) = summary.families.values()
    assert all(s.bound_gaps == {} for s in standings)
    told = f"WRONG: {instance}: {beyond:g} "
    for show in (
        terminal,
        lambda one: markdown(one, "title", ["made"]),
        lambda one: page(one, "title", ["made"]),
    ):
        assert told in show(summary) and "bound or the answer is wrong" in show(summary)
        assert "WRONG" not in show(sound)
    optimal = "<dt>proven optimal</dt><dd>{}</dd>"
    assert optimal.format(1) in page(sound, "t", []) and optimal.format(0) in page(summary, "t", [])
    # what rounding may do is no contradiction
    near = summarise([rows[0], _row("other", 1.0 - 1e-9, instance=instance)], {})
    assert near.known[instance].gap == pytest.approx(0.0, abs=1e-8)


def test_page_is_escaped_and_complete() -> None:
    """Names are escaped, nothing is loaded, and every table can be sorted."""
    evil = '<script>alert("x")</script>'
    rows = [_row("ours", 2.0, bound=1.0), _row(evil, None, reason=evil)]
    summary = summarise(rows, {})
    html = page(summary, f"title {evil}", [f"made `{evil}`"])
    assert evil not in html and "&lt;script&gt;alert(" in html
    assert not re.search(r"(src|href)\s*=|url\(|https?://", html)
    assert html.count("<table") == html.count('class="sortable"') >= 4
    assert "prefers-color-scheme: dark" in html and "<svg" in html
    text, report = terminal(summary), markdown(summary, "title", ["made"])
    assert (
        "1 of 2 rows refused" in text
        and "## Refused" in report
        and "| ours | ours | 1/1 |" in report
    )


def test_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cut line is left out; what is there is not run again; other problems' rows are not used."""
    ran: list[int] = []

    def counted(problem: Any, seed: int, effort: float) -> Any:
        ran.append(seed)
        return {"groups": [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]}

    method = BenchMethod.for_family(
        ProblemFamily.ASSIGNMENT, "counted", counted, MethodKind.RULE, "", seeded=True
    )
    monkeypatch.setattr("planner.cli.bench_command.METHODS", (method,))
    monkeypatch.setattr(bench_task, "METHODS", (method,))
    monkeypatch.setattr(bench_task, "_warm_up", lambda family: None)
    rows = tmp_path / "out.rows.jsonl"
    argv = ["--only", SMALL, "--jobs", "1", "--json", str(tmp_path / "out.json")]
    assert bench([*argv, "--seeds", "0", "1"]) == 0
    assert ran == [0, 1]
    first = read_rows(rows)
    rows.write_text(rows.read_text() + '{"instance": "cut')
    append = replace(first[0], problem="another", seed=2)
    assert bench([*argv, "--seeds", "0", "1", "2", "--resume"]) == 0
    assert ran == [0, 1, 2]
    append_row(rows, append)
    append_row(rows, replace(append, seed=3))
    assert bench([*argv, "--seeds", "0", "1", "2", "3", "--resume"]) == 0
    assert ran == [0, 1, 2, 3]
    # a call for other instances, methods or seeds takes no row out of the file
    others = BenchRow(TABLE_1, "p", "m", "other", 0, 1.0, True, "", 1.0, None, False, "", 1.0)
    append_row(rows, others)
    before = read_rows(rows)
    assert bench([*argv, "--seeds", "0", "--resume"]) == 0
    assert read_rows(rows) == before and len(before) == 7
    data = json.loads((tmp_path / "out.json").read_text())
    assert [row["seed"] for row in data["rows"]] == [0]
    assert bench([*argv, "--seeds", "0", "1", "2", "--resume"]) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert [row["seed"] for row in data["rows"]] == [0, 1, 2]
    assert bench([*argv, "--seeds", "0"]) == 0
    assert (tmp_path / "out.rows.jsonl~").exists() and len(read_rows(rows)) == 1
    rows.write_text("nonsense\n" + rows.read_text())
    with pytest.raises(ValueError, match="line 1 is not a row"):
        bench([*argv, "--resume"])
    capsys.readouterr()


def test_processes_start_with_different_families() -> None:
    """Each family is compiled by one process; at the end, all work on the rest."""
    tasks = [Task(name, "ours", 0, 1.0, 60.0) for name in (PLAN, PLAN, WAVE, PEERS)]
    assert next_task(tasks, []) is tasks[0]
    assert next_task(tasks[1:], tasks[:1]).instance == WAVE
    assert next_task(tasks[1:], [tasks[0], tasks[2]]).instance == PEERS
    assert next_task(tasks[1:2], tasks[:1]) is tasks[1]


def test_ctrl_c_keeps_finished_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A method that answers Ctrl-C with its best so far gives no row, and --resume runs it."""
    begun: list[int] = []

    def slow(problem: Any, seed: int, effort: float) -> Any:
        begun.append(seed)
        if begun == [0, 1]:
            try:
                os.kill(os.getpid(), 2)
                time.sleep(5)
            except KeyboardInterrupt:
                pass
        return {"groups": [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]}

    method = BenchMethod.for_family(
        ProblemFamily.ASSIGNMENT, "slow", slow, MethodKind.RULE, "", seeded=True
    )
    monkeypatch.setattr("planner.cli.bench_command.METHODS", (method,))
    monkeypatch.setattr(bench_task, "METHODS", (method,))
    monkeypatch.setattr(bench_task, "_warm_up", lambda family: None)
    rows = tmp_path / "rows.jsonl"
    argv = ["--only", SMALL, "--jobs", "1", "--rows", str(rows), "--seeds", "0", "1", "2"]
    assert bench(argv) == 130
    assert [row.seed for row in read_rows(rows)] == [0]
    assert "--resume continues" in capsys.readouterr().err
    assert bench([*argv, "--resume"]) == 0
    assert begun == [0, 1, 1, 2] and len(read_rows(rows)) == 3


STRANGER = """
import os
import time


def raises(problem, seed, effort):
    raise KeyError("no idea")


def dies(problem, seed, effort):
    os._exit(3)


def sleeps(problem, seed, effort):
    time.sleep(60)


def exits(problem, seed, effort):
    raise SystemExit("no licence")


def lies(problem, seed, effort):
    return {"groups": [[0, 1, 2, 3]] * 4}


for function in (raises, dies, sleeps, lies, exits):
    function.families = ("assignment",)
"""


def test_errors_of_user_methods_become_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One raises, one answers nonsense, one never ends, one kills its process, one exits."""
    (tmp_path / "odd_strangers.py").write_text(STRANGER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("raises", "dies", "sleeps", "lies", "exits")
    methods = [w for name in names for w in ("--method", f"odd_strangers:{name}")]
    rows = tmp_path / "rows.jsonl"
    argv = ["--only", SMALL, "--methods", "random", "--seeds", "0", "--seconds", "0.5"]
    assert bench([*argv, *methods, "--jobs", "2", "--rows", str(rows)]) == 0
    reasons = {row.method.rpartition(":")[2]: row.reason for row in read_rows(rows)}
    assert reasons["random"] == ""
    assert reasons["raises"] == "KeyError: 'no idea'"
    assert reasons["exits"] == "SystemExit: no licence"
    assert reasons["sleeps"] == "cut off after 0.5 s"
    assert reasons["dies"].startswith("its process died")
    assert "exactly one group" in reasons["lies"] or "stage sizes" in reasons["lies"]
    capsys.readouterr()


def test_groups_are_a_complete_answer() -> None:
    """As a plan without a grid or as JSON: which devices are matched is no decision."""
    problem = INSTANCES["assignment/dtfm1-8x8"].make()
    groups = np.random.default_rng(0).permutation(64).reshape(8, 8).tolist()
    values = [
        evaluate(ProblemFamily.ASSIGNMENT, problem, answer).objective
        for answer in (pl.AssignmentPlan.of_groups(groups), {"groups": groups})
    ]
    assert values == pytest.approx([problem.cost(groups)] * 2, rel=1e-12)


def test_example_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs as it stands there, and the checker takes its answers."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "nearest_first.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench_task, "_warm_up", lambda family: None)
    rows = tmp_path / "rows.jsonl"
    argv = ["--quick", "--only", "assignment/*", "--methods", "random", "--jobs", "1"]
    assert bench([*argv, "--method", "nearest_first:nearest_first", "--rows", str(rows)]) == 0
    found = [row for row in read_rows(rows) if row.method == "nearest_first:nearest_first"]
    assert len(found) == 3 and all(row.accepted and row.kind == "other" for row in found)
    capsys.readouterr()


def test_solution_files_of_users(
    tmp_path: Path,
    answered: dict[str, tuple[Any, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bare answers are enough, packed or not; what is broken is a row with its reason."""
    folder = tmp_path / "mine"
    for instance, (_, plan) in answered.items():
        path = folder / f"{instance}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answer_data(plan)))
    wrong = folder / "assignment" / "dtfm1-8x8.json.gz"
    wrong.write_bytes(gzip.compress(b'{"groups": [[0]]}'))
    (folder / "assignment" / "dtfm2-8x8.json").write_text("no JSON")
    (folder / "assignment" / "dtfm4-8x8.json.gz").write_bytes(b"no gzip")
    rows = tmp_path / "rows.jsonl"
    argv = ["--methods", "", "--solutions", str(folder), "--jobs", "1", "--rows", str(rows)]
    assert bench(argv) == 0
    found = {row.instance: row for row in read_rows(rows)}
    assert len(found) == 8
    for instance, (problem, plan) in answered.items():
        row = found[instance]
        assert row.accepted and row.method == "mine (files)", row
        assert row.objective == evaluate(INSTANCES[instance].family, problem, plan).objective
    reasons = [found[f"assignment/dtfm{k}-8x8"].reason for k in (1, 2, 4)]
    for reason, words in zip(
        reasons, ("stage sizes", "is not JSON", "cannot be read"), strict=True
    ):
        assert words in reason
    capsys.readouterr()


def test_solution_folders_need_unique_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of two folders are told apart, and those of the folder one is in have its name."""
    for folder in ("one/mine", "two/mine"):
        path = tmp_path / folder / f"{SMALL}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"groups": [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]}))
    argv = ["--methods", "", "--only", SMALL, "--jobs", "1", "--solutions"]
    both = [*argv, str(tmp_path / "one/mine"), "--solutions", str(tmp_path / "two/mine")]
    with pytest.raises(ValueError, match="has the name 'mine' too; rename"):
        bench(both)
    with pytest.raises(ValueError, match="the folder needs a name"):
        bench([*argv, "/"])
    monkeypatch.chdir(tmp_path / "one/mine")
    assert bench([*argv, ".", "--rows", str(tmp_path / "rows.jsonl")]) == 0
    assert [row.method for row in read_rows(tmp_path / "rows.jsonl")] == ["mine (files)"]
    capsys.readouterr()


def test_methods_cannot_modify_the_evaluated_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get their own copy."""
    groups = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]

    def cheats(problem: Any, seed: int, effort: float) -> Any:
        for name in ("activation_bytes", "gradient_bytes"):
            object.__setattr__(problem, name, tuple(1.0 for _ in getattr(problem, name)))
        return {"groups": groups}

    method = BenchMethod.for_family(
        ProblemFamily.ASSIGNMENT, "cheats", cheats, MethodKind.OTHER, ""
    )
    monkeypatch.setattr(bench_task, "METHODS", (method,))
    monkeypatch.setattr(bench_task, "_warm_up", lambda family: None)
    row = bench_task.run_task(Task(SMALL, "cheats", 0, 1.0, 60.0)).row
    problem = INSTANCES[SMALL].make()
    assert row.problem == problem_hash(problem)
    assert (
        row.objective == evaluate(ProblemFamily.ASSIGNMENT, problem, {"groups": groups}).objective
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--only", "nothing/*"], "no instance id of the instances matches"),
        (["--methods", "magic"], "unknown method 'magic'"),
        (["--method", "planner"], "must be package.module:function"),
        (["--method", "planner.nowhere:solve"], "No module named"),
        (["--method", "planner.search.stop:MIN_S"], "has no function MIN_S"),
        (["--effort", "-1"], "--effort must be above 0"),
        (["--effort", "0"], "--effort must be above 0"),
        (["--effort", "nan"], "--effort must be above 0"),
        (["--seconds", "-1"], "--seconds must be above 0"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--seconds", "nan"], "--seconds must be above 0"),
        (["--solutions", "/nowhere"], "not a folder"),
        (["--html", "/nowhere/x.html"], "does not exist"),
        (["--html", "x.txt"], "must end in .html"),
        (["--methods", ""], "no selected method solves the selected instances"),
    ],
)
def test_invalid_options(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    assert planner_main(["bench", *argv]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_methods_do_not_get_the_instance_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the problem only."""
    seen: list[Any] = []

    def looks(problem: Any, seed: int, effort: float) -> Any:
        seen.append(problem)
        return {"groups": []}

    method = BenchMethod.for_family(ProblemFamily.ASSIGNMENT, "looks", looks, MethodKind.RULE, "")
    monkeypatch.setattr(bench_task, "METHODS", (method,))
    monkeypatch.setattr(bench_task, "_warm_up", lambda family: None)
    renamed = BenchInstance("assignment/other-name", "", INSTANCES[SMALL].make)
    monkeypatch.setitem(registry.INSTANCES, renamed.id, renamed)
    rows = [bench_task.run_task(Task(i, "looks", 0, 1.0, 9.0)).row for i in (SMALL, renamed.id)]
    assert rows[0].problem == rows[1].problem and rows[0].reason == rows[1].reason != ""
    assert problem_hash(seen[0]) == problem_hash(seen[1])
    assert [one.id for one in instances_of([SMALL])] == [SMALL]
