"""Makespans of the schedules in a cycle, and the number of waves that a batch needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from planner.problems import PathProblem, ProblemError
from planner.problems.waves import count_waves
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.model import TrainingPlan


def cycle_data(plan: TrainingPlan) -> dict[str, Any]:
    """Return the makespan of every schedule, and the waves, JSON-ready."""
    _, timelines = simulate_cycle(plan)
    problem = PathProblem.from_assignment(
        plan.cluster,
        plan.workload,
        plan.assignment,
        path_stages=len(plan.schedules[0].paths[0]),
        microbatches_per_start=len(plan.schedules[0].paths) // len(plan.assignment.groups[0]),
        live_memory=True,
        stage_layers=plan.stage_layers,
        recompute=plan.recompute,
    )
    return {
        "schedules": [
            {
                "name": s.name,
                "iterations": plan.cycle.count(k),
                "pipeline_s": timeline.makespan_s,
                "averaging_s": timeline.averaging_s,
            }
            for k, (s, timeline) in enumerate(zip(plan.schedules, timelines, strict=True))
        ],
        "cycle": list(plan.cycle),
        "stage_layers": [stop - start for start, stop in plan.stage_layers],
        "visited_layers": _visited_layers(plan),
        "waves": waves_data(problem),
    }


def _visited_layers(plan: TrainingPlan) -> float:
    """Return the mean number of layers that a microbatch visits over the cycle."""
    count = {
        d: stop - start for d, j in plan.stage_of.items() for start, stop in [plan.stage_layers[j]]
    }
    means = [
        sum(count[d] for path in plan.schedules[k].paths for d in path)
        / len(plan.schedules[k].paths)
        for k in plan.cycle
    ]
    return sum(means) / len(means)


def waves_data(problem: PathProblem) -> list[dict[str, Any]]:
    """Return the waves of a batch on partial and on full paths, JSON-ready."""
    rows: list[dict[str, Any]] = []
    for k in sorted({problem.path_stages, len(problem.stage_devices)}):
        try:
            rows.append(asdict(count_waves(problem, k)))
        except ProblemError as error:
            rows.append({"path_stages": k, "refused": str(error)})
    return rows


def waves_rows(waves: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the waves as (label, text) rows, one per path length."""
    rows = []
    for w in waves:
        label = f"waves, {w['path_stages']} stages a path"
        if "refused" in w:
            rows.append((label, f"none: {w['refused'].split(';')[0]}"))
        else:
            rows.append(
                (
                    label,
                    f"{w['count']}, each with {w['per_start']} microbatches a start device; "
                    f"{w['visits_per_device']:.1f} visits a device in all",
                )
            )
    return rows
