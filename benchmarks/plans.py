"""``python -m benchmarks.plans``: plans against baselines on measured networks.

Every plan is compared with the fastest consecutive ranks, by region in both orders and by nearest
neighbour, the fastest single region, SAILOR's rule, and DT-FM's rule in two readings, all evaluated
by the same simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import report_path, run
from planner.bench.environment import describe_environment
from planner.bench.plan_instances import INSTANCES, PlanInstance, regional_cluster
from planner.network.catalogue import list_networks
from planner.network.cluster import Cluster
from planner.planning.baselines.dtfm import dtfm_rule
from planner.planning.baselines.rank_order import one_region, ranks_by_neighbour, ranks_by_region
from planner.planning.baselines.sailor import sailor_rule
from planner.planning.baselines.search import BaselinePlan, SearchCounts
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanKind, PlanRequest
from planner.planning.solve import plan
from planner.problems import ProblemError
from planner.search.interrupts import INTERRUPTS
from planner.search.stop import AnyOf, Effort, MaxRuntime, StoppingCriterion
from planner.simulator.simulator import steady_step_s
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text
from planner.workload.presets import PRESETS

ROUNDING = 1e-9
"""Relative difference below which a plan is as fast as a baseline."""
FAMILIES = ("gpt", "llama")
"""Model families whose presets are in the catalogue."""


def catalogue(gpu: str = "V100") -> dict[str, PlanInstance]:
    """Combine the complete part of every bundled network with every preset of `FAMILIES`."""

    def at(name: str) -> Callable[[], Cluster]:
        return lambda: regional_cluster(name, 1, gpu)

    return {
        f"{name}/{preset}": PlanInstance(f"a {gpu} each", at(name), preset)
        for name in list_networks()
        for preset in PRESETS
        if preset.startswith(FAMILIES)
    }


@dataclass(frozen=True)
class Baseline:
    """A baseline of an instance.

    Attributes
    ----------
    step_s
        Simulated step time; None if nothing fits.
    about
        Shape and order, or why nothing fits.
    """

    step_s: float | None
    about: str


@cache
def instances() -> Mapping[str, PlanInstance]:
    """Return all instances by name."""
    return INSTANCES | catalogue()


@dataclass(frozen=True)
class Row:
    """Result of one instance and seed.

    Attributes
    ----------
    instance, seed, asked
        Identity; ``asked`` is the limit and the request in words.
    step_s, bound_s, gap
        Step time, lower bound and gap; None if not found or not proven.
    settled_s, long_run_s
        Mean step time over many steps, and a lower bound on it.
    about
        Shape of the plan, or why there is none.
    """

    instance: str
    seed: int
    asked: str
    step_s: float | None
    bound_s: float | None
    gap: float | None
    settled_s: float | None
    long_run_s: float | None
    about: str
    seconds: float
    baselines: dict[str, Baseline]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """Read a line of the results."""
        rules = {name: Baseline(**found) for name, found in data.pop("baselines").items()}
        return cls(**{"settled_s": None, "long_run_s": None} | data, baselines=rules)

    @property
    def key(self) -> tuple[str, int, str]:
        """Identity of the row."""
        return self.instance, self.seed, self.asked

    @property
    def best_baseline_s(self) -> float | None:
        """Fastest baseline that fits."""
        steps = [b.step_s for b in self.baselines.values() if b.step_s is not None]
        return min(steps, default=None)

    @property
    def ratio(self) -> float | None:
        """Step time divided by that of the best baseline."""
        best = self.best_baseline_s
        return None if best is None or self.step_s is None else self.step_s / best

    @property
    def long_run_gap(self) -> float | None:
        """Gap over many steps."""
        if self.settled_s is None or self.long_run_s is None:
            return None
        return 1 - self.long_run_s / self.settled_s


NAMES = (
    "ranks, pipeline outermost",
    "ranks, data outermost",
    "one region",
    "ranks, nearest",
    "SAILOR's rule",
    "DT-FM's rule",
    "DT-FM, stages tried",
)


def seedless(problem: PlanningProblem) -> dict[str, Baseline]:
    """Evaluate the baselines that do not depend on the seed.

    Returns
    -------
    dict[str, Baseline]
        Ranks in order, one region and SAILOR's rule: the first five of `NAMES`.
    """

    def ranks() -> list[Baseline]:
        found = ranks_by_region(problem)
        return [
            Baseline(None, "does not fit") if p is None else _fixed(p, found.tally)
            for p in (found.pipeline, found.data)
        ]

    def region() -> list[Baseline]:
        alone = one_region(problem)
        return [_fixed(alone.plan, alone.tally, f"{alone.name}: ")]

    def sailor() -> list[Baseline]:
        rule = sailor_rule(problem)
        prefix = f"estimated {rule.estimated_s:.2f} s in {rule.regions} regions: "
        return [_fixed(rule.plan, SearchCounts(), prefix)]

    found = [
        *_tried(ranks, 2),
        *_tried(region),
        *_tried(lambda: [_fixed(*ranks_by_neighbour(problem))]),
        *_tried(sailor),
    ]
    return dict(zip(NAMES[:5], found, strict=True))


def seeded(problem: PlanningProblem, effort: float) -> dict[str, Baseline]:
    """Evaluate DT-FM's rule, whose assignments are searched.

    Returns
    -------
    dict[str, Baseline]
        The other ones of `NAMES`.
    """

    def dtfm() -> list[Baseline]:
        rule = dtfm_rule(problem, Effort(effort))
        prefix = f"cost {rule.cost_s:.2f} s: "
        return [_fixed(rule.plan, SearchCounts(), prefix), _fixed(rule.tried, SearchCounts())]

    return dict(zip(NAMES[5:], _tried(dtfm, 2), strict=True))


def _tried(make: Callable[[], list[Baseline]], count: int = 1) -> list[Baseline]:
    """Return a rule's baselines, or ``count`` times the reason why none fits."""
    try:
        return make()
    except ProblemError as error:
        return [_refused(error)] * count


