"""Messages between devices that route microbatches: a header of fixed size, then values if any.

The receiver cannot predict the next message. So every message begins with a header that states its
kind, its microbatch and step, and the path chosen so far; whether values follow, and how many, is
determined by the header and the sender.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

UNCHOSEN = -1
"""On a path: not chosen yet."""


class MessageKind(enum.IntEnum):
    """Kinds of messages."""

    START = 0
    """A source requests F of a microbatch, whose tokens the peer has, from the first stage."""
    FORWARD = 1
    """Activations for F."""
    LOSS = 2
    """Activations for head and loss, on the device where the path began."""
    BACKWARD = 3
    """A gradient for B."""
    ANSWER = 4
    """F is done; to the device that chose the peer."""
    FINISHED = 5
    """The last B is done; to its source."""
    END = 6
    """This device of this stage sends no more F in this step."""
    LAST = 7
    """The last message of a connection."""


KINDS = {MessageKind.FORWARD: "F", MessageKind.LOSS: "H", MessageKind.BACKWARD: "B"}
"""Operation that needs the values of a message."""


@dataclass(frozen=True)
class RoutingHeader:
    """Header of a message between stages, on stochastic routes.

    Attributes
    ----------
    step_index
        Number of the step since the ranks connected.
    path
        Device of each stage, `UNCHOSEN` if not chosen yet.
    seconds
        Of an answer: compute time of the peer.
    """

    kind: MessageKind
    step_index: int = 0
    microbatch: int = 0
    path: tuple[int, ...] = ()
    seconds: float = 0.0


class MessageFormat:
    """Binary format of headers.

    Parameters
    ----------
    stages
        Number of stages.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._struct = struct.Struct(f"!BIId{stages}i")
        self.size = self._struct.size

    def pack(self, header: RoutingHeader) -> bytes:
        """Encode a header."""
        path = (*header.path, *(UNCHOSEN,) * (self._stages - len(header.path)))
        return self._struct.pack(
            header.kind, header.step_index, header.microbatch, header.seconds, *path
        )

    def unpack(self, data: bytes | bytearray) -> RoutingHeader:
        """Inverse of `pack`."""
        kind, step_index, microbatch, seconds, *path = self._struct.unpack(data)
        return RoutingHeader(MessageKind(kind), step_index, microbatch, tuple(path), seconds)
