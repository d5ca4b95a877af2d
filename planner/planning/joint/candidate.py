"""Candidates of the joint search: how they are built, and what is known of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.planning.cost import PlanObjective
from planner.planning.joint.device_classes import Floats
from planner.planning.joint.device_flow import PairSpread
from planner.planning.joint.layout import Layout
from planner.planning.request import ShareRule


@dataclass(frozen=True)
class CandidateSpec:
    """All that determines a candidate.

    Attributes
    ----------
    layout
        Devices and layers of the stages.
    spread
        Distribution of the flow over pairs of devices; None for the one that is usually best.
    slowdown
        Per node of the flow, a factor on its compute and transfer times, which directs flow away
        from it; empty: 1.
    max_in_flight_ratio
        Limit on microbatches in flight, as a multiple of what Little's law requires.
    shares
        Rule for shares of the averaging in place of the request's.
    """

    layout: Layout
    spread: PairSpread | None = None
    slowdown: tuple[float, ...] = ()
    max_in_flight_ratio: float = math.inf
    shares: ShareRule | None = None


@dataclass(frozen=True, eq=False)
class CandidatePlan:
    """A candidate: paths and an order of operations, without these themselves.

    `CandidateBuilder` makes them again from ``spec`` where they are needed, so that candidates are
    small enough to be sent between processes.

    Attributes
    ----------
    spec
        What it was built from, with the spread and slowdowns that it has.
    other_spreads
        Other distributions of the flow that the layout allows.
    seconds
        Estimated step: the longest time of a stage from its first operation to its update, from an
        idle system, with undisturbed averaging. A mean if one step in several averages.
    lateness
        ``float[V]``: mean end of a node's operations, relative to its stage.
    devices
        Number of devices with a stage.
    operations
        Operations of a step, which determine the cost of simulation.
    used_layout
        The layout without devices that get no microbatch.
    objective
        What is minimised.
    usd_per_s, messages_usd
        Dollars of a second and of the messages of a step, if the objective is cost.
    two_steps
        Whether ``seconds`` includes a next step, whose messages slow averaging down.
    """

    spec: CandidateSpec
    other_spreads: tuple[PairSpread, ...]
    seconds: float
    lateness: Floats
    devices: int
    operations: int
    used_layout: Layout
    objective: PlanObjective
    usd_per_s: float = 0.0
    messages_usd: float = 0.0
    two_steps: bool = False

    @property
    def value(self) -> float:
        """Seconds or dollars, whichever is minimised."""
        return self.objective.value(self.seconds, self.usd_per_s, self.messages_usd)

    @property
    def layout(self) -> Layout:
        """The layout it was built from."""
        return self.spec.layout
