"""The GPU check runs without a GPU, on its tiny plans, and its plan files are valid."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.training_plan.file import load_plan

pytest.importorskip("torch")

GPU_CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check"
PLANS = sorted((GPU_CHECK / "plans").rglob("*.json"))
COMPILES = pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a compiler")

CHECKS = ("env", "tests", "equal", "race", "checkpoint", "shards", "train", "kill", "cli")
EAGER = ("memory", "mfu", "mfu_llama", "overhead", "share")
COMPILED = (
    *("memory_compiled", "mfu_compiled", "mfu_llama_compiled"),
    *("overhead_compiled", "speed", "speed_llama"),
)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_plan_files_pass_the_checker(path: Path) -> None:
    """All plan files load, and the checker finds no violation."""
    plan = load_plan(path)
    assert pl.check(plan) == []
    assert plan.workload.architecture is not None


def test_every_section_is_tested() -> None:
    """The sections below are those of the script."""
    done = subprocess.run(
        [sys.executable, str(GPU_CHECK / "runner.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    listed = done.stdout.split("sections:")[1].replace("\n", " ").split(",")
    assert sorted(name.strip() for name in listed) == sorted((*CHECKS, *EAGER, *COMPILED))


def run_sections(names: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Run sections on the CPU; return their results."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *("bash", str(GPU_CHECK / "gpu_check.sh"), "--device", "cpu", "--out", str(out)),
            *("--only", ",".join(names), "--stretch", "6", "--budget", "900", "--at-once", "2"),
        ],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert sorted(results) == sorted(names)
    summary = (out / "summary.txt").read_text()
    for name, result in results.items():
        assert result["ok"] and result["section_s"] > 0, name
        assert f"\n{name} " in summary
    assert "not started" not in summary
    for name in ("log.txt", "details.tar.gz"):
        assert (out / name).stat().st_size > 0
    return results


def assert_trained(result: dict[str, Any], steps: int) -> None:
    """A throughput section reports a positive time and finite losses that fall."""
    assert result["step_s"] > 0 and result["tokens_per_s"] > 0
    assert len(result["losses"]) == steps and all(map(math.isfinite, result["losses"]))
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_checks_on_the_cpu(tmp_path: Path) -> None:
    """Sections that compare results pass, and say what they compared."""
    results = run_sections(CHECKS, tmp_path)
    assert results["env"]["torch"] and results["tests"]["code"] == 0
    assert len(results["equal"]["rows"]) == 10 and len(results["race"]["rows"]) == 3
    for row in results["race"]["rows"].values():
        assert row["waiting_twice_same_bits"]
        assert sum(same is True for key, same in row.items() if key.startswith("late_")) == 4
    assert results["checkpoint"]["resumed_off"] <= 1e-6
    assert results["shards"]["off"] <= 1e-6
    assert results["train"]["last"] < results["train"]["first"]
    ends, elastic = (results["kill"]["rows"][name] for name in ("ends", "elastic"))
    assert ends["code"] != 0 and ends["ended_s_after_kill"] < 15
    assert elastic["code"] == 0 and elastic["steps"] == 600
    assert [change["event"] for change in elastic["changes"]][:1] == ["lost"]
    assert results["cli"]["planner_run"] == results["cli"]["node"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_measurements_on_the_cpu(tmp_path: Path) -> None:
    """Sections that measure times and memory give plausible figures."""
    results = run_sections(EAGER, tmp_path)
    assert_trained(results["mfu"], 8)
    assert_trained(results["mfu_llama"], 7)
    assert len(results["memory"]["rows"]) == 42
    assert 0 < results["memory"]["least"] <= results["memory"]["most"] <= 1
    for row in results["overhead"]["rows"].values():
        assert row["ratio"] > 0 and row["losses_off"] < 1e-4
    assert len(results["share"]["rows"]) == 4
    for row in results["share"]["rows"].values():
        assert row["measured_s"] > 0 and row["predicted_s"] > 0 and len(row["memory"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(1000)
@COMPILES
def test_compiled_measurements_on_the_cpu(tmp_path: Path) -> None:
    """Sections with compiled layers and head do too."""
    results = run_sections(COMPILED, tmp_path)
    assert_trained(results["mfu_compiled"], 10)
    assert_trained(results["mfu_llama_compiled"], 10)
    assert 0 < results["memory_compiled"]["most"] <= 1
    for row in results["overhead_compiled"]["rows"].values():
        assert row["ratio"] > 0 and row["losses_off"] < 1e-4
    for name in ("speed", "speed_llama"):
        rows = results[name]["rows"]
        assert sorted(rows) == ["compiled", "eager"]
        assert rows["compiled"]["loss"] == pytest.approx(rows["eager"]["loss"], rel=1e-2)
