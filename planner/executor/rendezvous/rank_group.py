"""The ranks of a run, and collectives over the store through which they coordinate.

Collectives run before the first step, between steps and after the last one: within a step, ranks
wait for messages of their peers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import RunAborted
from planner.executor.rendezvous.secret import Secret

ALL_LEFT_KEY = "left/all"
TIMEOUT = timedelta(minutes=10)
"""Timeout without a failure detector."""
LONG_TIMEOUT = timedelta(days=1)
"""Timeout with a failure detector: others may compute for long."""
LEAVE_TIMEOUT = timedelta(seconds=10)
JOIN_S = 2.0
"""Timeout for threads whose connections are closed: they must not outlive a generation."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run, from the view of one of them: identity, store and failure handling.

    Unlike a ProcessGroup of PyTorch it transfers no tensors.

    Attributes
    ----------
    rank
        This rank: the index of its device in the plan.
    world_size
        Number of ranks.
    names
        Device names; empty to use ranks.
    detector
        The failure detector; None for none.
    resources
        Connections that stay open until the end of the run.
    rank_lost
        Fails when a rank of an elastic run is lost; None if a loss ends the run.
    interruptible_get
        Waits for keys of the store and returns their values, unless a rank is lost; None if a loss
        ends the run.
    key_prefix
        Prefix of its keys in the store of the run.
    joins_late
        Whether the other ranks have started without this one.
    secret
        Secret of the run; None for none.
    address
        Where others reach this process; empty to use the environment.
    """

    rank: int
    world_size: int
    store: Store
    names: tuple[str, ...] = ()
    detector: FailureDetector | None = None
    resources: ExitStack = field(default_factory=ExitStack, compare=False)
    rank_lost: ErrorLatch | None = None
    interruptible_get: Callable[[Sequence[str]], list[bytes]] | None = None
    key_prefix: str = ""
    joins_late: bool = False
    secret: Secret | None = None
    address: str = ""
    _used_keys: list[str] = field(default_factory=list, init=False, compare=False, repr=False)

    @contextmanager
    def error_latch(self) -> Iterator[ErrorLatch]:
        """Context with an error latch for its threads.

        The latch fails if the run is aborted or a rank is lost, and when the context ends, which
        waits for the threads. Enter it before their connections are opened, so that it ends after
        they are closed.
        """
        error_latch = ErrorLatch()
        shutdown = None if self.detector is None else self.detector.shutdown
        try:
            with ExitStack() as registered:
                for cause in (shutdown, self.rank_lost):
                    if cause is not None:
                        registered.enter_context(
                            cause.calling(partial(_fail_too, error_latch, cause))
                        )
                yield error_latch
        finally:
            error_latch.fail(RunAborted())
            error_latch.join_threads(JOIN_S)

    def on_rank_lost(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """Context in which a callback is called if a rank of an elastic run is lost."""
        return nullcontext() if self.rank_lost is None else self.rank_lost.calling(callback)

    def name(self, rank: int) -> str:
        """Device name of a rank."""
        return self.names[rank] if self.names else str(rank)

    def all_gather(self, name: str, text: str, *, keep: bool = False) -> list[str]:
        """All-gather of texts, in order of ranks; a collective call.

        The keys are deleted by the next call, unless ``keep`` is true. Then a rank that joins late
        reads what the others wrote before the first step.
        """
        previous_keys, own_key = list(self._used_keys), f"{name}/{self.rank}"
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        if self.joins_late and keep:
            return [value.decode() for value in self.store.multi_get(keys)]
        if not keep:
            self._used_keys.append(own_key)
        self.store.set(own_key, text)
        values = self._get(keys)
        self._delete_used(previous_keys)
        return [value.decode() for value in values]

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called this; ``name`` is used once."""
        previous_keys, count_key, all_key = list(self._used_keys), f"{name}/count", f"{name}/all"
        if self.store.add(count_key, 1) == self.world_size:
            self._used_keys.extend([count_key, all_key])
            self.store.set(all_key, "")
        self._wait([all_key])
        self._delete_used(previous_keys)

    def delete_used_keys(self) -> None:
        """Delete the keys of the last call, once all ranks have returned from it or given it up."""
        self._delete_used(list(self._used_keys))

    def _delete_used(self, keys: Sequence[str]) -> None:
        # all ranks have entered the present call, so all have returned from the previous one
        if keys:
            self.delete_keys(keys)
            self._used_keys[:] = [key for key in self._used_keys if key not in keys]

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete keys that no rank will read: in the background, if there is a failure detector."""
        if self.detector is None or not self.detector.is_watching:
            for key in keys:
                self.store.delete_key(key)
            return
        names = [self.key_prefix + key for key in keys]

        def delete(store: Store) -> None:
            for name in names:
                store.delete_key(name)

        self.detector.heartbeat.run_later(delete)

    def _wait(self, keys: Sequence[str]) -> None:
        """Wait for keys, without the round trip of their values: steps start after barriers."""
        if self.interruptible_get is not None:
            self.interruptible_get(keys)
        else:
            self.store.wait(list(keys), TIMEOUT if self.detector is None else LONG_TIMEOUT)

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if self.interruptible_get is not None:
            return self.interruptible_get(keys)
        self._wait(keys)
        values: list[bytes] = self.store.multi_get(list(keys))
        return values

    def leave(self) -> None:
        """Wait for all ranks after the last step, and close connections.

        The process that serves the store returns last.
        """
        self.barrier("leaving")
        if self.detector is not None:
            self.detector.stop_watching()
        if self.store.add("left/count", 1) == self.world_size:
            self.store.set(ALL_LEFT_KEY, "")
        # close connections after all ranks have finished; all work is done, so wait for a silent
        # rank for a limited time only
        with suppress(DistError):
            self.store.wait([ALL_LEFT_KEY], LEAVE_TIMEOUT)
        self.resources.close()


def _fail_too(error_latch: ErrorLatch, cause: ErrorLatch) -> None:
    error_latch.fail(cause.error or RunAborted())


def close_older(resources: list[ExitStack]) -> None:
    """Close all but the last two: ranks that are a segment behind may still read from those."""
    for older in resources[:-2]:
        older.close()
    del resources[:-2]
