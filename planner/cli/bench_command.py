"""``planner bench``: run the open benchmark, write its instances, or record solutions."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.bench.bestknown import FOLDER, load_table, record
from planner.bench.environment import describe_environment
from planner.bench.method import BenchMethod, foreign_method
from planner.bench.page import page
from planner.bench.problem import BenchInstance
from planner.bench.problem_files import instance_data, problem_hash
from planner.bench.progress import BenchProgress
from planner.bench.registry import METHODS, instances_of
from planner.bench.result_rows import BenchRow, append_row, read_rows, rewrite_rows
from planner.bench.runner import Interrupted, run_tasks
from planner.bench.solution_files import find_solution
from planner.bench.solution_store import SolutionStore
from planner.bench.summary import Summary, summarise
from planner.bench.task import Task
from planner.bench.text import markdown, terminal
from planner.cli.output import INTERRUPTED
from planner.utils.atomic_write import write_text
from planner.utils.output_files import Output, add_force, require_outputs, require_writable

ABOUT = "run the open benchmark: all methods on fixed instances"
EXAMPLE = "planner bench --quick"
QUICK_EFFORT, EFFORT = 1.0, 5.0
SEEDS = (0,)
HEAVY = ("plans", "paths", "assignment", "averaging", "rebalancing")
"""Order in which families run: longest tasks first, so that all processes finish together."""
MARKS = (
    "egenerate with `planner bench",
    '"planner.bench_suite"',
    '<meta name="generator" content="planner bench">',
)
"""Texts that identify files written by this command, which it may overwrite."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the choice of instances and methods, limits, and output files."""
    add = sub.add_argument
    add("--list", action="store_true", help="list instances and methods, then exit")
    add(
        "--instances",
        type=Path,
        metavar="FOLDER",
        help="write the instances to this folder as JSON, then exit",
    )
    add("--quick", action="store_true", help="small instances and little effort: about two minutes")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="ID",
        help="instances to run, such as 'paths/*'; default: all",
    )
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="built-in methods to run, such as ours; '' for none; default: all",
    )
    add(
        "--method",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="your own method, called with (problem, seed, effort); may be repeated",
    )
    add(
        "--solutions",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="your own solutions, FOLDER/family/name.json; may be repeated",
    )
    add("--seeds", type=int, nargs="+", metavar="N", help="random seeds; default: 0")
    add(
        "--effort",
        type=float,
        help=f"effort of each run in core-seconds; default {EFFORT:g}, with --quick "
        f"{QUICK_EFFORT:g}",
    )
    add("--seconds", type=float, help="timeout of a run; default: 60 + 60 times the effort")
    add(
        "--jobs",
        type=int,
        default=min(2, os.cpu_count() or 1),
        help="parallel processes; default 2",
    )
    add(
        "--rows",
        type=Path,
        help="JSON lines file for finished rows; default: beside the first output",
    )
    add("--resume", action="store_true", help="skip runs whose rows exist from an earlier call")
    add(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="write the best solution of each instance to this folder",
    )
    add(
        "--best-known",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help="table of best known solutions; default: the bundled one",
    )
    for kind in ("json", "html", "markdown"):
        add(
            f"--{kind}",
            type=Path,
            metavar="FILE",
            help=f"write the results to this {kind.upper() if kind != 'markdown' else 'Markdown'} "
            "file",
        )
    add_force(sub)
    add(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="add solutions FOLDER/family/name.json that are better to the best known ones",
    )
    add(
        "--by",
        metavar="NAME",
        help="with --record: who found the solutions; default: the name in each file",
    )
    add(
        "--bounds",
        action="store_true",
        help="with --record: also record the files' bounds, which are not verified",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, or list, write or record instances."""
    instances = instances_of(args.only, quick=args.quick)
    if args.list:
        _list(instances)
        return 0
    if args.instances is not None:
        return _write_instances(args.instances, instances)
    if args.record is not None:
        return _record(args, instances)
    outputs = [
        Output(f"--{kind}", getattr(args, kind), [suffix], MARKS)
        for kind, suffix in (("json", ".json"), ("html", ".html"), ("markdown", ".md"))
    ]
    require_outputs(vars(args), outputs)
    if args.rows is not None:
        require_writable(args.rows, [".jsonl"])
    tasks = list(_tasks(args, instances))
    if not tasks:
        raise ValueError(
            "no selected method solves the selected instances; choose --methods from --list"
        )
    load_before = f"{os.getloadavg()[0]:.1f}"
    began = time.perf_counter()
    rows, complete, resumed_rows = _run(args, tasks)
    summary = summarise(rows, load_table(args.best_known))
    print(terminal(summary))
    total_s = sum(row.seconds for row in rows)
    _write(
        args,
        summary,
        _describe_run(args, load_before, time.perf_counter() - began, resumed_rows, total_s),
    )
    if not complete:
        print(f"interrupted; --resume continues from {_rows_path(args)}", file=sys.stderr)
    return 0 if complete else INTERRUPTED


def _record(args: argparse.Namespace, instances: Sequence[BenchInstance]) -> int:
    """Update the table of best known solutions; return 1 if a solution was rejected."""
    folder = args.record
    if not folder.is_dir():
        raise ValueError(
            f"--record {folder}: not a folder; give one that contains family/name.json"
        )
    today = datetime.now(UTC).date().isoformat()
    changes = record(folder, instances, args.best_known, by=args.by, date=today, bounds=args.bounds)
    if not changes:
        raise ValueError(
            f"--record {folder}: contains no solution of an instance; name the files "
            "family/name.json"
        )
    for change in changes:
        print(f"{change.what:<10}{change.instance:<34}{change.words}")
    return int(any(change.what == "refused" for change in changes))


def _list(instances: Iterable[BenchInstance]) -> None:
    for instance in instances:
        print(f"{instance.id:<34}{'quick  ' if instance.quick else '':<7}{instance.about}")
    print()
    for method in METHODS:
        family = next(iter(method.families))
        print(f"{family:<14}{method.name:<26}{method.kind:<7}{method.about}")


def _write_instances(folder: Path, instances: Sequence[BenchInstance]) -> int:
    for instance in instances:
        path = folder / f"{instance.id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(instance_data(instance), allow_nan=False) + "\n")
    print(f"{folder}: {len(instances)} instances")
    return 0


def _chosen(options: argparse.Namespace) -> list[BenchMethod]:
    """Return the selected built-in methods, followed by the user's own."""
    selected = options.methods
    method_names = {method.name for method in METHODS}
    for name in selected or ():
        if name and name not in method_names:
            raise ValueError(f"--methods: unknown method {name!r}; --list shows all methods")
    mine = [method for method in METHODS if selected is None or method.name in selected]
    return mine + [foreign_method(reference) for reference in dict.fromkeys(options.method)]


def _tasks(options: argparse.Namespace, instances: Sequence[BenchInstance]) -> Iterable[Task]:
    effort, seeds = _effort(options), options.seeds or SEEDS
    if not 0 < effort < 1e6 or min(seeds) < 0 or options.jobs < 1:
        raise ValueError("--effort must be above 0, --seeds 0 or more, --jobs 1 or more")
    guard_s = 60 + 60 * effort if options.seconds is None else options.seconds
    if not 0 < guard_s < math.inf:
        raise ValueError(f"--seconds must be above 0, found {guard_s:g}; give a larger number")
    methods = _chosen(options)
    folders: dict[str, Path] = {}
    for folder in options.solutions:
        if not folder.is_dir():
            raise ValueError(f"--solutions {folder}: not a folder; give an existing one")
        name = _name_of(folder)
        if not name:
            raise ValueError(f"--solutions {folder}: the folder needs a name; give another folder")
        if name in folders:
            raise ValueError(
                f"--solutions {folder}: {folders[name]} has the name {name!r} too; "
                "rename one of the folders"
            )
        folders[name] = folder
    for instance in sorted(instances, key=lambda instance: HEAVY.index(instance.family)):
        for method in methods:
            if instance.family in method.families:
                for seed in seeds if method.seeded else seeds[:1]:
                    yield Task(instance.id, method.name, seed, effort, guard_s)
        for name, folder in folders.items():
            path = find_solution(folder, instance.id)
            if path is not None:
                yield Task(instance.id, f"{name} (files)", 0, effort, guard_s, path)


def _effort(options: argparse.Namespace) -> float:
    if options.effort is not None:
        return float(options.effort)
    return QUICK_EFFORT if options.quick else EFFORT


def _name_of(folder: Path) -> str:
    """Return a folder's name, also for ``.`` and ``..``."""
    return folder.resolve().name


def _rows_path(options: argparse.Namespace) -> Path:
    if options.rows is not None:
        return Path(options.rows)
    for path in (options.json, options.markdown, options.html):
        if path is not None:
            return Path(path).with_suffix(".rows.jsonl")
    return Path("bench-suite.rows.jsonl")


def _run(options: argparse.Namespace, tasks: Sequence[Task]) -> tuple[list[BenchRow], bool, int]:
    """Run all tasks; return their rows, whether all completed, and how many rows were resumed."""
    path = _rows_path(options)
    rows: dict[tuple[str, str, int, float], BenchRow] = {}
    if options.resume:
        stored = read_rows(path)
        # rows of other instances stay in the file for later calls
        rewrite_rows(path, stored)
        rows = _still_valid(stored, tasks)
    elif path.exists():
        # keep a backup in case --resume was forgotten
        path.replace(path.with_name(path.name + "~"))
    todo = [task for task in tasks if _key(task) not in rows]
    existing = len(rows)
    store = None
    if options.keep is not None:
        store = SolutionStore(options.keep)
        store.require_own(task.instance for task in tasks)
    progress = BenchProgress(len(todo), existing)
    complete = True
    try:
        for done in run_tasks(todo, options.jobs):
            append_row(path, done.row)
            if store is not None:
                store.offer(done)
            row = done.row
            rows[row.instance, row.method, row.seed, row.effort] = row
            progress.step(done)
    except Interrupted:
        complete = False
    progress.end()
    return [rows[_key(task)] for task in tasks if _key(task) in rows], complete, existing


def _key(task: Task) -> tuple[str, str, int, float]:
    return task.instance, task.method, task.seed, task.effort


def _still_valid(
    rows: Iterable[BenchRow], tasks: Sequence[Task]
) -> dict[tuple[str, str, int, float], BenchRow]:
    """Return stored rows whose problem is unchanged; solution files are evaluated again."""
    hashes = {
        instance.id: problem_hash(instance.make())
        for instance in instances_of({task.instance for task in tasks})
    }
    files = {_key(task) for task in tasks if task.solution is not None}
    selected = {_key(task) for task in tasks} - files
    valid = [row for row in rows if hashes.get(row.instance) == row.problem]
    by_key = {(r.instance, r.method, r.seed, r.effort): r for r in valid}
    return {key: row for key, row in by_key.items() if key in selected}


def _describe_run(
    options: argparse.Namespace, load_before: str, seconds: float, resumed_rows: int, total_s: float
) -> list[str]:
    """Describe the run in paragraphs: host, command, effort, seeds and duration."""
    command = ["planner", "bench"]
    command += ["--quick"] * options.quick
    if options.only:
        command += ["--only", *options.only]
    for name in ("methods", "seeds"):
        if getattr(options, name) is not None:
            command += [f"--{name}", *map(str, getattr(options, name))]
    for reference in options.method:
        command += ["--method", reference]
    for folder in options.solutions:
        command += ["--solutions", _name_of(folder)]
    for name in ("effort", "seconds"):
        if getattr(options, name) is not None:
            command += [f"--{name}", f"{getattr(options, name):g}"]
    command += ["--jobs", str(options.jobs)]
    for name in ("json", "html", "markdown"):
        if getattr(options, name) is not None:
            command += [f"--{name}", Path(getattr(options, name)).name]
    effort, seeds = _effort(options), options.seeds or SEEDS
    resumed = f", {resumed_rows} rows kept from before" if resumed_rows else ""
    return [
        describe_environment(load_before),
        f"Regenerate with `{shlex.join(command)}`. Effort {effort:g} a run, seeds "
        f"{', '.join(map(str, seeds))} where a method draws. {options.jobs} processes, "
        f"{seconds / 60:.1f} minutes, {_processor_s() / 60:.1f} of a processor{resumed}; "
        f"seconds of all rows together: {total_s:.0f}.",
    ]


def _processor_s() -> float:
    """Return the CPU seconds of this process and its child processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _write(options: argparse.Namespace, summary: Summary, description: Sequence[str]) -> None:
    today = datetime.now(UTC).date().isoformat()
    title = f"The open benchmark, {today}"
    if options.json is not None:
        write_text(
            options.json, json.dumps(_data(summary, description), allow_nan=False, indent=1) + "\n"
        )
    if options.markdown is not None:
        write_text(options.markdown, markdown(summary, title, description))
    if options.html is not None:
        write_text(options.html, page(summary, title, description))


def _data(summary: Summary, description: Sequence[str]) -> dict[str, Any]:
    return {
        "format": "planner.bench_suite",
        "made": list(description),
        "instances": {
            name: {**asdict(k), "gap": k.gap, "contradicted": k.contradicted}
            for name, k in summary.known.items()
        },
        "families": {
            str(family): [asdict(standing) for standing in standings]
            for family, standings in summary.families.items()
        },
        "rows": [asdict(row) for row in summary.rows],
    }
