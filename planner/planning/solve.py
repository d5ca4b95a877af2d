"""`planner.plan`: solves the joint problem, one shape, or the best of several shapes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from planner.network.cluster import Cluster
from planner.planning.averaging.aggregators import with_aggregators
from planner.planning.baselines.plans import Baselines
from planner.planning.baselines.search import BaselinePlan
from planner.planning.calibrated import fastest_measured
from planner.planning.cost import PlanObjective, with_cost
from planner.planning.cost_bound import cost_bound
from planner.planning.evaluation import straight_plan
from planner.planning.joint.joint_bound import joint_bound
from planner.planning.joint.mean_bound import mean_bound
from planner.planning.layer_split import is_uniform
from planner.planning.partial_paths.partial_path_plan import PlannedShape, partial_path_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import (
    AUTO,
    OperationOrder,
    PlanKind,
    PlanRequest,
    RequestedWiring,
)
from planner.planning.screening import REFUSALS, SCREENING_SHARE, Choice, best_of
from planner.planning.shape import Shape, require_whole_microbatches, shape_of, shard_counts
from planner.planning.step_bound import StepBound, step_bound
from planner.planning.straight.local_sgd_placement import place_for_local_sgd
from planner.planning.straight.parallelism_candidates import (
    NO_SHAPE,
    ShapeRow,
    candidates,
    runners_up,
)
from planner.planning.straight.placement import (
    Placement,
    place_heterogeneous,
    place_stages,
    reason_when_slower,
)
from planner.planning.straight.plan_aware_stop import PlanAwareStop
from planner.planning.straight.simulated_exchange import exchange_devices
from planner.planning.workers import degrees, is_mix, kinds_of_machines, mix_words
from planner.problems import ProblemError
from planner.problems.quantities import instance_of
from planner.search.certificate import OPTIMAL_GAP, Certificate
from planner.search.incumbent import Incumbent
from planner.search.interrupts import INTERRUPTS
from planner.search.result import Result, objective_or_inf
from planner.search.stop import (
    INTERRUPTED,
    SearchRun,
    StoppingCriterion,
    started,
)
from planner.search.worker_pool import Workers, require_workers
from planner.training_plan.choices import Codec, Head, Wiring
from planner.training_plan.model import MEAN_STEP, TrainingPlan
from planner.training_plan.validation import contradictions
from planner.utils.text import counted
from planner.workload.workload import Workload

logger = logging.getLogger(__name__)

MAX_KINDS = 4
"""Kinds of machines whose number of GPUs per worker is varied, the fastest ones."""
EXCHANGE_SHARE = 0.3
"""Share of the limit on straight pipelines for exchanges of devices on the simulator."""
MEAN_BOUND_SHARE = 0.1
"""Share of a time limit for the bound on the mean step, after the joint search."""
STRAIGHT_SHARE, MAX_STRAIGHT = 0.1, 256
"""Share of the limit for straight pipelines before the joint search, and the number of devices up
to which they are tried."""


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    request: PlanRequest | None = None,
    stop: StoppingCriterion,
    seed: int = 0,
    executor: Workers = 1,
    **fields: Any,
) -> Result[TrainingPlan]:
    """Plan a training run.

    Parameters
    ----------
    cluster, workload
        Where and what to train.
    request
        Decisions that are fixed; see `PlanRequest`.
    stop
        When to stop searching. With a limit on effort or iterations, the result is deterministic.
    seed
        Of the random generators.
    executor
        Where the joint search works: a number of processes on this machine, or a
        `concurrent.futures.Executor`, such as that of a Dask or MPI cluster. Does not change
        the result of a search with a limit on effort or iterations. Processes are forked on Linux
        and share its memory; other systems start them anew, so that a script needs
        ``if __name__ == "__main__":`` there, as with any `multiprocessing`.
    fields
        Fields of `PlanRequest`, which replace those of ``request``.

    Returns
    -------
    Result
        ``plan`` is a `TrainingPlan`. ``objective`` is its predicted step time in seconds or, with
        objective ``"cost"``, the cost of a step in dollars; with ``path_stages``, the mean over the
        cycle of iterations. ``bound`` is a lower bound on it, or None:

        - joint search: for every plan, with the head on the last stage or, where the search may
          choose that, on the first; any plan with a calibration: for every plan with its head. If a
          bound on the mean over many steps is higher, the plan's certificate ``"mean_step"`` has
          it;
        - straight pipelines: for every placement with these stages, pipelines, layers and head;
          with ``stages="auto"``, for all numbers of stages that were tried;
        - partial paths: for every placement with these stage sizes and layers; None with a
          calibration.

        With tensor parallelism all of this is about workers of the same numbers of GPUs, with
        optimizer shards about plans that hold as much of the optimizer state on a device.

    Raises
    ------
    ProblemError
        Fields that contradict each other, or do not fit cluster and workload.
    NetworkError
        A pair of devices without measurement.
    ValueError
        A ``stop`` or ``executor`` that is none.
    """
    executor = require_workers(executor)
    request = PlanRequest() if request is None else instance_of(PlanRequest, request, "request")
    request = request.replace(**fields)
    return _plan(cluster, workload, request, stop, seed, executor, compare=True)


def _plan(
    cluster: Cluster,
    workload: Workload,
    request: PlanRequest,
    stop: StoppingCriterion,
    seed: int,
    executor: Workers,
    *,
    compare: bool,
) -> Result[TrainingPlan]:
    """As `plan`; the joint search may leave out the comparison with baselines."""
    if request.tensor_parallel == AUTO or request.optimizer_shards == AUTO:
        return _with_best_number(cluster, workload, request, stop, seed, executor, compare=compare)
    problem = PlanningProblem.of(cluster, workload, request, seed, {})
    require_whole_microbatches(problem.workload)
    if request.kind is PlanKind.JOINT:
        result = _plan_jointly(problem, stop, executor, compare=compare)
    elif request.kind is PlanKind.PARTIAL_PATHS:
        result = _plan_shape(problem, shape_of(problem), stop)
    else:
        result = _with_best_head(problem, stop)
    return replace(result, request=request)


def _with_best_number(
    cluster: Cluster,
    workload: Workload,
    free: PlanRequest,
    stop: StoppingCriterion,
    seed: int,
    executor: Workers,
    *,
    compare: bool,
) -> Result[TrainingPlan]:
    """The best plan over all degrees of tensor parallelism, or over numbers of shards."""
    instance_of(Cluster, cluster, "cluster")
    instance_of(Workload, workload, "workload")

    def plan_with(
        choice: Mapping[str, Any], limit: StoppingCriterion, final: bool
    ) -> Result[TrainingPlan]:
        fixed = free.replace(**choice)
        return _plan(cluster, workload, fixed, limit, seed, executor, compare=compare and final)

    if free.tensor_parallel != AUTO:
        return best_of(
            [
                Choice({"optimizer_shards": n}, counted(n, "optimizer shard"))
                for n in shard_counts(cluster, workload, free)
            ],
            stop,
            plan_with,
        )
    kinds = kinds_of_machines(cluster, workload)

    def mixes(best: Mapping[str, Any], k: int) -> list[Choice]:
        """As the best choice, with other numbers in one kind of machine; first, in all machines."""
        number = best["tensor_parallel"]
        if not isinstance(number, Mapping):
            # of machines with fewer GPUs, as many as there are
            number = {m: max(t for t in few if t <= number) for names, few in kinds for m in names}
        names, options = kinds[k - 1] if k else ([], [0])
        changed = [number | dict.fromkeys(names, t) for t in options]
        return [
            Choice({"tensor_parallel": mix}, mix_words(cluster, mix))
            for mix in changed
            if is_mix(cluster, mix)
        ]

    return best_of(
        [
            Choice({"tensor_parallel": n}, f"{counted(n, 'GPU')} a worker")
            for n in degrees(cluster, workload)
        ],
        stop,
        plan_with,
        [partial(mixes, k=k) for k in range(len(kinds[:MAX_KINDS]) + 1) if kinds],
        1 + sum(len(options) for _, options in kinds[:MAX_KINDS]),
    )


def _plan_jointly(
    problem: PlanningProblem, stop: StoppingCriterion, executor: Workers, *, compare: bool
) -> Result[TrainingPlan]:
    # numba takes a while to load
    from planner.planning.joint.joint_search import constraints_of, search_jointly

    # bounds need the rates of all pairs
    problem.cluster.network.require_complete()
    constraints_of(problem)  # refuses before baselines are searched
    run = started(stop)
    baselines = Baselines.of(problem, stop) if compare else None
    request = problem.request
    bound = _bound_for_all_plans(joint_bound, problem, problem.workload, problem.heads)
    by_cost = PlanObjective.of(request).by_cost
    if by_cost:
        bound = cost_bound(problem, bound)
    plans: list[TrainingPlan] = []
    if baselines is not None:
        plans += [baseline.plan() for baseline in baselines]
        plans += _straight_plans(problem, baselines, stop)
    limit = _remaining_limit(stop, run, MEAN_BOUND_SHARE if compare else 0.0)
    searched = search_jointly(problem, limit, bound, plans, executor)
    searched = replace(searched, baselines=baselines)
    result = _with_certificates(searched, {}, "cost" if by_cost else "step")
    if compare:
        with run.interruptible():
            interrupted = searched.stop_reason == INTERRUPTED
            result = _with_mean_bound(result, _mean_bound(problem, run, hurry=interrupted))
    result = replace(result, runtime_s=run.elapsed_s)
    return _stochastic(result, request) if request.wiring == RequestedWiring.STOCHASTIC else result


def _remaining_limit(
    stop: StoppingCriterion, run: SearchRun, reserved: float = 0.0
) -> StoppingCriterion:
    """The rest of a limit in seconds, less a share of it; other limits are for the search alone."""
    if math.isinf(run.remaining_s):
        return stop
    return stop.portion(1.0, run.remaining_s - reserved * stop.seconds())


def _mean_bound(problem: PlanningProblem, run: SearchRun, *, hurry: bool) -> StepBound | None:
    """A bound on the mean step; less tight in a ``hurry``, or once the time is up."""
    bound_of = partial(mean_bound, is_over=lambda: hurry or run.remaining_s <= 0)
    return _bound_for_all_plans(bound_of, problem, problem.workload, problem.heads)


def _straight_plans(
    problem: PlanningProblem, baselines: Baselines, stop: StoppingCriterion
) -> list[TrainingPlan]:
    """Straight pipelines with the number of stages of the best ranks, optimised."""
    too_many = len(problem.cluster) > MAX_STRAIGHT
    if baselines.ranks is None or too_many or INTERRUPTS.requested:
        return []
    fastest, request = baselines.ranks.best[1], problem.request
    variant = replace(fastest.start.problem, cluster=problem.cluster)
    try:
        shape = shape_of(variant)
        if request.fixed_stages not in (None, shape.stages):
            return []
        straight = _plan_shape(variant, shape, stop.portion(STRAIGHT_SHARE))
    except REFUSALS:
        return []
    return [] if straight.plan is None else [straight.plan.replace(certificates={})]


def _bound_for_all_plans(
    bound_of: Callable[..., StepBound | None],
    problem: PlanningProblem,
    workload: Workload,
    heads: Sequence[Head],
) -> StepBound | None:
    """A bound for every plan; None for rounds of small groups, and for delayed averaging."""
    request = problem.request
    if request.group_size is not None or request.delayed:
        return None
    return bound_of(
        fastest_measured(problem.cluster, workload, request.calibration),
        workload,
        Codec(request.codec).wire_ratio,
        recomputes=request.recompute != (),
        every_steps=request.sync_every,
        aggregators_in=problem.aggregators_in,
        two_frequency=request.within is not None,
        in_copies=request.in_copies,
        measured=request.calibration is not None,
        heads=heads,
    )


def _measured_bound(problem: PlanningProblem, plan: TrainingPlan, samples: int) -> StepBound | None:
    """With measured compute times, the bound for every plan, if it applies to this one.

    For microbatches of ``samples`` and multiples.
    """
    request = problem.request
    if request.calibration is None or request.kind is PlanKind.PARTIAL_PATHS:
        return None
    workload = plan.workload.replace(microbatch_samples=samples)
    bound = _bound_for_all_plans(joint_bound, problem, workload, (plan.schedules[0].head,))
    # the bound holds in the mean; the few simulated steps may be shorter
    bounds_mean = request.sync_every > 1 or request.calibration.updates
    if bound is not None and bounds_mean and bound.value > plan.predicted.step_s:
        return None
    return bound


def _with_mean_bound(result: Result[TrainingPlan], bound: StepBound | None) -> Result[TrainingPlan]:
    """The result with a bound on the mean step in its plan, where that is the higher one."""
    made, step = result.plan, result.certificate()
    assert made is not None
    step_s = made.predicted.step_s
    known = made.step_certificate
    known_s = 0.0 if known is None or known.bound is None else known.bound
    if bound is None or bound.value <= known_s * (1 + OPTIMAL_GAP):
        return result
    if bound.value > step_s:
        # the few steps that are simulated may be shorter than the mean
        logger.warning(
            "bound on the mean, %g s, left out: above the step, %g s", bound.value, step_s
        )
        return result
    of_mean = Result.of(
        made,
        step_s,
        bound.value,
        runtime_s=step.runtime_s,
        stop_reason=step.stop_reason,
        seed=step.seed,
        method=step.method,
        basis=bound.basis,
        witness=bound.witness,
    )
    certificates = {**made.certificates, MEAN_STEP: of_mean.certificate()}
    return replace(result, plan=made.replace(certificates=certificates))


def _stochastic(result: Result[TrainingPlan], request: PlanRequest) -> Result[TrainingPlan]:
    """A flow's plan as a stochastic one, whose weights start from that flow."""
    assert result.plan is not None
    plan = result.plan.replace(wiring=Wiring.STOCHASTIC, routing=request.routing)
    for line in contradictions(plan):
        raise ProblemError(f"wiring 'stochastic': {line}")
    return replace(result, plan=plan)


