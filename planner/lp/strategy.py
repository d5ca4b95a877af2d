"""Classify a plan as a known strategy or a mix of several (DeDLOC, 3.2).

Strategies differ in where the shares of the vector are summed:

* by contributors in equal parts: all-reduce;
* by one reducer: a parameter server (if it contributes itself, the share it sums above the
  contributors' common part);
* by several peers that contribute no gradients: BytePS's summation services;
* with groups of two, decentralised pairs, whatever the plan inside a pair.

A plan that does several of these is reported as a mix, in fractions of the vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.problems.answers import AveragingPlan

TOLERANCE = 1e-6
"""Tolerance of shares of the vector; smaller parts of a mix are omitted."""

MIN_SHOWN = 0.005
"""Smaller parts are not shown, as they would round to 0%."""


class Strategy(StrEnum):
    """The strategies that DeDLOC recovers."""

    ALL_REDUCE = "all-reduce"
    PARAMETER_SERVER = "parameter server"
    BYTEPS = "BytePS"
    PAIRS = "decentralised pairs"
    LOCAL = "no averaging"


@dataclass(frozen=True)
class RecognisedStrategy:
    """Strategies that a plan mixes.

    Attributes
    ----------
    mix
        ``(strategy, fraction of the vector)``, the largest first, fractions summing to 1.
    """

    mix: tuple[tuple[Strategy, float], ...]

    @property
    def equals(self) -> Strategy | None:
        """The strategy that the plan equals, or None if it mixes several."""
        return self.mix[0][0] if len(self.mix) == 1 else None

    def __str__(self) -> str:
        if self.equals is not None:
            return str(self.equals)
        named = [m for k, m in enumerate(self.mix) if k == 0 or m[1] >= MIN_SHOWN]
        return " + ".join(f"{part:.0%} {strategy}" for strategy, part in named)


def recognise(plan: AveragingPlan, group_size: int | None = None) -> RecognisedStrategy:
    """Classify the strategy of a plan.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2.
    """
    shares, computes = plan.shares, plan.computes
    n = len(shares)
    if n == 1 or not shares.any() or not computes.any():
        return RecognisedStrategy(((Strategy.LOCAL, 1.0),))
    if group_size == 2 and n > 2:
        return RecognisedStrategy(((Strategy.PAIRS, 1.0),))
    reducers = shares > TOLERANCE / n
    aggregators = reducers & ~computes
    contributing = shares[computes]
    # the part of the vector that all contributors sum evenly
    by_contributors = (
        float(contributing.min()) * len(contributing) if len(contributing) > 1 else 0.0
    )
    by_aggregators = float(shares[aggregators].sum())
    single_reducer = max(1.0 - by_contributors - by_aggregators, 0.0)
    parts = {
        Strategy.ALL_REDUCE: by_contributors,
        Strategy.BYTEPS: 0.0,
        Strategy.PARAMETER_SERVER: single_reducer,
    }
    # a single aggregator with a much larger share than any contributor is a parameter server
    largest = float(contributing.max(initial=0.0))
    if int(aggregators.sum()) == 1 and by_aggregators > 2 * largest:
        parts[Strategy.PARAMETER_SERVER] += by_aggregators
    else:
        parts[Strategy.BYTEPS] += by_aggregators
        if by_aggregators > TOLERANCE:
            # BytePS sums one part of the vector on the workers themselves
            parts[Strategy.BYTEPS] += parts.pop(Strategy.ALL_REDUCE)
    mix = sorted(
        ((s, float(np.round(x, 12))) for s, x in parts.items() if x > TOLERANCE),
        key=lambda p: -p[1],
    )
    total = sum(x for _, x in mix)
    return RecognisedStrategy(tuple((s, x / total) for s, x in mix))
