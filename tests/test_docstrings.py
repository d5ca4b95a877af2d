"""Docstrings name parameters and attributes that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import planner

PACKAGE = Path(planner.__file__).parent
SECTION = re.compile(r"^(Parameters|Attributes)\n-+\n(.*?)(?=^\w[\w ]*\n-+\n|\Z)", re.M | re.S)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def arguments_of(node: Function) -> set[str]:
    """Names of all arguments of a function."""
    a = node.args
    found = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    return {one.arg for one in found if one is not None}


def names_in(node: ast.ClassDef | Function) -> set[str]:
    """Arguments of a function; of a class those of its methods, and all its attributes."""
    if not isinstance(node, ast.ClassDef):
        return arguments_of(node)
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, Function):
            names |= {part.name} | (arguments_of(part) if part.name == "__init__" else set())
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = [part.target] if isinstance(part, ast.AnnAssign) else part.targets
            for target in (t for outer in targets for t in ast.walk(outer)):
                if isinstance(target, ast.Attribute):
                    names.add(target.attr)
                elif isinstance(target, ast.Name):
                    names.add(target.id)
    return names


def documented(node: ast.ClassDef | Function) -> Iterator[str]:
    """Names in the sections on parameters and attributes."""
    for section in SECTION.finditer(ast.get_docstring(node) or ""):
        for line in section[2].splitlines():
            if line and not line[0].isspace():
                yield from (name.strip(" *") for name in line.split(" : ")[0].split(","))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_documented_names_exist(path: Path) -> None:
    """A renamed parameter is renamed in its docstring, too."""
    tree = ast.parse(path.read_text())
    classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | Function):
            continue
        known, bases = names_in(node), [node] if isinstance(node, ast.ClassDef) else []
        while bases:  # inherited ones of the same file
            for base in bases.pop().bases:
                if isinstance(base, ast.Name) and base.id in classes:
                    known |= names_in(classes[base.id])
                    bases.append(classes[base.id])
        assert [name for name in documented(node) if name not in known] == [], node.name
