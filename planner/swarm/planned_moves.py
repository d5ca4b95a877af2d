"""Rebalancing policy that plans several moves at once: throughput against bytes downloaded.

In contrast to Algorithm 2, which moves one peer at a time, it makes all moves that pay off at once.
Over a horizon of H seconds, during d of which movers download,

    value = (H - d) * (rate after the moves) + d * (rate without the movers) - price * bytes,

where a rate is that of the slowest stage, capped at a share ``keep`` of the rate of a perfect
spread. No stage loses its last peer, and moves must gain at least a share ``hysteresis`` of the
throughput.

With ``keep`` below 1 far fewer moves are needed: a stage that lost a peer often gets a new one
without a move.

For equal peers the optimal moves are found by enumerating the possible rates of the slowest stage.
For several kinds of peers, target rates are tried in steps, and peers chosen greedily to reach
them. In small swarms where this may be far from optimal a MILP is solved as well. Its moves are
used only if they gain much more: optimal moves are numerous, and the next event often comes before
they have paid off (on traces they performed worse than near-optimal moves).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import KW_ONLY, dataclass

import numpy as np

from planner.swarm.rebalancing import Floats, Ints, StageMove, SwarmState

ROUNDING = 1e-9
"""Relative tolerance for comparing rates."""
MAX_MILP_CELLS = 24
"""Maximum of stages x kinds for which the MILP is solved, in tenths of a second."""
MILP_MARGIN = 0.05
"""Relative gain over the heuristic that is required to solve the MILP, and to use its moves."""
RATE_STEPS = 32
"""Number of target rates tried by the heuristic."""


@dataclass(frozen=True)
class PlannedMoves:
    """Policy that makes several moves at once if they are worth their bytes.

    Attributes
    ----------
    every_s
        Seconds between two decisions; 0 means after every event, which without downloads, price and
        hysteresis maintains the optimal allocation with the fewest moves.
    horizon_s
        H: horizon over which gains are counted.
    download_s
        d: download time of a mover.
    price
        Cost of a downloaded byte in microbatches.
    hysteresis
        Minimum gain of a set of moves, as a share of the microbatches over the horizon.
    keep
        Target rate as a share of that of a perfect spread; exceeding it has no value.
    one_at_a_time
        Whether at most one peer moves; all single moves are enumerated.
    """

    every_s: float
    _: KW_ONLY
    horizon_s: float = 1800.0
    download_s: float = 0.0
    state_bytes: float = 0.0
    price: float = 0.0
    hysteresis: float = 0.0
    keep: float = 1.0
    one_at_a_time: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is {self.keep}; it must be above 0 and at most 1")

    def moves(self, stages: SwarmState) -> list[StageMove]:
        """The best moves found; of equally good ones the fewest."""
        least = self._min_gain(stages)
        # upper bound on the value: the target rate without loss during downloads
        now = self.value(stages, *_no_moves(stages))
        if self.horizon_s * self._target_rate(stages) - self._download_cost(1) - now <= least:
            return []
        if self.one_at_a_time:
            leaving, entering = self._best_single_move(stages)
        elif np.count_nonzero((stages.serving + stages.loading).sum(axis=0)) == 1:
            leaving, entering = self._homogeneous_moves(stages)
        else:
            leaving, entering = self._heterogeneous_moves(stages)
            value = self.value(stages, leaving, entering)
            most = self.horizon_s * self._target_rate(stages) - self._download_cost(1)
            if value < (1 - MILP_MARGIN) * most and stages.serving.size <= MAX_MILP_CELLS:
                better = self._milp_moves(stages)
                if self.value(stages, *better) > (1 + MILP_MARGIN) * value:
                    leaving, entering = better
        if self.value(stages, leaving, entering) - now <= least:
            return []
        return _match_moves(leaving, entering)

    def value(self, stages: SwarmState, leaving: Ints, entering: Ints) -> float:
        """Microbatches over the horizon minus the cost of bytes.

        Parameters
        ----------
        leaving, entering
            ``int[S, K]``: numbers of peers that leave and enter.
        """
        there = stages.serving + stages.loading - leaving + entering
        gone = stages.serving - leaving
        most = self._target_rate(stages)
        after, during = (
            min(float(((n @ stages.speed) / stages.work).min()), most) for n in (there, gone)
        )
        down_s = min(self.download_s, self.horizon_s)
        return (
            (self.horizon_s - down_s) * after
            + down_s * during
            - self._download_cost(int(leaving.sum()))
        )

    def _target_rate(self, stages: SwarmState) -> float:
        """Target rate: the share ``keep`` of the rate of a perfect spread of all peers."""
        speed = ((stages.serving + stages.loading) @ stages.speed).sum()
        # tolerance, so that a perfect spread is not capped by rounding
        return self.keep * (1 + ROUNDING) * float(speed / stages.work.sum())

    def _download_cost(self, moves: int) -> float:
        return self.price * self.state_bytes * moves

    def _min_gain(self, stages: SwarmState) -> float:
        return (
            max(self.hysteresis, ROUNDING)
            * self.horizon_s
            * float(stages.rates_after_loading.min())
        )

    def _best_single_move(self, stages: SwarmState) -> tuple[Ints, Ints]:
        """The best move of a single peer; the first of equally good ones."""
        best, best_value = _no_moves(stages), self.value(stages, *_no_moves(stages))
        movable = (stages.serving > 0) & (stages.serving.sum(axis=1) > 1)[:, None]
        for source, kind in np.argwhere(movable).tolist():
            for target in range(len(stages.work)):
                leaving, entering = _no_moves(stages)
                leaving[source, kind] = entering[target, kind] = 1
                value = self.value(stages, leaving, entering)
                if target != source and value > best_value + ROUNDING * abs(best_value):
                    best, best_value = (leaving, entering), value
        return best

    def _homogeneous_moves(self, stages: SwarmState) -> tuple[Ints, Ints]:
        """Equal peers: enumerate the slowest stage's possible rates, with the fewest moves each."""
        kind = int(np.flatnonzero((stages.serving + stages.loading).sum(axis=0))[0])
        unit = stages.work / stages.speed[kind]
        serving = stages.serving[:, kind]
        there = serving + stages.loading[:, kind]
        down_s, now = min(self.download_s, self.horizon_s), float(stages.rates.min())
        target_rate = self._target_rate(stages)
        cases: list[tuple[float, Ints, Ints]] = []
        for level in _possible_rates(
            unit, float((there / unit).min()), float(there.sum() / unit.sum())
        ):
            required = np.ceil(level * unit * (1 - ROUNDING)).astype(np.int64)
            missing = np.maximum(required - there, 0)
            surplus = np.clip(np.minimum(serving - 1, there - required), 0, None)
            if missing.sum() > surplus.sum():
                break
            if not missing.any():
                continue  # the current rate, up to rounding
            # upper bound: stages that receive peers get just the required number
            after = min(float((required / unit)[missing > 0].min()), target_rate)
            most = (
                (self.horizon_s - down_s) * after
                + down_s * now
                - self._download_cost(int(missing.sum()))
            )
            cases.append((most, missing, surplus))
            if level >= target_rate:
                break
        best, best_value = _no_moves(stages), self.value(stages, *_no_moves(stages))
        # in descending order of the upper bound; ties by the fewest moves
        for most, missing, surplus in sorted(cases, key=lambda case: (-case[0], case[1].sum())):
            equal = ROUNDING * abs(best_value)
            if most < best_value - equal:
                break
            leaving, entering = _no_moves(stages)
            entering[:, kind] = missing
            leaving[:, kind] = _select_leaving(serving, surplus, unit, int(missing.sum()))
            value = self.value(stages, leaving, entering)
            fewer = value >= best_value - equal and leaving.sum() < best[0].sum()
            if value > best_value + equal or fewer:
                best, best_value = (leaving, entering), value
        return best

    def _milp_moves(self, stages: SwarmState) -> tuple[Ints, Ints]:
        """Optimal moves by the MILP."""
        # imported lazily: SciPy's HiGHS is not needed for single moves
        from planner.swarm.move_milp import solve_moves

        cost, most = self._download_cost(1), self._target_rate(stages)
        return solve_moves(stages, self.horizon_s, self.download_s, cost, most, _no_moves(stages))

    def _heterogeneous_moves(self, stages: SwarmState) -> tuple[Ints, Ints]:
        """Several kinds: try target rates in steps, each reached by greedy moves."""
        best, best_value = _no_moves(stages), self.value(stages, *_no_moves(stages))
        top, now = self._target_rate(stages), float(stages.rates_after_loading.min())
        for step in range(1, RATE_STEPS + 1):
            moves = moves_to_reach(stages, now + (top - now) * step / RATE_STEPS)
            if moves is None:
                break
            value = self.value(stages, *moves)
            if value > best_value + ROUNDING * abs(best_value):
                best, best_value = moves, value
        return best


