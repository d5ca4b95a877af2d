"""SWARM's Table 5 and Figure 7 against planned moves. Part of ``python -m benchmarks.swarm``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalancing import NoMoves, RebalancePolicy, SwarmPolicy, SwarmState
from planner.swarm.replay import Enter, Leave, ReplayConfig, ReplayResult, replay
from planner.swarm.traces import HOUR_S, Market, Trace, load_trace
from planner.utils.atomic_write import write_picture

Floats = NDArray[np.float64]
STAGES = 4
STATE_BYTES = 1.01e9 / STAGES * 12
"""4.3's 1.01 billion parameters in four stages: 32 bits each, and LAMB's two moments."""
DOWNLOAD_S = STATE_BYTES / (200e6 / 8)
"""At the abstract's 200 Mb/s."""
MARKS = ("o", "s")
"""Of planned moves, and of Algorithm 2."""
KEPT = (0.9, 0.95, 0.96, 0.975)
"""Of the rate of an even spread."""
HORIZON_S = 1800.0
PAPER_5 = {"none": (82.7, 99.0, 45.4), "T = 300": (95.8, 99.4, 88.9), "T = 60": (97.6, 99.8, 91.7)}
FIGURE_STAGES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Row:
    """Some seeds of a policy."""

    name: str
    runs: tuple[ReplayResult, ...]

    @property
    def shares(self) -> Floats:
        """``float[seeds, 3]``: overall, first and last hour, in per cent."""
        return 100 * np.array([run.row for run in self.runs])

    @property
    def moves(self) -> float:
        """Mean."""
        return float(np.mean([run.moves for run in self.runs]))

    def cells(self) -> str:
        """Ours in Table 5's columns, then moves and bytes."""
        mean, spread = self.shares.mean(axis=0), self.shares.std(axis=0)
        gigabytes = np.mean([run.moved_bytes for run in self.runs]) / 1e9
        return (
            f"{mean[0]:.1f} ± {spread[0]:.1f} | {mean[1]:.1f} | {mean[2]:.1f} | {self.moves:.0f} | "
            f"{gigabytes:,.0f}"
        )


def policies(download_s: float) -> dict[str, RebalancePolicy]:
    """Those of the tables."""

    def ours(every_s: float, keep: float = 1.0) -> PlannedMoves:
        return PlannedMoves(
            every_s, horizon_s=HORIZON_S, download_s=download_s, state_bytes=STATE_BYTES, keep=keep
        )

    return {
        "none": NoMoves(),
        "T = 300": SwarmPolicy(300.0),
        "T = 60": SwarmPolicy(60.0),
        **{f"planned, every 60 s, {100 * keep:g}% kept": ours(60.0, keep) for keep in KEPT},
        "planned, every 60 s": ours(60.0),
        "planned, after every event": ours(0.0),
    }


def played(
    traces: Sequence[Trace],
    seeds: Sequence[int],
    stages: int,
    download_s: float,
    enter: Enter,
    chosen: dict[str, RebalancePolicy] | None = None,
    leave: Leave = Leave.STAGE,
) -> list[Row]:
    """Every policy on the same traces."""
    found = []
    for name, policy in (chosen or policies(download_s)).items():
        runs = tuple(
            replay(
                ReplayConfig(
                    trace, np.ones(stages), np.ones(1), download_s, STATE_BYTES, enter, leave
                ),
                policy,
                seed,
            )
            for trace, seed in zip(traces, seeds, strict=True)
        )
        found.append(Row(name, runs))
    return found