def _fixed(plan: BaselinePlan, tally: SearchCounts, prefix: str = "") -> Baseline:
    facts = [
        f"{prefix}{plan.stages} x {plan.pipelines}, mb {plan.microbatch_samples}, {plan.order}"
    ]
    facts += ["recomputing"] * plan.recompute + ["balanced layers"] * plan.balanced
    facts += [f"{tally.left_out} more not tried"] * (tally.left_out > 0)
    return Baseline(plan.step_s, ", ".join(facts))


def _refused(error: ProblemError) -> Baseline:
    return Baseline(None, str(error).split(";", maxsplit=1)[0])


def measure(
    name: str,
    request: PlanRequest,
    stop: StoppingCriterion,
    seed: int,
    asked: str,
    baselines: dict[str, Baseline],
) -> Row:
    """Plan one instance."""
    instance = instances()[name]
    cluster, workload = instance.cluster(), instance.model()
    began = time.perf_counter()
    step_s = bound_s = gap = settled_s = long_s = made = None
    try:
        result = plan(cluster, workload, request=request, stop=stop, seed=seed)
        about, made = str(result.status), result.plan
    except ProblemError as error:
        about = str(error).split(";", maxsplit=1)[0]
    seconds = time.perf_counter() - began
    if made is not None:
        step_s, bound_s, gap = result.objective, result.bound, result.gap
        settled_s = steady_step_s(made)
        if request.kind is PlanKind.JOINT:
            certificate = made.step_certificate
            long_s = None if certificate is None else certificate.bound
        sizes = sorted({len(group) for group in made.assignment.groups})
        about = (
            f"{len(made.assignment.groups)} x {'-'.join(map(str, sizes))}, "
            f"mb {made.workload.microbatch_samples}, {made.schedules[0].name}"
        )
    found = (step_s, bound_s, gap, settled_s, long_s)
    return Row(name, seed, asked, *found, about, seconds, baselines)


def report(rows: Sequence[Row], load_before: str) -> str:
    """Format the dated report as Markdown."""
    today = datetime.now(UTC).date().isoformat()
    asked = sorted({row.asked for row in rows})
    seeds = sorted({row.seed for row in rows})
    shown = dict.fromkeys(row.instance for row in rows)
    lines = [
        f"# Plans and what needs no planner, {today}",
        "",
        describe_environment(load_before),
        "",
        f"Regenerate with `python -m benchmarks.plans`. Asked: {'; '.join(asked)}. Seeds "
        f"{', '.join(map(str, seeds))}. Step times in seconds on the clock "
        "(docs/explanation/step-time-model.md). Ratio: "
        "the plan's step over the best baseline's; below 1 the plan is faster. Bound: of the step "
        "that is counted, the third. In the long run: the mean of 20 steps after it, and what no "
        "plan is faster than over many steps; a single one may live on a lead.",
        "",
        *(f"- {name}: {instances()[name].about}" for name in shown),
        "",
        "| instance | seed | plan | bound | gap | in the long run | bound | gap | "
        f"{' | '.join(NAMES)} | ratio | planning, s |",
        f"|{'---|' * (10 + len(NAMES))}",
        *(_row(row) for row in rows),
        "",
        "## What they are",
        "",
        "stages x pipelines, samples a microbatch (mb), order. Ranks count region by region. "
        "Pipeline outermost: stage j is ranks jP to (j + 1)P - 1; data outermost: pipeline p is "
        "ranks pS to (p + 1)S - 1; the best number of stages, microbatch size and order, "
        "recomputing or not. One "
        "region: likewise, on that region's devices alone, or the fastest half, quarter and so on "
        "of them. Nearest: ranks that continue with the "
        "nearest device, the best of ten orders. SAILOR's rule: stages within regions, "
        "its own estimate decides (rebuilt from paper and code). DT-FM's rule: the shape and "
        "placement whose communication cost (eq. 1) is least; stages tried: eq. 1 places, the "
        "clock chooses the number of stages.",
        "",
        f"| instance | seed | plan | {' | '.join(NAMES)} |",
        f"|{'---|' * (3 + len(NAMES))}",
    ]
    for row in rows:
        cells = [row.instance, str(row.seed), row.about]
        cells += [row.baselines[name].about for name in NAMES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *summary(rows)]) + "\n"


