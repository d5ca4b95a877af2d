"""Max-min fair rates: cases computed by hand, and the defining property."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.emulate.fair_rates import fair_rates
from planner.emulate.links import EmulatedLinks, links_of
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network


def rates_of(links: EmulatedLinks, pairs: list[int]) -> np.ndarray:
    """Rates of the given pairs."""
    rate = np.zeros(len(links.rate))
    room = np.zeros(len(links.capacity))
    fair_rates(links, np.array(pairs, dtype=np.int64), room, room.astype(np.int64), rate)
    return rate[pairs]


def links(bandwidth: np.ndarray, **limits: object) -> EmulatedLinks:
    """A network with these bandwidths and limits."""
    network = Network(np.full(bandwidth.shape, 0.01), bandwidth)
    return links_of(Cluster(network, Devices(1.0, 1.0, **limits)))  # type: ignore[arg-type]


def test_slow_pair_leaves_upload_to_others() -> None:
    """Three pairs share an upload of 12, one of them is limited to 2: 2, 5, 5."""
    bandwidth = np.full((4, 4), 10.0)
    bandwidth[0, 1] = 2.0
    found = rates_of(links(bandwidth, upload_bytes_per_s=12.0), [1, 2, 3])
    assert found == pytest.approx([2.0, 5.0, 5.0])


def test_without_limits_the_fastest_pair_is_the_limit() -> None:
    """Pairs of 10 and 4 from one device get 6 and 4."""
    bandwidth = np.full((3, 3), 10.0)
    bandwidth[0, 2] = 4.0
    assert rates_of(links(bandwidth), [1, 2]) == pytest.approx([6.0, 4.0])


def test_site_limit_applies_between_sites_only() -> None:
    """Devices 0 and 1 share a link of 6, which does not limit traffic between them."""
    found = links(
        np.full((4, 4), 10.0),
        upload_bytes_per_s=10.0,
        download_bytes_per_s=10.0,
        sites=("a", "a", "b", "b"),
        site_upload_bytes_per_s={"a": 6.0},
    )
    # 0 to 2, 1 to 3, 1 to 0
    assert rates_of(found, [2, 7, 4]) == pytest.approx([3.0, 3.0, 7.0])


def test_lines_around_lines() -> None:
    """Two sites of one device each in a site with an upload of 8; the third device is outside."""
    found = links(
        np.full((3, 3), 10.0),
        upload_bytes_per_s=10.0,
        download_bytes_per_s=20.0,
        sites=("a", "b", "c"),
        site_upload_bytes_per_s={"a": 3.0, "around": 8.0},
        site_within={"a": "around", "b": "around"},
    )
    # 0 to 2, 1 to 2, 0 to 1
    assert rates_of(found, [2, 5]) == pytest.approx([3.0, 5.0])
    assert rates_of(found, [1, 5]) == pytest.approx([3.0, 8.0])


@given(st.integers(2, 5), st.integers(0, 2**31))
def test_rates_are_max_min_fair(devices: int, seed: int) -> None:
    """Every pair has a full limit at which it has the highest rate; no limit is exceeded."""
    rng = np.random.default_rng(seed)
    bandwidth = rng.uniform(1, 10, (devices, devices))
    network = links(bandwidth, upload_bytes_per_s=rng.uniform(1, 20, devices))
    off = [i * devices + j for i in range(devices) for j in range(devices) if i != j]
    pairs = sorted(rng.choice(off, rng.integers(1, len(off) + 1), replace=False).tolist())
    rate = dict(zip(pairs, rates_of(network, pairs), strict=True))
    used = np.zeros(len(network.capacity))
    for pair in pairs:
        for limit in network.uses[pair][network.uses[pair] >= 0]:
            used[limit] += rate[pair]
    assert (used <= network.capacity * (1 + 1e-9)).all()
    for pair in pairs:
        full = [network.rate[pair] <= rate[pair] * (1 + 1e-9)]
        for limit in network.uses[pair][network.uses[pair] >= 0]:
            most = max(rate[other] for other in pairs if limit in network.uses[other])
            full.append(
                used[limit] >= network.capacity[limit] * (1 - 1e-9)
                and rate[pair] >= most * (1 - 1e-9)
            )
        assert any(full)
