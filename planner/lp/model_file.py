"""PuLP models as text that other solvers read, and names that their formats allow."""

from __future__ import annotations

import enum
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST = 24
"""Letters of a name; formats allow 100 for a row, which may be of several names."""


class ModelFormat(enum.StrEnum):
    """CPLEX's LP, which people read too, or MPS in its free form."""

    LP = "lp"
    MPS = "mps"


COMMENT = {ModelFormat.LP: "\\", ModelFormat.MPS: "*"}


def model_text(model: Any, form: ModelFormat, about: Iterable[str] = ()) -> str:
    """A model as the text of a file.

    MPS has no maximum that every solver reads as one: such a file minimises the negative.
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
    """Names in letters, digits and dots, short, and no two alike.

    Underscores are left to whoever joins several to one.

    Returns
    -------
    tuple[str, ...]
        In the same order.
    """
    found: dict[str, None] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9]+", ".", name)[:LONGEST] or "."
        label, count = plain, 1
        while label in found:
            count += 1
            label = f"{plain}.{count}"
        found[label] = None
    return tuple(found)
