"""A shared queue of microbatches, from which devices take the next one while they compute.

In DeDLOC (3.1) every device has the whole model, and takes microbatches at its own pace until the
batch is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch.distributed.distributed_c10d import Store

from planner.executor.runtime.pipeline import FixedPipeline
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.training_plan.choices import Wiring
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Operation


class MicrobatchQueue:
    """The queues of all steps in the store, from the view of one rank.

    The rank that finds a queue empty last deletes it.

    One microbatch is prefetched, so that a device waits for the store only at the start of a step.
    At the end of a step a slow device may hold one more than it would take otherwise.
    """

    def __init__(self, store: Store, ranks: int) -> None:
        self._store, self._ranks = store, ranks
        self._executor = ThreadPoolExecutor(1, "tickets")

    def take(self, step_index: int, microbatches: int) -> Iterator[int]:
        """Microbatches of a step, each taken by one rank only."""
        prefetched = self._request(step_index)
        while (ticket := prefetched.result()) <= microbatches:
            prefetched = self._request(step_index)
            yield ticket - 1
        if ticket == microbatches + self._ranks:
            self._executor.submit(self._store.delete_key, _key(step_index))

    def _request(self, step_index: int) -> Future[int]:
        return self._executor.submit(self._store.add, _key(step_index), 1)


def _key(step_index: int) -> str:
    return f"tickets/{step_index}"


class QueuePipeline(FixedPipeline):
    """Runs microbatches of the queue through the whole model; for plans of one stage."""

    fixed_order = False

    def __init__(self, plan: TrainingPlan, rank: int, runtime: StageRuntime, store: Store) -> None:
        _require_queued(plan)
        super().__init__(plan, rank, runtime)
        self.loss_ranks = set(plan.stage_of)
        self._takes_microbatches = rank in plan.stage_of
        self._microbatches = [len(schedule.paths) for schedule in plan.schedules]
        self._queue = MicrobatchQueue(store, len(plan.stage_of))

    def _order(self, index: int, schedule_id: int) -> Iterator[Operation]:
        """Take microbatches until the batch is complete."""
        if self._takes_microbatches:
            for microbatch in self._queue.take(index, self._microbatches[schedule_id]):
                yield from ((kind, microbatch) for kind in "FHB")


def _require_queued(plan: TrainingPlan) -> None:
    """Refuse plans whose microbatches cannot be taken from a queue."""
    if len(plan.assignment.groups) > 1:
        raise PlanError(
            f"assignment.groups: own pace needs whole models, found {len(plan.assignment.groups)} "
            "stages; plan one stage, or several with --wiring stochastic, where devices take "
            "microbatches at their own pace too"
        )
    if plan.wiring is Wiring.STOCHASTIC:
        raise PlanError(
            "wiring: own pace takes microbatches from the store, found kind 'stochastic'; leave "
            "out --own-pace"
        )
    if plan.sync.local_steps:
        raise PlanError(
            "sync: own pace needs gradients that are averaged every step, found every_steps "
            f"{plan.sync.every_steps}{'' if plan.sync.outer is None else ' with outer'}; leave "
            "out --own-pace"
        )
