"""``planner paths``: solve one path problem, given as a file or as network and workload."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.checker.dispatch import check
from planner.cli.arguments import (
    add_cluster,
    add_solver,
    add_workload,
    problem_of,
    sizes,
    stop_of,
)
from planner.cli.cycle_report import waves_data, waves_rows
from planner.cli.output import (
    BAD_INPUT,
    INVALID_PLAN,
    certificate_line,
    result_data,
    save,
    show,
)
from planner.cli.partial_output import IncumbentFile, partial_path
from planner.network.cluster import Cluster
from planner.problems import ArrangedPathProblem, AssignmentProblem, PathProblem, ProblemError
from planner.problems.answers import ArrangedPathPlan, PathPlan
from planner.problems.path_file import load_path_file
from planner.problems.path_method import PathMethod
from planner.search.result import Result
from planner.search.stop import MaxIterations, StoppingCriterion
from planner.utils.atomic_write import write_text
from planner.utils.output_files import Output, add_force, require_outputs
from planner.workload.workload import Workload

ABOUT = "find paths that skip and swap stages (SkipPipe); print times and lower bound"
EXAMPLE = (
    "planner paths --network gcp12_skippipe_2025_repaired --workload llama-500m "
    "--stage-sizes 3,3,3,3 --path-stages 3 --batch-samples 48"
)

FORMAT = "planner.paths"
FIELDS = (
    *("stage_sizes", "path_stages", "microbatches_per_start", "memory", "live_memory"),
    "max_swaps",
)
"""Options that override the problem file's field of the same name."""

ARRANGING = 0.25
"""Fraction of the search limits spent on assigning devices to stages."""


@dataclass(frozen=True)
class PathsRequest:
    """Problem described by the arguments.

    Attributes
    ----------
    problem
        Path problem on a given assignment of devices to stages, if there is one.
    free
        Otherwise, the problem whose assignment must be found.
    assignment
        Assignment problem for full pipelines, solved first if given.
    first
        Assignment in the file from which the search starts.
    ids
        Device names, if known.
    ignored
        Fields of the file that are not used.
    """

    problem: PathProblem | None
    free: ArrangedPathProblem | None
    assignment: AssignmentProblem | None
    first: tuple[tuple[int, ...], ...] | None
    ids: tuple[str, ...] | None
    ignored: tuple[str, ...]


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the problem file, or the network and workload to build a problem from."""
    sub.add_argument(
        "problem", type=Path, nargs="?", help="JSON file with the fields of pl.PathProblem"
    )
    add_cluster(sub, required=False)
    add_workload(sub, required=False)
    sub.add_argument("--stage-sizes", type=sizes, help="devices of each stage, such as 5,3,3,3,3,3")
    sub.add_argument("--path-stages", type=int, help="number of stages that a microbatch visits")
    sub.add_argument(
        "--microbatches-per-start",
        type=int,
        help="microbatches per device of stage 0; default: the batch divided evenly",
    )
    sub.add_argument(
        "--memory",
        type=int,
        help="microbatches that a device can hold; default: what fits its memory",
    )
    sub.add_argument(
        "--live-memory",
        action=argparse.BooleanOptionalAction,
        help="plan a whole iteration and free memory as backward passes end; default with "
        "--network",
    )
    sub.add_argument(
        "--max-swaps", type=int, help="most swaps of neighbouring stages in a path; default 1"
    )
    sub.add_argument(
        "--arrange", action="store_true", help="also search over assignments of devices to stages"
    )
    sub.add_argument("--out", type=Path, help="result file to write")
    add_solver(sub, list(PathMethod))
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Solve the problem; print paths, makespan and bound."""
    partial = None if args.out is None else partial_path(args.out)
    require_outputs(
        vars(args), [Output("--out", path, [".json"], FORMAT) for path in (args.out, partial)]
    )
    request = _request(args)
    if request.ignored:
        names = ", ".join(request.ignored)
        print(f"planner paths: {args.problem}: ignored fields: {names}", file=sys.stderr)
    incumbent_file = None if args.out is None else _incumbent_file(args.out, request)
    stop = stop_of(args, incumbent_file=incumbent_file)
    result = solve(request, stop, args.seed, args.method, arrange=args.arrange)
    data = {"format": FORMAT, **result_data(result)}
    if result.plan is None:
        show(args.json, data, [f"no paths found: {result.stop_reason}"])
        return INVALID_PLAN
    answer = PathsAnswer.from_plan(request, result.plan)
    answer.require_valid()
    data |= answer.data()
    lines = [certificate_line("makespan", data), *answer.lines()]
    written = args.out
    if incumbent_file is not None:
        written = save(args.out, lambda path: write_text(path, _text(data)))
        incumbent_file.remove()
        lines.append(f"wrote {written}")
    show(args.json, data, lines)
    return 0 if written == args.out else BAD_INPUT


