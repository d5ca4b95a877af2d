"""Benchmark of averaging: the paper's set-ups, and solver times on generated instances.

``python -m benchmarks.averaging`` writes a dated report.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.averaging_promises import Promises, promises
from benchmarks.averaging_rules import (
    adaptive_s,
    all_reduce_s,
    parameter_server_s,
    scalar_bandwidth_s,
)
from benchmarks.command_line import report_path, run
from planner.bench.averaging_baselines import scalar_bandwidth_shares
from planner.bench.averaging_instances import (
    ALBERT_BATCH,
    ALBERT_LARGE_BYTES,
    GBIT,
    RATIOS,
    RESNET50_BYTES,
    UPLOADS_GBIT,
    instance,
    table_1_setups,
)
from planner.bench.environment import describe_environment
from planner.lp.dedloc_lp import solve_relaxed
from planner.lp.groups import group_size_table
from planner.lp.paper_model import build_paper_model
from planner.lp.solve import solve_averaging
from planner.problems import AveragingProblem
from planner.search.stop import MaxRuntime
from planner.utils.argument_parser import OneLineParser

TABLE_1_MEASURED = {
    "A: 8x1Gb/s": (1.19, 4.73, 1.20),
    "B: 16x0.2Gb/s": (5.3, 39.6, 5.3),
    "C: A + B": (5.69, 14.1, 2.96),
    "D: B + 1x2.5Gb/s": (5.3, 3.22, 3.18),
}
"""Seconds measured in the paper: all-reduce, parameter server, ours (Table 1)."""


@dataclass(frozen=True)
class Table1Row:
    """Predicted and measured averaging times of one set-up, in seconds."""

    setup: str
    predicted: tuple[float, float, float]
    measured: tuple[float, float, float]

    @property
    def gain(self) -> tuple[float, float]:
        """Predicted and measured time of all-reduce divided by ours."""
        return self.predicted[0] / self.predicted[2], self.measured[0] / self.measured[2]


def table_1() -> list[Table1Row]:
    """Predict Table 1: all-reduce, parameter server and ours."""
    return [
        Table1Row(
            name,
            (all_reduce_s(problem), parameter_server_s(problem), adaptive_s(problem)),
            TABLE_1_MEASURED[name],
        )
        for name, problem in table_1_setups().items()
    ]


@dataclass(frozen=True)
class AlbertRow:
    """Section 4.2 for one assumed speed of a T4.

    Attributes
    ----------
    samples_per_s
        Assumed samples per second of one T4.
    slowdown
        Steps per second of the high-bandwidth set-up over those of all-reduce on the slow peers.
    balancing, auxiliary
        Relative gain in steps per second over that all-reduce.
    time_varying
        Mean steps per second with the 8 part-time peers, relative to high-bandwidth.
    """

    samples_per_s: float
    overlap: bool
    slowdown: float
    balancing: float
    auxiliary: float
    time_varying: float


def albert_row(samples_per_s: float, overlap: bool) -> AlbertRow:
    """Predict the five set-ups of section 4.2."""

    def setup(gpus: Sequence[float], aggregators: Sequence[float] = ()) -> AveragingProblem:
        speeds = np.array([*gpus, *aggregators]) * GBIT
        samples = [samples_per_s] * len(gpus) + [0.0] * len(aggregators)
        return AveragingProblem(
            samples, speeds, speeds, ALBERT_BATCH, ALBERT_LARGE_BYTES, overlap=overlap
        )

    def even(problem: AveragingProblem) -> float:
        samples = float(problem.samples_per_s.sum())
        return problem.steps_of(samples, problem.gradient_bytes / all_reduce_s(problem))

    def ours(problem: AveragingProblem) -> float:
        return solve_averaging(problem, stop=MaxRuntime(20)).objective or 0.0

    slow = [0.2] * 4 + [0.1] * 8 + [0.05] * 4
    high, naive = even(setup([25.0] * 16)), even(setup(slow))
    balanced, helped = ours(setup(slow)), ours(setup(slow, [1.0] * 4))
    extra = ours(setup([*slow, *[0.1] * 8], [1.0] * 4))
    return AlbertRow(
        samples_per_s,
        overlap,
        high / naive,
        balanced / naive - 1,
        helped / naive - 1,
        (helped + extra) / 2 / high,
    )


@dataclass(frozen=True)
class Timing:
    """One row of the timing table; seconds include building the model.

    Attributes
    ----------
    what
        Name of the row.
    median_s, worst_s
        Median and longest solve, in seconds.
    """

    what: str
    peers: int
    ratio: float
    median_s: float
    worst_s: float
    worst_gap: float | None


def timed(
    what: str,
    peers: int,
    ratio: float,
    seeds: Sequence[int],
    solve: Callable[[AveragingProblem], float | None],
    *,
    links: bool = True,
    link_factor: float = 1.0,
) -> Timing:
    """Solve instances one by one; ``solve`` returns its gap, if it has one."""
    seconds, gaps = [], []
    for seed in seeds:
        problem = instance(peers, seed, ratio, links, link_factor)
        started = time.perf_counter()
        gap = solve(problem)
        seconds.append(time.perf_counter() - started)
        if gap is not None:
            gaps.append(gap)
    return Timing(
        what, peers, ratio, float(np.median(seconds)), max(seconds), max(gaps, default=None)
    )


def timings(seeds: Sequence[int], quick: bool = False) -> Iterator[Timing]:
    """Measure the timing table."""

    def exact(limit_s: float) -> Callable[[AveragingProblem], float | None]:
        return lambda problem: solve_averaging(problem, stop=MaxRuntime(limit_s)).gap

    def relaxed(problem: AveragingProblem) -> None:
        solve_relaxed(problem)

    def scalar(problem: AveragingProblem) -> None:
        scalar_bandwidth_shares(problem)

    def paper_model(solver: str) -> Callable[[AveragingProblem], float | None]:
        def solve(problem: AveragingProblem) -> None:
            build_paper_model(problem).solve(solver)

        return solve

    # the first calls import SciPy, HiGHS and PuLP
    for warm in (exact(10.0), relaxed, scalar, paper_model("highs"), paper_model("cbc")):
        warm(instance(8, 0, 1.0))
    ratios = (0.8,) if quick else RATIOS
    sizes = (24,) if quick else (24, 100)
    for ratio in ratios:
        for peers in sizes:
            yield timed("LP (5), reduced", peers, ratio, seeds, relaxed)
        for peers, limit in ((24, 10.0),) if quick else ((24, 10.0), (64, 2.0), (300, 10.0)):
            yield timed("exact c", peers, ratio, seeds, exact(limit))
        if not quick:
            yield timed("exact c, no pair limits", 1000, ratio, seeds, exact(10.0), links=False)
    for peers in sizes:
        yield timed("scalar-bandwidth LP", peers, 0.8, seeds, scalar)
    for solver in ("highs", "cbc"):
        yield timed(
            f"LP (5), literal, {solver}", 8 if quick else 24, 0.8, seeds[:2], paper_model(solver)
        )
    if not quick:
        for peers, factor in ((24, 0.05), (64, 0.02)):
            for ratio in (0.8, 1.0):
                yield timed(
                    f"exact c, links x {factor}",
                    peers,
                    ratio,
                    seeds[:3],
                    exact(10.0),
                    link_factor=factor,
                )


def relaxation_gaps(quick: bool = False) -> list[tuple[int, float, Promises]]:
    """Compare promised and attained rates: (peers, ratio, numbers)."""
    sizes = (8,) if quick else (8, 16, 24)
    return [
        (n, ratio, promises(instance(n, 0, ratio), eq2=n <= 8, stop=MaxRuntime(20)))
        for n in sizes
        for ratio in (0.3, 0.8, 1.0)
    ]


def shares_compared(seeds: Sequence[int]) -> list[tuple[str, float, float]]:
    """Return averaging times if all contribute: scalar-bandwidth shares, and ours."""
    rows = [
        (name, scalar_bandwidth_s(problem), adaptive_s(problem))
        for name, problem in table_1_setups().items()
    ]
    for peers, factor in ((24, 1.0), (24, 0.05)):
        for seed in seeds[:3]:
            problem = instance(peers, seed, link_factor=factor)
            name = f"n = {peers}, seed {seed}, links x {factor}"
            rows.append((name, scalar_bandwidth_s(problem), adaptive_s(problem)))
    return rows


def report(seeds: Sequence[int] = (0, 1, 2, 3, 4), quick: bool = False) -> str:
    """Run the benchmark and format it as Markdown."""
    return "\n".join(
        [
            *_heading(seeds),
            *_table_1_lines(),
            *_albert_lines(quick),
            *_timing_lines(seeds, quick),
            *_promise_lines(seeds, quick),
            *_group_lines(),
            "",
        ]
    )


def _heading(seeds: Sequence[int]) -> list[str]:
    return [
        "# Averaging",
        "",
        f"{datetime.date.today().isoformat()}; "
        + describe_environment(f"{os.getloadavg()[0]:.1f}", ("planner", "numpy", "scipy", "pulp")),
        "",
        f"Regenerate with `python -m benchmarks.averaging --seeds {' '.join(map(str, seeds))}`.",
        "",
        "Instances: samples per second uniform in 0..2, a fifth of the peers at 0; uploads from "
        f"{{{', '.join(map(str, UPLOADS_GBIT))}}} Gb/s with 10% jitter; downloads 1 to 4 times "
        "that; pair limits uniform in 0.05..2 Gb/s; 100 MB. `ratio`: everyone's computing time "
        "over the time of the vector through the smallest download, which sets the batch. "
        f"`benchmarks.averaging.instance(peers, seed, ratio)`, seeds {list(seeds)}.",
    ]


def _table_1_lines() -> list[str]:
    lines = [
        "",
        "## Table 1: averaging time of ResNet-50",
        "",
        f"{RESNET50_BYTES / 1e6:.1f} MB (float32), no latency, no compression. Absolute times "
        "depend on what was really sent and on the protocol; ratios do not.",
        "",
        "| set-up | predicted AR / PS / ours, s | measured AR / PS / ours, s | "
        "AR / ours predicted | measured | PS / ours predicted | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table_1():
        p, m = row.predicted, row.measured
        lines.append(
            f"| {row.setup} | {p[0]:.2f} / {p[1]:.2f} / {p[2]:.2f} | {m[0]} / {m[1]} / {m[2]} | "
            f"{row.gain[0]:.2f} | {row.gain[1]:.2f} | {p[1] / p[2]:.2f} | {m[1] / m[2]:.2f} |"
        )
    return lines


def _albert_lines(quick: bool) -> list[str]:
    lines = [
        "",
        "## ALBERT-large, section 4.2",
        "",
        f"{ALBERT_LARGE_BYTES / 1e6:.1f} MB (float32), batch {ALBERT_BATCH:.0f}. The paper gives "
        "no samples per second for a T4; ours is the first column. It says: slow peers without "
        "balancing ~2.5x slower, balancing +47%, with auxiliary peers over +60%, with part-time "
        "peers (half of the time) 74% of the high-bandwidth rate. In the model every peer receives "
        "the whole average, so that the 50 Mb/s peers bound it, balanced or helped: auxiliary "
        "peers add nothing here, and part-time peers add samples only.",
        "",
        "| samples/s per T4 | compute and averaging | slowdown | balancing | auxiliary | "
        "time-varying |",
        "|---|---|---|---|---|---|",
    ]
    speeds = (8.0,) if quick else (4.0, 8.0, 12.0, 16.0, 18.0, 20.0, 24.0, 28.0, 32.0, 48.0)
    for overlap in (True, False):
        for speed in speeds:
            row = albert_row(speed, overlap)
            lines.append(
                f"| {speed:g} | {'overlap' if overlap else 'alternate'} | {row.slowdown:.2f} | "
                f"{row.balancing:+.0%} | {row.auxiliary:+.0%} | {row.time_varying:.0%} |"
            )
    return lines


def _timing_lines(seeds: Sequence[int], quick: bool) -> list[str]:
    lines = [
        "",
        "## Time to solve, building included",
        "",
        "| what | n | ratio | median | worst | worst gap |",
        "|---|---|---|---|---|---|",
    ]
    for row in timings(seeds, quick):
        gap = "" if row.worst_gap is None else f"{row.worst_gap:.1e}"
        lines.append(
            f"| {row.what} | {row.peers} | {row.ratio:g} | {row.median_s * 1e3:.1f} ms | "
            f"{row.worst_s * 1e3:.1f} ms | {gap} |"
        )
    return lines


def _promise_lines(seeds: Sequence[int], quick: bool) -> list[str]:
    lines = [
        "",
        "## What is promised and what is attained",
        "",
        "Steps per second, relative to the best plan with fixed shares. Eq. 2 lets the returned "
        "rates differ between receivers; LP (5) is its relaxation; the last column is what the "
        "paper's rule (drop c != 1, shares by eq. 6) attains.",
        "",
        "| n | ratio | LP (5) | eq. 2 | proven bound | attained by eq. 6 |",
        "|---|---|---|---|---|---|",
    ]
    for n, ratio, numbers in relaxation_gaps(quick):
        best = numbers.attained
        eq2 = "" if numbers.eq2 is None else f"{numbers.eq2 / best:.3f}"
        lines.append(
            f"| {n} | {ratio:g} | {numbers.lp5 / best:.3f} | {eq2} | {numbers.proven / best:.6f} | "
            f"{numbers.rule / best:.3f} |"
        )
    lines += [
        "",
        "Averaging time with everyone contributing, shares from one bandwidth per peer (as "
        "hivemind) and ours:",
        "",
        "| instance | scalar bandwidth, s | ours, s |",
        "|---|---|---|",
    ]
    for name, scalar, ours in shares_compared(seeds):
        lines.append(f"| {name} | {scalar:.2f} | {ours:.2f} |")
    return lines


def _group_lines() -> list[str]:
    peers = (8, 16, 32, 64, 128, 256, 512, 1024)
    chances = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
    lines = ["", "## Optimal group size, as Figure 8"]
    for wait, title in (
        (True, "A round ends when its slowest group has succeeded:"),
        (False, "Each group restarts and continues alone:"),
    ):
        table: NDArray[np.int64] = group_size_table(peers, chances, wait)
        lines += [
            "",
            title,
            "",
            "| n \\ p | " + " | ".join(map(str, chances)) + " |",
            "|---" * (len(chances) + 1) + "|",
        ]
        lines += [
            f"| {n} | " + " | ".join(map(str, row)) + " |"
            for n, row in zip(peers, table, strict=True)
        ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report."""
    parser = OneLineParser(prog="python -m benchmarks.averaging", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--quick", action="store_true", help="small instances only, seconds of work"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/averaging-DATE.md")
    options = parser.parse_args(arguments)
    out = options.out or report_path("averaging")
    text = report(options.seeds, options.quick)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    run(main)
