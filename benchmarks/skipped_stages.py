"""Training quality with skipped stages (SkipPipe, 4.2 and 4.3).

A small LLaMA of 12 layers is trained with one device per stage: with all stages, three of four, and
four of six, and a full iteration every tenth. Each model is then evaluated on held-out text with
none, a quarter, a third and half of its stages dropped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.command_line import run
from benchmarks.small_llama import (
    SEED,
    arguments,
    means,
    rows_of,
    said_of,
    said_of_texts,
    small_llama,
    train,
)
from planner.bench.environment import describe_environment
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.solve import plan
from planner.search.stop import MaxIterations
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import write_picture, write_text

STEPS, EVERY, LAYERS = 1000, 100, 12
RATE = 2e-3
WIDTH = 20
LIBRARIES = ("planner", "numpy", "torch")
TRAINED = {"0%": (4, 4), "25%": (4, 3), "33%": (6, 4)}
"""Number of stages, and how many of them a microbatch visits."""
DROPPED = {**TRAINED, "50%": (6, 3)}
PAPER = {
    "Wikipedia": {
        "0%": ("18.8", "18.7", "19.1"),
        "25%": ("75.4", "19.1", "-"),
        "33%": ("115", "-", "22.6"),
        "50%": ("457.6", "36.1", "28.7"),
    },
    "Gutenberg": {
        "0%": ("26.8", "27", "27.6"),
        "25%": ("143.8", "28.3", "-"),
        "33%": ("214.3", "-", "35.3"),
        "50%": ("488.1", "53.7", "45.9"),
    },
}
"""Table 1 of SkipPipe: by dropped fraction, for models trained with 0, 25 and 33% skipped."""


@dataclass(frozen=True)
class Row:
    """Result of one model.

    Attributes
    ----------
    key
        Fraction of stages skipped in training.
    curve
        Perplexity per byte with all stages, by number of steps.
    dropped
        Final perplexity by dropped fraction.
    sent_bytes
        Total bytes sent by all devices, without evaluations.
    """

    key: str
    curve: dict[str, float]
    dropped: dict[str, float]
    losses: list[float] = field(repr=False)
    sent_bytes: int
    seconds: float


def plan_of(stages: int, visited: int, *, swaps: int | None = None) -> TrainingPlan:
    """Build a plan with one device per stage on equal links."""
    network = Network(np.full((stages, stages), 1e-3), np.full((stages, stages), 1e9))
    each = LAYERS // stages
    made = plan(
        Cluster(network, Devices(1e12, 16e9)),
        small_llama(LAYERS),
        stages=stages,
        path_stages=None if visited == stages else visited,
        max_swaps=None if visited == stages else swaps,
        stage_layers=[(each * s, each * (s + 1)) for s in range(stages)],
        head="first",
        stop=MaxIterations(1),
        seed=SEED,
    ).plan
    assert made is not None
    return made


def row_of(key: str, folder: Path, steps: int) -> Row:
    """Train a model, then evaluate it with dropped stages."""
    checkpoint = folder / f"kept-{key.rstrip('%')}"
    extra = ("--checkpoint", str(checkpoint), "--every", str(steps))
    made = train(plan_of(*TRAINED[key]), folder, steps, EVERY, RATE, *extra)
    curve = {str(e["steps"]): e["perplexity"] for e in made.evaluated if e["paths"] == "all stages"}
    dropped = {"0%": curve[str(steps)]}
    for what, (stages, visited) in DROPPED.items():
        if visited < stages:
            alone = train(
                *(plan_of(stages, visited, swaps=0), folder, steps, EVERY, RATE),
                *("--resume", str(checkpoint)),
            )
            (few,) = (e for e in alone.evaluated if e["paths"] != "all stages")
            dropped[what] = few["perplexity"]
    return Row(key, curve, dropped, made.losses, made.sent_bytes, made.seconds)


def report(rows: Sequence[Row], sizes: tuple[int, int], picture: str, load_before: str) -> str:
    """Format the dated report as Markdown."""
    today = datetime.now(UTC).date().isoformat()
    steps = list(rows[0].curve)
    lines = [
        f"# Stages skipped in training, and dropped afterwards, {today}",
        "",
        f"{describe_environment(load_before, LIBRARIES)} "
        f"Regenerate with `python -m benchmarks.skipped_stages`.",
        "",
        f"{said_of(small_llama(LAYERS))}; a device a stage: four stages, or six where a third is "
        "skipped. Paths are planned (one swap, never without the first stage), a full iteration "
        f"every tenth. {said_of_texts(sizes)} Learning rate {RATE:g}.",
        "",
        "## All stages, after so many steps",
        "",
        "Held-out perplexity of a byte. Sent is what all devices sent in training, without "
        "evaluations.",
        "",
        f"| skipped in training | {' | '.join(steps)} | to none | MB sent |",
        f"|---|{'---|' * (len(steps) + 2)}",
    ]
    last = rows[0].curve[steps[-1]]
    for row in rows:
        cells = [f"{row.curve[step]:.3f}" for step in steps]
        cells += [f"{row.curve[steps[-1]] / last - 1:+.1%}", f"{row.sent_bytes / 1e6:.0f}"]
        lines.append(f"| {row.key} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Stages dropped when all is learnt",
        "",
        "Perplexity, and how far it is above that of the same model with all stages. Which stage "
        "is dropped depends on the microbatch, as evenly as can be and never the first, in order "
        "and without swaps: one of four, two and three of six. The paper drops at random; its "
        "models are LLaMAs of 500M.",
        "",
        f"| dropped | {' | '.join(f'skipped {row.key} in training' for row in rows)} |",
        f"|---|{'---|' * len(rows)}",
    ]
    for what in DROPPED:
        cells = [_above(row.dropped, what) for row in rows]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    for text, table in PAPER.items():
        lines += [f"| paper, {text}: {w} | {' | '.join(v)} |" for w, v in table.items()]
    lines += ["", f"![perplexity by step, and with stages dropped]({picture})"]
    return "\n".join(lines) + "\n"


def _above(dropped: Mapping[str, float], what: str) -> str:
    return f"{dropped[what]:.3f} ({dropped[what] / dropped['0%'] - 1:+.1%})"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw training loss and held-out perplexity by step, and the effect of dropping."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for k, row in enumerate(rows):
        curve = means(row.losses, WIDTH)
        left.plot([WIDTH * (t + 1) for t in range(len(curve))], curve, label=row.key)
        middle.plot([int(t) for t in row.curve], list(row.curve.values()), "o-", ms=3)
        places = [d + 0.25 * (k - 1) for d in range(len(DROPPED))]
        right.bar(places, [row.dropped[what] for what in DROPPED], 0.25)
    left.set(xlabel="step", ylabel="training loss, nats a byte", ylim=(None, 3.5))
    left.legend(title="skipped in training")
    middle.set(xlabel="step", ylabel="held-out perplexity, all stages", yscale="log")
    middle.yaxis.set_major_formatter("{x:g}")
    middle.yaxis.set_minor_formatter("{x:g}")
    right.set(xlabel="stages dropped", ylabel="held-out perplexity")
    right.set_xticks(range(len(DROPPED)), list(DROPPED))
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    write_picture(path, figure, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str]) -> int:
    """Train and write the report; return the exit code."""
    args = arguments(argv, "skipping", __doc__, STEPS, EVERY)
    load_before = f"{os.getloadavg()[0]:.1f}"
    rows, sizes = rows_of(
        args,
        TRAINED,
        Row,
        lambda key, folder: row_of(key, folder, args.steps),
        lambda row: f"{row.key}: perplexity {row.dropped} ({row.seconds:.0f} s)",
    )
    picture = args.out.with_suffix(".png")
    draw(rows, picture)
    write_text(args.out, report(rows, sizes, picture.name, load_before))
    return 0


if __name__ == "__main__":
    run(main)
