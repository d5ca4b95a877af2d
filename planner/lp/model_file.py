"""PuLP models as LP or MPS text, and names that these formats allow."""

from __future__ import annotations

import enum
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_LENGTH = 24
"""Maximum length of a name; formats allow 100 for a row, whose name joins several."""


class ModelFormat(enum.StrEnum):
    """CPLEX's LP format, or free-form MPS."""

    LP = "lp"
    MPS = "mps"


COMMENT = {ModelFormat.LP: "\\", ModelFormat.MPS: "*"}


def model_text(model: Any, form: ModelFormat, about: Iterable[str] = ()) -> str:
    """A model as the text of a file.

    Solvers disagree on maximisation in MPS, so an MPS file minimises the negated objective.
    """
    import pulp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"model.{form}"
        if form is ModelFormat.LP:
            model.writeLP(str(path))
        else:
            model.writeMPS(str(path), mpsSense=pulp.LpMinimize)
        text = path.read_text()
    return "".join(f"{COMMENT[form]} {line}\n" for line in about) + text


def labels(names: Iterable[str]) -> tuple[str, ...]:
    """Unique short names of letters, digits and dots.

    Underscores are reserved for joining several names.

    Returns
    -------
    tuple[str, ...]
        In the same order.
    """
    kinds: dict[str, None] = {}
    for name in names:
        cleaned = re.sub(r"[^A-Za-z0-9]+", ".", name)[:MAX_LENGTH] or "."
        label, count = cleaned, 1
        while label in kinds:
            count += 1
            label = f"{cleaned}.{count}"
        kinds[label] = None
    return tuple(kinds)
