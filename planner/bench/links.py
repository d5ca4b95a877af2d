"""``planner bench links``: planned averaging over emulated links, measured against predicted.

Needs root and iproute2: every peer gets a network namespace whose up- and download are shaped by
htb, with a class for each other peer. Flows share a link fairly, as many long-distance flows do; in
one queue for all of them messages wait behind one another, and a few bursts at once take a link
from the rest. The paper's set-ups A (equal peers), C (fast and slow ones) and D (a server without
a GPU), scaled to eight processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from planner.bench._averaging_baselines import all_reduce_s
from planner.clock.fluid import Fluid
from planner.lp.capacity import Limits
from planner.lp.rates import best_rates
from planner.network.atomic import write_text
from planner.problems import AveragingProblem

MBIT = 1e6 / 8
PAYLOAD = 1448 / 1514
"""Of an Ethernet frame of 1514 bytes, TCP carries 1448 with its time stamps."""
FRAME = 1514
BURST = 15_000
"""Bytes that a link may catch up after a timer was late: 12 ms of the slowest."""
QUEUE = 30
"""Packets that may wait in each class."""
SEGMENTS = "2"
"""Frames in one packet of the kernel; more would go out at once, above the link's speed."""
CONTROL = "reno"
"""TCP's congestion control: in every kernel, and allowed in every namespace."""
WARM_S = 3.0
"""Before the probe counts."""

Flow = tuple[int, int]
"""From one peer to another."""


@dataclass(frozen=True)
class SetUp:
    """Peers with equal up- and download, in Mb/s; ``computes`` where they bring gradients."""

    name: str
    mbit_per_s: tuple[float, ...]
    computes: tuple[bool, ...]

    def problem(self, gradient_bytes: float) -> AveragingProblem:
        """The averaging problem, with what TCP leaves of each link.

        Parameters
        ----------
        gradient_bytes
            Bytes of the vector.

        Returns
        -------
        AveragingProblem
            Payload rates as limits.
        """
        speed = np.array(self.mbit_per_s) * MBIT * PAYLOAD
        samples = np.array(self.computes, dtype=float)
        return AveragingProblem(samples, speed, speed, 1.0, gradient_bytes)


SETUPS = (
    SetUp("A scaled: 8 x 20", (20.0,) * 8, (True,) * 8),
    SetUp("C scaled: 3 x 50 + 5 x 10", (50.0,) * 3 + (10.0,) * 5, (True,) * 8),
    SetUp(
        "D scaled: 7 x 10 + one of 125 without a GPU",
        (10.0,) * 7 + (125.0,),
        (True,) * 7 + (False,),
    ),
)


@dataclass(frozen=True)
class Measured:
    """Seconds of one strategy on one set-up."""

    setup: str
    strategy: str
    predicted_s: float
    measured_s: tuple[float, ...]

    @property
    def off(self) -> float:
        """Median measured over predicted, less 1."""
        return statistics.median(self.measured_s) / self.predicted_s - 1


@dataclass(frozen=True)
class Loaded:
    """What some flows at once get from a set-up's links.

    Attributes
    ----------
    what
        Which flows.
    fair, found
        Payload in bytes per second by flow ``(from, to)``: the max-min fair part of the nominal
        links, and what was received.
    """

    setup: str
    what: str
    fair: dict[Flow, float]
    found: dict[Flow, float]

    @property
    def parts(self) -> tuple[float, float, float]:
        """Found over fair: the flow that gets least, all together, the one that gets most."""
        each = [self.found[flow] / fair for flow, fair in self.fair.items()]
        return min(each), sum(self.found.values()) / sum(self.fair.values()), max(each)


