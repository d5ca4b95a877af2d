"""The law's exponents, Table 6's counts, and a fit that knows Table 1's first row alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.swarm.square_cube import (
    BYTES_PER_S,
    FIGURE_3_S,
    PAPER,
    RTT_S,
    STAGES,
    TABLE_1,
    Law,
    Layers,
    fit_law,
    with_latency,
)


def test_counts_are_table_6s() -> None:
    """7.08M, 201M, 1.81B parameters; 2.2e10, 6.2e11, 5.5e12 FLOPs; three layers have 1.8e12."""
    three = replace(TABLE_1[3], layers=3)
    for layers, parameters, flops in zip(
        (*TABLE_1[:3], three),
        (7.08e6, 201e6, 1.81e9, 201e6),
        (2.2e10, 6.2e11, 5.5e12, 1.8e12),
        strict=True,
    ):
        assert layers.parameters == pytest.approx(parameters, rel=0.005)
        assert layers.flops == pytest.approx(flops, rel=0.04)


def test_work_grows_with_the_square_and_messages_with_the_width() -> None:
    """So that waiting counts for half as much in a layer twice as wide."""
    law = Law(1e12, 0.0, 0.0)
    narrow, wide = Layers("", 1000), Layers("", 2000)
    assert law.compute_s(wide) / law.compute_s(narrow) == pytest.approx(4)
    waits = [law.wait_s(k, 1e6) / law.compute_s(k) for k in (narrow, wide)]
    assert waits[0] / waits[1] == pytest.approx(2)
    assert law.utilisation(wide, 1e6) > law.utilisation(narrow, 1e6)


def test_utilisation_by_hand() -> None:
    """1 s of work of which half hides messages of 3 s; a round trip of 0.75 s, twice."""
    layers = Layers("", 1, layers=1, value_bytes=3.0)
    law = Law(layers.flops, 0.0, 0.5)
    assert law.wait_s(layers, layers.message_bytes / 3) == pytest.approx(2.5)
    assert law.utilisation(layers, layers.message_bytes / 3, 0.75) == pytest.approx(1 / 5)
    # as fast a link as one likes: nothing to wait for
    assert law.utilisation(layers, 1e12) == 1.0


def test_a_fit_finds_the_constants_again() -> None:
    """From utilisations that a law made."""
    made = Law(1.2e13, 4e-3, 0.4)
    found = fit_law(
        TABLE_1, np.array([made.utilisation(k, BYTES_PER_S) for k in TABLE_1]), BYTES_PER_S
    )
    assert found.flops_per_s == pytest.approx(1.2e13, rel=1e-4)
    assert found.stage_s == pytest.approx(4e-3, rel=1e-4)
    assert found.overlap == pytest.approx(0.4, rel=1e-4)


def test_table_1_from_its_first_row() -> None:
    """The law to 3 points in the mean; with Figure 3's seconds to 1."""
    law = fit_law(TABLE_1, PAPER[0], BYTES_PER_S)
    ours = [[law.utilisation(k, BYTES_PER_S, rtt) for k in TABLE_1] for rtt in RTT_S]
    assert np.abs(np.array(ours) - PAPER).mean() < 0.03
    rows = [with_latency(FIGURE_3_S, PAPER[0], rtt, STAGES) for rtt in RTT_S]
    assert np.abs(np.array(rows) - PAPER).mean() < 0.01
    assert rows[0] == pytest.approx(PAPER[0])
