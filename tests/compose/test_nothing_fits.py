"""Where nothing fits, one line says what is too large and what would help; the advice helps."""

from __future__ import annotations

import re

import numpy as np
import pytest

import planner as pl
from planner.compose.layer_split import evenly_filled
from planner.workload.costs import stage_costs
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
    assert "of 4 stages, the one with layer 7 and head needs" in line
    assert "microbatches of 1 sample of 8192 tokens, and its device has 150 MB" in line
    advised = re.search(r"--sequence (\d+)", line)
    assert advised is not None
    result = pl.plan(cluster, workload(int(advised[1])), stop=pl.Effort(0.1))
    assert result.plan is not None and pl.check(result.plan) == []


def test_nothing_is_advised_that_does_not_help() -> None:
    """The state alone is too large: no sequence is short enough; one layer a stage is the most."""
    cluster = pl.Cluster(random_network(2), pl.Devices(1e12, 1e6))
    with pytest.raises(pl.ProblemError, match="what would help: devices with more memory") as found:
        pl.plan(cluster, workload(256), stop=pl.Effort(0.1))
    assert "--sequence" not in str(found.value)


def test_more_devices_are_advised_where_layers_can_be_divided() -> None:
    """Two devices need 3% more than they have; a third one is enough."""
    small = workload(256)
    memory = 0.97 * evenly_filled(small, [1.0, 1.0], [(False, True)] * 2).share
    with pytest.raises(pl.ProblemError, match="more devices, devices with more memory"):
        pl.plan(pl.Cluster(random_network(2), pl.Devices(1e12, memory)), small, stop=pl.Effort(0.1))
    cluster = pl.Cluster(random_network(3), pl.Devices(1e12, memory))
    assert pl.plan(cluster, small, stop=pl.Effort(0.1)).plan is not None
    with pytest.raises(pl.ProblemError, match=r"another number of stages \(--stages 3\)"):
        pl.plan(cluster, small, stages=2, wiring="flow", stop=pl.Effort(0.1))


@pytest.mark.parametrize("open_", [True, False])
@pytest.mark.parametrize("stages", [5, 30])
def test_a_model_that_fits_only_unevenly_is_planned(stages: int, open_: bool) -> None:
    """Embedding and head are large: stages of even layers do not fit, nor do fewer."""
    arch = Architecture(Family.LLAMA, stages * 2, 64, 4, 4, 176, 2000, 64)
    deep = pl.Workload.transformer("deep", arch, batch_samples=2)
    memory = 1.001 * evenly_filled(deep, [1.0] * stages, [(False, True)] * stages).share
    even = deep.even_split(stages)
    first = stage_costs(deep, *even[0], recompute=True)
    last = stage_costs(deep, *even[-1], with_head=True, recompute=True)
    assert memory < max(first.need_bytes(1), last.need_bytes(1))
    cluster = pl.Cluster(random_network(stages), pl.Devices(1e12, memory))
    if open_:
        result = pl.plan(cluster, deep, stop=pl.Effort(0.2))
    else:
        result = pl.plan(cluster, deep, stages=stages, recompute="all", stop=pl.Effort(0.2))
    assert result.plan is not None and pl.check(result.plan) == []


def test_unlike_devices_are_filled_by_their_memory() -> None:
    """Even stages fit none of the small devices, which the large ones need."""
    arch = Architecture(Family.LLAMA, 40, 64, 4, 4, 176, 2000, 64)
    deep = pl.Workload.transformer("deep", arch, batch_samples=2)
    parts = np.array([1.0, 1, 1, 6, 6, 1, 1])
    share = evenly_filled(deep, parts[[3, 0, 1, 2, 5, 6, 4]].tolist(), [(False, True)] * 7).share
    cluster = pl.Cluster(random_network(7), pl.Devices(np.full(7, 1e12), 1.02 * share * parts))
    result = pl.plan(cluster, deep, stop=pl.Effort(0.2))
    assert result.plan is not None and pl.check(result.plan) == []
