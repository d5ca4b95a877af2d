"""Codecs: exact lengths, and never further off than they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from planner.executor.comm.codec import WireFormat, decode, encode, message_length  # noqa: E402
from planner.executor.comm.group_roles import chunk_ranges  # noqa: E402
from planner.network.dtype import Dtype  # noqa: E402
from planner.training_plan.choices import Codec  # noqa: E402
from planner.training_plan.shares import share_ranges  # noqa: E402
from planner.workload.precision import Precision  # noqa: E402
from tests.executor.codec_error import error_bound  # noqa: E402


@given(st.integers(0, 3000), st.sampled_from(list(WireFormat)), st.integers(0, 1000))
def test_round_trip_is_within_the_stated_error(values: int, wire: WireFormat, seed: int) -> None:
    """Also for zeros and for values of very different size."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(values, generator=generator)
    vector *= 10 ** torch.randint(-6, 6, (values,), generator=generator)
    vector[: values // 3] = 0
    message = encode(vector, wire)
    assert message.dtype == torch.uint8
    assert len(message) == message_length(values, wire)
    off = (decode(message, values, wire) - vector).abs()
    assert bool((off <= error_bound(vector, wire) * (1 + 1e-5)).all())
    if wire is WireFormat.FP32:
        assert bool((off == 0).all())


def test_plan_and_codec_agree_on_the_bytes() -> None:
    """The factor in predictions is the length of real messages."""
    for codec in Codec:
        wire = WireFormat.from_codec(codec, Dtype.FP32)
        assert message_length(1 << 20, wire) == pytest.approx(4 * (1 << 20) * codec.wire_ratio)
    half = Precision.parse({"gradients": "bf16"}).gradients
    assert message_length(5, WireFormat.from_codec(Codec.NONE, half)) == 5 * half.bytes


@given(
    st.integers(0, 1000),
    st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda s: sum(s) > 0.01),
    st.integers(1, 7),
)
def test_shares_and_chunks_cover_the_vector_once(length: int, raw: list[float], count: int) -> None:
    """Each within one value of its exact share."""
    shares = [x / sum(raw) for x in raw]
    parts = share_ranges(length, shares)
    flat = [i for part in parts for piece in chunk_ranges(part, count) for i in range(*piece)]
    assert flat == list(range(length))
    for (start, stop), share in zip(parts, shares, strict=True):
        assert abs((stop - start) - share * length) <= 1 + 1e-6
