"""How well the estimate of a layout ranks the candidates of the joint search.

    python -m benchmarks.estimate [--instances aws mixed ...] [--effort 20] [--seeds 0 1]
        [--out FILE.md]

A search is run, and every layout that it built is taken: its estimate, and the shortest step that
the simulator found for it. Those that take over 1.6 times as long as the best are left out, and
those that recompute on other stages than the estimate assumes. As the search builds what its
estimate favours, the range of estimates is narrow.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import numpy as np
from scipy.stats import spearmanr

import planner as pl
from benchmarks.command_line import report_path, run, versions
from planner.bench.plan_instances import INSTANCES
from planner.planning.joint.candidate import CandidatePlan
from planner.planning.joint.candidate_pool import CandidatePool
from planner.planning.joint.joint_search import JointSearch
from planner.planning.joint.layout import Layout
from planner.planning.request import PlanRequest
from planner.utils.atomic_write import write_text

MAX_RATIO = 1.6
PACKAGES = ("planner", "numpy", "numba", "scipy")


def built(name: str, effort: float, seed: int) -> list[tuple[float, float]]:
    """Return estimate and simulated seconds of every layout that a search builds."""
    problem = INSTANCES[name].problem(PlanRequest(), seed)
    search = JointSearch(problem, pl.Effort(effort), None)
    seconds: dict[Layout, float] = {}
    keep = CandidatePool.keep

    def recorded(pool: CandidatePool, candidate: CandidatePlan) -> None:
        known = seconds.get(candidate.layout, np.inf)
        seconds[candidate.layout] = min(known, candidate.value)
        keep(pool, candidate)

    with patch.object(CandidatePool, "keep", recorded):
        search.result()
    most = MAX_RATIO * min(seconds.values())
    scored = {layout: search.layouts.scored(layout) for layout in seconds}
    # the estimate chooses which stages recompute
    return [
        (scored[layout].value, value)
        for layout, value in seconds.items()
        if value <= most and scored[layout].layout == layout
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--instances",
        nargs="+",
        choices=INSTANCES,
        default=["aws", "mixed", "gcp-t4", "gcp-v100", "skyplane", "two-sites"],
    )
    parser.add_argument("--effort", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=report_path("estimate"))
    args = parser.parse_args(argv)
    rows = ["| instance | layouts | Spearman | estimate / simulated |", "|---|---|---|---|"]
    correlations = []
    for name in args.instances:
        found = [pair for seed in args.seeds for pair in built(name, args.effort, seed)]
        estimated, simulated = np.array(found).T
        correlations.append(float(spearmanr(estimated, simulated)[0]))
        low, middle, high = np.percentile(estimated / simulated, [5, 50, 95])
        ratios = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append(f"| {name} | {len(found)} | {correlations[-1]:.2f} | {ratios} |")
    words = f"--instances {' '.join(args.instances)} --effort {args.effort:g}"
    words += f" --seeds {' '.join(map(str, args.seeds))}"
    text = "\n".join(
        [
            f"# The estimate of the joint search, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{versions(*PACKAGES)}; {platform.machine()}, "
            f"{os.cpu_count()} cores. Made by `python -m benchmarks.estimate {words}`.",
            "",
            "Layouts that the search built, without those that take over "
            f"{MAX_RATIO:g} times as long as the best; medians, 5th and 95th percentiles. Mean "
            f"correlation {np.mean(correlations):.2f}.",
            "",
            *rows,
            "",
        ]
    )
    print(text)
    write_text(args.out, text)
    return 0


if __name__ == "__main__":
    run(main)
