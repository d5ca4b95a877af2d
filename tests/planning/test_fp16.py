"""fp16: the default where a GPU has no bf16, and the exchange that detects overflow is priced."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

import planner as pl
from planner.cli.main import main
from planner.simulator.simulator import predict, simulate
from planner.training_plan.model import TrainingPlan
from planner.workload.precision import Precision
from tests.conftest import make_plan, tiny_workload
from tests.simulator.reference import Reference

GRID = [[0, 3, 4], [2, 1, 5]]


def planned(
    precision: str, grid: list[list[int]] = GRID, clip: float | None = None
) -> TrainingPlan:
    """The same plan in a 16-bit format: with the same bytes."""
    like = tiny_workload()
    workload = pl.Workload.transformer(
        like.name, like.architecture, precision=precision, batch_samples=12
    )
    return make_plan(grid, workload=workload, clip=clip)


def test_the_exchange_of_the_norm_is_priced_without_clipping() -> None:
    """By simulator and checker: as much as clipping takes in bf16, and nothing with one stage."""
    half, clipped, free = planned("fp16"), planned("bf16", clip=1.0), planned("bf16")
    assert predict(half) == predict(clipped)
    assert predict(half).step_s > predict(free).step_s
    slow = Reference(half, [0] * 7, averages=True).run()
    expected = (slow.step_end[5] - slow.step_end[3]) / 2
    assert simulate(half).step_s == pytest.approx(expected, rel=1e-9)
    assert pl.check(half.replace(predicted=predict(half))) == []
    violations = pl.check(half.replace(predicted=predict(free)))
    assert any("predicted" in str(violation) for violation in violations)
    alone = [[0], [1]]
    assert predict(planned("fp16", alone)) == predict(planned("bf16", alone))
    assert planned("fp16").clip is None and planned("fp16").norm_devices
    assert not planned("bf16").norm_devices


def test_the_formats_bytes_are_those_of_bf16() -> None:
    """Memory, messages and averaging; files keep the format."""
    half, like = planned("fp16").workload, planned("bf16").workload
    assert half.replace(precision=like.precision) == like
    assert half.precision.to_dict()["compute"] == "fp16" and half.precision.scales_loss
    assert not Precision.parse("bf16").scales_loss
    assert Precision.parse({"compute": "fp32", "messages": "fp16"}).scales_loss
    with pytest.raises(ValueError, match=r"precision\.gradients is fp16; .* give fp32 or bf16"):
        Precision.parse({"gradients": "fp16"})
    assert pl.Workload.from_dict(half.to_dict()) == half


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        pytest.param("V100,V100", (), "fp16", id="V100"),
        pytest.param("A100,A100", (), "bf16", id="A100"),
        pytest.param("A100,V100", (), "fp16", id="mixed"),
        pytest.param("A100,V100", ("--precision", "fp32"), "fp32", id="mixed, fp32"),
        pytest.param("A100,A100", ("--precision", "fp16"), "fp16", id="A100, fp16"),
        pytest.param("A100,V100 that only sums", (), "bf16", id="no compute on the V100"),
    ],
)
def test_the_default_format(
    rows: str,
    options: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """bf16 where all GPUs that compute have it, else fp16 for all, which is reported."""
    words = command(rows, tmp_path)
    assert main([*words, *options]) == 0
    plan = pl.load_plan(tmp_path / "plan.json")
    formats = {"compute": expected, "messages": expected}
    assert asdict(plan.workload.precision) == asdict(Precision.parse(formats))
    out, said = capsys.readouterr()
    note = "plans for fp16 with dynamic loss scaling: device 'O"
    assert (note in said) == (expected == "fp16" and not options)
    assert ("uses fp16 with dynamic loss scaling" in " ".join(out.split())) == (expected == "fp16")
    # the devices file names GPUs, and the price of a step includes traffic
    assert "without tflops are assumed to attain 40% of their peak FLOP/s" in " ".join(out.split())
    if expected == "fp16":
        usual = pl.Devices.of_gpu("A100", dtype="fp16")
        assert usual.flops == pl.Devices.of_gpu("A100").flops


def test_bf16_on_a_gpu_without_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that names the remedy."""
    assert main([*command("A100,V100", tmp_path), "--precision", "bf16"]) == 2
    said = capsys.readouterr().err
    assert (
        "has a V100, which has no bf16, the format of compute; plan with --precision fp16" in said
    )


def command(rows: str, folder: Path) -> list[str]:
    """``planner plan`` for two devices."""
    file = folder / "devices.csv"
    lines = []
    for name, row in zip(("Oregon", "Ohio"), rows.split(","), strict=True):
        gpu, _, only_sums = row.partition(" ")
        lines.append(f"{name},{gpu},{'no' if only_sums else ''}")
    file.write_text("\n".join(["name,gpu,can_compute", *lines]) + "\n")
    words = f"plan --network aws8_dtfm_worldwide_2022 --devices {file} --workload gpt2-tiny "
    words += f"--batch-samples 8 --effort 0.2 --no-pictures --out {folder / 'plan.json'}"
    return words.split()
