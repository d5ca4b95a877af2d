"""Pareto front of plans over step time and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.planning.request import InnerAveraging, Objective, PlanRequest
from planner.planning.solve import plan
from planner.problems import ProblemError
from planner.search.interrupts import INTERRUPTS
from planner.search.result import Result
from planner.search.stop import INTERRUPTED, StoppingCriterion
from planner.search.worker_pool import Workers
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.utils.text import counted, quantity_range
from planner.utils.validate import choice, real, sequence
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.workload import Workload

HOUR_VALUES = (math.inf, 0.4, 0.2, 0.1, 0.05, 0.02, 0.0)
"""Values of an hour's wait, relative to the price of all devices: from time alone to cost alone."""
NO_INNER_AVERAGING = "none"
"""Value of ``within`` without averaging in every step."""


@dataclass(frozen=True)
class FrontPoint:
    """A plan on the front, or one that was tried.

    Attributes
    ----------
    result
        Of `planner.plan`.
    request
        The request it answers.
    on_front
        Whether no other plan that trains in the same way is as fast and as cheap, and better in
        one of both.
    """

    result: Result[TrainingPlan]
    request: PlanRequest
    on_front: bool = False

    def __repr__(self) -> str:
        where = "on the front" if self.on_front else "not on the front"
        return f"FrontPoint({self.step_s:.4g} s, {self.step_usd:.4g} $ a step, {where})"

    @property
    def plan(self) -> TrainingPlan:
        """The plan of ``result``."""
        assert self.result.plan is not None
        return self.result.plan

    @property
    def training_settings(self) -> tuple[int, str, str, str]:
        """What changes training: averaging interval, codecs, and averaging within regions."""
        plan, within = self.plan, self.request.within or NO_INNER_AVERAGING
        return plan.sync.every_steps, plan.codec, plan.workload.boundary_codec, within

    @property
    def step_s(self) -> float:
        """Seconds of its step."""
        return self.plan.predicted.step_s

    @property
    def step_usd(self) -> float:
        """Dollars of its step."""
        assert self.plan.cost is not None
        return self.plan.cost.step_usd


@dataclass(frozen=True)
class Front:
    """Plans between the fastest and the cheapest.

    Attributes
    ----------
    points
        All distinct plans, fastest first.
    refused
        Combinations that could not be planned, and why.
    """

    points: tuple[FrontPoint, ...]
    refused: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        seconds = quantity_range([point.step_s for point in self.points], "s")
        dollars = quantity_range([point.step_usd for point in self.points], "$")
        return (
            f"Front({counted(len(self.points), 'plan')}, {sum(p.on_front for p in self.points)} on "
            f"the front, {seconds}, {dollars} a step, {len(self.refused)} refused)"
        )


