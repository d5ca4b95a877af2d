"""The whole plan: assignment, then everything around it, for one shape or the best of many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from planner.compose.bounds import step_bound_s
from planner.compose.degrees import candidates, choose
from planner.compose.layer_split import balanced_split, is_uniform
from planner.compose.mixed_devices import improve_groups, matched, sorted_by_speed
from planner.compose.pricing import DEFAULT_ORDER, Setting, plan_for_assignment
from planner.compose.shape import Shape, assignment_problem, memory_room, shape_of
from planner.compose.skipping import FULL_EVERY, Skipping, plan_skipping, sizes_for
from planner.network.cluster import Cluster
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate
from planner.search.result import Result
from planner.search.stop import StoppingCriterion, portion
from planner.training_plan.model import TrainingPlan
from planner.workload.calibration import Calibration
from planner.workload.workload import Workload


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    stop: StoppingCriterion,
    stages: int | Literal["auto"] | None = None,
    pipelines: int | None = None,
    stage_sizes: Sequence[int] | None = None,
    path_stages: int | None = None,
    full_every: int | None = None,
    max_swaps: int | None = None,
    schedule: str = DEFAULT_ORDER,
    head: str | None = None,
    in_flight: int | None = None,
    seed: int = 0,
    method: str = "auto",
    calibration: Calibration | None = None,
    averaging: str = "equal",
    group_size: int | None = None,
    codec: str = "none",
    network_name: str = "",
) -> Result[TrainingPlan]:
    """Plan a training run.

    Parameters
    ----------
    cluster, workload
        Where and what to train. Where devices differ in speed or memory, layers are split over
        stages so that the slowest stage is fastest and memory holds; else evenly.
    stages, pipelines
        Their product must be the number of devices; pipelines defaults to the rest. ``"auto"``
        tries all stages and microbatch sizes that divide devices and batch, takes the fastest
        predicted step, and puts the table it chose from into the result's ``candidates``.
    stage_sizes
        Devices per stage, the first of which also run head and loss; with ``path_stages`` only.
    path_stages
        Stages that a microbatch visits, the others are skipped (SkipPipe). The batch is split
        evenly over the devices of stage 0, layers evenly over the stages.
    full_every
        With ``path_stages``: one iteration in so many visits every stage, without swaps (SkipPipe,
        3.6), by default 10; 0: none does.
    max_swaps
        With ``path_stages``: pairs of neighbouring stages that a path may visit in reverse, by
        default 1.
    stop
        When to stop searching.
    schedule
        ``"eager-1f1b"``, ``"1f1b"`` or ``"gpipe"``; see `planner.compose.schedules`.
    head
        Whether the ``"last"`` or the ``"first"`` device of a pipeline runs head and loss; by
        default the last, with ``path_stages`` the first.
    in_flight
        For eager 1F1B and paths: microbatches a device may hold between F and B, by default what
        its memory holds.
    method
        Of `planner.solve_assignment`.
    calibration
        Measured compute times; by default they follow from FLOPs.
    averaging
        ``"equal"`` shares within a stage, or ``"adaptive"`` ones after DeDLOC.
    group_size
        Average in rounds of groups of at most so many devices; by default all of a stage at once.
    codec
        ``"none"``, or ``"int8"`` for gradients in 8-bit integers on the wire.

    Returns
    -------
    Result
        ``plan`` is a `TrainingPlan`, ``objective`` its predicted step time in seconds and
        ``bound`` a time that no placement with these stages, pipelines and layers can beat (with
        ``"auto"``: with any that were tried). With ``path_stages`` both are means over the cycle
        of iterations. No bound with a calibration.
    """
    paths = {"full_every": full_every, "max_swaps": max_swaps, "stage_sizes": stage_sizes}
    for name, value in paths.items():
        if path_stages is None and value is not None:
            raise ProblemError(
                f"{name} is {value} without path_stages; give path_stages, the number of stages "
                "for full paths"
            )
    if head is None:
        head = "last" if path_stages is None else "first"
    setting = Setting(
        cluster,
        workload,
        schedule,
        head,
        in_flight,
        seed,
        calibration,
        network_name,
        averaging,
        group_size,
        codec,
    )
    if path_stages is not None:
        if stages == "auto" or pipelines is not None:
            raise ProblemError(
                "path_stages goes with a number of stages, or with stage_sizes; leave out pipelines"
            )
        sizes = sizes_for(len(cluster), stages, stage_sizes, path_stages)
        asked = Skipping(
            sizes,
            path_stages,
            FULL_EVERY if full_every is None else full_every,
            1 if max_swaps is None else max_swaps,
        )
        return plan_skipping(setting, asked, stop, method)
    if stages is None:
        raise ProblemError("the shape of the plan is missing; give stages, or 'auto'")
    if stages != "auto":
        return _plan_shape(setting, stages, pipelines, stop, method)
    if pipelines is not None:
        raise ProblemError("pipelines follow from stages; leave them out with stages='auto'")
    return _plan_auto(setting, stop, method)


def _plan_auto(setting: Setting, stop: StoppingCriterion, method: str) -> Result[TrainingPlan]:
    started = time.perf_counter()
    tried = candidates(setting.cluster, setting.workload)
    # half for a look at every shape, half for the winner
    glance = portion(stop, 0.5 / max(len(tried), 1))
    best, table = choose(
        setting.cluster,
        setting.workload,
        lambda s, w: _plan_shape(replace(setting, workload=w), s, None, glance, method),
    )
    if best is None or best.plan is None:
        reason = table[0].refused if table else "no number of stages divides devices and layers"
        raise ProblemError(f"no shape fits this cluster; the first was refused: {reason}")
    winner = replace(setting, workload=best.plan.workload)
    shape = len(best.plan.assignment.groups)
    again = _plan_shape(winner, shape, None, portion(stop, 0.5), method)
    if again.objective is not None and again.objective < (best.objective or 0.0):
        best = again
        table[0] = replace(table[0], step_s=again.objective, bound_s=again.bound)
    bounds = [c.bound_s for c in table if c.refused == ""]
    known = [b for b in bounds if b is not None]
    assert best.plan is not None and best.objective is not None
    result = Result.of(
        best.plan,
        best.objective,
        min(known) if len(known) == len(bounds) else None,
        runtime_s=time.perf_counter() - started,
        stop_reason=best.stop_reason,
        seed=setting.seed,
        method=f"{best.method}, {len(table)} shapes",
        candidates=table,
    )
    certificates = {**best.plan.certificates, "step": result.certificate()}
    return replace(result, plan=best.plan.replace(certificates=certificates))


def _plan_shape(
    setting: Setting,
    stages: int,
    pipelines: int | None,
    stop: StoppingCriterion,
    method: str,
) -> Result[TrainingPlan]:
    started = time.perf_counter()
    shape = shape_of(setting.cluster, setting.workload, stages, pipelines, setting.head)
    make = _plan_equal_devices if is_uniform(setting.cluster) else _plan_mixed_devices
    made, certificate = make(setting, shape, stop, method)
    bound = None
    if setting.calibration is None:
        bound = step_bound_s(
            setting.cluster,
            setting.workload,
            made.stage_layers,
            shape.pipelines,
            shape.microbatches,
            setting.head,
            equal_shares=(setting.averaging, setting.group_size, setting.codec)
            == ("equal", None, "none"),
        )
    step = Result.of(
        made,
        made.predicted.step_s,
        bound,
        runtime_s=time.perf_counter() - started,
        stop_reason=f"assignment: {certificate.stop_reason}",
        seed=setting.seed,
        method=f"{certificate.method}, {setting.schedule}",
    )
    certificates = {"assignment": certificate, "step": step.certificate()}
    return replace(step, plan=made.replace(certificates=certificates))


def _solve(
    setting: Setting, shape: Shape, stop: StoppingCriterion, method: str
) -> Result[AssignmentPlan]:
    from planner.genetic import solve_assignment

    problem = assignment_problem(setting.cluster, setting.workload, shape)
    return solve_assignment(problem, stop, setting.seed, method)


def _plan_equal_devices(
    setting: Setting, shape: Shape, stop: StoppingCriterion, method: str
) -> tuple[TrainingPlan, Certificate]:
    # equal devices hold a stage or do not, whoever they are: refuse before searching
    anyone = [[j] for j in range(shape.stages)]
    memory_room(setting.cluster, setting.workload, shape, anyone)
    solved = _solve(setting, shape, stop, method)
    assert solved.plan is not None
    return plan_for_assignment(setting, shape, solved.plan), solved.certificate()


def _plan_mixed_devices(
    setting: Setting, shape: Shape, stop: StoppingCriterion, method: str
) -> tuple[TrainingPlan, Certificate]:
    """Candidates from the network alone and from speed alone, improved for both together."""
    third = portion(stop, 1 / 3)
    by_network = _solve(setting, shape, third, method)
    assert by_network.plan is not None
    starts = [by_network.plan.groups, sorted_by_speed(setting, shape)]
    run = third.start()
    tried = [*starts, *(improve_groups(setting, shape, groups, run) for groups in starts)]
    best: TrainingPlan | None = None
    refused: ProblemError | None = None
    for groups in dict.fromkeys(tried):
        try:
            layers = balanced_split(setting.cluster, setting.workload, groups, shape.head_stage)
            fitted = shape.with_layers(layers)
            problem = assignment_problem(setting.cluster, setting.workload, fitted)
            made = plan_for_assignment(setting, fitted, matched(problem, groups))
        except ProblemError as error:
            refused = refused or error
            continue
        if best is None or made.predicted.step_s < best.predicted.step_s:
            best = made
    if best is None:
        raise refused or ProblemError("no placement of these devices fits their memory")
    # the certificate is about the layers that were chosen: bound them, and take better groups
    fitted = shape.with_layers(best.stage_layers)
    again = _solve(setting, fitted, third, method)
    assert again.plan is not None
    other = _priced_or_none(setting, fitted, again.plan)
    if other is not None and other.predicted.step_s < best.predicted.step_s:
        return other, again.certificate()
    problem = assignment_problem(setting.cluster, setting.workload, fitted)
    kept = Result.of(
        best.assignment,
        problem.cost(best.assignment.groups),
        again.bound,
        runtime_s=run.elapsed_s,
        stop_reason=again.stop_reason,
        seed=setting.seed,
        method=f"{method}, speed and network",
    )
    return best, kept.certificate()


def _priced_or_none(
    setting: Setting, shape: Shape, assignment: AssignmentPlan
) -> TrainingPlan | None:
    """As `plan_for_assignment`, None where memory does not hold it."""
    try:
        return plan_for_assignment(setting, shape, assignment)
    except ProblemError:
        return None
