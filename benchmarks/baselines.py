"""Plans of random clusters against their baselines: no plan may be slower.

    python -m benchmarks.baselines [--instances 20] [--seed 0] [--effort 5] [--out FILE.md]

Clusters have 2 to 40 devices of 1 to 4 kinds (24 to 640 GB, 20 to 3,200 TFLOP/s attained) in 1 to 5
regions; links of 0.1 to 400 Gb/s and 0.01 to 150 ms; models of 1B to 70B parameters. Each cluster
is planned with every decision open. Baselines are the planner's own (consecutive ranks, one
region), evaluated again with twenty times the effort, and straight pipelines of every number of
stages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import planner as pl
from benchmarks.command_line import run, versions
from planner.bench.job_generator import MODELS
from planner.planning.baselines.plans import Baselines
from planner.planning.problem import PlanningProblem
from planner.workload.layers import Architecture, Family

PACKAGES = ("planner", "numpy", "numba", "ortools")
KINDS = ((24.0, 20.0), (40.0, 120.0), (80.0, 400.0), (140.0, 400.0), (640.0, 3200.0))
"""Memory in GB and attained TFLOP/s."""


def random_instance(rng: np.random.Generator) -> tuple[str, pl.Cluster, pl.Workload]:
    """Draw a cluster and a workload whose state needs about half of all memory."""
    name = str(rng.choice(list(MODELS)))
    layers, hidden, heads, kv_heads, ffn, vocabulary = MODELS[name]
    sequence = int(rng.choice([1024, 2048, 4096]))
    arch = Architecture(Family.LLAMA, layers, hidden, heads, kv_heads, ffn, vocabulary, sequence)
    batch = int(rng.choice([32, 64, 128]))
    workload = pl.Workload.transformer(name, arch, batch_samples=batch)
    state = workload.parameters * 18.0
    while True:
        devices = int(rng.integers(2, 41))
        kinds = rng.choice(len(KINDS), size=int(rng.integers(1, 5)))
        gpus = np.sort(rng.choice(kinds, size=devices))
        memory = np.array([KINDS[k][0] for k in gpus]) * 1e9
        if 1.4 * state <= memory.sum():
            break
    flops = np.array([KINDS[k][1] for k in gpus]) * 1e12
    places = np.sort(rng.integers(0, rng.integers(1, 6), size=devices))
    same = places[:, None] == places
    far_s = 10 ** rng.uniform(-3, np.log10(0.15), (5, 5))
    far_rate = 10 ** rng.uniform(-1, 1.5, (5, 5))
    near_s = 10 ** rng.uniform(-5, -3.3, 5)
    near_rate = 10 ** rng.uniform(0, np.log10(400), 5)
    latency = np.where(same, near_s[places][:, None], far_s[np.ix_(places, places)])
    rate = np.where(same, near_rate[places][:, None], far_rate[np.ix_(places, places)])
    regions = [f"place{k}" for k in places]
    network = pl.Network(latency, rate * 1e9 / 8, regions=regions)
    words_of = f"{name}, {devices} devices in {len(set(places))} places"
    return words_of, pl.Cluster(network, pl.Devices(flops, memory)), workload


def best_straight_s(cluster: pl.Cluster, workload: pl.Workload, effort: float) -> float:
    """Return the step time of the best straight pipelines, with and without recomputation."""
    found = [float("inf")]
    try:
        result = pl.plan(cluster, workload, stages="auto", stop=pl.Effort(effort))
        found.append(result.objective or float("inf"))
    except ValueError:
        pass
    return min(found)


def _or_none(value: float) -> str:
    return f"{value:.3f}" if 0 < value < float("inf") else "none"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan all instances and write a table; return 1 if a plan is slower than a baseline."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    lines = [
        "| instance | plan s | bound s | gap | best baseline s | plan / fastest | straight s |",
        "|---|---|---|---|---|---|---|",
    ]
    slower = 0
    for number in range(args.instances):
        rng = np.random.default_rng((args.seed, number))
        description, cluster, workload = random_instance(rng)
        began = time.perf_counter()
        try:
            result = pl.plan(cluster, workload, stop=pl.Effort(args.effort))
        except ValueError as error:
            lines.append(f"| {number}: {description} | refused: {str(error)[:120]} | | | | | |")
            print(lines[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
            continue
        assert result.plan is not None and result.objective is not None
        problems = pl.check(result.plan, cluster)
        problem = PlanningProblem.of(cluster, workload, None, 0, {})
        with_more_effort = Baselines.of(problem, pl.Effort(20 * args.effort))
        baseline = min(
            (baseline_plan.step_s for baseline_plan in with_more_effort), default=float("inf")
        )
        straight = best_straight_s(cluster, workload, args.effort)
        least = min(baseline, straight)
        slower += result.objective > least * (1 + 1e-9) or bool(problems)
        bound = result.bound or float("nan")
        lines.append(
            f"| {number}: {description} | {result.objective:.3f} | {bound:.3f} | "
            f"{result.objective / bound - 1:.1%} | {_or_none(baseline)} | "
            f"{_or_none(result.objective / least)} | {_or_none(straight)} |"
            + (f" INVALID {problems[0]}" if problems else "")
        )
        print(lines[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    text = "\n".join(
        [
            f"# Plans of random clusters and their baselines, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{versions(*PACKAGES)}. "
            f"Regenerate with `python -m benchmarks.baselines --instances {args.instances} "
            f"--seed {args.seed} --effort {args.effort:g}`. Steps on the clock; baselines "
            "have twenty times the effort of the search.",
            "",
            *lines,
            "",
            f"Slower than a baseline or invalid: {slower} of {args.instances}.",
            "",
        ]
    )
    if args.out is not None:
        args.out.write_text(text)
    print(text.splitlines()[-1])
    return 1 if slower else 0


if __name__ == "__main__":
    run(main)
