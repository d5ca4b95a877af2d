"""Tasks of a search in processes, threads and by executors of others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.search import worker_pool
from planner.search.worker_pool import WorkerPool, Workers
from tests.planning.test_layouts import model, regions


class Squares:
    """An object with tasks."""

    def __init__(self, plus: int) -> None:
        self.plus, self.parent = plus, os.getpid()

    def square(self, x: int) -> int:
        return x * x + self.plus

    def where(self, _: int) -> int:
        return os.getpid()

    def fails(self, x: int) -> int:
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def raises(self, x: int) -> int:
        raise ValueError(f"of task {x}")


class Sending(Executor):
    """Runs tasks at once, and counts the bytes of their objects."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.inner = ProcessPoolExecutor(1, get_context("spawn"))

    def submit(self, function: Any, /, *args: Any, **_: Any) -> Future[Any]:
        self.sent.append(len(args[1] or b""))
        return self.inner.submit(function, *args)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes without delay."""
    monkeypatch.setattr(worker_pool, "START_AFTER_S", -1.0)


@pytest.fixture(params=[1, 3, "threads", "spawned processes"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Several kinds of workers."""
    if isinstance(request.param, int):
        yield request.param
        return
    made: Executor = ThreadPoolExecutor(2)
    if request.param != "threads":
        made = ProcessPoolExecutor(2, get_context("spawn"))
    with made:
        yield made


def test_results_come_in_the_order_of_tasks(workers: Workers) -> None:
    """Whatever runs them."""
    one, other = Squares(0), Squares(5)
    with WorkerPool(workers, one, other) as pool:
        tasks = [(x,) for x in range(40)]
        assert list(pool.map(one.square, tasks)) == [x * x for x in range(40)]
        assert list(pool.map(other.square, tasks)) == [x * x + 5 for x in range(40)]
        with pytest.raises(ValueError, match="of task 3"):
            list(pool.map(one.raises, [(3,), (4,)]))


def test_processes_take_part_and_end() -> None:
    """One task alone stays here, as do later tasks of a search that a signal has ended."""
    squares = Squares(0)
    with WorkerPool(2, squares) as pool:
        found = set(pool.map(squares.where, [(x,) for x in range(20)]))
        assert os.getpid() not in found and 1 <= len(found) <= 2
        assert set(pool.map(squares.where, [(0,)])) == {os.getpid()}
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_objects_are_sent_once_to_a_worker() -> None:
    """The first tasks ask for them."""
    squares, executor = Squares(1), Sending()
    with WorkerPool(executor, squares) as pool, executor.inner:
        assert list(pool.map(squares.square, [(2,), (3,)])) == [5, 10]
        first = [size for size in executor.sent if size]
        assert list(pool.map(squares.square, [(4,), (5,)])) == [17, 26]
        assert [size for size in executor.sent if size] == first and 1 <= len(first) <= 2


def test_lost_workers_lose_no_task(caplog: pytest.LogCaptureFixture) -> None:
    """The search goes on without them."""
    squares = Squares(0)
    with WorkerPool(2, squares) as pool:
        assert list(pool.map(squares.fails, [(x,) for x in range(6)])) == list(range(6))
    assert "the search goes on without them" in caplog.text


def test_a_worker_that_is_ended_before_it_begins_ends() -> None:
    """It is forked with signals blocked, so that the one that ends it is pending."""
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        worker_pool._begin("", (), None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_no_worker_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where too many processes run; those that were started end."""
    squares, fork, forks = Squares(0), os.fork, list[int]()

    def fork_once() -> int:
        if forks:
            raise BlockingIOError("too many processes")
        forks.append(fork())
        return forks[0]

    monkeypatch.setattr(os, "fork", fork_once)
    with WorkerPool(3, squares) as pool:
        assert list(pool.map(squares.where, [(1,), (2,)])) == [os.getpid()] * 2
    assert "no worker could be started (too many processes)" in caplog.text
    os.waitpid(forks[0], 0)


class Failing(Sending):
    """An executor whose workers are lost in a way of its own."""

    def submit(self, function: Any, /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(KeyError("worker killed"))
        return future


def test_a_failing_executor_loses_no_task(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it raises."""
    squares, executor = Squares(0), Failing()
    with WorkerPool(executor, squares) as pool, executor.inner:
        assert list(pool.map(squares.square, [(2,), (3,)])) == [4, 9]
    assert "worker killed" in caplog.text


def test_the_same_plan_with_any_workers(workers: Workers) -> None:
    """With counted effort."""
    cluster, work = regions([3, 2, 2], seed=1), model(5, 24)
    alone = pl.plan(cluster, work, stop=pl.Effort(0.5))
    if workers == 3:
        workers = np.int64(3)  # type: ignore[assignment]
    found = pl.plan(cluster, work, stop=pl.Effort(0.5), executor=workers)
    assert found.plan is not None and alone.plan is not None
    assert found.plan.content_hash == alone.plan.content_hash
    assert pl.check(found, cluster) == []


@pytest.mark.parametrize("workers", [0, True, "2", None])
def test_what_is_no_executor(workers: Any) -> None:
    """Is refused in one line."""
    with pytest.raises(ValueError, match="give a number of processes from 1, or a"):
        pl.plan(regions([2, 1]), model(3), stop=pl.Effort(0.1), executor=workers)


SEARCH = """
import planner as pl
from planner.search import worker_pool
from planner.search.stop import SearchRun
from tests.planning.test_layouts import model, regions

worker_pool.START_AFTER_S = -1.0
pl.plan(regions([4, 4, 4], seed=1), model(6, 64), stop=pl.Effort(1e6), executor=2)
"""


def children(pid: int) -> set[int]:
    """Processes that another one has started."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_search(number: int) -> None:
    """Whether it is interrupted or killed."""
    search = subprocess.Popen([sys.executable, "-c", SEARCH], stderr=subprocess.PIPE)
    ends = time.monotonic() + 60
    while not (found := children(search.pid)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert found
    search.send_signal(number)
    search.communicate(timeout=60)
    while any(Path(f"/proc/{pid}").exists() for pid in found) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not [pid for pid in found if Path(f"/proc/{pid}").exists()]
