"""Where the page of a plan may be written: over an older page, and over nothing else."""

from __future__ import annotations

from pathlib import Path

from planner.cli.output import require_writable
from planner.report.page import GENERATOR


def require_page(option: str, path: Path, *, remedy: str = "") -> None:
    """Refuse what a page must not be written over.

    Parameters
    ----------
    option
        That named it.
    path
        Of the page.
    remedy
        Beside naming another file.

    Raises
    ------
    ValueError
        One line.
    """
    require_writable(path, [".html"])
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:1000]:
        raise ValueError(f"{option} {path}: exists and is no report; name another file{remedy}")
