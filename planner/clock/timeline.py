"""Operations with times, simulated or executed alike, and their pictures.

A `Timeline` of an execution comes from the executor on nodes without matplotlib, so drawing imports
it only when asked.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from planner.network.atomic import write_bytes, write_text

COLOURS = {"F": "#4477aa", "H": "#228833", "B": "#ee7733", "A": "#999999", "U": "#ccbb44"}
NAMES = {
    "F": "forward",
    "H": "head and loss",
    "B": "backward",
    "A": "averaging",
    "U": "optimizer step",
}


class Op(NamedTuple):
    """One operation of a device: F, H or B of a microbatch; A and U have microbatch -1.

    Attributes
    ----------
    microbatch
        Whose.
    device
        Where.
    kind
        F, H or B.
    start_s, end_s
        Begin and end, seconds from the begin of the iteration.
    """

    microbatch: int
    device: int
    kind: str
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """One message: ``kind`` is that of the operation that waits for it.

    Attributes
    ----------
    microbatch
        Whose.
    kind
        F, H or B.
    source, destination
        From and to.
    message_bytes
        Its size.
    start_s, end_s
        Begin and end, seconds from the begin of the iteration.
    """

    microbatch: int
    kind: str
    source: int
    destination: int
    message_bytes: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One iteration.

    Attributes
    ----------
    ids
        Name of each device.
    ops
        F, H and B, in order of their start.
    transfers
        Messages between devices.
    closing
        Averaging (A) and optimizer steps (U) after the pipeline part.
    averaging_every
        H: averaging takes place once in so many steps.
    """

    ids: tuple[str, ...]
    ops: tuple[Op, ...]
    transfers: tuple[Transfer, ...] = ()
    closing: tuple[Op, ...] = field(default=())
    averaging_every: int = 1

    @property
    def makespan_s(self) -> float:
        """Latest end of F, H and B: the pipeline part."""
        return max((op.end_s for op in self.ops), default=0.0)

    def _closing_s(self, kind: str) -> float:
        return max((op.end_s - op.start_s for op in self.closing if op.kind == kind), default=0.0)

    @property
    def averaging_s(self) -> float:
        """Longest averaging of one device."""
        return self._closing_s("A")

    @property
    def update_s(self) -> float:
        """Longest optimizer step of one device."""
        return self._closing_s("U")

    @property
    def step_s(self) -> float:
        """Step time: pipeline part, averaging divided by H, optimizer step."""
        return self.makespan_s + self.averaging_s / self.averaging_every + self.update_s

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write Trace Event JSON for ui.perfetto.dev: a process a device, flows for messages.

        Parameters
        ----------
        path
            Of the JSON file.
        """
        write_text(path, json.dumps({"traceEvents": self._events(), "displayTimeUnit": "ms"}))

    def _events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for d, name in enumerate(self.ids):
            for tid, what in enumerate(("compute", "send")):
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_name",
                        "pid": d,
                        "tid": tid,
                        "args": {"name": what},
                    }
                )
            events.append({"ph": "M", "name": "process_name", "pid": d, "args": {"name": name}})
        for op in (*self.ops, *self.closing):
            label = op.kind if op.microbatch < 0 else f"{op.kind}{op.microbatch}"
            events.append(
                _slice(label, NAMES[op.kind], op.device, 0, op.start_s, op.end_s)
                | {"args": {"microbatch": op.microbatch}}
            )
        for k, t in enumerate(self.transfers):
            label = f"{t.kind}{t.microbatch} to {self.ids[t.destination]}"
            events.append(
                _slice(label, "transfer", t.source, 1, t.start_s, t.end_s)
                | {"args": {"bytes": t.message_bytes}}
            )
            flow = {"name": "message", "cat": "transfer", "id": k}
            events.append({**flow, "ph": "s", "pid": t.source, "tid": 1, "ts": t.start_s * 1e6})
            events.append(
                {
                    **flow,
                    "ph": "f",
                    "bp": "e",
                    "pid": t.destination,
                    "tid": 0,
                    "ts": t.end_s * 1e6,
                }
            )
        return events

    def gantt(self, path: str | Path, title: str = "") -> None:
        """Draw the iteration, a row a device, to a PNG, SVG or PDF file.

        Parameters
        ----------
        path
            Of the file; its suffix chooses the format.
        title
            Above the picture.
        """
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        n = len(self.ids)
        height = min(0.9 + 0.26 * n, 16.0)
        figure = Figure(figsize=(11, height), layout="constrained")
        axes = figure.add_subplot()
        for kind, colour in COLOURS.items():
            for d in range(n):
                bars = [
                    (op.start_s, op.end_s - op.start_s)
                    for op in (*self.ops, *self.closing)
                    if op.device == d and op.kind == kind
                ]
                if bars:
                    axes.broken_barh(bars, (d - 0.4, 0.8), facecolors=colour, linewidth=0)
        axes.set_yticks(range(n), self.ids, fontsize=min(9.0, 60 * height / max(n, 1) / 2))
        axes.set_ylim(n - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds")
        axes.set_title(title or f"pipeline part {self.makespan_s:.3g} s, step {self.step_s:.3g} s")
        used = {op.kind for op in (*self.ops, *self.closing)}
        axes.legend(
            handles=[Patch(color=COLOURS[k], label=NAMES[k]) for k in COLOURS if k in used],
            loc="upper left",
            bbox_to_anchor=(1.005, 1),
            frameon=False,
        )
        picture = io.BytesIO()
        figure.savefig(picture, dpi=130, format=Path(path).suffix[1:] or "png")
        write_bytes(path, picture.getvalue())


def _slice(
    name: str, category: str, pid: int, tid: int, start_s: float, end_s: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
    }


def sorted_ops(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Operations in order of their start, ties by device and microbatch."""
    return tuple(sorted(ops, key=lambda op: (op.start_s, op.device, op.end_s, op.microbatch)))


def from_records(ids: Sequence[str], records: Iterable[Sequence[Any]], every: int) -> Timeline:
    """From ``[microbatch, device, kind, start_s, end_s]`` records of an executor.

    Parameters
    ----------
    ids
        Names of the devices.
    records
        ``[microbatch, device, kind, start_s, end_s]``, seconds from the iteration's begin.
    every
        Number of steps that they cover.

    Returns
    -------
    Timeline
        Operations only, on average over the steps.
    """
    ops = sorted_ops(
        Op(int(b), int(d), str(kind), float(start), float(end))
        for b, d, kind, start, end in records
    )
    return Timeline(
        tuple(ids),
        tuple(op for op in ops if op.kind in "FHB"),
        closing=tuple(op for op in ops if op.kind in "AU"),
        averaging_every=every,
    )
