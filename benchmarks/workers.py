"""Wall time of the joint search by number of workers.

    python -m benchmarks.workers [--instances aws mixed ...] [--effort 20] [--repeats 3]
        [--measured 1 2] [--out FILE.md]

`--measured` numbers are run in turns, and their plans compared. For 2 to 16 workers the time is
also computed from a run with one: tasks of a batch are given to the first free worker in their
order, batches follow each other, and all else takes as long as with one. That leaves out messages
between processes and what cores take from each other.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import planner as pl
from benchmarks.command_line import report_path, run, versions
from planner.bench.plan_instances import INSTANCES
from planner.search.worker_pool import WorkerPool

COMPUTED = (2, 4, 8, 16)
PACKAGES = ("planner", "numpy", "numba", "scipy")


def planned(name: str, effort: float, workers: int) -> tuple[float, str]:
    """Return wall seconds and the hash of the plan."""
    cluster, workload = INSTANCES[name].cluster(), INSTANCES[name].model()
    began = time.perf_counter()
    result = pl.plan(cluster, workload, stop=pl.Effort(effort), executor=workers)
    assert result.plan is not None
    return time.perf_counter() - began, result.plan.content_hash


def batches(name: str, effort: float) -> tuple[float, list[list[float]]]:
    """Return wall seconds with one worker, and those of the tasks of every batch."""
    found: list[list[float]] = []
    plain = WorkerPool.map

    def timed(
        pool: WorkerPool, method: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[Any]:
        durations: list[float] = []
        found.append(durations)

        def task(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            durations.append(time.perf_counter() - began)
            return result

        return plain(pool, task, tasks)

    with patch.object(WorkerPool, "map", timed):
        wall_s, _ = planned(name, effort, 1)
    return wall_s, found


def computed_s(wall_s: float, found: Sequence[Sequence[float]], workers: int) -> float:
    """Return seconds with so many workers."""
    seconds = wall_s - sum(map(sum, found))
    for durations in found:
        free_at = [0.0] * workers
        for duration in durations:
            heapq.heappush(free_at, heapq.heappop(free_at) + duration)
        seconds += max(free_at)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--instances", nargs="+", choices=INSTANCES, default=["aws", "mixed", "skyplane"]
    )
    parser.add_argument("--effort", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measured", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=report_path("workers"))
    args = parser.parse_args(argv)
    measured = [f"{count} measured" for count in args.measured]
    columns = ["instance", *measured, *(f"{count} computed" for count in COMPUTED)]
    table = [f"| {' | '.join(columns)} | outside tasks |", "|---" * (len(columns) + 1) + "|"]
    for name in args.instances:
        planned(name, 0.1, 1)  # compiles or loads kernels
        runs: dict[int, list[float]] = {count: [] for count in args.measured}
        hashes = set()
        for _ in range(args.repeats):
            for count, seconds in runs.items():
                wall_s, content_hash = planned(name, args.effort, count)
                seconds.append(wall_s)
                hashes.add(content_hash)
        if len(hashes) > 1:
            raise ValueError(f"{name}: the plan depends on the number of workers: {hashes}")
        wall_s, found = batches(name, args.effort)
        cells = [f"{median(seconds):.1f} s" for seconds in runs.values()]
        cells += [f"{computed_s(wall_s, found, count) / wall_s:.2f}" for count in COMPUTED]
        outside = 1 - sum(map(sum, found)) / wall_s
        table.append(f"| {name} | {' | '.join(cells)} | {outside:.0%} |")
    words = f"--instances {' '.join(args.instances)} --effort {args.effort:g}"
    words += f" --repeats {args.repeats} --measured {' '.join(map(str, args.measured))}"
    text = "\n".join(
        [
            f"# Workers of the joint search, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{versions(*PACKAGES)}; {platform.machine()}, "
            f"{os.cpu_count()} cores; seed 0; medians of {args.repeats}. All numbers of workers "
            "found the same plan.",
            f"Made by `python -m benchmarks.workers {words}`.",
            "",
            "Computed: relative to the wall time of one worker, from the times of its tasks, "
            "without messages between processes.",
            "",
            *table,
            "",
        ]
    )
    print(text)
    args.out.write_text(text)
    return 0


if __name__ == "__main__":
    run(main)
