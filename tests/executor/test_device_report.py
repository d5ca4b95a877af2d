"""What a run tells beside its losses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.cli import run_command
from planner.executor.runtime.flops_counter import FlopsCounter
from planner.executor.runtime.run_summary import summary
from planner.network.gpus import CALLED, GPUS
from planner.training_plan.choices import Codec
from planner.training_plan.file import save_plan
from planner.utils.text import quantity
from tests.conftest import make_plan, tiny_workload

torch = pytest.importorskip("torch")

from planner.executor.comm.losses import LossCollector  # noqa: E402
from planner.executor.launch.local import local_environment, run_local  # noqa: E402
from planner.executor.runtime.device_report import peak_flops  # noqa: E402
from planner.executor.runtime.evaluate import EvaluationResult  # noqa: E402
from planner.executor.runtime.progress import Progress  # noqa: E402
from planner.executor.runtime.records import StepRecord, write_records  # noqa: E402
from tests.executor.test_train import skipping_and_swapping_plan  # noqa: E402

STEPS = 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_diverged_run_tells_json(loss: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Null where a number is not finite, in events and in the command's data; text says so."""
    plan = make_plan([[0, 1]], workload=tiny_workload())
    losses = LossCollector({}, has_own=True, steps=range(2))
    progress = Progress(1.0, events=True, flops=FlopsCounter(plan))
    losses.report(0, loss)
    for step in range(2):
        progress.step(StepRecord(step, False, step, step + 1), losses)
    losses.report(1, loss)
    progress.end(losses)
    progress.evaluated(EvaluationResult(1, "all stages", loss))
    lines = capsys.readouterr().out.splitlines()
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [e["event"] for e in events] == ["step", "step", "loss", "evaluated"]
    assert all(e["loss"] is None for e in events) and events[0]["loss_step"] == 0
    for as_json in (True, False):
        told = run_command._EventPrinter(plan, plan.workload, Path(), [1.0], as_json, 2)
        for line in lines:
            told.take(line)
        run_command._summary(plan, told, "diverged", as_json)
        said = capsys.readouterr().out
        if as_json:
            data = json.loads(said, parse_constant=pytest.fail)
            assert [s["loss"] for s in data["steps"]] == [None, None]
            (evaluated,) = data["evaluated"]
            assert evaluated["loss"] is None and evaluated["perplexity"] is None
        else:
            assert said.count("not finite") >= 3 and "no loss yet" not in said


def test_flops_are_those_of_what_microbatches_visit() -> None:
    """By hand: 8 samples through all; paths that skip do less; recomputation adds nothing."""
    plan = make_plan([[0, 1]])
    w = plan.workload
    flops = FlopsCounter(plan.replace(recompute=(True, True)), 1e12)
    assert flops.tokens(0) == 8 * 16
    assert flops.flops(5) == pytest.approx(3 * 8 * w.forward_flops)
    assert flops.mfu(0, 0.5) == pytest.approx(flops.flops(0) / 0.5e12)
    assert FlopsCounter(plan).mfu(0, 0.5) is None
    skipping = skipping_and_swapping_plan()
    w = skipping.workload
    # 4 + 4 + 6 + 6 layers less those that lie in stages not visited
    stage = [w.stage(*layers).forward_flops for layers in skipping.stage_layers]
    visited = [(0, 1), (0, 2), (0, 2, 1), (0, 1, 2)]
    by_hand = sum(w.head.forward_flops + sum(stage[d] for d in path) for path in visited)
    assert FlopsCounter(skipping).flops(0) == pytest.approx(3 * by_hand)
    assert FlopsCounter(skipping).flops(0) < 3 * 4 * w.forward_flops


