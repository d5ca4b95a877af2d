"""``python -m benchmarks.local_sgd_bytes``: bytes of pipelines and averaging as models grow.

DiLoCo-SWARM's Figure 7: two stages of four devices, straight pipelines, GPT-2 from tiny to large.
Activations and gradients of a step are 2 x samples x sequence x hidden values. A stage of m devices
averages v values by sending 2 (m - 1) v in all, once in H steps. Bytes are those of a plan's
messages (`planner.simulator.traffic`); the formulas are checked against them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.command_line import report_path, run
from planner.bench.environment import describe_environment
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import shape_of
from planner.problems.answers import AssignmentPlan
from planner.simulator.traffic import sent_bytes
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_picture, write_text
from planner.workload.workload import Workload

MODELS = ("gpt2-tiny", "gpt2-small", "gpt2-medium", "gpt2-large")
STAGES, PEERS = 2, 4
EVERY = (1, 10, 50, 200)
GIGA = 1e9


@dataclass(frozen=True)
class Row:
    """One model, with total gigabytes per step."""

    model: str
    parameters: int
    pipeline_gb: float
    averaging_gb: float


def measure(name: str) -> Row:
    """Count the bytes of a plan with two stages of four devices, and compute them by formula."""
    work, n = Workload.preset(name), STAGES * PEERS
    cluster = Cluster(Network(np.full((n, n), 0.01), np.full((n, n), 1e9)), Devices(1e14, 1e12))
    problem = PlanningProblem(cluster, work, PlanRequest(stages=STAGES))
    grid = AssignmentPlan.of_grid(np.arange(n).reshape(PEERS, STAGES))
    plan = straight_plan(problem, shape_of(problem), grid)
    assert grid.groups is not None and work.architecture is not None
    stage = np.array([plan.stage_of[d] for d in range(n)])
    sources, destinations, sizes = sent_bytes(plan)
    within = stage[sources] == stage[destinations]
    averaging, pipeline = float(sizes[within].sum()), float(sizes[~within].sum())
    arch = work.architecture
    values = 2 * work.batch_samples * arch.sequence * arch.hidden
    by_formula = (
        values * work.precision.messages.bytes,
        2 * (PEERS - 1) * work.parameters * work.gradient_bytes_per_parameter,
    )
    if not np.allclose((pipeline, averaging), by_formula, rtol=1e-9):
        raise RuntimeError(f"{name}: messages have {pipeline, averaging}, formulas {by_formula}")
    return Row(name, work.parameters, pipeline / GIGA, averaging / GIGA)


def report(rows: Sequence[Row], load_before: str, picture: str) -> str:
    """Format the dated report as Markdown."""
    today = datetime.now(UTC).date().isoformat()
    lines = [
        f"# What pipelines and averaging send as models grow, {today}",
        "",
        describe_environment(load_before, ("planner", "numpy")),
        "",
        f"Regenerate with `python -m benchmarks.local_sgd_bytes`. {STAGES} stages x {PEERS} "
        "devices, batch "
        "512, sequence 1,024 (DiLoCo-SWARM, 4.2 and Figure 7); activations in bf16, averages in "
        "fp32. Gigabytes of a step over all links: pipelines 2 x samples x sequence x hidden "
        "values for the one boundary; averaging 2 x (peers - 1) x parameters values over all "
        "stages, divided by H. The paper's figure has the same two parts in logarithms, without "
        "figures and without saying in which format: there pipelines send most for small models. "
        "So it is here with activations in fp32; in bf16 averaging is most from the smallest on.",
        "",
        "| model | parameters | pipelines | "
        + " | ".join(f"averaging, H = {interval}" for interval in EVERY)
        + " | averaging's part, H = 1 | activations in fp32 | all, H = 1 over H = 50 |",
        "|---|---|---|" + "---|" * len(EVERY) + "---|---|---|",
        *map(_row, rows),
        "",
        f"![Gigabytes of a step by model]({picture})",
        "",
    ]
    return "\n".join(lines)


def _row(row: Row) -> str:
    total_gb = row.pipeline_gb + row.averaging_gb
    saved = total_gb / (row.pipeline_gb + row.averaging_gb / 50)
    cells = [
        row.model,
        f"{row.parameters / 1e6:.1f} million",
        f"{row.pipeline_gb:.3f}",
        *(f"{row.averaging_gb / interval:.3f}" for interval in EVERY),
        f"{row.averaging_gb / total_gb:.1%}",
        f"{row.averaging_gb / (2 * row.pipeline_gb + row.averaging_gb):.1%}",
        f"{saved:.2f} x",
    ]
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw both parts over the number of parameters on logarithmic axes, as in the paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    size = [row.parameters for row in rows]
    axes.plot(size, [row.pipeline_gb for row in rows], "o-", label="pipelines")
    for interval in EVERY:
        some = [row.averaging_gb / interval for row in rows]
        axes.plot(size, some, "s--", label=f"averaging, H = {interval}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for row in rows:
        axes.annotate(
            row.model,
            (row.parameters, row.pipeline_gb),
            (0, 6),
            fontsize=8,
            textcoords="offset points",
            ha="center",
        )
    axes.set_xlabel("parameters")
    axes.set_ylabel("gigabytes of a step")
    axes.legend(fontsize=8)
    write_picture(path, figure, dpi=150)


def main(argv: Sequence[str]) -> int:
    """Count, and write report and chart; return the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.local_sgd_bytes", description=__doc__)
    parser.add_argument("--out", type=Path, default=report_path("local-sgd-bytes"))
    args = parser.parse_args(argv)
    load_before, rows = f"{os.getloadavg()[0]:.1f}", [measure(name) for name in MODELS]
    for row in rows:
        print(_row(row))
    picture = args.out.with_suffix(".png")
    draw(rows, picture)
    write_text(args.out, report(rows, load_before, picture.name))
    return 0


if __name__ == "__main__":
    run(main)
