"""Atomic writing of files."""

from __future__ import annotations

import glob
import io
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from planner.utils.fonts import MissingGlyphs, fit_fonts

MADE = "made by planner"
"""Mark in files that have a place for it: such files may be overwritten."""
UMASK = os.umask(0)
"""Of this process; read once, since reading it changes it for a moment, for all threads."""
os.umask(UMASK)
STALE_S = 2.0
"""Age of an unlocked temporary file that a killed writer left."""


def write_text(path: str | Path, text: str, *, sync: bool = False) -> None:
    """Write text to a temporary file in the same folder, then rename it.

    With ``sync`` the file survives a power failure.
    """
    write_bytes(path, text.encode(), sync=sync)


def write_picture(path: str | Path, figure: Any, *, dpi: int) -> None:
    """Write a Matplotlib figure in the format of the file's suffix, by default PNG."""
    drawn = io.BytesIO()
    lost = fit_fonts(figure)
    with warnings.catch_warnings():
        # reported once below; Matplotlib warns for each letter
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        kind = Path(path).suffix[1:] or "png"
        metadata = {"Software" if kind == "png" else "Creator": MADE}
        figure.savefig(drawn, dpi=dpi, format=kind, metadata=metadata)
    if lost:
        warnings.warn(lost, MissingGlyphs, stacklevel=2)
    write_bytes(path, drawn.getvalue())


def write_bytes(path: str | Path, data: bytes, *, sync: bool = False) -> None:
    """Write bytes to a temporary file in the same folder, then rename it."""
    with replacing(path, sync=sync) as file:
        file.write(data)


@contextmanager
def replacing(path: str | Path, *, sync: bool = False) -> Iterator[IO[bytes]]:
    """A temporary file in the same folder, renamed at the end; deleted after an exception."""
    # write the target of a link, and keep the link
    path = Path(os.path.realpath(path))
    _clean(path)
    try:
        with _temporary(path, sync) as file:
            yield file
    except OSError as error:
        if error.errno is None:
            raise
        # report the requested path instead of the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _temporary(path: Path, sync: bool) -> Iterator[IO[bytes]]:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            _hold(file)
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            Path(temporary).chmod(0o666 & ~UMASK)
            Path(temporary).replace(path)
            if sync:
                sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _hold(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; False if another process holds it."""
    try:
        import fcntl
    except ImportError:  # no such locks here
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _clean(path: Path) -> None:
    """Delete temporary files that killed writers of this file left."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > STALE_S:
                with leftover.open("rb") as file:
                    if _hold(file):
                        leftover.unlink()
