"""Printing and saving, shared by all commands."""

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
"""Width of printed lines, in columns."""
INVALID_PLAN = 1
INTERNAL_ERROR = 4
INTERRUPTED = 130
"""Exit codes other than 0 and 2."""


def show(as_json: bool, data: Any, lines: Sequence[str]) -> None:
    """Print ``data`` as JSON, or else ``lines``."""
    PROGRESS.clear()
    print(json.dumps(data, allow_nan=False, indent=1) if as_json else "\n".join(lines))


def wrapped(text: str, first: str = "", indent: str = "") -> list[str]:
    """Wrap a text to `WIDTH` columns, with a prefix for the first line and for the others."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def all_wrapped(lines: Iterable[str]) -> list[str]:
    """Wrap each line to `WIDTH` columns, with an indent on continuation lines."""
    return [wrapped_line for line in lines for wrapped_line in wrapped(line, indent="  ")]


def say(line: str) -> None:
    """Print a line to stderr, above the progress line."""
    PROGRESS.clear()
    print(line, file=sys.stderr)


def result_data(result: Result[Any]) -> dict[str, Any]:
    """Return a result's certificate, JSON-ready."""
    return asdict(result.certificate())


def certificate_line(label: str, certificate: dict[str, Any], unit: str = "s") -> str:
    """Format objective, bound and gap in one line, in seconds or dollars."""

    def number(value: float | None, spec: str) -> str:
        return "none" if value is None else format(value, spec)

    return (
        f"{label:<24}{number(certificate['objective'], '10.4f')} {unit}   "
        f"bound {number(certificate['bound'], '.4f')}   gap {number(certificate['gap'], '.2%')}   "
        f"{certificate['status']} ({certificate['stop_reason']}, {certificate['runtime_s']:.1f} s)"
    )


def save(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a result to ``path``, or to a fallback folder if that fails.

    Parameters
    ----------
    path
        Requested file.
    write
        Writes the result to the path that it is given.

    Returns
    -------
    Path
        File that was written: ``path``, or a file in a new folder inside the temporary, home or
        working directory. The fallback is reported on stderr.

    Raises
    ------
    OSError
        No folder could be written to.
    """
    try:
        write(path)
    except OSError as error:
        for folder in (tempfile.gettempdir(), Path.home(), Path.cwd()):
            with suppress(OSError):
                # a new folder that no other user can write to
                other = Path(tempfile.mkdtemp(prefix="planner-", dir=folder)) / path.name
                try:
                    write(other)
                except OSError:
                    other.parent.rmdir()
                    raise
                PROGRESS.clear()
                print(f"{path}: {error.strerror}; written to {other} instead", file=sys.stderr)
                return other
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path
