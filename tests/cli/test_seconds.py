"""``--seconds``: the plan is saved first; parts that do not fit are skipped and reported."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from planner.checker.violation import Violation
from planner.cli import time_budget
from planner.cli.main import main
from planner.cli.output import BAD_INPUT
from planner.cli.time_budget import TimeLeft
from planner.search.stop import TimeLimitReached

PLAN = [
    *("plan", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny"),
    *("--stages", "4", "--batch-samples", "16", "--effort", "0.1"),
]


def late(*_: object, **__: object) -> None:
    """Takes longer than there is."""
    raise TimeLimitReached


def test_no_limit() -> None:
    """The remaining time is unknown."""
    unlimited = TimeLeft(None, began=time.perf_counter() - 1e6)
    assert unlimited.left_s is None
    with unlimited.cut():
        pass


def test_time_counts_from_the_start_of_the_command() -> None:
    """A part that would start after the limit is skipped."""
    spent = TimeLeft(5.0, began=time.perf_counter() - 100)
    assert spent.left_s == 0.0
    with pytest.raises(TimeLimitReached), spent.cut():
        raise AssertionError("began")


def test_endless_part_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an alarm, which is removed afterwards."""
    monkeypatch.setattr(time_budget, "OVER_S", 0.0)
    with pytest.raises(TimeLimitReached), TimeLeft(0.01).cut():
        while True:
            pass
    with TimeLeft(100).cut():
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("planner.checker.dispatch.check", "not checked (planner check {path}): no time left"),
        ("planner.cli.plan_command._random", "not compared with random placements: no time left"),
        ("planner.simulator.timeline.Timeline.gantt", "not drawn: no time left"),
    ],
)
def test_skipped_parts_are_printed(
    part: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line with the remedy; the plan and the other parts are there."""
    path = tmp_path / "plan.json"
    monkeypatch.setattr(part, late)
    assert main([*PLAN, "--seconds", "300", "--out", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{words.format(path=path)}; give --seconds of more than 300 " in out
    assert out.count("no time left") == 1
    monkeypatch.undo()
    assert main(["check", str(path)]) == 0


def test_skipped_parts_are_in_the_json_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; null is for what has no answer."""
    monkeypatch.setattr("planner.cli.plan_command._random", late)
    argv = [*PLAN, "--seconds", "300", "--json", "--out", str(tmp_path / "plan.json")]
    assert main(argv) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["no_time_for"] == ["compared with random placements"]
    assert len(data["written"]) == 3


def test_saved_plan_that_fails_its_check_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there, the command says what is wrong with it and ends so."""
    wrong = Violation("memory", "order", "too full")
    monkeypatch.setattr("planner.checker.dispatch.check", lambda _: [wrong])
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--out", str(path)]) == BAD_INPUT
    assert path.exists()
    error = capsys.readouterr().err
    assert f"{path} is saved, but fails its own check" in error
    assert "too full" in error