def moves_to_reach(stages: SwarmState, level: float) -> tuple[Ints, Ints] | None:
    """Greedy moves after which no stage is slower than ``level``; None if not found.

    The slowest stage gets a peer of the slowest sufficient kind, or else of the fastest, from the
    stage with the highest remaining rate.
    """
    leaving, entering = _no_moves(stages)
    speed = stages.speed
    required = level * stages.work * (1 - ROUNDING)
    excess = (stages.serving + stages.loading) @ speed - required
    serving = stages.serving.copy()
    while True:
        target = int(np.argmin(excess / stages.work))
        if excess[target] >= 0:
            return leaving, entering
        movable = (serving > 0) & (serving.sum(axis=1) > 1)[:, None] & (excess[:, None] >= speed)
        kinds = np.flatnonzero(movable.any(axis=0))
        if len(kinds) == 0:
            return None
        reached = kinds[speed[kinds] >= -excess[target]]
        kind = int(
            reached[np.argmin(speed[reached])] if len(reached) else kinds[speed[kinds].argmax()]
        )
        unmoved = np.where(movable[:, kind], (serving @ speed - speed[kind]) / stages.work, -np.inf)
        source = int(np.argmax(unmoved))
        for array, stage, change in (
            (leaving, source, 1),
            (entering, target, 1),
            (serving, source, -1),
        ):
            array[stage, kind] += change
        excess[source] -= speed[kind]
        excess[target] += speed[kind]


