"""TCP tuning, so that a connection reaches its rate at once, also after a pause.

Linux restarts an idle connection with a small window, and a step has many pauses. The setting
applies to the whole network namespace: it is changed for the run where permitted, and restored
however the run ends; both are reported.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

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
RESTORE = 'cat >/dev/null; echo 1 >"$0"'
"""Shell command that restores the setting when its input is closed, at the latest when this process
ends."""
RESTORE_TIMEOUT_S = 2.0
MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 23
"""Bytes sent in each direction of a connection before the first step, to grow its window."""


@contextmanager
def disable_slow_start_after_idle(
    file: Path = FILE, on_exit: Callable[[Callable[[], None]], None] = lambda restore: None
) -> Iterator[None]:
    """Disable slow start after idle while the block runs."""
    changed = _write_zero(file)
    # must survive this process
    guard = _start_guard(file) if changed else None

    def restore() -> None:
        if guard is not None and guard.stdin is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                guard.stdin.close()
                guard.wait(RESTORE_TIMEOUT_S)
        if changed:
            with suppress(OSError):
                file.write_text("1\n")

    on_exit(restore)
    try:
        yield
    finally:
        restore()


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


def _start_guard(file: Path) -> subprocess.Popen[bytes] | None:
    """A process that restores the setting if this one is killed; None if it cannot be started."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", RESTORE, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None


def _write_zero(file: Path) -> bool:
    """Whether the setting was 1 and is 0 now."""
    try:
        if file.read_text().strip() == "0":
            return False
    except OSError:
        return False  # another system: nothing to set
    try:
        file.write_text("0\n")
    except OSError:
        print(
            f"planner.executor: {SETTING} is 1 and may not be changed here: connections start "
            f"slowly after every pause; as root: sysctl -w {SETTING}=0",
            file=sys.stderr,
            flush=True,
        )
        return False
    print(f"planner.executor: {SETTING} is 0 for this run, 1 again after it", file=sys.stderr)
    return True
