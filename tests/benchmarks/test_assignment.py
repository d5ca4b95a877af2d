"""The benchmark's tables have the promised shape; its numbers are not tested here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.assignment import Table, main, trajectory
from planner.bench.assignment_instances import dtfm_case, jittered, skyplane
from planner.genetic.classes import interchangeable


def test_instances_have_the_stated_shapes() -> None:
    """Shapes of the issue; jitter leaves no two devices interchangeable."""
    assert skyplane().stage_sizes == (7,) * 8
    assert len(interchangeable(skyplane())) == 56
    assert len(interchangeable(dtfm_case(5))) == 8
    assert jittered(64).stage_sizes == (8,) * 8
    assert len(interchangeable(jittered(64))) == 64
    assert jittered(64).network == jittered(64).network


def test_table_is_markdown() -> None:
    """Header, rule, one line per row."""
    table = Table("Title", "Note.", ("a", "b"), (("1", "2"),))
    assert table.markdown().splitlines()[-3:] == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]


@pytest.mark.parametrize("method", ["genetic", "kl", "random"])
def test_trajectory_never_rises(method: str) -> None:
    """Best cost against iterations, for Figure 4."""
    costs = [cost for _, cost in trajectory(dtfm_case(4), method, 0, 110)]
    assert costs == sorted(costs, reverse=True)


def test_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists the parts."""
    with pytest.raises(SystemExit):
        main(["magic", "--folder", str(tmp_path)])
    assert "choose from five, genetic" in capsys.readouterr().err
