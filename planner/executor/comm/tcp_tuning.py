"""TCP tuning, so that a connection reaches its rate at once, also after a pause.

Linux restarts an idle connection with a small window, and a step has many pauses. The setting
applies to the whole network namespace: it is changed where permitted, and restored when the last
rank of the namespace has ended, however it ends; both are reported.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from planner.executor.comm.device_identity import network_namespace_id
from planner.executor.transport.connections import (
    ConnectionReset,
    DuplexChannels,
    describe_peer,
    peer_name,
    receive_into,
    send_all,
)

SETTING = "net.ipv4.tcp_slow_start_after_idle"
FILE = Path("/proc/sys", *SETTING.split("."))
RESTORE = 'cat >/dev/null; rm -f "$1"; echo 1 >"$0"'
"""Shell command that restores the setting when all ranks have closed the FIFO that it reads."""
_HELD: dict[Path, int] = {}
"""Descriptors of FIFOs, by setting; the system closes them when the process ends."""
MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 23
"""Bytes sent in each direction of a connection before the first step, to grow its window."""


def disable_slow_start_after_idle(file: Path = FILE) -> None:
    """Disable slow start after idle until the last process that has called this ends."""
    if file in _HELD:
        return
    try:
        is_zero = file.read_text().strip() == "0"
    except OSError:
        return  # another system: nothing to set
    fifo = _fifo(file)
    with suppress(OSError):  # no FIFO, or none that a guard reads
        _HELD[file] = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        return
    if is_zero:
        return  # set by the administrator
    try:
        with file.open("r+") as setting:
            _HELD[file] = _start_guard(file, fifo)
            setting.write("0\n")
    except OSError:
        print(
            f"planner.executor: {SETTING} is 1 and may not be changed here: connections start "
            f"slowly after every pause; as root: sysctl -w {SETTING}=0",
            file=sys.stderr,
            flush=True,
        )
        return
    print(f"planner.executor: {SETTING} is 0 for this run, 1 again after it", file=sys.stderr)


def grow_windows(
    channels: Collection[DuplexChannels], bandwidth_delay_bytes: Mapping[int, float]
) -> None:
    """Send and receive the bandwidth-delay product of each connection, all at once.

    Not where `uses_network` is false. Both ends evaluate it identically for each connection.
    """
    size = {
        other: int(min(max(2 * product, MIN_BYTES), MAX_BYTES))
        for other, product in bandwidth_delay_bytes.items()
    }
    outgoing = [
        one for channel in channels for one in channel.outgoing.items() if uses_network(one[1])
    ]
    incoming = [
        one for channel in channels for one in channel.incoming.items() if uses_network(one[1])
    ]
    with ThreadPoolExecutor(max_workers=max(len(outgoing) + len(incoming), 1)) as pool:
        tasks = []
        for other, connection in outgoing:
            data = memoryview(bytes(size[other]))
            tasks.append(pool.submit(send_all, connection, data))
        for other, connection in incoming:
            buffer = memoryview(bytearray(size[other]))
            tasks.append(pool.submit(receive_into, connection, buffer))
        for task in tasks:
            task.result()


def uses_network(connection: socket.socket) -> bool:
    """Whether a connection may use a network; raises `ConnectionReset` if its peer has gone."""
    if connection.family == socket.AF_UNIX:
        return False
    try:
        address = connection.getpeername()[0]
    except OSError as error:
        raise ConnectionReset(
            f"{describe_peer(connection)} is gone ({error})", peer_name(connection)
        ) from None
    return not ipaddress.ip_address(address).is_loopback


def _fifo(file: Path) -> Path:
    """The FIFO that all ranks of this network namespace hold open."""
    key = zlib.crc32(f"{file} {network_namespace_id()}".encode())
    return Path(tempfile.gettempdir(), f"planner-tcp-{os.getuid()}-{key:08x}")


def _start_guard(file: Path, fifo: Path) -> int:
    """Start the process that restores the setting; returns the descriptor that holds it back."""
    own = fifo.with_name(f"{fifo.name}.{os.getpid()}")
    os.mkfifo(own, 0o600)
    # named only once it is read, so that a FIFO without reader is one that a killed guard left
    reader = os.open(own, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.set_blocking(reader, True)
        writer = os.open(own, os.O_WRONLY)
        subprocess.Popen(
            ["/bin/sh", "-c", RESTORE, str(file), str(fifo)],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        own.replace(fifo)
    finally:
        os.close(reader)
    return writer