def _row(row: Row) -> str:
    cells = [row.instance, str(row.seed), _number(row.step_s), _number(row.bound_s)]
    cells.append("-" if row.gap is None else f"{row.gap:.1%}")
    cells += [_number(row.settled_s), _number(row.long_run_s)]
    cells.append("-" if row.long_run_gap is None else f"{row.long_run_gap:.1%}")
    cells += [_number(row.baselines[name].step_s) for name in NAMES]
    cells += [_number(row.ratio), f"{row.seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def summary(rows: Sequence[Row]) -> list[str]:
    """Compare the plans with their best baselines."""
    ratios = [(ratio, row) for row in rows if (ratio := row.ratio) is not None]
    if not ratios:
        return ["No instance has both a plan and a baseline."]
    mean = float(np.exp(np.mean([np.log(ratio) for ratio, _ in ratios])))
    worst, row = max(ratios, key=lambda found: found[0])
    slower = sum(ratio > 1 + ROUNDING for ratio, _ in ratios)
    return [
        f"Ratio: {mean:.3f} in the geometric mean of {len(ratios)}, at most {worst:.3f} "
        f"({row.instance}, seed {row.seed}); the plan is slower than a baseline in {slower}."
    ]


def main(argv: Sequence[str]) -> int:
    """Run the instances and write the report; return the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--out", type=Path, default=report_path("plans"))
    parser.add_argument("--results", type=Path, help="keep results here (JSON lines) and continue")
    parser.add_argument(
        "--instances",
        nargs="*",
        choices=list(instances()),
        metavar="NAME",
        help=f"default: these {len(INSTANCES)}: {', '.join(INSTANCES)}; also NETWORK/PRESET",
    )
    parser.add_argument("--catalogue", action="store_true", help="every NETWORK/PRESET instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--effort", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, help="end each search then, whatever the effort")
    parser.add_argument(
        "--fields", type=json.loads, default={}, help='of the request, as JSON: {"stages": 8}'
    )
    parser.add_argument(
        "--rule-effort", type=float, default=10.0, help="for the assignments of DT-FM's rule"
    )
    args = parser.parse_args(argv)
    request = PlanRequest().replace(**args.fields)
    stop: StoppingCriterion = Effort(args.effort)
    asked = f"effort {args.effort:g}"
    if args.seconds is not None:
        stop = AnyOf(stop, MaxRuntime(args.seconds))
        asked += f", at most {args.seconds:g} s"
    asked += f", {json.dumps(args.fields)}" if args.fields else ", nothing fixed"
    load_before = f"{os.getloadavg()[0]:.1f}"
    rows = []
    for row in _measured(args, request, stop, asked):
        print(_row(row), flush=True)
        rows.append(row)
    if not rows:
        raise KeyboardInterrupt  # interrupted before the first row
    for line in summary(rows):
        print(line)
    write_text(args.out, report(rows, load_before))
    return 0


def _measured(
    args: argparse.Namespace, request: PlanRequest, stop: StoppingCriterion, asked: str
) -> Iterator[Row]:
    """Return stored and new rows; new ones are stored, unless their search was interrupted."""
    saved_rows = _kept(args.results)
    for name in args.instances or (catalogue() if args.catalogue else INSTANCES):
        same: dict[str, Baseline] = {}
        for seed in args.seeds:
            row = saved_rows.get((name, seed, asked))
            if row is None:
                problem = instances()[name].problem(request, seed)
                same = same or seedless(problem)
                baselines = same | seeded(problem, args.rule_effort)
                row = measure(name, request, stop, seed, asked, baselines)
                if INTERRUPTS.requested:
                    return
                if args.results is not None:
                    with args.results.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
            yield row


def _kept(path: Path | None) -> dict[tuple[str, int, str], Row]:
    if path is None or not path.exists():
        return {}
    rows = [Row.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    return {row.key: row for row in rows}


if __name__ == "__main__":
    run(main)
