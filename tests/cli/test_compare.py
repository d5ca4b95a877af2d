"""``planner compare``, end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.training_plan.file import save_plan
from planner.workload.precision import Precision
from tests.conftest import make_plan, tiny_workload


def test_differences_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two plans that differ in one decision; a plan does not differ from itself."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    plan = make_plan([[0, 1], [2, 3]])
    save_plan(plan, a)
    save_plan(plan.replace(clip=1.0), b)
    assert main(["compare", str(a), str(b), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows if not row["same"]] == ["clip", "hash"]
    assert [row["what"] for row in rows[:2]] == ["clip", "hash"]
    assert main(["compare", str(a), str(a)]) == 0
    out = capsys.readouterr().out
    assert (
        "*" not in out and f"{plan.predicted.step_s:.4g} s " in out and "free_memory_bytes" in out
    )
    assert main(["compare", str(a), str(tmp_path / "none.json")]) == 2


def test_fp16_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a decision that the plans do not share."""
    files = [tmp_path / f"{name}.json" for name in ("fp16", "bf16")]
    for path in files:
        workload = tiny_workload().replace(precision=Precision.parse(path.stem))
        save_plan(make_plan([[0, 1], [2, 3]], workload=workload), path)
    assert main(["compare", *map(str, files), "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["precision"]["a"], rows["precision"]["b"]) == ("fp16", "bf16")


def test_zero_step_time(tmp_path: Path) -> None:
    """Predicted times are not part of the hash, so a file may contain any value."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload())
    save_plan(plan, a)
    save_plan(plan.replace(predicted=replace(plan.predicted, step_s=0.0)), b)
    assert plan.workload.architecture is not None
    assert main(["compare", str(a), str(b)]) == 0
