"""`planner.plan`: the whole at once, or for one shape or the best of many, part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from planner.compose.arranging import Arranged, arrange, arrange_unlike
from planner.compose.baseline_plans import BaselinePlans
from planner.compose.bounds import StepBound, step_bound
from planner.compose.completing import Completing
from planner.compose.cost_bound import cost_bound
from planner.compose.degrees import NO_SHAPE, Candidate, candidates, others
from planner.compose.helpers import with_helpers
from planner.compose.layer_split import is_uniform
from planner.compose.measured import at_most
from planner.compose.money import Merit, with_cost
from planner.compose.pricing import straight_plan
from planner.compose.rare_averaging import arrange_rarely
from planner.compose.request import PlanRequest, Question
from planner.compose.request import Wiring as Asked
from planner.compose.shape import Shape, shape_of
from planner.compose.skipping_plan import skipping_plan
from planner.compose.whole_bound import whole_bound
from planner.network.cluster import Cluster
from planner.problems import ProblemError
from planner.search.certificate import Certificate
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import (
    StoppingCriterion,
    StopRun,
    started,
)
from planner.training_plan.choices import Codec, Wiring
from planner.training_plan.model import TrainingPlan
from planner.training_plan.rules import contradictions
from planner.workload.workload import Workload

ARRANGED, MOST_ARRANGED = 0.1, 256
"""Share of the limit for straight pipelines before everything is searched, and devices up to which
they are."""
GLANCE = 0.5
"""Share of the limit for a look at every shape; the winner gets the rest."""


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    request: PlanRequest | None = None,
    stop: StoppingCriterion,
    seed: int = 0,
    **fields: Any,
) -> Result[TrainingPlan]:
    """Plan a training run.

    Parameters
    ----------
    cluster, workload
        Where and what to train.
    request
        Which decisions are fixed, and to what; see `PlanRequest`.
    stop
        When to stop searching. Under a limit that counts the same arguments give the same plan.
    seed
        Of every random choice.
    fields
        Fields of `PlanRequest`, which replace those of ``request``.

    Returns
    -------
    Result
        ``plan`` is a `TrainingPlan`, ``objective`` its predicted step time in seconds (with
        objective ``"cost"``: what the step costs in dollars, waiting included) and ``bound`` a time
        that no plan with its head on the last stage can beat, or with ``stages`` no placement with
        these stages, pipelines and layers (with ``stages="auto"``: with any that were tried). With
        ``path_stages`` both are means over the cycle of iterations. With a calibration the bound is
        that of any plan with its head on the last stage, and there is none with ``path_stages``.

    Raises
    ------
    ProblemError
        Fields that contradict each other, or do not fit cluster and workload.
    NetworkError
        A pair of devices is not measured.
    """
    question = Question.of(cluster, workload, request, seed, fields)
    if question.request.open:
        return _everything(question, stop)
    if question.request.stages == "auto":
        return _best_shape(question, stop)
    return _one_shape(question, shape_of(question), stop)


def _everything(question: Question, stop: StoppingCriterion) -> Result[TrainingPlan]:
    from planner.compose.whole import best_whole  # numba takes a while to load

    # bounds divide by rates, which are not known of all pairs
    question.cluster.network.require_complete()
    baselines = BaselinePlans.of(question, stop)
    request, bound = question.request, _of_any_plan(question, question.workload)
    by_cost = Merit.of(request).by_cost
    if by_cost:
        bound = cost_bound(question, bound)
    plans = [*(one.plan() for one in baselines), *_arranged_plans(question, baselines, stop)]
    found = best_whole(question, stop, bound, plans)
    found = replace(found, baselines=baselines)
    result = _with_certificates(found, {}, "cost" if by_cost else "step")
    return _routed(result, request) if request.wiring == Asked.STOCHASTIC else result


def _arranged_plans(
    question: Question, baselines: BaselinePlans, stop: StoppingCriterion
) -> list[TrainingPlan]:
    """Straight pipelines with as many stages as the best ranks, on the best devices for each."""
    if baselines.ranks is None or len(question.cluster) > MOST_ARRANGED:
        return []
    best = baselines.ranks.best[1]
    asked = replace(best.start.question, cluster=question.cluster)
    try:
        found = _one_shape(asked, shape_of(asked), stop.portion(ARRANGED))
    except ValueError:
        return []
    return [] if found.plan is None else [found.plan.replace(certificates={})]


def _of_any_plan(question: Question, workload: Workload) -> StepBound | None:
    """A bound whatever the decisions are; none where rounds are of small groups, or delayed."""
    request = question.request
    if request.group_size is not None or request.delayed:
        return None
    return whole_bound(
        at_most(question.cluster, workload, request.calibration),
        workload,
        Codec(request.codec).wire_ratio,
        recomputes=request.recompute != (),
        every=request.sync_every,
        helped_in=question.helped_in,
        two_clocks=request.within is not None,
        measured=request.calibration is not None,
    )


def _measured_bound(question: Question, made: TrainingPlan, samples: int) -> StepBound | None:
    """Where compute times were measured, that of any plan, if it is about such as this one.

    Of microbatches of ``samples`` and of their multiples.
    """
    request = question.request
    if request.calibration is None or request.skips:
        return None
    if made.head_stage < len(made.stage_layers) - 1:
        return None
    bound = _of_any_plan(question, made.workload.replace(microbatch_samples=samples))
    # a mean over many steps, which the few that the clock looks at may be below
    lasting = request.sync_every > 1 or request.calibration.updates
    if bound is not None and lasting and bound.seconds > made.predicted.step_s:
        return None
    return bound


def _routed(result: Result[TrainingPlan], request: PlanRequest) -> Result[TrainingPlan]:
    """A flow's plan as one whose devices begin with that flow, and choose."""
    assert result.plan is not None
    made = result.plan.replace(wiring=Wiring.STOCHASTIC, routing=request.routing)
    for problem in contradictions(made):
        raise ProblemError(f"wiring 'stochastic': {problem}")
    return replace(result, plan=made)


