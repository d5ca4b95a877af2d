"""Bounds on the mean step: of stages, of types of devices and of sites, and the gap they leave.

    python -m benchmarks.mean_bound [--effort 5] [--seeds 0 1 2] [--out FILE.md]

On the instances of `planner.bench.plan_instances` without machines, and on ten random jobs. Steps
are those of the best plan of all seeds.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import planner as pl
from benchmarks.command_line import report_path, run, versions
from planner.bench.job_generator import random_job
from planner.bench.plan_instances import INSTANCES
from planner.network.cluster import Cluster
from planner.planning.joint.mean_bound import mean_bounds
from planner.utils.atomic_write import write_text
from planner.workload.workload import Workload

NAMED = ("aws", "mixed", "gcp-t4", "gcp-v100", "skyplane", "two-sites", "us", "fluidstack")
JOBS = 10
PACKAGES = ("planner", "numpy", "numba", "scipy")


def jobs() -> Iterator[tuple[str, Cluster, Workload]]:
    """Yield names, devices and models."""
    for name in NAMED:
        yield name, INSTANCES[name].cluster(), INSTANCES[name].model()
    for k in range(JOBS):
        job = random_job(k)
        yield f"random job {k}", job.cluster, job.workload


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, and compare the bounds with the steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--effort", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=report_path("mean-bound"))
    args = parser.parse_args(argv)
    rows = [
        "| instance | step | stages | types | sites | gap with stages alone | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cluster, workload in jobs():
        step_s = min(
            pl.plan(cluster, workload, stop=pl.Effort(args.effort), seed=seed).objective or 0.0
            for seed in args.seeds
        )
        of_stages, *of_types, of_sites = (x.value for x in mean_bounds(cluster, workload))
        best = max(of_stages, *of_types, of_sites)
        gaps = [1 - bound / step_s for bound in (of_stages, best)]
        types = f"{of_types[0]:.4g} s" if of_types else ""
        rows.append(
            f"| {name} | {step_s:.4g} s | {of_stages:.4g} s | {types} | {of_sites:.4g} s | "
            f"{gaps[0]:.1%} | {gaps[1]:.1%} |"
        )
        print(rows[-1], flush=True)
    words = f"--effort {args.effort:g} --seeds {' '.join(map(str, args.seeds))}"
    text = "\n".join(
        [
            f"# Bounds on the mean step, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{versions(*PACKAGES)}; {platform.machine()}, "
            f"{os.cpu_count()} cores. Made by `python -m benchmarks.mean_bound {words}`.",
            "",
            "Steps are those of the best plan of all seeds. The bound of stages takes all devices "
            "as one pool, that of types (given where it is the highest) counts how many there are "
            "of each type and what averaging rounds leave to later stages, and that of sites asks "
            "what each site can do behind its line "
            "([bounds](../../docs/explanation/bounds.md)).",
            "",
            *rows,
            "",
        ]
    )
    write_text(args.out, text)
    return 0


if __name__ == "__main__":
    run(main)
