"""Networks held by class of device against the same networks held by pairs of devices."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.network.network import MAX_IN_PAIRS
from planner.network.pair_table import PairTable


@st.composite
def networks(draw: st.DrawFn) -> pl.Network:
    """One to eight devices in shuffled classes, of which some links may be equal or missing."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    classes = draw(st.integers(1, 3))
    class_of = [*range(classes), *draw(st.lists(st.integers(0, classes - 1), max_size=5))]
    rng.shuffle(class_of)
    latency = rng.choice([0.1, 0.2, 0.3], (classes, classes))
    rate = rng.choice([1e6, 2e6, 3e6], (classes, classes))
    if draw(st.booleans()):
        latency[rng.integers(classes), rng.integers(classes)] = np.nan
    names = [f"d{k}" for k in range(len(class_of))]
    return pl.Network.of_classes(latency, rate, class_of, names, names)


def by_pairs(network: pl.Network) -> pl.Network:
    """The same values as arrays of all pairs."""
    return network.replace()


@given(networks(), st.integers(0, 10**6))
def test_networks_by_class_are_those_by_pairs(network: pl.Network, seed: int) -> None:
    full, rng = by_pairs(network), np.random.default_rng(seed)
    assert full == network and network == full
    assert repr(full) == repr(network)
    assert full.alike == network.alike
    assert full.missing_pairs() == network.missing_pairs()
    assert np.array_equal(full.fastest_bytes_per_s, network.fastest_bytes_per_s)
    chosen = rng.permutation(len(network))[: rng.integers(1, len(network) + 1)].tolist()
    part = full.subset(chosen)
    assert part == network.subset(chosen)
    assert part.alike == network.subset(chosen).alike
    assert not network.latency_s.flags.writeable
    assert replace(network, regions=network.ids) == network
    assert pickle.loads(pickle.dumps(network)) == network


@given(networks(), st.integers(0, 10**6))
def test_limits_of_devices_and_sites_apply_by_class(network: pl.Network, seed: int) -> None:
    rng, n = np.random.default_rng(seed), len(network)
    sites = [f"s{k}" for k in rng.integers(0, 2, n)]
    limits = {site: float(rng.choice([0.5e6, 1.5e6])) for site in sorted(set(sites))}
    devices = pl.Devices(
        1e12,
        1e10,
        rng.choice([1e6, 4e6], n),
        rng.choice([1e6, 4e6], n),
        sites=sites,
        site_upload_bytes_per_s=limits,
        site_download_bytes_per_s=limits,
    )
    limited, full = (
        pl.Cluster(each, devices).limited_network() for each in (network, by_pairs(network))
    )
    assert limited == full
    up, down = np.asarray(devices.upload_bytes_per_s), np.asarray(devices.download_bytes_per_s)
    for i in range(n):
        for j in range(n):
            least = [network.bandwidth_bytes_per_s[i, j], up[i], down[j]]
            if sites[i] != sites[j]:
                least += [limits[sites[i]], limits[sites[j]]]
            assert i == j or limited.bandwidth_table[i, j] == min(least)


@given(networks(), st.integers(0, 10**6))
def test_tables_are_indexed_as_arrays_are(network: pl.Network, seed: int) -> None:
    rng, n = np.random.default_rng(seed), len(network)
    table, array = network.latency_table, network.latency_s
    i, j = rng.integers(0, n, (2, 5))
    mask = rng.choice([True, False], n)
    for given_table, given_array in ((table, array), (table.T, array.T)):
        for pair in ((0, n - 1), (i, j), (i[0], mask), (mask, j[0]), np.ix_(i, j)):
            assert np.array_equal(given_table[pair], given_array[pair], equal_nan=True)
        assert np.array_equal(given_table.row(n - 1), given_array[n - 1], equal_nan=True)
        assert np.array_equal(given_table, given_array, equal_nan=True)
    some = table.two_of_each
    again = PairTable(table.values, table.class_of, table.own).with_classes(np.arange(n))
    assert again.is_full and np.array_equal(again, array, equal_nan=True)
    assert set(table.class_of[some]) == set(table.class_of)


def test_large_networks_take_the_memory_of_their_classes() -> None:
    """100,000 devices: arrays of all pairs would take 160 GB."""
    few = pl.load_network("aws8_dtfm_worldwide_2022")
    sizes = dict.fromkeys(few.ids, 12_500)
    network = few.replicate(sizes, intra_latency_s=0.001, intra_bandwidth_bytes_per_s=1e9)
    assert len(network.alike) == 8
    assert network.missing_pairs() == []
    assert network.subset(range(50_000, 100_000)).regions[0] == network.regions[50_000]
    with pytest.raises(pl.NetworkError, match="for at most 16384"):
        network.latency_s.max()
    slower = few.replicate(sizes, intra_latency_s=0.001, intra_bandwidth_bytes_per_s=9e8)
    assert len(network) > MAX_IN_PAIRS and network != slower
    with pytest.raises(pl.NetworkError, match="at most 100000"):
        few.replicate(
            dict.fromkeys(few.ids, 12_501), intra_latency_s=0, intra_bandwidth_bytes_per_s=1
        )
