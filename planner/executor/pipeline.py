"""One device's part of an iteration: its operations in the planned order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from planner.executor.model import Head, Stage
from planner.executor.transport import Pending, Transport
from planner.training_plan.model import Schedule

POSTED_AHEAD = 16
"""Receives asked for before they are needed, so that transfers overlap with computation."""

Record = tuple[int, int, str, float, float]
"""``(microbatch, device, kind, start_s, end_s)``, seconds since the iteration began."""


@dataclass
class Message:
    """What an operation needs from another device."""

    source: int
    tag: int


@dataclass
class PipelineWorker:
    """Runs F, H and B of one device.

    Parameters
    ----------
    tokens
        Tokens of a microbatch of the current step.
    batch_tokens
        Tokens of the whole step, by which every loss is divided.
    """

    rank: int
    schedule: Schedule
    stage: Stage
    head: Head | None
    transport: Transport
    tokens: Callable[[int], Tensor]
    shape: tuple[int, int, int]
    batch_tokens: int
    records: list[Record] = field(default_factory=list)

    def iteration(self, began: float) -> float:
        """Run all operations; returns the summed loss of the microbatches whose head we are."""
        self._kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._head_gradients: dict[int, Tensor] = {}
        self.records = []
        loss = 0.0
        inbox = self._inbox()
        for kind, b in self.schedule.order[self.rank]:
            message = next(inbox)
            received = None if message is None else message.wait()
            start = time.perf_counter()
            if kind == "F":
                self._forward(b, received)
            elif kind == "H":
                loss += self._head(b, received)
            else:
                self._backward(b, received)
            self._synchronise()
            self.records.append((b, self.rank, kind, start - began, time.perf_counter() - began))
        self.transport.drain()
        return loss

    def alone(self, b: int, began: float) -> float:
        """One microbatch through the whole model on this device, whatever its planned path."""
        assert self.head is not None
        tokens = self.tokens(b).to(self.transport.device)
        marks = [time.perf_counter() - began]
        output = self.stage(tokens[:, :-1])
        marks.append(time.perf_counter() - began)
        activations = output.detach().requires_grad_()
        loss = self.head(activations, tokens[:, 1:]) / self.batch_tokens
        loss.backward()
        marks.append(time.perf_counter() - began)
        torch.autograd.backward(output, activations.grad)
        self._synchronise()
        marks.append(time.perf_counter() - began)
        self.records += [
            (b, self.rank, kind, start, end)
            for kind, (start, end) in zip("FHB", pairwise(marks), strict=True)
        ]
        return float(loss.detach())

    def _inbox(self) -> Iterator[Pending | None]:
        """The message each operation waits for, asked for a while ahead."""
        needs = [self._needs(kind, b) for kind, b in self.schedule.order[self.rank]]
        posted: dict[int, Pending] = {}
        upcoming = iter([k for k, need in enumerate(needs) if need is not None])
        for k in range(len(needs)):
            while len(posted) < POSTED_AHEAD and (ahead := next(upcoming, None)) is not None:
                need = needs[ahead]
                assert need is not None
                posted[ahead] = self.transport.receive(self.shape, need.source, need.tag)
            yield posted.pop(k, None)

    def _needs(self, kind: str, b: int) -> Message | None:
        path = self.schedule.paths[b]
        place = path.index(self.rank)
        head = self.schedule.head_device(b)
        if kind == "F":
            source = None if place == 0 else path[place - 1]
        elif kind == "H":
            source = None if path[-1] == self.rank else path[-1]
        elif place + 1 < len(path):
            source = path[place + 1]
        else:
            source = None if head == self.rank else head
        return None if source is None else Message(source, self._tag(kind, b))

    @staticmethod
    def _tag(kind: str, b: int) -> int:
        # a device receives at most one message per kind and microbatch
        return 3 * b + "FHB".index(kind)

    def _forward(self, b: int, received: Tensor | None) -> None:
        path = self.schedule.paths[b]
        place = path.index(self.rank)
        if received is None:
            kept = None
            output = self.stage(self.tokens(b)[:, :-1].to(self.transport.device))
        else:
            kept = received.requires_grad_()
            output = self.stage(kept)
        self._kept[b] = (kept, output)
        if place + 1 < len(path):
            self.transport.send(output, path[place + 1], self._tag("F", b))
        elif (head := self.schedule.head_device(b)) != self.rank:
            self.transport.send(output, head, self._tag("H", b))

    def _head(self, b: int, received: Tensor | None) -> float:
        assert self.head is not None
        last = self.schedule.paths[b][-1]
        source = self._kept[b][1].detach() if received is None else received
        activations = source.requires_grad_()
        targets = self.tokens(b)[:, 1:].to(self.transport.device)
        loss = self.head(activations, targets) / self.batch_tokens
        loss.backward()
        assert activations.grad is not None
        if last == self.rank:
            self._head_gradients[b] = activations.grad
        else:
            self.transport.send(activations.grad, last, self._tag("B", b))
        return float(loss.detach())

    def _backward(self, b: int, received: Tensor | None) -> None:
        path = self.schedule.paths[b]
        place = path.index(self.rank)
        kept, output = self._kept.pop(b)
        gradient = self._head_gradients.pop(b) if received is None else received
        torch.autograd.backward(output, gradient)
        if place > 0:
            assert kept is not None and kept.grad is not None
            self.transport.send(kept.grad, path[place - 1], self._tag("B", b))

    def _synchronise(self) -> None:
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize(self.transport.device)
