"""Averaging in two levels: sums within sites, slices between them, and back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from planner.executor.comm.chunking import Chunking  # noqa: E402
from planner.executor.comm.codec import WireFormat  # noqa: E402
from planner.executor.comm.gradient_buffer import GradientBuffer  # noqa: E402
from planner.executor.comm.p2p import Sender  # noqa: E402
from planner.executor.comm.stage_averager import StageAverager  # noqa: E402
from planner.executor.runtime.stage_module import require_executable  # noqa: E402
from planner.network.dtype import Dtype  # noqa: E402
from planner.training_plan.choices import Codec  # noqa: E402
from planner.training_plan.error import PlanError  # noqa: E402
from tests.conftest import levels, make_plan, tiny_workload  # noqa: E402
from tests.executor.test_sharded_allreduce import Members  # noqa: E402
from tests.executor.test_train import execute, single  # noqa: E402


@settings(max_examples=40)
@given(
    st.integers(1, 400),
    st.lists(st.integers(1, 3), min_size=2, max_size=3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([(Codec.NONE, Dtype.FP32), (Codec.NONE, Dtype.BF16), (Codec.INT8, Dtype.FP32)]),
)
def test_all_get_the_same_sum(
    values: int, sizes: list[int], chunks: int, window: int, formats: tuple[Codec, Dtype]
) -> None:
    """Any sites, chunks and windows, with slices that end within the vector's elements."""
    codec, gradients = formats
    ends = np.cumsum([0, *sizes]).tolist()
    sites = [tuple(range(a, b)) for a, b in pairwise(ends)]
    rounds = levels(sites, tuple(np.full(len(sites), 1 / len(sites)).tolist()))
    generator = torch.Generator().manual_seed(values)
    vectors = [torch.randn(values, generator=generator) for _ in range(ends[-1])]
    exact = torch.stack(vectors).sum(0)
    members, chunking = Members(len(vectors)), Chunking(chunks, min(window, chunks))

    def work(rank: int) -> float:
        mine = [group for groups in rounds for group in groups if rank in group.members]
        wires = [WireFormat.from_codec(group.codec(codec), gradients) for group in mine]
        own = StageAverager(rank, mine, [chunking] * len(mine), wires, len(vectors), 1e9)
        peers = members.peers[rank]
        buffer = GradientBuffer(vectors[rank])
        return own.run(buffer, peers, Sender({}, peers.error_latch, {}))

    members.all_do(work)
    members.close()
    for vector in vectors:
        assert vector.numpy().tobytes() == vectors[0].numpy().tobytes()
    tolerance = (
        1e-5 if formats == (Codec.NONE, Dtype.FP32) else 0.1 * max(1.0, float(exact.abs().max()))
    )
    np.testing.assert_allclose(vectors[0], exact, atol=tolerance, rtol=0)


def test_training_is_that_of_a_single_process(tmp_path: Path) -> None:
    """Five peers in two sites; sites that do not exchange are refused."""
    plan = make_plan([[k] for k in range(5)], workload=tiny_workload(batch_samples=10))
    rounds = levels([(0, 1, 2), (3, 4)], (0.25, 0.75))
    with pytest.raises(PlanError, match="phases must be reduce, exchange, spread"):
        require_executable(plan.replace(averaging=((rounds[0], rounds[2]),)))
    with pytest.raises(PlanError, match="with weight 0 instead of 1"):
        require_executable(plan.replace(averaging=((rounds[0], rounds[1][:1], rounds[2]),)))
    plan = plan.replace(averaging=(rounds,))
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, _ = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=1e-6)
    assert len({rank["last"].tobytes() for rank in ranks}) == 1
