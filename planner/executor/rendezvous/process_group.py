"""This process among all of a plan, and the store through which they meet.

Only before the first step and after the last one: within steps ranks wait for messages alone.
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
"""Where nobody notices who is gone."""
WATCHED = timedelta(days=1)
"""Where somebody does: others may compute for long."""
PARTING = timedelta(seconds=10)


@dataclass(frozen=True)
class ProcessGroup:
    """One rank of many.

    Attributes
    ----------
    rank
        This process: the device's index in the plan.
    world
        How many there are.
    names
        Of the devices; empty: they are called by their ranks.
    watch
        Looks after the others; None: nobody does.
    held
        Ended with the run.
    loss
        Of one of these ranks, where the others go on without it; None: then the run ends.
    waiting
        Around waiting for keys of the store, which that must end.
    late
        Whether the others have begun without this one.
    secret
        Of the run, which ranks prove to each other; None: there is none.
    address
        Where the others reach this process; empty: as the environment says.
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
        """What threads of a block share: it fails with the run, with a rank, and with the block."""
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
        """Of a rank's device."""
        return self.names[rank] if self.names else str(rank)

    def share(self, name: str, text: str) -> list[str]:
        """What every rank gave, in order of ranks; waits for all."""
        self.store.set(f"{name}/{self.rank}", text)
        keys = [f"{name}/{r}" for r in range(self.world)]
        self.wait(keys)
        return [value.decode() for value in self.store.multi_get(keys)]

    def meet(self, name: str) -> None:
        """Wait for all ranks."""
        if self.store.add(f"{name}/count", 1) == self.world:
            self.store.set(f"{name}/all", "")
        self.wait([f"{name}/all"])

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until keys of the store have values."""
        with self.waiting(keys):
            self.store.wait(list(keys), self._timeout)

    def part(self) -> None:
        """Wait for all ranks for the last time; the store's own process leaves last."""
        self.meet("parting")
        if self.detector is not None:
            self.detector.finish()
        if self.store.add("parted", 1) == self.world:
            self.store.set("parted/all", "")
        # nothing is closed while somebody still listens; all work is done, so that who has gone
        # without a word is waited for no longer
        with suppress(DistError):
            self.store.wait(["parted/all"], PARTING)
        self.held.close()
