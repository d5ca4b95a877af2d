"""Exported linear programs: other solvers find our optimum, and names are meaningful."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest
from scipy.optimize._highspy import _core as highs

import planner as pl
from planner.cli.main import main
from planner.exports.error import ExportError
from planner.lp.dedloc_lp import solve_relaxed
from planner.lp.flow import solve_flow
from planner.lp.model_file import labels
from planner.lp.paper_model import build_paper_model
from planner.planning.linear_programs import averaging_of_stage, flow_of_plan
from planner.training_plan.model import TrainingPlan
from planner.workload.costs import stage_costs
from tests.conftest import make_plan, regional_network, tiny_workload


def read_by_highs(path: Path) -> float:
    """Solve a file with SciPy's HiGHS."""
    solver = highs._Highs()
    solver.setOptionValue("output_flag", False)
    assert solver.readModel(str(path)) == highs.HighsStatus.kOk
    assert solver.run() == highs.HighsStatus.kOk
    assert solver.getModelStatus() == highs.HighsModelStatus.kOptimal
    return float(solver.getInfo().objective_function_value)


def read_by_cbc(path: Path) -> float:
    """Solve a file with PuLP's CBC."""
    answer = path.with_suffix(".txt")
    subprocess.run(
        [pulp.PULP_CBC_CMD().path, str(path), "solve", "solution", str(answer)],
        check=True,
        capture_output=True,
    )
    first = answer.read_text().splitlines()[0]
    assert first.startswith("Optimal")
    return float(first.split()[-1])


READERS = {"highs": read_by_highs, "cbc": read_by_cbc}


@pytest.fixture(scope="module", params=["last", "first"])
def flow_plan(request: pytest.FixtureRequest) -> TrainingPlan:
    """Six different devices in two regions and sites, with memory for two layers each."""
    network = regional_network((3, 3))
    work = tiny_workload(batch_samples=960)
    memory = stage_costs(work, 0, 2, with_head=True).need_bytes(2)
    flops = np.array([1e11, 2e11, 3e11, 1e11, 2e11, 2e11])
    devices = pl.Devices(
        flops, memory, sites=["a", "a", "a", "b", "b", "b"], site_upload_bytes_per_s={"a": 4e6}
    )
    asked = pl.PlanRequest(stages=3, wiring="flow", recompute="none", head=request.param)
    plan = pl.plan(pl.Cluster(network, devices), work, request=asked, stop=pl.Effort(1)).plan
    assert plan is not None
    assert len(plan.cluster) == 6
    return plan


@pytest.mark.parametrize("form", ["lp", "mps"])
@pytest.mark.parametrize("reader", READERS)
def test_flow_optimum_of_other_solvers(
    form: str, reader: str, flow_plan: TrainingPlan, tmp_path: Path
) -> None:
    """Period, round trip and lack of our solution are the file's optimum."""
    path = tmp_path / f"flow.{form}"
    pl.export_plan(flow_plan, f"flow-{form}", path)
    flow, microbatches, _ = flow_of_plan(flow_plan)
    rates = solve_flow(flow, microbatches)
    lack = max((flow.headroom * flow.pair_s * rates.edge_share - rates.period_s).max(), 0.0)
    ours = microbatches * (rates.period_s + flow.headroom_penalty * lack) + rates.round_trip_s
    assert READERS[reader](path) == pytest.approx(ours, rel=1e-6)


@pytest.mark.parametrize("form", ["lp", "mps"])
@pytest.mark.parametrize("reader", READERS)
def test_averaging_optimum_of_other_solvers(
    form: str, reader: str, flow_plan: TrainingPlan, tmp_path: Path
) -> None:
    """For a stage of several devices; MPS minimises the negative."""
    stage = max(range(3), key=lambda j: len(flow_plan.assignment.groups[j]))
    path = tmp_path / f"averaging.{form}"
    pl.export_plan(flow_plan, f"averaging-{form}", path, stage=stage)
    problem, names = averaging_of_stage(flow_plan, stage)
    ours = solve_relaxed(problem).xi / build_paper_model(problem, names=names).xi_unit
    sign = -1 if form == "mps" or reader == "cbc" else 1
    found = READERS[reader](path)
    assert (abs(found) if reader == "cbc" else sign * found) == pytest.approx(ours, rel=1e-6)


def test_names_are_meaningful(flow_plan: TrainingPlan) -> None:
    """Stage, device and link; units are in the header."""
    text = pl.export_plan(flow_plan, "flow-lp")
    _, _, names = flow_of_plan(flow_plan)
    assert text.startswith("\\ Microbatches as a flow")
    first, second = (next(n for n in names if n.startswith(s)) for s in ("s0.", "s1."))
    ids = {labels([name])[0] for name in flow_plan.cluster.network.ids}
    assert first.removeprefix("s0.").split(".x")[0] in ids
    for word in (
        *(f"busy_{first}:", f"pair_{first}_{second}:", f"spare_{first}_{second}:"),
        *(f"memory_{first}:", f"out_{first}:", f"in_{second}:", f"through_{second}", "period"),
    ):
        assert word in text
    stage = max(range(3), key=lambda j: len(flow_plan.assignment.groups[j]))
    one, other = (
        labels([flow_plan.cluster.network.ids[d]])[0]
        for d in flow_plan.assignment.groups[stage][:2]
    )
    text = pl.export_plan(flow_plan, "averaging-lp", stage=stage)
    for word in (f"a_{one}_{other}", f"g_{other}_{one}", f"link_{one}_{other}:", "steps/s"):
        assert word in text


def test_names_are_valid_short_and_unique() -> None:
    """For any device names."""
    many = labels(["aws:eu-west_1", "aws eu west 1", "東京", "", "x" * 99, "x" * 98, "Oregon"])
    assert many[:2] == ("aws.eu.west.1", "aws.eu.west.1.2")
    assert len(set(many)) == 7 and many[-1] == "Oregon"
    assert all(set(name) <= set("aws.eutx12Oregon") and len(name) < 28 for name in many)


def test_unsupported_programs(flow_plan: TrainingPlan) -> None:
    """One line each."""
    cases: tuple[tuple[TrainingPlan, str, dict[str, Any], str], ...] = (
        (flow_plan, "averaging-lp", {"stage": 3}, "stage is 3, and the plan has 3"),
        (flow_plan, "flow-lp", {"stage": 0}, "flow-lp does not use stage"),
        (make_plan([[0, 1]]), "averaging-mps", {}, "one device, which does not average"),
    )
    for plan, form, options, message in cases:
        with pytest.raises(ExportError, match=message) as caught:
            pl.export_plan(plan, form, **options)
        assert "\n" not in str(caught.value)


def test_average_writes_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``planner average --programme`` writes the program behind its bound."""
    peers, path = tmp_path / "peers.csv", tmp_path / "dedloc.mps"
    peers.write_text(
        "name,samples_per_s,upload_mbps,download_mbps\nOslo,40,100,200\nLima,10,50,80\nRome,5,9,9\n"
    )
    asked = ["average", str(peers), "--batch-samples", "64", "--gradient-bytes", "1e8"]
    assert main([*asked, "--programme", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"wrote {path}" in said
    xi_unit = next(
        float(line.split()[6]) for line in path.read_text().splitlines() if "xi is" in line
    )
    bound = float(said.split("bound ")[1].split()[0])
    assert -read_by_highs(path) * xi_unit >= bound * (1 - 1e-5)
    assert "a_Oslo_Lima" in path.read_text()
    assert main([*asked, "--programme", str(path), "--no-overlap", "--force"]) == 2
    assert "--no-overlap does not; leave one of them out" in capsys.readouterr().err
