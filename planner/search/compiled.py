"""How the solvers' inner loops become machine code: ahead of time, at first use, or not at all.

A *kernel* is a function of arrays and numbers that numba compiles. Where the package was built with
numba and a C compiler, kernels that Python calls (`entry`) lie in two extension modules of the
package, and numba is not even loaded. Where the extensions are missing, or were made from other
sources than these, numba compiles at first use and keeps the result. Without numba, as on a bare
GPU node, the same code runs as Python.

Kernels work on arrays that their caller made. Counting references to arrays would take 80 to 90% of
their time, so it is left out: a `kernel` makes no array, list or text; an `allocating` one may.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.search.arrays import FunctionT, checked

OPTIONS: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
UNCOUNTED: dict[str, Any] = {"_nrt": False}
PACKAGE = Path(__file__).parents[1]
RECORD = PACKAGE / "_kernels.json"
"""What the extensions were made from: ``modules`` with kernels, and of all ``sources`` SHA-256."""
EXTENSIONS = {False: "_kernels", True: "_allocating_kernels"}
"""By whether their kernels may allocate."""
MODE = os.environ.get("PLANNER_KERNELS", "")
"""For tests and benchmarks: ``jit`` compiles at first use, ``checked`` checks all arguments."""

ENTRIES: dict[str, tuple[Callable[..., Any], bool]] = {}
"""Kernels that Python calls, by their name in an extension, and whether they may allocate."""
_plain: list[Callable[..., Any]] = []


def digest_of(path: Path) -> str:
    """SHA-256 of a source file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def compiled_ahead() -> frozenset[str]:
    """Modules in the extensions, if these were made from just the sources that are here."""
    if MODE == "jit" or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return frozenset()
    try:
        record = json.loads(RECORD.read_text())
        if any(digest_of(PACKAGE / name) != found for name, found in record["sources"].items()):
            return frozenset()
        for name in EXTENSIONS.values():
            importlib.import_module(f"planner.{name}")
        return frozenset(record["modules"])
    except (OSError, ValueError, KeyError, ImportError):
        return frozenset()


@cache
def _numba() -> ModuleType | None:
    try:
        return importlib.import_module("numba")
    except ImportError:
        return None


@cache
def _options() -> dict[str, Any]:
    numba = _numba()
    assert numba is not None
    try:
        # not among the options that numba documents; without it kernels are slower, no different
        numba.njit(**UNCOUNTED)(lambda: None)
    except KeyError:
        return OPTIONS
    return OPTIONS | UNCOUNTED


def _compiled(function: FunctionT, *, allocates: bool = False, **options: Any) -> FunctionT:
    if function.__module__ in compiled_ahead():
        _plain.append(function)
        return function
    numba = _numba()
    if numba is None:
        return function
    while _plain:
        # so that what is compiled at first use can call what was compiled ahead
        numba.extending.register_jitable(**_options())(_plain.pop())
    return _njit(numba, function, **(OPTIONS if allocates else _options()), **options)


def _njit(numba: ModuleType, function: FunctionT, **options: Any) -> FunctionT:
    with _own_cache(numba, Path(function.__code__.co_filename)):
        made: FunctionT = numba.njit(**options)(function)
    return made


@contextmanager
def _own_cache(numba: ModuleType, source: Path) -> Iterator[None]:
    """Keep what is compiled in a folder for each version of a source file.

    Numba's index names the classes of arguments, and one that has been renamed since would be an
    error instead of a reason to compile again.
    """
    usual = numba.config.CACHE_DIR
    folder = Path(usual) if usual else source.parent / "__pycache__"
    numba.config.CACHE_DIR = str(folder / f"{source.stem}-{digest_of(source)[:12]}")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = usual


def kernel(function: FunctionT) -> FunctionT:
    """Compile a function that makes no array."""
    return _compiled(function)


inlined: Callable[[FunctionT], FunctionT] = partial(_compiled, inline="always")
"""The same, inlined by numba: handing over many arrays takes longer than a little work."""
force_inlined: Callable[[FunctionT], FunctionT] = partial(_compiled, forceinline=True)
"""The same, inlined by LLVM: numba compiles it once, however many callers there are."""


def at_first_use(function: FunctionT) -> FunctionT:
    """Compile a function with numba at first use, never ahead and never left as Python."""
    return _njit(importlib.import_module("numba"), function, cache=True, nogil=True)


def allocating(function: FunctionT) -> FunctionT:
    """Compile a function that makes arrays or lists."""
    return _compiled(function, allocates=True)


def entry(function: FunctionT, *, allocates: bool = False) -> FunctionT:
    """Compile a function that Python calls, with types as annotated."""
    name = f"{function.__module__}.{function.__name__}".removeprefix("planner.").replace(".", "_")
    ENTRIES[name] = function, allocates
    compiled = _compiled(function, allocates=allocates)
    if function.__module__ not in compiled_ahead():
        return compiled
    extension = importlib.import_module(f"planner.{EXTENSIONS[allocates]}")
    made: FunctionT = getattr(extension, name)
    return checked(function, made) if MODE == "checked" else made


allocating_entry: Callable[[FunctionT], FunctionT] = partial(entry, allocates=True)
