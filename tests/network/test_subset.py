"""Subsets of a cluster: devices keep their properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.network.alike import alike_devices
from planner.network.cluster import device_limits
from tests.conftest import random_network


def cluster_with_a_fast_pair() -> pl.Cluster:
    """Devices a to d; a's fastest pair in both directions is with d."""
    rate = np.full((4, 4), 1e6)
    rate[0, 3] = rate[3, 0] = 9e6
    rate[1, 2] = rate[2, 1] = 2e6
    return pl.Cluster(pl.Network(np.full((4, 4), 0.1), rate, list("abcd")), pl.Devices(1e9, 8e9))


def test_default_limits_become_explicit_if_they_would_change() -> None:
    """Without d, a would be limited by its slower pairs; without a and d nothing changes."""
    whole = cluster_with_a_fast_pair()
    without_d = whole.subset([0, 1, 2])
    assert without_d.upload_bytes_per_s.tolist() == [9e6, 2e6, 2e6]
    assert without_d.download_bytes_per_s.tolist() == [9e6, 2e6, 2e6]
    middle = whole.subset(["b", "c"])
    assert middle.upload_bytes_per_s is None and middle.download_bytes_per_s is None
    assert whole.subset(range(4)).upload_bytes_per_s is None
    assert whole.subset([1]).upload_bytes_per_s.tolist() == [2e6]


@given(st.integers(0, 99), st.sets(st.integers(0, 5), min_size=1))
def test_a_device_keeps_its_limits(seed: int, chosen: set[int]) -> None:
    """For any subset."""
    whole = pl.Cluster(random_network(6, seed), pl.Devices(1e9, 8e9))
    index = sorted(chosen)
    part = whole.subset(index)
    for before, after in zip(device_limits(whole), device_limits(part), strict=True):
        assert (before[index] == after).all()
    assert part.network.ids == tuple(whole.network.ids[d] for d in index)


def test_every_field_goes_with_its_device() -> None:
    """In the requested order; empty sites are removed."""
    devices = pl.Devices(
        [1e9, 2e9, 3e9],
        8e9,
        upload_bytes_per_s=[1e6, 2e6, 3e6],
        sites=["x", "y", "x"],
        site_upload_bytes_per_s={"x": 5e6, "y": 6e6},
        site_download_bytes_per_s={"y": 7e6},
        can_compute=[True, False, True],
        can_aggregate=[True, True, False],
        usd_per_hour=[0.1, 0.2, 0.3],
    )
    part = pl.Cluster(random_network(3), devices).subset([2, 0]).devices
    assert np.asarray(part.flops).tolist() == [3e9, 1e9]
    assert np.asarray(part.upload_bytes_per_s).tolist() == [3e6, 1e6]
    assert part.sites == ("x", "x")
    assert part.site_upload_bytes_per_s == {"x": 5e6} and part.site_download_bytes_per_s is None
    assert np.asarray(part.can_compute).tolist() == [True, True]
    assert np.asarray(part.can_aggregate).tolist() == [False, True]
    assert np.asarray(part.usd_per_hour).tolist() == [0.3, 0.1]


def test_pairs_that_were_not_measured_can_be_left_out() -> None:
    """Default limits come from the measured pairs."""
    rate = np.full((3, 3), 1e6)
    rate[0, 2] = np.nan
    network = pl.Network(np.zeros((3, 3)), rate)
    part = pl.Cluster(network, pl.Devices(1e9, 8e9)).subset([0, 1])
    part.network.require_complete()
    assert part.upload_bytes_per_s is None
    with pytest.raises(ValueError, match="no device 7"):
        pl.Cluster(network, pl.Devices(1e9, 8e9)).subset([7])


@given(st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_classes_follow_from_those_of_the_whole(seed: int, counts: list[int]) -> None:
    """Of replicated networks, whose regions may be alike, and of their subsets."""
    rng = np.random.default_rng(seed)
    n = len(counts)
    few = [rng.choice([1e6, 2e6], (n, n)), rng.choice([0.1, 0.2], (n, n))]
    if rng.random() < 0.7:
        few = [np.minimum(values, values.T) for values in few]
    network = pl.Network(few[1], few[0], [f"r{k}" for k in range(n)])
    whole = network.replicate(
        dict(zip(network.ids, counts, strict=True)),
        intra_latency_s={name: float(rng.choice([0.1, 0.2])) for name in network.ids},
        intra_bandwidth_bytes_per_s=1e6,
    )
    chosen = sorted(rng.permutation(len(whole))[: rng.integers(1, len(whole) + 1)].tolist())
    for found in (whole, whole.subset(chosen), whole.subset(chosen[::-1]).subset([0])):
        expected = alike_devices(found.latency_s, found.bandwidth_bytes_per_s)
        assert found.alike == tuple(map(tuple, expected))
