"""Fuzzing: thousands of damaged inputs, each of which must be accepted or refused in one line.

Inputs are mutations of valid ones, drawn from a seed. An error of this project counts as a refusal.
Any other exception, more than `MAX_S` seconds or more than `MAX_BYTES` of memory is a finding,
printed with the number of the input, which ``--only`` repeats.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from pathlib import Path
from types import FrameType

import numpy as np

from benchmarks.command_line import report_path, run
from benchmarks.fuzz.errors import is_ours
from benchmarks.fuzz.targets import TARGETS, Target
from planner.bench.environment import describe_environment
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text

MAX_S = 10
MAX_BYTES = 1 << 30
COUNT = 10_000
SHOWN = 20


class TookTooLongError(Exception):
    """Of one input."""


@dataclass
class Tally:
    """What became of one target's inputs."""

    taken: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    findings: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def line(self, name: str) -> str:
        """A row of the table."""
        found = ", ".join(f"{kind} {n}" for kind, n in self.kinds.most_common()) or "none"
        count = self.taken + self.refused + len(self.findings)
        return (
            f"| {name} | {count} | {self.taken} | {self.refused} | {self.slowest_s:.2f} | {found} |"
        )


def fuzz(target: Target, seed: int, numbers: Sequence[int], most_s: int = MAX_S) -> Tally:
    """Try some inputs of a target."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        attempt = target.prepare(Path(folder))
        with _memory(MAX_BYTES):
            for number in numbers:
                began = time.perf_counter()
                said = _outcome(partial(attempt, np.random.default_rng([seed, number])), most_s)
                tally.slowest_s = max(tally.slowest_s, time.perf_counter() - began)
                if said is None:
                    tally.taken += 1
                elif said == "":
                    tally.refused += 1
                else:
                    tally.findings.append(f"{number}: {said}")
                    tally.kinds[said.split(" ")[0]] += 1
    return tally


def _outcome(attempt: Callable[[], object], most_s: int) -> str | None:
    """None: taken; empty: refused; else what went wrong."""
    out = StringIO()
    try:
        with _alarm(most_s), redirect_stdout(out), redirect_stderr(out):
            attempt()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        return "" if is_ours(error) else _words(error)
    return None


def _words(error: BaseException) -> str:
    trace, place = error.__traceback__, "?"
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if f"{os.sep}planner{os.sep}" in path and f"planner{os.sep}bench" not in path:
            place = f"{Path(path).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {place}: {str(error)[:100]}".replace("\n", " ")


@contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(_: int, __: FrameType | None) -> None:
        raise TookTooLongError(f"over {seconds} s")

    previous_handler = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)


@contextmanager
def _memory(most_bytes: int) -> Iterator[None]:
    """No more than so much beyond what is mapped already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main(argv: Sequence[str]) -> int:
    """Try all; returns 1 if there was a finding."""
    parser = OneLineParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--count", type=int, default=COUNT, help="inputs of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this input alone, with its traceback")
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=report_path("fuzz"))
    args = parser.parse_args(argv)
    if args.only is not None:
        return _again(args.targets, args.seed, args.only)
    load_before = f"{os.getloadavg()[0]:.1f}"
    rows, bad = [], 0
    for name in args.targets:
        tally = fuzz(TARGETS[name], args.seed, range(args.count))
        rows.append(tally.line(name))
        print(rows[-1], flush=True)
        for said in tally.findings[:SHOWN]:
            print(f"    {name} {said}", flush=True)
        bad += len(tally.findings)
    lines = [
        f"# Damaged inputs, {today}",
        "",
        describe_environment(load_before, ("planner", "numpy", "scipy")),
        "",
        f"Regenerate with `python -m benchmarks.fuzz --count {args.count} --seed {args.seed}`. "
        "Taken: "
        "without an error; refused: in one line of this project's; findings: anything else, such "
        f"as another exception, more than {MAX_S} s or {MAX_BYTES / 2**30:g} GiB.",
        "",
        "| target | inputs | taken | refused | slowest, s | findings |",
        f"|{'---|' * 6}",
        *rows,
    ]
    write_text(args.out, "\n".join(lines) + "\n")
    print(f"wrote {args.out}")
    return 1 if bad else 0


def _again(names: Sequence[str], seed: int, number: int) -> int:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            TARGETS[name].prepare(Path(folder))(np.random.default_rng([seed, number]))
        print(f"{name} {number}: taken")
    return 0


if __name__ == "__main__":
    run(main)
