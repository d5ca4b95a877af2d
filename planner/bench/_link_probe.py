"""One peer of a measurement of links: sends without end, counts what it receives in a while.

``python -m planner.bench._link_probe`` in the peer's network namespace. It prints a line once all
connections stand, reads the window's first and last second (of the monotonic clock) and prints the
bytes that arrived in between as JSON, by sender.
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
PIECE = 1 << 16


def main() -> int:
    """Send, receive and count; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="this peer's")
    parser.add_argument("--to", required=True, help="JSON list of addresses")
    parser.add_argument("--sources", type=int, required=True, help="how many send to this peer")
    args = parser.parse_args()
    with socket.create_server((args.address, PORT), backlog=64) as server:
        sending = [_connect(address, args.rank) for address in json.loads(args.to)]
        receiving = [server.accept()[0] for _ in range(args.sources)]
    senders = [_number(connection) for connection in receiving]
    print("ready", flush=True)
    first, last = (float(word) for word in sys.stdin.readline().split())
    counts = dict.fromkeys(senders, 0)
    threads = [Thread(target=_send, args=(c,), daemon=True) for c in sending]
    threads += [
        Thread(target=_count, args=(c, sender, counts, first, last), daemon=True)
        for c, sender in zip(receiving, senders, strict=True)
    ]
    for thread in threads:
        thread.start()
    time.sleep(max(last - time.monotonic(), 0.0))
    print(json.dumps(counts), flush=True)
    return 0


def _connect(address: str, rank: int) -> socket.socket:
    until = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=60)
        except OSError:
            # the other one may not listen yet
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            connection.sendall(struct.pack("!i", rank))
            return connection


def _number(connection: socket.socket) -> int:
    data = connection.recv(4, socket.MSG_WAITALL)
    return int(struct.unpack("!i", data)[0])


def _send(connection: socket.socket) -> None:
    piece = bytes(PIECE)
    # the other side ends when its window does
    with suppress(OSError):
        while True:
            connection.sendall(piece)


def _count(
    connection: socket.socket, sender: int, counts: dict[int, int], first: float, last: float
) -> None:
    buffer = bytearray(PIECE)
    with suppress(OSError):
        while size := connection.recv_into(buffer):
            if first <= time.monotonic() < last:
                counts[sender] += size


if __name__ == "__main__":
    sys.exit(main())
