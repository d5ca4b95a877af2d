"""The command line as users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.datasets import load_network

PLAN = [
    *("plan", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny", "--stages", "4"),
    *("--sequence", "64", "--batch-samples", "8", "--seconds", "1", "--random-placements", "2"),
]


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


def test_plan_writes_plan_trace_and_picture(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints cost, bound, gap, step time, and the random mean of both."""
    names = sorted(p.name for p in plan_file.parent.iterdir())
    assert names == ["plan.gantt.png", "plan.json", "plan.trace.json"]
    out = plan_file.parent / "again.json"
    assert main([*PLAN, "--json", "--no-pictures", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["assignment"]["bound"] <= data["assignment"]["objective"]
    assert data["random"]["mean_cost_s"] > data["assignment"]["objective"]
    assert data["written"] == [str(out)]


def test_check_accepts_and_refuses(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid: 0. Damaged: one line on stderr and 2. Well-formed but wrong: the rule and 1."""
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
    """The same regions with half the bandwidth; a network without them is refused."""
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
        (["plan", "--seconds", "-1"], "must be positive"),
        (["plan", "--out", "/tmp"], "is a folder"),
        (["plan", "--averaging", "equal", "--group-size", "0"], "group"),
    ],
)
def test_bad_requests_end_with_one_line_and_2(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And write nothing."""
    out = ["--out", str(tmp_path / "plan.json")]
    assert main([*PLAN, *out, *argv[1:]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_regions_need_an_inner_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Networks whose source states none ask for it."""
    argv = [*PLAN, "--network", "skyplane_60_20220129", "--devices-per-region", "2"]
    assert main([*argv, "--out", str(tmp_path / "p.json")]) == 2
    assert "--intra-latency-ms" in capsys.readouterr().err


def test_networks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and sizes."""
    assert main(["networks"]) == 0
    out = capsys.readouterr().out
    assert "gcp12_skippipe_2025_repaired" in out and "fluidstack_32" in out


def test_assign_prints_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight regions in unequal stages."""
    argv = ["assign", "--network", "aws8_dtfm_worldwide_2022", "--stage-sizes", "4,2,2", "--json"]
    argv += ["--activation-bytes", "1e6", "--gradient-bytes", "1e8", "--seconds", "1"]
    assert main(argv) == 0
    data = json.loads(capsys.readouterr().out)
    assert [len(group) for group in data["groups"]] == [4, 2, 2]
    assert data["bound"] <= data["objective"]


def test_run_refuses_what_memory_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both numbers, before anything starts."""
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--no-pictures", "--out", str(path)]) == 0
    monkeypatch.setattr("planner.local_prediction.available_bytes", lambda: 1e9)
    assert main(["run", str(path)]) == 2
    error = capsys.readouterr().err
    assert "8 processes need about" in error and "1.0 GB available" in error


def test_run_trains_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight processes, two steps: measured beside predicted; the calibration serves a new plan."""
    pytest.importorskip("torch")
    path, times = tmp_path / "plan.json", tmp_path / "times.json"
    assert main([*PLAN, "--no-pictures", "--out", str(path)]) == 0
    trace = tmp_path / "run.trace.json"
    argv = ["run", str(path), "--steps", "2", "--calibrate", str(times), "--json"]
    capsys.readouterr()
    assert main([*argv, "--trace", str(trace)]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [s["step"] for s in steps] == [0, 1]
    assert all(s["measured_s"] > 0 and s["predicted_s"] > 0 and 10 < s["loss"] < 12 for s in steps)
    assert json.loads(trace.read_text())["traceEvents"]
    again = [*PLAN, "--no-pictures", "--calibration", str(times), "--out", str(path)]
    assert main(again) == 0
    assert "calibration of" in json.loads(path.read_text())["compute_times"]["source"]


def test_regions_of_another_network_price_replicated_devices(
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
        (["run", "{plan}", "--data", "/no/text.txt"], "is not a file"),
        (["run", "{plan}", "--calibrate", "/no/folder/t.json"], "does not exist"),
        (["run", "{plan}", "--calibration", "/no/times.json"], "cannot be read"),
        (["check", "/no/plan.json"], "cannot be read"),
    ],
)
def test_paths_are_checked_before_the_work(
    argv: list[str], message: str, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and nothing was started."""
    assert main([part.format(plan=plan_file) for part in argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_interrupt_after_saving_says_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while drawing keeps the plan and says which files were written."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.timeline.Timeline.gantt", interrupted)
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "interrupted" in out
    assert f"wrote {path}, {tmp_path / 'plan.trace.json'} " in out
    assert main(["check", str(path)]) == 0