@contextmanager
def namespaces(mbit_per_s: Sequence[float]) -> Iterator[list[str]]:
    """A network namespace per peer on one bridge; both directions of each are shaped."""
    tag = uuid.uuid4().hex[:5]
    bridge, names = f"pb{tag}", [f"pn{tag}{k}" for k in range(len(mbit_per_s))]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for k, (name, speed) in enumerate(zip(names, mbit_per_s, strict=True)):
            outer, inside = f"pv{tag}{k}", ("netns", "exec", name)
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outer, "master", bridge, "gso_max_segs", SEGMENTS, "up")
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, "ip", "addr", "add", f"{_address(k)}/24", "dev", "eth0")
            _ip(*inside, "ip", "link", "set", "eth0", "gso_max_segs", SEGMENTS, "up")
            control = "/proc/sys/net/ipv4/tcp_congestion_control"
            _ip(*inside, "sh", "-c", f"echo {CONTROL} > {control}")
            others = [j for j in range(len(names)) if j != k]
            # upload is shaped where it leaves the peer, download where it leaves the bridge
            _tc(("ip", *inside, "tc"), shape("eth0", speed, "dst", others))
            _tc(("tc",), shape(outer, speed, "src", others))
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name, check=False)
        _ip("link", "del", bridge, check=False)


def shape(device: str, mbit: float, side: str, others: Sequence[int]) -> str:
    """Lines for ``tc -batch``: at most ``mbit`` Mb/s in all, shared fairly between other peers.

    Parameters
    ----------
    side
        The address that tells the other peer: ``"dst"`` on an upload, ``"src"`` on a download.
    """
    at = f"dev {device} parent"
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 2",
        f"class add {at} 1: classid 1:1 htb rate {mbit:g}mbit burst {BURST} cburst {BURST}",
        # the rest: address resolution
        f"class add {at} 1:1 classid 1:2 htb rate 8kbit ceil {mbit:g}mbit quantum {FRAME}",
    ]
    for k in others:
        leaf = f"1:{k + 16:x}"
        lines += [
            f"class add {at} 1:1 classid {leaf} htb rate {mbit / len(others):.6f}mbit "
            f"ceil {mbit:g}mbit burst {2 * FRAME} cburst {BURST} quantum {FRAME}",
            f"qdisc add {at} {leaf} pfifo limit {QUEUE}",
            f"filter add {at} 1: protocol ip u32 match ip {side} {_address(k)}/32 flowid {leaf}",
        ]
    return "\n".join(lines) + "\n"


def _address(peer: int) -> str:
    return f"10.77.0.{peer + 1}"


def _ip(*arguments: str, check: bool = True) -> None:
    _command(("ip", *arguments), check)


def _tc(prefix: tuple[str, ...], lines: str) -> None:
    _command((*prefix, "-batch", "-"), True, lines)


def _command(command: tuple[str, ...], check: bool, given: str | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=given)
    if check and done.returncode != 0:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}; run as root with iproute2")


def fair_rates(mbit_per_s: Sequence[float], flows: Sequence[Flow]) -> dict[Flow, float]:
    """Max-min fair payload of flows without end, in bytes per second.

    Parameters
    ----------
    mbit_per_s
        Mb/s of each direction of every peer.
    flows
        Ordered pairs.

    Returns
    -------
    dict[Flow, float]
        By flow.
    """
    capacity: dict[Hashable, float] = {
        (side, k): speed * MBIT * PAYLOAD
        for k, speed in enumerate(mbit_per_s)
        for side in ("up", "down")
    }
    fluid = Fluid(capacity)
    forecasts = [
        forecast
        for i, j in flows
        for forecast in fluid.add((i, j), 1.0, math.inf, (("up", i), ("down", j)), 0.0)
    ]
    # a byte each from time 0: the last forecast tells the rate with all of them under way
    return {(f.key[0], f.key[1]): 1.0 / f.time for f in forecasts if fluid.is_due(f)}


