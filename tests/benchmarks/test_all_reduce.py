"""Averaging beside a library's all-reduce: every way is run, and sums what it should."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

from benchmarks.all_reduce import __main__ as all_reduce  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at memory as Linux tells it")


def test_all_ways_are_measured() -> None:
    """The ranks themselves refuse a wrong sum."""
    row = all_reduce.measure(2, 1000, 1)
    assert list(row.found) == ["gloo", "exchange", "exchange, TCP"]
    assert all(row.seconds(way) > 0 for way in row.found)
    text = all_reduce.report([row], "--repeats 1", "0.0")
    assert "| executor, TCP |" in text and "| 2 | 0.004 MB |" in text


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as GPUs, two at least."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert {ranks for ranks, _ in all_reduce.cases_of(gpus=True)} == {8}
    assert all_reduce.cases_of(gpus=False) == all_reduce.CASES
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="two GPUs at least, found 1"):
        all_reduce.cases_of(gpus=True)
