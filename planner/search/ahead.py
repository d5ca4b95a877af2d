"""Compile kernels ahead of time: ``python -m planner.search.ahead``; needs a C compiler.

Run by the build of a wheel (``hatch_build.py``), and by hand after a kernel has changed. It uses
``numba.pycc``, which is deprecated: once numba removes it, kernels can only be compiled at first
use, as without a C compiler.
"""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np

from planner.search.arrays import array_type, is_tuple, types_of
from planner.search.compiled import ENTRIES, EXTENSIONS, OPTIONS, PACKAGE, RECORD, digest_of

MODULES = (
    "planner.search.rng",
    "planner.simulator.event_queue",
    "planner.simulator.compiled_event_loop",
    "planner.planning.joint.layout_arrays",
    "planner.planning.joint.layout_averaging",
    "planner.planning.joint.layout_memory",
    "planner.planning.joint.layout_estimate",
    "planner.planning.joint.layout_anneal",
    "planner.planning.joint.flow_paths",
    "planner.planning.joint.cheapest_split",
    "planner.checker.event_loop",
    "planner.matching.bottleneck",
    "planner.matching.path_tsp",
    "planner.genetic.matched_assignment",
    "planner.genetic.anneal",
    "planner.genetic.local_search",
    "planner.mapf.list_scheduling",
    "planner.mapf.moves",
    "planner.mapf.stage_spans",
    "planner.mapf.device_exchange",
    "planner.mapf.fixed_order",
    "planner.mapf.anneal",
    "planner.mapf.router",
)
"""Modules with kernels; all kernels that these call must be included."""


def main() -> int:
    """Build the extensions and the record of their sources in the package's folder."""
    # kernels are called by each other alone, and not again after the build
    OPTIONS.update(cache=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    RECORD.unlink(missing_ok=True)  # so that the kernels are loaded as Python, not from extensions
    for package in {outer for module in MODULES for outer in _packages(module)}:
        # skip the package's __init__, which imports solvers that no kernel needs
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(PACKAGE.joinpath(*package.split(".")[1:]))]
    kernels = [importlib.import_module(module) for module in MODULES]
    if sys.platform == "linux":
        # forked processes have the modules, also those without their __init__
        with ProcessPoolExecutor(len(EXTENSIONS), multiprocessing.get_context("fork")) as pool:
            list(pool.map(_compile, EXTENSIONS))
    else:
        for allocates in EXTENSIONS:
            _compile(allocates)
    sources = sorted({path for module in kernels for path in (_file(module), *_imported(module))})
    digests = {path.relative_to(PACKAGE).as_posix(): digest_of(path) for path in sources}
    RECORD.write_text(json.dumps({"modules": MODULES, "sources": digests}, indent=1))
    return 0


def _packages(module: str) -> Iterator[str]:
    """Packages around a module, without `planner` itself."""
    parts = module.split(".")[:-1]
    return (".".join(parts[: k + 1]) for k in range(1, len(parts)))


def _file(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__)


def _imported(module: ModuleType) -> Iterator[Path]:
    """Source files of modules from which a module imports constants and named tuples."""
    for node in ast.parse(_file(module).read_text()).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("planner."):
            yield _file(sys.modules[str(node.module)])


def _compile(allocates: bool) -> None:
    """Build one of the extensions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation of numba.pycc
        compiler = importlib.import_module("numba.pycc").CC(EXTENSIONS[allocates])
    compiler.output_dir, compiler.target_cpu, compiler.use_nrt = str(PACKAGE), "generic", allocates
    for key, (function, allocating) in ENTRIES.items():
        if allocating == allocates:
            compiler.export(key, _signature(function))(function)
    compiler.compile()


def _signature(function: Callable[..., Any]) -> Any:
    *arguments, returned = types_of(function).values()
    result = numba.types.none if returned is type(None) else _type(returned)
    return result(*map(_type, arguments))


def _type(kind: Any) -> Any:
    """Numba type of an annotation."""
    types: Any = importlib.import_module("numba.types")
    array = array_type(kind)
    if array is not None:
        return types.Array(numba.from_dtype(array[0]), array[1], "C")
    if is_tuple(kind):
        return types.NamedTuple([_type(inner) for inner in types_of(kind).values()], kind)
    if getattr(kind, "__origin__", None) is tuple:
        return types.Tuple([_type(inner) for inner in kind.__args__])
    return {int: types.int64, float: types.float64, bool: types.boolean, np.bool_: types.boolean}[
        kind
    ]


if __name__ == "__main__":
    sys.exit(main())