def _text(data: Mapping[str, Any]) -> str:
    """Serialize a result for its file."""
    return json.dumps(data, allow_nan=False, indent=1) + "\n"


def _incumbent_file(out: Path, request: PathsRequest) -> IncumbentFile:
    """Return the file for the best paths so far, which have no certificate yet."""
    from planner.mapf.incumbent import IncumbentPaths

    problem = request.problem or request.free
    assert problem is not None

    def is_complete(incumbent: object) -> bool:
        # decomposed searches also report solutions of single waves
        return (
            isinstance(incumbent, IncumbentPaths)
            and isinstance(incumbent.problem, PathProblem)
            and incumbent.problem.microbatches_per_start == problem.microbatches_per_start
        )

    def text(incumbent: IncumbentPaths) -> str:
        assert isinstance(incumbent.problem, PathProblem)
        answer = PathsAnswer.from_paths(request, incumbent.problem, incumbent.path_plan())
        return _text({"format": FORMAT, **answer.data()})

    return IncumbentFile(out, is_complete, text)


def _request(args: argparse.Namespace) -> PathsRequest:
    """Build the problem from a file, or from the network and workload options."""
    named = args.network is not None or args.workload is not None
    if (args.problem is not None) == named:
        raise ProblemError("give either a problem file, or --network, --workload and --stage-sizes")
    if args.arrange and args.method != "auto":
        raise ProblemError(
            f"--method {args.method} does not support --arrange; leave one of them out"
        )
    changes = {name: getattr(args, name) for name in FIELDS}
    if args.problem is not None:
        return from_file(args.problem, changes, arrange=args.arrange)
    for name in ("network", "workload", "stage_sizes", "path_stages"):
        if getattr(args, name) is None:
            option = name.replace("_", "-")
            raise ProblemError(f"--{option} is missing; give it, or a problem file")
    return from_network(*problem_of(args), changes)


def from_file(path: Path, changes: Mapping[str, Any], *, arrange: bool) -> PathsRequest:
    """Read a problem file and override the fields whose change is not None."""
    file = load_path_file(path).with_changes(changes)
    if not arrange:
        return PathsRequest(file.problem(), None, None, None, None, file.ignored)
    free = file.arranged()
    first = None
    if "stage_devices" in file.values and "stage_sizes" not in file.values:
        first = file.problem().stage_devices
    return PathsRequest(None, free, None, first, None, file.ignored)


def from_network(cluster: Cluster, workload: Workload, fields: Mapping[str, Any]) -> PathsRequest:
    """Build the problem of a workload on a cluster; ``fields`` has the keys of `FIELDS`."""
    stage_sizes, samples = fields["stage_sizes"], workload.microbatch_samples
    layers = workload.even_split(len(stage_sizes))
    assignment = AssignmentProblem(
        cluster.network,
        stage_sizes=stage_sizes,
        activation_bytes=[b * samples for b in workload.activation_bytes(layers)],
        gradient_bytes=workload.gradient_bytes(layers, 0),
    )
    per_start = fields["microbatches_per_start"]
    if per_start is None:
        per_start, remainder = divmod(workload.batch_samples, samples * stage_sizes[0])
        if remainder or per_start == 0:
            raise ProblemError(
                f"a batch of {workload.batch_samples} samples does not divide into microbatches of "
                f"{samples} from {stage_sizes[0]} start devices; give --batch-samples "
                f"{max(per_start, 1) * samples * stage_sizes[0]}, or --microbatches-per-start"
            )
    free = ArrangedPathProblem.from_workload(
        cluster,
        workload,
        stage_sizes,
        path_stages=fields["path_stages"],
        microbatches_per_start=per_start,
        memory=fields["memory"],
        max_swaps=1 if fields["max_swaps"] is None else fields["max_swaps"],
        live_memory=fields["live_memory"] is not False,
    )
    return PathsRequest(None, free, assignment, None, cluster.network.ids, ())


