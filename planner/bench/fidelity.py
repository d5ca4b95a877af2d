"""``planner bench fidelity``: predicted steps against executed ones, on emulated networks.

Needs Linux and root (see ``planner emulate``). Plans of every kind on six networks: measured ones,
with bandwidths or limits changed where said, so that bandwidth, latency, averaging or the devices'
own limits decide. Compute times are imposed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from planner.bench._stamp import stamp
from planner.compose.planning import plan
from planner.emulate.emulation import Emulation, Settings, choose, emulate
from planner.network.atomic import write_text
from planner.network.catalogue import load_network
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.search.stop import MaxIterations
from planner.training_plan.file import save_plan
from planner.training_plan.model import OuterOptimizer, Sync
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

SEED = 0
SEARCH = 20
"""Iterations of each plan's search: what matters here is not how good a plan is."""
PARTS = ("pipeline", "averaging", "step")
EIGHT = ("Belgium", "Canada", "Iowa", "Japan", "LA", "London", "Oregon", "Taiwan")
"""Locations of the 12."""
UPLOAD = (40, 20, 60, 30, 25, 50, 15, 35)
"""MB/s of each of eight devices; downloads are half as fast again, the other way round."""


def _workload(batch: int, microbatch: int, sequence: int) -> Workload:
    arch = Architecture(Family.GPT2, 8, 512, 8, 8, 2048, 4096, sequence, False)
    return Workload.transformer(
        "8 layers of 512", arch, batch_samples=batch, microbatch_samples=microbatch
    )


def _devices(flops: float, **limits: Any) -> Devices:
    return Devices(flops=flops, memory_bytes=16e9, **limits)


def _bandwidth() -> tuple[Cluster, Workload]:
    whole = load_network("gcp12_skippipe_2025_repaired")
    at = np.ix_(*[[whole.ids.index(name) for name in EIGHT]] * 2)
    network = Network(whole.latency_s[at], whole.bandwidth_bytes_per_s[at], EIGHT)
    return Cluster(network, _devices(4e12)), _workload(64, 2, 1024)


def _latency() -> tuple[Cluster, Workload]:
    network = load_network("aws8_dtfm_worldwide_2022")
    fast = network.replace(bandwidth_bytes_per_s=8 * network.bandwidth_bytes_per_s)
    return Cluster(fast, _devices(1e12)), _workload(48, 1, 512)


def _averaging() -> tuple[Cluster, Workload]:
    return Cluster(load_network("gcp12_skippipe_2025_repaired"), _devices(4e12)), _workload(
        48, 1, 512
    )


def _limits() -> tuple[Cluster, Workload]:
    upload = np.array(UPLOAD) * 1e6
    limits = {"upload_bytes_per_s": upload, "download_bytes_per_s": 1.5 * upload[::-1]}
    network = load_network("aws8_dtfm_worldwide_2022")
    return Cluster(network, _devices(4e12, **limits)), _workload(64, 2, 1024)


def _sites() -> tuple[Cluster, Workload]:
    two = load_network("aws8_dtfm_worldwide_2022")
    near = {"intra_latency_s": 5e-4, "intra_bandwidth_bytes_per_s": 5e8}
    network = two.replicate({"Oregon": 5, "Virginia": 3}, **near)
    sites = [str(region) for region in network.regions]
    lines = {"Oregon": 6e7, "Virginia": 4e7}
    shared = {"site_upload_bytes_per_s": lines, "site_download_bytes_per_s": lines}
    return Cluster(network, _devices(4e12, sites=sites, **shared)), _workload(64, 2, 1024)


def _regions() -> tuple[Cluster, Workload]:
    two = load_network("aws8_dtfm_worldwide_2022")
    near = {"intra_latency_s": 5e-4, "intra_bandwidth_bytes_per_s": 3e8}
    network = two.replicate({"Oregon": 4, "Virginia": 4}, **near)
    return Cluster(network, _devices(4e12)), _workload(64, 2, 1024)


@dataclass(frozen=True)
class Setting:
    """A network and what is trained on it."""

    about: str
    make: Callable[[], tuple[Cluster, Workload]]


SETTINGS = {
    "bandwidth": Setting("eight of gcp12_skippipe_2025_repaired", _bandwidth),
    "latency": Setting("aws8_dtfm_worldwide_2022 with 8 times the bandwidth", _latency),
    "averaging": Setting("gcp12_skippipe_2025_repaired, twelve devices", _averaging),
    "limits": Setting(
        "aws8_dtfm_worldwide_2022, uploads of 15 to 60 MB/s, downloads of 22 to 90", _limits
    ),
    "sites": Setting("five devices behind a line of 60 MB/s, three behind one of 40", _sites),
    "regions": Setting("two regions of four, 300 MB/s and 0.5 ms inside", _regions),
}