class _Draft(NamedTuple):
    """A priced plan, the certificates of its parts, and what the search says of itself."""

    plan: TrainingPlan
    shape: Shape
    certificates: dict[str, Certificate]
    method: str
    reason: str


def _one_shape(question: Question, shape: Shape, stop: StoppingCriterion) -> Result[TrainingPlan]:
    run = started(stop)
    make = _skipping if question.request.skips else _straight
    draft = make(question, shape, stop, run)
    step: Incumbent[TrainingPlan] = Incumbent(
        run, draft.plan.content_hash, method=draft.method, seed=question.seed
    )
    made = with_cost(with_helpers(question, draft.plan), question.request)
    step.offer(made.predicted.step_s, made)
    bound = step_bound(question, draft.shape)
    bound = bound or _measured_bound(question, made, made.workload.microbatch_samples)
    if bound is not None:
        step.raise_bound(*bound)
    return _with_certificates(step.result(exhausted=draft.reason), draft.certificates)


def _with_certificates(
    step: Result[TrainingPlan], parts: dict[str, Certificate], objective: str = "step"
) -> Result[TrainingPlan]:
    assert step.plan is not None
    certificates = {**parts, objective: step.certificate()}
    return replace(step, plan=step.plan.replace(certificates=certificates))


def _straight(question: Question, shape: Shape, stop: StoppingCriterion, _: StopRun) -> _Draft:
    """Every microbatch through one device of every stage, along the rows of a grid."""
    arranged = _arranging(question)(question, shape, Completing(stop, question, shape))
    made = arranged.made or straight_plan(question, arranged.shape, arranged.assignment)
    certificate = arranged.certificate
    return _Draft(
        made,
        arranged.shape,
        {"assignment": certificate},
        f"{certificate.method}, {question.request.schedule}",
        f"assignment: {certificate.stop_reason}",
    )


def _arranging(question: Question) -> Callable[[Question, Shape, StoppingCriterion], Arranged]:
    """How devices come to stages."""
    if not is_uniform(question.cluster, question.workload):
        return arrange_unlike
    return arrange_rarely if question.request.sync_every > 1 else arrange


