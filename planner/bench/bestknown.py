"""The table of best known answers: only what the checker accepts changes it."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import planner
from planner.bench.judge import Accepted, judge
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
"""In a wheel inside the package, in a checkout beside it."""


@dataclass(frozen=True)
class BestKnown:
    """The best that is known of an instance.

    Attributes
    ----------
    problem
        Hash of the problem that it answers.
    objective, unit
        Of the solution, from the definitions.
    method, seed, effort, date
        What found it, and when.
    solution, sha256
        Its file beside the table, and the hash of the JSON in it.
    bound
        The best one known; None: there is none.
    bound_recomputed
        Whether the checker computed it again from a witness; otherwise it is the method's word.
    bound_basis, bound_method
        What it stands on, and who proved it.
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
"""By instance."""


def load_table(folder: Path = FOLDER) -> Table:
    """The table of a folder; empty where there is none."""
    path = folder / TABLE
    if not path.exists():
        return {}
    data = read_json(path)
    known = {one.name for one in fields(BestKnown)}
    try:
        if data["format"] != FORMAT or any(set(raw) != known for raw in data["entries"].values()):
            raise ValueError
        return {name: BestKnown(**raw) for name, raw in data["entries"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(f"{path}: is no table of best known answers; restore the file") from None


def save_table(table: Mapping[str, BestKnown], folder: Path) -> None:
    """Write the table, a line an entry and sorted, so that changes can be read."""
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(asdict(table[name]), allow_nan=False)}"
        for name in sorted(table)
    )
    text = f'{{"format": {json.dumps(FORMAT)}, "entries": {{\n{lines}\n}}}}\n'
    write_text(folder / TABLE, text)


@dataclass(frozen=True)
class RecordChange:
    """What a solution did to the table.

    Attributes
    ----------
    what
        ``new``, ``better``, ``bound``, ``no better`` or ``refused``.
    words
        Figures, or the reason.
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
    """Take solutions into a table, each that the checker accepts and that is better."""
    table = load_table(folder)
    changes = []
    for instance in instances:
        path = find_solution(solutions, instance.id)
        if path is None:
            continue
        problem = instance.make()
        try:
            solution = read_solution(path)
            accepted = judge(instance.family, problem, solution["answer"])
            # whatever is wrong with a file is found before anything is written
            claim = _claim_of(solution, by)
            bound = _bound_of(solution, instance.family, accepted) if bounds else None
        except AnswerError as error:
            changes.append(RecordChange(instance.id, "refused", str(error)))
            continue
        known, asked = table.get(instance.id), problem_hash(problem)
        if known is not None and known.problem != asked:
            words = f"the table is about problem {known.problem}, this is {asked}"
            changes.append(RecordChange(instance.id, "refused", words))
            continue
        new, change = _taken(instance, problem, claim, accepted, known, folder, date)
        if bound is not None and solution.get("problem") != asked:
            # an answer is judged on this problem, a bound says nothing about another
            said = solution.get("problem", "not said")
            words = f"{change.words}; bound not taken: its problem is {said}, this is {asked}"
            change = RecordChange(instance.id, change.what, words)
        elif bound is not None and _raises(instance.family, bound[0], new):
            new = BestKnown(**{**asdict(new), **dict(zip(BOUND_FIELDS, bound, strict=True))})
            words = f"{change.words}; bound {bound[0]:.9g}"
            change = RecordChange(
                instance.id, "bound" if change.what == "no better" else change.what, words
            )
        changes.append(change)
        if new != known:
            # at once: a file beside the table and its entry stay of one answer
            table[instance.id] = new
            save_table(table, folder)
            _only(folder / new.solution)
    return changes


BOUND_FIELDS = ("bound", "bound_recomputed", "bound_basis", "bound_method")


@dataclass(frozen=True)
class _Claim:
    """Who says to have found an answer, and how."""

    method: str
    seed: int
    effort: float


def _claim_of(solution: Mapping[str, Any], by: str | None) -> _Claim:
    return _Claim(
        by or str(solution.get("method", "not said")),
        count("seed", solution.get("seed", 0), 0, error=AnswerError),
        real("effort", solution.get("effort", 0.0), 0.0, error=AnswerError),
    )


def _taken(
    instance: BenchInstance,
    problem: Any,
    claim: _Claim,
    accepted: Accepted,
    known: BestKnown | None,
    folder: Path,
    date: str,
) -> tuple[BestKnown, RecordChange]:
    family, objective = instance.family, accepted.objective
    words = f"{objective:.9g} {family.unit}"
    if known is not None and not family.better(objective, known.objective):
        return known, RecordChange(
            instance.id, "no better", f"{words}, known {known.objective:.9g}"
        )
    # plans and long lists are packed
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
        **({one: getattr(known, one) for one in BOUND_FIELDS} if keeps else {}),
    )
    if known is None:
        return entry, RecordChange(instance.id, "new", words)
    words += f", before {known.objective:.9g}"
    if not keeps:
        words += "; it beats the bound on record, which is taken out: report this"
    return entry, RecordChange(instance.id, "better", words)


def _only(path: Path) -> None:
    """Take away the same solution packed, or unpacked."""
    name = path.name.removesuffix(".gz").removesuffix(".json")
    for suffix in SUFFIXES:
        if path.name != f"{name}{suffix}":
            path.with_name(f"{name}{suffix}").unlink(missing_ok=True)


PACKED_BYTES = 4000


def solution_hash(path: Path) -> str:
    """SHA-256 of the text in a solution file, unpacked: packing differs between libraries."""
    data = path.read_bytes()
    return hashlib.sha256(gzip.decompress(data) if path.suffix == ".gz" else data).hexdigest()


def _bound_of(
    solution: Mapping[str, Any], family: ProblemFamily, accepted: Accepted
) -> tuple[float, bool, str, str] | None:
    """A file's bound; recomputed where the checker, of this very problem, proves as much now."""
    raw = solution.get("bound")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise AnswerError(f"bound is a {type(raw).__name__}; give an object with value, or none")
    value = real("bound.value", raw.get("value"), 0.0, error=AnswerError)
    again = accepted.bound
    recomputed = again is not None and again.recomputed and not family.better(again.value, value)
    return value, recomputed, str(raw.get("basis", "")), str(raw.get("method", ""))


def _excluded(family: ProblemFamily, objective: float, bound: float | None) -> bool:
    return bound is not None and family.better(objective, bound)


def _raises(family: ProblemFamily, bound: float, known: BestKnown) -> bool:
    """Whether a bound is nearer to the objective; never beyond it."""
    if known.bound is not None and not family.better(known.bound, bound):
        return False
    return not _excluded(family, known.objective, bound)
