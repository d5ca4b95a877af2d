"""Where nothing fits, one line says what is too large and what would help; the advice helps."""

from __future__ import annotations

import re

import pytest

import planner as pl
from planner.workload.layers import Architecture, Family
from tests.conftest import random_network


def workload(sequence: int, words: int = 8000) -> pl.Workload:
    """Eight layers, whose logits need most."""
    arch = Architecture(Family.LLAMA, 8, 256, 8, 4, 704, words, sequence)
    return pl.Workload.transformer("small", arch, batch_samples=8)


def test_a_shorter_sequence_is_advised_and_fits() -> None:
    """With need, stage, microbatch and tokens."""
    cluster = pl.Cluster(random_network(4), pl.Devices(1e12, 1.5e8))
    with pytest.raises(pl.ProblemError, match="no layout fits the devices' memory") as found:
        pl.plan(cluster, workload(8192), stop=pl.Effort(0.1))
    line = str(found.value)
    assert "of 4 stages, the one with layers 6 to 7 and head needs" in line
    assert "microbatches of 1 sample of 8192 tokens, and the largest device has 150 MB" in line
    advised = re.search(r"--sequence (\d+)", line)
    assert advised is not None
    result = pl.plan(cluster, workload(int(advised[1])), stop=pl.Effort(0.1))
    assert result.plan is not None and pl.check(result.plan) == []


def test_nothing_is_advised_that_does_not_help() -> None:
    """The state alone is too large: no sequence is short enough; one layer a stage is the most."""
    cluster = pl.Cluster(random_network(2), pl.Devices(1e12, 1e6))
    with pytest.raises(pl.ProblemError, match="more devices, devices with more memory") as found:
        pl.plan(cluster, workload(256), stop=pl.Effort(0.1))
    assert "--sequence" not in str(found.value)
    cluster = pl.Cluster(random_network(8), pl.Devices(1e12, 1e6))
    with pytest.raises(pl.ProblemError, match="what would help: devices with more memory"):
        pl.plan(cluster, workload(256), stop=pl.Effort(0.1))
