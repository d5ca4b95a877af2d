"""Compiled kernels: use of extensions, caching, and checks of argument types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from planner.search import compiled
from planner.search.arrays import Floats, Floats2, array_type, checked, types_of


class Pair(NamedTuple):
    """Two arrays."""

    one: Floats
    two: Floats2


def weighted_sum(pair: Pair, factor: float) -> float:
    """A function with kernel annotations."""
    return float(pair.one.sum() + factor * pair.two.sum())


def test_array_annotations() -> None:
    """One dimension unless a number says otherwise."""
    kinds = types_of(Pair)
    assert array_type(kinds["one"]) == (np.dtype(float), 1)
    assert array_type(kinds["two"]) == (np.dtype(float), 2)
    assert array_type(Pair) is None


@pytest.mark.parametrize(
    "wrong",
    [
        Pair(np.zeros(2), np.zeros(2)),
        Pair(np.zeros(2, dtype=np.int64), np.zeros((2, 2))),
        Pair(np.zeros(2), np.zeros((2, 4))[:, ::2]),
        (np.zeros(2), np.zeros((2, 2))),
    ],
)
def test_wrong_arguments_are_detected(wrong: Pair) -> None:
    """Wrong dimensions, dtype, contiguity and tuple type are detected."""
    assert checked(weighted_sum, weighted_sum)(Pair(np.ones(2), np.ones((2, 2))), 0.5) == 4.0
    with pytest.raises(AssertionError):
        checked(weighted_sum, weighted_sum)(wrong, 0.5)


def test_extensions_of_other_sources_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extensions built from other sources are ignored."""
    (tmp_path / "kernel.py").write_text("first")
    record = tmp_path / "_kernels.json"
    monkeypatch.setattr(compiled, "PACKAGE", tmp_path)
    monkeypatch.setattr(compiled, "RECORD", record)
    monkeypatch.setattr(compiled, "EXTENSIONS", {})
    monkeypatch.setattr(compiled, "MODE", "")
    monkeypatch.delenv("NUMBA_DISABLE_JIT", raising=False)
    known = compiled.compiled_ahead.__wrapped__
    assert known() == frozenset()
    sources = {"kernel.py": compiled.digest_of(tmp_path / "kernel.py")}
    record.write_text(json.dumps({"modules": ["kernel"], "sources": sources}))
    assert known() == {"kernel"}
    monkeypatch.setattr(compiled, "MODE", "jit")
    assert known() == frozenset()
    monkeypatch.setattr(compiled, "MODE", "")
    (tmp_path / "kernel.py").write_text("second")
    assert known() == frozenset()


MODULE = """
from typing import NamedTuple
import numpy as np
from planner.search.compiled import at_first_use

class {name}(NamedTuple):
    values: np.ndarray

@at_first_use
def total(given):
    return given.values.sum()

print(total({name}(np.ones(3))))
"""


def test_a_renamed_argument_class_compiles_again(tmp_path: Path) -> None:
    """A stale cache index that names a removed class does not cause an error."""
    for name in ("Earlier", "Later"):
        (tmp_path / "module.py").write_text(MODULE.format(name=name))
        ran = subprocess.run(
            [sys.executable, "-c", "import module"],
            cwd=tmp_path,
            env={**os.environ, "NUMBA_DISABLE_JIT": "0"},
            capture_output=True,
            text=True,
        )
        assert ran.stdout == "3.0\n", ran.stderr
