"""P2P messages of an iteration, in the order known to both ends.

Messages of an ordered pair leave in the order in which the sender's operations produce them, so
they need no tag: the plan determines the order in which the receiver gets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from planner.training_plan.schedule import Operation, Schedule


@dataclass(frozen=True)
class Message:
    """Output of one device's operation, input of another's.

    Attributes
    ----------
    kind, microbatch
        Of the operation that needs it.
    """

    kind: str
    microbatch: int
    source: int
    destination: int

    @property
    def operation(self) -> Operation:
        """The operation that needs it."""
        return self.kind, self.microbatch


class P2PSchedule:
    """Operations and messages of one device in a schedule.

    Parameters
    ----------
    schedule
        Paths and orders of all devices.
    forward
        Whether there are forward passes only.

    Attributes
    ----------
    order
        Operations of the device, in order.
    sends
        The message that an operation sends when it is done, by operation.
    needs
        The message that an operation needs, by operation.
    incoming
        Messages from other devices in order of sending, by source.
    """

    def __init__(self, schedule: Schedule, device: int, *, forward: bool = False) -> None:
        self.device, self.order = device, schedule.order[device]
        self.sends: dict[Operation, Message] = {}
        self.needs: dict[Operation, Message] = {}
        self.incoming: dict[int, list[Message]] = {}
        # messages to the device, by the operation that produces them
        by_producer: dict[tuple[int, Operation], Message] = {}
        for b in range(len(schedule.paths)):
            chain = [step for step in schedule.chain(b) if not (forward and step[0] == "B")]
            for (kind, source), (consumer, destination) in pairwise(chain):
                if source == destination or device not in (source, destination):
                    continue
                message = Message(consumer, b, source, destination)
                if source == device:
                    self.sends[kind, b] = message
                else:
                    self.needs[message.operation] = message
                    by_producer[source, (kind, b)] = message
        for source in sorted({source for source, _ in by_producer}):
            self.incoming[source] = [
                by_producer[source, operation]
                for operation in schedule.order[source]
                if (source, operation) in by_producer
            ]

    @property
    def peers(self) -> set[int]:
        """Devices with which it exchanges messages."""
        return {message.destination for message in self.sends.values()} | set(self.incoming)
