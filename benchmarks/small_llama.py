"""Train a small LLaMA on the bytes of Python's standard library.

Used by ``python -m benchmarks.convergence`` and ``python -m benchmarks.skipped_stages``. Processes
run on this machine; a twentieth of the files is held out. Results do not depend on the load of the
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from benchmarks.command_line import report_path
from planner.executor.launch.local import local_environment, run_local
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.utils.argument_parser import OneLineParser
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Row(DataclassInstance, Protocol):
        """What came of a training: a dataclass of what JSON has."""

        @property
        def key(self) -> str:
            """Of the training."""

        @property
        def losses(self) -> list[float]:
            """Of each step."""


RowT = TypeVar("RowT", bound="Row")
SEED = 0
BATCHES = 64
HELD_OUT = 20
"""One file in this many is held out."""
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3"}
SCHEDULE = ("--warmup", "50", "--schedule", "cosine")
SHUFFLE = 16384
WAIT_S = "180"


@dataclass(frozen=True)
class Trained:
    """Result of a training.

    Attributes
    ----------
    evaluated
        Events with ``steps``, ``paths`` and ``perplexity`` per byte of held-out text.
    sent_bytes
        Total bytes sent by all devices, without evaluations.
    """

    evaluated: list[dict[str, Any]]
    losses: list[float]
    sent_bytes: int
    seconds: float


def small_llama(layers: int) -> Workload:
    """Build a model with batches of 16 samples of 128 bytes in fp32, in microbatches of 4."""
    arch = Architecture(Family.LLAMA, layers, 64, 4, 4, 172, 256, 128, False)
    return Workload.transformer(
        "small LLaMA", arch, batch_samples=16, microbatch_samples=4, precision="fp32"
    )


def said_of(w: Workload) -> str:
    """Describe the workload for a report."""
    arch = w.architecture
    assert arch is not None
    return (
        f"LLaMA of {arch.layers} layers of {arch.hidden}, {arch.sequence} bytes a sample, "
        f"{w.batch_samples} samples a step, in fp32"
    )


def texts(folder: Path) -> tuple[int, int]:
    """Write ``train.txt`` and ``held.txt``; return their sizes in bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(root).parts)
    ]
    parts: dict[str, list[str]] = {"train": [], "held": []}
    for k, path in enumerate(files):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts["held" if k % HELD_OUT == 0 else "train"].append(text)
    sizes = []
    for name, several in parts.items():
        content = "".join(several).encode()
        (folder / f"{name}.txt").write_bytes(content)
        sizes.append(len(content))
    return sizes[0], sizes[1]


def said_of_texts(sizes: tuple[int, int]) -> str:
    """Describe the texts for a report."""
    return (
        f"{sizes[0] / 1e6:.1f} MB of Python's standard library, {sizes[1] / 1e6:.1f} MB held out; "
        f"`{' '.join(SCHEDULE)}`."
    )


def train(
    plan: TrainingPlan, folder: Path, steps: int, interval: int, rate: float, *extra: str
) -> Trained:
    """Run one training."""
    path = folder / "plan.json"
    save_plan(plan, path)
    ids = plan.cluster.network.ids
    command = [
        *(sys.executable, "-m", "planner.executor", str(path), "--events", "--device", "cpu"),
        *("--devices", *ids, "--steps", str(steps), "--wait", WAIT_S),
        *("--data", str(folder / "train.txt"), "--shuffle", str(SHUFFLE)),
        *("--eval-data", str(folder / "held.txt"), "--eval-batches", str(BATCHES)),
        *("--eval-every", str(interval), *SCHEDULE, "--schedule-steps", str(steps)),
        *("--learning-rate", str(rate), *extra),
    ]
    lines: list[str] = []
    begin = time.monotonic()
    code, reason = run_local(
        command,
        ids,
        local_environment() | {"OMP_NUM_THREADS": "1"},
        lines.append,
        lambda line: print(line, file=sys.stderr),
    )
    if code:
        raise RuntimeError(f"training ended with {code}: {reason}")
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    losses = {
        e["loss_step"] if e["event"] == "step" else e["step"]: e["loss"]
        for e in events
        if "loss" in e and e["event"] in ("step", "loss")
    }
    (devices,) = (e["devices"] for e in events if e["event"] == "devices")
    return Trained(
        [e for e in events if e["event"] == "evaluated"],
        [losses[step] for step in range(steps) if step in losses],
        sum(size for one in devices for size in one["sent_bytes"].values()),
        time.monotonic() - begin,
    )


def means(losses: Sequence[float], width: int) -> list[float]:
    """Average losses over windows of ``width``, for a curve."""
    end = len(losses) // width * width
    return [sum(losses[k : k + width]) / width for k in range(0, end, width)]


def arguments(
    argv: Sequence[str], name: str, about: str | None, steps: int, interval: int
) -> argparse.Namespace:
    """Parse a benchmark's command line."""
    parser = OneLineParser(prog=f"planner bench {name}", description=about)
    parser.add_argument("--out", type=Path, default=report_path(name))
    parser.add_argument("--results", type=Path, help="keep results here (JSON lines) and continue")
    parser.add_argument("--steps", type=int, default=steps, help=f"multiple of {interval}")
    args = parser.parse_args(argv)
    if args.steps < interval or args.steps % interval:
        raise ValueError(f"--steps is {args.steps}; give a multiple of {interval}")
    return args


def rows_of(
    args: argparse.Namespace,
    keys: Iterable[str],
    form: Callable[..., RowT],
    make: Callable[[str, Path], RowT],
    say: Callable[[RowT], str],
) -> tuple[list[RowT], tuple[int, int]]:
    """Run the trainings without stored results, and store theirs.

    Returns
    -------
    tuple[list[RowT], tuple[int, int]]
        Rows in the order of ``keys``; sizes of both texts in bytes.
    """
    saved_rows: dict[str, RowT] = {}
    if args.results is not None and args.results.exists():
        found = (form(**json.loads(line)) for line in args.results.read_text().splitlines())
        saved_rows = {row.key: row for row in found if len(row.losses) == args.steps}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        sizes = texts(Path(name))
        for key in keys:
            row = saved_rows.get(key) or make(key, Path(name))
            if args.results is not None and key not in saved_rows:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
            print(say(row), flush=True)
            rows.append(row)
    return rows, sizes
