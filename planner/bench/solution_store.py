"""Best solution and best bound of every instance of a run, as solution files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.bench.problem import ProblemFamily
from planner.bench.solution_files import (
    FORMAT,
    AnswerError,
    find_solution,
    read_solution,
    write_solution,
)
from planner.bench.task import TaskResult


@dataclass
class SolutionStore:
    """Folder of solutions, each replaced when a run finds a better one.

    Attributes
    ----------
    folder
        Contains ``family/name.json.gz``.
    """

    folder: Path
    _best: dict[str, dict[str, Any]] = field(default_factory=dict)

    def require_own(self, instances: Iterable[str]) -> None:
        """Reject a folder that contains other files under the solutions' names."""
        for instance in dict.fromkeys(instances):
            path = find_solution(self.folder, instance)
            try:
                if path is not None:
                    read_solution(path)
            except AnswerError as error:
                raise ValueError(f"--keep {self.folder}: {error}; name another folder") from None

    def offer(self, task_result: TaskResult) -> None:
        """Keep a solution or bound if it is better."""
        row = task_result.row
        if task_result.answer is None or row.objective is None:
            return
        family = ProblemFamily(row.instance.partition("/")[0])
        best = self._best_of(row.instance, row.problem)
        bound = best.get("bound")
        new = dict(best)
        if family.better(row.objective, best.get("objective")):
            new |= {
                "method": row.method,
                "seed": row.seed,
                "effort": row.effort,
                "objective": row.objective,
                "answer": task_result.answer,
            }
        # the better bound leaves the smaller gap
        if row.bound is not None and (bound is None or family.better(bound["value"], row.bound)):
            new["bound"] = {
                "value": row.bound,
                "recomputed": row.bound_recomputed,
                "basis": row.bound_basis,
                "method": row.method,
            }
        if new != best:
            self._best[row.instance] = new
            write_solution(self.folder / f"{row.instance}.json.gz", new)

    def _best_of(self, instance: str, problem: str) -> dict[str, Any]:
        if instance not in self._best:
            path = find_solution(self.folder, instance)
            stored: dict[str, Any] = {}
            if path is not None:
                try:
                    stored = read_solution(path)
                except AnswerError:
                    stored = {}
            blank = {"format": FORMAT, "instance": instance, "problem": problem}
            # ignore a solution of another problem with this name
            self._best[instance] = stored if stored.get("problem") == problem else blank
        return self._best[instance]
