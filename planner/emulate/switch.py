"""The switch: forwards packets between TUN devices as the emulated network does.

The loop is compiled and calls the C library directly, since it shares two cores with all ranks.
`serve_switch` runs it.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from planner.emulate.links import EmulatedLinks
from planner.emulate.namespaces import HEADER_BYTES
from planner.emulate.queues import (
    FREE,
    LOST,
    TRAVELLING,
    Queues,
    advance,
    arrive,
    next_event,
    pop,
    release,
    settle,
)
from planner.search.compiled import at_first_use

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TICK_S, LONG_TICK_S = 2e-4, 4e-4
"""Shortest and longest sleep while packets are in the network, in seconds."""
READS = 64
"""Most packets read from a device before the next device."""
CLOCK_MONOTONIC = 1
POLLIN = 1

_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_read: Any = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))
_write: Any = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp))
_poll: Any = types.ExternalFunction(
    "ppoll", types.int32(types.intp, types.intp, types.intp, types.intp)
)


class Ports(NamedTuple):
    """Descriptors and buffers of the loop.

    Attributes
    ----------
    tuns
        Descriptor of each TUN device.
    polled
        ``struct pollfd`` of each device, and of standard input at the end, as pairs of integers.
    data
        ``uint8[slots, bytes]``, the packets.
    size
        Packet size by slot, in bytes.
    moment
        Buffer for one ``struct timespec``.
    late
        Number of delivered packets, and their total and largest delay in seconds.
    """

    tuns: Ints
    polled: NDArray[np.int32]
    data: Bytes
    size: Ints
    moment: Ints
    late: Floats


@at_first_use
def monotonic(ports: Ports) -> float:
    """Return the monotonic clock in seconds."""
    _clock(CLOCK_MONOTONIC, ports.moment.ctypes.data)
    return float(ports.moment[0] + 1e-9 * ports.moment[1])


@at_first_use
def wait(ports: Ports, seconds: float) -> None:
    """Sleep at most ``seconds`` while packets are in the network, otherwise until one arrives.

    Waking up costs more than handling a packet, so packets of a tick are handled together.
    """
    if seconds < np.inf:
        ports.moment[0], ports.moment[1] = 0, int(min(max(seconds, TICK_S), LONG_TICK_S) * 1e9)
        _poll(0, 0, ports.moment.ctypes.data, 0)
        ports.moment[1] = 0
    else:
        ports.moment[0], ports.moment[1] = 1, 0
    _poll(ports.polled.ctypes.data, len(ports.polled), ports.moment.ctypes.data, 0)


@at_first_use
def payload_of(packet: Bytes, size: int) -> int:
    """Return the payload bytes of an IPv4 packet, for TCP without TCP headers."""
    header = 4 * (packet[0] & 15)
    if packet[9] == 6:
        header += 4 * (packet[header + 12] >> 4)
    return int(size - header)


@at_first_use
def device_of(packet: Bytes) -> int:
    """Return the destination device of an IPv4 packet; -1 for other packets."""
    if packet[0] >> 4 != 4 or packet[16] != 10 or packet[17] != 77:
        return -1
    return int(packet[18]) * 256 + int(packet[19]) - 1


@at_first_use
def take(links: EmulatedLinks, q: Queues, ports: Ports, source: int, now: float) -> bool:
    """Read a device's packets; return whether rates must be recomputed."""
    changed = False
    devices = len(ports.tuns)
    for _ in range(READS):
        # without a free slot, read the packet into the reserved last slot and drop it
        full = q.numbers[FREE] == 0
        slot = len(ports.size) - 1 if full else q.free[q.numbers[FREE] - 1]
        data = ports.data[slot]
        size = _read(ports.tuns[source], data.ctypes.data, len(data))
        if size <= 0:
            break
        packet = data[HEADER_BYTES:]
        target = device_of(packet)
        if target < 0 or target >= devices or target == source:
            continue
        if full:
            q.numbers[LOST] += 1
            continue
        q.numbers[FREE] -= 1
        ports.size[slot] = size
        payload = payload_of(packet, size - HEADER_BYTES)
        changed |= arrive(links, q, slot, source * devices + target, payload, now)
    return changed


@at_first_use
def hand_over(q: Queues, ports: Ports, now: float) -> None:
    """Write the packets that have arrived."""
    while q.numbers[TRAVELLING] > 0 and q.due[q.travelling[0]] <= now:
        slot = pop(q)
        target = q.pair[slot] % len(ports.tuns)
        _write(ports.tuns[target], ports.data[slot].ctypes.data, ports.size[slot])
        late = now - q.due[slot]
        ports.late[0] += 1
        ports.late[1] += late
        ports.late[2] = max(ports.late[2], late)
        release(q, slot)


@at_first_use
def carry(links: EmulatedLinks, q: Queues, ports: Ports) -> None:
    """Run the switch until standard input closes."""
    devices = len(ports.tuns)
    while True:
        now = monotonic(ports)
        advance(links, q, now)
        hand_over(q, ports, now)
        changed = False
        for device in range(devices):
            # revents is the upper half of a pollfd's second word
            if ports.polled[device, 1] >> 16:
                changed |= take(links, q, ports, device, now)
        if changed:
            settle(links, q, now)
        if ports.polled[devices, 1] >> 16:
            return
        now = monotonic(ports)
        wait(ports, next_event(q) - now)


def ports_of(tuns: list[int], slots: int, packet_bytes: int) -> Ports:
    """Allocate buffers for the packets of TUN devices."""
    polled = np.zeros((len(tuns) + 1, 2), dtype=np.int32)
    polled[:, 0] = [*tuns, sys.stdin.fileno()]
    polled[:, 1] = POLLIN
    return Ports(
        tuns=np.array(tuns, dtype=np.int64),
        polled=polled,
        # pages are allocated on first use
        data=np.empty((slots + 1, packet_bytes + HEADER_BYTES), dtype=np.uint8),
        size=np.zeros(slots + 1, dtype=np.int64),
        moment=np.zeros(2, dtype=np.int64),
        late=np.zeros(3),
    )
