"""``planner bench record FOLDER``: put solutions on record, each that the checker accepts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from planner.bench.suite.bestknown import FOLDER, record
from planner.bench.suite.registry import instances_of
from planner.network.line_parser import LineParser


def main(arguments: Sequence[str] | None = None) -> int:
    """Change the table of best known answers; returns the exit code.

    Parameters
    ----------
    arguments
        Words of the command line; None: of this process.

    Returns
    -------
    int
        0; 1 if a solution was refused.

    Raises
    ------
    ValueError
        One line: there is no such folder, or no solution in it.
    """
    parser = LineParser(prog="planner bench record", description=__doc__)
    parser.add_argument("folder", type=Path, help="FOLDER/family/name.json or .json.gz")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="such as 'paths/*'")
    parser.add_argument("--by", help="who found them; default: as the files say")
    parser.add_argument(
        "--bounds", action="store_true", help="take the files' bounds, too: your own files only"
    )
    parser.add_argument("--best-known", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat())
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder}: is no folder; give one with family/name.json")
    changes = record(
        options.folder,
        instances_of(options.only),
        options.best_known,
        by=options.by,
        date=options.date,
        bounds=options.bounds,
    )
    if not changes:
        raise ValueError(
            f"{options.folder}: has no solution of an instance; name files family/name.json"
        )
    for change in changes:
        print(f"{change.what:<10}{change.instance:<34}{change.words}")
    return int(any(change.what == "refused" for change in changes))