def _with_best_head(problem: PlanningProblem, stop: StoppingCriterion) -> Result[TrainingPlan]:
    """Straight pipelines with the head where they are fastest, if that is open."""
    if len(problem.heads) == 1:
        return _straight_pipelines(problem, stop)
    run, results, refusals = started(stop), list[Result[TrainingPlan]](), list[Exception]()
    for k, head in enumerate(problem.heads):
        remaining = len(problem.heads) - k
        fixed = replace(problem, request=problem.request.replace(head=head))
        limit = stop.portion(1 / len(problem.heads), run.remaining_s / remaining)
        try:
            results.append(_straight_pipelines(fixed, limit))
        except REFUSALS as error:
            refusals.append(error)
        if results and _interrupted(results[-1]):
            break
    if not results:
        raise refusals[0]
    return min(results, key=objective_or_inf)


def _straight_pipelines(problem: PlanningProblem, stop: StoppingCriterion) -> Result[TrainingPlan]:
    """One shape or the best of all; no slower than consecutive ranks of the same kind."""
    shapes = candidates(problem) if problem.request.stages == "auto" else [problem]
    if not shapes:
        raise ProblemError(f"no shape fits this cluster: {NO_SHAPE}")
    fixed = None if problem.request.stages == "auto" else shape_of(problem)
    run = started(stop)
    baselines = Baselines.of(problem, stop)
    ranks = baselines.ranks
    rank_baselines = () if ranks is None else tuple(x for x in (ranks.data, ranks.pipeline) if x)
    if fixed is None or _recomputed(problem, fixed) is not None:
        result = _best_shape(problem, shapes, _remaining_limit(stop, run), rank_baselines)
    else:
        result = _plan_shape(problem, fixed, _remaining_limit(stop, run), rank_baselines)
    return replace(result, baselines=baselines)