def _no_moves(stages: SwarmState) -> tuple[Ints, Ints]:
    return np.zeros_like(stages.serving), np.zeros_like(stages.serving)


def _possible_rates(unit: Floats, lowest: float, top: float) -> list[float]:
    """Possible rates of a stage, above the lowest and up to a limit, ascending."""
    rates: set[float] = set()
    for u in np.unique(unit).tolist():
        first, last = math.floor(lowest * u) + 1, math.floor(top * u * (1 + ROUNDING))
        rates.update(c / u for c in range(first, last + 1))
    return sorted(rates)


def _select_leaving(serving: Ints, surplus: Ints, unit: Floats, moves: int) -> Ints:
    """Numbers of peers that leave, maximising the rate of the slowest stage without them."""
    leaving = np.zeros_like(serving)
    queue = [
        (-(n - 1) / u, s)
        for s, (n, u) in enumerate(zip(serving.tolist(), unit.tolist(), strict=True))
        if surplus[s] > 0
    ]
    heapq.heapify(queue)
    for _ in range(moves):
        s = queue[0][1]
        leaving[s] += 1
        if leaving[s] < surplus[s]:
            heapq.heapreplace(queue, (-(serving[s] - leaving[s] - 1) / unit[s], s))
        else:
            heapq.heappop(queue)
    return leaving


def _match_moves(leaving: Ints, entering: Ints) -> list[StageMove]:
    """Match leaving and entering peers of every kind to moves."""
    moves: list[StageMove] = []
    for kind in range(leaving.shape[1]):
        sources = [[s, int(leaving[s, kind])] for s in np.flatnonzero(leaving[:, kind]).tolist()]
        for target in np.flatnonzero(entering[:, kind]).tolist():
            needed = int(entering[target, kind])
            while needed:
                source, unmatched = sources[0]
                number = min(needed, unmatched)
                moves.append(StageMove(source, target, kind, number))
                needed -= number
                sources[0][1] -= number
                if sources[0][1] == 0:
                    sources.pop(0)
    return moves
