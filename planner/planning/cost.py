"""Cost of a plan, and the objective: step time or cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.network.prices import Prices
from planner.planning.request import Objective, PlanRequest
from planner.simulator.traffic import sent_bytes
from planner.training_plan.cost import Cost
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HOUR_S, BILLION = 3600.0, 1e9


def with_cost(plan: TrainingPlan, request: PlanRequest) -> TrainingPlan:
    """The plan with the cost of a step."""
    hourly = plan.cluster.devices.usd_per_hour
    if hourly is None:
        return plan
    sources, destinations, bytes_sent = sent_bytes(plan)
    usd_per_byte = pair_prices(request.prices, plan.cluster, sources, destinations)
    devices = float(np.sum(hourly)) / HOUR_S * plan.predicted.step_s
    messages = float((bytes_sent * usd_per_byte).sum())
    tokens = step_tokens(plan.workload)
    cost = Cost(
        devices,
        messages,
        float(bytes_sent[usd_per_byte > 0].sum()),
        None if tokens is None else (devices + messages) / tokens * BILLION,
        request.prices,
        request.hour_usd,
    )
    return plan.replace(cost=cost)


def pair_prices(prices: Prices, cluster: Cluster, sources: Ints, destinations: Ints) -> Floats:
    """Dollars per byte from devices to others, in the common shape of both."""
    regions, index = np.unique(cluster.network.regions, return_inverse=True)
    return np.asarray(prices.usd_per_byte(regions.tolist())[index[sources], index[destinations]])


def step_tokens(workload: Workload) -> int | None:
    """Tokens per step; None if the workload has no sequence length."""
    arch = workload.architecture
    return None if arch is None else workload.batch_samples * arch.sequence


@dataclass(frozen=True)
class PlanObjective:
    """What to minimise: step time, or dollars of a step.

    Attributes
    ----------
    by_cost
        Whether dollars are minimised.
    wait_usd_per_s
        Value of waiting, added to the price of all devices.
    """

    by_cost: bool
    wait_usd_per_s: float

    @classmethod
    def of(cls, request: PlanRequest) -> PlanObjective:
        """The objective of a request."""
        return cls(request.objective == Objective.COST, request.hour_usd / HOUR_S)

    def usd_per_s(self, cluster: Cluster) -> float:
        """Dollars per second of a step, of devices and of waiting."""
        hourly = cluster.devices.usd_per_hour
        return (0.0 if hourly is None else float(np.sum(hourly)) / HOUR_S) + self.wait_usd_per_s

    def value(self, step_s: float, usd_per_s: float, messages_usd: float) -> float:
        """Seconds or dollars of a step."""
        return step_s * usd_per_s + messages_usd if self.by_cost else step_s

    def of_plan(self, plan: TrainingPlan) -> float:
        """Seconds or dollars of a plan that has its cost."""
        messages = 0.0 if plan.cost is None else plan.cost.messages_usd
        return self.value(plan.predicted.step_s, self.usd_per_s(plan.cluster), messages)


STEP_TIME = PlanObjective(False, 0.0)
"""Minimise step time."""