def _with_recomputation(problem: PlanningProblem) -> list[PlanningProblem]:
    """The problem, and the same with recomputation where that may help."""
    try:
        variant = _recomputed(problem, shape_of(problem))
    except REFUSALS:
        return [problem]
    return [problem] if variant is None else [problem, variant]


def _recomputed(problem: PlanningProblem, shape: Shape) -> PlanningProblem | None:
    """The problem with recomputation in all stages, where that is open and memory is short."""
    request, cluster = problem.request, problem.cluster
    if (
        request.recompute is not None
        or request.kind is PlanKind.PARTIAL_PATHS
        or request.schedule == OperationOrder.ONE_F_ONE_B
    ):
        return None
    least_memory, live = (
        float(cluster.memory_bytes.min()),
        -(-shape.microbatches // shape.pipelines),
    )
    if min(costs.room(least_memory) for costs in shape.costs(problem.workload)) >= live:
        return None
    return replace(problem, request=request.replace(recompute="all"))


def _plan_shape(
    problem: PlanningProblem,
    shape: Shape,
    stop: StoppingCriterion,
    rank_baselines: Sequence[BaselinePlan] = (),
) -> Result[TrainingPlan]:
    run = started(stop)
    make = partial_path_plan if problem.request.kind is PlanKind.PARTIAL_PATHS else _straight
    planned = make(problem, shape, stop, run)
    for baseline in rank_baselines:
        if (
            _matches_shape(baseline, problem, shape)
            and baseline.step_s < planned.plan.predicted.step_s
        ):
            fitted, _, _ = baseline.start.fitted()
            reason = reason_when_slower(planned.reason)
            planned = PlannedShape(baseline.plan(), fitted, {}, "ranks by region", reason)
    planned = _with_exchanges(problem, planned, stop)
    incumbent: Incumbent[TrainingPlan] = Incumbent(
        run, planned.plan.content_hash, method=planned.method, seed=problem.seed
    )
    plan = with_cost(with_aggregators(problem, planned.plan), problem.request)
    incumbent.offer(plan.predicted.step_s, plan)
    bound = step_bound(problem, planned.shape)
    bound = bound or _measured_bound(problem, plan, plan.workload.microbatch_samples)
    if bound is not None:
        incumbent.offer_bound(*bound)
    return _with_certificates(incumbent.result(exhausted=planned.reason), planned.certificates)


def _matches_shape(baseline: BaselinePlan, problem: PlanningProblem, shape: Shape) -> bool:
    """Whether a baseline has this shape, order, layers and recomputation."""
    request, baseline_problem = problem.request, baseline.start.problem
    return (
        (baseline.stages, baseline.pipelines) == (shape.stages, shape.pipelines)
        and baseline.order == request.schedule
        and baseline_problem.workload == problem.workload
        and (baseline_problem.request.recompute or ()) == (request.recompute or ())
        and request.stage_layers is None
    )


def _with_certificates(
    result: Result[TrainingPlan], parts: dict[str, Certificate], objective: str = "step"
) -> Result[TrainingPlan]:
    assert result.plan is not None
    certificates = {**parts, objective: result.certificate()}
    return replace(result, plan=result.plan.replace(certificates=certificates))


def _straight(
    problem: PlanningProblem, shape: Shape, stop: StoppingCriterion, _: SearchRun
) -> PlannedShape:
    """Every microbatch through one device of every stage, along the rows of a grid."""
    search = PlanAwareStop(stop.portion(1 - EXCHANGE_SHARE), problem, shape)
    placement = _placement_search(problem)(problem, shape, search)
    plan = placement.plan or straight_plan(problem, placement.shape, placement.assignment)
    certificate = placement.certificate
    return PlannedShape(
        plan,
        placement.shape,
        {"assignment": certificate},
        f"{certificate.method}, {problem.request.schedule}",
        f"assignment: {certificate.stop_reason}",
    )


def _with_exchanges(
    problem: PlanningProblem, planned: PlannedShape, stop: StoppingCriterion
) -> PlannedShape:
    """Straight pipelines after exchanges of devices by simulated step."""
    if problem.request.kind is PlanKind.PARTIAL_PATHS or "interrupted" in planned.reason:
        return planned
    portion = stop.portion(EXCHANGE_SHARE)
    plan, interrupted = exchange_devices(problem, planned.shape, planned.plan, portion)
    reason = INTERRUPTED if interrupted else planned.reason
    if plan is planned.plan:
        return planned._replace(reason=reason)
    # eq. 1 says nothing about these pipelines
    method = f"{planned.method}, exchanges by simulated step"
    return PlannedShape(plan, planned.shape, {}, method, reason_when_slower(reason))


def _placement_search(
    problem: PlanningProblem,
) -> Callable[[PlanningProblem, Shape, StoppingCriterion], Placement]:
    """The function that places devices on stages."""
    if not is_uniform(problem.cluster, problem.workload):
        return place_heterogeneous
    return place_for_local_sgd if problem.request.sync_every > 1 else place_stages


def _best_shape(
    problem: PlanningProblem,
    shapes: Sequence[PlanningProblem],
    stop: StoppingCriterion,
    rank_baselines: Sequence[BaselinePlan],
) -> Result[TrainingPlan]:
    """Screen all numbers of stages and microbatch sizes, then refine the best."""
    run = started(stop)
    screening_stop = stop.portion(SCREENING_SHARE / len(shapes))
    interrupted = False
    rejected: list[ShapeRow] = []
    screened: list[tuple[PlanningProblem, Result[TrainingPlan]]] = []
    for variant in shapes:
        for open_problem in _with_recomputation(variant):
            try:
                screened.append(
                    (
                        open_problem,
                        _plan_shape(
                            open_problem, shape_of(open_problem), screening_stop, rank_baselines
                        ),
                    )
                )
            except REFUSALS as error:
                rejected.append(ShapeRow.refusal(open_problem, str(error)))
                continue
            if (interrupted := _interrupted(screened[-1][1])) or run.check() is not None:
                break
        if interrupted or (screened and run.check() is not None):
            break
    if not screened:
        # most stages, smallest microbatches and recomputation need least memory
        why = max(
            reversed(rejected),
            key=lambda refusal: (refusal.stages, -refusal.microbatch_samples),
        ).refused
        raise ProblemError(
            why if len(shapes) == 1 else f"no shape fits this cluster; the last was refused: {why}"
        )
    best_index = min(range(len(screened)), key=lambda k: objective_or_inf(screened[k][1]))
    winner, best = screened[best_index]
    refined = best
    if not interrupted and run.check() is None:
        remaining_stop = stop.portion(1 - SCREENING_SHARE, run.remaining_s)
        refined = _plan_shape(winner, shape_of(winner), remaining_stop, rank_baselines)
    if objective_or_inf(refined) < objective_or_inf(best):
        best = refined
        screened[best_index] = winner, refined
    table = sorted([*(ShapeRow.of(*p) for p in screened), *rejected], key=ShapeRow.rank)
    best_of_shape: dict[tuple[int, int, int], ShapeRow] = {}
    for row in table:
        best_of_shape.setdefault(row.shape, row)
    table = list(best_of_shape.values())
    return _with_least_bound(problem, best, [result for _, result in screened], table, run)


def _interrupted(result: Result[TrainingPlan]) -> bool:
    """Whether Ctrl-C ended the search of a part."""
    assert result.plan is not None
    return any("interrupted" in c.stop_reason for c in result.plan.certificates.values())


def _with_least_bound(
    problem: PlanningProblem,
    best: Result[TrainingPlan],
    results: Sequence[Result[TrainingPlan]],
    table: Sequence[ShapeRow],
    run: SearchRun,
) -> Result[TrainingPlan]:
    """The best plan, with the least bound of all shapes as its own, or that of any plan."""
    assert best.plan is not None and best.objective is not None
    incumbent: Incumbent[TrainingPlan] = Incumbent(
        run,
        best.plan.content_hash,
        method=f"{best.method}, {len(table)} shapes",
        seed=best.seed,
    )
    incumbent.offer(best.objective, best.plan)
    plans = [result.plan for result in results if result.plan is not None]
    samples = math.gcd(*(plan.workload.microbatch_samples for plan in plans))
    if (measured_bound := _measured_bound(problem, best.plan, samples)) is not None:
        incumbent.offer_bound(*measured_bound)
    elif problem.request.calibration is None and all(r.bound is not None for r in results):
        least = min(results, key=lambda result: result.bound or 0.0)
        witness = {
            "kind": "straight step",
            "shapes": [s for r in results if r.witness for s in r.witness["shapes"]],
        }
        basis = f"least of {len(results)} shapes: {least.basis}"
        incumbent.offer_bound(least.bound or 0.0, basis, witness, rounding=0.0)
    parts = {k: c for k, c in best.plan.certificates.items() if k != "step"}
    bounded = incumbent.result(exhausted=best.stop_reason)
    assert bounded.plan is not None
    with_alternatives = bounded.plan.replace(alternatives=runners_up(bounded.plan, table))
    shown = tuple(table) if problem.request.stages == "auto" else ()
    return _with_certificates(replace(bounded, plan=with_alternatives, candidates=shown), parts)
