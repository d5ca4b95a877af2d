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
from planner.bench.work import TaskResult


@dataclass
class KeptSolutions:
    """Folder of solutions, each replaced when a run finds a better one.

    Attributes
    ----------
    folder
        Contains ``family/name.json.gz``.
    """

    folder: Path
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def require_own(self, instances: Iterable[str]) -> None:
        """Reject a folder that contains other files under the solutions' names."""
        for instance in dict.fromkeys(instances):
            path = find_solution(self.folder, instance)
            try:
                if path is not None:
                    read_solution(path)
            except AnswerError as error:
                raise ValueError(f"--keep {self.folder}: {error}; name another folder") from None

    def offer(self, done: TaskResult) -> None:
        """Keep a solution or bound if it is better."""
        row = done.row
        if done.answer is None or row.objective is None:
            return
        family = ProblemFamily(row.instance.partition("/")[0])
        kept = self._of(row.instance, row.problem)
        bound = kept.get("bound")
        new = dict(kept)
        if family.better(row.objective, kept.get("objective")):
            new |= {
                "method": row.method,
                "seed": row.seed,
                "effort": row.effort,
                "objective": row.objective,
                "answer": done.answer,
            }
        # the better bound leaves the smaller gap
        if row.bound is not None and (bound is None or family.better(bound["value"], row.bound)):
            new["bound"] = {
                "value": row.bound,
                "recomputed": row.bound_recomputed,
                "basis": row.bound_basis,
                "method": row.method,
            }
        if new != kept:
            self._known[row.instance] = new
            write_solution(self.folder / f"{row.instance}.json.gz", new)

    def _of(self, instance: str, problem: str) -> dict[str, Any]:
        if instance not in self._known:
            path = find_solution(self.folder, instance)
            found: dict[str, Any] = {}
            if path is not None:
                try:
                    found = read_solution(path)
                except AnswerError:
                    found = {}
            blank = {"format": FORMAT, "instance": instance, "problem": problem}
            # ignore a solution of another problem with this name
            self._known[instance] = found if found.get("problem") == problem else blank
        return self._known[instance]
