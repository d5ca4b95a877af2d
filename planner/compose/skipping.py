"""Plans whose microbatches skip stages: arrangement, paths, full iterations between (SkipPipe)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.clock.simulator import simulate_cycle
from planner.compose.layer_split import is_uniform
from planner.compose.pricing import DEFAULT_ORDER, Setting, compute_times, priced
from planner.compose.shape import Shape, memory_room
from planner.compose.skip_bounds import cycle_bound_s
from planner.network.cluster import Cluster, Devices
from planner.problems import AssignmentProblem, PathProblem, ProblemError
from planner.problems.answers import AssignmentPlan, PathPlan
from planner.problems.quantities import whole
from planner.search.result import Result
from planner.search.stop import AnyOf, MaxIterations, MaxRuntime, StoppingCriterion, portion
from planner.training_plan.model import Schedule, TrainingPlan
from planner.workload.compute_times import ComputeTimes

FULL_EVERY = 10
"""One iteration in so many is full (3.6)."""

ARRANGING, SKIPPING, FULL = 0.25, 0.55, 0.2
"""Shares of the limit for the arrangement, the skipping paths and the full ones, at least."""


@dataclass(frozen=True)
class Skipping:
    """What is asked of the paths.

    Attributes
    ----------
    stage_sizes
        Devices per stage.
    path_stages
        Stages on every path, the first included.
    full_every
        One iteration in so many visits all stages, without swaps (3.6); 0: none does.
    max_swaps
        As in `PathProblem`.
    """

    stage_sizes: tuple[int, ...]
    path_stages: int
    full_every: int = FULL_EVERY
    max_swaps: int = 1

    def __post_init__(self) -> None:
        for name in ("path_stages", "full_every", "max_swaps"):
            whole(name, getattr(self, name))
        stages = len(self.stage_sizes)
        if not 1 <= self.path_stages <= stages:
            raise ProblemError(
                f"path_stages is {self.path_stages}; it must be 1 to the {stages} stages"
            )
        if self.full_every < 0 or self.full_every == 1:
            raise ProblemError(
                f"full_every is {self.full_every}; give at least 2, 0 for no full iteration, or "
                "path_stages of all stages for full ones only"
            )
        if self.max_swaps < 0:
            raise ProblemError(f"max_swaps is {self.max_swaps}; it must be >= 0")

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.stage_sizes)

    @property
    def cycle(self) -> tuple[int, ...]:
        """Schedule 0 skips, schedule 1 is full and ends the cycle."""
        always = self.full_every == 0 or (self.path_stages == self.stages and self.max_swaps == 0)
        return (0,) if always else (0,) * (self.full_every - 1) + (1,)


def sizes_for(
    devices: int, stages: int | None, stage_sizes: Sequence[int] | None, path_stages: int
) -> tuple[int, ...]:
    """Devices per stage, as given or equal.

    Raises
    ------
    ProblemError
        Neither stages nor sizes, or the devices cannot be divided; names sizes after eq. 1.
    """
    from planner.genetic.stage_sizes import stage_sizes_for_skip

    if stage_sizes is not None:
        sizes = tuple(whole("a stage size", size) for size in stage_sizes)
        if stages is not None and stages != len(sizes):
            raise ProblemError(
                f"stages is {stages} but stage_sizes lists {len(sizes)}; leave stages out"
            )
        return sizes
    if stages is None:
        raise ProblemError("the shape of the plan is missing; give stages, or stage_sizes")
    if stages < 1 or stages > devices:
        raise ProblemError(
            f"stages must be 1 to the {devices} devices, found {stages}; ask for fewer"
        )
    if devices % stages:
        hint = ""
        if 1 < path_stages <= stages:
            sizes = stage_sizes_for_skip(devices, stages, 1 - path_stages / stages)
            hint = f", such as {','.join(map(str, sizes))}"
        raise ProblemError(
            f"{devices} devices cannot be divided into {stages} equal stages; give "
            f"stage_sizes{hint}"
        )
    return (devices // stages,) * stages


def plan_skipping(
    setting: Setting, asked: Skipping, stop: StoppingCriterion, method: str
) -> Result[TrainingPlan]:
    """Arrange, find skipping and full paths, and price the cycle.

    ``method`` is that of the arrangement. Layers are cut evenly, as CC3 takes them.
    """
    started = time.perf_counter()
    shape, each = shape_for(setting, asked)
    arranged = _arrange(setting, asked, shape, stop, method)
    assert arranged.plan is not None
    shares = ((SKIPPING, SKIPPING / (SKIPPING + FULL)), (FULL, 1.0))

    def next_stop(before: Sequence[Result[PathPlan]]) -> StoppingCriterion:
        reasons = [arranged.stop_reason, *(result.stop_reason for result in before)]
        return _rest(stop, *shares[len(before)], started, "interrupted" in reasons)

    made, solved = with_paths(setting, asked, shape, arranged.plan, each, next_stop)
    bound = None if setting.calibration is not None else _bound(setting, asked, each)
    paths = _paths_result(made, solved)
    step = Result.of(
        made,
        made.predicted.step_s,
        bound,
        runtime_s=time.perf_counter() - started,
        stop_reason=f"paths: {paths.stop_reason}",
        seed=setting.seed,
        method=f"{arranged.method}, paths {paths.method}",
    )
    certificates = {
        "assignment": arranged.certificate(),
        "paths": paths.certificate(),
        "step": step.certificate(),
    }
    return replace(step, plan=made.replace(certificates=certificates))


def with_paths(
    setting: Setting,
    asked: Skipping,
    shape: Shape,
    assignment: AssignmentPlan,
    each: int,
    next_stop: Callable[[Sequence[Result[PathPlan]]], StoppingCriterion],
) -> tuple[TrainingPlan, list[Result[PathPlan]]]:
    """The plan on an arrangement, without certificates, and what the path solver said.

    ``next_stop`` gives the limit of the next schedule, from the results so far.
    """
    times = compute_times(setting, shape, assignment)
    questions = [path_problem(setting, asked, shape, assignment, times, each)]
    if 1 in asked.cycle:
        questions.append(questions[0].replace(path_stages=asked.stages, max_swaps=0))
    solved: list[Result[PathPlan]] = []
    for question in questions:
        solved.append(_paths(question, next_stop(solved), setting.seed))
    schedules = tuple(
        _schedule(question, result.plan) for question, result in zip(questions, solved, strict=True)
    )
    return priced(setting, shape, assignment, times, schedules, asked.cycle), solved


def path_problem(
    setting: Setting,
    asked: Skipping,
    shape: Shape,
    assignment: AssignmentPlan,
    times: ComputeTimes,
    each: int,
) -> PathProblem:
    """The iteration's paths: the plan's compute times, live memory, SkipPipe's transfers."""
    room = memory_room(setting.cluster, setting.workload, shape, assignment.groups)
    held = [room[d] for d in range(len(setting.cluster))]
    if setting.in_flight is not None:
        held = [min(count, setting.in_flight) for count in held]
    problem = PathProblem.from_assignment(
        setting.cluster,
        setting.workload,
        assignment,
        path_stages=asked.path_stages,
        microbatches_per_start=each,
        memory=held,
        max_swaps=asked.max_swaps,
        live_memory=True,
    )
    return problem.replace(
        forward_s=times.forward_s, backward_s=times.backward_s, head_s=times.head_s
    )


