"""Output files of commands: never one of the inputs, and no overwriting of others' files."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.utils.refusal import Refusal

EDGE_BYTES = 4096
"""Bytes at both ends of a file in which its mark is searched."""


@dataclass(frozen=True)
class Output:
    """A file that a command will write.

    Attributes
    ----------
    option
        The option that names it.
    path
        None if it is not requested.
    suffixes
        Allowed suffixes.
    mark
        Text, or alternatives, near the beginning or end of files made by the command; empty if they
        cannot be recognised.
    """

    option: str
    path: Path | None
    suffixes: Sequence[str]
    mark: str | Sequence[str] = ()


def add_force(sub: Any) -> None:
    """Add ``--force``, which every command that writes files has."""
    sub.add_argument(
        "--force",
        action="store_true",
        help="write over files that are there and that this command did not make",
    )


def require_outputs(arguments: Mapping[str, Any], outputs: Iterable[Output]) -> None:
    """Refuse outputs that cannot or must not be written, before any work is done.

    ``arguments`` are those of the command by name, among them ``force``: no output may be one of
    its input files.
    """
    requested = [output for output in outputs if output.path is not None]
    names = {output.option.removeprefix("--").replace("-", "_") for output in requested}
    reads = list(_files(value for name, value in arguments.items() if name not in names))
    for k, output in enumerate(requested):
        path = output.path
        assert path is not None
        require_writable(path, output.suffixes)
        if any(_same(path, other) for other in reads):
            raise Refusal(f"{output.option} {path}: is also an input; name another file")
        for other in requested[:k]:
            assert other.path is not None
            if _same(path, other.path):
                raise Refusal(
                    f"{output.option} {path}: {other.option} names it too; name another file"
                )
        if not arguments["force"]:
            _require_own(output, path)


def require_writable(path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a path that cannot be written."""
    if not path.parent.is_dir():
        raise Refusal(f"{path}: folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise Refusal(f"{path}: is a folder; name a file")
    if path.suffix not in suffixes:
        raise Refusal(f"{path}: must end in {' or '.join(suffixes)}; rename it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise Refusal(f"{path}: folder {path.parent} may not be written to; name another file")


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""`OSError.errno` of a full disk or an exceeded quota."""


def make_writable(folder: Path) -> None:
    """Make a folder if necessary, and check that files can be created in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def has_mark(path: Path, mark: str | Sequence[str]) -> bool:
    """Whether a file may be overwritten: it is missing, empty, or has a mark."""
    if not os.path.lexists(path):
        return True
    try:
        with path.open("rb") as file:
            head = file.read(EDGE_BYTES)
            # the mark of a PDF is at its end
            file.seek(max(file.tell(), path.stat().st_size - EDGE_BYTES))
            head += file.read()
    except FileNotFoundError:  # a link to nothing
        return True
    except OSError:
        return False
    marks = [mark] if isinstance(mark, str) else mark
    return not head or any(mark.encode() in head for mark in marks)


def _require_own(output: Output, path: Path) -> None:
    if has_mark(path, output.mark):
        return
    who = "this command did not make it" if output.mark else "its author is unknown"
    raise Refusal(f"{output.option} {path}: exists, and {who}; name another file, or give --force")


def _files(values: Iterable[Any]) -> Iterable[Path]:
    """Existing files among values of arguments."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _files(value)
        elif isinstance(value, Path) and value.is_file():
            yield value
        elif isinstance(value, str) and _is_file(value):
            yield Path(value)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _same(path: Path, other: Path) -> bool:
    """Whether two paths are the same file, also through links."""
    try:
        return path.samefile(other)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)
