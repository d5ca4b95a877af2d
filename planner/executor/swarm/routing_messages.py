"""What devices that route microbatches tell each other: a header of fixed size, then maybe values.

Nobody knows beforehand who sends what next. So every message begins with a note that says what it
is, of which microbatch of which step, and the peers that its path has so far; whether values
follow, and how many, is known from the note and from who sent it.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

NOBODY = -1
"""On a path: not chosen yet."""


class MessageKind(enum.IntEnum):
    """What a note says; of its microbatch, but for the last two."""

    START = 0
    """A trainer asks a peer of the first stage for F, whose tokens it has itself."""
    FORWARD = 1
    """Activations, for F."""
    LOSS = 2
    """Activations, for head and loss on the device where the path began."""
    BACKWARD = 3
    """A gradient, for B."""
    ANSWER = 4
    """F was done, to whoever chose the peer."""
    FINISHED = 5
    """The last B was done, to its trainer."""
    END = 6
    """No more F is asked for in this step, by this device in this stage."""
    LAST = 7
    """Nothing comes after it."""


KINDS = {MessageKind.FORWARD: "F", MessageKind.LOSS: "H", MessageKind.BACKWARD: "B"}
"""The operation that the values of a message are for."""


@dataclass(frozen=True)
class RoutingMessage:
    """A header.

    Attributes
    ----------
    serial
        Number of the step among all of this run.
    path
        Its peers, one a stage, `NOBODY` where none is chosen.
    seconds
        Of an answer: how long the peer worked.
    """

    word: MessageKind
    serial: int = 0
    microbatch: int = 0
    path: tuple[int, ...] = ()
    seconds: float = 0.0


class MessageFormat:
    """Notes as bytes.

    Parameters
    ----------
    stages
        S of the pipeline.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._struct = struct.Struct(f"!BIId{stages}i")
        self.size = self._struct.size

    def pack(self, note: RoutingMessage) -> bytes:
        """As it travels."""
        path = (*note.path, *(NOBODY,) * (self._stages - len(note.path)))
        return self._struct.pack(note.word, note.serial, note.microbatch, note.seconds, *path)

    def unpack(self, data: bytes | bytearray) -> RoutingMessage:
        """What `pack` was given, with a path of all stages."""
        word, serial, microbatch, seconds, *path = self._struct.unpack(data)
        return RoutingMessage(MessageKind(word), serial, microbatch, tuple(path), seconds)
