"""Run tasks on several processes and yield their results one by one."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import FrameType

from planner.bench.problem_files import problem_hash
from planner.bench.registry import INSTANCES
from planner.bench.result_rows import BenchRow
from planner.bench.task import Task, TaskResult, run_task, start_worker
from planner.search.interrupts import INTERRUPTS


class Interrupted(Exception):
    """Ctrl-C was pressed; finished results are kept."""


def run_tasks(tasks: Sequence[Task], jobs: int) -> Iterator[TaskResult]:
    """Run all tasks on ``jobs`` processes; yield results as they complete."""
    return _in_process(tasks) if jobs == 1 else _in_pool(tasks, jobs)


def _in_process(tasks: Sequence[Task]) -> Iterator[TaskResult]:
    """Run in this process; after Ctrl-C, solvers return early, and that result is discarded."""
    interrupted = False

    def note(_: int, __: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    for task in tasks:
        previous_handler = signal.signal(signal.SIGINT, note)
        try:
            done = run_task(task)
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            signal.signal(signal.SIGINT, previous_handler)
        if interrupted or INTERRUPTS.requested:
            raise Interrupted
        yield done


def _in_pool(tasks: Sequence[Task], jobs: int) -> Iterator[TaskResult]:
    remaining = list(tasks)
    while remaining:
        doubtful: list[Task] = []
        for task, done in _until_broken(remaining, jobs):
            remaining.remove(task)
            if done is None:
                doubtful.append(task)
            else:
                yield done
        # rerun interrupted tasks one at a time to find the one that kills its process
        for task in doubtful:
            for _, done in _until_broken([task], 1):
                yield done or TaskResult(_dead(task), None)


def _until_broken(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, TaskResult | None]]:
    """Yield tasks with their results; None for tasks that were running when a process died."""
    context = multiprocessing.get_context("spawn")
    earlier_children = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=start_worker)
    waiting, going = list(tasks), dict[Future[TaskResult], Task]()
    try:
        while waiting or going:
            while waiting and len(going) < jobs:
                task = next_task(waiting, going.values())
                waiting.remove(task)
                going[pool.submit(run_task, task)] = task
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                task = going.pop(future)
                try:
                    yield task, future.result()
                except BrokenProcessPool:
                    yield task, None
                    for other in going.values():
                        yield other, None
                    return
    except BrokenProcessPool:  # between two tasks
        for other in going.values():
            yield other, None
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - earlier_children:
            process.terminate()
            process.join()


def next_task(waiting: Sequence[Task], going: Iterable[Task]) -> Task:
    """Return the first task of a family that no other process runs, or else the first.

    The first process of a family compiles what it needs; others load that from the cache.
    """
    under_way = {INSTANCES[task.instance].family for task in going}
    other_families = (task for task in waiting if INSTANCES[task.instance].family not in under_way)
    return next(other_families, waiting[0])


def _dead(task: Task) -> BenchRow:
    problem = problem_hash(INSTANCES[task.instance].make())
    reason = "its process died (memory, or a crash in compiled code)"
    return BenchRow(
        task.instance, problem, task.method, "other", task.seed, task.effort,
        False, reason, None, None, False, "", 0.0,
    )  # fmt: skip
