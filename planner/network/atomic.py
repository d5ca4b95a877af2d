"""Writing files so that nothing is ever half written."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from planner.network.glyphs import MissingGlyphs, fit_fonts


def write_text(path: str | Path, text: str) -> None:
    """Write to a temporary file in the same folder, then rename it into place."""
    write_bytes(path, text.encode())


def write_picture(path: str | Path, figure: Any, *, dpi: int) -> None:
    """A Matplotlib figure, in the format that the file's name ends with, or as PNG."""
    drawn = io.BytesIO()
    lost = fit_fonts(figure)
    with warnings.catch_warnings():
        # said below, once; Matplotlib says it for each letter
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(drawn, dpi=dpi, format=Path(path).suffix[1:] or "png")
    if lost:
        warnings.warn(lost, MissingGlyphs, stacklevel=2)
    write_bytes(path, drawn.getvalue())


def write_bytes(path: str | Path, data: bytes) -> None:
    """As `write_text`, for bytes."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
