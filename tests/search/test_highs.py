"""HiGHS: quiet, and no obstacle to Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint

from planner.search.highs import milp


def knapsacks(seconds: float) -> dict[str, object]:
    """A programme that HiGHS does not close in so many seconds."""
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 100, (30, 60))
    return {
        "c": -rng.integers(1, 100, 60).astype(float),
        "integrality": np.ones(60),
        "bounds": Bounds(0, 1),
        "constraints": LinearConstraint(rows, -np.inf, rows.sum(axis=1) // 3),
        "options": {"time_limit": seconds},
    }


def test_an_interrupt_is_raised_while_highs_works() -> None:
    """Without waiting for its limit: the solve is still under way."""
    alive = threading.active_count()
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        milp(**knapsacks(10.0))
    timer.join()
    assert threading.active_count() > alive


def test_results_and_errors_pass_through(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing on standard output."""
    found = milp(np.array([-1.0]), bounds=Bounds(0, 3), integrality=np.ones(1))
    assert found.x.tolist() == [3.0]
    with pytest.raises(ValueError, match="c"):
        milp(np.array([[np.nan]]))
    assert capfd.readouterr().out == ""
