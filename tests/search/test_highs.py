"""HiGHS: no output, and interruptible by Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from scipy.optimize import Bounds

from planner.search.highs import milp


def test_interrupt_during_a_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is raised without waiting for the solve."""
    over = threading.Event()

    def endless(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(60)

    monkeypatch.setattr("scipy.optimize.milp", endless)
    try:
        with pytest.raises(KeyboardInterrupt):
            milp(np.ones(1))
        assert not over.is_set()
    finally:
        over.set()


def test_results_and_errors_pass_through(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing on standard output."""
    found = milp(np.array([-1.0]), bounds=Bounds(0, 3), integrality=np.ones(1))
    assert found.x.tolist() == [3.0]
    with pytest.raises(ValueError, match="c"):
        milp(np.array([[np.nan]]))
    assert capfd.readouterr().out == ""
