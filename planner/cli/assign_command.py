"""``planner assign``: solve one assignment problem."""

from __future__ import annotations

import argparse

from planner.cli.arguments import add_network, add_solver, cluster_of, sizes, stop_of
from planner.cli.output import INVALID_PLAN, certificate_line, result_data, show
from planner.problems.assignment_method import AssignmentMethod
from planner.utils.text import counted

ABOUT = "assign devices to pipeline stages; print stages, cost and lower bound"
EXAMPLE = (
    "planner assign --network aws8_dtfm_worldwide_2022 --stages 4 --pipelines 2 "
    "--activation-bytes 8e6 --gradient-bytes 1e9"
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the network, the shape, message sizes and search limits."""
    add_network(sub)
    # the cost of an assignment depends on links alone
    sub.set_defaults(gpu=None, utilization=0.4, memory_gb=None, usd_per_hour=None)
    sub.add_argument("--stages", type=int, help="number of stages of equal size")
    sub.add_argument("--pipelines", type=int, help="number of pipelines; default: devices / stages")
    sub.add_argument(
        "--stage-sizes",
        type=sizes,
        help="instead of --stages: devices of each stage, such as 6,4,4,4",
    )
    sub.add_argument(
        "--activation-bytes",
        type=float,
        required=True,
        help="bytes of a microbatch's activations between two stages (the paper's c_PP)",
    )
    sub.add_argument(
        "--gradient-bytes",
        type=float,
        required=True,
        help="bytes of a stage's gradients (the paper's c_DP)",
    )
    add_solver(sub, list(AssignmentMethod))


def run(args: argparse.Namespace) -> int:
    """Solve the problem; print cost, bound and the devices of each stage."""
    from planner.genetic.solve import solve_assignment
    from planner.problems import AssignmentProblem, ProblemError

    network = cluster_of(args).network
    pipelines = args.pipelines
    if pipelines is None and args.stages is not None and args.stages > 0:
        pipelines, remainder = divmod(len(network), args.stages)
        if remainder:
            raise ProblemError(
                f"{counted(len(network), 'device')} do not divide into {args.stages} equal stages; "
                "give --pipelines, or --stage-sizes"
            )
    problem = AssignmentProblem(
        network,
        args.stages,
        pipelines,
        args.activation_bytes,
        args.gradient_bytes,
        stage_sizes=args.stage_sizes,
    )
    result = solve_assignment(problem, stop_of(args), args.seed, args.method)
    data = result_data(result)
    lines = [certificate_line("assignment cost", data)]
    if result.plan is not None:
        groups = [[network.ids[d] for d in group] for group in result.plan.groups]
        data["groups"] = groups
        data["grid"] = None if result.plan.grid is None else result.plan.grid.tolist()
        lines += [f"stage {j}: {' '.join(names)}" for j, names in enumerate(groups)]
    show(args.json, data, lines)
    return 0 if result.plan is not None else INVALID_PLAN
