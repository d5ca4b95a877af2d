"""`arrange_paths`: joint search over arrangement and paths; SkipPipe decides one after the other.

Simulated annealing as for paths alone, with moves that exchange the devices of two roles, then a
search over the paths of the best arrangement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner.mapf.arranged_bounds import arranged_bound
from planner.mapf.arrays import PathArrays
from planner.mapf.device_exchange import DeviceStageData
from planner.mapf.exact_solver import ExactSolver
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.list_scheduling import build_plan
from planner.mapf.search import PathSearch, PathSearchParams, initial_plans
from planner.mapf.solve import improve, inner_run, steps_per_effort
from planner.mapf.stage_spans import StageAveragingSpans, span_of
from planner.mapf.warm_up import compile_kernels
from planner.problems import ArrangedPathProblem, ProblemError
from planner.problems.answers import ArrangedPathPlan, PathOp, PathPlan
from planner.problems.quantities import instance_of
from planner.search.arrays import Floats, Ints
from planner.search.certificate import Status
from planner.search.result import Result
from planner.search.stop import SearchRun, StoppingCriterion, started


@dataclass(frozen=True)
class ArrangeParams:
    """Parameters of the arrangement search.

    Attributes
    ----------
    search
        Hotter and longer cycles than for paths alone: an exchange affects many start times at once.
    vacancies
        Vacant roles per stage: the devices by which a stage may grow.
    explore_share
        Share of the limit for restarts from random arrangements.
    rearrange_share
        Share of the remaining limit for exchanges around the incumbent; the rest goes to the paths
        of the best arrangement.
    max_iterations
        Under an iteration limit, the shares are of at most this many iterations.
    """

    search: PathSearchParams = field(
        default_factory=lambda: PathSearchParams(
            first_cycle=64,
            max_cycle=512,
            t_restart=0.08,
            t_improve=0.02,
            device_exchange_share=0.2,
            mean_weight=0.3,
        )
    )
    vacancies: int = 2
    explore_share: float = 0.4
    rearrange_share: float = 0.7
    max_iterations: int = 512


PARAMS = ArrangeParams()


def arrange_paths(
    problem: ArrangedPathProblem,
    stop: StoppingCriterion,
    seed: int = 0,
    first: Sequence[Sequence[int]] | None = None,
) -> Result[ArrangedPathPlan]:
    """Assign devices to stages and find paths over them with the smallest makespan.

    If the problem has averaging, minimise the longest span of any stage instead.

    Parameters
    ----------
    stop, seed
        As in `solve_paths`.
    first
        Initial arrangement: devices per stage, such as ``solve_assignment(...).plan.groups``. The
        result is never worse than the first paths found on it. By default, or if it has no paths,
        the devices with the most memory become start devices.

    Returns
    -------
    Result
        Objective and bound in seconds; INFEASIBLE if no arrangement has paths, UNKNOWN if none with
        paths was found.

    References
    ----------
    SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks, 2025, section 3.2.
    """
    instance_of(ArrangedPathProblem, problem)
    started(stop)  # validate before the kernels are compiled
    compile_kernels()
    initial = [] if first is None else [_validated_groups(first)]
    arrays, reason = _first_feasible(
        problem, itertools.chain(initial, _initial_arrangements(problem))
    )
    run = started(stop, steps_per_effort(arrays))
    best = _ArrangementIncumbent(
        arrays.with_vacancies(0 if problem.fixed_sizes else PARAMS.vacancies),
        run,
        problem,
        seed=seed,
    )
    if reason is not None:
        if _is_infeasible(problem):
            return _answer(problem, best, best.without_plan(Status.INFEASIBLE, reason))
        why = f"on the first arrangement {reason}"
        return _answer(problem, best, best.without_plan(Status.UNKNOWN, why))
    with run.interruptible():
        initial_plans(best.arrays, best)
        bound = arranged_bound(problem)
        best.offer_bound(bound.seconds, bound.basis, bound.witness)
        _search(problem, best, run, seed, PARAMS)
    return _answer(problem, best, best.result())


class _ArrangementIncumbent(PathIncumbent):
    """Incumbent by the problem's objective, which need not be the makespan."""

    problem: ArrangedPathProblem

    def offer_schedule(
        self, paths: Ints, begin: Floats, makespan: float, device_of: Ints | None = None
    ) -> bool:
        devices = self._first if device_of is None else device_of
        value = makespan
        if self.problem.averaging is not None and math.isfinite(makespan):
            value = span_of(self.problem, self.arrays, paths, begin, devices)
        return super().offer_schedule(paths, begin, value, devices)


