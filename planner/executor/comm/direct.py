"""Transfers from GPU to GPU without the host, between ranks of one machine.

NCCL has no tags: a transfer is a pair of calls, each of which occupies a GPU until the other is
made. Both ends therefore agree first, by messages on their connection: memory is ready, data is
ready, it is my turn. A rank runs one transfer at a time. The lower of two ranks requests both turns
while it holds its own, and releases it if the higher one's is taken. So a rank that holds its turn
waits for an answer only, some request is always granted (that to the highest rank asked), and a GPU
starts no transfer that its peer does not start at once.
"""

from __future__ import annotations

import enum
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import is_nccl_available
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.executor.comm.connections import (
    ConnectionLost,
    ConnectionReset,
    count_sent,
    named,
    receive_into,
    send_all,
)
from planner.executor.launch.options import Library
from planner.executor.rendezvous.address import NCCL_INTERFACE, require_nccl_interface
from planner.executor.rendezvous.process_group import TIMEOUT, WATCHED, ProcessGroup
from planner.executor.runtime.device_backend import DeviceBackend
from planner.executor.runtime.device_identity import gpu_of, machine, network

LOCAL = "127.0.0.1"
AGAIN_S = (5e-5, 1e-4, 2e-4, 5e-4)
"""Delays before requesting turns again; the last one repeats."""
OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of this rank's GPU, whatever the peer did."""
KEPT: list[object] = []
"""Groups kept until the process ends, since destroying one waits for its other members."""


class TransferBackend(Protocol):
    """The part of a PyTorch process group that is used; ranks count within it."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Start to send; returns a handle to wait for."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Start to receive; returns a handle to wait for."""


class TurnMessage(enum.IntEnum):
    """Messages between both ends around a transfer."""

    ROOM = 1
    MADE = 2
    TURN = 3
    GO = 4
    LATER = 5


class DeviceTransfers:
    """A rank's transfers to and from others of its machine, one at a time.

    Parameters
    ----------
    members
        Ranks that reach each other, ascending.
    rank
        This rank, one of them.
    name
        Names the device of a rank.
    carrier
        Name of the library.
    """

    def __init__(
        self,
        group: TransferBackend,
        members: Sequence[int],
        rank: int,
        side: DeviceBackend,
        name: Callable[[int], str] = str,
        carrier: str = "",
    ) -> None:
        self.members, self.carrier = frozenset(members), carrier
        self._number = {member: number for number, member in enumerate(members)}
        self._group, self._rank, self._side, self._name = group, rank, side, name
        self._turn = threading.Lock()

    def reaches(self, ranks: Collection[int]) -> bool:
        """Whether all ranks are members."""
        return self.members.issuperset(ranks)

    def send(self, connection: socket.socket, other: int, made: Tensor) -> None:
        """Send to a member, and wait until it has been sent."""
        _hear(connection, TurnMessage.ROOM)
        _say(connection, TurnMessage.MADE)
        with self._both_turns(connection, other):
            self._carry(other, self._group.send, made)
        count_sent(connection, made.nbytes)

    def receive(self, connection: socket.socket, other: int, room: Tensor) -> None:
        """Receive from a member, and wait until it is complete."""
        _say(connection, TurnMessage.ROOM)
        _hear(connection, TurnMessage.MADE)
        with self._both_turns(connection, other):
            self._carry(other, self._group.recv, room)

    def connect(self, others: Collection[int]) -> None:
        """Let the library connect with members in both directions."""
        word = self._side.device_buffer((1,), torch.uint8)
        # the first remaining pair can always proceed
        for other in sorted(others, key=lambda o: (min(self._rank, o), max(self._rank, o))):
            ways = [self._group.send, self._group.recv]
            for way in ways if self._rank < other else reversed(ways):
                self._carry(other, way, word)

    @contextmanager
    def _both_turns(self, connection: socket.socket, other: int) -> Iterator[None]:
        asks = self._asks if self._rank < other else self._answers
        asks(connection)
        try:
            yield
        finally:
            self._turn.release()

    def _asks(self, connection: socket.socket) -> None:
        """Take both turns, if the other end's is free."""
        times = 0
        while True:
            self._turn.acquire()
            _say(connection, TurnMessage.TURN)
            if _hear(connection, TurnMessage.GO, TurnMessage.LATER) is TurnMessage.GO:
                return
            self._turn.release()
            time.sleep(AGAIN_S[min(times, len(AGAIN_S) - 1)])
            times += 1

    def _answers(self, connection: socket.socket) -> None:
        """Grant the turn to a request while it is free."""
        while True:
            _hear(connection, TurnMessage.TURN)
            if self._turn.acquire(blocking=False):
                _say(connection, TurnMessage.GO)
                return
            _say(connection, TurnMessage.LATER)

    def _carry(self, other: int, way: Callable[..., Any], tensor: Tensor) -> None:
        try:
            self._side.run_beside(lambda: way([tensor], self._number[other], 0).wait())
        except OWN_ERRORS:
            raise
        except RuntimeError as error:
            # the failing end is not known
            said = (str(error).splitlines() or [""])[0]
            pair = " and ".join(repr(self._name(rank)) for rank in sorted((self._rank, other)))
            raise ConnectionLost(f"{self.carrier} between {pair} has failed ({said})") from None


