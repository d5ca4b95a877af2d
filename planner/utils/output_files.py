"""Files that a command writes: never over what it reads, and over nothing that it did not make."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EDGE_BYTES = 4096
"""At the beginning and at the end of a file, in which its maker's mark is."""


@dataclass(frozen=True)
class Output:
    """A file that a command is about to write.

    Attributes
    ----------
    path
        None: it is not asked for.
    suffixes
        One of which its name ends with.
    mark
        What such a file has near its beginning or end, or several of which it has one; none: they
        cannot be told from others.
    """

    option: str
    path: Path | None
    suffixes: Sequence[str]
    mark: str | Sequence[str] = ()


def add_force(sub: Any) -> None:
    """``--force``, of every command that writes files."""
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
    asked = [one for one in outputs if one.path is not None]
    names = {one.option.removeprefix("--").replace("-", "_") for one in asked}
    reads = list(_files(value for name, value in arguments.items() if name not in names))
    for k, one in enumerate(asked):
        path = one.path
        assert path is not None
        require_writable(path, one.suffixes)
        if any(_same(path, other) for other in reads):
            raise ValueError(f"{one.option} {path}: is read too; name another file")
        for other in asked[:k]:
            assert other.path is not None
            if _same(path, other.path):
                raise ValueError(
                    f"{one.option} {path}: {other.option} names it too; name another file"
                )
        if not arguments["force"]:
            _require_own(one, path)


def require_writable(path: Path, suffixes: Sequence[str]) -> None:
    """Refuse a name that cannot be written to."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: must end in {' or '.join(suffixes)}; rename it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: folder {path.parent} may not be written to; name another file")


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Of an `OSError`: the disk is full, or what one may use of it."""


def make_writable(folder: Path) -> None:
    """Make a folder, unless it is there, and see that files can be made in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def has_mark(path: Path, mark: str | Sequence[str]) -> bool:
    """Whether a file may be written over: it is not there, empty, or has the mark of its maker."""
    if not os.path.lexists(path):
        return True
    try:
        with path.open("rb") as file:
            head = file.read(EDGE_BYTES)
            # a PDF has it at its end
            file.seek(max(file.tell(), path.stat().st_size - EDGE_BYTES))
            head += file.read()
    except FileNotFoundError:  # a link to nothing
        return True
    except OSError:
        return False
    marks = [mark] if isinstance(mark, str) else mark
    return not head or any(one.encode() in head for one in marks)


def _require_own(one: Output, path: Path) -> None:
    if has_mark(path, one.mark):
        return
    who = "this command did not make it" if one.mark else "nothing says who made it"
    raise ValueError(f"{one.option} {path}: exists, and {who}; name another file, or give --force")


def _files(values: Iterable[Any]) -> Iterable[Path]:
    """Of arguments, those that name files that are there."""
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
    """By whatever names: relative ones, symbolic links and hard ones."""
    try:
        return path.samefile(other)
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)
