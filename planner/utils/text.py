"""Quantities and lists in words: ``quantity_range([0.001, 0.2], "s")`` is 1 to 200 ms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
SMALL = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
MAX_NAMES = 8
"""Largest number of names that `listed` writes out."""
MAX_SIZES = 6
"""Largest number of runs of equal sizes that are written out."""


def quantity(value: float, unit: str) -> str:
    """A number with three digits and an SI prefix."""
    if value == 0 or not np.isfinite(value):
        return f"{value:g} {unit}"
    # no kiloseconds; below 1, only seconds have prefixes
    scales = ((1.0, ""), *SMALL) if unit == "s" else PREFIXES
    scale, prefix = next((s for s in scales if abs(value) >= 0.9995 * s[0]), scales[-1])
    number = value / scale
    digits = f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    return f"{digits} {prefix}{unit}"


def quantity_range(values: ArrayLike, unit: str) -> str:
    """Smallest and largest of several values, or their common value."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return "none"
    low, high = quantity(float(array.min()), unit), quantity(float(array.max()), unit)
    if low == high:
        return low
    (a, in_a), (_, in_b) = low.split(" "), high.split(" ")
    return f"{a} to {high}" if in_a == in_b else f"{low} to {high}"


def dollars(value: float) -> str:
    """An amount of money without its unit: four digits, and all those before the point."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def counted(count: int, noun: str) -> str:
    """A count and its noun, in the plural unless it is one."""
    ending = "es" if noun.endswith(("s", "ch", "sh", "x")) else "s"
    return f"{count} {noun}{'' if count == 1 else ending}"


def stage_words(sizes: Sequence[int]) -> str:
    """Number of devices of each stage, in words."""
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    if len(runs) == 1:
        return f"{counted(len(sizes), 'stage')} of {runs[0][0]}"
    sizes_text = [f"{size}" if times == 1 else f"{times} x {size}" for size, times in runs]
    return f"{counted(len(sizes), 'stage')} of {joined(sizes_text)}"


def listed(names: Sequence[str]) -> str:
    """Quoted names, at most `MAX_NAMES` of them: ``'a', 'b', ...``."""
    ellipsis = ", ..." if len(names) > MAX_NAMES else ""
    return ", ".join(map(repr, names[:MAX_NAMES])) + ellipsis


def joined(items: Iterable[str]) -> str:
    """Words with commas, shortened by dots if there are too many."""
    texts = list(items)
    return ", ".join([*texts[:MAX_SIZES], *["..."] * (len(texts) > MAX_SIZES)])


def closest_match(name: str, choices: Iterable[str], least: float = 0.6) -> str | None:
    """The known name most similar to a misspelt one, ignoring case; None below ``least``."""
    by_lower = {name.lower(): name for name in choices}
    matches = get_close_matches(name.lower(), list(by_lower), 1, least)
    return by_lower[matches[0]] if matches else None


def name_ranges(names: Iterable[str]) -> list[str]:
    """Names with consecutive numbers merged, such as ``Oregon/0-3,6`` and ``Tokyo``."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        stem, _, number = name.rpartition("/")
        if stem and number.isdecimal() and str(int(number)) == number:
            numbers.setdefault(f"{stem}/", []).append(int(number))
        else:
            numbers.setdefault(name, [])
    return [stem + number_ranges(indices) for stem, indices in numbers.items()]


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers with consecutive ones merged, such as ``0-3,6``."""
    runs: list[list[int]] = []
    for k in sorted(numbers):
        if runs and k == runs[-1][-1] + 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Hint to append to a misspelt name, starting with a blank; empty if nothing is similar."""
    closest = closest_match(name, choices)
    return "" if closest is None else f" (did you mean {closest!r}?)"


def name_of(value: Any) -> str:
    """A device name as text; whole floats, as pandas makes them, without a point."""
    is_integer = isinstance(value, (float, np.floating)) and float(value).is_integer()
    return "" if value is None else str(int(value) if is_integer else value)


def printable(name: str) -> str:
    """A name from a file, fit for a message of one line."""
    return name if name.isprintable() else repr(name)
