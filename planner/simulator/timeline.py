"""Timelines of operations, simulated or executed, and their pictures.

matplotlib is imported only to draw: executor nodes create timelines without having it installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.simulator.bars_svg import Bar, bars_svg
from planner.simulator.utilization import Span, busy_share, too_narrow
from planner.utils.atomic_write import MADE, write_picture, write_text
from planner.utils.fonts import in_line
from planner.utils.html import boxed, line

COLOURS = {"F": "#4477aa", "H": "#228833", "B": "#ee7733", "A": "#999999", "U": "#ccbb44"}
NAMES = {
    "F": "forward",
    "H": "head and loss",
    "B": "backward",
    "A": "averaging",
    "U": "optimizer step",
}


LINK_COLOUR = "#aa3377"
DRAWN_DEVICES, DRAWN_LINKS = 128, 8
"""Most devices (evenly chosen) and most links (the fullest) in a picture."""
DRAWN_PIXELS = 900
"""Approximate width of a row."""
DRAWN_BINS = 150
"""Time bins of a row whose operations are narrower than pixels."""
DRAWN_IN_NOTEBOOKS = 32
"""Most devices in a notebook's picture."""


class Op(NamedTuple):
    """One operation of a device: F, H or B of a microbatch; A and U have microbatch -1.

    Attributes
    ----------
    kind
        F, H or B.
    start_s, end_s
        Start and end, seconds from the start of the iteration.
    """

    microbatch: int
    device: int
    kind: str
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """One message between devices.

    Attributes
    ----------
    kind
        Kind of the operation that receives it: F, H or B.
    start_s, end_s
        When it is enqueued and when it arrives, seconds from the start of the iteration.
    leaves_s, left_s
        Start and end of sending: before, it waits in the link's queue; afterwards its last byte
        travels for the link's latency.
    """

    microbatch: int
    kind: str
    source: int
    destination: int
    message_bytes: float
    start_s: float
    end_s: float
    leaves_s: float
    left_s: float


class LinkLoad(NamedTuple):
    """What a step sends over a link.

    Attributes
    ----------
    name
        A pair, or the up- or download of a device or site.
    pipeline_s, averaging_s
        Seconds that messages and averaging take at the link's full capacity.
    ends
        Sender and receiver of a pair; one device for its up- or download; empty for a site's.
    """

    name: str
    pipeline_s: float
    averaging_s: float
    ends: tuple[int, ...] = ()

    @property
    def busy_s(self) -> float:
        """Seconds of messages and averaging together."""
        return self.pipeline_s + self.averaging_s


