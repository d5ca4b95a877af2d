"""Evaluation loss on held-out text: forward passes along the plan's paths, every N steps.

A plan with several schedules is evaluated with the paths of each: with all stages, and without the
stages that its paths skip (SkipPipe, 4.4).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from planner.executor.comm.p2p import Receiver, Sender, expected_messages
from planner.executor.comm.p2p_schedule import P2PSchedule
from planner.executor.data.microbatches import Microbatches
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.pipeline import run_operations
from planner.executor.runtime.records import StepRecord
from planner.executor.transport.connections import ChannelKind, duplex_channels, duplex_keys
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Operation, Schedule

MAX_EXPONENT = 700.0
"""Largest loss whose perplexity fits into a float."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result with the paths of one schedule.

    Attributes
    ----------
    paths
        Number of stages visited, such as ``"4 of 6 stages"``.
    loss
        Mean per token, in nats.
    """

    steps: int
    paths: str
    loss: float

    @property
    def perplexity(self) -> float:
        """Perplexity, as far as a float can hold it."""
        return math.exp(min(self.loss, MAX_EXPONENT)) if math.isfinite(self.loss) else self.loss


@dataclass(frozen=True)
class EvaluationData:
    """Held-out data of a rank, and when it is evaluated.

    Attributes
    ----------
    data
        Held-out text, read from its beginning each time; None if this rank reads none.
    every
        Steps between evaluations; there is one after the last step too.
    batches
        Number of batches of the size of a step.
    stop
        Number of steps at the end of the run.
    """

    data: Microbatches | None
    every: int
    batches: int
    stop: int

    def due(self, step: int) -> bool:
        """Whether an evaluation follows a step."""
        return (step + 1) % self.every == 0 or step + 1 == self.stop


class Evaluation(ExitStack):
    """Evaluates a model during training; a context manager that holds connections."""

    def __init__(
        self,
        plan: TrainingPlan,
        ranks: RankGroup,
        model_stage: ModelStage | None,
        held_out: EvaluationData,
        steps: range,
    ) -> None:
        super().__init__()
        self._plan, self._ranks, self._model_stage = plan, ranks, model_stage
        self._held_out, self._batches = held_out, held_out.batches
        self._schedules = [forward_only(plan.schedules[k]) for k in dict.fromkeys(plan.cycle)]
        self._p2p_schedules = [P2PSchedule(s, ranks.rank, forward=True) for s in self._schedules]
        self._after = {step for step in steps if held_out.due(step)}
        self._step_index = 0

    def __enter__(self) -> Self:
        """Open connections; a collective call."""
        keys = duplex_keys(
            ChannelKind.PIPELINE, {d for p2p in self._p2p_schedules for d in p2p.peers}
        )
        error_latch = self.enter_context(self._ranks.error_latch())
        opened = self.enter_context(connections_to(self._ranks, keys, "evaluation"))
        channels = duplex_channels(opened, ChannelKind.PIPELINE, self._ranks.rank)
        if self._model_stage is not None:
            # all schedules in turn, each with all batches, at every evaluation
            rounds = [schedule for schedule in self._p2p_schedules for _ in range(self._batches)]
            expected = expected_messages(rounds * len(self._after))
            self._receiver = Receiver(
                channels.incoming, expected, self._model_stage.buffer, error_latch
            )
            # nothing here asks what is in flight
            rates = dict.fromkeys(channels.outgoing, math.inf)
            self._sender = Sender(
                channels.outgoing, error_latch, rates, backend=self._model_stage.backend
            )
        return self

    def after(self, step: int) -> list[EvaluationResult]:
        """Evaluate after a step if one is due; then a collective call."""
        if step not in self._after:
            return []
        w, arch = self._plan.workload, self._plan.workload.architecture
        assert arch is not None
        sums = [self._sum_losses(k) for k in range(len(self._schedules))]
        answers = self._ranks.all_gather(f"evaluation/{step}", json.dumps(sums))
        tokens = self._batches * w.batch_samples * arch.sequence
        by_schedule = zip(*map(json.loads, answers), strict=True)
        totals = [sum(losses) / tokens for losses in by_schedule]
        return [
            EvaluationResult(step + 1, _paths(self._plan, schedule), loss)
            for schedule, loss in zip(self._schedules, totals, strict=True)
        ]

    def _sum_losses(self, k: int) -> float:
        """This rank's losses of all batches with the paths of one schedule."""
        if self._model_stage is None:
            return 0.0
        total = 0.0
        for batch in range(self._batches):
            forward = _Forward(self._model_stage, self._held_out.data, batch)
            run_operations(
                self._p2p_schedules[k],
                forward,
                self._receiver,
                self._sender,
                self._step_index,
                StepRecord(batch, False),
            )
            self._step_index += 1
            total += forward.loss()
        return total


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without backward passes, in an order without deadlocks."""
    orders: list[list[tuple[int, int, Operation]]] = [[] for _ in schedule.order]
    for b in range(len(schedule.paths)):
        forward_ops = [step for step in schedule.chain(b) if step[0] != "B"]
        for index, (kind, device) in enumerate(forward_ops):
            # a common topological order of all operations
            orders[device].append((b + index, b, (kind, b)))
    return replace(schedule, order=tuple(tuple(op for *_, op in sorted(ops)) for ops in orders))


def _paths(plan: TrainingPlan, schedule: Schedule) -> str:
    stages = len(plan.assignment.groups)
    visited: Sequence[int] = sorted({len(path) for path in schedule.paths})
    if visited[0] == stages:
        return "all stages"
    count = str(visited[0]) if len(visited) == 1 else f"{visited[0]} to {visited[-1]}"
    return f"{count} of {stages} stages"


class _Forward:
    """Forward passes and losses of one batch."""

    def __init__(self, model_stage: ModelStage, data: Microbatches | None, batch: int) -> None:
        self._model_stage, self._data, self._batch = model_stage, data, batch
        self.backend = model_stage.backend
        self._outputs: dict[int, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=model_stage.device)
        self.backend.begin_step()

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Run F or H, without saving anything for a backward pass."""
        stage, operations = self._model_stage, self._model_stage.operations
        inputs_received = None if received is None else operations.decode_message(kind, received)
        if kind == "F":
            inputs = (
                self._tokens(microbatch)[:, :-1] if inputs_received is None else inputs_received
            )
            output = stage.evaluate_stage(inputs)
            if stage.module.head is not None:
                self._outputs[microbatch] = output
            return operations.activation_codec.encode_message(output, gradient=False)
        # the head's device computed the last output, or receives it
        own_output = self._outputs.pop(microbatch, None)
        activations = own_output if inputs_received is None else inputs_received
        assert activations is not None
        loss = stage.evaluate_loss(activations, self._tokens(microbatch)[:, 1:])
        self._loss += loss
        return loss

    def loss(self) -> float:
        """Loss of the batch, summed over tokens."""
        return float(self._loss)

    def _tokens(self, microbatch: int) -> Tensor:
        assert self._data is not None
        return self.backend.to_device(self._data.tokens(self._batch, microbatch))
