"""Table of best known solutions; only solutions that pass the checker are added."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import planner
from planner.bench.evaluation import EvaluatedSolution, evaluate
from planner.bench.problem import BenchInstance, ProblemFamily
from planner.bench.problem_files import problem_hash
from planner.bench.solution_files import (
    SUFFIXES,
    AnswerError,
    answer_data,
    find_solution,
    read_solution,
    write_solution,
)
from planner.utils.atomic_write import write_text
from planner.utils.input_files import read_json
from planner.utils.validate import count, real

FORMAT = "planner.best_known"
TABLE = "best-known.json"
SOLUTIONS = "solutions"
_PACKAGE = Path(planner.__file__).parent
_FOLDERS = (_PACKAGE / "bestknown", _PACKAGE.parent / "datasets/bestknown")
FOLDER = next((d for d in _FOLDERS if d.is_dir()), _FOLDERS[1])
"""Folder of the bundled table: in the package if installed, else in the repository."""


@dataclass(frozen=True)
class BestKnown:
    """Best known solution and bound of an instance.

    Attributes
    ----------
    problem
        Hash of the problem.
    objective, unit
        Objective of the solution, computed by the checker.
    method, seed, effort, date
        How and when the solution was found.
    solution, sha256
        Solution file beside the table, and the hash of its JSON.
    bound
        Best known bound; None without one.
    bound_recomputed
        Whether the checker recomputed the bound from a witness; otherwise it is unverified.
    bound_basis, bound_method
        Basis of the bound, and the method that proved it.
    """

    problem: str
    objective: float
    unit: str
    method: str
    seed: int
    effort: float
    date: str
    solution: str
    sha256: str
    bound: float | None = None
    bound_recomputed: bool = False
    bound_basis: str = ""
    bound_method: str = ""


Table = dict[str, BestKnown]
"""Entries by instance."""


def load_table(folder: Path = FOLDER) -> Table:
    """Read the table of a folder; empty if there is none."""
    path = folder / TABLE
    if not path.exists():
        return {}
    data = read_json(path)
    field_names = {field.name for field in fields(BestKnown)}
    try:
        if data["format"] != FORMAT or any(
            set(raw) != field_names for raw in data["entries"].values()
        ):
            raise ValueError
        return {name: BestKnown(**raw) for name, raw in data["entries"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(f"{path}: not a table of best known solutions; restore the file") from None


def save_table(table: Mapping[str, BestKnown], folder: Path) -> None:
    """Write the table sorted, one entry per line, so that diffs are readable."""
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(asdict(table[name]), allow_nan=False)}"
        for name in sorted(table)
    )
    text = f'{{"format": {json.dumps(FORMAT)}, "entries": {{\n{lines}\n}}}}\n'
    write_text(folder / TABLE, text)


@dataclass(frozen=True)
class RecordChange:
    """Change of the table by one solution.

    Attributes
    ----------
    what
        ``new``, ``better``, ``bound``, ``no better`` or ``refused``.
    words
        Objective, or the reason.
    """

    instance: str
    what: str
    words: str


def record(
    solutions: Path,
    instances: Iterable[BenchInstance],
    folder: Path,
    *,
    by: str | None,
    date: str,
    bounds: bool = False,
) -> list[RecordChange]:
    """Add the solutions that pass the checker and are better than the table's."""
    table = load_table(folder)
    changes = []
    for instance in instances:
        path = find_solution(solutions, instance.id)
        if path is None:
            continue
        problem = instance.make()
        try:
            solution = read_solution(path)
            accepted = evaluate(instance.family, problem, solution["answer"])
            # validate the file before anything is written
            claim = _claim_of(solution, by)
            bound = _bound_of(solution, instance.family, accepted) if bounds else None
        except AnswerError as error:
            changes.append(RecordChange(instance.id, "refused", str(error)))
            continue
        entry, problem_id = table.get(instance.id), problem_hash(problem)
        if entry is not None and entry.problem != problem_id:
            message = f"the table is about problem {entry.problem}, this is {problem_id}"
            changes.append(RecordChange(instance.id, "refused", message))
            continue
        new, change = _merge_entry(instance, problem, claim, accepted, entry, folder, date)
        if bound is not None and solution.get("problem") != problem_id:
            # the solution is evaluated on this problem, but its bound may be of another
            stated = solution.get("problem", "not said")
            message = (
                f"{change.words}; bound not taken: its problem is {stated}, this is {problem_id}"
            )
            change = RecordChange(instance.id, change.what, message)
        elif bound is not None and _raises(instance.family, bound[0], new):
            new = BestKnown(**{**asdict(new), **dict(zip(BOUND_FIELDS, bound, strict=True))})
            message = f"{change.words}; bound {bound[0]:.9g}"
            change = RecordChange(
                instance.id, "bound" if change.what == "no better" else change.what, message
            )
        changes.append(change)
        if new != entry:
            # write the table at once, so that file and entry always match
            table[instance.id] = new
            save_table(table, folder)
            _only(folder / new.solution)
    return changes


