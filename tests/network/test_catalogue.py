"""Bundled networks, compared with reference instances and the papers' tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.network.catalogue import intra_link, list_networks, load_network
from planner.network.error import NetworkError

CASES = Path(__file__).parent.parent / "data" / "dtfm_cases.npz"


@pytest.mark.parametrize("name", list_networks())
def test_every_listed_network_loads(name: str) -> None:
    """It has at least two devices."""
    assert len(load_network(name)) >= 2


@pytest.mark.parametrize("case", range(1, 6))
def test_dtfm_cases_equal_the_public_codes_arrays(case: int) -> None:
    """64 devices, constants of the public code."""
    arrays = np.load(CASES)
    network = load_network(f"dtfm_case{case}_code")
    off = ~np.eye(64, dtype=bool)
    for field in ("latency_s", "bandwidth_bytes_per_s"):
        np.testing.assert_allclose(
            getattr(network, field)[off], arrays[f"case{case}_{field}"][off], rtol=1e-12, atol=1e-15
        )


def test_known_oddities_are_kept() -> None:
    """London-NL as published and repaired; case 5 by table and by code."""
    pair = ("London", "NL")
    published, repaired = (
        load_network(name).subset(pair).bandwidth_bytes_per_s[0, 1] * 8e-9
        for name in ("gcp12_skippipe_2025", "gcp12_skippipe_2025_repaired")
    )
    assert published == pytest.approx(0.001894531)
    assert repaired == pytest.approx(1.94)
    paper, code = (load_network(f"dtfm_case5_{v}") for v in ("paper", "code"))
    assert paper.bandwidth_bytes_per_s[8, 40] * 8e-9 == pytest.approx(0.364)
    assert code.bandwidth_bytes_per_s[8, 40] * 8e-9 == pytest.approx(1.16)


def test_skyplane_is_a_round_trip_with_three_regions_to_drop() -> None:
    """57 of 60 regions are complete; round-trip times are halved."""
    network = load_network("skyplane_60_20220129")
    complete = network.complete()
    assert set(network.ids) - set(complete.ids) == {
        "gcp:asia-northeast3-a",
        "gcp:australia-southeast2-a",
        "gcp:europe-west3-a",
    }
    pair = network.subset(["aws:af-south-1", "aws:ap-east-1"])
    assert pair.latency_s[0, 1] == pytest.approx(0.24878 / 2)


def test_intra_links_as_the_sources_assume() -> None:
    """5 ms and 2 Gb/s for DT-FM, none for Skyplane."""
    link = intra_link("aws8_dtfm_worldwide_2022")
    assert link is not None
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (0.005, 2.5e8)
    assert intra_link("skyplane_60_20220129") is None


def test_unknown_name_is_rejected() -> None:
    """With the remedy."""
    with pytest.raises(NetworkError, match="planner networks"):
        load_network("atlantis")
