"""Training by a plan: one rank's set-up and its steps."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from planner.executor.averaging import average_gradients
from planner.executor.data import Microbatches
from planner.executor.model import build_head, build_stage
from planner.executor.pipeline import PipelineWorker, Record
from planner.executor.transport import Transport
from planner.network.values import choice
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.rules import contradictions
from planner.workload.layers import Architecture

WEIGHT_DECAY = 0.01


class Optimizer(enum.StrEnum):
    """What updates the parameters: AdamW as DiLoCo-SWARM's Table 3 has it, or plain SGD."""

    ADAMW = "adamw"
    SGD = "sgd"


@dataclass(frozen=True)
class StepReport:
    """One iteration, the same on every rank but for the records.

    Attributes
    ----------
    step
        Iteration, from 0.
    loss
        Sum over its samples, divided by the batch.
    measured_s
        Seconds of the slowest rank.
    records
        This rank's operations.
    """

    step: int
    loss: float
    measured_s: float
    records: list[Record]


def require_executable(plan: TrainingPlan) -> Architecture:
    """Raise `PlanError` for what this release cannot carry out.

    Parameters
    ----------
    plan
        The plan.

    Returns
    -------
    Architecture
        Of the plan's workload.

    Raises
    ------
    PlanError
        One line with the field and the remedy.
    """
    arch = plan.workload.architecture
    if arch is None:
        raise PlanError(
            f"workload.architecture: {plan.workload.name!r} cannot be built by the executor; plan "
            "for a GPT-2 or LLaMA workload"
        )
    if plan.sync.every_steps != 1 or plan.sync.outer is not None:
        raise PlanError("sync: the executor averages every step so far; set every_steps to 1")
    # load_plan has seen to this for files; a plan made in memory is as welcome
    for problem in contradictions(plan):
        raise PlanError(problem)
    return arch


class Worker:
    """One rank of a plan, in a process group that is already up.

    Parameters
    ----------
    optimizer
        An `Optimizer` or its name.
    tickets
        If given, devices take microbatches from this store as fast as they can until the batch is
        complete (DeDLOC, 3.1), instead of those the plan expects them to do. Only for plans of one
        stage, whose microbatches any device can do alone.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        rank: int,
        device: torch.device,
        *,
        learning_rate: float,
        data: Path | None = None,
        optimizer: str = Optimizer.ADAMW,
        tickets: Store | None = None,
    ) -> None:
        arch = require_executable(plan)
        w = plan.workload
        if tickets is not None and len(plan.assignment.groups) > 1:
            raise PlanError(
                f"assignment.groups: own pace needs whole models, found "
                f"{len(plan.assignment.groups)} stages; plan one stage"
            )
        self.plan, self.rank, self.device, self.tickets = plan, rank, device, tickets
        self.stage_index = plan.stage_of[rank]
        self.stage = build_stage(arch, *plan.stage_layers[self.stage_index], plan.seed).to(device)
        runs_head = tickets is not None or any(
            any(kind == "H" for kind, _ in s.order[rank]) for s in plan.schedules
        )
        self.head = build_head(arch, plan.seed).to(device) if runs_head else None
        self.transport = Transport(device)
        self.data = Microbatches(
            arch.vocabulary, arch.sequence, w.microbatch_samples, plan.seed, data
        )
        self.shape = (w.microbatch_samples, arch.sequence, arch.hidden)
        self.batch_tokens = w.batch_samples * arch.sequence
        self.parameters: list[nn.Parameter] = [
            *self.stage.parameters(),
            *(() if self.head is None else self.head.parameters()),
        ]
        self.optimizer = make_optimizer(optimizer, self.parameters, learning_rate)
        self.rounds = [
            next(g for g in groups if rank in g.members)
            for groups in plan.averaging[self.stage_index]
        ]
        self.peers = len(plan.assignment.groups[self.stage_index])

    def steps(self, count: int) -> Iterator[StepReport]:
        """Train; yields after every step.

        Parameters
        ----------
        count
            Steps.

        Yields
        ------
        StepReport
            One report a step.
        """
        for step in range(count):
            schedule = self.plan.schedules[self.plan.cycle[step % len(self.plan.cycle)]]
            pipeline = PipelineWorker(
                self.rank,
                schedule,
                self.stage,
                self.head,
                self.transport,
                lambda b, step=step: self.data.tokens(step, b),  # type: ignore[misc]
                self.shape,
                self.batch_tokens,
            )
            dist.barrier()
            began = time.perf_counter()
            if self.tickets is None:
                loss = pipeline.iteration(began)
            else:
                loss = self._own_pace(pipeline, step, self.tickets, began)
            averaging = time.perf_counter()
            average_gradients(
                self.parameters,
                self.rounds,
                self.peers,
                self.rank,
                self.transport,
                self.plan.codec,
            )
            update = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            ended = time.perf_counter()
            records = [
                *pipeline.records,
                (-1, self.rank, "A", averaging - began, update - began),
                (-1, self.rank, "U", update - began, ended - began),
            ]
            yield StepReport(step, _sum(loss), _longest(ended - began), records)

    def _own_pace(self, pipeline: PipelineWorker, step: int, tickets: Store, began: float) -> float:
        """Take microbatches until the batch is complete; what each gave weighs by itself."""
        loss = 0.0
        target = len(pipeline.schedule.paths)
        while (ticket := tickets.add(f"tickets/{step}", 1)) <= target:
            loss += pipeline.alone(ticket - 1, began)
        return loss


def make_optimizer(
    name: str, parameters: list[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """The optimizer of a rank's parameters.

    Parameters
    ----------
    name
        An `Optimizer` or its name.
    parameters
        What it updates.
    learning_rate
        Of every step.

    Raises
    ------
    ValueError
        There is no such optimizer.
    """
    if choice(Optimizer, "optimizer", name) is Optimizer.ADAMW:
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=WEIGHT_DECAY)
    return torch.optim.SGD(parameters, lr=learning_rate)


def _sum(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _longest(seconds: float) -> float:
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)