@dataclass(frozen=True)
class Case:
    """A plan to run.

    Attributes
    ----------
    setting
        Of `SETTINGS`.
    name
        Of the plan.
    fields
        What is asked of `planner.plan`.
    sync
        How often it averages.
    """

    setting: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    sync: Sync = field(default_factory=Sync)

    @property
    def key(self) -> str:
        """Setting and name."""
        return f"{self.setting}/{self.name}"


UNEQUAL = ((0, 1), (1, 3), (3, 6), (6, 8))
CASES = (
    Case("bandwidth", "4 x 2", {"stages": 4}),
    Case("bandwidth", "2 x 4", {"stages": 2}),
    Case("bandwidth", "8 x 1", {"stages": 8}),
    Case("bandwidth", "4 x 2, 3 of 4 stages", {"stages": 4, "path_stages": 3, "full_every": 0}),
    Case("bandwidth", "4 x 2, int8 boundaries", {"stages": 4, "boundary_codec": "int8"}),
    Case("latency", "4 x 2", {"stages": 4}),
    Case("latency", "8 x 1", {"stages": 8}),
    Case("latency", "4 x 2, layers 1 2 3 2", {"stages": 4, "stage_layers": UNEQUAL}),
    Case("latency", "4 x 2, 3 of 4 stages", {"stages": 4, "path_stages": 3, "full_every": 2}),
    Case("averaging", "2 x 6", {"stages": 2}),
    Case("averaging", "2 x 6, adaptive", {"stages": 2, "averaging": "adaptive"}),
    Case("averaging", "3 x 4, groups of 2", {"stages": 3, "group_size": 2}),
    Case("averaging", "2 x 6, int8", {"stages": 2, "codec": "int8"}),
    Case("limits", "4 x 2", {"stages": 4}),
    Case("limits", "4 x 2, every 4 steps", {"stages": 4}, Sync(4, OuterOptimizer())),
    Case("limits", "4 x 2, every 2 steps, delayed", {"stages": 4}, Sync(2, delayed=True)),
    Case("limits", "2 x 4, adaptive", {"stages": 2, "averaging": "adaptive"}),
    Case(
        "limits",
        "stages of 4 2 2, 2 of 3",
        {"stages": 3, "stage_sizes": (4, 2, 2), "path_stages": 2, "full_every": 0},
    ),
    Case(
        "limits", "2 x 4, adaptive, int8", {"stages": 2, "averaging": "adaptive", "codec": "int8"}
    ),
    Case("sites", "1 x 8", {"stages": 1}),
    Case("sites", "1 x 8, adaptive", {"stages": 1, "averaging": "adaptive"}),
    Case("sites", "1 x 8, adaptive, int8", {"stages": 1, "averaging": "adaptive", "codec": "int8"}),
    Case("sites", "2 x 4", {"stages": 2}),
    Case("sites", "everything open", {}),
    Case(
        "regions",
        "2 x 4, every 4 steps, regions in each",
        {"stages": 2, "sync_every": 4, "within": "region"},
        Sync(4, OuterOptimizer()),
    ),
)


@dataclass(frozen=True)
class Row:
    """One plan's result; parts in seconds as ``(predicted, executed)``."""

    key: str
    pipeline: tuple[float, float | None]
    averaging: tuple[float, float | None]
    step: tuple[float, float | None]
    speed: float
    shrink: float
    busy: float
    worst: str

    def ratio(self, part: str) -> float | None:
        """Executed over predicted; None where a plan has no such part."""
        predicted, executed = getattr(self, part)
        return None if executed is None or predicted <= 0 else executed / predicted


def measure(case: Case, settings: Settings) -> Row:
    """Make a plan and run it.

    Parameters
    ----------
    case
        Which.
    settings
        Speed, shrink and steps.

    Returns
    -------
    Row
        What was predicted and executed.
    """
    cluster, workload = SETTINGS[case.setting].make()
    made = plan(cluster, workload, stop=MaxIterations(SEARCH), seed=SEED, **case.fields).plan
    assert made is not None
    made = made.replace(sync=case.sync)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(made, path)
        done = emulate(path, made, choose(made, settings))
    for warning in done.warnings():
        print(f"{case.key}: {warning}", file=sys.stderr)
    c = done.comparison
    parts = {
        part: (pair.predicted_s, pair.executed_s) for part in PARTS if (pair := getattr(c, part))
    }
    return Row(
        case.key,
        **parts,
        speed=done.asked.speed,
        shrink=done.asked.shrink,
        busy=done.busy,
        worst=_worst(done),
    )


