"""Formats are inputs of a plan and determine bytes and FLOP/s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.network.devices_file import load_devices
from planner.network.dtype import Dtype
from planner.network.gpus import GPUS
from planner.training_plan.error import PlanError
from planner.training_plan.file import from_dict, load_plan, save_plan
from planner.training_plan.model import hash_of
from planner.workload.costs import stage_costs
from planner.workload.precision import Precision
from planner.workload.workload import Workload
from tests.conftest import make_plan, random_network, tiny_workload

MIXED = {"compute": "fp32", "messages": "bf16"}


def test_bytes_by_format() -> None:
    """Counted by hand for gpt2-tiny: 1024 tokens of 128 values, 50257 words."""
    for precision, kept, sent in (("bf16", 2, 2), ("fp32", 4, 4), (MIXED, 4, 2)):
        w = Workload.preset("gpt2-tiny", precision=precision)
        costs = stage_costs(w, 1, 3, recomputed=2, with_head=True)
        assert costs.output_bytes == 1024 * 128 * sent
        # recomputation keeps input and output as they are computed with, whatever is sent
        assert costs.saved_bytes == 2 * 1024 * 128 * kept
        # two layers of 16 activations each, and the stage's output
        assert stage_costs(w, 1, 3).saved_bytes == (2 * 16 + 1) * 1024 * 128 * kept
        # logits, and their gradient or a block in fp32 and its log-softmax; input and norm
        logits, block = 1024 * 50257, 2**24
        head = kept * logits + max(kept * logits, (8 if kept == 2 else 4) * block)
        head += 2 * 1024 * 128 * kept
        assert stage_costs(w, 0, 4, with_head=True).scratch_bytes == head
        # B of a layer: around GELU two of 512 and three of 128; one matrix; four messages
        layer = (1024 * (2 * 512 + 3 * 128) + 128 * 512) * kept + 4 * 1024 * 128 * sent
        assert stage_costs(w, 1, 3).scratch_bytes == layer
        rounded = 2 * stage_costs(w, 1, 3).gradient_bytes / 4 if kept == 2 else 0
        assert stage_costs(w, 1, 3).state_bytes == stage_costs(w, 1, 3).gradient_bytes * 4 + rounded
        assert (w.gradient_bytes_per_parameter, w.state_bytes_per_parameter) == (4, 16)
        assert pl.check(make_plan([[0, 1]], workload=w.replace(batch_samples=2))) == []
    half = Workload.preset("gpt2-tiny", precision={"gradients": "bf16"})
    assert half.gradient_bytes_per_parameter == 2
    assert half.precision.compute is Dtype.BF16


def test_boundary_codec_depends_on_the_message_format() -> None:
    """int8 has the same size for both formats; memory does not change."""
    sizes = set()
    for precision in ("bf16", "fp32", MIXED):
        w = Workload.preset("gpt2-tiny", precision=precision)
        coded = w.with_boundary_codec("int8")
        sizes.add(round(coded.layers[0].output_bytes, 6))
        assert coded.held_bytes(0) == pytest.approx(w.held_bytes(0))
        assert Workload.from_dict(json.loads(json.dumps(coded.to_dict()))) == coded
    assert sizes == {1024 * 128 * (1 + 4 / 1024)}


def test_presets_are_unchanged() -> None:
    """16-bit activations, 32-bit gradients, 16 bytes of state per parameter."""
    for name in ("gpt3-1.3b", "albert-large", "resnet-50", "swarm-base"):
        w = Workload.preset(name)
        assert w.precision == Precision.parse("bf16") == Precision()
        assert (w.gradient_bytes_per_parameter, w.state_bytes_per_parameter) == (4, 16)
    assert Workload.preset("gpt3-1.3b").layers[0].output_bytes == 2048 * 2048 * 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("fp8", "precision 'fp8' is unknown; choose one of bf16, fp16, fp32"),
        ({"compute": "fp8"}, "precision.compute 'fp8' is unknown"),
        ({"colour": "bf16"}, "precision has no field 'colour'; it has compute, messages"),
        ({"parameters": "bf16"}, "precision.parameters is bf16; parameters and optimizer state"),
        (3, "precision must be a mapping, found 3"),
    ],
)
def test_invalid_formats_are_rejected(value: Any, said: str) -> None:
    """One line each."""
    with pytest.raises(ValueError, match=said) as found:
        Workload.preset("gpt2-tiny", precision=value)
    assert "\n" not in str(found.value)


def test_flops_depend_on_the_format(tmp_path: Path) -> None:
    """A GPU's peak for the format; measured FLOP/s stay."""
    net = random_network(2)
    for dtype, peak in (("bf16", 312e12), ("fp32", 19.5e12)):
        assert GPUS["A100"].peak(Dtype(dtype)) == peak
        assert pl.Devices.of_gpu("A100", 0.5, dtype).flops == 0.5 * peak
        path = tmp_path / "devices.csv"
        path.write_text(f"name,gpu,tflops\n{net.ids[0]},A100,\n{net.ids[1]},A100,7\n")
        cluster = load_devices(path, net, utilization=0.5, dtype=dtype)
        assert cluster.flops.tolist() == [0.5 * peak, 7e12]
    with pytest.raises(ValueError, match="dtype 'int8' is unknown; choose one of bf16, fp16, fp32"):
        pl.Devices.of_gpu("A100", dtype="int8")
    for gpu in GPUS.values():
        assert 0 < gpu.fp32_flops < gpu.peak_flops


def without_precision(data: dict[str, Any]) -> dict[str, Any]:
    """As written by earlier releases."""
    del data["workload"]["precision"]
    hashed = {
        name: dict(data[name]) if isinstance(data[name], dict) else data[name]
        for name in ("seed", "network", "devices", "workload", "compute_times", "assignment")
    }
    hashed |= {name: data[name] for name in ("paths", "averaging", "wiring", "sync")}
    hashed["network"] = {k: data["network"][k] for k in ("hash", "regions")}
    return data | {"content_hash": hash_of(hashed)}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_formats_of_older_files(precision: str, tmp_path: Path) -> None:
    """They are derived from bytes; the file's own hash is verified."""
    whole = tiny_workload()
    workload = Workload.transformer(
        "tiny", whole.architecture, batch_samples=8, precision=precision
    )
    plan = make_plan([[0, 1]], workload=workload)
    data = without_precision(json.loads(json.dumps(plan.to_dict())))
    old = from_dict(data)
    assert old.workload == workload and old.workload.precision == Precision.parse(precision)
    save_plan(old, tmp_path / "new.json")
    assert load_plan(tmp_path / "new.json").content_hash == plan.content_hash
    assert '"precision":{"compute":"' + precision in (tmp_path / "new.json").read_text()
    data["workload"]["head"]["parameters"] += 1
    with pytest.raises(PlanError, match="content_hash"):
        from_dict(data)


def test_formats_are_part_of_the_hash() -> None:
    """Plans that differ only in formats have different hashes."""
    plan = make_plan([[0, 1]])
    other = plan.replace(workload=plan.workload.replace(precision=Precision.parse("bf16")))
    assert other.content_hash != plan.content_hash
    data = plan.to_dict()
    data["workload"]["precision"]["compute"] = "fp8"
    with pytest.raises(PlanError, match=r"workload\.precision\.compute: .*bf16"):
        from_dict(json.loads(json.dumps(data)))