def _skipping(question: Question, shape: Shape, stop: StoppingCriterion, run: StopRun) -> _Draft:
    """Paths that skip stages, on the best arrangement and layers that were tried."""
    return _Draft(*skipping_plan(question, shape, stop, run))


def _best_shape(question: Question, stop: StoppingCriterion) -> Result[TrainingPlan]:
    """A look at every number of stages and size of microbatches, then more for the winner."""
    run = started(stop)
    shapes = candidates(question)
    if not shapes:
        raise ProblemError(f"no shape fits this cluster: {NO_SHAPE}")
    glance = stop.portion(GLANCE / len(shapes))
    interrupted = False
    refused: list[Candidate] = []
    planned: list[tuple[Question, Result[TrainingPlan]]] = []
    for asked in shapes:
        try:
            planned.append((asked, _one_shape(asked, shape_of(asked), glance)))
        except ValueError as error:
            other = _recomputing(asked)
            try:
                if other is None:
                    raise
                planned.append((other, _one_shape(other, shape_of(other), glance)))
            except ValueError:
                refused.append(Candidate.refusal(asked, str(error)))
                continue
        if (interrupted := _interrupted(planned[-1][1])) or run.check() is not None:
            break
    if not planned:
        raise ProblemError(
            f"no shape fits this cluster; the first was refused: {refused[0].refused}"
        )
    first = min(range(len(planned)), key=lambda k: planned[k][1].objective or math.inf)
    winner, best = planned[first]
    again = best
    if not interrupted and run.check() is None:
        rest = stop.portion(1 - GLANCE, run.remaining_s)
        again = _one_shape(winner, shape_of(winner), rest)
    if (again.objective or math.inf) < (best.objective or math.inf):
        best = again
        planned[first] = winner, again
    table = sorted([*(Candidate.of(*p) for p in planned), *refused], key=Candidate.rank)
    return _least_of_shapes(question, best, [result for _, result in planned], table, run)


def _recomputing(asked: Question) -> Question | None:
    """The same with recomputation in all stages, which may fit; None where it is not open."""
    if asked.request.recompute is not None:
        return None
    return replace(asked, request=asked.request.replace(recompute="all"))


def _interrupted(result: Result[TrainingPlan]) -> bool:
    """Whether Ctrl-C ended a part of it."""
    assert result.plan is not None
    return any("interrupted" in c.stop_reason for c in result.plan.certificates.values())


def _least_of_shapes(
    question: Question,
    best: Result[TrainingPlan],
    results: Sequence[Result[TrainingPlan]],
    table: Sequence[Candidate],
    run: StopRun,
) -> Result[TrainingPlan]:
    """The best plan, with the least bound of all shapes as its own, or that of any plan."""
    assert best.plan is not None and best.objective is not None
    step: Incumbent[TrainingPlan] = Incumbent(
        run,
        best.plan.content_hash,
        method=f"{best.method}, {len(table)} shapes",
        seed=best.seed,
    )
    step.offer(best.objective, best.plan)
    made = [result.plan for result in results if result.plan is not None]
    each = math.gcd(*(one.workload.microbatch_samples for one in made))
    if (any_plan := _measured_bound(question, best.plan, each)) is not None:
        step.raise_bound(*any_plan)
    elif question.request.calibration is None and all(r.bound is not None for r in results):
        least = min(results, key=lambda result: result.bound or 0.0)
        witness = {
            "kind": "straight step",
            "shapes": [s for r in results if r.witness for s in r.witness["shapes"]],
        }
        basis = f"least of {len(results)} shapes: {least.basis}"
        step.raise_bound(least.bound or 0.0, basis, witness, rounding=0.0)
    parts = {k: c for k, c in best.plan.certificates.items() if k != "step"}
    found = step.result(exhausted=best.stop_reason)
    assert found.plan is not None
    instead = found.plan.replace(alternatives=others(found.plan, table))
    return _with_certificates(replace(found, plan=instead, candidates=tuple(table)), parts)
