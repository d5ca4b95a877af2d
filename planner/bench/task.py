"""One task of the benchmark: run a method on an instance and evaluate its solution."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.bench.evaluation import evaluate
from planner.bench.method import BenchMethod, MethodKind, foreign_method
from planner.bench.problem import ProblemFamily
from planner.bench.problem_files import problem_hash
from planner.bench.registry import FAMILIES, INSTANCES, METHODS
from planner.bench.result_rows import BenchRow
from planner.bench.solution_files import AnswerError, answer_data, read_solution
from planner.cli.time_budget import TimeLeft
from planner.search.incumbent import WrongBoundError
from planner.search.stop import TimeLimitReached

WARM_EFFORT = 0.01


@dataclass(frozen=True)
class Task:
    """Task of a worker process.

    Attributes
    ----------
    method
        A registered name, ``package.module:function``, or the row name of a solution folder.
    guard_s
        Timeout in seconds.
    solution
        Solution file to evaluate instead of running a method.
    """

    instance: str
    method: str
    seed: int
    effort: float
    guard_s: float
    solution: Path | None = None


@dataclass(frozen=True)
class TaskResult:
    """Result of a task.

    Attributes
    ----------
    answer
        JSON form of the solution, if it was accepted.
    """

    row: BenchRow
    answer: dict[str, Any] | None


_warm: set[ProblemFamily] = set()


def start_worker() -> None:
    """Initialize a worker process: ignore Ctrl-C and end together with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    """End the process when its parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_task(task: Task) -> TaskResult:
    """Run and evaluate a task."""
    instance = INSTANCES[task.instance]
    problem = instance.make()
    kind, method = MethodKind.OTHER, None
    if task.solution is None:
        method = method_of(instance.family, task.method)
        kind = method.kind
        _warm_up(instance.family)
    seconds, answer, reason = 0.0, None, ""
    began = time.perf_counter()
    try:
        with TimeLeft(task.guard_s).cut():
            if method is None:
                assert task.solution is not None
                answer = read_solution(task.solution)["answer"]
            else:
                answer = method.run(problem, task.seed, task.effort)
    except TimeLimitReached:
        reason = f"cut off after {task.guard_s:g} s"
    except WrongBoundError:
        raise
    # any error of a user's function becomes its row
    except (Exception, SystemExit) as error:
        reason = _one_line(error)
    seconds = time.perf_counter() - began
    # built again, since a user's function may have modified its argument
    problem = instance.make()
    accepted = None
    if not reason:
        try:
            accepted = evaluate(instance.family, problem, answer)
        except AnswerError as error:
            reason = _one_line(error)
    # accept bounds of built-in solvers, and bounds that the checker recomputes
    bound = accepted.bound if accepted is not None else None
    if kind is MethodKind.OTHER and instance.family is not ProblemFamily.REBALANCING:
        bound = None
    row = BenchRow(
        task.instance,
        problem_hash(problem),
        task.method,
        str(kind),
        task.seed,
        task.effort,
        accepted is not None,
        reason,
        None if accepted is None else accepted.objective,
        None if bound is None else bound.value,
        bound is not None and bound.recomputed,
        "" if bound is None else bound.basis,
        seconds,
    )
    return TaskResult(row, None if accepted is None else answer_data(accepted.plan))


def method_of(family: ProblemFamily, name: str) -> BenchMethod:
    """Return a registered method or a user's function."""
    for method in METHODS:
        if method.name == name and family in method.families:
            return method
    return foreign_method(name)


def _warm_up(family: ProblemFamily) -> None:
    """Import and compile what a family's methods need, so that no row includes it."""
    if family in _warm:
        return
    _warm.add(family)
    module = next(module for module in FAMILIES if module.INSTANCES[0].family is family)
    problem = next(instance for instance in module.INSTANCES if instance.quick).make()
    for method in module.METHODS:
        try:
            method.run(problem, 0, WARM_EFFORT)
        except ValueError:
            continue


def _one_line(error: BaseException) -> str:
    """Format an error in one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return (f"{text}" if isinstance(error, ValueError) and text else f"{name}: {text}")[:300]
