"""Compiled layers and head train as those that are not compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import make_plan, tiny_workload

torch = pytest.importorskip("torch")

from tests.executor.test_device_collectives import losses_of  # noqa: E402


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a compiler here")
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_losses_are_those_without_compile(kind: str, gpus: int, tmp_path: Path) -> None:
    """Two stages, five steps on the CPU; with several GPUs compiled between collectives."""
    workload = tiny_workload(kind).replace(tensor_parallel=gpus)
    plan = make_plan([[0, 1]], workload=workload)
    expected, _ = losses_of(plan, tmp_path)
    found, _ = losses_of(plan, tmp_path, "--compile")
    assert found == pytest.approx(expected, rel=1e-5)
