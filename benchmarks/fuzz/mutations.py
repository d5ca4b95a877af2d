"""Mutations of valid input: of text, of a JSON value, of a table cell, of an attribute."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

Random = np.random.Generator

VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "0", "nan", "1e300", "\x00", "東京", "a" * 1000),
    *(0, 1, -1, 2, 3, 7, 1000, 10**6, 10**12, 2**63, 10**20, 10**400, -(10**18)),
    *(0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, 1.7e308, math.nan, math.inf, -math.inf),
    *([], [[]], {}, [None], [0], [1, 2, 3], {"a": 1}, [[1], [2]], ["a"], [1e300, -1]),
)
"""Of kinds and sizes that are wrong in most places."""
OBJECTS: tuple[Any, ...] = (
    *VALUES,
    *(1j, b"x", (), (1, 2), {1}, range(3), object(), int, lambda: None),
    *(np.zeros(0), np.zeros((2, 2)), np.full((3, 3), np.nan), np.ones((2, 3)), np.ones(3) * 1j),
    *(np.array(["a", "b"]), np.array([[1, 2], [3, 4]], dtype=object), np.int64(3), np.float32(0.5)),
    *(np.bool_(True), np.array(5), np.ones((4, 4)), -np.ones((4, 4)), np.ones((4, 4)) * np.inf),
)
"""And such as only Python calls can be given."""
NUMBER = (
    *("", "-", "nan", "inf", "-1", "0", "1e400", "1e300", "1,5", "x", "0x10", "１", "1_000"),
    "9" * 400,
)
TOKENS = (
    *NUMBER,
    "\n",
    ",",
    '"',
    "{",
    "[",
    "]",
    "}",
    "null",
    "true",
    "\x00",
    "\ufeff",
    "é",
    "[" * 3000,
)


def damaged_text(text: str, random: Random) -> bytes:
    """With one to three places cut out, doubled, exchanged or filled with something else."""
    data = text.encode()
    for _ in range(int(random.integers(1, 4))):
        if not data:
            break
        a = int(random.integers(len(data)))
        b = min(len(data), a + int(random.integers(1, 40)))
        token = TOKENS[int(random.integers(len(TOKENS)))].encode()
        data = (
            data[:a] + data[b:],
            data[:a],
            data[:b] + data[a:],
            data[:a] + token + data[b:],
            data[:a] + bytes(random.integers(0, 256, 4, dtype=np.uint8)) + data[b:],
            data[:a] + token + data[a:],
        )[int(random.integers(6))]
    return data


def damaged_json(good: Any, random: Random) -> Any:
    """With one or two values replaced, removed, doubled or nudged."""
    data = copy.deepcopy(good)
    for _ in range(int(random.integers(1, 3))):
        places = list(_places(data))
        if not places:
            return data
        # an inner level first, so that long lists do not hide short fields
        depth = int(random.choice(sorted({d for d, *_ in places})))
        chosen = [place for place in places if place[0] == depth]
        _, holder, key = chosen[int(random.integers(len(chosen)))]
        _damage(holder, key, random)
    return data


def _damage(holder: Any, key: Any, random: Random) -> None:
    value = holder[key]
    kind = int(random.integers(8))
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(value))
    elif kind == 2 and isinstance(holder, dict):
        holder["unknown"] = value
    elif kind == 3 and isinstance(value, (int, float)) and not isinstance(value, bool):
        holder[key] = value + (1, -1, 2, 10**9)[int(random.integers(4))]
    elif kind == 4 and isinstance(holder, list) and len(holder) > 1:
        other = int(random.integers(len(holder)))
        holder[key], holder[other] = holder[other], value
    else:
        holder[key] = copy.deepcopy(VALUES[int(random.integers(len(VALUES)))])


def _places(data: Any, depth: int = 0) -> Any:
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in list(keys):
        yield depth, data, key
        yield from _places(data[key], depth + 1)


def damaged_object(good: Any, random: Random) -> Any:
    """A dataclass with one of its fields, or something below one, made of something else."""
    if isinstance(good, Mapping) and good:
        inner: Any = dict(good)
    elif isinstance(good, tuple) and good:
        inner = list(good)
    elif is_dataclass(good) and not isinstance(good, type):
        inner = {f.name: getattr(good, f.name) for f in fields(good) if f.init}
    else:
        return copy.deepcopy(OBJECTS[int(random.integers(len(OBJECTS)))])
    keys = list(inner) if isinstance(inner, dict) else range(len(inner))
    key = keys[int(random.integers(len(keys)))]
    if random.random() < 0.2:  # here, not below
        inner[key] = copy.deepcopy(OBJECTS[int(random.integers(len(OBJECTS)))])
    else:
        inner[key] = damaged_object(inner[key], random)
    if isinstance(good, Mapping):
        return inner
    if isinstance(good, tuple):
        return type(good)(*inner) if hasattr(good, "_fields") else tuple(inner)
    return replace(good, **{str(key): inner[key]})


def damaged_table(text: str, random: Random) -> str:
    """A CSV with one or two cells otherwise, or a row or column more or less."""
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(int(random.integers(1, 3))):
        r = int(random.integers(len(rows)))
        c = int(random.integers(len(rows[r]))) if rows[r] else 0
        kind = int(random.integers(7))
        if kind == 0:
            rows.insert(r, list(rows[r]))
        elif kind == 1 and len(rows) > 1:
            del rows[r]
        elif kind == 2:
            rows[r].insert(c, "1")
        elif kind == 3 and rows[r]:
            del rows[r][c]
        elif rows[r]:
            rows[r][c] = TOKENS[int(random.integers(len(TOKENS)))]
    return "\n".join(",".join(row) for row in rows) + "\n"