def table_5(seeds: Sequence[int], path: Path | None, say: Callable[[str], None]) -> list[str]:
    """The section of the report."""
    market = Market()
    given_trace = None if path is None else load_trace(path)
    traces = [given_trace or market.trace(seed) for seed in seeds]
    events = np.mean([len(trace.time_s) for trace in traces])
    lines = [
        "## Table 5: rebalancing, per cent of the best allocation",
        "",
        f"{STAGES} equal stages, {len(seeds)} seeds (mean ± spread of seeds), "
        + (f"trace {path}" if path else _market_words(market))
        + f"; {events:.0f} events in the mean. Equal peers; who leaves is drawn stage by stage, as "
        "Appendix I has it. The best allocation has all peers spread evenly at every moment, for "
        "nothing: planned after every event, where moves take no time. Every policy sees the same "
        f"traces and the same draws. A move downloads {STATE_BYTES / 1e9:.2f} GB (1.01 billion "
        f"parameters in {STAGES} stages, 12 bytes each).",
        "",
    ]
    for enter, label in (
        (Enter.RANDOM, "New peers enter at random stages"),
        (Enter.SLOWEST, "New peers enter at the slowest stage (3.2: “assigned to the optimal”)"),
    ):
        for download_s in (0.0, DOWNLOAD_S):
            rows = played(traces, seeds, STAGES, download_s, enter)
            say(
                f"table 5: {enter}, download {download_s:.0f} s: {rows[-2].shares[:, 0].mean():.1f}"
            )
            takes = f"{download_s:.0f} s (200 Mb/s)" if download_s else "no time"
            lines += [
                f"**{label}; a download takes {takes}.**",
                "",
                "| policy | paper: overall | first hour | last hour | ours: overall | first hour | "
                "last hour | moves | GB moved |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
            for row in rows:
                paper = PAPER_5.get(row.name)
                theirs = " | ".join(f"{x}" for x in paper) if paper else "| | "
                lines.append(f"| {row.name} | {theirs} | {row.cells()} |")
            lines.append("")
    if path is None:
        lines += _sensitivity(seeds, say)
    return lines


def _market_words(market: Market) -> str:
    return (
        f"made traces of {market.hours:g} h: {market.peers[0]} peers wanted, lives of "
        f"{market.life_s / HOUR_S:g} h in the mean, a successor after {market.replaced_s:g} s, "
        f"every {market.squeeze_s / HOUR_S:g} h in the mean another limit between "
        f"{market.least:.0%} and 100% of them, what is above it taken at once; none in the first "
        "hour"
    )


def _sensitivity(seeds: Sequence[int], say: Callable[[str], None]) -> list[str]:
    """What the answer depends on that the paper does not state."""
    base = Market()
    names = list(policies(0.0))[:-1]
    lines = [
        "**What it depends on.** Overall share (moves), new peers at random stages, no time for "
        "downloads; one parameter of the traces changed at a time.",
        "",
        "| traces | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    cases = [
        ("as above", base, Leave.STAGE),
        ("who leaves is any peer", base, Leave.PEER),
        *((f"lives of {h} h", replace(base, life_s=h * HOUR_S), Leave.STAGE) for h in (2, 4, 24)),
        *((f"{n} peers", replace(base, peers=(n,)), Leave.STAGE) for n in (40, 100, 1000)),
        ("no limits", replace(base, least=1.0), Leave.STAGE),
        ("limits down to 10%", replace(base, least=0.1), Leave.STAGE),
    ]
    for what, market, leave in cases:
        traces = [market.trace(seed) for seed in seeds]
        chosen = {name: policies(0.0)[name] for name in names}
        rows = played(traces, seeds, STAGES, 0.0, Enter.RANDOM, chosen, leave)
        cells = [f"{row.shares[:, 0].mean():.1f} ({row.moves:.0f})" for row in rows]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
        say(f"table 5: {what}: {cells}")
    return [*lines, ""]


def figure_7(seeds: Sequence[int], picture: Path, say: Callable[[str], None]) -> list[str]:
    """The section of the report, and the picture."""
    names = list(policies(0.0))[:-1]
    lines = [
        "## Figure 7: more stages",
        "",
        f"100 peers a stage at first, all else as in Table 5, new peers at random stages, no time "
        f"for downloads; {len(seeds)} seeds. Per cent of the best allocation overall, in the last "
        "hour, and moves.",
        "",
        "| stages | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    found: dict[int, list[Row]] = {}
    for stages in FIGURE_STAGES:
        market = Market(peers=(100 * stages,))
        traces = [market.trace(seed) for seed in seeds]
        chosen = {name: policies(0.0)[name] for name in names}
        rows = played(traces, seeds, stages, 0.0, Enter.RANDOM, chosen)
        cells = [
            f"{row.shares[:, 0].mean():.1f}, {row.shares[:, 2].mean():.1f} ({row.moves:.0f})"
            for row in rows
        ]
        lines.append(f"| {stages} | " + " | ".join(cells) + " |")
        found[stages] = rows
        say(f"figure 7: {stages} stages: {cells}")
    _draw(found, picture)
    about = "Share of the best allocation over time, and against the moves that it took"
    return [*lines, "", f"![{about}]({picture.name})", ""]


def _hourly(row: Row) -> Floats:
    """Share hour by hour, mean of the seeds."""
    hours = int(row.runs[0].end_s // HOUR_S)
    return np.array(
        [
            100 * np.mean([run.share(h * HOUR_S, (h + 1) * HOUR_S) for run in row.runs])
            for h in range(hours)
        ]
    )


def _draw(found: dict[int, list[Row]], path: Path) -> None:
    """By number of stages: over time, and all hours against moves."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (over, against) = plt.subplots(
        2, len(found), figsize=(13, 6.4), sharex="row", sharey="row"
    )
    for top, bottom, (stages, rows) in zip(over, against, found.items(), strict=True):
        for row in rows:
            share = _hourly(row)
            (line,) = top.plot(np.arange(len(share)) + 0.5, share, label=row.name, linewidth=1.4)
            mean = float(row.shares[:, 0].mean())
            if row.moves:  # of none a logarithm is not drawn
                bottom.plot(
                    row.moves, mean, MARKS[row.name.startswith("T =")], color=line.get_color()
                )
        top.set_title(f"{stages} stages")
        top.set_xlabel("hour")
        bottom.set_xlabel("moves")
        bottom.set_xscale("log")
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    over[0].set_ylabel("% of the best allocation")
    against[0].set_ylabel("% of the best allocation, all hours")
    handles, labels = over[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    write_picture(path, figure, dpi=110)
    plt.close(figure)


def scale(seed: int, say: Callable[[str], None]) -> list[str]:
    """How long decisions and a day take with 10,000 peers and 100 stages."""
    lines = [
        "## 10,000 peers in 100 stages",
        "",
        "Seconds of this machine. A decision: the slowest of ten, on stages that lost up to 30% of "
        "their peers each. A day: replayed with a decision every minute and downloads of 121 s, "
        "new peers at random stages. Share: of the best allocation (kinds: of a perfectly even "
        "one).",
        "",
        "| peers | policy | a decision | a day | events | share | moves |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds: dict[str, tuple[tuple[int, ...], list[float]]] = {
        "of one kind": ((10_000,), [1.0]),
        "of three kinds (speeds 1, 2.5, 5)": ((6_000, 3_000, 1_000), [1.0, 2.5, 5.0]),
    }
    for label, (peers, speeds) in kinds.items():
        speed = np.array(speeds)
        trace = Market(peers=peers, hours=24.0).trace(seed)
        chosen = policies(DOWNLOAD_S)
        for name in ("T = 60", "planned, every 60 s"):
            policy = chosen[name]
            slowest = 0.0
            for k in range(10):
                stages = _torn(peers, speed, seed + k)
                begin = time.perf_counter()
                policy.moves(stages)
                slowest = max(slowest, time.perf_counter() - begin)
            begin = time.perf_counter()
            setting = ReplayConfig(
                trace, np.ones(100), speed, DOWNLOAD_S, STATE_BYTES, enter=Enter.RANDOM
            )
            run = replay(setting, policy, seed)
            day = time.perf_counter() - begin
            lines.append(
                f"| {label} | {name} | {slowest:.3f} s | {day:.1f} s | {len(trace.time_s):,} | "
                f"{run.share():.1%} | {run.moves:,} |"
            )
            say(f"scale: {label}, {name}: decision {slowest:.3f} s, day {day:.1f} s")
    return [*lines, ""]


def _torn(peers: Sequence[int], speed: Floats, seed: int) -> SwarmState:
    """A hundred stages of unequal work, whose peers were even before some left."""
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.5, 2.0, 100)
    even = np.outer(work / work.sum(), peers)
    left = np.maximum(1, np.floor(even * rng.uniform(0.7, 1.0, (100, 1)))).astype(np.int64)
    return SwarmState(left, np.zeros_like(left), work, speed)
