"""A shared queue of microbatches, from which devices take the next one while they compute.

In DeDLOC (3.1) every device has the whole model, and takes microbatches at its own pace until the
batch is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch.distributed.distributed_c10d import Store

from planner.executor.runtime.pipeline import EndCallback, IssuedOperation, PipelineLinks
from planner.executor.runtime.records import StepRecord
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.training_plan.choices import Wiring
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan


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


class QueuePipeline:
    """Runs microbatches of the queue through the whole model; for plans of one stage."""

    fixed_order = False

    def __init__(self, plan: TrainingPlan, rank: int, runtime: StageRuntime, store: Store) -> None:
        _require_queued(plan)
        self._schedules, self._rank, self._runtime = plan.schedules, rank, runtime
        self.peers: set[int] = set()
        self.loss_ranks = set(plan.stage_of)
        self._queue = MicrobatchQueue(store, len(self.loss_ranks))

    def open(self, links: PipelineLinks, schedule_ids: Sequence[int]) -> None:
        """No messages are exchanged."""

    def run(self, index: int, schedule_id: int, record: StepRecord, on_end: EndCallback) -> None:
        """Take microbatches until the batch is complete."""
        if self._rank in self.loss_ranks:
            numbers = self._queue.take(index, len(self._schedules[schedule_id].paths))
            run_whole_model(numbers, self._runtime, self._rank, record)

    def finish(self) -> None:
        """No messages are exchanged."""


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


def run_whole_model(
    microbatches: Iterable[int], runtime: StageRuntime, rank: int, record: StepRecord
) -> None:
    """Run microbatches through the whole model on this device."""
    backend = runtime.backend
    issued: deque[IssuedOperation] = deque()
    for microbatch in microbatches:
        for kind in "FHB":
            start = backend.record_event()
            runtime.run_op(kind, microbatch, None)
            issued.append(IssuedOperation((kind, microbatch), start, backend.record_event()))
            if len(issued) > backend.max_pending:
                issued.popleft().wait_and_record(backend, rank, record)
    for operation in issued:
        operation.wait_and_record(backend, rank, record)
