"""``planner paths``: one path problem, from a file or from network, workload and stage sizes."""

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
    cluster_of,
    sizes,
    stop_of,
    workload_of,
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
from planner.cli.partial_output import Spare, part_of
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

ABOUT = "paths that skip and swap stages, with times and a bound"
EXAMPLE = (
    "planner paths --network gcp12_skippipe_2025_repaired --workload llama-500m "
    "--stage-sizes 3,3,3,3 --path-stages 3 --batch-samples 48"
)

FORMAT = "planner.paths"
FIELDS = (
    *("stage_sizes", "path_stages", "microbatches_per_start", "memory", "live_memory"),
    "max_swaps",
)
"""Arguments that change a problem file's field of the same name."""

ARRANGING = 0.25
"""Share of the limit for the arrangement that paths are searched on."""


@dataclass(frozen=True)
class PathsRequest:
    """What the arguments ask.

    Attributes
    ----------
    problem
        On a given arrangement.
    free, assignment
        Else: the arrangement to be found, for full pipelines first if ``assignment`` is there.
    first
        An arrangement to begin with, from the file.
    ids
        Names of devices, if known.
    ignored
        Entries of the file that say nothing to us.
    """

    problem: PathProblem | None
    free: ArrangedPathProblem | None
    assignment: AssignmentProblem | None
    first: tuple[tuple[int, ...], ...] | None
    ids: tuple[str, ...] | None
    ignored: tuple[str, ...]


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """A problem file, or what to make a problem from."""
    sub.add_argument("problem", type=Path, nargs="?", help="JSON with the fields of PathProblem")
    add_cluster(sub, required=False)
    add_workload(sub, required=False)
    sub.add_argument("--stage-sizes", type=sizes, help="such as 5,3,3,3,3,3")
    sub.add_argument("--path-stages", type=int, help="stages a microbatch visits")
    sub.add_argument("--microbatches-per-start", type=int, help="default: the batch's share")
    sub.add_argument("--memory", type=int, help="microbatches a device holds; default: what fits")
    sub.add_argument(
        "--live-memory",
        action=argparse.BooleanOptionalAction,
        help="a whole iteration, memory freed as microbatches return; default with --network",
    )
    sub.add_argument("--max-swaps", type=int, help="swaps of neighbouring stages; default 1")
    sub.add_argument("--arrange", action="store_true", help="choose the arrangement too")
    sub.add_argument("--out", type=Path, help="write the result here as JSON")
    add_solver(sub, list(PathMethod))
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Paths with their makespan and its bound."""
    part = None if args.out is None else part_of(args.out)
    require_outputs(
        vars(args), [Output("--out", path, [".json"], FORMAT) for path in (args.out, part)]
    )
    asked = _question(args)
    if asked.ignored:
        names = ", ".join(asked.ignored)
        print(f"planner paths: {args.problem}: not used: {names}", file=sys.stderr)
    spare = None if args.out is None else _spare(args.out, asked)
    stop = stop_of(args, spare=spare)
    result = ask(asked, stop, args.seed, args.method, arrange=args.arrange)
    data = {"format": FORMAT, **result_data(result)}
    if result.plan is None:
        show(args.json, data, [f"no paths: {result.stop_reason}"])
        return INVALID_PLAN
    answer = PathsAnswer.of(asked, result.plan)
    answer.require_valid()
    data |= answer.data()
    lines = [certificate_line("makespan", data), *answer.lines()]
    written = args.out
    if spare is not None:
        written = save(args.out, lambda path: write_text(path, _text(data)))
        spare.done()
        lines.append(f"wrote {written}")
    show(args.json, data, lines)
    return 0 if written == args.out else BAD_INPUT


def _text(data: Mapping[str, Any]) -> str:
    """What a result's file has."""
    return json.dumps(data, allow_nan=False, indent=1) + "\n"


def _spare(out: Path, asked: PathsRequest) -> Spare:
    """Paths without a certificate: a search under way has none."""
    from planner.mapf.incumbent import IncumbentPaths

    problem = asked.problem or asked.free
    assert problem is not None

    def whole(found: object) -> bool:
        # on an arrangement, and with all microbatches: waves are solved by themselves
        return (
            isinstance(found, IncumbentPaths)
            and isinstance(found.problem, PathProblem)
            and found.problem.microbatches_per_start == problem.microbatches_per_start
        )

    def text(found: IncumbentPaths) -> str:
        assert isinstance(found.problem, PathProblem)
        answer = PathsAnswer.on(asked, found.problem, found.path_plan())
        return _text({"format": FORMAT, **answer.data()})

    return Spare(out, whole, text)


def _question(args: argparse.Namespace) -> PathsRequest:
    """From a file, or from ``--network``, ``--workload`` and ``--stage-sizes``."""
    named = args.network is not None or args.workload is not None
    if (args.problem is not None) == named:
        raise ProblemError("give either a problem file, or --network, --workload and --stage-sizes")
    if args.arrange and args.method != "auto":
        raise ProblemError(f"--method {args.method} has no --arrange; leave one of them out")
    changes = {name: getattr(args, name) for name in FIELDS}
    if args.problem is not None:
        return from_file(args.problem, changes, arrange=args.arrange)
    for name in ("network", "workload", "stage_sizes", "path_stages"):
        if getattr(args, name) is None:
            option = name.replace("_", "-")
            raise ProblemError(f"--{option} is missing; give it, or a problem file")
    workload = workload_of(args)
    return from_network(cluster_of(args, workload.precision.compute), workload, changes)