def pareto(
    cluster: Cluster,
    workload: Workload,
    *,
    sync_every: Sequence[int] = (1,),
    codecs: Sequence[str] = ("none",),
    boundary_codecs: Sequence[str] = ("none",),
    within: Sequence[str] = (NO_INNER_AVERAGING,),
    worth: Sequence[float] = HOUR_VALUES,
    stop: StoppingCriterion,
    seed: int = 0,
    executor: Workers = 1,
    told: Callable[[Front], None] = lambda front: None,
    **fields: Any,
) -> Front:
    """Plans between the fastest and the cheapest.

    Every combination of the given ``sync_every``, codecs and ``within`` is searched for each value
    of time.

    Parameters
    ----------
    cluster, workload
        Where and what to train; devices need prices.
    sync_every, codecs, boundary_codecs
        Values to combine of `PlanRequest` fields ``sync_every``, ``codec``, ``boundary_codec``.
    within
        Likewise, for ``sync_every`` above 1; ``"none"`` for no averaging in every step.
    worth
        Values of an hour's wait, relative to the hourly price of all devices; infinite for time
        alone.
    stop
        Stopping criterion of each search; an interruption ends all of them.
    seed
        Of the random generators.
    executor
        Where each search works; see `planner.plan`.
    told
        Called with the front so far after each search.
    fields
        Other fields of `PlanRequest`.

    Returns
    -------
    Front
        All plans found, and what was refused.

    Raises
    ------
    ProblemError
        Devices without prices, an invalid value of time, an unknown codec, or nothing fits.
    """
    hourly = cluster.devices.usd_per_hour
    if hourly is None:
        raise ProblemError(
            "a front of seconds and dollars needs what devices cost; give usd_per_hour, or that "
            "column of the devices file"
        )
    for name in ("objective", "hour_usd"):
        if name in fields:
            raise ProblemError(f"{name} follows from worth here; leave it out")
    sync_every = _values("sync_every", sync_every)
    codecs, boundary_codecs = _values("codecs", codecs), _values("boundary_codecs", boundary_codecs)
    within, worth = _values("within", within), _values("worth", worth)
    hours = [float(value) if value == math.inf else real("worth", value, 0) for value in worth]
    for kind, name, words in (
        (Codec, "codec", codecs),
        (BoundaryCodec, "boundary_codec", boundary_codecs),
        (InnerAveraging, "within", [who for who in within if who != NO_INNER_AVERAGING]),
    ):
        for word in words:
            choice(kind, name, word, error=ProblemError)
    choices = (sync_every, codecs, boundary_codecs, within)
    points, refused = list[FrontPoint](), list[tuple[str, str]]()
    for chosen, least in _combinations(float(np.sum(hourly)), hours, *choices):
        try:
            request = PlanRequest(**fields | chosen | least)
            result = plan(
                cluster, workload, request=request, stop=stop, seed=seed, executor=executor
            )
        except ProblemError as error:
            refused.append((", ".join(f"{k} {v}" for k, v in chosen.items()), str(error)))
            continue
        points.append(FrontPoint(result, request))
        told(_front(points, refused))
        if INTERRUPTS.requested or result.stop_reason == INTERRUPTED:
            break
    if not points:
        why = (
            refused[0][1]
            if refused
            else "no combination is given; give at least one value of each option"
        )
        raise ProblemError(why)
    return _front(points, refused)


def _front(points: Sequence[FrontPoint], refused: Sequence[tuple[str, str]]) -> Front:
    return Front(_mark_front(points), tuple(dict.fromkeys(refused)))


def _values(field: str, given: Any) -> tuple[Any, ...]:
    """The values to combine, of which one alone is none."""
    if isinstance(given, str):
        raise ProblemError(f"{field} must be a list, found {given!r}; give [{given!r}]")
    return sequence(field, given, error=ProblemError)


def _combinations(
    all_usd: float, hours: Sequence[float], *choices: Sequence[Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Combinations of what changes training, each with an objective.

    The extremes come first, so that an interrupted front has both ends.
    """
    for worth in dict.fromkeys(sorted(hours, key=lambda value: 0 < value < math.inf)):
        least: dict[str, Any] = {"objective": Objective.TIME}
        if worth < math.inf:
            least = {"objective": Objective.COST, "hour_usd": worth * all_usd}
        for every_steps, codec, boundary, who in product(*choices):
            if every_steps == 1 and who != NO_INNER_AVERAGING and NO_INNER_AVERAGING in choices[-1]:
                continue  # all average in every step
            chosen = {"sync_every": every_steps, "codec": codec, "boundary_codec": boundary}
            yield chosen | ({} if who == NO_INNER_AVERAGING else {"within": who}), least


def _mark_front(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Distinct plans, fastest first; those cheaper than all faster ones are on the front."""
    unlike = {point.plan.content_hash: point for point in reversed(points)}
    order = sorted(unlike.values(), key=lambda point: (point.step_s, point.step_usd))
    marked, least = list[FrontPoint](), dict[tuple[int, str, str, str], float]()
    for point in order:
        known = least.get(point.training_settings, math.inf)
        least[point.training_settings] = min(known, point.step_usd)
        better = point.step_usd < known * (1 - 1e-9)
        marked.append(replace(point, on_front=better))
    return tuple(marked)
