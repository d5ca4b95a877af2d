"""Tagged point-to-point messages over gloo, staged through host memory where there is a GPU.

gloo hands a message over once the receiver has asked for it, so receives are posted before they are
needed; tags tell messages apart whatever order they come in.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Sends and receives of one rank."""

    device: torch.device
    _outgoing: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start sending; `drain` waits for it."""
        message = tensor.detach().to("cpu").contiguous()
        work = dist.isend(message, destination, tag=tag)
        if work is not None:
            self._outgoing.append((work, message))

    def receive(
        self, shape: Sequence[int], source: int, tag: int, dtype: torch.dtype = torch.float32
    ) -> Pending:
        """Ask for a message; returns at once."""
        buffer = torch.empty(tuple(shape), dtype=dtype)
        work = dist.irecv(buffer, source, tag=tag)
        if work is None:
            raise RuntimeError(f"rank {source} is not in the process group")
        return Pending(buffer, work, self.device)

    def drain(self) -> None:
        """Wait until every message sent so far has been taken over."""
        for work, _ in self._outgoing:
            work.wait()
        self._outgoing.clear()