def from_file(path: Path, changes: Mapping[str, Any], *, arrange: bool) -> PathsRequest:
    """The problem of a file, with some of its fields changed where they are not None."""
    file = load_path_file(path).with_changes(changes)
    if not arrange:
        return PathsRequest(file.problem(), None, None, None, None, file.ignored)
    free = file.arranged()
    first = None
    if "stage_devices" in file.values and "stage_sizes" not in file.values:
        first = file.problem().stage_devices
    return PathsRequest(None, free, None, first, None, file.ignored)


def from_network(cluster: Cluster, workload: Workload, fields: Mapping[str, Any]) -> PathsRequest:
    """The problem of a workload on a cluster; ``fields`` as in `FIELDS`."""
    stage_sizes, samples = fields["stage_sizes"], workload.microbatch_samples
    layers = workload.even_split(len(stage_sizes))
    assignment = AssignmentProblem(
        cluster.network,
        stage_sizes=stage_sizes,
        activation_bytes=[b * samples for b in workload.activation_bytes(layers)],
        gradient_bytes=workload.gradient_bytes(layers, 0),
    )
    each = fields["microbatches_per_start"]
    if each is None:
        each, left = divmod(workload.batch_samples, samples * stage_sizes[0])
        if left or each == 0:
            raise ProblemError(
                f"a batch of {workload.batch_samples} samples does not divide into microbatches of "
                f"{samples} from {stage_sizes[0]} start devices; give --batch-samples "
                f"{max(each, 1) * samples * stage_sizes[0]}, or --microbatches-per-start"
            )
    free = ArrangedPathProblem.from_workload(
        cluster,
        workload,
        stage_sizes,
        path_stages=fields["path_stages"],
        microbatches_per_start=each,
        memory=fields["memory"],
        max_swaps=1 if fields["max_swaps"] is None else fields["max_swaps"],
        live_memory=fields["live_memory"] is not False,
    )
    return PathsRequest(None, free, assignment, None, cluster.network.ids, ())


def ask(
    asked: PathsRequest, stop: StoppingCriterion, seed: int, method: str, *, arrange: bool
) -> Result[Any]:
    """Solve; ``plan`` is a `PathPlan`, with a free arrangement an `ArrangedPathPlan`."""
    from planner.genetic import solve_assignment
    from planner.mapf import solve_paths
    from planner.mapf.arrange import arrange_paths

    if asked.problem is not None:
        return solve_paths(asked.problem, stop, seed, method)
    assert asked.free is not None
    first = asked.first
    if asked.assignment is not None:
        arranged = solve_assignment(asked.assignment, stop.portion(ARRANGING), seed)
        assert arranged.plan is not None
        first = arranged.plan.groups
        # after Ctrl-C the first paths will do
        hurried = arranged.stop_reason == "interrupted"
        stop = MaxIterations(0) if hurried else stop.portion(1 - ARRANGING)
    if arrange:
        return arrange_paths(asked.free, stop, seed, first)
    assert first is not None
    found: Result[Any] = solve_paths(asked.free.arranged(first), stop, seed, method)
    if found.plan is None:
        return found
    return replace(found, plan=ArrangedPathPlan(first, found.plan))


@dataclass(frozen=True)
class PathsAnswer:
    """Paths on an arrangement, to be printed."""

    problem: PathProblem
    plan: PathPlan
    ids: tuple[str, ...]

    @classmethod
    def of(cls, asked: PathsRequest, plan: PathPlan | ArrangedPathPlan) -> PathsAnswer:
        """From a solver's plan."""
        if isinstance(plan, PathPlan):
            assert asked.problem is not None
            problem, paths = asked.problem, plan
        else:
            assert asked.free is not None
            problem, paths = asked.free.arranged(plan.groups), plan.paths
        return cls.on(asked, problem, paths)

    @classmethod
    def on(cls, asked: PathsRequest, problem: PathProblem, paths: PathPlan) -> PathsAnswer:
        """Paths of a problem, with the names that its devices have."""
        names = tuple(str(d) for d in range(len(problem))) if asked.ids is None else asked.ids
        return cls(problem, paths, names)

    def require_valid(self) -> None:
        """What is printed must pass the checker."""
        violations = check(self.plan, self.problem)
        if violations:
            raise ProblemError(
                f"the paths do not pass their own check: {violations[0]}; report this"
            )

    def data(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "devices": list(self.ids),
            "stage_devices": [list(group) for group in self.problem.stage_devices],
            "paths": [list(path) for path in self.plan.paths],
            "ops": [list(op) for op in self.plan.ops],
            "waves": waves_data(self.problem),
        }

    def lines(self) -> list[str]:
        """As text: stages, waves, and one path a line."""
        stage_of = self.problem.stage_of
        return [
            *(f"{what:<24}{text}" for what, text in waves_rows(waves_data(self.problem))),
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
