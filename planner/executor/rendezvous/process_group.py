"""The process group of a run, and the store through which ranks coordinate.

Used before the first step and after the last one: within steps ranks wait for messages alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import RunAborted
from planner.executor.rendezvous.secret import Secret

TIMEOUT = timedelta(minutes=10)
"""Timeout without a failure detector."""
WATCHED = timedelta(days=1)
"""Timeout with a failure detector: others may compute for long."""
PARTING = timedelta(seconds=10)


@dataclass(frozen=True)
class ProcessGroup:
    """One rank of many.

    Attributes
    ----------
    rank
        This rank: the index of its device in the plan.
    world
        Number of ranks.
    names
        Device names; empty to use ranks.
    detector
        The failure detector; None for none.
    held
        Resources that are closed with the run.
    loss
        Latch for the loss of a rank in an elastic run; None if a loss ends the run.
    waiting
        Context in which keys of the store are awaited, so that a loss interrupts it.
    late
        Whether the others have started without this one.
    secret
        Secret of the run; None for none.
    address
        Where others reach this process; empty to use the environment.
    """

    rank: int
    world: int
    store: Store
    names: tuple[str, ...] = ()
    detector: FailureDetector | None = None
    held: ExitStack = field(default_factory=ExitStack, compare=False)
    loss: ErrorLatch | None = None
    waiting: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda keys: nullcontext()
    late: bool = False
    secret: Secret | None = None
    address: str = ""

    @property
    def _timeout(self) -> timedelta:
        return TIMEOUT if self.detector is None else WATCHED

    @contextmanager
    def failing(self) -> Iterator[ErrorLatch]:
        """Error latch for threads of a block: it fails with the run, with a rank, and with the
        block."""
        failure, loss = ErrorLatch(), self.loss
        shutdown_ = None if self.detector is None else self.detector.shutdown_

        def end() -> None:
            failure(RunAborted())

        if shutdown_ is not None:
            shutdown_.on_end(end)
        if loss is not None:
            loss.on_failure(lambda: failure(loss.error or RunAborted()))
        try:
            yield failure
        finally:
            end()
            if shutdown_ is not None:
                shutdown_.forget(end)

    def name(self, rank: int) -> str:
        """Device name of a rank."""
        return self.names[rank] if self.names else str(rank)

    def all_gather(self, name: str, text: str) -> list[str]:
        """All-gather of texts, in order of ranks."""
        self.store.set(f"{name}/{self.rank}", text)
        keys = [f"{name}/{r}" for r in range(self.world)]
        self.wait(keys)
        return [value.decode() for value in self.store.multi_get(keys)]

    def barrier(self, name: str) -> None:
        """Barrier."""
        if self.store.add(f"{name}/count", 1) == self.world:
            self.store.set(f"{name}/all", "")
        self.wait([f"{name}/all"])

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until keys of the store have values."""
        with self.waiting(keys):
            self.store.wait(list(keys), self._timeout)

    def leave(self) -> None:
        """Last barrier of the run; the store's process leaves last."""
        self.barrier("parting")
        if self.detector is not None:
            self.detector.stop_watching()
        if self.store.add("parted", 1) == self.world:
            self.store.set("parted/all", "")
        # close connections after all ranks have finished; all work is done, so wait for a silent
        # rank for a limited time only
        with suppress(DistError):
            self.store.wait(["parted/all"], PARTING)
        self.held.close()


def close_older(held: list[ExitStack]) -> None:
    """Close what was held before the last two: ranks that are behind may still read from those."""
    for past in held[:-2]:
        past.close()
    del held[:-2]
