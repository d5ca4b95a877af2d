"""Small random averaging problems and brute force, written from the definitions alone."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from planner.problems import AveragingProblem

GBIT = 125e6


def random_problem(rng: np.random.Generator, most: int = 6, **changes: Any) -> AveragingProblem:
    """Heterogeneous peers in all variants: links that bind, client mode, no overlap."""
    n = int(rng.integers(2, most + 1))
    samples = rng.uniform(0, 2, n) * (rng.random(n) > 0.2)
    samples[0] += 0.0 if samples.any() else 1.0
    upload = rng.choice([0.05, 0.1, 0.2, 1, 2.5], n) * rng.uniform(0.9, 1.1, n)
    download = upload * rng.uniform(1 if rng.random() < 0.7 else 0.3, 4, n)
    scale = [0.1, 0.5, 2][int(rng.integers(3))]
    links = None if rng.random() < 0.3 else rng.uniform(0, scale, (n, n))
    can_reduce = rng.random(n) > 0.2
    can_reduce[-1] |= not can_reduce.any()
    fields: dict[str, Any] = {
        "batch_size": samples.sum() / (0.05 * np.exp(rng.normal())),
        "gradient_bytes": 1.0,
        "link_bytes_per_s": links,
        "can_aggregate": can_reduce,
        "overlap": bool(rng.random() < 0.6),
    }
    return AveragingProblem(samples, upload, download, **{**fields, **changes})


def limits_of(
    problem: AveragingProblem, computes: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows ``A r <= b`` of all limits, written out peer by peer."""
    n = len(problem)
    c = computes.astype(float)
    rows, right = [], []
    for i in range(n):
        up, down = np.zeros(n), np.zeros(n)
        for j in range(n):
            if j == i:
                continue
            # a_ij = c_i r_j and g_ij = r_i leave; a_ji = c_j r_i and g_ji = r_j arrive
            up[j] += c[i]
            up[i] += 1
            down[i] += c[j]
            down[j] += 1
            if problem.link_bytes_per_s is not None:
                link = np.zeros(n)
                link[j] += c[i]
                link[i] += 1
                rows.append(link)
                right.append(problem.link_bytes_per_s[i, j])
        rows += [up, down]
        right += [problem.upload_bytes_per_s[i], problem.download_bytes_per_s[i]]
    matrix, bound = np.array(rows), np.array(right)
    return matrix[np.isfinite(bound)], bound[np.isfinite(bound)]


def max_total_rate(
    problem: AveragingProblem,
    computes: NDArray[np.bool_],
    reducers: NDArray[np.bool_] | None = None,
) -> float:
    """R by one LP."""
    allowed = problem.can_aggregate if reducers is None else problem.can_aggregate & reducers
    matrix, right = limits_of(problem, computes)
    found = linprog(
        -np.ones(len(problem)),
        A_ub=matrix,
        b_ub=right,
        bounds=[(0, None if ok else 0) for ok in allowed],
    )
    return float(-found.fun) if found.status == 0 else 0.0


def sets_of(able: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Every non-empty set of the peers in ``able``."""
    choices = [(False, True) if ok else (False,) for ok in able]
    return [np.array(c) for c in itertools.product(*choices) if any(c)]


def attains(problem: AveragingProblem, computes: NDArray[np.bool_], total: float) -> bool:
    """Whether two or more contributors attain R = ``total``, in fractions; without pair limits."""
    n, k, rate = len(problem), int(computes.sum()), Fraction(total)
    room = Fraction(0)
    for i in range(n):
        c = int(computes[i])
        upload = Fraction(float(problem.upload_bytes_per_s[i])) - c * rate
        download = Fraction(float(problem.download_bytes_per_s[i])) - rate
        if upload < 0 or download < 0:
            return False
        caps = [rate]
        if n - 1 - c > 0:
            caps.append(upload / (n - 1 - c))
        if k - c - 1 > 0:
            caps.append(download / (k - c - 1))
        room += min(caps) * int(problem.can_aggregate[i])
    return room >= rate


def brute_force(problem: AveragingProblem) -> float:
    """Best steps per second over every c."""
    return max(
        problem.steps_of(
            float(problem.samples_per_s[c].sum()),
            np.inf if len(problem) == 1 else max_total_rate(problem, c),
        )
        for c in sets_of(problem.contributors)
    )


def fewest_reducers(problem: AveragingProblem) -> int:
    """Fewest reducers of all best plans."""
    options = []
    for c in sets_of(problem.contributors):
        for reducers in sets_of(problem.can_aggregate):
            samples = float(problem.samples_per_s[c].sum())
            steps = problem.steps_of(samples, max_total_rate(problem, c, reducers))
            options.append((steps, int(reducers.sum())))
    best = max(steps for steps, _ in options)
    return min(count for steps, count in options if steps >= best * (1 - 1e-8))
