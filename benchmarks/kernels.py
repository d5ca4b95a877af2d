"""Speed of compiled kernels and of whole commands, compared with another checkout in one run.

    python -m planner.search.ahead
    python -m benchmarks.kernels [--before CHECKOUT] [--repeats 3] [--out FILE.md]
        [--devices 64 256 1024 4096] [--seeds 0 1 2 3 4]

CPU seconds of whole processes: the README's first command with an empty cache of compiled code
(cold) and again (warm), and `planner check` of its plan. Rates are measured within one process
after a first call: simulator operations for a plan with flows and one of straight pipelines, moves
of the layout search with 8, 57, 128 and 256 device classes, and moves of the path search.
`--devices` measures CPU time and memory of the first command with so many devices; `--seeds`
measures the median step time that five named instances reach. Results are medians of repeats that
alternate between the checkouts, at the default effort of each. The other checkout must have the
modules that the measurements import: 0.2.0 or later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from subprocess import DEVNULL
from typing import NamedTuple

from benchmarks.command_line import run, versions

ROOT = Path(__file__).parents[1]
REGIONS = 8
FIRST = ["plan", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt3-1.3b"]
STRAIGHT = [*FIRST, "--devices-per-region", "8", "--stages", "8", "--effort", "1", "--no-pictures"]
ENTRY = "import sys; from planner.cli.main import main; sys.exit(main(sys.argv[1:]))"
RATES = """
import json, sys, time
import numpy as np
import planner as pl
import planner.simulator.compiled_event_loop as kernel
import planner.mapf.search as search
from planner.bench.plan_instances import INSTANCES
from planner.bench import paths
from planner.planning.joint.layout_search import InitialLayout, LayoutSearch
from planner.planning.joint.device_classes import DeviceClasses
from planner.training_plan.choices import Head
from planner.mapf.solve import solve_paths

def counted(module, name, count):
    plain, seen = getattr(module, name), [0.0, 0.0]
    def call(*arguments):
        began = time.process_time()
        result = plain(*arguments)
        seen[0] += count(arguments)
        seen[1] += time.process_time() - began
        return result
    setattr(module, name, call)
    return seen

def rate(seen, run):
    run()
    seen[:] = 0.0, 0.0
    run()
    return seen[0] / seen[1]

found = {}
operations = counted(kernel, "run", lambda given: len(given[1].device) * len(given[3].steps))
for name, path in (("flow", sys.argv[1]), ("straight", sys.argv[2])):
    plan = pl.load_plan(path)
    key = f"clock, {name}: operations/s"
    found[key] = rate(operations, lambda: [pl.simulate(plan) for _ in range(5)])
def unlike(count):
    rng = np.random.default_rng(count)
    latency_s = rng.uniform(0.005, 0.25, (count, count))
    bandwidth = rng.uniform(3e7, 3e8, (count, count))
    devices = pl.Devices(rng.uniform(2e13, 1e14, count), rng.uniform(16e9, 80e9, count))
    return pl.Cluster(pl.Network(latency_s, bandwidth), devices)

model, named = INSTANCES["aws"].model(), (INSTANCES[name] for name in ("aws", "skyplane"))
for cluster in (*(instance.cluster() for instance in named), unlike(128), unlike(256)):
    classes = DeviceClasses.of(cluster, None)
    layouts, moves = LayoutSearch(classes, model), 20_000
    # in versions before 2026-11-30 a method of the search
    make = layouts.initial.make if hasattr(layouts, "initial") else layouts._initial_state
    state = make((8, Head.LAST), InitialLayout.SPREAD)
    def run():
        began = time.process_time()
        layouts._anneal_chunk(state, layouts._reset_best(state), moves, 0.2, 0.003, True)
        return moves / (time.process_time() - began)
    run()
    found[f"layouts, {len(classes)} classes: moves/s"] = run()
moves = counted(search, "anneal", lambda given: given[1][0])
for name, problem in (("20 devices", paths._reference()), ("100 devices", paths.hundred())):
    solve = lambda: solve_paths(problem, pl.Effort(1), 0)
    found[f"paths, {name}: moves/s"] = rate(moves, solve)
