"""Networks: validation, derived networks, hashes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.network.error import NetworkError
from planner.network.network import Network


def test_transfer_is_latency_plus_bytes_over_bandwidth(line4: Network) -> None:
    """From a to c: 2 s latency and 50 bytes at 100 bytes/s."""
    assert line4.transfer_s(50)[0, 2] == 2.5
    assert line4.transfer_s(50)[1, 1] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latency_s": [[0, -1], [1, 0]]}, r"from '0' to '1' is -1; it must be >= 0"),
        ({"latency_s": [[0, np.inf], [1, 0]]}, "must be finite"),
        ({"bandwidth_bytes_per_s": [[0, 0], [1, 0]]}, "must be > 0 and finite"),
        ({"bandwidth_bytes_per_s": [[0, -5], [1, 0]]}, "is -5; it must be > 0"),
        ({"latency_s": [[0, 1]]}, r"must be N x N with N >= 1, found shape \(1, 2\)"),
        ({"latency_s": [["a", 1], [1, 0]]}, "array of numbers"),
        ({"latency_s": np.zeros((3, 3))}, "3 x 3 but"),
        ({"ids": ["a", "a"]}, "'a' is used twice"),
        ({"ids": ["a"]}, "1 entries for 2 devices"),
    ],
)
def test_invalid_networks_are_rejected(change: dict[str, Any], message: str) -> None:
    """With the rule, the value and the position."""
    good = {"latency_s": np.ones((2, 2)), "bandwidth_bytes_per_s": np.ones((2, 2))}
    with pytest.raises(NetworkError, match=message):
        Network(**{**good, **change})


def test_arrays_are_frozen_and_the_callers_untouched() -> None:
    """The caller's array keeps its diagonal; ours is read-only."""
    latency = np.full((2, 2), 3.0)
    network = Network(latency, np.ones((2, 2)))
    assert latency[0, 0] == 3.0
    with pytest.raises(ValueError, match="read-only"):
        network.latency_s[0, 1] = 1


def test_replicate_keeps_order_and_uses_intra_links(line4: Network) -> None:
    """Two devices in c, one in a, in that order."""
    big = line4.replicate(
        {"c": 2, "a": 1}, intra_latency_s=0.1, intra_bandwidth_bytes_per_s={"c": 7.0, "a": 9.0}
    )
    assert big.ids == ("c/0", "c/1", "a/0")
    assert big.regions == ("c", "c", "a")
    assert big.latency_s[0, 1] == 0.1
    assert big.bandwidth_bytes_per_s[1, 0] == 7.0
    assert big.latency_s[0, 2] == line4.latency_s[2, 0]
    with pytest.raises(NetworkError, match="no device 'x'"):
        line4.replicate({"x": 1}, intra_latency_s=0, intra_bandwidth_bytes_per_s=1)
    with pytest.raises(NetworkError, match="whole number"):
        line4.replicate({"a": 0}, intra_latency_s=0, intra_bandwidth_bytes_per_s=1)
    with pytest.raises(NetworkError, match="at most 100000 are possible"):
        line4.replicate({"a": 10**9}, intra_latency_s=0, intra_bandwidth_bytes_per_s=1)


def test_symmetrised_is_the_mean_of_both_directions() -> None:
    """Of latency and of bandwidth."""
    network = Network([[0, 1], [3, 0]], [[0, 10], [30, 0]]).symmetrised()
    assert network.latency_s[0, 1] == network.latency_s[1, 0] == 2
    assert network.bandwidth_bytes_per_s[0, 1] == 20


@given(
    st.integers(2, 7).flatmap(
        lambda n: st.sets(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] != p[1])
        ).map(lambda pairs: (n, pairs))
    )
)
def test_complete_drops_as_few_as_possible(case: tuple[int, set[tuple[int, int]]]) -> None:
    """Compared with all subsets: the largest complete one; ties are broken lexicographically."""
    from itertools import combinations

    n, missing = case
    latency = np.ones((n, n))
    for pair in missing:
        latency[pair] = np.nan
    kept = Network(latency, np.ones((n, n))).complete()
    dropped = tuple(i for i in range(n) if str(i) not in kept.ids)
    covers = [
        set_
        for size in range(n + 1)
        for set_ in combinations(range(n), size)
        if all(i in set_ or j in set_ for i, j in missing)
    ]
    assert dropped == covers[0]
    assert not kept.missing_pairs()


def test_hash_follows_measurements_and_ids_only(line4: Network) -> None:
    """Regions, the diagonal and the sign of zero do not matter."""
    same = Network(
        line4.latency_s - 0.0, line4.bandwidth_bytes_per_s, line4.ids, ["r"] * len(line4)
    )
    assert same.content_hash == line4.content_hash
    assert line4.replace(ids=list("abce")).content_hash != line4.content_hash
    faster = line4.bandwidth_bytes_per_s.copy()
    faster[0, 1] = np.nextafter(100, 200)
    assert line4.replace(bandwidth_bytes_per_s=faster).content_hash != line4.content_hash


def test_non_numeric_values_are_rejected() -> None:
    """Text, booleans and complex numbers are not converted silently."""
    good = np.ones((2, 2))
    some: list[Any] = [
        [["1", "1"], ["1", "1"]],
        good * 1j,
        good > 0,
        [[1, "x"], [1, 1]],
        [[1], [1, 2]],
    ]
    for bad in some:
        with pytest.raises(NetworkError, match="latency_s must be an N x N array of numbers"):
            pl.Network(bad, good)
    assert np.isnan(pl.Network([[0, None], [1, 0]], good).latency_s[0, 1])


def test_clusters_are_equal_to_their_copies() -> None:
    """For values of all fields; one changed value makes them different."""
    network = pl.load_network("aws4_dtfm_regional_2022")
    n = len(network)
    sites = tuple("ab"[k % 2] for k in range(n))
    for devices in (
        pl.Devices.of_gpu("A100"),
        pl.Devices(np.arange(1.0, n + 1), 1e9, upload_bytes_per_s=1e6),
        pl.Devices(1.0, 1.0, sites=sites, site_upload_bytes_per_s={"a": 1e6}),
    ):
        cluster = pl.Cluster(network, devices)
        assert cluster == copy.deepcopy(cluster) and hash(cluster) == hash(copy.deepcopy(cluster))
        assert cluster != pl.Cluster(network, replace(devices, memory_bytes=2e9))
        assert cluster.devices != 3


def test_scalar_device_values_are_validated_at_once() -> None:
    """Lists are validated when the number of devices is known."""
    for bad in (-1, 0, "fast", float("nan"), 1e300):
        with pytest.raises(ValueError, match=r"devices\.flops.* is "):
            pl.Devices(bad, 16e9)
