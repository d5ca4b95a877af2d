"""What commands share when they print and write."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner.cli.progress import PROGRESS
from planner.search.result import Result
from planner.utils.argument_parser import BAD_INPUT as BAD_INPUT

WIDTH = 80
"""Of printed lines."""
INVALID_PLAN = 1
INTERNAL_ERROR = 4
INTERRUPTED = 130
"""Exit codes beside 0."""


def show(as_json: bool, data: Any, lines: Sequence[str]) -> None:
    """Print the data as JSON, or the lines."""
    PROGRESS.clear()
    print(json.dumps(data, allow_nan=False, indent=1) if as_json else "\n".join(lines))


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """A text as lines that fit a terminal, with what the first and the others begin with."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def all_wrapped(lines: Iterable[str]) -> list[str]:
    """Lines that fit a terminal; what a long one goes on with is indented."""
    return [part for line in lines for part in wrapped(line, rest="  ")]


def say(line: str) -> None:
    """A line beside the output."""
    PROGRESS.clear()
    print(line, file=sys.stderr)


def result_data(result: Result[Any]) -> dict[str, Any]:
    """A result's certificate, JSON-ready."""
    return asdict(result.certificate())


def certificate_line(what: str, certificate: dict[str, Any], unit: str = "s") -> str:
    """Objective, bound and gap in one line, in seconds or dollars."""

    def number(value: float | None, spec: str) -> str:
        return "none" if value is None else format(value, spec)

    return (
        f"{what:<24}{number(certificate['objective'], '10.4f')} {unit}   "
        f"bound {number(certificate['bound'], '.4f')}   gap {number(certificate['gap'], '.2%')}   "
        f"{certificate['status']} ({certificate['stop_reason']}, {certificate['runtime_s']:.1f} s)"
    )


def save(path: Path, write: Callable[[Path], object]) -> Path:
    """Write what took long to find: where it was asked for, or else where there is room."""
    try:
        write(path)
    except OSError as error:
        for folder in (tempfile.gettempdir(), Path.home(), Path.cwd()):
            with suppress(OSError):
                # one that nobody else has
                other = Path(tempfile.mkdtemp(prefix="planner-", dir=folder)) / path.name
                try:
                    write(other)
                except OSError:
                    other.parent.rmdir()
                    raise
                PROGRESS.clear()
                print(f"{path}: {error.strerror}; it is in {other}", file=sys.stderr)
                return other
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path