def shape_for(setting: Setting, asked: Skipping) -> tuple[Shape, int]:
    """The shape, and microbatches per start device."""
    workload, starts = setting.workload, asked.stage_sizes[0]
    setting.cluster.network.require_complete()
    if setting.schedule != DEFAULT_ORDER:
        raise ProblemError(
            f"schedule {setting.schedule!r} orders straight pipelines; leave it out with "
            "path_stages, whose paths come with their order"
        )
    if setting.head != "first":
        raise ProblemError(
            f"head is {setting.head!r}; paths end on the device they start from, give 'first'"
        )
    if setting.in_flight is not None and setting.in_flight < 1:
        raise ProblemError(f"in_flight is {setting.in_flight}; give at least 1")
    share = workload.microbatch_samples * starts
    each, left = divmod(workload.batch_samples, share)
    if left or each == 0:
        fits = f"{each * share} or {(each + 1) * share}" if each else f"{share}"
        raise ProblemError(
            f"batch_samples must be a multiple of {share}, microbatches of "
            f"{workload.microbatch_samples} from {starts} start devices, found "
            f"{workload.batch_samples}; give {fits}, or another size of the first stage"
        )
    layers = workload.even_split(asked.stages)
    return Shape(layers, starts, each * starts, "first"), each


def _arrange(
    setting: Setting, asked: Skipping, shape: Shape, stop: StoppingCriterion, method: str
) -> Result[AssignmentPlan]:
    """Devices on stages for full pipelines (3.2), which paths are searched on then."""
    from planner.genetic import solve_assignment

    cluster, workload = setting.cluster, setting.workload
    samples = workload.microbatch_samples
    problem = AssignmentProblem(
        cluster.network,
        stage_sizes=asked.stage_sizes,
        activation_bytes=[b * samples for b in workload.activation_bytes(shape.layers)],
        gradient_bytes=workload.gradient_bytes(shape.layers, shape.head_stage),
    )
    if is_uniform(cluster):
        # equal devices hold a stage or do not, whoever they are: refuse before searching
        memory_room(cluster, workload, shape, [[j] for j in range(asked.stages)])
    return solve_assignment(problem, portion(stop, ARRANGING), setting.seed, method)


