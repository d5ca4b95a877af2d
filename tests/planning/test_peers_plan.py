"""`planner average --out`: a plan from an averaging solution."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.cli.main import main
from planner.planning.averaging.peers_plan import peers_plan
from planner.problems.peers_file import Peers
from tests.conftest import tiny_workload

PEERS = """name,samples_per_s,upload_mbps,download_mbps,can_compute,can_aggregate
lab,20,200,200,yes,yes
office,20,200,200,yes,yes
desk,20,200,200,yes,yes
phone,0.1,1,200,yes,no
server,0,2500,2500,no,yes
"""


def test_a_plan_with_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three peers of 20 samples a second and 25 MB/s, a server that sums it all; a slow phone.

    A step is 8 samples on each in 0.4 s, and the vector through a line of 25 MB/s.
    """
    peers, out = tmp_path / "peers.csv", tmp_path / "plan.json"
    peers.write_text(PEERS)
    asked = ["average", str(peers), "--workload", "gpt2-tiny", "--batch-samples", "24"]
    assert main([*asked, "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    plan = pl.load_plan(out)
    assert not pl.check(plan)
    assert plan.cluster.network.ids == ("lab", "office", "desk", "server")
    assert plan.left_out == ("phone",) and plan.averages_for == {3: 0}
    assert [len(own) for own in plan.schedules[0].order] == [24, 24, 24, 0]
    (vector,) = plan.workload.gradient_bytes(plan.stage_layers, 0)
    assert plan.predicted.step_s == pytest.approx(0.4 + vector / 25e6)
    assert data["predicted"]["step_s"] == plan.predicted.step_s
    assert data["objective"] == pytest.approx(1 / plan.predicted.step_s)


def test_missing_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rule, value and remedy."""
    peers = tmp_path / "peers.csv"
    peers.write_text(PEERS)
    out = ["--out", str(tmp_path / "plan.json")]
    for more, text in (
        (out, "a plan needs a workload; give --workload"),
        ([], "--batch-samples is missing; give it, or --workload"),
        (["--batch-samples", "4"], "--gradient-bytes is missing"),
        (["--workload", "gpt2-tiny", "--gradient-bytes", "5"], "both set the bytes to average"),
        (["--workload", "gpt2-tiny", "--out", str(tmp_path / "plan.txt")], "must end in .json"),
        (["--workload", "gpt2-tiny", "--microbatch-samples", "2", *out], "must be 1 in a plan"),
    ):
        assert main(["average", str(peers), *more]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert text in said[-1], said


@given(st.integers(0, 10**6))
def test_steps_are_as_fast_as_the_solution(seed: int) -> None:
    """Up to one more whole sample on a peer. Plans are valid."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 6))
    computes = (rng.random(n) < 0.7).tolist()
    computes[0] = True
    sums = (rng.random(n) < 0.7).tolist()
    sums[-1] = True
    peers = Peers(
        tuple(f"p{i}" for i in range(n)),
        tuple(rng.uniform(1, 20, n).tolist()),
        tuple(rng.uniform(1e5, 1e7, n).tolist()),
        tuple(rng.uniform(1e5, 1e7, n).tolist()),
        tuple(computes),
        tuple(sums),
    )
    work = tiny_workload(batch_samples=64)
    (vector,) = work.gradient_bytes(((0, 4),), 0)
    links = None
    if rng.random() < 0.5:
        rates = rng.uniform(1e5, 1e7, (n, n))
        links = pl.Network(np.zeros((n, n)), rates, peers.names)
    problem = peers.problem(64, vector, links, overlap=False)
    solved = pl.solve_averaging(problem).plan
    assert solved is not None
    plan = peers_plan(peers, problem, solved, work, links)
    assert not pl.check(plan)
    slack = 1 / min(peers.samples_per_s)
    assert plan.predicted.step_s <= 1 / solved.steps_per_s + slack + 1e-9
    trained = [len(own) // 3 for own in plan.schedules[0].order]
    names = plan.cluster.network.ids
    for name, count in zip(names, trained, strict=True):
        expected = solved.samples_per_step[peers.names.index(name)]
        assert abs(count - expected) < 1