BOUND_FIELDS = ("bound", "bound_recomputed", "bound_basis", "bound_method")


@dataclass(frozen=True)
class _Claim:
    """Who found a solution, and how."""

    method: str
    seed: int
    effort: float


def _claim_of(solution: Mapping[str, Any], by: str | None) -> _Claim:
    return _Claim(
        by or str(solution.get("method", "not said")),
        count("seed", solution.get("seed", 0), 0, error=AnswerError),
        real("effort", solution.get("effort", 0.0), 0.0, error=AnswerError),
    )


def _merge_entry(
    instance: BenchInstance,
    problem: Any,
    claim: _Claim,
    accepted: EvaluatedSolution,
    known: BestKnown | None,
    folder: Path,
    date: str,
) -> tuple[BestKnown, RecordChange]:
    family, objective = instance.family, accepted.objective
    message = f"{objective:.9g} {family.unit}"
    if known is not None and not family.better(objective, known.objective):
        return known, RecordChange(
            instance.id, "no better", f"{message}, known {known.objective:.9g}"
        )
    # compress plans and long lists
    data = {"answer": answer_data(accepted.plan)}
    text = json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"
    suffix = SUFFIXES[len(text) > PACKED_BYTES]
    name = f"{SOLUTIONS}/{instance.id}{suffix}"
    header = {"format": "planner.solution", "instance": instance.id}
    write_solution(folder / name, header | data)
    keeps = known is not None and not _excluded(family, objective, known.bound)
    entry = BestKnown(
        problem=problem_hash(problem),
        objective=objective,
        unit=family.unit,
        **asdict(claim),
        date=date,
        solution=name,
        sha256=solution_hash(folder / name),
        **({field: getattr(known, field) for field in BOUND_FIELDS} if keeps else {}),
    )
    if known is None:
        return entry, RecordChange(instance.id, "new", message)
    message += f", before {known.objective:.9g}"
    if not keeps:
        message += "; it beats the bound on record, which is taken out: report this"
    return entry, RecordChange(instance.id, "better", message)


def _only(path: Path) -> None:
    """Delete a copy of the solution with the other compression."""
    name = path.name.removesuffix(".gz").removesuffix(".json")
    for suffix in SUFFIXES:
        if path.name != f"{name}{suffix}":
            path.with_name(f"{name}{suffix}").unlink(missing_ok=True)


PACKED_BYTES = 4000


def solution_hash(path: Path) -> str:
    """Return the SHA-256 of a solution's uncompressed text; compression differs by library."""
    data = path.read_bytes()
    return hashlib.sha256(gzip.decompress(data) if path.suffix == ".gz" else data).hexdigest()


def _bound_of(
    solution: Mapping[str, Any], family: ProblemFamily, accepted: EvaluatedSolution
) -> tuple[float, bool, str, str] | None:
    """Return a solution's bound, marked as recomputed if the checker confirms it."""
    raw = solution.get("bound")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise AnswerError(f"bound is a {type(raw).__name__}; give an object with value, or none")
    value = real("bound.value", raw.get("value"), 0.0, error=AnswerError)
    bound = accepted.bound
    recomputed = bound is not None and bound.recomputed and not family.better(bound.value, value)
    return value, recomputed, str(raw.get("basis", "")), str(raw.get("method", ""))


def _excluded(family: ProblemFamily, objective: float, bound: float | None) -> bool:
    return bound is not None and family.better(objective, bound)


def _raises(family: ProblemFamily, bound: float, entry: BestKnown) -> bool:
    """Whether a bound is better than the known one and not beyond the objective."""
    if entry.bound is not None and not family.better(entry.bound, bound):
        return False
    return not _excluded(family, entry.objective, bound)
