"""Traces of peers that join and leave: from files, or generated (SWARM, 4.4, I).

The paper replays "the number of active T4 nodes" of 32 hours of training as events, each a time and
a change in the number of peers. It shows a plot but not the data; here a generator replaces them,
with every assumption a parameter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.problems.error import ProblemError
from planner.utils.atomic_write import write_text
from planner.utils.csv_table import number_in, number_remedy, read_csv
from planner.utils.text import printable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HOUR_S = 3600.0
COLUMNS = ("time_s", "change", "kind")
ONE_KIND = "peer"


@dataclass(frozen=True)
class Trace:
    """Changes in the number of peers.

    Attributes
    ----------
    kinds
        Names of the K kinds of peers.
    start
        ``int[K]``: initial numbers of peers.
    time_s
        ``float[E]``: times of the events, ascending, above 0.
    kind, change
        ``int[E]``: kind, and number of peers that join (positive) or leave (negative).
    """

    kinds: tuple[str, ...]
    start: Ints
    time_s: Floats
    kind: Ints
    change: Ints
    end_s: float

    def __post_init__(self) -> None:
        if np.any(np.diff(self.time_s, prepend=0.0) < 0) or self.end_s < self.time_s.max(initial=0):
            raise ProblemError("a trace's times must ascend; sort its events")
        for k, name in enumerate(self.kinds):
            steps = np.where(self.kind == k, self.change, 0)
            count = self.start[k] + np.cumsum(steps)
            if np.any(count < 0):
                at = self.time_s[np.argmax(count < 0)]
                raise ProblemError(
                    f"at {at:g} s more peers of kind {name!r} leave than there are; correct changes"
                )

    def counts(self) -> Ints:
        """Peers of every kind after each event.

        Returns
        -------
        ndarray
            ``int[E + 1, K]``, initial numbers first.
        """
        steps = np.zeros((len(self.time_s) + 1, len(self.kinds)), dtype=np.int64)
        steps[0] = self.start
        steps[np.arange(1, len(steps)), self.kind] = self.change
        return np.cumsum(steps, axis=0)


def load_trace(path: str | Path) -> Trace:
    """Read ``time_s,change[,kind]``; rows at time 0 are the initial peers, the last row the end."""
    table = read_csv(path, error=ProblemError)
    columns = list(table.columns)
    if columns not in (list(COLUMNS), list(COLUMNS[:2])):
        shown = ",".join(map(printable, columns)) or "missing"
        raise ProblemError(f"{path}: columns are {shown}; give time_s,change or time_s,change,kind")
    kinds: dict[str, int] = {}
    start: list[int] = []
    events: list[tuple[float, int, int]] = []
    last_s = 0.0
    for line, row in table.rows:
        where = f"{path}: line {line}"
        time_s = _number(where, "time_s", row["time_s"])
        change = _number(where, "change", row["change"])
        if time_s < last_s:
            raise ProblemError(f"{where}: time_s {time_s:g} is before {last_s:g}; sort the rows")
        if change != int(change):
            raise ProblemError(f"{where}: change is {row['change']!r}; give a whole number")
        last_s = time_s
        kind = kinds.setdefault(row.get("kind") or ONE_KIND, len(kinds))
        if kind == len(start):
            start.append(0)
        if time_s == 0:
            start[kind] += int(change)
        elif change != 0:
            events.append((time_s, kind, int(change)))
    if last_s == 0 or sum(start) < 1:
        raise ProblemError(
            f"{path}: has no peers at time 0 or nothing after it; give both, the last row ends it"
        )
    time, kind_of, changes = (np.array([e[k] for e in events]) for k in range(3))
    try:
        return Trace(
            tuple(kinds),
            np.array(start, dtype=np.int64),
            time.astype(np.float64),
            kind_of.astype(np.int64),
            changes.astype(np.int64),
            last_s,
        )
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def _number(where: str, column: str, text: str) -> float:
    value = number_in(text)
    if not math.isfinite(value):
        remedy = number_remedy(text, "give a finite number")
        raise ProblemError(f"{where}: {column} is {text!r}; {remedy}")
    return value


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace in the format of `load_trace`."""
    rows = [(0.0, int(n), k) for k, n in enumerate(trace.start)]
    rows += zip(trace.time_s.tolist(), trace.change.tolist(), trace.kind.tolist(), strict=True)
    rows.append((trace.end_s, 0, 0))
    lines = [f"{time!r},{change},{trace.kinds[kind]}" for time, change, kind in rows]
    write_text(Path(path), "\n".join([",".join(COLUMNS), *lines]) + "\n")


