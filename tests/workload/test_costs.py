"""Costs of a stage, computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from planner.checker.memory import stage_memory
from planner.workload.costs import split_costs, stage_costs
from planner.workload.layers import Architecture, Family, Layer
from planner.workload.workload import Workload


def workload() -> Workload:
    """Two layers of 10 and 20 parameters; microbatches of three samples."""
    return Workload(
        "w",
        stem=Layer("stem", 5, 1.0, 8.0, 2.0),
        layers=(Layer("a", 10, 100.0, 8.0, 4.0), Layer("b", 20, 200.0, 9.0, 6.0)),
        head=Layer("head", 7, 50.0, 0.0, 11.0),
        batch_samples=6,
        microbatch_samples=3,
    )


def test_costs_of_both_stages() -> None:
    """The stem belongs to the first layer, the head to the stage that runs it."""
    first, last = split_costs(workload(), [(0, 1), (1, 2)], head_stage=1)
    assert first.forward_flops == 3 * 101 and last.forward_flops == 3 * 200
    assert first.head_flops == 0 and last.head_flops == 3 * 3 * 50
    assert first.state_bytes == 15 * 16 and last.state_bytes == 27 * 16
    assert first.scratch_bytes == 0 and last.scratch_bytes == 33
    assert first.saved_bytes == 3 * 6 and last.saved_bytes == 3 * 6
    assert first.output_bytes == 24
    assert first.gradient_bytes == 15 * 4 and last.gradient_bytes == 27 * 4


def test_seconds_and_capacity() -> None:
    """F, B and H take one, two and three forward passes; memory in whole microbatches."""
    last = stage_costs(workload(), 1, 2, with_head=True)
    assert last.forward_s(100.0) == 6.0
    assert last.backward_s(100.0) == 12.0
    assert last.head_s(100.0) == 4.5
    assert last.busy_s(100.0) == 22.5
    need = last.need_bytes(2)
    assert need == 432 + 33 + 36
    assert last.room(need) == 2 and last.room(need - 1) == 1
    assert last.room(10.0) == 0
    free = stage_costs(workload().replace(layers=(Layer("a", 1, 1.0, 1.0, 0.0),)), 0, 1)
    assert free.saved_bytes == 6.0
    nothing = Workload(
        "n", Layer("s", 0, 0, 0, 0), (Layer("a", 1, 1, 1, 0),), Layer("h", 0, 0, 0, 0), 1
    )
    assert stage_costs(nothing, 0, 1).room(16.0) == math.inf
    assert stage_costs(nothing, 0, 1).room(15.0) == 0
    assert stage_costs(nothing, 0, 1).room(1e9) == pytest.approx(math.inf)


def test_recomputation_keeps_inputs_and_runs_f_again() -> None:
    """First stage: tokens. Last stage: its input and what H needs."""
    first, last = split_costs(workload(), [(0, 1), (1, 2)], 1, (True, True))
    assert first.backward_flops == 3 * first.forward_flops
    assert first.backward_s(101.0) == 9.0 and first.busy_s(101.0) == 12.0
    assert first.saved_bytes == 0 and first.scratch_bytes == 3 * 6
    assert last.saved_bytes == 3 * (8 + 9)
    # logits are more than what B makes again
    assert last.scratch_bytes == 33
    mine, plain = split_costs(workload(), [(0, 1), (1, 2)], 0, (0, 1))
    assert mine == split_costs(workload(), [(0, 1), (1, 2)], 0)[0]
    assert plain.saved_bytes == 3 * 8 and plain.scratch_bytes == 3 * 6
    # what does not change
    for name in ("forward_flops", "head_flops", "state_bytes", "output_bytes", "gradient_bytes"):
        assert getattr(last, name) == getattr(split_costs(workload(), [(0, 1), (1, 2)], 1)[1], name)


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_stored_inputs_are_not_encoded(codec: str) -> None:
    """Regardless of the message size."""
    plain = workload().replace(architecture=None)
    coded = plain.with_boundary_codec(codec)
    kept = [stage_costs(w, 1, 2, with_head=True, recomputed=1).saved_bytes for w in (plain, coded)]
    assert kept[1] == pytest.approx(kept[0])
    assert coded.held_bytes(0) == pytest.approx(8.0)
    sent = coded.layers[0].output_bytes
    assert sent == pytest.approx(8.0 * coded.boundary_ratio) and sent <= 8.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boundary_ratio": 0.5}, "boundary_ratio is 0.5 with boundary_codec none"),
        ({"boundary_ratio": 0, "boundary_codec": "int8"}, "it must be above 0"),
        ({"boundary_ratio": "half"}, "boundary_ratio is 'half'"),
    ],
)
def test_invalid_ratios(changes: dict[str, Any], message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(ValueError, match=message):
        workload().replace(**changes)


def test_large_vocabularies_run_the_head_in_chunks() -> None:
    """Equal chunks of at most 2**28 logits; the checker counts the same."""
    for sequence, vocabulary, samples, expected in (
        (8192, 128_256, 1, 2048),
        (8192, 128_256, 3, 683),
        (2048, 50_257, 1, 2048),
        (2048, 131_072, 1, 2048),
        (2048, 131_073, 1, 1024),
        (8, 10**6, 1000, 1),
        # two chunks of three tokens would have 300 million logits
        (5, 100_000_000, 1, 2),
        (2049, 131_072, 1, 1025),
    ):
        arch = Architecture(Family.LLAMA, 2, 64, 4, 4, 128, vocabulary, sequence)
        assert arch.head_tokens(samples) == expected
        workload = Workload.transformer(
            "vocabulary", arch, batch_samples=samples, microbatch_samples=samples
        )
        costs = stage_costs(workload, 0, 2, with_head=True)
        checked = stage_memory(workload, 0, 2, runs_head=True)
        assert costs.scratch_bytes == checked.operation[0]
        assert expected == 1 or samples * expected * vocabulary <= 2**28
