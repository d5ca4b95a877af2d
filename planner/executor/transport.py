"""Tagged point-to-point messages over gloo, staged through host memory where there is a GPU.

gloo hands a message over once the receiver has asked for it, so receives are posted before they are
needed; tags tell messages apart whatever order they come in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Pending:
    """A message on its way to us."""

    buffer: Tensor
    work: dist.Work
    device: torch.device

    def wait(self) -> Tensor:
        """The message, on our device."""
        self.work.wait()
        return self.buffer.to(self.device)


@dataclass
class Transport:
    """Sends and receives of one rank.

    A thread waits for messages in the order they were sent and lets go of each once it has been
    taken over, so that memory holds what is on the way and not a whole iteration's messages.
    """

    device: torch.device
    _waiter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    _outgoing: deque[Future[None]] = field(default_factory=deque)

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start sending; `drain` waits for it.

        Parameters
        ----------
        tensor
            What is sent.
        destination
            Rank.
        tag
            Tells messages between two ranks apart.
        """
        message = tensor.detach().to("cpu").contiguous()
        work = dist.isend(message, destination, tag=tag)
        if work is not None:
            self._outgoing.append(self._waiter.submit(_wait, work, message))
        while self._outgoing and self._outgoing[0].done():
            self._outgoing.popleft().result()

    def receive(
        self, shape: Sequence[int], source: int, tag: int, dtype: torch.dtype = torch.float32
    ) -> Pending:
        """Ask for a message; returns at once.

        Parameters
        ----------
        shape
            Of the message.
        source
            Rank it comes from, or goes to.
        tag
            Tells messages between two ranks apart.
        dtype
            Of the message.

        Returns
        -------
        Pending
            `wait` gives the tensor.

        Raises
        ------
        RuntimeError
            There is no such rank.
        """
        buffer = torch.empty(tuple(shape), dtype=dtype)
        work = dist.irecv(buffer, source, tag=tag)
        if work is None:
            raise RuntimeError(f"rank {source} is not in the process group")
        return Pending(buffer, work, self.device)

    def drain(self) -> None:
        """Wait until every message sent so far has been taken over."""
        while self._outgoing:
            self._outgoing.popleft().result()


def _wait(work: dist.Work, message: Tensor) -> None:
    """Wait for a send; its message must stay where it is until then."""
    work.wait()
    del message
