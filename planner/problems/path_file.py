"""Path problems as JSON files: the fields of `planner.PathProblem`, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from planner.problems import ArrangedPathProblem, PathProblem, ProblemError
from planner.problems.quantities import whole
from planner.utils.input_files import read_json

FIELDS = tuple(field.name for field in fields(PathProblem))
OPTIONAL = ("max_swaps", "live_memory", "max_total_swaps", "link_s")
WHOLE = ("path_stages", "microbatches_per_start", "max_swaps", "max_total_swaps")


@dataclass(frozen=True)
class PathFile:
    """The fields of a path problem that were read from a file.

    Attributes
    ----------
    values
        Values by field of `PathProblem`; ``stage_sizes`` may replace ``stage_devices``.
    ignored
        Names of unknown entries, in the file's order.
    """

    path: Path
    values: Mapping[str, Any]
    ignored: tuple[str, ...]

    def with_changes(self, changes: Mapping[str, Any]) -> PathFile:
        """A copy with the values that are not None replaced."""
        changed = {name: value for name, value in changes.items() if value is not None}
        return PathFile(self.path, {**self.values, **changed}, self.ignored)

    def problem(self) -> PathProblem:
        """The problem with the file's arrangement of devices."""
        if "stage_devices" not in self.values:
            raise ProblemError(
                f"{self.path}: stage_devices is missing; list the devices of every stage, or give "
                "stage_sizes and --arrange"
            )
        if "stage_sizes" in self.values:
            raise ProblemError(
                f"{self.path}: stage_sizes beside stage_devices; leave out one, or give --arrange"
            )
        path_problem: PathProblem = self._build(PathProblem, self.values)
        return path_problem

    def arranged(self) -> ArrangedPathProblem:
        """The problem with a free arrangement of devices."""
        values = dict(self.values)
        groups = values.pop("stage_devices", None)
        if "stage_sizes" not in values:
            if groups is None:
                raise ProblemError(
                    f"{self.path}: stage_sizes is missing; give the devices per stage"
                )
            values["stage_sizes"] = [len(group) for group in self.problem().stage_devices]
        problem: ArrangedPathProblem = self._build(ArrangedPathProblem, values)
        return problem

    def _build(self, kind: type[Any], values: Mapping[str, Any]) -> Any:
        other = "stage_sizes" if kind is ArrangedPathProblem else "stage_devices"
        wanted = [other if name == "stage_devices" else name for name in FIELDS]
        for name in wanted:
            if name not in values and name not in OPTIONAL:
                raise ProblemError(f"{self.path}: {name} is missing; add it, or give its option")
        try:
            for name in WHOLE:
                if values.get(name) is not None:
                    whole(name, values[name])
            if not isinstance(values.get("live_memory", False), bool):
                raise ProblemError(
                    f"live_memory must be true or false, found {values['live_memory']!r}"
                )
            return kind(**values)
        except ProblemError as error:
            raise ProblemError(f"{self.path}: {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise ProblemError(
                f"{self.path}: its fields make no problem ({error}); give numbers and lists of "
                "them, as PathProblem takes them"
            ) from None


def load_path_file(path: str | Path) -> PathFile:
    """Read the JSON file; values are validated when a problem is built from them."""
    data = read_json(path, error=ProblemError)
    if not isinstance(data, dict):
        raise ProblemError(
            f"{path}: must be an object with {', '.join(FIELDS)}, found {type(data).__name__}; "
            "give a path problem"
        )
    known = {*FIELDS, "stage_sizes"}
    return PathFile(
        Path(path),
        {name: value for name, value in data.items() if name in known},
        tuple(name for name in data if name not in known),
    )
