"""Plans moves of peers together: throughput gained against bytes downloaded.

Beside Algorithm 2's one peer at a time: as many as are worth it at once, and none that is not.
Over a horizon of H seconds, of which movers download for d,

    value = (H - d) * (rate with movers there) + d * (rate with movers gone) - price * bytes,

where a rate is that of the slowest stage, and counts up to ``keep`` of what all peers could do
perfectly spread. No stage loses its last peer, and nothing is done that wins less than
``hysteresis`` of what is done anyway.

Less than all is kept with far fewer moves: a stage that lost a peer often gets one back by itself,
and moves that only undo a decline, and stop at what is to be kept, are the fewest that keep it.

Of equal peers the best moves follow from looking at every rate that the slowest stage could have.
Of peers of several kinds rates are tried in steps, and peers chosen one after the other to reach
them. In small swarms where that may be far from the best an integer program is solved too. Its
moves are taken only where they win much more: the best for the moment are many, and the next event
comes before they have paid (on traces they did less than moves that are nearly as good).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import KW_ONLY, dataclass

import numpy as np

from planner.swarm.rebalancing import Floats, Ints, StageMove, StageRates

ROUNDING = 1e-9
"""Relative, of rates that are compared."""
PROGRAMME = 24
"""Stages times kinds up to which the integer program is solved: tenths of a second."""
MUCH = 0.05
"""Of the value: what the programme must be able to win, and win, over rates in steps."""
STEPS = 32
"""Rates that are tried in larger swarms."""


@dataclass(frozen=True)
class PlannedMoves:
    """Several moves at once, where they are worth their bytes.

    Attributes
    ----------
    every_s
        Seconds between two decisions; 0: after every event, which without downloads, price and
        hysteresis keeps the best allocation with the fewest moves.
    horizon_s
        H: how long what is won is thought to last.
    download_s
        d: how long a mover downloads.
    price
        Microbatches that a byte must win.
    hysteresis
        The part of H's microbatches that a set of moves must win.
    keep
        The part of a perfect spread's rate that is worth moves; more than that is worth none.
    one_at_a_time
        Whether one peer moves at most: all that could are tried, without any programme.
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

    def moves(self, stages: StageRates) -> list[StageMove]:
        """The best moves of all; of equals the fewest."""
        least = self._least(stages)
        # nothing lost on the way
        now = self.value(stages, *_nothing(stages))
        if self.horizon_s * self._most(stages) - self._cost(1) - now <= least:
            return []
        if self.one_at_a_time:
            out, into = self._of_one_peer(stages)
        elif np.count_nonzero((stages.serving + stages.loading).sum(axis=0)) == 1:
            out, into = self._of_one_kind(stages)
        else:
            out, into = self._of_several_kinds(stages)
            value = self.value(stages, out, into)
            most = self.horizon_s * self._most(stages) - self._cost(1)
            if value < (1 - MUCH) * most and stages.serving.size <= PROGRAMME:
                better = self._best(stages)
                if self.value(stages, *better) > (1 + MUCH) * value:
                    out, into = better
        if self.value(stages, out, into) - now <= least:
            return []
        return _paired(out, into)

    def value(self, stages: StageRates, out: Ints, into: Ints) -> float:
        """Microbatches over the horizon, less what bytes cost.

        Parameters
        ----------
        out, into
            ``int[S, K]``: who leaves, and who comes.
        """
        there = stages.serving + stages.loading - out + into
        gone = stages.serving - out
        most = self._most(stages)
        after, during = (
            min(float(((n @ stages.speed) / stages.work).min()), most) for n in (there, gone)
        )
        down_s = min(self.download_s, self.horizon_s)
        return (self.horizon_s - down_s) * after + down_s * during - self._cost(int(out.sum()))

    def _most(self, stages: StageRates) -> float:
        """The rate that counts: of all peers perfectly spread, or the part that is kept."""
        speed = ((stages.serving + stages.loading) @ stages.speed).sum()
        # rounding apart, so that a perfect spread itself has all its value
        return self.keep * (1 + ROUNDING) * float(speed / stages.work.sum())

    def _cost(self, moves: int) -> float:
        return self.price * self.state_bytes * moves

    def _least(self, stages: StageRates) -> float:
        return max(self.hysteresis, ROUNDING) * self.horizon_s * float(stages.coming_rates.min())

    def _of_one_peer(self, stages: StageRates) -> tuple[Ints, Ints]:
        """Of all moves of one peer the best; of equals the first."""
        best, best_value = _nothing(stages), self.value(stages, *_nothing(stages))
        may = (stages.serving > 0) & (stages.serving.sum(axis=1) > 1)[:, None]
        for source, kind in np.argwhere(may).tolist():
            for target in range(len(stages.work)):
                out, into = _nothing(stages)
                out[source, kind] = into[target, kind] = 1
                value = self.value(stages, out, into)
                if target != source and value > best_value + ROUNDING * abs(best_value):
                    best, best_value = (out, into), value
        return best

    def _of_one_kind(self, stages: StageRates) -> tuple[Ints, Ints]:
        """Every rate that the slowest stage could have, with the fewest moves to it."""
        kind = int(np.flatnonzero((stages.serving + stages.loading).sum(axis=0))[0])
        unit = stages.work / stages.speed[kind]
        serving = stages.serving[:, kind]
        there = serving + stages.loading[:, kind]
        down_s, now = min(self.download_s, self.horizon_s), float(stages.rates.min())
        worth = self._most(stages)
        cases: list[tuple[float, Ints, Ints]] = []
        for level in _levels(unit, float((there / unit).min()), float(there.sum() / unit.sum())):
            need = np.ceil(level * unit * (1 - ROUNDING)).astype(np.int64)
            lack = np.maximum(need - there, 0)
            spare = np.clip(np.minimum(serving - 1, there - need), 0, None)
            if lack.sum() > spare.sum():
                break
            if not lack.any():
                continue  # the lowest rate itself, but for rounding
            # who gets peers is no faster than it needs to be
            after = min(float((need / unit)[lack > 0].min()), worth)
            most = (self.horizon_s - down_s) * after + down_s * now - self._cost(int(lack.sum()))
            cases.append((most, lack, spare))
            if level >= worth:
                break
        best, best_value = _nothing(stages), self.value(stages, *_nothing(stages))
        # whose value can be greatest comes first; of equal values the fewest moves
        for most, lack, spare in sorted(cases, key=lambda case: (-case[0], case[1].sum())):
            equal = ROUNDING * abs(best_value)
            if most < best_value - equal:
                break
            out, into = _nothing(stages)
            into[:, kind] = lack
            out[:, kind] = _leaving(serving, spare, unit, int(lack.sum()))
            value = self.value(stages, out, into)
            fewer = value >= best_value - equal and out.sum() < best[0].sum()
            if value > best_value + equal or fewer:
                best, best_value = (out, into), value
        return best

    def _best(self, stages: StageRates) -> tuple[Ints, Ints]:
        """By the integer program."""
        # with HiGHS, which the policy of one peer at a time does without
        from planner.swarm.move_milp import solve_moves

        cost, most = self._cost(1), self._most(stages)
        return solve_moves(stages, self.horizon_s, self.download_s, cost, most, _nothing(stages))

    def _of_several_kinds(self, stages: StageRates) -> tuple[Ints, Ints]:
        """Rates in even steps up to that of a perfect spread, each reached move by move."""
        best, best_value = _nothing(stages), self.value(stages, *_nothing(stages))
        top, now = self._most(stages), float(stages.coming_rates.min())
        for step in range(1, STEPS + 1):
            found = _reached(stages, now + (top - now) * step / STEPS)
            if found is None:
                break
            value = self.value(stages, *found)
            if value > best_value + ROUNDING * abs(best_value):
                best, best_value = found, value
        return best


