"""Compact encoding of plan files: every number is restored bit by bit."""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.network.alike import alike_devices
from planner.training_plan.encoding import (
    device_fields,
    devices_of,
    network_fields,
    network_of,
    order_of,
    order_text,
    paths_of,
    route_fields,
)
from tests.conftest import make_plan, random_network, tiny_workload


def through_json(data: Any) -> Any:
    """Encode and decode."""
    return json.loads(json.dumps(data, allow_nan=False))


@st.composite
def networks(draw: st.DrawFn) -> pl.Network:
    """Two to seven devices with few different links, so that some are equal."""
    n = draw(st.integers(2, 7))
    kind = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    table = np.array(draw(st.lists(st.sampled_from([0.0, 0.1, 0.3]), min_size=9, max_size=9)))
    latency = table.reshape(3, 3)[np.ix_(kind, kind)]
    if draw(st.booleans()):
        latency[0, 1] = 1 / 3
    return pl.Network(latency, 1e6 / 3 + latency)


@given(networks())
def test_device_classes_are_interchangeable_devices(network: pl.Network) -> None:
    """Checked by exchanging every pair."""
    arrays = (network.latency_s, network.bandwidth_bytes_per_s)
    classes = alike_devices(*arrays)
    assert sorted(d for members in classes for d in members) == list(range(len(network)))
    assert [members[0] for members in classes] == sorted(members[0] for members in classes)
    class_of = {d: k for k, members in enumerate(classes) for d in members}
    for i, j in combinations(range(len(network)), 2):
        order = list(range(len(network)))
        order[i], order[j] = j, i
        same = all((a[np.ix_(order, order)] == a).all() for a in arrays)
        assert same == (class_of[i] == class_of[j])


@given(networks())
def test_networks_round_trip(network: pl.Network) -> None:
    """With the same hash, which covers every bit."""
    again = network_of(through_json(network_fields(network)))
    assert again.content_hash == network.content_hash
    assert again.regions == network.regions


def test_equal_devices_are_stored_once() -> None:
    """Three in each of four regions, and one that differs."""
    regions = random_network(4)
    many = regions.replicate(
        dict.fromkeys(regions.ids, 3), intra_latency_s=1e-3, intra_bandwidth_bytes_per_s=1 / 3
    )
    latency = np.pad(many.latency_s, (0, 1), constant_values=0.7)
    rate = np.pad(many.bandwidth_bytes_per_s, (0, 1), constant_values=math.pi)
    fields = network_fields(pl.Network(latency, rate))
    assert fields["class_of"] == [*sorted([0, 1, 2, 3] * 3), 4]
    assert np.shape(fields["latency_s"]) == (5, 5)
    assert fields["bandwidth_bytes_per_s"][0][0] == 1 / 3
    assert fields["latency_s"][4][4] is None


def test_asymmetric_pair_has_two_classes() -> None:
    """Two devices with different links in both directions."""
    network = pl.Network([[0, 1], [2, 0]], [[0, 5], [5, 0]])
    assert network_fields(network)["class_of"] == [0, 1]
    assert network_of(network_fields(network)).latency_s.tolist() == [[0, 1], [2, 0]]


def test_devices_round_trip() -> None:
    """Properties, limits and sites; shared links by site."""
    devices = pl.Devices(
        [1e12, 1 / 3, 1e12, 1e12],
        16e9,
        upload_bytes_per_s=[1e6, 1e6, 1e6, 2e6],
        sites=["a", "a", "a", "b"],
        site_upload_bytes_per_s={"a": 0.1},
    ).broadcast(4)
    fields = through_json(device_fields(devices))
    assert fields["kind_of"] == [0, 1, 0, 2]
    assert fields["sites"] == ["a", "a", "b"]
    assert fields["download_bytes_per_s"] is None
    again = devices_of(fields, 4).broadcast(4)
    for name in ("flops", "memory_bytes", "upload_bytes_per_s"):
        assert np.array_equal(getattr(again, name), getattr(devices, name))
    assert again.sites == devices.sites
    assert again.site_upload_bytes_per_s == {"a": 0.1}
    assert again.site_download_bytes_per_s is None


OPERATIONS = st.tuples(st.sampled_from("FHB"), st.integers(0, 12))


@given(
    st.lists(OPERATIONS, max_size=20),
    st.fixed_dictionaries({kind: st.sets(st.integers(0, 12)).map(sorted) for kind in "FHB"}),
)
def test_orders_round_trip(operations: Any, visits: Any) -> None:
    """Also invalid ones, so that validation can report them."""
    text = order_text(operations, visits)
    assert order_of(text, visits, "here") == tuple(operations)


def test_orders_store_deviations_only() -> None:
    """A device with every third microbatch."""
    own = [1, 4, 7]
    visits = {"F": own, "H": [], "B": own}
    turns = [("F", 1), ("F", 4), ("B", 1), ("F", 7), ("B", 4), ("B", 7)]
    assert order_text(turns, visits) == "FFBFBB"
    swapped = [("F", 4), ("F", 1), ("F", 7), ("B", 1), ("B", 4), ("B", 7)]
    assert order_text(swapped, visits) == "F4F1F7BBB"


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), min_size=1))
def test_paths_round_trip(paths: Any) -> None:
    """Each route is stored once."""
    fields = through_json(route_fields(paths))
    assert len({tuple(route) for route in fields["routes"]}) == len(fields["routes"])
    assert paths_of(fields, "here") == tuple(paths)


def test_files_grow_with_classes_not_with_pairs() -> None:
    """Four times the devices and microbatches in eight regions: less than five times the size."""
    regions = random_network(8)

    def size(each: int) -> int:
        network = regions.replicate(
            dict.fromkeys(regions.ids, each), intra_latency_s=0.01, intra_bandwidth_bytes_per_s=1e9
        )
        grid = [[each * j + i for j in range(4)] for i in range(each)]
        grid += [[each * (4 + j) + i for j in range(4)] for i in range(each)]
        work = tiny_workload(batch_samples=8 * each)
        made = make_plan(grid, network=network, workload=work, schedule="1f1b")
        return len(json.dumps(made.to_dict()))

    assert size(16) < 5 * size(4)


def test_abilities_and_prices_round_trip() -> None:
    """Omitted if all devices are able and prices are unknown."""
    plain = pl.Devices(1e9, 1e9).broadcast(3)
    assert not {"can_compute", "can_aggregate", "usd_per_hour"} & set(device_fields(plain))
    devices = pl.Devices(
        1e9,
        1e9,
        can_compute=[True, True, False],
        can_aggregate=[False, True, True],
        usd_per_hour=[0.5, 0.5, 1 / 3],
    ).broadcast(3)
    fields = through_json(device_fields(devices))
    assert fields["kind_of"] == [0, 1, 2]
    again = devices_of(fields, 3).broadcast(3)
    for name in ("can_compute", "can_aggregate", "usd_per_hour"):
        assert np.array_equal(getattr(again, name), getattr(devices, name))
    assert np.asarray(devices_of(through_json(device_fields(plain)), 3).can_compute).all()
