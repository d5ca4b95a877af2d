"""Solutions as JSON, by family, and their files.

============ =====================================================================
assignment   ``{"groups": [[devices of stage 0], ...]}``
averaging    ``{"computes": [true, ...], "rates_bytes_per_s": [...]}``
paths        ``{"paths": [[device, ...]], "ops": [[microbatch, device, "F", start_s, end_s]]}``
plans        a plan file
rebalancing  ``{"moves": [[time_s, source, target, kind, number], ...]}``
============ =====================================================================

``planner paths --out`` and ``planner plan --out`` write paths and plans in this form.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from planner.bench.problem import ProblemFamily
from planner.lp.solve import build_plan as averaging_of
from planner.problems import AveragingProblem
from planner.problems.answers import AssignmentPlan, AveragingPlan, PathOp, PathPlan
from planner.problems.quantities import whole
from planner.problems.rebalancing import RebalancingPlan, TimedMove
from planner.training_plan.file import from_dict
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import write_bytes
from planner.utils.input_files import MAX_BYTES, parse_json, read_json
from planner.utils.validate import LARGEST, SMALLEST, in_safe_range, numbers, real

FORMAT = "planner.solution"
SUFFIXES = (".json", ".json.gz")


class AnswerError(ValueError):
    """Solution that cannot be read or violates a rule."""


def answer_of(family: ProblemFamily, problem: Any, data: Any) -> Any:
    """Build a plan from its JSON form."""
    if not isinstance(data, dict):
        raise AnswerError(
            f"a solution must be a JSON object, found {type(data).__name__}; see the docs"
        )
    odd = next(_not_finite(data, "answer"), None)
    if odd is not None:
        raise AnswerError(f"{odd}; numbers must be finite")
    try:
        match family:
            case ProblemFamily.ASSIGNMENT:
                return AssignmentPlan.of_groups(data["groups"])
            case ProblemFamily.AVERAGING:
                return _averaging(problem, data["computes"], data["rates_bytes_per_s"])
            case ProblemFamily.PATHS:
                ops = [
                    PathOp(
                        whole("ops", b),
                        whole("ops", d),
                        str(kind),
                        real("ops", start),
                        real("ops", end),
                    )
                    for b, d, kind, start, end in data["ops"]
                ]
                return PathPlan.of([[whole("paths", d) for d in p] for p in data["paths"]], ops)
            case ProblemFamily.PLANS:
                return from_dict(data)
            case ProblemFamily.REBALANCING:
                rows = [
                    TimedMove(real("moves", time_s), *(whole("moves", value) for value in rest))
                    for time_s, *rest in data["moves"]
                ]
                return RebalancingPlan(tuple(rows))
    except KeyError as error:
        raise AnswerError(f"entry {error} is missing; see the docs for the form") from None
    except AnswerError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise AnswerError(str(error).splitlines()[0] or "unknown form") from None


def _not_finite(value: Any, where: str) -> Iterator[str]:
    """Return the location of a number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{where} is {value}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for k, item in enumerate(value):
            yield from _not_finite(item, f"{where}[{k}]")


def _averaging(problem: AveragingProblem, computes: Any, rates: Any) -> AveragingPlan:
    n = len(problem)
    flags, values = np.array(computes, dtype=bool), numbers(rates)
    if flags.shape != (n,) or values.shape != (n,):
        raise AnswerError(f"computes and rates_bytes_per_s must have {n} entries, one per peer")
    if not in_safe_range(values).all() or values.min() < 0:
        raise AnswerError(f"rates_bytes_per_s must be 0 or {SMALLEST:g} to {LARGEST:g}")
    return averaging_of(problem, flags, values)


def answer_data(plan: Any) -> dict[str, Any]:
    """Return the JSON form that `answer_of` reads."""
    match plan:
        case AssignmentPlan():
            return {"groups": [list(group) for group in plan.groups]}
        case AveragingPlan():
            return {"computes": plan.computes.tolist(), "rates_bytes_per_s": plan.rates.tolist()}
        case PathPlan():
            return {"paths": [list(p) for p in plan.paths], "ops": [list(op) for op in plan.ops]}
        case TrainingPlan():
            return plan.to_dict()
        case RebalancingPlan():
            return {"moves": [list(move) for move in plan.moves]}
    raise TypeError(f"no answer: {type(plan).__name__}")


def find_solution(folder: Path, instance: str) -> Path | None:
    """Return the file of an instance in a folder of solutions, if there is one."""
    paths = (folder / f"{instance}{suffix}" for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def read_solution(path: Path) -> dict[str, Any]:
    """Read a solution file, or a solution without metadata."""
    if path.suffix == ".gz":
        try:
            with gzip.open(path) as file:
                raw = file.read(MAX_BYTES + 1)
            text = raw.decode()
        except (OSError, EOFError, ValueError) as error:
            raise AnswerError(f"{path}: cannot be read ({error}); write it again") from None
        if len(raw) > MAX_BYTES:
            raise AnswerError(f"{path}: is larger than {MAX_BYTES / 1e6:g} MB; give a smaller one")
        data = parse_json(text, path, error=AnswerError)
    else:
        data = read_json(path, error=AnswerError)
    if isinstance(data, dict) and data.get("format") == FORMAT:
        if "answer" not in data:
            raise AnswerError(f"{path}: answer is missing; write it again")
        return data
    return {"format": FORMAT, "answer": data}


def write_solution(path: Path, solution: dict[str, Any]) -> None:
    """Write a solution file deterministically; the suffix ``.gz`` compresses it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(solution, allow_nan=False, separators=(",", ":")) + "\n"
    data = text.encode()
    write_bytes(path, gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)
