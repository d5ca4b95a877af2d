"""One device of a link measurement: sends messages and records when those of others arrive.

``python -m benchmarks.link_probe`` runs in the device's namespace. It prints a line once all
connections are open, reads the begin (monotonic clock) and end times, and prints a JSON list
``[source, sent_s, arrived_s]`` of the messages that arrived.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import time
from contextlib import suppress
from threading import Thread

PORT = 29512
HEAD = struct.Struct("!d")


def main() -> int:
    """Send and receive messages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--address", required=True, help="this device's")
    parser.add_argument(
        "--to", required=True, help="JSON list of [address, bytes, messages, gap_s]"
    )
    parser.add_argument("--sources", type=int, required=True, help="how many send to this device")
    args = parser.parse_args()
    with socket.create_server((args.address, PORT), backlog=128) as server:
        flows = [
            (_connect(a, args.device, n), n, count, gap) for a, n, count, gap in json.loads(args.to)
        ]
        receiving = [server.accept()[0] for _ in range(args.sources)]
    for connection in receiving:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("ready", flush=True)
    first, last = (float(word) for word in sys.stdin.readline().split())
    arrived: list[tuple[int, float, float]] = []
    threads = [Thread(target=_send, args=(*flow, first), daemon=True) for flow in flows]
    threads += [Thread(target=_note, args=(c, arrived), daemon=True) for c in receiving]
    for thread in threads:
        thread.start()
    time.sleep(max(last - time.monotonic(), 0.0))
    print(json.dumps(list(arrived)), flush=True)
    return 0


def _connect(address: str, device: int, size: int) -> socket.socket:
    until = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=60)
        except OSError:
            # the other side may not be listening yet
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(struct.pack("!ii", device, size))
            return connection


def _send(connection: socket.socket, size: int, count: int, gap_s: float, first: float) -> None:
    rest = bytes(size - HEAD.size)
    # the other side closes at its end time
    with suppress(OSError):
        for k in range(count):
            time.sleep(max(first + k * gap_s - time.monotonic(), 0.0))
            connection.sendall(HEAD.pack(time.monotonic()) + rest)


def _note(connection: socket.socket, arrived: list[tuple[int, float, float]]) -> None:
    with suppress(OSError):
        source, size = struct.unpack("!ii", connection.recv(8, socket.MSG_WAITALL))
        while len(message := connection.recv(size, socket.MSG_WAITALL)) == size:
            arrived.append((source, HEAD.unpack_from(message)[0], time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