def goodput(names: Sequence[str], flows: Sequence[Flow], seconds: float) -> dict[Flow, float]:
    """Payload in bytes per second that arrives while all flows send without end.

    Parameters
    ----------
    names
        Network namespaces, one a peer.
    flows
        Ordered pairs.
    seconds
        How long.

    Returns
    -------
    dict[Flow, float]
        By flow.
    """
    ranks = sorted({k for flow in flows for k in flow})
    processes = [
        _start(
            names[k],
            "planner.bench._link_probe",
            *("--rank", str(k), "--address", _address(k)),
            *("--to", json.dumps([_address(j) for i, j in flows if i == k])),
            *("--sources", str(sum(j == k for _, j in flows))),
        )
        for k in ranks
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        first = time.monotonic() + WARM_S
        window = f"{first} {first + seconds}\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(window)
            process.stdin.flush()
        outputs = _outputs(processes, WARM_S + seconds + 30)
    finally:
        for process in processes:
            process.kill()
    return {
        (int(sender), k): size / seconds
        for k, output in zip(ranks, outputs, strict=True)
        for sender, size in json.loads(output).items()
    }


def probe(setup: SetUp, names: Sequence[str], seconds: float) -> list[Loaded]:
    """One flow over the fastest and the slowest pair, and everybody to everybody.

    Parameters
    ----------
    setup
        The peers and their links.
    names
        Network namespaces, one a peer.
    seconds
        How long.

    Returns
    -------
    list[Loaded]
        One entry a probe.
    """
    speed = setup.mbit_per_s
    pairs = [(i, j) for i in range(len(speed)) for j in range(len(speed)) if i != j]
    by_speed = sorted(pairs, key=lambda pair: -min(speed[pair[0]], speed[pair[1]]))
    singles = {min(speed[i], speed[j]): (i, j) for i, j in (by_speed[-1], by_speed[0])}
    questions = [(f"one flow, {mbit:g} Mb/s", [pair]) for mbit, pair in singles.items()]
    return [
        Loaded(setup.name, what, fair_rates(speed, flows), goodput(names, flows, seconds))
        for what, flows in [*questions, ("all to all", pairs)]
    ]


def _start(name: str, module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """A Python module in a network namespace."""
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": root} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _outputs(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> list[str]:
    """What they print; an error of one is raised."""
    outputs = [process.communicate(timeout=limit_s) for process in processes]
    for process, (_, error) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"a process failed: {error[-500:]}")
    return [output for output, _ in outputs]


def average_in(
    names: Sequence[str],
    peers: Sequence[int],
    shares: Sequence[float],
    computes: Sequence[bool],
    values: int,
    repeats: int,
) -> tuple[float, ...]:
    """Run a rank in the namespace of each of ``peers``; returns the seconds of each repetition.

    ``shares`` and ``computes`` are theirs, in the same order.

    Parameters
    ----------
    names
        Network namespaces, one a peer.
    peers
        Number of peers.
    shares
        Fractions of the vector.
    computes
        Who contributes.
    values
        Elements of the vector.
    repeats
        How often.

    Returns
    -------
    tuple[float, ...]
        Seconds of every repeat.
    """
    processes = [
        _start(
            names[peer],
            "planner.executor.average_rank",
            *("--shares", json.dumps(list(shares)), "--contributes", json.dumps(list(computes))),
            *("--values", str(values), "--repeats", str(repeats)),
            RANK=str(rank),
            WORLD_SIZE=str(len(peers)),
            MASTER_ADDR=_address(peers[0]),
            MASTER_PORT="29511",
            GLOO_SOCKET_IFNAME="eth0",
            OMP_NUM_THREADS="1",
        )
        for rank, peer in enumerate(peers)
    ]
    try:
        outputs = _outputs(processes, 600)
    finally:
        for process in processes:
            process.kill()
    return tuple(json.loads(outputs[0].strip().splitlines()[-1]))


def measure(
    setup: SetUp, values: int, repeats: int, probe_s: float
) -> tuple[list[Loaded], list[Measured]]:
    """The links by themselves; then our shares and equal shares of those who compute.

    Parameters
    ----------
    setup
        The peers and their links.
    values
        Elements of the vector.
    repeats
        How often.
    probe_s
        Seconds for each probe.

    Returns
    -------
    tuple[list[Loaded], list[Measured]]
        Probes and averagings.
    """
    problem = setup.problem(4.0 * values)
    ours = best_rates(Limits(problem), problem.contributors)
    even = np.array(setup.computes, dtype=float) / sum(setup.computes)
    found = []
    with namespaces(setup.mbit_per_s) as names:
        loaded = probe(setup, names, probe_s)
        for strategy, shares, predicted in (
            ("ours", ours.rates / ours.rates.sum(), problem.gradient_bytes / ours.total),
            ("all-reduce", even, all_reduce_s(problem)),
        ):
            # peers that only receive in an all-reduce do not take part in it
            active = range(len(names)) if strategy == "ours" else np.flatnonzero(even).tolist()
            seconds = average_in(
                names,
                active,
                [float(shares[i]) for i in active],
                [setup.computes[i] for i in active],
                values,
                repeats,
            )
            found.append(Measured(setup.name, strategy, predicted, seconds))
    return loaded, found


def report(
    loaded: Sequence[Loaded], rows: Sequence[Measured], values: int, repeats: int, before: str
) -> str:
    """The dated report as Markdown; ``before``: the load when the benchmark started.

    Parameters
    ----------
    loaded
        Probes of the links.
    rows
        Measured averagings.
    values
        Elements of the vector.
    repeats
        How often.
    before
        The load when the benchmark began.

    Returns
    -------
    str
        Markdown.
    """
    today = datetime.now(UTC).date().isoformat()
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "torch"))
    kernel = ".".join(platform.release().split(".")[:2])
    lines = [
        f"# Planned averaging over emulated links, {today}",
        "",
        f"Python {platform.python_version()}, {packages}; {platform.system()} {kernel} on "
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; load {before} before.",
        "",
        f"Regenerate with `planner bench links --values {values} --repeats {repeats}`, as root. "
        "Vectors are normal random numbers; rank r's in repetition k has seed 1000 k + r.",
        "",
        "Eight processes of the executor, each in a network namespace. Up- and download are shaped "
        "by htb with one class for each other peer (equal parts, lent to one another), "
        f"{QUEUE} packets of at most {SEGMENTS} frames each; TCP {CONTROL}. No latency is added. "
        "Predictions come from the nominal speeds: of a frame of 1514 bytes TCP carries 1448; "
        "acknowledgements, which take up to 2% of the opposite direction, and the start and end "
        "of an averaging, when not all links are busy, are not in them.",
        "",
        "## The links by themselves",
        "",
        "Plain TCP flows without end; payload that arrives, in Mb/s and over the max-min fair "
        "parts of the nominal links.",
        "",
        "| set-up (Mb/s) | flows | fair, all | found, all | all | slowest flow | fastest flow |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in loaded:
        least, mean, most = row.parts
        fair, found = (sum(r.values()) / MBIT for r in (row.fair, row.found))
        lines.append(
            f"| {row.setup} | {row.what} | {fair:.2f} | {found:.2f} | {mean:.1%} | {least:.1%} | "
            f"{most:.1%} |"
        )
    lines += [
        "",
        "## Averaging",
        "",
        f"{values:,} 32-bit values, {repeats} repetitions; the slowest rank counts, and the first, "
        "which also opens connections, does not.",
        "",
        "| set-up (Mb/s) | strategy | predicted s | measured s, median (all) | off |",
        "|---|---|---|---|---|",
    ]
    for done in rows:
        every = ", ".join(f"{s:.2f}" for s in done.measured_s)
        lines.append(
            f"| {done.setup} | {done.strategy} | {done.predicted_s:.2f} | "
            f"{statistics.median(done.measured_s):.2f} ({every}) | {done.off:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure all set-ups and write the report; returns the exit code.

    Parameters
    ----------
    argv
        Words of the command line; None: of this process.

    Returns
    -------
    int
        0.
    """
    parser = argparse.ArgumentParser(prog="planner bench links", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=Path("docs") / f"bench-links-{today}.md")
    parser.add_argument("--values", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--probe-seconds", type=float, default=5.0)
    args = parser.parse_args(argv)
    before = f"{os.getloadavg()[0]:.1f}"
    loaded: list[Loaded] = []
    rows: list[Measured] = []
    for setup in SETUPS:
        links, found = measure(setup, args.values, args.repeats, args.probe_seconds)
        loaded += links
        rows += found
        for link in links:
            print(f"{setup.name}: {link.what}: {link.parts[1]:.1%} of nominal")
        print(f"{setup.name}: {', '.join(f'{r.strategy} {r.off:+.1%}' for r in found)}", flush=True)
    write_text(args.out, report(loaded, rows, args.values, args.repeats, before))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
