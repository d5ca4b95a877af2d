"""Runs the tasks of a search here, in processes of this machine, or by any executor.

Results come in the order of the tasks, and a search reads no clock between tasks that depend on
each other: with counted effort the result is the same for any number of workers.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from planner.search.interrupts import INTERRUPTS, NAMES

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

Workers = int | Executor
"""A number of processes on this machine, or an executor."""

START_AFTER_S = 0.3
"""Seconds of work before processes are started: a shorter search ends sooner without them."""
MAX_REMEMBERED = 2
"""Groups of objects that a worker of an executor keeps."""


class _Missing(Enum):
    """Answer of a worker that does not have the objects of a task yet."""

    OBJECTS = 0


@dataclass(frozen=True)
class _Raised:
    """Answer of a worker whose task raised an error."""

    error: Exception


_local = threading.local()
"""Of each thread of a worker: ``objects`` whose methods are called, by key."""
_stop: Any = None
"""In a process of this machine: the event that ends its tasks early."""


def stop_requested() -> bool:
    """Whether a long task should end early, since nobody waits for its result."""
    return INTERRUPTS.requested or (_stop is not None and _stop.is_set())


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def require_workers(workers: Any) -> Workers:
    """The argument, if it is a number of processes or an executor."""
    if isinstance(workers, Executor):
        return workers
    is_count = isinstance(workers, (int, np.integer)) and not isinstance(workers, bool)
    if is_count and workers >= 1:
        return int(workers)
    raise ValueError(
        f"executor is {workers!r}; give a number of processes from 1, or a "
        "concurrent.futures.Executor"
    )


class WorkerPool:
    """Calls methods of some objects for many arguments, in parallel.

    Parameters
    ----------
    workers
        Where tasks run. Processes of this machine are forked on Linux, and share the memory of the
        objects; an executor gets them pickled, with every task whose worker lacks them.
    objects
        What tasks are methods of. Tasks must not change them in a way that later tasks see.
    """

    def __init__(self, workers: Workers, *objects: object) -> None:
        self._objects = objects
        self._count = workers if isinstance(workers, int) else None
        self._executor = None if isinstance(workers, int) else workers
        self._pickled: bytes | None = None
        self._key = f"{os.getpid()}-{id(self)}"
        self._worked_s = 0.0
        self._stop: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the processes that were started here; an executor stays as it is."""
        if self._stop is not None:
            self._stop.set()
        if self._count is not None and self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def map(
        self, method: Callable[..., ResultT], tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[ResultT]:
        """Results of ``method(*task)`` in order; those that nobody waits for are not computed.

        Parameters
        ----------
        method
            A method of one of the objects, which must depend on nothing but them and the task.
        """
        tasks = list(tasks)
        position = 0
        if len(tasks) > 1:
            # an interrupted search ends with few tasks, which need not wait for busy workers
            while position < len(tasks) and not self._is_parallel():
                yield self._here(method, tasks[position])
                position += 1
            for result in self._parallel(method, tasks[position:]):
                position += 1
                yield result
        for task in tasks[position:]:
            yield self._here(method, task)

    def _is_parallel(self) -> bool:
        """Whether tasks go to workers; starts processes once that is worth while."""
        if INTERRUPTS.requested:
            return False
        if self._executor is None and (self._count or 1) > 1 and self._worked_s > START_AFTER_S:
            self._start()
        return self._executor is not None

    def _here(self, method: Callable[..., ResultT], task: tuple[Any, ...]) -> ResultT:
        began = time.perf_counter()
        result = method(*task)
        self._worked_s += time.perf_counter() - began
        return result

    def _start(self) -> None:
        """Start processes that have the objects."""
        # elsewhere libraries of the system may not survive it
        can_fork = sys.platform == "linux"
        context = multiprocessing.get_context("fork" if can_fork else None)
        if can_fork:
            _end_solver_threads()
        others = set(multiprocessing.active_children())
        try:
            # a signal between two forks would leave processes that nobody ends
            with _signals_blocked(), warnings.catch_warnings():
                # of threads that hold locks; those of the solvers have ended
                warnings.simplefilter("ignore", DeprecationWarning)
                self._stop = context.Event()
                executor = ProcessPoolExecutor(
                    self._count, context, _begin, (self._key, self._objects, self._stop)
                )
                executor.submit(os.getpid)
                self._executor = executor
        except (OSError, RuntimeError, AssertionError, ImportError) as error:
            # too many processes, no semaphores, or this process may have no children
            logger.warning("no worker could be started (%s); the search goes on without", error)
            self._count = 1
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()

    def _parallel(
        self, method: Callable[..., ResultT], tasks: list[tuple[Any, ...]]
    ) -> Iterator[ResultT]:
        """Results of workers in order; fewer than tasks if the workers have failed."""
        if not tasks or self._executor is None:
            return
        owner = getattr(method, "__self__", None)
        index = next(k for k, known in enumerate(self._objects) if known is owner)
        futures: list[Future[Any]] = []
        raised: Exception | None = None
        try:
            for task in tasks:
                futures.append(self._submit(None, index, method.__name__, task))
            for k in range(len(tasks)):
                result = futures[k].result()
                if result is _Missing.OBJECTS:
                    for j in range(k, len(tasks)):
                        if futures[j].done() and futures[j].result() is _Missing.OBJECTS:
                            futures[j] = self._submit(self._bytes, index, method.__name__, tasks[j])
                    result = futures[k].result()
                if isinstance(result, _Raised):
                    raised = result.error
                    break
                yield result
        except Exception as error:
            # a task's own error is a result: this one is of the executor, whatever its kind
            logger.warning("workers have ended (%r); the search goes on without them", error)
            self._executor, self._count = None, 1
        finally:
            for future in futures:
                future.cancel()
        if raised is not None:
            raise raised

    def _submit(
        self, pickled: bytes | None, index: int, name: str, task: tuple[Any, ...]
    ) -> Future[Any]:
        assert self._executor is not None
        if self._count is None and self._pickled is None:
            # workers know objects by what they were pickled to
            self._key = hashlib.sha256(self._bytes).hexdigest()
        return self._executor.submit(_call, self._key, pickled, index, name, task)

    @property
    def _bytes(self) -> bytes:
        """The objects for workers that do not share memory."""
        if self._pickled is None:
            self._pickled = pickle.dumps(self._objects)
        return self._pickled


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Deliver signals after the block."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _known_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _known_signals() -> list[int]:
    return [getattr(signal, name) for name in (*NAMES, "SIGALRM") if hasattr(signal, name)]


def _end_solver_threads() -> None:
    """End HiGHS's idle threads, for which its MILPs would wait in a forked process."""
    with suppress(ImportError, AttributeError):
        from scipy.optimize._highspy import _core

        _core._Highs.resetGlobalScheduler(True)


def _begin(key: str, objects: Sequence[object], stop: Any) -> None:
    """Start of a process: leave signals to the parent, and end with it."""
    global _stop
    # to ignore SIGTERM, if only for a moment, would discard one that is pending
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in NAMES:
        if name != "SIGTERM" and hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _known_signals())
    _local.objects, _stop = {key: objects}, stop
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """End this process when its parent has ended, also by SIGKILL."""
    wait([sentinel])
    os._exit(1)


def _call(key: str, pickled: bytes | None, index: int, name: str, task: tuple[Any, ...]) -> Any:
    """In a worker: the result of a task, or that its objects are missing."""
    known: dict[str, Sequence[object]] = _local.__dict__.setdefault("objects", {})
    if key not in known:
        if pickled is None:
            return _Missing.OBJECTS
        while len(known) >= MAX_REMEMBERED:
            del known[next(iter(known))]
        known[key] = pickle.loads(pickled)
    try:
        return getattr(known[key][index], name)(*task)
    except Exception as error:
        return _Raised(error)
