"""``python -m benchmarks.executed_plans``: plans and baselines executed on emulated networks.

Needs Linux and root (see ``planner emulate``). On each network of ``python -m benchmarks.fidelity``
with eight devices: the plan with every decision open, the best straight pipelines (``--stages
auto``), and the best ranks in the network's order. Compute times are imposed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.command_line import report_path, run
from benchmarks.fidelity.cases import SETTINGS
from planner.emulate.emulation import EmulationSettings, emulate, resolve_settings
from planner.network.cluster import Cluster
from planner.planning.baselines.rank_order import ranks_by_region, ranks_grid, region_order
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import shape_of
from planner.planning.solve import plan
from planner.problems.answers import AssignmentPlan
from planner.search.stop import Effort
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text
from planner.workload.workload import Workload

SEED = 0
NETWORKS = ("bandwidth", "latency", "limits", "sites", "tied")


def ranks_plan(cluster: Cluster, workload: Workload) -> TrainingPlan:
    """Build the best plan with ranks in the network's order."""
    found = ranks_by_region(PlanningProblem.of(cluster, workload, PlanRequest(), SEED, {}))
    outermost, best = found.best
    request = PlanRequest(
        stages=best.stages,
        microbatch_samples=best.microbatch_samples,
        schedule=best.order,
        recompute="all" if best.recompute else (),
    )
    problem = PlanningProblem.of(cluster, workload, request, SEED, {})
    grid = ranks_grid(region_order(cluster.network), best.stages, outermost)
    return straight_plan(problem, shape_of(problem), AssignmentPlan.of_grid(grid))


def plans_for(cluster: Cluster, workload: Workload, effort: float) -> dict[str, TrainingPlan]:
    """Return the plans to compare."""
    found = {}
    for name, stages in (("everything open", None), ("straight, best shape", "auto")):
        made = plan(cluster, workload, stages=stages, stop=Effort(effort), seed=SEED).plan
        assert made is not None
        found[name] = made
    return found | {"ranks in order": ranks_plan(cluster, workload)}


def executed_s(made: TrainingPlan, settings: EmulationSettings) -> float:
    """Return the mean executed time of consecutive steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(made, path)
        seconds = emulate(path, made, resolve_settings(made, settings)).comparison.step.executed_s
    assert seconds is not None  # consecutive steps are always run
    return seconds


def main(argv: Sequence[str]) -> int:
    """Run the plans and write the report; return the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.executed_plans", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=report_path("executed-plans"))
    parser.add_argument("--networks", nargs="*", default=NETWORKS, choices=list(SETTINGS))
    parser.add_argument("--effort", type=float, default=5.0, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args(argv)
    settings = replace(EmulationSettings(), steps=args.steps, rest=1)
    lines = [
        f"# Whole plans and others, executed, {today}",
        "",
        f"planner {version('planner')}; regenerate with `python -m benchmarks.executed_plans`, "
        "as root. Seed "
        f"{SEED}, effort {args.effort:g}; imposed compute times; means of {args.steps} steps that "
        "chain. Networks and workloads are those of `python -m benchmarks.fidelity`.",
        "",
        "| network | plan | stages | predicted s | executed s | ratio | executed, times faster |",
        f"|{'---|' * 7}",
    ]
    for network in args.networks:
        base = None
        for name, made in plans_for(*SETTINGS[network].make(), args.effort).items():
            seconds = executed_s(made, settings)
            base = base or seconds
            said = made.predicted.step_s
            sizes = " ".join(str(len(group)) for group in made.assignment.groups)
            row = (
                f"| {network} | {name} | {sizes} | {said:.3f} | {seconds:.3f} | "
                f"{seconds / said:.3f} | {seconds / base:.2f} |"
            )
            print(row, flush=True)
            lines.append(row)
    lines += ["", "The last column: by how much the first plan of a network is faster than this."]
    write_text(args.out, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
