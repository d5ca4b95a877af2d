"""Who sends what to whom in an iteration, in the one order that both ends know.

Messages of an ordered pair leave in the order in which the sender's operations produce them, so a
message needs no name on the wire: the receiver knows from the plan which one comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from planner.training_plan.schedule import Operation, Schedule


@dataclass(frozen=True)
class Message:
    """What one device's operation hands to another's.

    Attributes
    ----------
    kind, microbatch
        Of the operation that waits for it.
    """

    kind: str
    microbatch: int
    source: int
    destination: int

    @property
    def operation(self) -> Operation:
        """The operation that waits for it."""
        return self.kind, self.microbatch


class P2PSchedule:
    """All messages of one device in one schedule.

    Parameters
    ----------
    schedule
        Paths and orders of all devices.
    forward
        Whether there are no backward passes.

    Attributes
    ----------
    after
        By operation of the device, the message that it sends when it is done.
    before
        By operation of the device, the message that it waits for.
    incoming
        By source, its messages to the device in the order in which they leave.
    """

    def __init__(self, schedule: Schedule, device: int, *, forward: bool = False) -> None:
        self.after: dict[Operation, Message] = {}
        self.before: dict[Operation, Message] = {}
        self.incoming: dict[int, list[Message]] = {}
        # messages to the device by the operation of another device that makes them
        made: dict[tuple[int, Operation], Message] = {}
        for b in range(len(schedule.paths)):
            chain = [step for step in schedule.chain(b) if not (forward and step[0] == "B")]
            for (kind, source), (waiting, destination) in pairwise(chain):
                if source == destination or device not in (source, destination):
                    continue
                message = Message(waiting, b, source, destination)
                if source == device:
                    self.after[kind, b] = message
                else:
                    self.before[message.operation] = message
                    made[source, (kind, b)] = message
        for source in sorted({source for source, _ in made}):
            self.incoming[source] = [
                made[source, operation]
                for operation in schedule.order[source]
                if (source, operation) in made
            ]

    @property
    def peers(self) -> set[int]:
        """Devices that it sends to or receives from."""
        return {message.destination for message in self.after.values()} | set(self.incoming)
