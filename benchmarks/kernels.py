"""Speed of compiled kernels and of the first command, compared with another checkout in one run.

    python -m planner.search.ahead
    python -m benchmarks.kernels [--before CHECKOUT] [--repeats 3] [--out FILE.md]

CPU seconds of whole processes: README's first command with an empty cache of compiled code (cold)
and again (warm), and `planner check` of its plan. Rates are measured inside one process after a
first call: operations of the clock, of a plan with flows and one of straight pipelines; trials of
the layout search with 8 and with 57 places; moves of the path search. Medians of the repeats, which
take turns between the checkouts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
NETWORK = ["--network", "aws8_dtfm_worldwide_2022", "--devices-per-region", "8"]
FIRST = ["plan", *NETWORK, "--workload", "gpt3-1.3b"]
STRAIGHT = [*FIRST, "--stages", "8", "--effort", "1", "--no-pictures", "--no-compare"]
ENTRY = "import sys; from planner.cli.main import main; sys.exit(main(sys.argv[1:]))"
RATES = """
import json, sys, time
import planner as pl
import planner.clock.kernel as kernel
import planner.mapf.search as search
from planner.bench.plans import INSTANCES
from planner.bench.suite import paths
from planner.compose.layout_search import LayoutSearch, Start
from planner.compose.places import Places
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
for name in ("aws", "skyplane"):
    instance = INSTANCES[name]
    places = Places.of(instance.cluster(), None)
    layouts, trials = LayoutSearch(places, instance.model()), 20_000
    state = layouts._start(8, Start.DEALT)
    def run():
        began = time.process_time()
        layouts._round(state, layouts._value(state), trials, 0.2, 0.003, True)
        return trials / (time.process_time() - began)
    run()
    found[f"layouts, {len(places)} places: trials/s"] = run()
moves = counted(search, "anneal", lambda given: given[1].moves)
for name, problem in (("20 devices", paths._reference()), ("100 devices", paths.hundred())):
    solve = lambda: solve_paths(problem, pl.Effort(1), 0)
    found[f"paths, {name}: moves/s"] = rate(moves, solve)
print(json.dumps(found))
"""


def cpu_s(checkout: Path, cache: Path, command: Sequence[str]) -> float:
    """CPU seconds of a command of a checkout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(checkout, cache, [sys.executable, "-c", ENTRY, *command])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _run(checkout: Path, cache: Path, command: Sequence[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        command, env=environment, cwd=cache, capture_output=True, text=True, check=True
    )
    return done.stdout


def measured(checkout: Path, cache: Path, effort: Sequence[str]) -> dict[str, float]:
    """All figures of a checkout, with an empty folder for compiled code."""
    plan, straight = cache / "plan.json", cache / "straight.json"
    command = [*FIRST, *effort, "--out", str(plan)]
    found = {"first command, cold: CPU s": cpu_s(checkout, cache, command)}
    found["first command, warm: CPU s"] = cpu_s(checkout, cache, command)
    cpu_s(checkout, cache, ["check", str(plan)])
    found["check, warm: CPU s"] = cpu_s(checkout, cache, ["check", str(plan)])
    cpu_s(checkout, cache, [*STRAIGHT, "--out", str(straight)])
    rates = [sys.executable, "-c", RATES, str(plan), str(straight)]
    return found | json.loads(_run(checkout, cache, rates))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--effort", help="of the first command here, where its unit has changed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    checkouts = {"before": args.before} if args.before else {}
    checkouts |= {"here": ROOT}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.repeats):
        for name, checkout in checkouts.items():
            effort = ["--effort", args.effort] if args.effort and name == "here" else []
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(measured(checkout.resolve(), Path(folder), effort))
    table = ["| figure | " + " | ".join(checkouts) + " | here / before |", "|---|---|---|---|"]
    for figure in runs["here"][0]:
        values = [median(one[figure] for one in runs[name]) for name in checkouts]
        cells = [f"{value:,.0f}" if value > 100 else f"{value:.2f}" for value in values]
        table.append(f"| {figure} | {' | '.join(cells)} | {values[-1] / values[0]:.2f} |")
    versions = ", ".join(f"{one} {metadata.version(one)}" for one in ("planner", "numpy", "numba"))
    head = [
        f"# Kernels and the first command, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"Python {platform.python_version()}, {versions}; {platform.machine()}, "
        f"{os.cpu_count()} cores; medians of {args.repeats}. Made by `python -m "
        f"benchmarks.kernels --before CHECKOUT{f' --effort {args.effort}' if args.effort else ''}"
        f" --repeats {args.repeats}`.",
        "",
    ]
    text = "\n".join([*head, *table, ""])
    print(text)
    if args.out is not None:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
