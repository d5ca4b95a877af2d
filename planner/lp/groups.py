"""Averaging in alternating groups: how large they should be, and who meets whom (DeDLOC, App. C).

The paper gives no formula. Read here: p is the probability that one peer fails in one round. A
group of m peers succeeds with probability (1 - p)^m and otherwise repeats the round; a round ends
when its slowest group has succeeded; ceil(log_m n) rounds make the global average. With N groups
that need independent geometric numbers of attempts T_1 ... T_N,

    E(m) = ceil(log_m n) * E[max T_i],   E[max T_i] = sum_{t >= 0} (1 - prod_i (1 - f_i^t)),
    f_i = 1 - (1 - p)^{m_i}.

The other reading lets each group go on when it is ready: ceil(log_m n) / (1 - p)^m.
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

RARE = 1e-3
"""Below this chance of success the sum over attempts is taken as an integral."""
GRID = 200_001


def rounds_needed(peers: int, group_size: int) -> int:
    """ceil(log_m n), in whole numbers: rounds until everyone can have met everyone's data."""
    _check(peers, group_size, 0.0)
    rounds, reach = 0, 1
    while reach < peers:
        reach *= group_size
        rounds += 1
    return rounds


MOST_PEERS = 10_000_000


def group_sizes(peers: int, group_size: int) -> tuple[int, ...]:
    """Sizes of the ceil(n / m) groups of one round, as even as possible, the larger first.

    Returns
    -------
    tuple[int, ...]
        They sum to n.
    """
    count = -(-peers // group_size)
    small, more = divmod(peers, count)
    return (small + 1,) * more + (small,) * (count - more)


def expected_operations(
    peers: int, group_size: int, failure_probability: float, wait_for_slowest: bool = True
) -> float:
    """Expected number of group operations, one after the other, until the global average.

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
    """E[max] of geometric attempts: ``counts[k]`` groups with chance ``success[k]`` each."""
    least = float(success.min())
    if least >= 1.0:
        return 1.0
    if least <= 1e-300:
        return math.inf
    fail = np.log1p(-np.minimum(success, 1 - 1e-16))
    horizon = (40 + math.log(float(counts.sum()))) / -float(fail.max())
    if least >= RARE:
        t = np.arange(int(horizon) + 2, dtype=np.float64)
        weights = np.ones(len(t))
    else:
        # Euler and Maclaurin: a sum over t = 0, 1, ... is the integral plus half the first term
        t = np.linspace(0.0, horizon, GRID)
        weights = np.full(GRID, t[1])
        weights[[0, -1]] = t[1] / 2
        weights[0] += 0.5
    with np.errstate(divide="ignore"):
        done = (np.log1p(-np.exp(np.outer(t, fail))) * counts).sum(axis=1)
    return float((-np.expm1(done) * weights).sum())


def optimal_group_size(
    peers: int, failure_probability: float, wait_for_slowest: bool = True
) -> int:
    """The group size m with the fewest expected operations; of equally good ones the smallest.

    For a given number of rounds the smallest m that needs no more is the best, so that only about
    log2(n) sizes are compared.

    Parameters
    ----------
    peers
        n, ``>= 1``; a single peer is its own group.
    failure_probability
        p, see `expected_operations`.
    wait_for_slowest
        Whether a round ends when its slowest group has succeeded; see `expected_operations`.

    Returns
    -------
    int
        m.

    Raises
    ------
    ProblemError
        A number that makes no sense.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), Appendix C.
    """
    if whole("peers", peers) == 1:
        _check(2, 2, failure_probability)
        return 1
    _check(peers, 2, failure_probability)
    best, least = 2, math.inf
    for size in sorted({smallest_size(peers, k) for k in range(1, rounds_needed(peers, 2) + 1)}):
        value = expected_operations(peers, size, failure_probability, wait_for_slowest)
        if value < least * (1 - 1e-12):
            best, least = size, value
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

    Peers are cells of a grid, and round d groups those that differ in coordinate d only. The grid
    is full, and the average after the last round exact, where n is a product of ceil(log_m n)
    factors of at most m each, a power of m among them. Elsewhere its last cells stay empty, and
    `schedule_error` says what is left.

    Returns
    -------
    tuple[Round, ...]
        Per round, its groups of peers.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), Appendix C.
    """
    _check(peers, group_size, 0.0)
    sides = _sides(peers, group_size, rounds_needed(peers, group_size))
    cells = np.array(np.unravel_index(np.arange(peers), sides)).T
    schedule = []
    for axis in range(len(sides)):
        groups: dict[tuple[int, ...], list[int]] = {}
        for peer, cell in enumerate(np.delete(cells, axis, axis=1)):
            groups.setdefault(tuple(int(x) for x in cell), []).append(peer)
        schedule.append(tuple(tuple(members) for members in groups.values()))
    return tuple(schedule)


def _sides(peers: int, group_size: int, rounds: int) -> tuple[int, ...]:
    """Sides of the grid: exact factors if there are some, otherwise as even as possible."""
    exact = _factors(peers, group_size, rounds)
    if exact is not None:
        return exact
    sides = [smallest_size(peers, rounds)] * rounds
    for k in range(rounds):
        while math.prod(sides) // sides[k] * (sides[k] - 1) >= peers and sides[k] > 2:
            sides[k] -= 1
    return tuple(sorted(sides))


def _factors(product: int, largest: int, count: int) -> tuple[int, ...] | None:
    """``count`` factors, each at most ``largest``, ascending; the most even ones first."""
    if count == 1:
        return (product,) if product <= largest else None
    for factor in range(int(product ** (1 / count) + 1e-9), 0, -1):
        if product % factor == 0:
            rest = _factors(product // factor, largest, count - 1)
            if rest is not None and factor <= largest:
                return tuple(sorted((factor, *rest)))
    return None


def average_in_groups(values: ArrayLike, groups: Round) -> Floats:
    """One round: every group takes its mean.

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
    """Standard deviation around the global average that is left after ``rounds`` rounds.

    In units of the standard deviation of independent values before the first round; the schedule
    is repeated from its start where ``rounds`` is larger than it. 0: the average is exact.
    """
    schedule = group_schedule(peers, group_size)
    if whole("rounds", rounds) < 0:
        raise ProblemError(f"rounds is {rounds}; it must be >= 0")
    mixing = np.eye(peers)
    for r in range(rounds):
        mixing = average_in_groups(mixing, schedule[r % len(schedule)])
    left = mixing - 1.0 / peers
    error = float(np.sqrt((left**2).sum() / max(peers - 1, 1)))
    return error if error > 1e-12 else 0.0


def _check(peers: int, group_size: int, failure_probability: float) -> None:
    peers, group_size = whole("peers", peers), whole("group_size", group_size)
    chance = real("failure_probability", failure_probability)
    if not 1 <= peers <= MOST_PEERS:
        raise ProblemError(f"peers is {peers}; it must be >= 1 and at most {MOST_PEERS}")
    if peers > 1 and not 2 <= group_size <= peers:
        raise ProblemError(
            f"groups of {group_size} among {peers} peers make no sense; give 2 <= group_size <= n"
        )
    if not 0 <= chance < 1:
        raise ProblemError(
            f"failure_probability is {failure_probability}; it must be >= 0 and below 1"
        )