def test_a_gpu_counts_once_and_an_unknown_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one H100 and one on an A100; helpers do not count; no guess for others."""
    plan = make_plan([[0, 1, 2]], workload=tiny_workload())

    def peak(told: list[list[str]], gpu: Any = ("NVIDIA H100 80GB HBM3", "u")) -> float | None:
        found = SimpleNamespace(name=gpu[0], uuid=gpu[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        mine: list[str] = []

        def all_gather(name: str, text: str) -> list[str]:
            mine.append(text)
            return [text, *(json.dumps([name, f"m {gpu}"]) for name, gpu in told)]

        ranks: Any = SimpleNamespace(rank=0, all_gather=all_gather)
        monkeypatch.setattr("planner.executor.comm.device_identity.machine_id", lambda: "m")
        return peak_flops(plan, ranks, torch.device("cuda", 0))

    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
    assert peak([[h100, "u"], [a100, "v"]]) == pytest.approx(66.9e12 + 19.5e12)
    assert peak([[h100, "w"], [a100, "v"]]) == pytest.approx(2 * 66.9e12 + 19.5e12)
    assert peak([["NVIDIA H100 NVL", "w"], [a100, "v"]]) is None
    assert peak([["", ""], [a100, "v"]]) is None
    assert set(CALLED.values()) == set(GPUS)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_memory_and_bytes_are_told_at_the_end(precision: str, tmp_path: Path) -> None:
    """Bytes sent as the plan has them, peaks near what was expected; rates with every step."""
    w = tiny_workload(batch_samples=6)
    workload = type(w).transformer(w.name, w.architecture, precision=precision, batch_samples=6)
    plan = make_plan([[0, 1], [2, 3]], workload=workload)
    save_plan(plan, tmp_path / "plan.json")
    command = ["-m", "planner.executor", str(tmp_path / "plan.json"), "--device", "cpu"]
    lines: list[str] = []
    names = list(plan.cluster.network.ids)
    command += ["--events", "--steps", str(STEPS), "--devices", *names]
    code, _ = run_local([sys.executable, *command], names, local_environment(), lines.append, print)
    assert code == 0
    events = [json.loads(line) for line in lines]
    steps = [e for e in events if e["event"] == "step"]
    assert len(steps) == STEPS
    for step in steps:
        assert step["tokens_per_s"] == pytest.approx(6 * 16 / step["took_s"])
        assert step["predicted_s"] == plan.predicted.step_s and "mfu" not in step
    (last,) = (e["devices"] for e in events if e["event"] == "devices")
    assert [d["device"] for d in last] == names
    sent = {(d["device"], to): size for d in last for to, size in d["sent_bytes"].items()}
    # three microbatches a pipeline and step; no frame around a message of the pipeline
    each = plan.workload.layers[0].output_bytes
    assert plan.codec is Codec.NONE
    for a, b in (("0", "1"), ("1", "0"), ("2", "3"), ("3", "2")):
        assert sent[a, b] == STEPS * 3 * each
    vector = plan.workload.gradient_bytes(plan.stage_layers, plan.head_stage)
    for a, b, stage in (("0", "2", 0), ("2", "0", 0), ("1", "3", 1), ("3", "1", 1)):
        # each gives half and returns half, in chunks with heads of 4 bytes
        assert vector[stage] * STEPS < sent[a, b] < 1.02 * vector[stage] * STEPS + 100
    for device in last:
        assert device["peak_is"] == "tensors kept between operations"
        # expected are logits, messages and a margin too, in a model of some kilobytes
        assert device["planned_bytes"] < device["expected_bytes"]
        assert 0.7 * device["planned_bytes"] < device["peak_bytes"] < device["expected_bytes"]
    largest = max(last, key=lambda device: device["peak_bytes"])
    assert summary(last).startswith(f"memory {quantity(largest['peak_bytes'], 'B')} at most, on ")
    total = quantity(sum(sent.values()), "B")
    assert summary(last).endswith(f" and all else), {total} sent in all")
    planned = f"the plan counts {quantity(largest['planned_bytes'], 'B')} for its stage"
    assert f"(tensors kept between operations; {planned}, " in summary(last)


def test_the_norm_of_gradients_is_told_where_it_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that a bound for clipping can be chosen."""
    from planner.executor.runtime.progress import Progress
    from planner.executor.runtime.records import StepRecord

    for norm in (2.5, None):
        Progress(1.0, True).step(StepRecord(0, False, 0.0, 1.0, gradient_norm=norm), None)
        event = json.loads(capsys.readouterr().out)
        assert event.get("gradient_norm") == norm
    Progress(1.0, False).step(StepRecord(0, False, 0.0, 1.0, gradient_norm=2.5), None)
    assert "norm 2.5" in capsys.readouterr().out


def test_a_skipped_step_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """By the executor and by ``planner run``, which reads its events."""
    from planner.cli.run_command import _line
    from planner.executor.runtime.progress import Progress
    from planner.executor.runtime.records import StepRecord

    said = "skipped; loss scale 512 from now on"
    for norm, skipped in ((2.5, False), (float("inf"), True)):
        for events in (False, True):
            record = StepRecord(0, False, 0.0, 1.0, gradient_norm=norm, loss_scale=512.0)
            Progress(1.0, events).step(record, None)
            out = capsys.readouterr().out
            if events:
                out = _line({"tokens_per_s": 1.0, **json.loads(out)}, 1.0)
            assert (said in out) == skipped
    # without loss scaling the run has diverged
    diverged = {"step": 0, "loss": None, "loss_step": 0, "took_s": 1.0, "tokens_per_s": 1.0}
    assert "norm not finite" in _line(diverged | {"gradient_norm": None}, 1.0)


def test_records_of_a_run_that_diverged(tmp_path: Path) -> None:
    """A norm that is no number is null, as in events: the run does not fail at its end."""
    records = [
        StepRecord(step, False, gradient_norm=norm)
        for step, norm in enumerate((1.5, math.inf, math.nan))
    ]
    write_records(tmp_path / "record.json", 0, records)
    steps = json.loads((tmp_path / "record.json").read_text())["steps"]
    assert [step["norm"] for step in steps] == [1.5, None, None]