@dataclass(frozen=True)
class Market:
    """Generator of traces of preemptible peers.

    Attributes
    ----------
    peers
        Target number of peers of every kind, also the initial one.
    life_s
        Mean lifetime of a peer, exponentially distributed.
    replaced_s
        Mean time until a lost peer is replaced, if the provider has capacity.
    squeeze_s
        Mean time between changes of the provider's capacity.
    least
        The capacity is uniform between this share of ``peers`` and all of them; peers above it are
        preempted at once.
    quiet_s
        Minimum time until the first change of capacity.
    """

    peers: tuple[int, ...] = (400,)
    hours: float = 32.0
    life_s: float = 8 * HOUR_S
    replaced_s: float = 300.0
    squeeze_s: float = 4 * HOUR_S
    least: float = 0.4
    quiet_s: float = HOUR_S

    def __post_init__(self) -> None:
        for name in ("hours", "life_s", "replaced_s", "squeeze_s"):
            if not getattr(self, name) > 0:
                raise ProblemError(f"{name} is {getattr(self, name)}; give a number above 0")
        if not 0 <= self.least <= 1 or self.quiet_s < 0 or min(self.peers, default=0) < 0:
            raise ProblemError(
                f"least is {self.least}, quiet_s {self.quiet_s}, peers {self.peers}; give a part "
                "of 1, seconds and numbers of peers"
            )

    def trace(self, seed: int, kinds: Sequence[str] | None = None) -> Trace:
        """Generate a trace."""
        count = len(self.peers)
        names = tuple(kinds or ([ONE_KIND] if count == 1 else [f"kind{k}" for k in range(count)]))
        rng = np.random.default_rng(seed)
        events: list[tuple[float, int, int]] = []
        for k, wanted in enumerate(self.peers):
            events += [(time, k, change) for time, change in self._of_kind(wanted, rng)]
        events.sort()
        time, kind, change = (np.array([e[j] for e in events]) for j in range(3))
        return Trace(
            names,
            np.array(self.peers, dtype=np.int64),
            time.astype(np.float64),
            kind.astype(np.int64),
            change.astype(np.int64),
            self.hours * HOUR_S,
        )

    def _of_kind(self, wanted: int, rng: np.random.Generator) -> list[tuple[float, int]]:
        """Times and changes of one kind."""
        end_s = self.hours * HOUR_S
        squeeze_s = self.quiet_s + rng.exponential(self.squeeze_s)
        coming: list[float] = []
        active, room, now = wanted, wanted, 0.0
        events: list[tuple[float, int]] = []
        while True:
            # lifetimes are memoryless: the next peer to leave is any of the active ones
            ends_s = now + rng.exponential(self.life_s / active) if active else math.inf
            now = min(ends_s, squeeze_s, coming[0] if coming else math.inf)
            if now > end_s:
                return events
            change = 0
            if now == squeeze_s:
                room = round(wanted * rng.uniform(self.least, 1.0))
                squeeze_s = now + rng.exponential(self.squeeze_s)
                change = min(0, room - active)
            elif coming and now == coming[0]:
                heapq.heappop(coming)
                change = 1 if active < room else 0
            else:
                change = -1
            if change:
                events.append((now, change))
                active += change
            # request replacements up to the provider's capacity
            while active + len(coming) < min(wanted, room):
                heapq.heappush(coming, now + rng.exponential(self.replaced_s))
