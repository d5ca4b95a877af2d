"""``planner compare``: compare decisions and metrics of two plans, differences first."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planner.cli.output import show
from planner.planning.request import InnerAveraging
from planner.report.figures import digits, memory, seconds, tokens_per_s
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.utils.text import quantity

ABOUT = "show two plans side by side"
EXAMPLE = "planner compare a.json b.json"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the two plan files."""
    sub.add_argument("a", type=Path, help="a plan file")
    sub.add_argument("b", type=Path, help="another plan file")


def run(args: argparse.Namespace) -> int:
    """Print one row per decision or metric; an asterisk marks those that differ."""
    first, second = facts(load_plan(args.a)), facts(load_plan(args.b))
    rows = [{"what": k, "a": v, "b": second[k], "same": v == second[k]} for k, v in first.items()]
    rows.sort(key=lambda row: bool(row["same"]))
    lines = [f"  {'':<20}{args.a!s:<28}  {args.b}"]
    for row in rows:
        a, b = (_text(str(row["what"]), row[plan]) for plan in ("a", "b"))
        lines.append(f"{' ' if row['same'] else '*'} {row['what']:<20}{a:<28}  {b}")
    show(args.json, rows, lines)
    return 0


def _text(what: str, value: Any) -> str:
    """Format a value with its unit."""
    if value is None:
        return "-"
    if what == "recompute":
        return value[0] if len(set(value)) == 1 else ", ".join(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if what.endswith("_s") and what != "tokens_per_s":
        return seconds(value)
    if what.endswith("_bytes"):
        return quantity(value, "B")
    return digits(value) if isinstance(value, float) else str(value)


def facts(plan: TrainingPlan) -> dict[str, Any]:
    """Return decisions and metrics of a plan, JSON-ready."""
    step = plan.step_certificate
    return {
        "step_s": plan.predicted.step_s,
        "pipeline_s": plan.predicted.pipeline_s,
        "averaging_s": plan.predicted.averaging_s,
        "bound_s": None if step is None else step.bound,
        "step_usd": None if plan.cost is None else plan.cost.step_usd,
        "tokens_per_s": tokens_per_s(plan),
        "free_memory_bytes": min(stage.reserve_bytes for stage in memory(plan)),
        "network": plan.cluster.network.content_hash[:12],
        "workload": plan.workload.name,
        "devices": len(plan.cluster),
        "tensor_parallel": sorted({plan.gpu_counts[d] for d in plan.stage_of}),
        "optimizer_shards": plan.workload.optimizer_shards,
        "stage_sizes": [len(group) for group in plan.assignment.groups],
        "layers": [stop - start for start, stop in plan.stage_layers],
        "recompute": plan.recomputed_layers,
        "microbatch_samples": plan.workload.microbatch_samples,
        "schedules": [s.name for s in plan.schedules],
        "head_stage": plan.head_stage,
        "precision": str(plan.workload.precision.compute),
        "codec": str(plan.codec),
        "boundary_codec": str(plan.workload.boundary_codec),
        "sync_every": plan.sync.every_steps,
        "within": InnerAveraging.REGION.value if plan.two_frequency else None,
        "wiring": str(plan.wiring),
        "clip": plan.clip,
        "hash": plan.content_hash[:12],
    }
