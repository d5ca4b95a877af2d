"""Command-line interface, end to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.checker.dispatch import check
from planner.cli.arguments import Reporting
from planner.cli.main import main
from planner.network.catalogue import load_network
from planner.network.cluster import Cluster, Devices
from planner.planning.baselines.plans import Baselines
from planner.problems import PathProblem
from planner.problems.answers import AssignmentPlan, PathOp, PathPlan
from planner.report.figures import seconds
from planner.search.stop import SearchRun
from planner.simulator.simulator import simulate
from planner.training_plan.file import load_plan
from planner.workload.precision import Precision
from planner.workload.workload import Workload

PLAN = [
    *("plan", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny", "--stages", "4"),
    *("--sequence", "64", "--batch-samples", "8", "--effort", "1", "--random-placements", "2"),
]


def unwrapped(out: str) -> str:
    """What was printed, as one line."""
    return " ".join(out.split())


def slower_regions(path: Path) -> Path:
    """The plan's regions with half the bandwidth, as a file of one's own."""
    network = load_network("aws8_dtfm_worldwide_2022")
    network.replace(bandwidth_bytes_per_s=network.bandwidth_bytes_per_s / 2).save(path)
    return path


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of one device a region."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main([*PLAN, "--out", str(path)]) == 0
    return path


def test_plan_writes_plan_trace_and_gantt_chart(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints what was compared, and a step shorter than the mean of random placements."""
    names = sorted(p.name for p in plan_file.parent.iterdir())
    assert names == ["plan.gantt.png", "plan.json", "plan.trace.json"]
    out = plan_file.parent / "again.json"
    assert main([*PLAN, "--json", "--no-pictures", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    # exchanges by simulated step left the optimum of eq. 1
    assert "assignment" not in data
    assert "the optimum of eq. 1 is slower" in data["step"]["stop_reason"]
    assert data["random"]["mean_step_s"] > data["predicted"]["step_s"]
    assert data["ranks_by_region"]["tally"]["simulated"] > 0
    assert data["one_region"]["plan"]["devices"] == 1
    assert data["written"] == [str(out)]


def test_plan_is_compared_with_ranks_by_region(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratios are to the plan's step; where nothing fits, the reason; and only if wanted."""
    command = [*PLAN, "--no-pictures", "--out", str(tmp_path / "plan.json")]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    best = data["ranks_by_region"][data["ranks_by_region"]["outermost"]]
    ratio = best["step_s"] / data["predicted"]["step_s"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.split("\nwrote")[0].splitlines())) <= 80
    out = unwrapped(printed)
    said = f"ranks by region {seconds(best['step_s'])}, {ratio:.2f} times as long as this plan"
    assert f"{said}: {best['stages']} stages x {best['pipelines']} pipelines" in out
    region = data["one_region"]["plan"]["step_s"]
    own = data["predicted"]["step_s"]
    assert f"{data['one_region']['name']} alone {seconds(region)}, {region / own:.2g} times" in out
    assert "(faster): 1 stage x 1 pipeline" in out
    assert "leave out --stages and --wiring to search all layouts" in out
    kept = {one.taken: one.value for one in load_plan(tmp_path / "plan.json").baselines}
    assert kept["ranks by region"] == pytest.approx(best["step_s"])
    # four stages need 158 MB at most, one needs 273: regions of one device hold no model
    assert main([*command, "--memory-gb", "0.2"]) == 0
    out = unwrapped(capsys.readouterr().out)
    assert "none of 8 regions holds the model by itself: device 'Oregon' has 0.20 GB" in out
    assert main([*command, "--no-compare", "--json"]) == 0
    assert "ranks_by_region" not in json.loads(capsys.readouterr().out)


def test_recompute_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All or some stages: in the plan, in the output, and for random placements."""
    out = tmp_path / "plan.json"
    command = [*PLAN, "--no-pictures", "--out", str(out)]
    assert main([*command, "--recompute", "all"]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert "Layers that the backward pass recomputes: all of stages 0-3." in said
    whole = load_plan(out)
    assert whole.recompute == tuple(stop - start for start, stop in whole.stage_layers)
    assert main([*command, "--recompute", "0,2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recompute"] == [1, 0, 1, 0]
    assert load_plan(out).predicted.step_s < whole.predicted.step_s
    assert main(["check", str(out)]) == 0
    capsys.readouterr()
    assert main([*command, "--recompute", "7"]) == 2
    assert "recompute names stage 7" in capsys.readouterr().err


def test_check_exit_codes(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid plan: 0. Unreadable file: 2 and one line on stderr. Violated rule: 1 and the rule."""
    assert main(["check", str(plan_file)]) == 0
    assert "valid" in capsys.readouterr().out
    damaged = plan_file.parent / "damaged.json"
    data = json.loads(plan_file.read_text())
    data["network"]["bandwidth_bytes_per_s"][0][1] = -1
    damaged.write_text(json.dumps(data))
    assert main(["check", str(damaged)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bandwidth_bytes_per_s[0][1]: must be > 0" in error
    data = json.loads(plan_file.read_text())
    data["predicted"]["step_s"] /= 2
    damaged.write_text(json.dumps(data))
    assert main(["check", str(damaged)]) == 1
    assert "step time" in capsys.readouterr().out
    damaged.unlink()


def test_simulate_on_another_network(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same regions with half the bandwidth; a network without the plan's regions is rejected."""
    slower = slower_regions(plan_file.parent / "slower.csv")
    assert main(["simulate", str(plan_file), "--network", str(slower), "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert there["step_s"] > there["planned_step_s"]
    slower.unlink()
    assert main(["simulate", str(plan_file), "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert here["step_s"] == here["planned_step_s"]
    assert main(["simulate", str(plan_file), "--network", "gcp12_skippipe_2025"]) == 2
    assert "neither the plan's devices nor its region" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "--network", "nowhere"], "no network 'nowhere'"),
        (["plan", "--network", "skyplane_60_20220129"], "not measured"),
        (["plan", "--workload", "gpt9"], "no workload 'gpt9'"),
        (["plan", "--stages", "3"], "cannot be divided into 3 equal stages"),
        (["plan", "--out", "/no/such/folder/plan.json"], "does not exist"),
        (["plan", "--utilization", "7"], "utilization is 7"),
        (["plan", "--calibration", "/no/file.json"], "cannot be read"),
        (["plan", "--seconds", "-1"], "--seconds is -1; give more than 0"),
        (["plan", "--sequence", "0"], "--sequence is 0; give tokens"),
        (["plan", "--out", "/tmp"], "is a folder"),
        (["plan", "--averaging", "equal", "--group-size", "0"], "group"),
    ],
)
def test_bad_requests_exit_with_2_and_one_line(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And write nothing."""
    out = ["--out", str(tmp_path / "plan.json")]
    assert main([*PLAN, *out, *argv[1:]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_devices_per_region_need_a_link_within_regions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Required for networks whose source does not state one."""
    argv = [*PLAN, "--network", "skyplane_60_20220129", "--devices-per-region", "2"]
    assert main([*argv, "--out", str(tmp_path / "p.json")]) == 2
    assert "--intra-latency-ms" in capsys.readouterr().err


def test_links_within_regions_need_devices_per_region(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The options have no meaning with one device per region."""
    argv = [*PLAN, "--intra-bandwidth-gbps", "2", "--out", str(tmp_path / "p.json")]
    assert main(argv) == 2
    assert "--intra-bandwidth-gbps 2 applies to links within a region" in capsys.readouterr().err


def test_networks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and sizes."""
    assert main(["networks"]) == 0
    out = capsys.readouterr().out
    assert "gcp12_skippipe_2025_repaired" in out and "fluidstack_32" in out


def test_assign_prints_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight regions in stages of unequal size."""
    argv = ["assign", "--network", "aws8_dtfm_worldwide_2022", "--stage-sizes", "4,2,2", "--json"]
    argv += ["--activation-bytes", "1e6", "--gradient-bytes", "1e8", "--effort", "1"]
    assert main(argv) == 0
    data = json.loads(capsys.readouterr().out)
    assert [len(group) for group in data["groups"]] == [4, 2, 2]
    assert data["bound"] <= data["objective"]


def test_precision_option(tmp_path: Path) -> None:
    """fp32 is stored in the plan and changes FLOP/s and message sizes."""
    plans = []
    for word in ("bf16", "fp32"):
        path = tmp_path / f"{word}.json"
        argv = [*PLAN, "--no-pictures", "--no-compare", "--out", str(path)]
        assert main([*argv, *(("--precision", word) if word == "fp32" else ())]) == 0
        plans.append(load_plan(path))
    half, full = plans
    assert half.workload.precision == Precision.parse("bf16")
    assert full.workload.precision == Precision.parse("fp32")
    ratio = full.cluster.flops / half.cluster.flops
    assert ratio == pytest.approx([19.5 / 312] * len(full.cluster))
    outputs = [plan.workload.layers[0].output_bytes for plan in plans]
    assert outputs[1] == 2 * outputs[0]
    with pytest.raises(SystemExit):
        main([*PLAN, "--precision", "fp8"])


def test_run_rejects_plans_that_exceed_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both numbers, before anything starts."""
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--no-pictures", "--out", str(path)]) == 0
    monkeypatch.setattr("planner.simulator.host_prediction.available_bytes", lambda: 1e9)
    assert main(["run", str(path)]) == 2
    error = capsys.readouterr().err
    assert "8 processes need about" in error and "1.0 GB available" in error


def test_run_refuses_data_and_checkpoints_before_processes_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text without a sample; a checkpoint of other settings, or of no fewer steps."""
    pytest.importorskip("torch")
    names = ("one.csv", "plan.json", "text.txt", "kept")
    devices, path, text, kept = (tmp_path / name for name in names)
    devices.write_text("name,count\nOregon,1\n")
    argv = [*PLAN, "--no-pictures", "--stages", "1", "--no-compare", "--out", str(path)]
    assert main([*argv, "--devices", str(devices)]) == 0
    run = ["run", str(path), "--data", str(text), "--shuffle", "1", "--steps"]
    text.write_text("a text of more than one sample\n" * 40)
    assert main([*run, "2", "--checkpoint", str(kept), "--every", "1"]) == 0
    monkeypatch.setattr("planner.executor.launch.local.run_local", None)  # not called
    resume = ["--resume", str(kept)]
    for more, said in (
        (["2", *resume], "--steps is 2 in total, and the checkpoint is after 2; give more than 2"),
        (["3", *resume, "--weight-decay", "0.5"], "this run has --weight-decay 0.5; give --wei"),
        (["3", "--eval-data", str(tmp_path / "short")], "--eval-data: there are 5 tokens, fewer"),
    ):
        (tmp_path / "short").write_text("short")
        capsys.readouterr()
        assert main([*run, *more]) == 2
        assert said in unwrapped(capsys.readouterr().err)
    # what is only warned about
    with monkeypatch.context() as patch:
        patch.setattr("planner.executor.launch.local.run_local", lambda *_, **__: (3, None))
        assert main([*run, "3", "--elastic"]) == 3
    assert "stage 0 has one device, 'Oregon'" in unwrapped(capsys.readouterr().err)
    text.write_text("")
    assert main([*run, "3", *resume]) == 2
    assert "--data: there are 0 tokens, fewer than a sample of 65" in capsys.readouterr().err


def test_run_trains_and_compares_with_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four processes, two steps; the calibration is used for a new plan."""
    pytest.importorskip("torch")
    path, times = tmp_path / "plan.json", tmp_path / "times.json"
    command = ["aws4_dtfm_regional_2022" if word.startswith("aws8") else word for word in PLAN]
    command.append("--no-pictures")
    assert main([*command, "--out", str(path)]) == 0
    trace = tmp_path / "run.trace.json"
    argv = ["run", str(path), "--steps", "2", "--calibrate", str(times), "--json"]
    capsys.readouterr()
    assert main([*argv, "--trace", str(trace)]) == 0
    printed = capsys.readouterr()
    steps = json.loads(printed.out)["steps"]
    phases = ["starting 4 processes", "measuring forward and backward", "running the first step"]
    where = [printed.err.index(phase) for phase in phases]
    assert where == sorted(where)
    assert [s["step"] for s in steps] == [0, 1]
    assert all(s["measured_s"] > 0 and s["predicted_s"] > 0 and 10 < s["loss"] < 12 for s in steps)
    assert json.loads(trace.read_text())["traceEvents"]
    assert main([*command, "--calibration", str(times), "--out", str(path)]) == 0
    assert "calibration of" in json.loads(path.read_text())["compute_times"]["source"]


def test_peer_without_gpu_becomes_an_aggregator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a devices file to training; its rank is started too, and has nothing to calibrate."""
    pytest.importorskip("torch")
    devices, path, times = (tmp_path / name for name in ("d.csv", "plan.json", "times.json"))
    devices.write_text(
        "name,count,upload_mbps,download_mbps,can_compute\n"
        "Ohio,1,1000,1000,no\nOregon,3,200,200,yes\n"
    )
    argv = [*PLAN, "--devices", str(devices), "--averaging", "adaptive", "--no-pictures"]
    argv[argv.index("--stages") + 1] = "1"
    assert main([*argv, "--no-compare", "--out", str(path)]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert "4 devices, 1 stage x 3 pipelines, 1 to average only" in said
    assert "average only Ohio/0" in said
    plan = load_plan(path)
    assert plan.averages_for == {plan.cluster.network.ids.index("Ohio/0"): 0}
    assert main(["run", str(path), "--steps", "2", "--calibrate", str(times), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert all(s["predicted_s"] > 0 and 10 < s["loss"] < 12 for s in steps)
    assert sorted(json.loads(times.read_text())["devices"]) == ["Oregon/0", "Oregon/1", "Oregon/2"]
    again = [*argv, "--no-compare", "--calibration", str(times), "--out", str(path)]
    assert main(again) == 0
    assert "calibration of" in json.loads(path.read_text())["compute_times"]["source"]


def test_simulate_replicates_devices_on_another_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan for 2 devices a region on a network of regions; links inside stay as planned."""
    path = tmp_path / "plan.json"
    argv = [*PLAN, "--devices-per-region", "2", "--batch-samples", "16", "--no-pictures"]
    assert main([*argv, "--out", str(path)]) == 0
    capsys.readouterr()
    assert main(["simulate", str(path), "--network", "aws8_dtfm_worldwide_2022", "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["step_s"] == pytest.approx(same["planned_step_s"])
    slower = slower_regions(tmp_path / "slower.csv")
    assert main(["simulate", str(path), "--network", str(slower), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > same["step_s"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["simulate", "{plan}", "--trace", "/no/folder/t.json"], "does not exist"),
        (["simulate", "{plan}", "--gantt", "picture.xyz"], "must end in .png"),
        (["run", "{plan}", "--data", "/no/text.txt"], "is no text file or folder of them"),
        (["run", "{plan}", "--eval-data", "/no/text.txt"], "is no text file or folder of them"),
        (["run", "{plan}", "--weights", "/no/weights"], "config.json: cannot be read"),
        (["run", "{plan}", "--warmup", "-1"], "warmup is -1"),
        (["run", "{plan}", "--calibrate", "/no/folder/t.json"], "does not exist"),
        (["run", "{plan}", "--calibration", "/no/times.json"], "cannot be read"),
        (["check", "/no/plan.json"], "cannot be read"),
    ],
)
def test_output_paths_are_validated_first(
    argv: list[str], message: str, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and nothing was started."""
    assert main([part.format(plan=plan_file) for part in argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_interrupt_after_saving_lists_the_skipped_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while drawing keeps the plan and says which files were written."""

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("planner.simulator.timeline.Timeline.gantt", interrupted)
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--out", str(path)]) == 130
    out = unwrapped(capsys.readouterr().out)
    assert "not drawn: interrupted" in out
    assert f"wrote {path}, {tmp_path / 'plan.trace.json'} " in out
    assert main(["check", str(path)]) == 0


SKIPPING = [
    *("plan", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny"),
    *("--stage-sizes", "3,2,2,1", "--path-stages", "3", "--full-every", "4", "--sequence", "64"),
    *("--batch-samples", "6", "--effort", "2"),
]
INSTANCE = Path(__file__).parents[2] / "datasets" / "instances" / "gcp20_skip33.json"
FROM_NETWORK = [
    *("paths", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny"),
    *("--stage-sizes", "3,2,2,1", "--path-stages", "3", "--batch-samples", "6"),
]


def test_run_prints_the_planned_step_first(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then what is predicted here, and each phase at once, without a terminal."""
    pytest.importorskip("torch")
    from planner.cli.run_command import _EventPrinter

    plan = load_plan(plan_file)
    steps = _EventPrinter(plan, plan.workload, Path("none"), [1.5], False, 7)
    steps.take('{"event": "phase", "doing": "building the model"}')
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    assert first.startswith("training gpt2-tiny: 7 steps of 512 tokens; planned on aws8_dtfm")
    assert first.endswith(f": {plan.predicted.step_s:.3f} s a step")
    assert second == "predicted on this machine: 1.500 s a step"
    doing = [line.split("s  ")[1] for line in printed.err.splitlines()]
    assert doing == ["starting 8 processes", "building the model"]


def test_run_on_a_cpu_advises_fp32(plan_file: Path) -> None:
    """For plans in a 16-bit format only."""
    pytest.importorskip("torch")
    from planner.cli.run_command import _advice

    plan = load_plan(plan_file)
    assert _advice(plan, "cpu").startswith("note: bf16 is slow on most CPUs; planner plan --prec")
    workload = Workload.preset("gpt2-tiny", precision="fp32")
    assert not _advice(plan.replace(workload=workload), "cpu")


@pytest.mark.parametrize("steps", [3, 6])
def test_summary_of_few_steps_states_their_number(
    steps: int, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step is warm-up and does not count."""
    pytest.importorskip("torch")
    from planner.cli.run_command import _EventPrinter, _summary

    plan = load_plan(plan_file)
    events = _EventPrinter(plan, plan.workload, Path("none"), [1.0], False, steps)
    events.done = [{"step": k, "measured_s": 1.29, "predicted_s": 1.0} for k in range(steps)]
    _summary(plan, events, None, False)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "measured 1.290 s, predicted on this machine 1.000 s (+29%)" in last
    assert last.endswith("; only 2 steps measured") == (steps == 3)


def answered(data: dict[str, Any], **changes: object) -> tuple[PathPlan, PathProblem]:
    """The printed paths, and the reference instance with changes on the printed arrangement."""
    fields = json.loads(INSTANCE.read_text())
    fields = {name: fields[name] for name in fields if name in PathProblem.__dataclass_fields__}
    problem = PathProblem(**{**fields, "stage_devices": data["stage_devices"], **changes})
    return PathPlan.of(data["paths"], [PathOp(*op) for op in data["ops"]]), problem


def test_plan_with_skipped_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A valid file with both schedules; prints cycle and waves; each schedule can be drawn."""
    path = tmp_path / "plan.json"
    assert main([*SKIPPING, "--out", str(path)]) == 0
    out = unwrapped(capsys.readouterr().out)
    assert "8 devices, 4 stages of 3, 2 x 2, 1, 2 without microbatches" in out
    assert "pipeline in 3 of 4 iterations" in out and "pipeline in 1 of 4 iterations" in out
    assert "waves, 3 stages a path" in out and "waves, 4 stages a path" in out
    assert "random placements" not in out and "ranks by region" not in out
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["plan.gantt.png", "plan.json", "plan.trace.json"]
    plan = load_plan(path)
    assert check(plan) == [] and plan.cycle == (0, 0, 0, 1)
    assert len({d for schedule in plan.schedules for path in schedule.paths for d in path}) == 6
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    gantt = tmp_path / "full.svg"
    argv = ["simulate", str(path), "--json", "--schedule", "1", "--gantt", str(gantt)]
    assert main(argv) == 0
    data = json.loads(capsys.readouterr().out)
    spans = [s["pipeline_s"] for s in data["schedules"]]
    assert data["pipeline_s"] == pytest.approx((3 * spans[0] + spans[1]) / 4)
    assert data["step_s"] == data["planned_step_s"]
    # the picture is that of the full iteration
    assert f"by itself its pipeline takes {spans[1]:.3g} s" in gantt.read_text()
    assert main(["simulate", str(path), "--schedule", "2"]) == 2
    assert "--schedule must be 0 to 1 for this plan" in capsys.readouterr().err


def test_plan_with_cbs_and_given_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by the paper's search, in stages of unlike numbers of layers, saved and valid."""
    path = tmp_path / "plan.json"
    argv = [
        *SKIPPING,
        "--workload",
        "gpt2-small",
        "--path-method",
        "cbs",
        "--no-pictures",
        "--json",
    ]
    assert main([*argv, "--stage-layers", "1,3,4,4", "--out", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    plan = load_plan(path)
    assert check(plan) == [] and plan.certificates["paths"].method == "cbs"
    assert plan.stage_layers == ((0, 1), (1, 4), (4, 8), (8, 12))
    layers = [sum((1, 3, 4, 4)[plan.stage_of[d]] for d in p) for p in plan.schedules[0].paths]
    mean = (3 * sum(layers) / len(layers) + 12) / 4
    assert data["visited_layers"] == pytest.approx(mean)
    assert main([*argv, "--stage-layers", "1,3,4", "--out", str(path)]) == 2
    assert "--stage-layers lists 3 stages but there are 4" in capsys.readouterr().err
    assert main([*argv, "--stage-layers", "2,3,4,4", "--out", str(path)]) == 2
    assert "--stage-layers lists 13 layers, the model has 12" in capsys.readouterr().err


def test_paths_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options override the file's fields, ignored fields are listed, and the result is written."""
    out = tmp_path / "paths.json"
    argv = ["paths", str(INSTANCE), "--json", "--effort", "1", "--out", str(out)]
    assert main([*argv, "--path-stages", "3", "--max-swaps", "0"]) == 0
    printed = capsys.readouterr()
    assert "ignored fields: comment, locations, public_paths" in printed.err
    data = json.loads(printed.out)
    assert data == json.loads(out.read_text())
    plan, problem = answered(data, path_stages=3, max_swaps=0)
    assert check(plan, problem) == []
    assert plan.makespan_s == pytest.approx(data["objective"])
    assert 0 < data["bound"] <= data["objective"]
    assert [w["path_stages"] for w in data["waves"]] == [3, 6]
    assert data["waves"][0]["count"] < data["waves"][1]["count"]


def test_paths_with_arrange(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pairs of near devices, stages across: free, faster than any paths on the file's."""
    near = [[0.1 if i // 2 == j // 2 else 9.0 for j in range(4)] for i in range(4)]
    fields = {"transfer_s": near, "forward_s": 1.0, "backward_s": 2.0, "head_s": 0.5}
    fields |= {"path_stages": 2, "memory": 4, "microbatches_per_start": 2}
    file = tmp_path / "problem.json"
    argv = ["paths", str(file), "--json", "--effort", "1"]
    file.write_text(json.dumps({**fields, "stage_devices": [[0, 1], [2, 3]]}))
    assert main(argv) == 0
    fixed = json.loads(capsys.readouterr().out)
    assert fixed["stage_devices"] == [[0, 1], [2, 3]]
    assert main([*argv, "--arrange"]) == 0
    from_file = json.loads(capsys.readouterr().out)
    file.write_text(json.dumps({**fields, "stage_sizes": [2, 2]}))
    assert main([*argv, "--arrange"]) == 0
    for free in (from_file, json.loads(capsys.readouterr().out)):
        problem = PathProblem(stage_devices=free["stage_devices"], **fields)  # type: ignore[arg-type]
        plan = PathPlan.of(free["paths"], [PathOp(*op) for op in free["ops"]])
        assert check(plan, problem) == []
        assert free["objective"] < fixed["bound"]
        # alone: F, 0.1, F, 0.1, H, 0.1, B, 0.1, B; a second one at least an F behind
        assert 6.9 < free["objective"] < 12


@pytest.mark.parametrize("more", [[], ["--arrange"]])
def test_paths_on_a_network(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A whole iteration with the workload's compute times; devices are named."""
    assert main([*FROM_NETWORK, *more, "--effort", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["paths"]) == 6 and "Oregon" in data["devices"]
    cluster = Cluster(load_network("aws8_dtfm_worldwide_2022"), Devices.of_gpu("A100"))
    problem = PathProblem.from_assignment(
        cluster,
        Workload.preset("gpt2-tiny"),
        AssignmentPlan.of_groups(data["stage_devices"]),
        path_stages=3,
        microbatches_per_start=2,
        live_memory=True,
    )
    plan = PathPlan.of(data["paths"], [PathOp(*op) for op in data["ops"]])
    assert check(plan, problem) == []
    assert main([*FROM_NETWORK, *more, "--effort", "1"]) == 0
    assert "stage 3: " in capsys.readouterr().out


def test_ctrl_c_returns_the_incumbent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths and plan alike are valid and say that they were interrupted."""

    def interrupted(_: Reporting, run: SearchRun) -> str | None:
        if run.objective is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return None

    monkeypatch.setattr(Reporting, "reason", interrupted)
    assert main(["paths", str(INSTANCE), "--json", "--seconds", "60"]) == 130
    data = json.loads(capsys.readouterr().out)
    assert data["stop_reason"] == "interrupted"
    assert check(*answered(data)) == []
    path = tmp_path / "plan.json"
    argv = [*SKIPPING, "--seconds", "60", "--no-pictures", "--json", "--out", str(path)]
    assert main(argv) == 130
    data = json.loads(capsys.readouterr().out)
    assert "interrupted" in data["assignment"]["stop_reason"] + data["paths"]["stop_reason"]
    assert check(load_plan(path)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transfer_s": None}, "transfer_s is missing; add it"),
        ({"transfer_s": [[0, 1]]}, "transfer_s must be N x N, found shape (1, 2)"),
        ({"stage_devices": None}, "stage_devices is missing; list the devices of every stage"),
        ({"stage_devices": 5}, "stage_devices must be a list of devices for every stage, found 5"),
        ({"stage_sizes": [5, 15]}, "stage_sizes beside stage_devices"),
        ({"path_stages": 3.5}, "path_stages must be a whole number, found 3.5"),
        ({"live_memory": "yes"}, "live_memory must be true or false, found 'yes'"),
        ({"memory": "lots"}, "memory must be one number or 20 of them"),
        ({"link_s": [[0, 1]]}, "link_s must be 20 x 20, as transfer_s is, found shape (1, 2)"),
    ],
)
def test_invalid_path_files(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr that names the file, and 2."""
    path = tmp_path / "problem.json"
    names = PathProblem.__dataclass_fields__
    data = {k: v for k, v in json.loads(INSTANCE.read_text()).items() if k in names} | change
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    assert main(["paths", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["paths"], "give either a problem file, or --network"),
        (["paths", "{file}", "--network", "x"], "give either a problem file, or --network"),
        (["paths", "/no/file.json"], "cannot be read (No such file or directory)"),
        (["paths", "{plain}"], "is not JSON"),
        (["paths", "{file}", "--path-stages", "7"], "path_stages is 7; it must be 1 to the 6"),
        (
            ["paths", "{file}", "--arrange", "--method", "cbs"],
            "--method cbs does not support --arrange",
        ),
        (["paths", "{file}", "--method", "magic"], "method must be one of auto"),
        (["paths", "{file}", "--out", "/no/folder/p.json"], "does not exist"),
        ([*FROM_NETWORK[:-4]], "--path-stages is missing"),
        ([*FROM_NETWORK, "--batch-samples", "7"], "does not divide into microbatches"),
        ([*FROM_NETWORK, "--stage-sizes", "3,2,2"], "sum to the number of devices"),
        ([*SKIPPING, "--random-placements", "3"], "needs straight pipelines; leave it out"),
        ([*SKIPPING, "--batch-samples", "7"], "must be a multiple of 3"),
        (
            ["plan", *SKIPPING[1:5], "--stages", "4", "--full-every", "3"],
            "--full-every is 3, which only partial paths can have",
        ),
        (["plan", *SKIPPING[1:5], "--pipelines", "2"], "give --stages, or 'auto'"),
    ],
)
def test_invalid_path_requests(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and 2."""
    plain = tmp_path / "plain.json"
    plain.write_text("paths!")
    known = PathProblem.__dataclass_fields__
    file = tmp_path / "problem.json"
    fields = json.loads(INSTANCE.read_text())
    file.write_text(json.dumps({k: v for k, v in fields.items() if k in known}))
    assert main([part.format(file=file, plain=plain) for part in argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_infeasible_paths(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is too small: the reason is printed, exit code 1."""
    assert main(["paths", str(INSTANCE), "--memory", "2", "--effort", "1"]) == 1
    assert (
        "no paths found: device 0 starts 3 microbatches, its memory allows 2"
        in capsys.readouterr().out
    )


def test_plan_without_constraints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` recomputes the bound on any plan."""
    out = tmp_path / "plan.json"
    command = (
        "plan --network aws4_dtfm_regional_2022 --workload gpt2-tiny --sequence 128 --effort 1"
    )
    words = [*command.split(), "--batch-samples", "16", "--no-compare", "--no-pictures"]
    assert main([*words, "--out", str(out)]) == 0
    said = unwrapped(capsys.readouterr().out)
    assert "stage of 1, 3 left out" in said and "no plan of its kind is faster" in said
    assert "no faster plan that uses them was found" in said
    assert "assignment cost" not in said
    assert main(["check", str(out)]) == 0
    checked = unwrapped(capsys.readouterr().out)
    assert "verified: recomputed from the plan's witness; method: whole step" in checked


def test_printed_baselines_are_starting_points_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything open none is computed again, and none is faster than the plan."""
    out = tmp_path / "plan.json"
    command = [
        *("plan", "--network", "aws4_dtfm_regional_2022", "--workload", "gpt2-tiny"),
        *("--sequence", "128", "--effort", "1", "--batch-samples", "16", "--no-pictures"),
    ]
    calls = 0
    rule: Any = Baselines.of

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return rule(*args)

    monkeypatch.setattr(Baselines, "of", counted)
    monkeypatch.setattr("planner.planning.baselines.rank_order.ranks_by_region", None)
    assert main([*command, "--json", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert calls == 1
    ranks = data["ranks_by_region"]
    assert ranks[ranks["outermost"]]["step_s"] >= data["predicted"]["step_s"] * (1 - 1e-9)
    kept = load_plan(out).baselines
    assert kept[0].taken == "ranks by region"
    assert kept[0].value == pytest.approx(ranks[ranks["outermost"]]["step_s"])
    assert data["tokens_per_step"] == 16 * 128 and data["sequence"] == 128
    rate = data["tokens_per_step"] / data["predicted"]["step_s"]
    assert data["tokens_per_s"] == pytest.approx(rate)
    assert data["days"] == pytest.approx(data["training_tokens"] / rate / 86400)


def test_unknown_prices_peaks_and_sites_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The devices file has neither price nor peak; sites and the sample length are reported too."""
    (tmp_path / "net.csv").write_text(
        "source,destination,latency_ms,bandwidth_gbps\noffice,cloud,15,1\ncloud,office,15,1\n"
    )
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}
    config |= {"num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 256}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 131072}
    (tmp_path / "model.json").write_text(json.dumps(config))
    command = ["plan", "--network", str(tmp_path / "net.csv"), "--intra-latency-ms", "0.1"]
    command += ["--intra-bandwidth-gbps", "1", "--workload", str(tmp_path / "model.json")]
    command += ["--batch-samples", "8", "--effort", "0.2", "--no-pictures", "--no-compare"]
    command += ["--devices", str(tmp_path / "d.csv"), "--out", str(tmp_path / "plan.json")]
    (tmp_path / "d.csv").write_text("name,count,tflops,memory_gb\noffice,8,50,24\ncloud,1,50,24\n")
    assert main(command) == 0
    out = unwrapped(capsys.readouterr().out)
    assert "MFU not known: give gpu or peak_tflops" in out
    assert "cost not known: give --usd-per-hour" in out
    assert "8 devices of office have no site: each is assumed to have a line of its own" in out
    assert "8 samples of 8,192 tokens" in out
    assert "Samples have 8,192 tokens, though the model has 131,072 positions; --sequence" in out
    assert "A100" not in out
    (tmp_path / "d.csv").write_text("name,count,site\noffice,8,here\ncloud,1,there\n")
    assert main([*command, "--gpu", "L4", "--memory-gb", "3"]) == 0
    assert (
        "Each device is as in the devices file, otherwise L4 with 3 GB, 0.805 $ an hour, assumed "
        "to attain 48.4 TFLOP/s (40% of its peak; --utilization)."
        in unwrapped(capsys.readouterr().out)
    )
    (tmp_path / "d.csv").write_text(
        "name,count,gpu,site,usd_per_hour\noffice,8,A10,here,1\ncloud,1,A10,there,1\n"
    )
    assert main([*command, "--sequence", "128"]) == 0
    out = unwrapped(capsys.readouterr().out)
    assert "not known" not in out and "have no site" not in out and "positions" not in out


def test_equal_stages_need_no_number_of_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    """The number of pipelines follows if the devices divide evenly."""
    command = ["assign", "--network", "aws8_dtfm_worldwide_2022", "--effort", "0.2"]
    command += ["--activation-bytes", "8e6", "--gradient-bytes", "1e9"]
    found = []
    for words in (["--stages", "4"], ["--stages", "4", "--pipelines", "2"]):
        assert main([*command, *words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["groups"])
    assert found[0] == found[1] and len(found[0]) == 4
    assert main([*command, "--stages", "3"]) == 2
    assert "8 devices do not divide into 3 equal stages" in capsys.readouterr().err


def test_dropped_devices_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By --complete, which leaves out whose pairs were not measured."""
    rows = [f"{a},{b},1,1" for a in "abcd" for b in "abcd" if a != b and {a, b} != {"c", "d"}]
    net, out = tmp_path / "net.csv", tmp_path / "plan.json"
    net.write_text("\n".join(["source,destination,latency_ms,bandwidth_gbps", *rows]) + "\n")
    words = "--workload gpt2-tiny --sequence 64 --batch-samples 8 --effort 0.1"
    assert main(["plan", "--network", str(net), *words.split(), "--out", str(out)]) == 2
    assert (
        f"{net}: 2 ordered pairs are not measured, the first is 'c' to 'd'; without 'c' (1 of 4) "
        f"none is missing; measure them, or assume them: planner networks {net} --latency-ms 50 "
        "--bandwidth-gbps 1 --out net.csv, or leave devices out with --complete\n"
    ) in capsys.readouterr().err
    words += " --complete"
    extra = "--no-pictures --no-compare"
    assert (
        main(["plan", "--network", str(net), *words.split(), *extra.split(), "--out", str(out)])
        == 0
    )
    said = capsys.readouterr().err
    assert re.search(
        "planner plan: left out, since some of their pairs were not measured: [cd]\n", said
    )
    # their rows in a devices file are left out, too
    devices = tmp_path / "devices.csv"
    devices.write_text("name,gpu\n" + "".join(f"{name},A100\n" for name in "abcd"))
    words += f" --devices {devices}"
    command = ["plan", "--network", str(net), *words.split(), *extra.split(), "--out", str(out)]
    assert main(command) == 0
    assert set(load_plan(out).cluster.network.ids) <= {*"abcd"}
    assert main([*command[:3], "--workload", str(tmp_path)]) == 2
    assert "is a folder; give" in capsys.readouterr().err


def test_device_that_cannot_compute_is_listed_as_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, in text and in JSON."""
    devices, out = tmp_path / "devices.csv", tmp_path / "plan.json"
    devices.write_text("name,gpu,can_compute\nOregon,A100,\nVirginia,A100,\nOhio,A100,no\n")
    words = f"plan --network aws8_dtfm_worldwide_2022 --devices {devices} --workload gpt2-tiny "
    words += f"--batch-samples 8 --effort 0.2 --no-pictures --out {out}"
    assert main(words.split()) == 0
    said = unwrapped(capsys.readouterr().out)
    assert "Ohio: cannot compute, and as aggregators they would not make averaging faster" in said
    assert main([*words.split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert ["Ohio"] in [one["devices"] for one in data["left_out"]]
    plan = load_plan(out)
    busy = simulate(plan).computing_s()
    busiest = plan.cluster.network.ids[busy.index(max(busy))]
    assert data["busiest_device"] == {"name": busiest, "busy_s": max(busy)}
    assert f"busiest device {busiest}: " in said


def test_gpu_option_beside_a_complete_devices_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused where no row needs it, instead of being ignored."""
    devices = tmp_path / "devices.csv"
    words = f"plan --network aws8_dtfm_worldwide_2022 --devices {devices} --gpu H100 "
    words += f"--workload gpt2-tiny --effort 0.1 --no-pictures --out {tmp_path / 'plan.json'}"
    devices.write_text("name,gpu\nOregon,A100\nVirginia,A100\n")
    assert main(words.split()) == 2
    assert "--gpu H100 is not used: " in capsys.readouterr().err
    devices.write_text("name,gpu\nOregon,A100\nVirginia,\n")
    assert main(words.split()) == 0
    assert "otherwise H100 with" in unwrapped(capsys.readouterr().out)
    devices.write_text("name,gpu,usd_per_hour,memory_gb\nOregon,A100,2,30\nVirginia,,1,20\n")
    for option, column in (("--usd-per-hour", "usd_per_hour"), ("--memory-gb", "memory_gb")):
        assert main([*words.split(), option, "7"]) == 2
        said = unwrapped(capsys.readouterr().err)
        assert f"{option} 7 is not used: {devices} states {column} of every device" in said


def test_changes_of_alternatives_are_sentences() -> None:
    """What the plan would have in place of a decision."""
    from planner.cli.plan_report import _change, _untried

    assert _change("2 stages", "3") == "3 stages instead of 2"
    assert _change("2 stages", "1") == "1 stage instead of 2"
    assert _change("3 without a stage", "none") == "all devices, none of 3 left out"
    assert _change("1 without a stage", "none") == "all devices"
    assert _change("recomputation", "none") == "no recomputation"
    assert _change("no recomputation", "on all stages") == "recomputation on all stages"
    assert _change("adaptive shares", "equal") == "equal shares"
    assert _change("two levels", "one round of equal shares") == "one round of equal shares"
    assert _untried({"tally": {"left_out": 1}}) == "; 1 more was not tried"
    assert _untried({"tally": {"left_out": 2}}) == "; 2 more were not tried"
    assert _untried({"tally": {"left_out": 0}}) == ""


def test_the_package_runs_as_a_module() -> None:
    """As ``python -m planner``."""
    done = subprocess.run(
        [sys.executable, "-m", "planner", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("planner ")


def test_workers_of_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two machines of four GPUs and one of one, which has no part."""
    devices, path = tmp_path / "devices.csv", tmp_path / "plan.json"
    devices.write_text(
        "name,gpu,count,machine\nOregon,T4,4,west\nOhio,A10G,4,east\nTokyo,A10G,1,asia\n"
    )
    argv = ["plan", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-medium"]
    argv += ["--devices", str(devices), "--batch-samples", "8", "--effort", "0.1", "--no-pictures"]
    assert main([*argv, "--out", str(path)]) == 0
    out = unwrapped(capsys.readouterr().out)
    assert "not tried" in out and "tensor parallelism (--tensor-parallel auto)" in out
    assert main([*argv, "--tensor-parallel", "west=4,east=4,asia=1", "--out", str(path)]) == 0
    assert "GPUs of a machine, which split" in (out := unwrapped(capsys.readouterr().out))
    assert "1e-09 GB/s" not in out and "not tried" not in out
    assert main([*argv, "--tensor-parallel", "2", "--out", str(path)]) == 0
    out = unwrapped(capsys.readouterr().out)
    assert "workers of 2 GPUs" in out and "1 GPU of asia in no worker of 2" in out
    assert set(load_plan(path).cluster.network.ids) <= {"west/w0", "west/w1", "east/w0", "east/w1"}
    for command in ("check", "simulate"):
        assert main([command, str(path)]) == 0
    assert main([*argv, "--tensor-parallel", "auto", "--out", str(path), "--force"]) == 0
    out = unwrapped(capsys.readouterr().out)
    assert "GPUs a worker" in out and "(--tensor-parallel auto)" not in out
    assert main([*argv, "--tensor-parallel", "8", "--out", str(path), "--force"]) == 2
    assert "no machine has so many GPUs that can compute: the largest has 4" in (
        capsys.readouterr().err
    )
