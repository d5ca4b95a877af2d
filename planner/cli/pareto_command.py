"""``planner pareto``: plans on the Pareto front of step time and cost."""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

from planner.cli.arguments import (
    Reporting,
    add_cluster,
    add_prices,
    add_solver,
    add_workers,
    add_workload,
    prices_of,
    problem_of,
    sizes,
    stop_of,
)
from planner.cli.output import BAD_INPUT, save, show
from planner.planning.pareto_front import HOUR_VALUES, NO_INNER_AVERAGING, Front, FrontPoint, pareto
from planner.planning.request import InnerAveraging
from planner.problems.assignment_method import AssignmentMethod
from planner.search.stop import MaxRuntime
from planner.training_plan.choices import Codec
from planner.utils.atomic_write import MADE, write_picture, write_text
from planner.utils.csv_table import read_csv
from planner.utils.output_files import Output, add_force, require_outputs
from planner.utils.text import dollars
from planner.workload.boundary_codec import BoundaryCodec

ABOUT = "search for the Pareto front of step time and cost; write plans, table and chart"
EXAMPLE = (
    "planner pareto --network aws8_dtfm_worldwide_2022 --workload gpt3-1.3b "
    "--sync-every 1,50 --out front"
)

TABLE, PICTURE = "front.csv", "front.png"
FIRST = ("plan", "step_s", "step_usd")
"""First columns of the table, which identify a file as written by this command."""
PLAN = re.compile(r"plan-\d+\.json")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add cluster, workload, prices, the values to search over, and outputs."""
    add_cluster(sub)
    add_workload(sub)
    add_prices(sub)
    sub.add_argument(
        "--sync-every",
        type=sizes,
        default=[1],
        help="averaging intervals to search over, in steps, such as 1,10,50; default 1",
    )
    sub.add_argument(
        "--codecs",
        type=_text_list,
        default=[Codec.NONE.value],
        help="gradient codecs to search over, from "
        f"{','.join(codec.value for codec in Codec)}; default none",
    )
    sub.add_argument(
        "--boundary-codecs",
        type=_text_list,
        default=[BoundaryCodec.NONE.value],
        help="activation codecs to search over, from "
        f"{','.join(codec.value for codec in BoundaryCodec)}; default none",
    )
    sub.add_argument(
        "--within",
        type=_text_list,
        default=[NO_INNER_AVERAGING],
        help="groups that average gradients in every step if the interval is above 1, from "
        f"{','.join((NO_INNER_AVERAGING, *InnerAveraging))}; default none",
    )
    sub.add_argument(
        "--worth",
        type=_numbers,
        default=list(HOUR_VALUES),
        help="values of an hour's wait, in the price of an hour of all devices; inf minimises time "
        "alone; default " + ",".join(f"{value:g}" for value in HOUR_VALUES),
    )
    sub.add_argument("--out", type=Path, default=Path("front"), help="output folder; default front")
    add_solver(sub, list(AssignmentMethod))
    add_workers(sub)
    add_force(sub)


def _text_list(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[float]:
    try:
        values = [float(number) for number in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(value >= 0 for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers >= 0 such as inf,1,0, found {text!r}")
    return values


def run(args: argparse.Namespace) -> int:
    """Search for the front and write its plans, table and chart."""
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out}: is a file; name a folder")
    searches = len(args.sync_every) * len(args.codecs) * len(args.boundary_codecs)
    searches *= len(args.within) * len(dict.fromkeys(args.worth))
    stop_of(args)  # validate the limits first
    seconds = None if args.seconds is None else args.seconds / max(searches, 1)
    cluster, workload = problem_of(args)
    stop = stop_of(args) if seconds is None else Reporting(MaxRuntime(seconds))
    args.out.mkdir(parents=True, exist_ok=True)
    require_outputs(vars(args), _outputs(args.out))
    front = pareto(
        cluster,
        workload,
        sync_every=args.sync_every,
        codecs=args.codecs,
        boundary_codecs=args.boundary_codecs,
        within=args.within,
        worth=args.worth,
        stop=stop,
        seed=args.seed,
        executor=args.workers,
        prices=prices_of(args),
        network_name=args.network,
        told=lambda front: _keep(args.out, front),
    )
    written = save(args.out / TABLE, lambda path: _write(path.parent, front.points)).parent
    rows = _rows(front.points)
    plans = sum(point.on_front for point in front.points)
    show(
        args.json,
        rows,
        [
            *_lines(rows),
            *(f"not {settings}: {why}" for settings, why in front.refused),
            f"wrote {written}/: {TABLE}, {PICTURE}, {plans} plans",
        ],
    )
    return 0 if written == args.out else BAD_INPUT


def _outputs(folder: Path) -> list[Output]:
    """Return the files to write; plan files that an earlier table does not list are protected."""
    listed = _plans_of(folder)
    unlisted = [path for path in folder.glob("plan-*.json") if path.name not in listed]
    numbered = [path for path in unlisted if path.stem.removeprefix("plan-").isdecimal()]
    return [
        Output("--out", folder / TABLE, [".csv"], ",".join(FIRST)),
        Output("--out", folder / PICTURE, [".png"], MADE),
        *(Output("--out", path, [".json"]) for path in numbered),
    ]


def _plans_of(folder: Path) -> set[str]:
    """Return the plan files listed in a folder's table."""
    if not (folder / TABLE).exists():
        return set()
    rows = read_csv(folder / TABLE).rows
    return {name for row in rows if PLAN.fullmatch(name := row.cells.get("plan", ""))}


