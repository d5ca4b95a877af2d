"""Rates and latencies of an emulated network, measured with plain TCP messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.emulate.fair_rates import fair_rates
from planner.emulate.links import EmulatedLinks
from planner.emulate.namespaces import EmulationError
from planner.emulate.network import EmulatedNetwork, package_path

HEAD_START_S = 0.5
"""Seconds from the last connection to the first message."""
ENDLESS = 10**9


class Flow(NamedTuple):
    """Messages sent one after another over one connection.

    Attributes
    ----------
    message_bytes, messages
        Size and number of messages.
    gap_s
        Least time between two messages, in seconds.
    """

    source: int
    destination: int
    message_bytes: int
    messages: int = ENDLESS
    gap_s: float = 0.0


class Arrived(NamedTuple):
    """A message; times in seconds since the start."""

    sent_s: float
    arrived_s: float


def fair_shares(links: EmulatedLinks, flows: Sequence[Flow]) -> dict[tuple[int, int], float]:
    """Compute the fair rate of each pair if all send without pause.

    Returns
    -------
    dict
        Bytes per second by source and destination.
    """
    n = links.devices
    pairs = np.array([flow.source * n + flow.destination for flow in flows], dtype=np.int64)
    rate = np.zeros(n * n)
    room = np.zeros(len(links.capacity))
    fair_rates(links, pairs, room, room.astype(np.int64), rate)
    return {
        (flow.source, flow.destination): float(rate[p])
        for flow, p in zip(flows, pairs, strict=True)
    }


def send(
    network: EmulatedNetwork, flows: Sequence[Flow], seconds: float
) -> dict[tuple[int, int], list[Arrived]]:
    """Run all flows at the same time.

    Returns
    -------
    dict
        Received messages by source and destination.
    """
    devices = sorted({d for flow in flows for d in flow[:2]})
    processes = {d: _start(network, flows, d) for d in devices}
    try:
        for process in processes.values():
            assert process.stdout is not None
            process.stdout.readline()
        first = time.monotonic() + HEAD_START_S
        window = f"{first} {first + seconds}\n"
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.write(window)
            process.stdin.flush()
        found: dict[tuple[int, int], list[Arrived]] = {}
        for device, process in processes.items():
            output, error = process.communicate(timeout=seconds + 30)
            if process.returncode != 0:
                raise EmulationError(f"a measuring process failed: {error[-500:]}")
            for source, sent_s, arrived_s in json.loads(output):
                arrived = Arrived(sent_s - first, arrived_s - first)
                found.setdefault((source, device), []).append(arrived)
    finally:
        for process in processes.values():
            process.kill()
    return found


def goodput(
    network: EmulatedNetwork, flows: Sequence[Flow], warm_s: float, seconds: float
) -> dict[tuple[int, int], float]:
    """Measure received rates while all flows send without pause.

    Returns
    -------
    dict
        Bytes per second by source and destination.
    """
    arrived = send(network, flows, warm_s + seconds)
    sizes = {(flow.source, flow.destination): flow.message_bytes for flow in flows}
    return {
        pair: size * sum(m.arrived_s >= warm_s for m in arrived.get(pair, ())) / seconds
        for pair, size in sizes.items()
    }


def _start(network: EmulatedNetwork, flows: Sequence[Flow], device: int) -> subprocess.Popen[str]:
    to = [
        (network.addresses[flow.destination], flow.message_bytes, flow.messages, flow.gap_s)
        for flow in flows
        if flow.source == device
    ]
    command = [
        *(sys.executable, "-m", "benchmarks.link_probe"),
        *("--device", str(device), "--address", network.addresses[device]),
        *("--to", json.dumps(to)),
        *("--sources", str(sum(flow.destination == device for flow in flows))),
    ]
    return network.start(
        device, command, os.environ | {"PYTHONPATH": package_path()}, stdin=subprocess.PIPE
    )
