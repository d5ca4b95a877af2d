"""Damaged inputs are taken or refused in one line; the harness sees what is neither."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import planner as pl
from benchmarks.fuzz.__main__ import fuzz, main
from benchmarks.fuzz.targets import TARGETS, Attempt, Target

PATIENT_S = 600
"""A busy machine proves nothing about an input."""


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_some_of_each(name: str, count: int) -> None:
    """`python -m benchmarks.fuzz` tries thousands."""
    tally = fuzz(TARGETS[name], 1, range(count), PATIENT_S)
    assert tally.findings == []
    assert tally.refused


@pytest.mark.parametrize(
    "name", [name for name in TARGETS if name not in ("calls", "command lines")]
)
def test_the_good_ones_are_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing behind the first rule would be reached."""
    targets = "benchmarks.fuzz.targets."
    monkeypatch.setattr(targets + "damaged_object", lambda good, _: good)
    monkeypatch.setattr(targets + "damaged_json", lambda good, _: good)
    monkeypatch.setattr(targets + "damaged_table", lambda text, _: text)
    monkeypatch.setattr(targets + "damaged_text", lambda text, _: text.encode())
    tally = fuzz(TARGETS[name], 0, range(4), PATIENT_S)
    assert (tally.taken, tally.refused, tally.findings) == (4, 0, [])


def test_what_is_neither_is_found() -> None:
    """Another exception, a message of several lines, and what does not end."""

    def prepare(_: Path) -> Attempt:
        def attempt(random: np.random.Generator) -> object:
            kind = int(random.integers(4))
            if kind == 0:
                return int("x")
            if kind == 1:
                raise KeyError("x")
            if kind == 2:
                return pl.load_network("two\nlines")
            return None

        return attempt

    tally = fuzz(Target(prepare), 0, range(40), PATIENT_S)
    assert tally.taken and len(tally.findings) + tally.refused + tally.taken == 40
    assert {"ValueError", "KeyError"} <= set(tally.kinds)


def test_an_input_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its number; and the report names the command."""
    out = tmp_path / "fuzz.md"
    words = ["--targets", "network csv", "--count", "5", "--out", str(out)]
    assert main(words) == 0
    assert "python -m benchmarks.fuzz --count 5 --seed 0" in out.read_text()
    numbers = []
    for number in range(5):
        try:
            main(["--targets", "network csv", "--only", str(number)])
            numbers.append(number)
        except ValueError:
            pass
    assert f"| network csv | 5 | {len(numbers)} |" in out.read_text()
    capsys.readouterr()
