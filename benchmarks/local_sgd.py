"""Step times and cost of averaging every H steps and of codecs.

Each combination is planned separately and compared with the fastest consecutive ranks by region
that train the same way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.command_line import report_path, run
from planner.bench.environment import describe_environment
from planner.bench.plan_instances import INSTANCES
from planner.checker.dispatch import check
from planner.planning.baselines.rank_order import ranks_by_region
from planner.planning.request import PlanRequest
from planner.planning.solve import plan
from planner.problems import ProblemError
from planner.search.stop import Effort
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text

DEFAULT = ("aws", "gcp-v100", "two-sites", "mixed")
WAYS = (
    (1, "none", "none"),
    (1, "int8", "none"),
    (1, "int8", "int8"),
    (2, "none", "none"),
    (5, "none", "none"),
    (10, "none", "none"),
    (20, "none", "none"),
    (50, "none", "none"),
    (50, "int8", "int8"),
)
"""Steps between averagings, gradient codec and activation codec."""


@dataclass(frozen=True)
class Row:
    """Seconds and dollars per step of one instance with one way of training."""

    instance: str
    interval: int
    codec: str
    boundary: str
    step_s: float
    bound_s: float | None
    step_usd: float | None
    paid_gb: float | None
    shape: str
    ranks_s: float | None
    took_s: float


def measure(name: str, method: tuple[int, str, str], effort: float, seed: int) -> Row:
    """Plan an instance and its ranks by region."""
    interval, codec, boundary = method
    request = PlanRequest(sync_every=interval, codec=codec, boundary_codec=boundary)
    instance = INSTANCES[name]
    cluster, model = instance.cluster(), instance.model()
    began = time.perf_counter()
    result = plan(cluster, model, request=request, stop=Effort(effort), seed=seed)
    took_s = time.perf_counter() - began
    made = result.plan
    assert made is not None
    violations = check(made)
    if violations:
        raise RuntimeError(f"{name}, {method}: {violations[0]}")
    try:
        ranks = ranks_by_region(instance.problem(request, seed)).best[1].step_s
    except ProblemError:
        ranks = None
    groups = sorted({len(group) for group in made.assignment.groups})
    cost = made.cost
    return Row(
        name,
        interval,
        codec,
        boundary,
        made.predicted.step_s,
        result.bound,
        None if cost is None else cost.step_usd,
        None if cost is None else cost.paid_bytes / 1e9,
        f"{len(made.assignment.groups)} x {'-'.join(map(str, groups))}",
        ranks,
        took_s,
    )


def report(rows: Sequence[Row], load_before: str, effort: float, seed: int) -> str:
    """Format the dated report as Markdown."""
    today = datetime.now(UTC).date().isoformat()
    shown = dict.fromkeys(row.instance for row in rows)
    lines = [
        f"# Averaging rarely, in fewer bits, and its price, {today}",
        "",
        describe_environment(load_before),
        "",
        f"Regenerate with `python -m benchmarks.local_sgd`. Effort {effort:g}, seed {seed}, "
        "nothing else "
        "fixed. Seconds of a step on the clock (docs/explanation/step-time-model.md), in the "
        "mean where one in several "
        "averages; dollars with the prices that docs/how-to/save-money.md names. Ranks: "
        "consecutive ranks by "
        "region, best number of stages, microbatch size and order, trained the same way. Each plan "
        "passed its check. Codecs and H change what is learned; who measured how much stands in "
        "docs/how-to/save-money.md.",
        "",
        *(f"- {name}: {INSTANCES[name].about}" for name in shown),
        "",
        "| instance | averages every | gradients | boundaries | step | bound | gap | ranks | "
        "ratio | $ a step | GB between regions | stages | planning, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, rows),
        "",
    ]
    return "\n".join(lines)


def _row(row: Row) -> str:
    def number(value: float | None, spec: str = ".3f") -> str:
        return "-" if value is None else format(value, spec)

    gap = None if row.bound_s is None else (row.step_s - row.bound_s) / row.step_s
    ratio = None if row.ranks_s is None else row.step_s / row.ranks_s
    cells = [
        row.instance,
        str(row.interval),
        row.codec,
        row.boundary,
        number(row.step_s),
        number(row.bound_s),
        number(gap, ".1%"),
        number(row.ranks_s),
        number(ratio),
        number(row.step_usd),
        number(row.paid_gb, ".3g"),
        row.shape,
        number(row.took_s, ".0f"),
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Run the instances and write the report; return the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.local_sgd", description=__doc__)
    parser.add_argument("--out", type=Path, default=report_path("local-sgd"))
    parser.add_argument("--instances", nargs="+", choices=list(INSTANCES), default=DEFAULT)
    parser.add_argument("--effort", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    load_before, rows = f"{os.getloadavg()[0]:.1f}", []
    for name in args.instances:
        for method in WAYS:
            rows.append(measure(name, method, args.effort, args.seed))
            print(_row(rows[-1]), flush=True)
    write_text(args.out, report(rows, load_before, args.effort, args.seed))
    return 0


if __name__ == "__main__":
    run(main)