def _say(connection: socket.socket, word: TurnMessage) -> None:
    send_all(connection, memoryview(bytes([word])))


def _hear(connection: socket.socket, *due: TurnMessage) -> TurnMessage:
    found = bytearray(1)
    receive_into(connection, memoryview(found))
    for word in due:
        if found[0] == word:
            return word
    names = " or ".join(word.name for word in due)
    raise ConnectionReset(f"{named(connection)} said {found[0]} where {names} was due")


def open_device_transfers(
    library: Library, ranks: ProcessGroup, device: torch.device, side: DeviceBackend, store: Store
) -> DeviceTransfers | None:
    """Create the transfers of this rank; a collective call."""
    if library is Library.NCCL and not is_nccl_available():
        raise ValueError("--direct nccl: this PyTorch is built without NCCL; leave it out")
    told = ranks.all_gather("direct/place", json.dumps(gpu_location(library, ranks.rank, device)))
    places = [None if place is None else tuple(place) for place in map(json.loads, told)]
    own = [r for r, place in enumerate(places) if place is not None and places.count(place) == 1]
    machines = {r: places[r][0] for r in own}  # type: ignore[index]
    crowd = list(machines.values())
    if all(crowd.count(one) < 2 for one in crowd):
        raise ValueError(
            f"--direct {library}: no two ranks of a machine have a GPU each for themselves, "
            f"so that nothing could go from GPU to GPU; leave it out"
        )
    members = [r for r in own if machines[r] == machines.get(ranks.rank)]
    if len(members) < 2:
        return None
    # ranks may reach their first transfer at very different times
    store.set_timeout(WATCHED)
    group = _group(library, PrefixStore(f"direct/{members[0]}", store), members, ranks.rank)
    KEPT.append(group)
    return DeviceTransfers(group, members, ranks.rank, side, ranks.name, library)


def gpu_location(library: Library, rank: int, device: torch.device) -> tuple[str, str] | None:
    """Machine and GPU of a rank.

    Returns
    -------
    tuple[str, str] or None
        The same for all ranks on the GPU; None without a GPU.
    """
    # ranks in separate network namespaces cannot reach each other
    here = f"{machine()} {network()}"
    if library is Library.GLOO:
        return here, str(rank)
    return (here, gpu_of(device)[1]) if device.type == "cuda" else None


def _group(library: Library, store: Store, members: Sequence[int], rank: int) -> TransferBackend:
    number, size = list(members).index(rank), len(members)
    # backends are imported here: builds without one lack its class; members are on one machine
    if library is Library.GLOO:
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        how: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        how._devices, how._timeout = [ProcessGroupGloo.create_device(hostname=LOCAL)], TIMEOUT
        return cast(TransferBackend, ProcessGroupGloo(store, number, size, how))
    os.environ.setdefault(NCCL_INTERFACE, "=lo")
    require_nccl_interface()
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = TIMEOUT
    return cast(TransferBackend, ProcessGroupNCCL(store, number, size, options))