def _keep(folder: Path, front: Front) -> None:
    """Write the front found so far; a full disk does not end the search."""
    with suppress(OSError):
        _write(folder, front.points)


def _write(folder: Path, points: Sequence[FrontPoint]) -> None:
    """Write plans, table and chart, then delete plans of an earlier front."""
    from planner.training_plan.file import save_plan

    previous, rows = _plans_of(folder), _rows(points)
    for row, point in zip(rows, points, strict=True):
        if row["plan"]:
            save_plan(point.plan, folder / row["plan"])
    write_text(folder / TABLE, _table(rows))
    for name in previous - {row["plan"] for row in rows}:
        (folder / name).unlink(missing_ok=True)
    _draw(points, folder / PICTURE)


def _rows(points: Sequence[FrontPoint]) -> list[dict[str, Any]]:
    """Return the table's rows; plans on the front have a file name."""
    number = count(1)
    return [_row(point, f"plan-{next(number)}.json" if point.on_front else "") for point in points]


def _row(point: FrontPoint, file: str) -> dict[str, Any]:
    plan, request = point.plan, point.request
    assert plan.cost is not None
    return {
        "plan": file,
        "step_s": point.step_s,
        "step_usd": point.step_usd,
        "devices_usd": plan.cost.devices_usd,
        "messages_usd": plan.cost.messages_usd,
        "usd_per_billion_tokens": plan.cost.usd_per_billion_tokens,
        "devices": len(plan.cluster),
        "stages": len(plan.stage_layers),
        "sync_every": plan.sync.every_steps,
        "codec": str(plan.codec),
        "boundary_codec": str(plan.workload.boundary_codec),
        "within": str(request.within or NO_INNER_AVERAGING),
        "hour_usd": request.hour_usd if request.objective == "cost" else None,
        "objective": str(request.objective),
        "value": point.result.objective,
        "bound": point.result.bound,
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("plan", "plan", lambda name: name or "not on the front"),
    ("step_s", "step, s", lambda x: f"{x:.3f}"),
    ("step_usd", "step, $", dollars),
    ("messages_usd", "messages, $", dollars),
    ("usd_per_billion_tokens", "$ for 10^9 tokens", lambda x: "-" if x is None else dollars(x)),
    ("devices", "devices", str),
    ("stages", "stages", str),
    ("sync_every", "averages every", str),
    ("codec", "gradients", str),
    ("boundary_codec", "boundaries", str),
    ("within", "within", str),
)


def _lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the rows as a table; plans on the front have a file name."""
    cells = [[title for _, title, _ in COLUMNS]]
    cells += [[show_it(row[name]) for name, _, show_it in COLUMNS] for row in rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(COLUMNS))]
    return [
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells
    ]


def _draw(points: Sequence[FrontPoint], path: Path) -> None:
    """Draw step time against cost, with one colour per setting that affects training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    kinds: dict[str, list[FrontPoint]] = {}
    for point in sorted(points, key=attrgetter("training_settings")):
        kinds.setdefault(_kind(point), []).append(point)
    for k, (name, some) in enumerate(kinds.items()):
        some.sort(key=lambda point: point.step_s)
        front = [point for point in some if point.on_front]
        front_s = [point.step_s for point in front]
        front_usd = [point.step_usd for point in front]
        axes.step(front_s, front_usd, where="post", color=f"C{k}", alpha=0.4, zorder=0)
        steps_s, steps_usd = [p.step_s for p in some], [p.step_usd for p in some]
        axes.scatter(steps_s, steps_usd, label=name, color=f"C{k}")
        for point in front:
            where = (point.step_s, point.step_usd)
            text = f"{len(point.plan.cluster)}"
            axes.annotate(text, where, (4, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.set_xlabel("step time, s; labels: number of devices")
    axes.set_ylabel("cost of a step, $")
    axes.set_title(f"{points[0].plan.workload.name} on {points[0].plan.network_name}")
    axes.legend(fontsize=8)
    write_picture(path, figure, dpi=150)


def _kind(point: FrontPoint) -> str:
    plan = point.plan
    traits = [f"every {plan.sync.every_steps} steps" if plan.sync.every_steps > 1 else "every step"]
    if point.request.within is not None:
        traits.append(f"each {point.request.within} every step")
    if plan.codec is not Codec.NONE:
        traits.append(f"{plan.codec} gradients")
    if plan.workload.boundary_codec is not BoundaryCodec.NONE:
        traits.append(f"{plan.workload.boundary_codec} boundaries")
    return "averages " + ", ".join(traits)
