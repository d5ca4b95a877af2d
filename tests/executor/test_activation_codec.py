"""Activations and gradients in fewer bits: what arrives, how long it is, what is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.boundary_codec import BoundaryCodec
from tests.conftest import make_plan, tiny_workload
from tests.executor.test_train import TOLERANCE, execute, expected_gradient, single

torch = pytest.importorskip("torch")

from planner.executor.comm.device_backend import HOST  # noqa: E402
from planner.executor.runtime.activation_codec import ActivationCodec  # noqa: E402

CODECS = [codec for codec in BoundaryCodec if codec is not BoundaryCodec.NONE]


@pytest.mark.parametrize(
    ("codec", "shape"),
    [
        *(pytest.param(codec, "1f1b, last", marks=pytest.mark.slow) for codec in CODECS),
        (BoundaryCodec.INT8, "head first, recomputing"),
        pytest.param(BoundaryCodec.INT8, "2 x 2", marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_one_process_that_rounds_at_the_same_places(
    codec: BoundaryCodec, shape: str, tmp_path: Path
) -> None:
    """20 steps; messages have the priced bytes, both ways; one pipeline is equal bit by bit."""
    # two samples of 16 tokens in 32 values are one block
    unencoded = tiny_workload("llama", microbatch_samples=2)
    grid = [[0, 3], [2, 1]] if shape == "2 x 2" else [[2, 0, 1]]
    plan = make_plan(
        grid,
        head="first" if "first" in shape else "last",
        schedule="1f1b",
        workload=unencoded.with_boundary_codec(codec),
    )
    if "recomputing" in shape:
        plan = plan.replace(recompute=(True, True, True))
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    priced = plan.workload.layers[0].output_bytes * plan.workload.microbatch_samples
    assert {int(size) for found in ranks for size in found["sent"]} == {priced}
    usual, _ = single(plan.replace(workload=unencoded))
    assert 0 < np.abs(np.array(usual) / losses - 1).max() < 0.02
    if shape == "2 x 2":
        # sums in another order end a level off here and there
        np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=1e-4)
        return
    assert ranks[0]["losses"].tolist() == pytest.approx(losses, rel=1e-7)
    for rank, found in enumerate(ranks):
        for when in ("first", "last"):
            want = expected_gradient(plan, rank, gradients[when])
            np.testing.assert_allclose(found[when], want, atol=1e-6 * np.abs(want).max(), rtol=0)


@pytest.mark.slow
def test_with_local_steps_and_bf16(tmp_path: Path) -> None:
    """8-bit boundaries of a plan that averages every 5 steps, and of one that computes in bf16."""
    from planner.workload.workload import Workload
    from tests.executor.test_local_steps import EPS, apart

    plan = make_plan([[0, 3], [2, 1]], workload=tiny_workload().with_boundary_codec("int8"))
    plan = plan.replace(sync=Sync(5, OuterOptimizer()))
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids), eps=EPS)
    np.testing.assert_allclose(ranks[0]["losses"], apart(plan, eps=EPS)[0], rtol=1e-4)
    arch = tiny_workload().architecture
    half = Workload.transformer("half", arch, batch_samples=8, precision="bf16")
    plan = make_plan([[2, 0, 1]], workload=half.with_boundary_codec("int8"))
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    np.testing.assert_allclose(ranks[0]["losses"], single(plan)[0], rtol=TOLERANCE)


@pytest.mark.parametrize("codec", list(BoundaryCodec))
def test_what_arrives_is_what_was_sent_but_for_rounding(codec: BoundaryCodec) -> None:
    """Gradients of a large batch too, which fp16 as it is would lose."""
    workload = tiny_workload(batch_samples=1 << 16)
    boundary = ActivationCodec(workload.with_boundary_codec(codec))
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(boundary.shape, generator=generator)
    for size, gradient in ((1.0, False), (1e-8, True)):
        message = boundary.encode_message(size * values, gradient=gradient)
        room = HOST.host_buffer(*boundary.message)
        assert message.nbytes == room.nbytes and message.dtype == room.dtype
        found = boundary.decode_message(message, torch.float32, gradient=gradient)
        off = float((found - size * values).abs().max() / size)
        assert off <= {"none": 0, "bf16": 0.016, "fp16": 0.002, "int8": 0.016, "int4": 0.3}[codec]
        assert found.shape == values.shape and (off > 0) is (codec is not BoundaryCodec.NONE)
    # the first stage hands nobody a gradient
    assert boundary.encode_message(torch.empty(0), gradient=True).nbytes == 0
    many = boundary.encode_message(torch.full(boundary.shape, 1e6), gradient=False)
    assert bool(boundary.decode_message(many, torch.float32, gradient=False).isfinite().all())


def test_bytes_on_the_wire_are_those_of_the_price() -> None:
    """Whole blocks exactly; half a block has a scale of its own."""
    for samples, beyond in ((2, 0), (6, 0), (1, 2), (3, 2)):
        for codec in CODECS:
            workload = tiny_workload(batch_samples=6, microbatch_samples=samples)
            coded = workload.with_boundary_codec(codec)
            boundary = ActivationCodec(coded)
            priced = coded.layers[0].output_bytes * samples
            more = beyond if codec in (BoundaryCodec.INT8, BoundaryCodec.INT4) else 0
            assert HOST.host_buffer(*boundary.message).nbytes == priced + more
