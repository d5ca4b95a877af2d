"""``python -m benchmarks.fidelity``: predicted against executed steps on emulated networks.

Needs Linux and root (see ``planner emulate``). Plans of every kind run on seven measured networks,
some with modified bandwidths or limits so that bandwidth, latency, averaging or device limits
dominate; with ``--random``, on random networks. Compute times are imposed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from scipy.stats import spearmanr

from benchmarks.command_line import report_path, run
from benchmarks.fidelity.cases import CASES, SEARCH, SEED, SETTINGS, Case
from benchmarks.fidelity.random_cases import RandomCase
from planner.bench.environment import describe_environment
from planner.emulate.emulation import Emulation, EmulationSettings, emulate, resolve_settings
from planner.training_plan.file import save_plan
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text

PARTS = ("pipeline", "averaging", "step")


@dataclass(frozen=True)
class Row:
    """One plan's result; parts in seconds as ``(predicted, executed)``."""

    key: str
    pipeline: tuple[float, float | None]
    averaging: tuple[float, float | None]
    step: tuple[float, float | None]
    speed: float
    shrink: float
    busy: float
    worst: str

    def ratio(self, part: str) -> float | None:
        """Executed over predicted; None where a plan has no such part."""
        predicted, executed = getattr(self, part)
        return None if executed is None or predicted <= 0 else executed / predicted


def measure(case: Case | RandomCase, settings: EmulationSettings) -> Row:
    """Make a plan and run it."""
    made = case.plan()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(made, path)
        done = emulate(path, made, resolve_settings(made, settings))
    for warning in done.warnings():
        print(f"{case.key}: {warning}", file=sys.stderr)
    c = done.comparison
    parts = {
        part: (pair.predicted_s, pair.executed_s) for part in PARTS if (pair := getattr(c, part))
    }
    return Row(
        case.key,
        **parts,
        speed=done.settings.speed,
        shrink=done.settings.shrink,
        busy=done.busy,
        worst=_worst(done),
    )


def _worst(done: Emulation) -> str:
    """The operation that ended latest against its prediction."""
    if not done.comparison.operations:
        return "-"  # devices choose other paths than those that were predicted
    op = done.comparison.operations[0]
    what = op.kind if op.microbatch < 0 else f"{op.kind}{op.microbatch}"
    return f"{what} on {op.device} {op.late_s:+.3f} s"


FIXED = (
    f"Regenerate with `python -m benchmarks.fidelity`, as root. Plans have seed {SEED} and "
    f"{SEARCH} iterations of search;"
)
RANDOM = (
    "Regenerate with `python -m benchmarks.fidelity --random {count} --seed {seed}`, as root. "
    "Networks, "
    f"limits, models and plans are drawn by the seeds that stand in the table, {SEARCH} iterations "
    "of search; devices that choose paths keep to the plan's parts (smoothing 0);"
)


@dataclass(frozen=True)
class About:
    """What a report says of its plans: a title, how to run them again, and the networks."""

    title: str
    rerun_command: str
    networks: Sequence[str] = ()


def report(rows: Sequence[Row], settings: EmulationSettings, load_before: str, about: About) -> str:
    """The dated report as Markdown."""
    today = datetime.now(UTC).date().isoformat()
    lines = [
        f"# {about.title}, {today}",
        "",
        describe_environment(load_before, ("planner", "numpy", "numba", "torch")),
        "",
        f"{about.rerun_command} imposed compute times; medians of {settings.rest} steps from rest "
        f"(pipeline, averaging), and the mean of {settings.steps} steps that chain (step). Every "
        "pair of devices has its rate, delay and queue, every device its stated limits or else its "
        "fastest pair.",
        "",
        *(f"- {line}" for line in about.networks),
        *[""] * bool(about.networks),
        f"| network | plan | {' | '.join(f'{part} s | executed | ratio' for part in PARTS)} | "
        "shrink | busy | latest operation |",
        f"|{'---|' * 14}",
    ]
    lines += [_row(row) for row in rows]
    return "\n".join([*lines, "", *summary(rows)]) + "\n"


def _row(row: Row) -> str:
    cells = row.key.split("/", 1)
    for part in PARTS:
        predicted, executed = getattr(row, part)
        ratio = row.ratio(part)
        cells += (
            ["-", "-", "-"]
            if ratio is None
            else [f"{predicted:.3f}", f"{executed:.3f}", f"{ratio:.3f}"]
        )
    cells += [f"{row.shrink:g}", f"{row.busy:.0%}", row.worst]
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> list[str]:
    """Order and worst deviations in a few lines."""
    lines = []
    if len(rows) > 2:
        order = spearmanr([row.step[0] for row in rows], [row.step[1] for row in rows]).statistic
        lines.append(f"Spearman of steps: {order:.3f}.")
    for part in PARTS:
        found = [(ratio, row) for row in rows if (ratio := row.ratio(part)) is not None]
        if found:
            ratio, row = max(found, key=lambda f: abs(f[0] - 1))
            middle = statistics.median(abs(r - 1) for r, _ in found)
            lines.append(
                f"{part.capitalize()}: off by at most {abs(ratio - 1):.1%} ({row.key}, "
                f"{ratio:.3f}), by {middle:.1%} in the median."
            )
    return lines


def main(argv: Sequence[str]) -> int:
    """Run the plans and write the report; returns the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/fidelity-[random-]DATE.md"
    )
    parser.add_argument("--results", type=Path, help="keep results here (JSON lines) and continue")
    parser.add_argument("--plans", nargs="*", help="those whose name begins so")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rest", type=int, default=5)
    parser.add_argument("--random", type=int, help="run so many drawn networks and plans instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first of these")
    args = parser.parse_args(argv)
    if args.random is not None and args.plans is not None:
        parser.error("--plans names fixed plans, --random draws others; leave one out")
    settings = EmulationSettings(args.speed, None, args.steps, args.rest)
    load_before = f"{os.getloadavg()[0]:.1f}"
    saved_rows = _kept(args.results)
    rows = []
    wanted = tuple([""] if args.plans is None else args.plans)
    cases: Iterable[Case | RandomCase] = (c for c in CASES if c.key.startswith(wanted))
    networks = [f"{name}: {setting.about}" for name, setting in SETTINGS.items()]
    about, name = About("Predicted against executed", FIXED, networks), "fidelity"
    if args.random is not None:
        cases = (RandomCase(args.seed + k) for k in range(args.random))
        rerun_command = RANDOM.format(count=args.random, seed=args.seed)
        about, name = (
            About("Predicted against executed, drawn plans", rerun_command),
            f"{name}-random",
        )
    for case in cases:
        row = next((row for key, row in saved_rows.items() if case.is_of(key)), None)
        if row is None:
            begin = time.monotonic()
            row = measure(case, settings)
            took = f"   ({time.monotonic() - begin:.0f} s)"
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
        else:
            took = "   (kept)"
        print(_row(row) + took, flush=True)
        rows.append(row)
    for line in summary(rows):
        print(line)
    out = args.out or report_path(name)
    write_text(out, report(rows, settings, load_before, about))
    return 0


def _kept(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.key: row for row in found}


if __name__ == "__main__":
    run(main)
