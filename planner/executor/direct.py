"""From GPU to GPU without the host: messages between ranks of one machine that each have their own.

NCCL names no messages: a transfer is a pair of calls, one at each end, and each of them keeps a GPU
waiting until the other one comes. So both ends agree first, by words on the connection that would
else carry the bytes: there is room, it is made, it is my turn. A rank does one transfer at a time,
and of two ranks the lower takes its turn first. So nobody whose turn it is waits for a message that
is not made or for room that is not there, those who wait for each other's turns wait for higher and
higher ranks, which ends, and a GPU begins no transfer that its peer does not begin at once.
"""

from __future__ import annotations

import enum
import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import is_nccl_available
from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.executor.connections import (
    Connection,
    TornError,
    named,
    receive_into,
    send_all,
)
from planner.executor.options import Library
from planner.executor.place import gpu_of, machine, network
from planner.executor.ranks import Ranks
from planner.executor.side import Side

LOCAL = "127.0.0.1"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""Names the network interface on which NCCL's ranks meet."""
TIMEOUT = timedelta(minutes=10)
"""Of a transfer; who is gone is noticed by others before that."""


class Transfers(Protocol):
    """What is asked of a process group of PyTorch: ranks count within it."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Begin to send; what it returns waits."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Begin to receive; what it returns waits."""


class Word(enum.IntEnum):
    """What both ends of a connection tell each other around a transfer."""

    ROOM = 1
    MADE = 2
    TURN = 3
    GO = 4


class Direct:
    """A rank's transfers to and from the others of its machine, one at a time.

    Parameters
    ----------
    group
        Of the members.
    members
        Ranks that reach each other so, ascending.
    rank
        This process, one of them.
    side
        Where it computes.

    Attributes
    ----------
    members
        As given.
    """

    def __init__(self, group: Transfers, members: Sequence[int], rank: int, side: Side) -> None:
        self.members = frozenset(members)
        self._place = {member: place for place, member in enumerate(members)}
        self._group, self._rank, self._side = group, rank, side
        self._turn = threading.Lock()

    def reaches(self, ranks: Collection[int]) -> bool:
        """Whether all of some ranks are members."""
        return self.members.issuperset(ranks)

    def send(self, connection: socket.socket, other: int, made: Callable[[], Tensor]) -> None:
        """Send to a member, and wait until it has left.

        Parameters
        ----------
        connection
            To the member, for words.
        other
            Its rank.
        made
            Waits until what is sent is complete where operations compute, and gives it.

        Raises
        ------
        TornError
            The member is gone.
        """
        tensor = made()
        _hear(connection, Word.ROOM)
        _say(connection, Word.MADE)
        with self._both_turns(connection, other):
            self._carry(connection, lambda: self._group.send([tensor], self._place[other], 0))
        if isinstance(connection, Connection):
            connection.sent_bytes += tensor.nbytes

    def receive(self, connection: socket.socket, other: int, room: Tensor) -> None:
        """Receive from a member, and wait until all of it is there.

        Parameters
        ----------
        connection
            From the member, for words.
        other
            Its rank.
        room
            Where it goes, of `planner.executor.side.Side.own`, or with nothing under way there.

        Raises
        ------
        TornError
            The member is gone.
        """
        _say(connection, Word.ROOM)
        _hear(connection, Word.MADE)
        with self._both_turns(connection, other):
            self._carry(connection, lambda: self._group.recv([room], self._place[other], 0))

    def meet(self, others: Collection[int]) -> None:
        """Let the library connect with members, which then have this one among their others.

        Parameters
        ----------
        others
            Members.
        """
        # of all pairs that are left the first one can always go on
        for low, high in sorted((min(self._rank, o), max(self._rank, o)) for o in others):
            word = self._side.own((1,), torch.uint8)
            step = self._group.send if self._rank == low else self._group.recv
            other = self._place[high if self._rank == low else low]

            def begin(step: Any = step, other: int = other, word: Tensor = word) -> None:
                step([word], other, 0).wait()

            self._side.across(begin)

    @contextmanager
    def _both_turns(self, connection: socket.socket, other: int) -> Iterator[None]:
        if self._rank < other:
            with self._turn:
                _say(connection, Word.TURN)
                _hear(connection, Word.GO)
                yield
        else:
            _hear(connection, Word.TURN)
            with self._turn:
                _say(connection, Word.GO)
                yield

    def _carry(self, connection: socket.socket, begin: Callable[[], Any]) -> None:
        try:
            self._side.across(lambda: begin().wait())
        except RuntimeError as error:
            said = (str(error).splitlines() or [""])[0]
            name = getattr(connection, "name", "")
            raise TornError(f"{named(connection)} is gone ({said})", name) from None


def _say(connection: socket.socket, word: Word) -> None:
    send_all(connection, memoryview(bytes([word])))


def _hear(connection: socket.socket, word: Word) -> None:
    found = bytearray(1)
    receive_into(connection, memoryview(found))
    if found[0] != word:
        raise TornError(f"{named(connection)} said {found[0]} where {word.name} was due")


def open_direct(
    library: Library, ranks: Ranks, device: torch.device, side: Side, store: Store
) -> Direct | None:
    """What carries between this rank and others; all ranks come here together.

    Parameters
    ----------
    library
        Which.
    ranks
        This process among all.
    device
        Where it computes.
    side
        Of the device.
    store
        A connection of its own: the library blocks on it.

    Returns
    -------
    Direct or None
        None: no other rank of this machine has a GPU of its own, or this one shares its.

    Raises
    ------
    ValueError
        There are none such at all, or the library is not there.
    """
    if library is Library.NCCL and not is_nccl_available():
        raise ValueError("--direct nccl: this PyTorch is built without NCCL; leave it out")
    told = ranks.share("direct/place", json.dumps(_place(library, ranks.rank, device)))
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
    group = _group(library, PrefixStore(f"direct/{members[0]}", store), members, ranks.rank)
    return Direct(group, members, ranks.rank, side)


def _place(library: Library, rank: int, device: torch.device) -> tuple[str, str] | None:
    """The machine of this rank, and its GPU there; None: it computes on none."""
    # of ranks that have networks of their own none finds the other
    here = f"{machine()} {network()}"
    if library is Library.GLOO:
        return here, str(rank)
    return (here, gpu_of(device)[1]) if device.type == "cuda" else None


def _group(library: Library, store: Store, members: Sequence[int], rank: int) -> Transfers:
    place, size = list(members).index(rank), len(members)
    # PyTorch's types leave out much of what its backends have; they meet within the machine
    # builds without one have no such class
    if library is Library.GLOO:
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        how: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        how._devices, how._timeout = [ProcessGroupGloo.create_device(hostname=LOCAL)], TIMEOUT
        return cast(Transfers, ProcessGroupGloo(store, place, size, how))
    os.environ.setdefault(NCCL_INTERFACE, "lo")
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = TIMEOUT
    return cast(Transfers, ProcessGroupNCCL(store, place, size, options))