def _worst(done: Emulation) -> str:
    """The operation that ended latest against its prediction."""
    op = done.comparison.operations[0]
    what = op.kind if op.microbatch < 0 else f"{op.kind}{op.microbatch}"
    return f"{what} on {op.device} {op.late_s:+.3f} s"


def report(rows: Sequence[Row], settings: Settings, before: str) -> str:
    """The dated report as Markdown.

    Parameters
    ----------
    rows
        Results.
    settings
        How they were made.
    before
        The load when the benchmark began.

    Returns
    -------
    str
        Markdown.
    """
    today = datetime.now(UTC).date().isoformat()
    lines = [
        f"# Predicted against executed, {today}",
        "",
        stamp(before, ("planner", "numpy", "numba", "torch")),
        "",
        "Regenerate with `planner bench fidelity`, as root. Plans have seed "
        f"{SEED} and {SEARCH} iterations of search; imposed compute times; medians of "
        f"{settings.rest} steps from rest (pipeline, averaging), and the mean of {settings.steps} "
        "steps that chain (step). Every pair of devices has its rate, delay and queue, every "
        "device its stated limits or else its fastest pair.",
        "",
        *(f"- {name}: {setting.about}" for name, setting in SETTINGS.items()),
        "",
        f"| network | plan | {' | '.join(f'{part} s | executed | ratio' for part in PARTS)} | "
        "shrink | busy | latest operation |",
        f"|{'---|' * 14}",
    ]
    lines += [_row(row) for row in rows]
    return "\n".join([*lines, "", *summary(rows)]) + "\n"


def _row(row: Row) -> str:
    cells = row.key.split("/", 1)
    for part in PARTS:
        predicted, executed = getattr(row, part)
        ratio = row.ratio(part)
        cells += (
            ["-", "-", "-"]
            if ratio is None
            else [f"{predicted:.3f}", f"{executed:.3f}", f"{ratio:.3f}"]
        )
    cells += [f"{row.shrink:g}", f"{row.busy:.0%}", row.worst]
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> list[str]:
    """Order and worst deviations in a few lines.

    Parameters
    ----------
    rows
        Results.

    Returns
    -------
    list[str]
        Lines.
    """
    lines = []
    if len(rows) > 2:
        order = spearmanr([row.step[0] for row in rows], [row.step[1] for row in rows]).statistic
        lines.append(f"Spearman of steps: {order:.3f}.")
    for part in PARTS:
        found = [(ratio, row) for row in rows if (ratio := row.ratio(part)) is not None]
        if found:
            ratio, row = max(found, key=lambda f: abs(f[0] - 1))
            middle = statistics.median(abs(r - 1) for r, _ in found)
            lines.append(
                f"{part.capitalize()}: off by at most {abs(ratio - 1):.1%} ({row.key}, "
                f"{ratio:.3f}), by {middle:.1%} in the median."
            )
    return lines


def main(argv: Sequence[str]) -> int:
    """Run the plans and write the report; returns the exit code.

    Parameters
    ----------
    argv
        Words of the command line.

    Returns
    -------
    int
        0.
    """
    parser = argparse.ArgumentParser(prog="planner bench fidelity", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=Path("docs") / f"bench-fidelity-{today}.md")
    parser.add_argument("--results", type=Path, help="keep results here (JSON lines) and go on")
    parser.add_argument("--plans", nargs="*", default=[""], help="those whose name begins so")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rest", type=int, default=5)
    args = parser.parse_args(argv)
    settings = Settings(args.speed, None, args.steps, args.rest)
    before = f"{os.getloadavg()[0]:.1f}"
    kept = _kept(args.results)
    rows = []
    for case in CASES:
        if not case.key.startswith(tuple(args.plans)):
            continue
        row = kept.get(case.key)
        if row is None:
            begin = time.monotonic()
            row = measure(case, settings)
            took = f"   ({time.monotonic() - begin:.0f} s)"
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
        else:
            took = "   (kept)"
        print(_row(row) + took, flush=True)
        rows.append(row)
    for line in summary(rows):
        print(line)
    write_text(args.out, report(rows, settings, before))
    return 0


def _kept(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return {row.key: row for row in found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
