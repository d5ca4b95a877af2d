"""The benchmark of whole plans: resumable, refusals in words, ratios as stated."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import planner as pl
from benchmarks import plans
from benchmarks.plans import NAMES, Baseline, Row, main, report, summary
from planner.bench.plan_instances import INSTANCES, PlanInstance
from planner.planning.baselines.rank_order import ranks_by_region
from planner.planning.request import PlanRequest
from planner.search.interrupts import INTERRUPTS

ROW = Row(
    "us",
    0,
    "effort 1",
    2.0,
    1.5,
    0.25,
    2.0,
    1.6,
    "4 x 4",
    3.0,
    {name: Baseline(None, "too little memory") for name in NAMES},
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> PlanInstance:
    """Four regions, a small model: a row takes a moment."""
    found = PlanInstance(
        "aws4_dtfm_regional_2022 x 1 A10, gpt2-tiny",
        lambda: pl.Cluster(pl.load_network("aws4_dtfm_regional_2022"), pl.Devices.of_gpu("A10")),
        "gpt2-tiny",
        {"batch_samples": 8, "sequence": 64},
    )
    monkeypatch.setattr(plans, "INSTANCES", {"us": found})
    return found


def test_instances_are_as_described() -> None:
    """Devices, regions, and who is mixed with whom."""
    clusters = {name: instance.cluster() for name, instance in INSTANCES.items()}
    for name, cluster in clusters.items():
        cluster.network.require_complete()
        INSTANCES[name].problem(PlanRequest(), 0)
    sizes = {name: (len(c), len(set(c.network.regions))) for name, c in clusters.items()}
    assert sizes["aws"] == (64, 8)
    assert sizes["gcp-t4"] == (24, 12) and sizes["gcp-v100"] == (48, 12)
    assert sizes["mixed"] == (24, 3) and sizes["skyplane"] == (57, 57)
    mixed = clusters["mixed"]
    assert mixed.flops[0] > mixed.flops[8] > mixed.flops[16]
    assert mixed.network.latency_s[0, 1] == 0.005
    assert mixed.network.bandwidth_bytes_per_s[0, 1] == 2.5e8


def test_rows_are_kept(
    tiny: PlanInstance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run takes finished rows from the file, and adds what is missing."""
    results, out = tmp_path / "rows.jsonl", tmp_path / "report.md"
    argv = ["--effort", "0.1", "--rule-effort", "0.1", "--results", str(results), "--out", str(out)]
    argv += ["--fields", '{"stages": 2}']
    assert main(argv) == 0
    (line,) = results.read_text().splitlines()
    row = Row.from_dict(json.loads(line))
    ranks = ranks_by_region(tiny.problem(PlanRequest(), 0))
    assert ranks.pipeline is not None and ranks.data is not None
    assert row.baselines[NAMES[0]].step_s == ranks.pipeline.step_s
    assert row.baselines[NAMES[1]].step_s == ranks.data.step_s
    assert row.step_s is not None and row.bound_s is not None and row.bound_s <= row.step_s
    assert row.about.startswith("2 x 2")
    assert row.settled_s is not None and row.long_run_gap is None  # not of plans that fix stages
    marked = replace(row, step_s=123.456)
    results.write_text(json.dumps({**json.loads(line), "step_s": marked.step_s}) + "\n")
    assert main([*argv, "--seeds", "0", "1"]) == 0
    text = out.read_text()
    assert "| us | 0 | 123.456 |" in text and "| us | 1 |" in text
    assert 'effort 0.1, {"stages": 2}' in text
    assert len(results.read_text().splitlines()) == 2
    # nobody's seed but DT-FM's
    other = Row.from_dict(json.loads(results.read_text().splitlines()[1]))
    assert all(other.baselines[name] == row.baselines[name] for name in NAMES[:3])
    capsys.readouterr()


def test_a_search_cut_short_is_no_row(
    tiny: PlanInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not kept, so that the next run does it whole; rows before it are."""
    results, out = tmp_path / "rows.jsonl", tmp_path / "report.md"
    results.write_text(json.dumps(asdict(replace(ROW, asked="effort 0.1, nothing fixed"))) + "\n")
    kept = results.read_text()
    monkeypatch.setattr(INTERRUPTS, "number", signal.SIGTERM)
    argv = ["--effort", "0.1", "--rule-effort", "0.1", "--results", str(results), "--out", str(out)]
    assert main([*argv, "--seeds", "0", "1"]) == 0
    assert results.read_text() == kept and out.read_text().count("| us |") == 2
    with pytest.raises(KeyboardInterrupt):
        main([*argv, "--seeds", "1"])


def test_many_steps_stand_beside_what_none_beat(tiny: PlanInstance) -> None:
    """The plan's own mean is above what is proved of one step and of many."""
    row = plans.measure("us", PlanRequest(), pl.Effort(0.2), 0, "nothing fixed", {})
    assert row.bound_s is not None and row.long_run_s is not None and row.settled_s is not None
    assert max(row.bound_s, row.long_run_s) <= row.settled_s * (1 + 1e-9)
    assert row.long_run_gap == 1 - row.long_run_s / row.settled_s


def test_a_request_that_is_refused_is_a_row(tiny: PlanInstance) -> None:
    """The reason stands where the plan would; the baselines are there all the same."""
    request = PlanRequest(stages=3)
    problem = tiny.problem(request, 0)
    row = plans.measure("us", request, pl.Effort(0.1), 0, "stages 3", plans.seedless(problem))
    assert row.step_s is None and row.ratio is None
    assert "4 devices cannot be divided into 3 equal stages" in row.about
    assert row.best_baseline_s is not None
    whole = replace(row, baselines=row.baselines | plans.seeded(problem, 0.1))
    assert "No instance has both" in report([whole], "0.0")


def test_ratio_is_to_the_best_that_fits() -> None:
    """Below 1: the plan is faster; the summary names the worst."""
    assert ROW.best_baseline_s is None and ROW.ratio is None
    steps = dict(zip(NAMES, (4.0, None, 1.0, 8.0, 8.0, 8.0, 8.0), strict=True))
    slow = replace(ROW, baselines={name: Baseline(s, "") for name, s in steps.items()})
    assert slow.ratio == 2.0
    fast = replace(slow, seed=1, step_s=0.5)
    (line,) = summary([slow, fast, ROW])
    assert "1.000 in the geometric mean of 2" in line
    assert "at most 2.000 (us, seed 0); the plan is slower than a baseline in 1" in line
