"""A busy machine is noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from planner.utils import processors


@pytest.mark.parametrize(
    ("load", "idle", "said"),
    [(0.0, 0, ""), (9.0, 20, ""), (9.0, 1, "other programs keep 95% of 2 processors busy")],
)
def test_a_busy_machine_is_said(
    load: float, idle: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what runs now: the load average alone also counts a run that has just ended."""
    ticks: Iterator[tuple[int, int]] = iter([(100, 200), (100 + idle, 220)])
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(processors, "cores", lambda: 2)
    monkeypatch.setattr(processors, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(processors, "LOOK_S", 0.0)
    warning = processors.busy_warning()
    assert warning.startswith(said) and bool(warning) == bool(said)


def test_hidden_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``/proc/stat`` counts nothing, as in some containers, the load average decides."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1.9, 0.0, 0.0))
    monkeypatch.setattr(processors, "cores", lambda: 2)
    monkeypatch.setattr(processors, "_ticks", lambda: (0, 0))
    monkeypatch.setattr(processors, "LOOK_S", 0.0)
    assert processors.busy_warning().startswith("other programs keep 95%")


def test_ticks_of_this_machine() -> None:
    """Idle ones are some of all."""
    idle, total = processors._ticks()
    assert 0 <= idle <= total and total > 0