def _rest(
    stop: StoppingCriterion, share: float, of_rest: float, started: float, interrupted: bool
) -> StoppingCriterion:
    """The next solver's share, with seconds that earlier ones left over; none after Ctrl-C."""
    if interrupted:
        return MaxIterations(0)  # its first paths will do
    if not math.isfinite(stop.seconds()):
        return portion(stop, share)
    left = stop.seconds() - (time.perf_counter() - started)
    return AnyOf(stop, MaxRuntime(max(share * stop.seconds(), of_rest * left)))


def _paths(problem: PathProblem, stop: StoppingCriterion, seed: int) -> Result[PathPlan]:
    from planner.mapf import solve_paths

    result = solve_paths(problem, stop, seed)
    if result.plan is None:
        raise ProblemError(
            f"no paths of {problem.path_stages} stages: {result.stop_reason}; give stages more "
            "devices, or devices more memory"
        )
    return result


def _schedule(problem: PathProblem, found: PathPlan | None) -> Schedule:
    assert found is not None
    stages = len(problem.stage_devices)
    full = problem.path_stages == stages and problem.max_swaps == 0
    name = "full" if full else f"{problem.path_stages} of {stages} stages"
    return Schedule(name, "first", found.paths, found.order(len(problem)))


def _paths_result(made: TrainingPlan, solved: Sequence[Result[PathPlan]]) -> Result[TrainingPlan]:
    """Mean over the cycle in the path solver's seconds, with its bounds for this arrangement."""
    mean = path_solver_s(made)
    bounds = [result.bound or 0.0 for result in solved]
    bound = min(mean, sum(bounds[k] for k in made.cycle) / len(made.cycle))
    reasons = dict.fromkeys(result.stop_reason for result in solved)
    return Result.of(
        made,
        mean,
        bound,
        runtime_s=sum(result.runtime_s for result in solved),
        stop_reason=", ".join(reasons),
        seed=made.seed,
        method=str(solved[0].method),
    )


def path_solver_s(made: TrainingPlan) -> float:
    """Mean makespan over the cycle with the path solver's transfers: both directions averaged.

    Simulated on a network that has them, so that it is what the planned orders take, never more
    than the solver's own makespans.
    """
    w = made.workload
    largest = max(layer.output_bytes for layer in w.layers)
    alike = w.replace(layers=tuple(replace(layer, output_bytes=largest) for layer in w.layers))
    mean = made.cluster.limited_network().symmetrised()
    devices = Devices(made.cluster.flops, made.cluster.memory_bytes)
    return simulate_cycle(made, Cluster(mean, devices), alike)[0].pipeline_s


def _bound(setting: Setting, asked: Skipping, each: int) -> float:
    share_of: dict[int, float] = {}
    for k in asked.cycle:
        visited = asked.stages if k == 1 else asked.path_stages
        share_of[visited] = share_of.get(visited, 0.0) + 1 / len(asked.cycle)
    return cycle_bound_s(
        setting.cluster,
        setting.workload,
        asked.stage_sizes,
        each,
        share_of,
        equal_shares=(setting.averaging, setting.group_size, setting.codec)
        == ("equal", None, "none"),
    )
