"""Which plans are worth a thought: none is both faster and cheaper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from planner.compose.planning import plan
from planner.compose.request import Objective, PlanRequest
from planner.network.cluster import Cluster
from planner.problems import ProblemError
from planner.search.result import Result
from planner.search.stop import StoppingCriterion, started
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

WORTH = (math.inf, 4.0, 1.0, 0.25, 0.0)
"""What an hour's wait is worth, in hours of all devices: from nothing but time to nothing but
dollars."""


@dataclass(frozen=True)
class FrontPoint:
    """A plan that is on the front, or was tried.

    Attributes
    ----------
    result
        Of `planner.plan`.
    request
        What it was asked for.
    on_front
        Whether no other is as fast and as cheap, and better in one of both.
    """

    result: Result[TrainingPlan]
    request: PlanRequest
    on_front: bool = False

    @property
    def plan(self) -> TrainingPlan:
        """The plan."""
        assert self.result.plan is not None
        return self.result.plan

    @property
    def step_s(self) -> float:
        """Seconds of its step."""
        return self.plan.predicted.step_s

    @property
    def step_usd(self) -> float:
        """Dollars of its step."""
        assert self.plan.cost is not None
        return self.plan.cost.step_usd


def pareto(
    cluster: Cluster,
    workload: Workload,
    *,
    sync_every: Sequence[int] = (1,),
    codecs: Sequence[str] = ("none",),
    boundary_codecs: Sequence[str] = ("none",),
    worth: Sequence[float] = WORTH,
    stop: StoppingCriterion,
    seed: int = 0,
    **fields: Any,
) -> tuple[FrontPoint, ...]:
    """Plans between the fastest and the cheapest.

    Each combination of what may change training is searched for each worth of time, with an equal
    part of the limit.

    Parameters
    ----------
    cluster, workload
        Where and what to train; devices have prices.
    sync_every, codecs, boundary_codecs
        What may be asked of `PlanRequest` fields ``sync_every``, ``codec``, ``boundary_codec``.
    worth
        What an hour's wait is worth, in what all devices cost in an hour; infinite: time alone.
    stop
        When to end, for all of them together.
    seed
        Of every random choice.
    fields
        Other fields of `PlanRequest`.

    Returns
    -------
    tuple[FrontPoint, ...]
        All that were found, the fastest first.

    Raises
    ------
    ProblemError
        Devices without prices, or nothing fits.
    """
    hourly = cluster.devices.usd_per_hour
    if hourly is None:
        raise ProblemError(
            "a front of seconds and dollars needs what devices cost; give usd_per_hour to Devices "
            "or in the devices file"
        )
    asked = list(_requests(float(np.sum(hourly)), worth, fields, sync_every, codecs, boundary_codecs))
    if not asked:
        raise ProblemError("nothing is asked for; give at least one of each kind")
    run, found = started(stop), list[FrontPoint]()
    refused: ProblemError | None = None
    for k, request in enumerate(asked):
        share = stop.portion(1 / len(asked)) if k else stop.portion(1 / len(asked), None)
        try:
            result = plan(cluster, workload, request=request, stop=share, seed=seed)
        except ProblemError as error:
            refused = refused or error
            continue
        if result.plan is not None:
            found.append(FrontPoint(result, request))
        if result.stop_reason == "interrupted" or run.check() is not None:
            break
    if not found:
        raise refused or ProblemError("no plan was found; allow more time")
    return _marked(found)


def _requests(
    all_usd: float, worth: Sequence[float], fields: dict[str, Any], *choices: Sequence[Any]
) -> Iterator[PlanRequest]:
    """The extremes of worth come first, so that an interrupted front has both ends."""
    ends_first = sorted(worth, key=lambda one: -abs(math.log(max(one, 1e-300))) if one else -1e9)
    for hours in dict.fromkeys(ends_first):
        for every, codec, boundary in product(*choices):
            least: dict[str, Any] = {"objective": Objective.TIME}
            if hours < math.inf:
                least = {"objective": Objective.COST, "hour_usd": hours * all_usd}
            names = ("sync_every", "codec", "boundary_codec")
            chosen = dict(zip(names, (every, codec, boundary), strict=True))
            yield PlanRequest(**fields | chosen | least)


def _marked(found: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Fastest first; on the front is what costs less than all that are as fast."""
    order = sorted(found, key=lambda point: (point.step_s, point.step_usd))
    marked, least = [], math.inf
    for point in order:
        better = point.step_usd < least * (1 - 1e-9)
        least = min(least, point.step_usd)
        marked.append(FrontPoint(point.result, point.request, better))
    return tuple(marked)
