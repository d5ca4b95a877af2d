"""Expected errors: one-line errors that the project raises on purpose."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path


def is_ours(error: BaseException) -> bool:
    """Whether it was raised in one line, by a ``raise`` of this package."""
    if not isinstance(error, (ValueError, TypeError)) or "\n" in str(error) or not str(error):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    path = trace.tb_frame.f_code.co_filename
    ours = any(f"{os.sep}{name}{os.sep}" in path for name in ("planner", "benchmarks"))
    return ours and any(first <= trace.tb_lineno <= last for first, last in _raises(path))


@cache
def _raises(path: str) -> tuple[tuple[int, int], ...]:
    """First and last lines of a file's ``raise`` statements, as they are when first asked for."""
    tree = ast.parse(Path(path).read_text())
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
    )
