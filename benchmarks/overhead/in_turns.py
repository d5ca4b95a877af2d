"""One rank of the executor and a plain PyTorch loop in one process, alternating steps.

Two processes with the same steps may differ by a third because of memory placement, so ``python -m
benchmarks.overhead`` compares within one process. The plain loop is what most users would write:
modules in sequence, tokens made in advance, one backward pass per microbatch, AdamW; bf16 with
``torch.autocast``.
"""

from __future__ import annotations

import json
import time

import torch

from planner.executor.data.data_config import SYNTHETIC
from planner.executor.data.microbatches import make_microbatches
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import Shutdown
from planner.executor.launch.arguments import parse_arguments
from planner.executor.launch.process import exit_now, init_process, run_rank
from planner.executor.launch.setup import set_up
from planner.executor.launch.train_loop import train
from planner.executor.rendezvous.rank_assignment import local_device_name
from planner.executor.runtime.model import build_head, build_stage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.progress import KnownLosses, Progress
from planner.executor.runtime.records import StepRecord
from planner.network.dtype import Dtype
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan

EVENT = "in turns"
"""Of the line with what was measured."""


class PlainLoop:
    """The whole model of a plan on one device.

    Parameters
    ----------
    steps
        That tokens are made for.
    compiled
        Whether layers and head are compiled.
    """

    def __init__(
        self, plan: TrainingPlan, device: torch.device, steps: int, *, compiled: bool = False
    ) -> None:
        w, arch = plan.workload, plan.workload.architecture
        assert arch is not None
        self._stage = build_stage(arch, 0, arch.layers, plan.seed, device)
        self._head = build_head(arch, plan.seed, self._stage.stem, device)
        for part in (*self._stage.layers, self._head) if compiled else ():
            part.compile(dynamic=False)
        parameters = {id(p): p for part in (self._stage, self._head) for p in part.parameters()}
        self._optimizer = OptimizerConfig().make(list(parameters.values()))
        batches, count = make_microbatches(plan, SYNTHETIC), w.batch_samples // w.microbatch_samples
        self._tokens = [
            [batches.tokens(t, b).to(device) for b in range(count)] for t in range(steps)
        ]
        self._batch = w.batch_samples * arch.sequence
        self._low, self._device = w.precision.compute is Dtype.BF16, device

    def step(self, number: int) -> float:
        """Train on a step's tokens."""
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for one in self._tokens[number]:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._low):
                loss = self._head(self._stage(one[:, :-1]), one[:, 1:]) / self._batch
            torch.autograd.backward(loss)
            total += loss.detach()
        self._optimizer.step()
        return float(total)  # waits for the device


class InTurns(Progress):
    """Tells what the executor does, and has the plain loop do as much.

    Each way goes first in half of the pairs: executor, plain, plain, executor and so on.

    Parameters
    ----------
    plan, device, steps, compiled
        Of the plain loop.
    """

    def __init__(
        self, plan: TrainingPlan, device: torch.device, steps: int, *, compiled: bool = False
    ) -> None:
        super().__init__(plan.predicted.step_s, events=True, plan=plan.content_hash)
        self._plain = PlainLoop(plan, device, steps, compiled=compiled)
        self._steps, self._device = steps, device
        self.seconds: dict[str, list[float]] = {"executor": [], "plain": []}
        self.losses: list[float] = []
        self._began_s = self._now_s()

    def step(self, record: StepRecord, losses: KnownLosses | None) -> None:
        """The executor has done one; what it took to say so is part of it."""
        super().step(record, losses)
        self.seconds["executor"].append(self._now_s() - self._began_s)
        if record.step % 2 == 0:
            for number in range(record.step, min(record.step + 2, self._steps)):
                begin_s = self._now_s()
                self.losses.append(self._plain.step(number))
                self.seconds["plain"].append(self._now_s() - begin_s)
        self._began_s = self._now_s()

    def _now_s(self) -> float:
        """With nothing under way."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def main() -> int:
    """Run both; the last line has seconds and the plain loop's losses, as JSON."""
    config = parse_arguments(None, __doc__)
    init_process()
    detector = FailureDetector(local_device_name(config.devices), Shutdown())

    def run() -> int:
        plan = load_plan(config.plan)
        context = set_up(config, plan, detector)
        # before the executor has any memory for activations
        turns = InTurns(plan, context.device, config.steps, compiled=context.compiled)
        turns.flops, context.progress = context.progress.flops, turns
        train(context, plan)
        context.ranks.leave()
        summary = {"event": EVENT, "seconds": turns.seconds, "losses": turns.losses}
        print(json.dumps(summary), flush=True)
        return 0

    return run_rank(local_device_name(config.devices), detector, run)


if __name__ == "__main__":
    exit_now(main())
