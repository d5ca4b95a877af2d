"""Chrome trace of a step: predicted, executed, and as forwarded by the switch.

The switch records averaging too and is independent of the ranks' own records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner.emulate.emulation import Emulation
from planner.simulator.timeline import NAMES
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import MADE, write_text

PREDICTED, EXECUTED, CARRIED = 1, 2, 3


class _Rows:
    """Row numbers: one per device, one for its averaging, one per link; the same in all "
    "processes."""

    def __init__(self, plan: TrainingPlan) -> None:
        self._ids = plan.cluster.network.ids
        self._rows: dict[str, int] = {}
        for name in self._ids:
            self._row_of(name)

    def _row_of(self, name: str) -> int:
        return self._rows.setdefault(name, len(self._rows))

    def of_operation(self, device: int, kind: str) -> int:
        name = self._ids[device]
        return self._row_of(f"{name}: averaging" if kind == "A" else name)

    def of_link(self, source: int, destination: int) -> int:
        return self._row_of(f"{self._ids[source]} to {self._ids[destination]}")

    def names(self) -> Iterable[dict[str, Any]]:
        for process, label in (
            (PREDICTED, "predicted"),
            (EXECUTED, "executed"),
            (CARRIED, "carried by the switch"),
        ):
            yield _name("process_name", process, 0, label)
            for name, row in self._rows.items():
                yield _name("thread_name", process, row, name)
                sort = {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": row}
                yield {**sort, "args": {"sort_index": row}}


def write_trace(path: Path, plan: TrainingPlan, emulation: Emulation) -> None:
    """Write Trace Event JSON for ui.perfetto.dev."""
    rows, step = _Rows(plan), emulation.typical
    timeline = emulation.prediction.timelines[plan.cycle[step.number % len(plan.cycle)]]
    events = [_operation(PREDICTED, rows, *op) for op in (*timeline.ops, *timeline.closing)] + [
        _operation(EXECUTED, rows, *op) for op in step.operations
    ]
    for t in timeline.transfers:
        row = rows.of_link(t.source, t.destination)
        events.append(
            _message(PREDICTED, row, f"{t.kind}{t.microbatch}", t.leaves_s, t.left_s, t.end_s)
        )
    latency_s = plan.cluster.network.latency_s
    free: dict[int, float] = {}
    for m in step.messages:
        row = rows.of_link(m.source, m.destination)
        # a link sends one message after another
        departed_s = m.arrived_s - float(latency_s[m.source, m.destination])
        leaves = min(max(m.handed_over_s, free.get(row, 0.0)), departed_s)
        free[row] = departed_s
        events.append(
            _message(EXECUTED, row, f"{m.kind}{m.microbatch}", leaves, departed_s, m.arrived_s)
        )
    events += _carried(plan, rows, emulation)
    data = {
        "otherData": {"generator": MADE},
        "traceEvents": [*rows.names(), *events],
        "displayTimeUnit": "ms",
    }
    write_text(path, json.dumps(data, allow_nan=False))


def _carried(plan: TrainingPlan, rows: _Rows, emulation: Emulation) -> Iterable[dict[str, Any]]:
    """Yield the busy times of links during the step, with the plan's bytes."""
    step, settings, n = emulation.typical, emulation.settings, len(plan.cluster)
    for pair, begin_s, end_s, carried in emulation.carried.busy.tolist():
        if begin_s >= step.end_s or end_s <= step.begin_s:
            continue
        row = rows.of_link(int(pair) // n, int(pair) % n)
        times = ((moment - step.begin_s) * settings.speed for moment in (begin_s, end_s))
        event = _slice(CARRIED, row, "busy", "carried", *times)
        yield {**event, "args": {"bytes": carried * settings.shrink}}


def _operation(
    process: int, rows: _Rows, microbatch: int, device: int, kind: str, start: float, end: float
) -> dict[str, Any]:
    label = kind if microbatch < 0 else f"{kind}{microbatch}"
    return _slice(process, rows.of_operation(device, kind), label, NAMES[kind], start, end)


def _message(
    process: int, row: int, label: str, leaves_s: float, left_s: float, arrived_s: float
) -> dict[str, Any]:
    event = _slice(process, row, label, "message", leaves_s, left_s)
    return {**event, "args": {"arrived_s": arrived_s}}


def _slice(
    process: int, row: int, label: str, category: str, start_s: float, end_s: float
) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "name": label, "cat": category, "pid": process, "tid": row, **times}


def _name(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}