@dataclass(frozen=True)
class Timeline:
    """Operations, messages and averaging rounds of one iteration.

    Attributes
    ----------
    ids
        Name of each device.
    ops
        F, H and B, in order of their start.
    transfers
        Messages between devices.
    closing
        Averaging (A) and optimizer steps (U).
    averaging_s
        The longest from a first round's begin to its stage's last return.
    step_s
        Time between the ends of consecutive steps.
    loads
        Links by how full they are, the fullest first.
    """

    ids: tuple[str, ...]
    ops: tuple[Op, ...]
    transfers: tuple[Transfer, ...] = ()
    closing: tuple[Op, ...] = field(default=())
    averaging_s: float = 0.0
    step_s: float = 0.0
    loads: tuple[LinkLoad, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Timeline({len(self.ids)} devices, {len(self.ops)} operations, "
            f"step {self.step_s:.4g} s)"
        )

    def _repr_html_(self) -> str:
        drawn = self._drawn(DRAWN_IN_NOTEBOOKS)
        rows: dict[int, list[Bar]] = {d: [] for d in drawn}
        for op in (*self.ops, *self.closing):
            if op.device in rows:
                rows[op.device].append((op.kind, op.start_s, op.end_s))
        names = [self.ids[d] for d in drawn]
        whole = len(self.ids)
        some = f"{len(drawn)} of {whole} devices are drawn." if len(drawn) < whole else ""
        picture = bars_svg(names, list(rows.values()), COLOURS, NAMES)
        return boxed(line(f"{self!r} {some}"), picture)

    def _drawn(self, most: int) -> list[int]:
        """Indices of the devices to draw: evenly chosen if there are more than ``most``."""
        whole = len(self.ids)
        n = min(whole, most)
        return [k * (whole - 1) // max(n - 1, 1) for k in range(n)]

    @property
    def makespan_s(self) -> float:
        """Latest end of an F, H or B: the makespan of the pipeline part."""
        return max((op.end_s for op in self.ops), default=0.0)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write Trace Event JSON for ui.perfetto.dev: a process a device, a row for each link.

        Parameters
        ----------
        path
            Of the JSON file.
        """
        write_text(path, self.chrome_trace())

    def chrome_trace(self) -> str:
        """The JSON text that `to_chrome_trace` writes."""
        return json.dumps(
            {
                "otherData": {"generator": MADE},
                "traceEvents": self._events(),
                "displayTimeUnit": "ms",
            }
        )

    def _events(self) -> list[dict[str, Any]]:
        """Events of one process per device: operations, averaging, and a row per outgoing link."""
        rows: dict[tuple[int, str], int] = {}
        count = [0] * len(self.ids)

        def row(device: int, operation: str) -> int:
            if (device, operation) not in rows:
                rows[device, operation] = count[device]
                count[device] += 1
            return rows[device, operation]

        for d in range(len(self.ids)):
            row(d, "compute")
        events: list[dict[str, Any]] = []
        for op in (*self.ops, *self.closing):
            label = op.kind if op.microbatch < 0 else f"{op.kind}{op.microbatch}"
            where = row(op.device, "averaging" if op.kind == "A" else "compute")
            events.append(
                _slice(label, NAMES[op.kind], op.device, where, op.start_s, op.end_s)
                | {"args": {"microbatch": op.microbatch}}
            )
        for k, t in enumerate(self.transfers):
            where = row(t.source, f"to {self.ids[t.destination]}")
            events.append(
                _slice(f"{t.kind}{t.microbatch}", "transfer", t.source, where, t.leaves_s, t.left_s)
                | {"args": {"bytes": t.message_bytes, "waited_s": t.leaves_s - t.start_s}}
            )
            flow = {"name": "message", "cat": "transfer", "id": k}
            events.append(
                {**flow, "ph": "s", "pid": t.source, "tid": where, "ts": t.leaves_s * 1e6}
            )
            events.append(
                {**flow, "ph": "f", "bp": "e", "pid": t.destination, "tid": 0, "ts": t.end_s * 1e6}
            )
        names = [_name("process_name", d, 0, name) for d, name in enumerate(self.ids)]
        names += [_name("thread_name", d, tid, operation) for (d, operation), tid in rows.items()]
        return [*names, *events]

    def busiest_pairs(self, count: int) -> list[tuple[tuple[int, int], float]]:
        """The pairs that carry messages for the longest time.

        Parameters
        ----------
        count
            Most pairs to return.

        Returns
        -------
        list
            ``((source, destination), seconds)``, the busiest first.
        """
        busy: dict[tuple[int, int], float] = {}
        for t in self.transfers:
            pair = (t.source, t.destination)
            busy[pair] = busy.get(pair, 0.0) + t.left_s - t.leaves_s
        return sorted(busy.items(), key=lambda item: (-item[1], item[0]))[:count]

    def computing_s(self) -> list[float]:
        """Seconds of a step that each device computes."""
        busy = [0.0] * len(self.ids)
        for op in (*self.ops, *self.closing):
            if op.kind != "A":
                busy[op.device] += op.end_s - op.start_s
        return busy

    def idle(self) -> list[float]:
        """The share of a step during which each device does not compute."""
        step_s = self.step_s or self.makespan_s
        busy = self.computing_s()
        return [max(1 - busy_s / step_s, 0.0) if step_s > 0 else 1.0 for busy_s in busy]

    def gantt(
        self, path: str | Path, title: str = "", groups: Sequence[Sequence[int]] = ()
    ) -> None:
        """Draw the iteration to a PNG, SVG or PDF file: one row per device, then the fullest links.

        Of more than 128 devices some are drawn, and the title states how many. Where operations are
        narrower than pixels, the height of a bar is the share of time that they take.

        Parameters
        ----------
        path
            File to write; its suffix determines the format.
        title
            Title of the picture.
        groups
            Devices of each stage, drawn next to each other; devices without a stage come last.
        """
        from matplotlib.figure import Figure

        grouped = {d: j for j, group in enumerate(groups) for d in group}
        order = [*grouped, *(d for d in range(len(self.ids)) if d not in grouped)]
        drawn, whole = [order[k] for k in self._drawn(DRAWN_DEVICES)], len(self.ids)
        n = len(drawn)
        links = self.busiest_pairs(DRAWN_LINKS)
        height = min(0.9 + 0.26 * n, 16.0)
        below = 0.7 + 0.26 * len(links) if links else 0.0
        figure = Figure(figsize=(11, height + below), layout="constrained")
        if links:
            axes, under = figure.subplots(2, sharex=True, height_ratios=[height, below])
            self._draw_links(under, links)
            under.set_xlabel("seconds")
        else:
            axes = figure.add_subplot()
            axes.set_xlabel("seconds")
        narrow = self._draw_devices(axes, drawn, grouped, min(9.0, 60 * height / max(n, 1) / 2))
        some = f", {n} of {whole} devices" if n < whole else ""
        shares = "; height: share of time" if narrow else ""
        words = (
            f"step {self.step_s:.3g} s; by itself its pipeline takes {self.makespan_s:.3g} s"
            f"{some}{shares}"
        )
        axes.set_title(title or words)
        write_picture(path, figure, dpi=130)

    @property
    def _end_s(self) -> float:
        return max((op.end_s for op in (*self.ops, *self.closing)), default=0.0)

    def _draw_devices(
        self, axes: Any, drawn: Sequence[int], grouped: dict[int, int], font_size: float
    ) -> bool:
        """Draw the devices' rows; returns whether bars are shares of time, not operations."""
        from matplotlib.patches import Patch

        n, row = len(drawn), {d: k for k, d in enumerate(drawn)}
        spans: dict[tuple[str, int], list[Span]] = {}
        for op in (*self.ops, *self.closing):
            if op.device in row:
                spans.setdefault((op.kind, row[op.device]), []).append((op.start_s, op.end_s))
        computing = [span for (kind, _), mine in spans.items() if kind != "A" for span in mine]
        narrow = too_narrow(computing, self._end_s, DRAWN_PIXELS)
        edges = np.linspace(0.0, self._end_s, DRAWN_BINS + 1)
        for k in range(n):
            base = np.zeros(len(edges) - 1)
            for kind, colour in COLOURS.items():
                mine = spans.get((kind, k), [])
                if kind == "A" or not narrow:
                    # averaging overlaps with operations: drawn at the foot of the row
                    foot = (k + 0.22, 0.18) if kind == "A" else (k - 0.4, 0.6)
                    bars = [(start, stop - start) for start, stop in mine]
                    axes.broken_barh(bars, foot, facecolors=colour, linewidth=0)
                elif mine:
                    top = base + busy_share(mine, edges)
                    floor, ceiling = (k + 0.2 - 0.6 * np.append(h, h[-1]) for h in (base, top))
                    axes.fill_between(
                        edges, floor, ceiling, step="post", facecolor=colour, linewidth=0
                    )
                    base = top
            if k and grouped.get(drawn[k]) != grouped.get(drawn[k - 1]):
                axes.axhline(k - 0.5, color="#bbbbbb", linewidth=0.6)
        idle = self.idle()
        names = [
            (f"stage {grouped[d]}  " if d in grouped else "")
            + f"{in_line(self.ids[d])}  idle {idle[d]:.0%}"
            for d in drawn
        ]
        axes.set_yticks(range(n), names if grouped else [self.ids[d] for d in drawn])
        axes.tick_params(axis="y", labelsize=font_size)
        axes.set_ylim(n - 0.4, -0.6)
        axes.set_xlim(0, self._end_s or None)
        used = {op.kind for op in (*self.ops, *self.closing)}
        axes.legend(
            handles=[Patch(color=COLOURS[k], label=NAMES[k]) for k in COLOURS if k in used],
            loc="upper left",
            bbox_to_anchor=(1.005, 1),
            frameon=False,
        )
        return narrow

    def _draw_links(self, axes: Any, links: Sequence[tuple[tuple[int, int], float]]) -> None:
        edges, labels = np.linspace(0.0, self._end_s, DRAWN_BINS + 1), []
        for k, ((i, j), busy) in enumerate(links):
            spans = [
                (t.leaves_s, t.left_s)
                for t in self.transfers
                if (t.source, t.destination) == (i, j)
            ]
            if too_narrow(spans, self._end_s, DRAWN_PIXELS):
                share = busy_share(spans, edges)
                ceiling = k + 0.4 - 0.8 * np.append(share, share[-1])
                axes.fill_between(
                    edges, k + 0.4, ceiling, step="post", facecolor=LINK_COLOUR, linewidth=0
                )
            else:
                bars = [(start, stop - start) for start, stop in spans]
                axes.broken_barh(bars, (k - 0.4, 0.8), facecolors=LINK_COLOUR, linewidth=0)
            full = f", {busy / self.step_s:.0%} of a step" if self.step_s > 0 else ""
            ends = in_line(self.ids[i]), in_line(self.ids[j])
            labels.append(f"{ends[0]} to {ends[1]}{full}")
        axes.set_yticks(range(len(links)), labels, fontsize=7)
        axes.set_ylim(len(links) - 0.4, -0.6)
        axes.set_title("fullest links of the pipeline's messages", fontsize=9, loc="left")


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


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


def from_records(ids: Sequence[str], records: Iterable[Sequence[Any]]) -> Timeline:
    """A timeline from the records of one executed step.

    Parameters
    ----------
    records
        ``[microbatch, device, kind, start_s, end_s]``, seconds from the iteration's begin.
    """
    ops = sorted_ops(
        Op(int(b), int(d), str(kind), float(start), float(end))
        for b, d, kind, start, end in records
    )
    closing = tuple(op for op in ops if op.kind in "AU")
    return Timeline(
        tuple(ids),
        tuple(op for op in ops if op.kind in "FHB"),
        closing=closing,
        averaging_s=max((op.end_s - op.start_s for op in closing if op.kind == "A"), default=0.0),
        step_s=max((op.end_s for op in ops), default=0.0),
    )