print(json.dumps(found))
"""


STEPS = """
import json, sys
from statistics import median
import planner as pl
from planner.bench.plan_instances import INSTANCES
from planner.cli.arguments import EFFORT

found, effort = {}, pl.Effort(EFFORT)
for name in ("aws", "gcp-t4", "gcp-v100", "mixed", "skyplane"):
    cluster, model = INSTANCES[name].cluster(), INSTANCES[name].model()
    plans = [pl.plan(cluster, model, stop=effort, seed=int(seed)) for seed in sys.argv[1:]]
    found[f"{name}: step s"] = median(plan.objective for plan in plans)
print(json.dumps(found))
"""
GIB = 2**20
"""KiB per GiB; Linux reports the peak memory of a process in KiB."""


class Used(NamedTuple):
    """CPU seconds, peak memory in GiB and output of a process."""

    cpu_s: float
    memory_gib: float
    printed: str


def used(checkout: Path, cache: Path, command: Sequence[str]) -> Used:
    """Run Python with a checkout's package."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": str(cache)}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=cache, stdout=out, stderr=DEVNULL
        )
        _, status, resources = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{checkout}: {' '.join(command)[-200:]}")
        out.seek(0)
        cpu_s = resources.ru_utime + resources.ru_stime
        return Used(cpu_s, resources.ru_maxrss / GIB, out.read())


def measured(
    checkout: Path, cache: Path, devices: Sequence[int], seeds: Sequence[str]
) -> dict[str, float]:
    """Measure a checkout with an empty cache of compiled code."""
    plan, straight = cache / "plan.json", cache / "straight.json"

    def planner(*words: str) -> Used:
        return used(checkout, cache, ["-c", ENTRY, *words])

    def code(text: str, *words: str) -> dict[str, float]:
        return dict(json.loads(used(checkout, cache, ["-c", text, *words]).printed))

    command = [*FIRST, "--out", str(plan), "--devices-per-region"]
    found = {"first command, cold: CPU s": planner(*command, "8").cpu_s}
    found["first command, warm: CPU s"] = planner(*command, "8").cpu_s
    planner("check", str(plan))
    found["check, warm: CPU s"] = planner("check", str(plan)).cpu_s
    planner(*STRAIGHT, "--out", str(straight))
    found |= code(RATES, str(plan), str(straight))
    for count in devices:
        process = planner(*command, str(count // REGIONS))
        found[f"{count} devices: CPU s"] = process.cpu_s
        found[f"{count} devices: GiB"] = process.memory_gib
    return found | (code(STEPS, *seeds) if seeds else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[], help="multiples of 8")
    parser.add_argument("--seeds", nargs="+", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    checkouts = {"before": args.before} if args.before else {}
    checkouts |= {"here": ROOT}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.repeats):
        for name, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as folder:
                where = (checkout.resolve(), Path(folder))
                runs[name].append(measured(*where, args.devices, args.seeds))
    table = ["| figure | " + " | ".join(checkouts) + " | here / before |", "|---|---|---|---|"]
    for figure in runs["here"][0]:
        values = [median(one[figure] for one in runs[name]) for name in checkouts]
        cells = [f"{value:,.0f}" if value > 100 else f"{value:.2f}" for value in values]
        table.append(f"| {figure} | {' | '.join(cells)} | {values[-1] / values[0]:.2f} |")
    head = [
        f"# Kernels and the first command, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"{versions('planner', 'numpy', 'numba')}; {platform.machine()}, "
        f"{os.cpu_count()} cores; medians of {args.repeats}. Made by `python -m "
        f"benchmarks.kernels {' '.join(_words(args))}`.",
        "",
    ]
    text = "\n".join([*head, *table, ""])
    print(text)
    if args.out is not None:
        args.out.write_text(text)
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """Return the options that repeat this run."""
    words = ["--before", "CHECKOUT"] if args.before else []
    words += ["--repeats", str(args.repeats)]
    for name in ("devices", "seeds"):
        if getattr(args, name):
            words += [f"--{name}", *map(str, getattr(args, name))]
    return words


if __name__ == "__main__":
    run(main)
