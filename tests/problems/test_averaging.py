"""Averaging problem: validation and the exact meaning of its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.problems import AveragingProblem, ProblemError
from tests.lp.averaging_oracle import limits_of, random_problem


def build(**changes: Any) -> Any:
    fields = {
        "samples_per_s": [1.0, 2.0, 0.0],
        "upload_bytes_per_s": [1.0, 2.0, 3.0],
        "download_bytes_per_s": [2.0, 2.0, 3.0],
        "batch_size": 8,
        "gradient_bytes": 4.0,
    }
    return AveragingProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_s": [1.0, -1.0, 0.0]}, "samples_per_s of peer 1 is -1; it must be >= 0"),
        ({"samples_per_s": [1.0, np.nan, 0.0]}, "samples_per_s of peer 1 is nan"),
        ({"upload_bytes_per_s": [1.0, np.nan, 1.0]}, "upload_bytes_per_s of peer 1 is nan"),
        ({"download_bytes_per_s": [1.0, 1.0, -2.0]}, "download_bytes_per_s of peer 2 is -2"),
        ({"download_bytes_per_s": [1.0, 1.0, np.inf]}, "must be >= 0 and finite"),
        ({"upload_bytes_per_s": [1.0, 1.0]}, "must be one number or 3 of them"),
        ({"upload_bytes_per_s": ["fast", 1.0, 1.0]}, "upload_bytes_per_s must be"),
        ({"batch_size": 0}, "batch_size is 0; it must be > 0"),
        ({"gradient_bytes": -4}, "gradient_bytes is -4"),
        ({"gradient_bytes": np.nan}, "gradient_bytes is nan"),
        ({"batch_size": "8"}, "batch_size must be a number, found '8'"),
        ({"batch_size": None}, "batch_size must be a number, found None"),
        ({"batch_size": True}, "batch_size must be a number, found True"),
        ({"gradient_bytes": [1.0, 2.0]}, "gradient_bytes must be a number"),
        ({"samples_per_s": "fast"}, "samples_per_s must be one number or 3 of them, found 'fast'"),
        ({"samples_per_s": [1.0]}, "samples_per_s must be one number or 3 of them"),
        ({"upload_bytes_per_s": [1.0, 1e300, 1.0]}, "upload_bytes_per_s is 1e.300; it must be at"),
        ({"overlap": "no"}, "overlap must be true or false, found 'no'"),
        ({"link_bytes_per_s": np.ones((2, 2))}, "3 x 3"),
        ({"link_bytes_per_s": np.ones(3)}, "3 x 3"),
        ({"link_bytes_per_s": -np.ones((3, 3))}, "link_bytes_per_s from 0 to 1 is -1"),
        ({"link_bytes_per_s": np.full((3, 3), np.nan)}, "link_bytes_per_s from 0 to 1 is nan"),
        ({"samples_per_s": 0.0}, "no peer can compute"),
        ({"can_compute": [False, False, True]}, "no peer can compute"),
        ({"can_aggregate": False}, "no peer can aggregate"),
        ({"can_aggregate": [True, False]}, "can_aggregate must be one value or 3"),
        ({"can_aggregate": [True]}, "can_aggregate must be one value or 3"),
        ({"can_compute": [0.5, 1, 1]}, "can_compute must hold true and false"),
    ],
)
def test_invalid_input_is_refused(changes: Any, message: str) -> None:
    """The message has rule, value and remedy."""
    with pytest.raises(ProblemError, match=message.replace("(", r"\(")):
        build(**changes)


def test_scalars_are_broadcast_over_peers() -> None:
    """A scalar applies to all peers; only scalars give one peer."""
    problem = AveragingProblem([1, 1, 1], 5.0, 6.0, 1, 1)
    assert problem.upload_bytes_per_s.tolist() == [5, 5, 5]
    assert len(AveragingProblem(1.0, 1.0, 1.0, 1, 1)) == 1


def test_arrays_are_frozen_and_copied() -> None:
    """Changing the caller's arrays does not change the problem, and its own are read-only."""
    speeds = np.ones(3)
    problem = build(upload_bytes_per_s=speeds)
    speeds[0] = 9
    assert problem.upload_bytes_per_s[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        problem.upload_bytes_per_s[0] = 2


def test_equality_replace_and_subset() -> None:
    """Equal data give equal problems."""
    problem = build(link_bytes_per_s=np.arange(9.0).reshape(3, 3))
    assert problem == problem.replace() and hash(problem) == hash(problem.replace())
    assert problem != problem.replace(overlap=False)
    left = problem.subset([2, 0])
    assert left.upload_bytes_per_s.tolist() == [3, 1]
    assert left.link_bytes_per_s[0, 1] == problem.link_bytes_per_s[2, 0] == 6


def test_used_bandwidth_matches_written_out_sums() -> None:
    """upload_of, download_of and link_of are the left sides of eq. 1."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        problem = random_problem(rng).replace(link_bytes_per_s=1.0)
        n = len(problem)
        rates, computes = rng.random(n), rng.random(n) < 0.5
        matrix, _ = limits_of(problem, computes)
        used = (matrix @ rates).reshape(n, n + 1)
        assert np.allclose(used[:, -2], problem.upload_of(rates, computes))
        assert np.allclose(used[:, -1], problem.download_of(rates, computes))
        links = problem.link_of(rates, computes)
        assert np.allclose(used[:, :-2].ravel(), links[~np.eye(n, dtype=bool)])


@pytest.mark.parametrize(
    ("rates", "computes"),
    [
        ([np.nan] * 3, [True] * 3),
        ([1.0, 1.0], [True] * 3),
        (["a"] * 3, [True] * 3),
        ([1.0] * 3, [True] * 2),
        ([1.0] * 3, [2, 0, 0]),
    ],
)
def test_rates_and_contributors_are_one_per_peer(rates: Any, computes: Any) -> None:
    """Otherwise the figures of a plan would be of another problem."""
    problem = build()
    for figure in (
        problem.steps_per_s,
        problem.upload_of,
        problem.download_of,
        problem.link_of,
    ):
        with pytest.raises(ProblemError, match=r"must be 3 .*, one per peer, found"):
            figure(rates, computes)


def test_steps_per_second_overlapped_and_alternating() -> None:
    """min of both rates with delayed parameter updates, otherwise their harmonic sum."""
    problem = build()
    assert problem.steps_per_s([1, 1, 0], [True, True, False]) == min(3 / 8, 2 / 4)
    alternating = problem.replace(overlap=False)
    assert alternating.steps_per_s([1, 1, 0], [True, True, False]) == 1 / (8 / 3 + 4 / 2)
    assert problem.steps_per_s([0, 0, 0], [True, True, False]) == 0
