"""``planner paths``: one path problem, from a file or from network, workload and stage sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.checker.dispatch import check
from planner.cli.cycle_report import waves_data, waves_lines
from planner.network.cluster import Cluster
from planner.problems import ArrangedPathProblem, AssignmentProblem, PathProblem, ProblemError
from planner.problems.answers import ArrangedPathPlan, PathPlan
from planner.problems.path_file import load_path_file
from planner.search.result import Result
from planner.search.stop import MaxIterations, StoppingCriterion, portion
from planner.workload.workload import Workload

ARRANGING = 0.25
"""Share of the limit for the arrangement that paths are searched on."""


@dataclass(frozen=True)
class Question:
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


def question(
    args: argparse.Namespace,
    cluster: Callable[[argparse.Namespace], Cluster],
    workload: Callable[[argparse.Namespace], Workload],
) -> Question:
    """From a file, or from ``--network``, ``--workload`` and ``--stage-sizes``."""
    named = args.network is not None or args.workload is not None
    if (args.problem is not None) == named:
        raise ProblemError("give either a problem file, or --network, --workload and --stage-sizes")
    if args.arrange and args.method != "auto":
        raise ProblemError(f"--method {args.method} has no --arrange; leave one of them out")
    if args.problem is not None:
        return _from_file(args)
    for name in ("network", "workload", "stage_sizes", "path_stages"):
        if getattr(args, name) is None:
            option = name.replace("_", "-")
            raise ProblemError(f"--{option} is missing; give it, or a problem file")
    return _from_network(args, cluster(args), workload(args))


def _from_file(args: argparse.Namespace) -> Question:
    changes = {
        name: getattr(args, name)
        for name in (
            *("stage_sizes", "path_stages", "microbatches_per_start", "memory", "live_memory"),
            "max_swaps",
        )
    }
    file = load_path_file(args.problem).with_changes(changes)
    if not args.arrange:
        return Question(file.problem(), None, None, None, None, file.ignored)
    free = file.arranged()
    first = None
    if "stage_devices" in file.values and "stage_sizes" not in file.values:
        first = file.problem().stage_devices
    return Question(None, free, None, first, None, file.ignored)


def _from_network(args: argparse.Namespace, cluster: Cluster, workload: Workload) -> Question:
    sizes, samples = args.stage_sizes, workload.microbatch_samples
    layers = workload.even_split(len(sizes))
    assignment = AssignmentProblem(
        cluster.network,
        stage_sizes=sizes,
        activation_bytes=[b * samples for b in workload.activation_bytes(layers)],
        gradient_bytes=workload.gradient_bytes(layers, 0),
    )
    each = args.microbatches_per_start
    if each is None:
        each, left = divmod(workload.batch_samples, samples * sizes[0])
        if left or each == 0:
            raise ProblemError(
                f"a batch of {workload.batch_samples} samples does not divide into microbatches of "
                f"{samples} from {sizes[0]} start devices; give --batch-samples "
                f"{max(each, 1) * samples * sizes[0]}, or --microbatches-per-start"
            )
    free = ArrangedPathProblem.from_workload(
        cluster,
        workload,
        sizes,
        path_stages=args.path_stages,
        microbatches_per_start=each,
        memory=args.memory,
        max_swaps=1 if args.max_swaps is None else args.max_swaps,
        live_memory=True if args.live_memory is None else args.live_memory,
    )
    return Question(None, free, assignment, None, cluster.network.ids, ())


def ask(asked: Question, args: argparse.Namespace, stop: StoppingCriterion) -> Result[Any]:
    """Solve; ``plan`` is a `PathPlan`, with a free arrangement an `ArrangedPathPlan`."""
    from planner.genetic import solve_assignment
    from planner.mapf import solve_paths
    from planner.mapf.arrange import arrange_paths

    if asked.problem is not None:
        return solve_paths(asked.problem, stop, args.seed, args.method)
    assert asked.free is not None
    first = asked.first
    if asked.assignment is not None:
        arranged = solve_assignment(asked.assignment, portion(stop, ARRANGING), args.seed)
        assert arranged.plan is not None
        first = arranged.plan.groups
        # after Ctrl-C the first paths will do
        hurried = arranged.stop_reason == "interrupted"
        stop = MaxIterations(0) if hurried else portion(stop, 1 - ARRANGING)
    if args.arrange:
        return arrange_paths(asked.free, stop, args.seed, first)
    assert first is not None
    found: Result[Any] = solve_paths(asked.free.arranged(first), stop, args.seed, args.method)
    if found.plan is None:
        return found
    return replace(found, plan=ArrangedPathPlan(first, found.plan))


@dataclass(frozen=True)
class Answer:
    """Paths on an arrangement, to be printed."""

    problem: PathProblem
    plan: PathPlan
    ids: tuple[str, ...]

    @classmethod
    def of(cls, asked: Question, plan: PathPlan | ArrangedPathPlan) -> Answer:
        """From a solver's plan."""
        if isinstance(plan, PathPlan):
            assert asked.problem is not None
            problem, paths = asked.problem, plan
        else:
            assert asked.free is not None
            problem, paths = asked.free.arranged(plan.groups), plan.paths
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
            *waves_lines(waves_data(self.problem)),
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