def _validated_groups(first: Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        return [list(group) for group in first]
    except TypeError:
        raise ProblemError(
            f"first must be a list of devices for every stage, found {first!r}; give groups"
        ) from None


def _search(
    problem: ArrangedPathProblem,
    best: PathIncumbent,
    run: SearchRun,
    seed: int,
    params: ArrangeParams,
) -> None:
    averaging = StageAveragingSpans.of(problem)
    search = PathSearch(
        best.arrays, best, seed, params.search, _device_stage_data(problem), averaging
    )
    while run.check() is None and best.arrays.path_stages > 1:
        for share in (params.explore_share, params.rearrange_share):
            if run.paced_by_time:
                search.run(until_s=run.elapsed_s + share * run.remaining_s)
            else:
                iterations_left = min(params.max_iterations, run.remaining_iterations)
                search.run(iterations=math.ceil(share * iterations_left))
            search.intensify = True
        if run.check() is None:
            _improve_paths(problem, best, run, seed)


def _first_feasible(
    problem: ArrangedPathProblem, candidates: Iterator[list[list[int]]]
) -> tuple[PathArrays, str | None]:
    """The first arrangement that has paths; if there is none, the first one and the reason."""
    first: tuple[PathArrays, str] | None = None
    for groups in candidates:
        arrays = PathArrays.of(problem.arranged(groups))
        reason = arrays.infeasibility()
        if reason is None:
            return arrays, None
        first = first or (arrays, reason)
    assert first is not None
    return first


def _initial_arrangements(problem: ArrangedPathProblem) -> Iterator[list[list[int]]]:
    """Initial arrangements: the devices with the most memory are start devices.

    The others are assigned round robin, then so that each stage in turn picks the device with the
    most memory for it, for several orders of the stages.
    """
    devices = np.argsort(-problem.memory[0], kind="stable").tolist()
    start, others = devices[: problem.stage_sizes[0]], devices[problem.stage_sizes[0] :]
    stages = range(1, len(problem.stage_sizes))
    yield _round_robin(problem, start, others)
    yield from (
        _pick_by_memory(problem, start, others, list(stage_order))
        for stage_order in (
            stages,
            reversed(stages),
            sorted(stages, key=lambda s: problem.stage_sizes[s]),
        )
    )
    if not problem.fixed_sizes:
        yield _balance_memory(problem, start, others)
    # devices with much memory for later stages should not be start devices
    least = 1 if problem.live_memory else problem.microbatches_per_start
    eligible = [d for d in range(len(problem)) if problem.memory[0, d] >= least]
    if len(eligible) >= len(start):
        later_memory = problem.memory[1:].max(axis=0, initial=0)
        start = sorted(eligible, key=lambda d: (int(later_memory[d]), d))[: len(start)]
        others = [d for d in range(len(problem)) if d not in start]
        yield _pick_by_memory(problem, start, others, list(stages))
        if not problem.fixed_sizes:
            yield _balance_memory(problem, start, others)


def _round_robin(
    problem: ArrangedPathProblem, start: list[int], others: list[int]
) -> list[list[int]]:
    """Assign the other devices to stages round robin."""
    groups: list[list[int]] = [start, *([] for _ in problem.stage_sizes[1:])]
    to_assign = iter(others)
    for stage in itertools.cycle(range(1, len(groups))) if others else ():
        if len(groups[stage]) < problem.stage_sizes[stage]:
            groups[stage].append(next(to_assign))
        if all(len(g) == n for g, n in zip(groups, problem.stage_sizes, strict=True)):
            break
    return groups


def _pick_by_memory(
    problem: ArrangedPathProblem, start: list[int], others: list[int], stage_order: list[int]
) -> list[list[int]]:
    """Stages pick in the given order, repeatedly, the device with the most memory for them."""
    groups: list[list[int]] = [list(start), *([] for _ in problem.stage_sizes[1:])]
    unassigned = list(others)
    while unassigned:
        for s in stage_order:
            if unassigned and len(groups[s]) < problem.stage_sizes[s]:
                d = max(unassigned, key=lambda d: (int(problem.memory[s, d]), -d))
                groups[s].append(d)
                unassigned.remove(d)
    return groups


def _balance_memory(
    problem: ArrangedPathProblem, start: list[int], others: list[int]
) -> list[list[int]]:
    """Free stage sizes: the stage with the least memory repeatedly picks its largest device."""
    groups: list[list[int]] = [list(start), *([] for _ in problem.stage_sizes[1:])]
    unassigned, capacity = list(others), [0] * len(groups)
    stages = range(1, len(groups))
    while unassigned:
        empty = [s for s in stages if not groups[s]]
        choice = empty if len(unassigned) <= len(empty) else stages
        s = min(choice, key=lambda s: (capacity[s], s))
        d = max(unassigned, key=lambda d: (int(problem.memory[s, d]), -d))
        groups[s].append(d)
        unassigned.remove(d)
        capacity[s] += int(problem.memory[s, d])
    return groups


def _is_infeasible(problem: ArrangedPathProblem) -> bool:
    """Whether TC1 rules out every arrangement, not only the one tried."""
    min_memory = 1 if problem.live_memory else problem.microbatches_per_start
    too_few_starts = int((problem.memory[0] >= min_memory).sum()) < problem.stage_sizes[0]
    equal_memory = bool((problem.memory == problem.memory[:, :1]).all())
    return too_few_starts or (equal_memory and problem.fixed_sizes)


def _device_stage_data(problem: ArrangedPathProblem) -> DeviceStageData:
    """`PathArrays` data of every device on every stage."""
    count = problem.stage_sizes[0] * problem.microbatches_per_start
    capacity = np.minimum(problem.memory, count)
    memory = np.full_like(problem.memory, count)
    if problem.live_memory:
        capacity, memory = np.where(problem.memory > 0, count, 0), capacity
    padding = ((0, 0), (0, 1))
    return DeviceStageData(
        np.pad(problem.transfer_s, (0, 1)),
        np.zeros((0, 0)) if problem.link_s is None else np.pad(problem.link_s, (0, 1)),
        np.pad(problem.forward_s, padding),
        np.pad(problem.backward_s, padding),
        np.pad(np.tile(problem.head_s, (len(problem.stage_sizes), 1)), padding),
        np.pad(memory.astype(np.int64), padding),
        np.pad(capacity.astype(np.int64), padding),
        len(problem),
    )


def _groups_of(best: PathIncumbent, devices: int) -> list[list[int]]:
    """Devices per stage, in the order of their roles."""
    arrays = best.arrays
    roles_of_stage = [
        arrays.members[arrays.stage_ptr[s] : arrays.stage_ptr[s + 1]]
        for s in range(len(arrays.min_visits))
    ]
    return [[d for d in best.device_of[group].tolist() if d != devices] for group in roles_of_stage]


def _role_of(device_of: Ints, devices: int) -> Ints:
    """The role of each device."""
    role = np.empty(devices, dtype=np.int64)
    occupied = np.flatnonzero(device_of != devices)
    role[device_of[occupied]] = occupied
    return role


def _improve_paths(
    problem: ArrangedPathProblem, best: PathIncumbent, run: SearchRun, seed: int
) -> None:
    """Improve the paths with the best arrangement fixed."""
    path_problem = problem.arranged(_groups_of(best, len(problem)))
    inner = inner_run(run, 1.0)
    incumbent = PathIncumbent(PathArrays.of(path_problem), inner, path_problem, seed=seed)
    device_of = best.device_of
    paths = device_of[best.paths]
    ends = best.starts[:, -1] + incumbent.arrays.backward[paths[:, 0]]
    incumbent.offer_schedule(paths, best.starts, float(ends.max()))
    search = PathSearch(incumbent.arrays, incumbent, seed)
    search.intensify = True
    try:
        improve(search, ExactSolver(path_problem, incumbent.arrays, incumbent, seed), inner)
    finally:
        roles = _role_of(device_of, len(problem))
        best.offer_schedule(
            roles[incumbent.paths], incumbent.starts, incumbent.objective, device_of
        )
        run.update(inner.iterations)


def _answer(
    problem: ArrangedPathProblem, best: PathIncumbent, result: Result[Any]
) -> Result[ArrangedPathPlan]:
    """The result with roles replaced by devices."""
    if best.plan is None:
        return result
    groups = _groups_of(best, len(problem))
    arrays = PathArrays.of(problem.arranged(groups))
    plan = build_plan(arrays, best.device_of[best.paths], best.starts)
    return replace(result, plan=_canonical(groups, plan, problem.microbatches_per_start))


def _canonical(groups: list[list[int]], plan: PathPlan, per_start: int) -> ArrangedPathPlan:
    """Sort the groups and number microbatches by the sorted devices of stage 0."""
    order = sorted(range(len(plan.paths)), key=lambda b: (plan.paths[b][0], b % per_start))
    new_index = {b: k for k, b in enumerate(order)}
    ops = [PathOp(new_index[op.microbatch], *op[1:]) for op in plan.ops]
    paths = PathPlan.of([plan.paths[b] for b in order], ops)
    return ArrangedPathPlan(tuple(tuple(sorted(group)) for group in groups), paths)
