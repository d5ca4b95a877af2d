"""Waves of a batch, against solving one wave and counting by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.problems.waves import count_waves
from tests.mapf.conftest import random_problem, reference


def test_skipping_needs_fewer_waves() -> None:
    """SkipPipe's 20 devices, memory 3, stages of 5 and 3: by hand.

    Full: a stage of 3 devices holds 9, so each of 5 start devices sends one at a time. 4 of 6
    stages: 15 microbatches visit the other stages 45 times, 9 each; 12 from each need 4 waves.
    """
    problem = reference(microbatches_per_start=12, live_memory=True)
    short, full = count_waves(problem), count_waves(problem, 6)
    assert (short.per_start, short.count, short.visits_per_device) == (3, 4, 12.0)
    assert (full.per_start, full.count, full.visits_per_device) == (1, 12, 18.0)


@settings(max_examples=60)
@given(
    st.integers(0, 100),
    st.sampled_from([(2, 2, 2, 1), (1, 1, 1), (2, 1, 1), (1,), (3, 2, 1, 1, 1)]),
    st.data(),
)
def test_wave_is_the_largest_feasible_one(
    seed: int, sizes: tuple[int, ...], data: st.DataObject
) -> None:
    """Waves of this size and smaller ones have paths, one microbatch more per start has none."""
    k = data.draw(st.integers(1, len(sizes)))
    memory = data.draw(st.lists(st.integers(0, 4), min_size=sum(sizes), max_size=sum(sizes)))
    each = data.draw(st.integers(1, 6))
    problem = random_problem(seed, sizes, k, memory, each)

    def possible(size: int) -> bool:
        wave = problem.replace(microbatches_per_start=size)
        return pl.solve_paths(wave, pl.MaxIterations(0)).plan is not None

    largest = max((size for size in range(1, each + 1) if possible(size)), default=0)
    if largest == 0:
        with pytest.raises(ValueError, match="does not hold one microbatch from every start"):
            count_waves(problem)
        return
    found = count_waves(problem)
    assert found.per_start == largest
    assert found.count == -(-each // largest)
    assert all(possible(size) for size in range(1, largest + 1))