def _reached(stages: StageRates, level: float) -> tuple[Ints, Ints] | None:
    """Moves after which no stage is slower than ``level``; None if none were found.

    The slowest stage gets the slowest kind that is enough, else the fastest there is, from where
    the most is left.
    """
    out, into = _nothing(stages)
    speed = stages.speed
    need = level * stages.work * (1 - ROUNDING)
    over = (stages.serving + stages.loading) @ speed - need
    serving = stages.serving.copy()
    while True:
        target = int(np.argmin(over / stages.work))
        if over[target] >= 0:
            return out, into
        may = (serving > 0) & (serving.sum(axis=1) > 1)[:, None] & (over[:, None] >= speed)
        kinds = np.flatnonzero(may.any(axis=0))
        if len(kinds) == 0:
            return None
        enough = kinds[speed[kinds] >= -over[target]]
        kind = int(
            enough[np.argmin(speed[enough])] if len(enough) else kinds[speed[kinds].argmax()]
        )
        left = np.where(may[:, kind], (serving @ speed - speed[kind]) / stages.work, -np.inf)
        source = int(np.argmax(left))
        for array, stage, change in ((out, source, 1), (into, target, 1), (serving, source, -1)):
            array[stage, kind] += change
        over[source] -= speed[kind]
        over[target] += speed[kind]


def _nothing(stages: StageRates) -> tuple[Ints, Ints]:
    return np.zeros_like(stages.serving), np.zeros_like(stages.serving)


def _levels(unit: Floats, lowest: float, top: float) -> list[float]:
    """Rates that a stage could have, above the lowest and up to a limit, ascending."""
    found: set[float] = set()
    for u in np.unique(unit).tolist():
        first, last = math.floor(lowest * u) + 1, math.floor(top * u * (1 + ROUNDING))
        found.update(c / u for c in range(first, last + 1))
    return sorted(found)


def _leaving(serving: Ints, spare: Ints, unit: Floats, moves: int) -> Ints:
    """Who leaves, so that the slowest stage without them is as fast as can be."""
    out = np.zeros_like(serving)
    queue = [
        (-(n - 1) / u, s)
        for s, (n, u) in enumerate(zip(serving.tolist(), unit.tolist(), strict=True))
        if spare[s] > 0
    ]
    heapq.heapify(queue)
    for _ in range(moves):
        s = queue[0][1]
        out[s] += 1
        if out[s] < spare[s]:
            heapq.heapreplace(queue, (-(serving[s] - out[s] - 1) / unit[s], s))
        else:
            heapq.heappop(queue)
    return out


def _paired(out: Ints, into: Ints) -> list[StageMove]:
    """From where to where, kind by kind."""
    found: list[StageMove] = []
    for kind in range(out.shape[1]):
        sources = [[s, int(out[s, kind])] for s in np.flatnonzero(out[:, kind]).tolist()]
        for target in np.flatnonzero(into[:, kind]).tolist():
            wanted = int(into[target, kind])
            while wanted:
                source, left = sources[0]
                number = min(wanted, left)
                found.append(StageMove(source, target, kind, number))
                wanted -= number
                sources[0][1] -= number
                if sources[0][1] == 0:
                    sources.pop(0)
    return found
