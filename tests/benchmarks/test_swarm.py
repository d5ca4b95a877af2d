"""``python -m benchmarks.swarm`` writes its report: the paper's figures beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.swarm.__main__ import main
from planner.problems.error import ProblemError
from planner.swarm.traces import Market, save_trace


def test_tables_of_a_trace(tmp_path: Path) -> None:
    """Table 1, and Table 5 on peers from a file."""
    out, trace = tmp_path / "report.md", tmp_path / "peers.csv"
    save_trace(Market(peers=(60,), hours=3.0).trace(4), trace)
    assert (
        main(["--tables", "1", "5", "--seeds", "3", "--trace", str(trace), "--out", str(out)]) == 0
    )
    text = out.read_text()
    assert "--tables 1 5 --seeds 3" in text
    assert "| 50 ms | 4.88 |" in text
    assert "| none | 82.7 | 99.0 | 45.4 |" in text
    assert "| T = 300 | 95.8 | 99.4 | 88.9 |" in text
    assert "What it depends on" not in text
    rows = [row.split("|") for row in text.splitlines() if row.startswith("| planned, after every")]
    # without downloads it is always optimal
    assert [row[5].strip() for row in rows][::2] == ["100.0 ± 0.0"] * 2


def test_a_malformed_trace_is_one_line(tmp_path: Path) -> None:
    """As the command line shows it."""
    path = tmp_path / "peers.csv"
    path.write_text("time_s,change\n0,4\n5,-9\n")
    with pytest.raises(ProblemError, match="at 5 s more peers of kind 'peer' leave than there are"):
        main(["--tables", "5", "--trace", str(path), "--out", str(tmp_path / "x.md")])
