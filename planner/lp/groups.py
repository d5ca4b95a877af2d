"""Averaging in alternating groups: optimal size and schedule (DeDLOC, App. C).

The paper gives no formula. The interpretation here: p is the probability that one peer fails in one
round. A group of m peers succeeds with probability (1 - p)^m and otherwise repeats the round; a
round ends when its slowest group has succeeded; ceil(log_m n) rounds compute the global average.
With N groups that need independent geometric numbers of attempts T_1 ... T_N,

    E(m) = ceil(log_m n) * E[max T_i],   E[max T_i] = sum_{t >= 0} (1 - prod_i (1 - f_i^t)),
    f_i = 1 - (1 - p)^{m_i}.

Alternatively each group continues as soon as it has succeeded: ceil(log_m n) / (1 - p)^m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.problems import ProblemError
from planner.problems.quantities import real, whole

Floats = NDArray[np.float64]
Group = tuple[int, ...]
Round = tuple[Group, ...]

INTEGRATE_BELOW = 1e-3
"""Probability of success below which the sum over attempts is computed as an integral."""
GRID_POINTS = 200_001


def rounds_needed(peers: int, group_size: int) -> int:
    """ceil(log_m n) in integer arithmetic: rounds until data of all peers can have been mixed."""
    _check(peers, group_size, 0.0)
    rounds, reached = 0, 1
    while reached < peers:
        reached *= group_size
        rounds += 1
    return rounds


MAX_PEERS = 10_000_000


def group_sizes(peers: int, group_size: int) -> tuple[int, ...]:
    """Sizes of the ceil(n / m) groups of one round, as even as possible, the larger first.

    Returns
    -------
    tuple[int, ...]
        Sizes that sum to n.
    """
    count = -(-peers // group_size)
    small, remainder = divmod(peers, count)
    return (small + 1,) * remainder + (small,) * (count - remainder)


def expected_operations(
    peers: int, group_size: int, failure_probability: float, wait_for_slowest: bool = True
) -> float:
    """Expected number of sequential group operations until the global average.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), Appendix C.
    """
    _check(peers, group_size, failure_probability)
    rounds = rounds_needed(peers, group_size)
    if not wait_for_slowest:
        log = -min(group_size, peers) * math.log1p(-failure_probability)
        return rounds * math.exp(log) if log < 700 else math.inf
    sizes = np.array(group_sizes(peers, group_size))
    values, counts = np.unique(sizes, return_counts=True)
    return rounds * _expected_maximum(np.exp(values * math.log1p(-failure_probability)), counts)


def _expected_maximum(success: Floats, counts: NDArray[np.int64]) -> float:
    """E[max] of geometric attempts of ``counts[k]`` groups with probability ``success[k]``."""
    min_success = float(success.min())
    if min_success >= 1.0:
        return 1.0
    if min_success <= 1e-300:
        return math.inf
    fail = np.log1p(-np.minimum(success, 1 - 1e-16))
    horizon = (40 + math.log(float(counts.sum()))) / -float(fail.max())
    if min_success >= INTEGRATE_BELOW:
        t = np.arange(int(horizon) + 2, dtype=np.float64)
        weights = np.ones(len(t))
    else:
        # Euler and Maclaurin: a sum over t = 0, 1, ... is the integral plus half the first term
        t = np.linspace(0.0, horizon, GRID_POINTS)
        weights = np.full(GRID_POINTS, t[1])
        weights[[0, -1]] = t[1] / 2
        weights[0] += 0.5
    with np.errstate(divide="ignore"):
        log_all_done = (np.log1p(-np.exp(np.outer(t, fail))) * counts).sum(axis=1)
    return float((-np.expm1(log_all_done) * weights).sum())


def optimal_group_size(
    peers: int, failure_probability: float, wait_for_slowest: bool = True
) -> int:
    """The smallest group size m that minimises the expected number of operations.

    For a given number of rounds the smallest sufficient m is optimal, so that only about log2(n)
    sizes are compared.

    Parameters
    ----------
    peers
        Number of peers n, at least 1; a single peer is its own group.
    failure_probability
        Probability p that a peer fails in a round.
    wait_for_slowest
        Whether a round ends only when its slowest group has succeeded; otherwise each group
        continues on its own.

    Returns
    -------
    int
        The group size m.

    Raises
    ------
    ProblemError
        ``peers`` or ``failure_probability`` is out of range.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), Appendix C.
    """
    if whole("peers", peers) == 1:
        _check(2, 2, failure_probability)
        return 1
    _check(peers, 2, failure_probability)
    best, best_value = 2, math.inf
    for size in sorted({smallest_size(peers, k) for k in range(1, rounds_needed(peers, 2) + 1)}):
        value = expected_operations(peers, size, failure_probability, wait_for_slowest)
        if value < best_value * (1 - 1e-12):
            best, best_value = size, value
    return best


def smallest_size(peers: int, rounds: int) -> int:
    """The smallest m >= 2 with m^rounds >= n."""
    size = max(2, int(peers ** (1 / rounds)))
    while math.pow(size, rounds) < peers:
        size += 1
    return size


def group_size_table(
    peers: Sequence[int], failure_probabilities: Sequence[float], wait_for_slowest: bool = True
) -> NDArray[np.int64]:
    """Optimal m per n (rows) and p (columns), as in Figure 8.

    Returns
    -------
    ndarray
        ``int[len(peers), len(failure_probabilities)]``.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), Figure 8.
    """
    return np.array(
        [
            [optimal_group_size(n, p, wait_for_slowest) for p in failure_probabilities]
            for n in peers
        ],
        dtype=np.int64,
    )


def group_schedule(peers: int, group_size: int) -> tuple[Round, ...]:
    """Groups of ceil(log_m n) rounds; each round splits all peers into groups of at most m.

    Peers are cells of a grid, and round d groups those that differ in coordinate d only. If n is a
    product of ceil(log_m n) factors of at most m, the grid is full and the average after the last
    round exact. Otherwise the last cells are empty, and `schedule_error` is the remaining error.

    Returns
    -------
    tuple[Round, ...]
        Groups of peers of each round.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), Appendix C.
    """
    _check(peers, group_size, 0.0)
    shape = _grid_shape(peers, group_size, rounds_needed(peers, group_size))
    cells = np.array(np.unravel_index(np.arange(peers), shape)).T
    schedule = []
    for axis in range(len(shape)):
        groups: dict[tuple[int, ...], list[int]] = {}
        for peer, cell in enumerate(np.delete(cells, axis, axis=1)):
            groups.setdefault(tuple(int(x) for x in cell), []).append(peer)
        schedule.append(tuple(tuple(members) for members in groups.values()))
    return tuple(schedule)


def _grid_shape(peers: int, group_size: int, rounds: int) -> tuple[int, ...]:
    """Shape of the grid: exact factors if they exist, otherwise as even as possible."""
    exact = _factors(peers, group_size, rounds)
    if exact is not None:
        return exact
    shape = [smallest_size(peers, rounds)] * rounds
    for k in range(rounds):
        while math.prod(shape) // shape[k] * (shape[k] - 1) >= peers and shape[k] > 2:
            shape[k] -= 1
    return tuple(sorted(shape))


def _factors(product: int, largest: int, count: int) -> tuple[int, ...] | None:
    """``count`` factors, each at most ``largest``, ascending; the most even ones first."""
    if count == 1:
        return (product,) if product <= largest else None
    for factor in range(int(product ** (1 / count) + 1e-9), 0, -1):
        if product % factor == 0:
            other_factors = _factors(product // factor, largest, count - 1)
            if other_factors is not None and factor <= largest:
                return tuple(sorted((factor, *other_factors)))
    return None


def average_in_groups(values: ArrayLike, groups: Round) -> Floats:
    """One round: replace the values of every group by their mean.

    Parameters
    ----------
    values
        ``[n, ...]``: one row per peer.

    Returns
    -------
    ndarray
        ``float[n, ...]``: the values after the round.
    """
    averaged = np.array(values, dtype=np.float64)
    for members in groups:
        averaged[list(members)] = averaged[list(members)].mean(axis=0)
    return averaged


def schedule_error(peers: int, group_size: int, rounds: int) -> float:
    """Standard deviation around the global average after ``rounds`` rounds.

    In units of the standard deviation of independent values before the first round. The schedule is
    repeated if ``rounds`` exceeds its length. 0 means that the average is exact.
    """
    schedule = group_schedule(peers, group_size)
    if whole("rounds", rounds) < 0:
        raise ProblemError(f"rounds is {rounds}; it must be >= 0")
    mixing = np.eye(peers)
    for r in range(rounds):
        mixing = average_in_groups(mixing, schedule[r % len(schedule)])
    deviation = mixing - 1.0 / peers
    error = float(np.sqrt((deviation**2).sum() / max(peers - 1, 1)))
    return error if error > 1e-12 else 0.0


def _check(peers: int, group_size: int, failure_probability: float) -> None:
    peers, group_size = whole("peers", peers), whole("group_size", group_size)
    chance = real("failure_probability", failure_probability)
    if not 1 <= peers <= MAX_PEERS:
        raise ProblemError(f"peers is {peers}; it must be >= 1 and at most {MAX_PEERS}")
    if peers > 1 and not 2 <= group_size <= peers:
        raise ProblemError(
            f"groups of {group_size} among {peers} peers make no sense; give 2 <= group_size <= n"
        )
    if not 0 <= chance < 1:
        raise ProblemError(
            f"failure_probability is {failure_probability}; it must be >= 0 and below 1"
        )
