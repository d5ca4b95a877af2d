"""DeDLOC, Appendix C: group size, schedule, error and simulation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from planner.lp.groups import (
    average_in_groups,
    expected_operations,
    group_schedule,
    group_size_table,
    group_sizes,
    optimal_group_size,
    rounds_needed,
    schedule_error,
)
from planner.problems import ProblemError


def simulated_operations(
    peers: int, group_size: int, failure_probability: float, wait_for_slowest: bool
) -> np.ndarray:
    """Group operations until the global average in 2000 simulated runs.

    Every peer fails independently in every attempt; a failure repeats the attempt of its own group
    and of no other.
    """
    rng = np.random.default_rng(1)
    sizes = np.array(group_sizes(peers, group_size))
    totals = np.zeros(2000)
    for trial in range(len(totals)):
        for _ in range(rounds_needed(peers, group_size)):
            attempts = np.zeros(len(sizes), dtype=np.int64)
            waiting = np.arange(len(sizes))
            while len(waiting):
                attempts[waiting] += 1
                lost = [(rng.random(sizes[g]) < failure_probability).any() for g in waiting]
                waiting = waiting[np.array(lost, dtype=bool)]
            totals[trial] += attempts.max() if wait_for_slowest else attempts[0]
    return totals


@pytest.mark.parametrize(
    ("peers", "chance", "message"),
    [
        (2.5, 0.1, "peers must be a whole number, found 2.5"),
        ("10", 0.1, "peers must be a whole number, found '10'"),
        (None, 0.1, "peers must be a whole number, found None"),
        (0, 0.1, "peers is 0; it must be >= 1"),
        (10, 1.5, "failure_probability is 1.5; it must be >= 0 and below 1"),
        (10, math.nan, "failure_probability is nan"),
        (10, "0.1", "failure_probability must be a number, found '0.1'"),
        (10, [0.1], "failure_probability must be a number"),
    ],
)
def test_invalid_input_raises(peers: int, chance: Any, message: str) -> None:
    """The message names the parameter and the value."""
    with pytest.raises(ProblemError, match=message.replace("[", r"\[")):
        optimal_group_size(peers, chance)


def test_rounds_must_be_a_count() -> None:
    """The number of rounds must be a non-negative integer."""
    rounds: Any
    for rounds, message in ((1.5, "rounds must be a whole number"), (-1, "rounds is -1")):
        with pytest.raises(ProblemError, match=message):
            schedule_error(8, 2, rounds)


def test_expected_operations_by_hand() -> None:
    """One group of n: 1 / (1 - p)^n. Two pairs twice: the mean of a maximum of two."""
    assert expected_operations(8, 8, 0.1) == pytest.approx(0.9**-8)
    # P(success) = s: E[max of two geometric] = 2 / s - 1 / (1 - (1 - s)^2)
    s = 0.8**2
    assert expected_operations(4, 2, 0.2) == pytest.approx(2 * (2 / s - 1 / (1 - (1 - s) ** 2)))
    assert expected_operations(4, 2, 0.2, wait_for_slowest=False) == pytest.approx(2 / s)
    assert expected_operations(100, 10, 0.0) == 2


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("failure", [0.0, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("peers", [2, 3, 7, 16, 31, 40])
def test_optimal_size_beats_every_other(peers: int, failure: Any, wait: Any) -> None:
    """Comparing only the smallest size per number of rounds loses nothing."""
    best = optimal_group_size(peers, failure, wait)
    value = expected_operations(peers, best, failure, wait)
    for m in range(2, peers + 1):
        assert value <= expected_operations(peers, m, failure, wait) * (1 + 1e-9)


def test_limits_of_the_optimal_size() -> None:
    """No failures: one group, as in all of the paper's experiments. Many failures: pairs."""
    assert optimal_group_size(40, 0.0) == 40
    assert optimal_group_size(33, 1e-4) == 33
    for n in (8, 64, 1024):
        assert optimal_group_size(n, 0.5) == 2
    assert optimal_group_size(1, 0.5) == 1
    assert optimal_group_size(1000, 0.9999) == 2


def test_table_falls_with_the_failure_rate() -> None:
    """As in Figure 8: the optimal size does not grow with p."""
    table = group_size_table((16, 64, 256), (0.0, 0.01, 0.1, 0.5))
    assert (np.diff(table, axis=1) <= 0).all()
    assert table[:, 0].tolist() == [16, 64, 256]


def test_rare_success_is_integrated() -> None:
    """The integral agrees with the exact value for a small probability of success."""
    one = expected_operations(7, 7, 0.62)
    assert one == pytest.approx(0.38**-7, rel=1e-3)
    two = expected_operations(14, 7, 0.7) / 2
    s = 0.3**7
    assert two == pytest.approx(2 / s - 1 / (1 - (1 - s) ** 2), rel=1e-3)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("peers", "size", "failure"), [(16, 4, 0.1), (10, 4, 0.05), (9, 9, 0.1)])
def test_simulation_agrees_with_the_formula(peers: int, size: int, failure: Any, wait: Any) -> None:
    """Mean of simulated runs within five standard errors."""
    runs = simulated_operations(peers, size, failure, wait)
    expected = expected_operations(peers, size, failure, wait)
    slack = 0.03 * expected if not wait else 0.0
    assert abs(runs.mean() - expected) < 5 * runs.std() / math.sqrt(2000) + slack


@pytest.mark.parametrize(("peers", "size"), [(16, 2), (16, 4), (27, 3), (12, 4), (36, 6), (8, 8)])
def test_schedule_is_exact_after_log_m_n_rounds(peers: int, size: int) -> None:
    """Powers of m, and products of factors up to m."""
    schedule = group_schedule(peers, size)
    assert len(schedule) == rounds_needed(peers, size)
    values = np.random.default_rng(0).normal(size=(peers, 3))
    averaged = values
    for groups in schedule:
        assert sorted(i for group in groups for i in group) == list(range(peers))
        assert max(map(len, groups)) <= size
        averaged = average_in_groups(averaged, groups)
    assert averaged == pytest.approx(np.broadcast_to(values.mean(axis=0), (peers, 3)))
    assert schedule_error(peers, size, len(schedule)) == 0


def test_error_shrinks_where_the_schedule_is_not_exact() -> None:
    """11 peers in groups of 4: a little is left after 2 rounds, and less after each repeat."""
    errors = [schedule_error(11, 4, r) for r in range(7)]
    assert errors[0] == pytest.approx(1)
    assert 0 < errors[2] < 0.2
    assert all(x > y for x, y in itertools.pairwise(errors))


def test_group_sizes_and_bad_input() -> None:
    """Even sizes; nonsense is refused."""
    assert group_sizes(10, 4) == (4, 3, 3)
    with pytest.raises(ProblemError, match="2 <= group_size <= n"):
        expected_operations(8, 1, 0.1)
    with pytest.raises(ProblemError, match="failure_probability is 1"):
        optimal_group_size(8, 1.0)
