"""Compilation of the solvers' inner loops: ahead of time, at first use, or not at all.

A *kernel* is a function of arrays and numbers that numba compiles. If the package was built with
numba and a C compiler, kernels that Python calls (`entry`) are in two extension modules of the
package, and numba is not loaded. If the extensions are missing, or were built from other sources,
numba compiles at first use and caches the result. Without numba, as on a bare GPU node, the same
code runs as Python.

Kernels work on arrays allocated by their caller. Reference counting of arrays would take 80 to 90%
of their time, so it is disabled: a `kernel` must not create arrays, lists or text; an `allocating`
one may.
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
"""Record of the build: ``modules`` with kernels, and the SHA-256 of all ``sources``."""
EXTENSIONS = {False: "_kernels", True: "_allocating_kernels"}
"""Extension modules, by whether their kernels may allocate."""
MODE = os.environ.get("PLANNER_KERNELS", "")
"""For tests and benchmarks: ``jit`` compiles at first use, ``checked`` checks all arguments."""

ENTRIES: dict[str, tuple[Callable[..., Any], bool]] = {}
"""Kernels called from Python by their name in an extension, and whether they may allocate."""
_ahead_functions: list[Callable[..., Any]] = []


def digest_of(path: Path) -> str:
    """SHA-256 of a source file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def compiled_ahead() -> frozenset[str]:
    """Modules in the extensions; empty unless these were built from the present sources."""
    if MODE == "jit" or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return frozenset()
    try:
        record = json.loads(RECORD.read_text())
        if any(digest_of(PACKAGE / name) != digest for name, digest in record["sources"].items()):
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
        # undocumented option of numba; without it kernels are slower but equivalent
        numba.njit(**UNCOUNTED)(lambda: None)
    except KeyError:
        return OPTIONS
    return OPTIONS | UNCOUNTED


def _compiled(function: FunctionT, *, allocates: bool = False, **options: Any) -> FunctionT:
    if function.__module__ in compiled_ahead():
        _ahead_functions.append(function)
        return function
    numba = _numba()
    if numba is None:
        return function
    while _ahead_functions:
        # make functions compiled ahead callable from kernels compiled at first use
        numba.extending.register_jitable(**_options())(_ahead_functions.pop())
    return _njit(numba, function, **(OPTIONS if allocates else _options()), **options)


def _njit(numba: ModuleType, function: FunctionT, **options: Any) -> FunctionT:
    with _own_cache(numba, Path(function.__code__.co_filename)):
        result: FunctionT = numba.njit(**options)(function)
    return result


@contextmanager
def _own_cache(numba: ModuleType, source: Path) -> Iterator[None]:
    """Use a separate cache folder for every version of a source file.

    Numba's cache index names the classes of arguments; if one has been renamed, loading it fails
    instead of compiling again.
    """
    usual = numba.config.CACHE_DIR
    folder = Path(usual) if usual else source.parent / "__pycache__"
    numba.config.CACHE_DIR = str(folder / f"{source.stem}-{digest_of(source)[:12]}")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = usual


def kernel(function: FunctionT) -> FunctionT:
    """Compile a function that creates no arrays."""
    return _compiled(function)


inlined: Callable[[FunctionT], FunctionT] = partial(_compiled, inline="always")
"""As `kernel`, inlined by numba: passing many arrays takes longer than a small function."""
force_inlined: Callable[[FunctionT], FunctionT] = partial(_compiled, forceinline=True)
"""As `kernel`, inlined by LLVM: numba compiles it only once for all callers."""


def at_first_use(function: FunctionT) -> FunctionT:
    """Compile a function with numba at first use, never ahead; requires numba."""
    return _njit(importlib.import_module("numba"), function, cache=True, nogil=True)


def allocating(function: FunctionT) -> FunctionT:
    """Compile a function that creates arrays or lists."""
    return _compiled(function, allocates=True)


def entry(function: FunctionT, *, allocates: bool = False) -> FunctionT:
    """Compile a function that is called from Python, with types as annotated."""
    name = f"{function.__module__}.{function.__name__}".removeprefix("planner.").replace(".", "_")
    ENTRIES[name] = function, allocates
    compiled = _compiled(function, allocates=allocates)
    if function.__module__ not in compiled_ahead():
        return compiled
    extension = importlib.import_module(f"planner.{EXTENSIONS[allocates]}")
    result: FunctionT = getattr(extension, name)
    return checked(function, result) if MODE == "checked" else result


allocating_entry: Callable[[FunctionT], FunctionT] = partial(entry, allocates=True)