def solve(
    request: PathsRequest, stop: StoppingCriterion, seed: int, method: str, *, arrange: bool
) -> Result[Any]:
    """Solve the path problem.

    Parameters
    ----------
    request
        The problem.
    stop
        Stopping criterion.
    seed
        Seed of the search.
    method
        Path solver.
    arrange
        Whether to search over assignments of devices to stages too.

    Returns
    -------
    Result
        Its ``plan`` is a `PathPlan` on a given assignment, else an `ArrangedPathPlan`.
    """
    from planner.genetic import solve_assignment
    from planner.mapf import solve_paths
    from planner.mapf.arrange import arrange_paths

    if request.problem is not None:
        return solve_paths(request.problem, stop, seed, method)
    assert request.free is not None
    first = request.first
    if request.assignment is not None:
        arranged = solve_assignment(request.assignment, stop.portion(ARRANGING), seed)
        assert arranged.plan is not None
        first = arranged.plan.groups
        # after Ctrl-C, stop at the first paths
        interrupted = arranged.stop_reason == "interrupted"
        stop = MaxIterations(0) if interrupted else stop.portion(1 - ARRANGING)
    if arrange:
        return arrange_paths(request.free, stop, seed, first)
    assert first is not None
    result: Result[Any] = solve_paths(request.free.arranged(first), stop, seed, method)
    if result.plan is None:
        return result
    return replace(result, plan=ArrangedPathPlan(first, result.plan))


@dataclass(frozen=True)
class PathsAnswer:
    """Paths and the assignment they are on, for printing."""

    problem: PathProblem
    plan: PathPlan
    ids: tuple[str, ...]

    @classmethod
    def from_plan(cls, request: PathsRequest, plan: PathPlan | ArrangedPathPlan) -> PathsAnswer:
        """Build an answer from a solver's plan."""
        if isinstance(plan, PathPlan):
            assert request.problem is not None
            problem, paths = request.problem, plan
        else:
            assert request.free is not None
            problem, paths = request.free.arranged(plan.groups), plan.paths
        return cls.from_paths(request, problem, paths)

    @classmethod
    def from_paths(
        cls, request: PathsRequest, problem: PathProblem, paths: PathPlan
    ) -> PathsAnswer:
        """Build an answer from the paths of a problem, with the devices' names."""
        names = tuple(str(d) for d in range(len(problem))) if request.ids is None else request.ids
        return cls(problem, paths, names)

    def require_valid(self) -> None:
        """Raise `ProblemError` if the paths do not pass the checker."""
        violations = check(self.plan, self.problem)
        if violations:
            raise ProblemError(
                f"the paths fail their own check: {violations[0]}; please report this"
            )

    def data(self) -> dict[str, Any]:
        """Return the answer, JSON-ready."""
        return {
            "devices": list(self.ids),
            "stage_devices": [list(group) for group in self.problem.stage_devices],
            "paths": [list(path) for path in self.plan.paths],
            "ops": [list(op) for op in self.plan.ops],
            "waves": waves_data(self.problem),
        }

    def lines(self) -> list[str]:
        """Format stages, waves and one line per path."""
        stage_of = self.problem.stage_of
        return [
            *(f"{label:<24}{text}" for label, text in waves_rows(waves_data(self.problem))),
            *(
                f"stage {j}: {self._names(group)}"
                for j, group in enumerate(self.problem.stage_devices)
            ),
            *(
                f"microbatch {b}: {self._names(path)}   (stages "
                f"{' '.join(str(stage_of[d]) for d in path)})"
                for b, path in enumerate(self.plan.paths)
            ),
        ]

    def _names(self, devices: Sequence[int]) -> str:
        return " ".join(self.ids[d] for d in devices)
