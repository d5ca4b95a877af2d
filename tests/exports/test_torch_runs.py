"""An exported schedule in torch's pipeline runtime."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner.exports.formats import export_plan
from tests.conftest import make_plan
from tests.exports import pipeline_main


@pytest.mark.slow
def test_torch_runs_the_csv(tmp_path: Path) -> None:
    """Gradients equal those of a single process."""
    path = tmp_path / "order.csv"
    export_plan(make_plan([[0, 5, 2], [3, 1, 4]]), "torch-pipelining", path)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [sys.executable, *words, str(Path(pipeline_main.__file__)), str(path), "4"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # lines of ranks may run into each other
    off = re.findall(r"off (\d+) (\S+?);", done.stdout)
    assert sorted(rank for rank, _ in off) == ["0", "1", "2"]
    assert all(float(value) < 1e-6 for _, value in off)
