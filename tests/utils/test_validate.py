"""Values of wrong types are rejected in one line: rule, value, remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.utils.text import name_ranges
from planner.utils.validate import count, mapping, real, sequence

NET = Network([[0, 0.1], [0.1, 0]], [[1, 1e9], [1e9, 1]])


@pytest.mark.parametrize("value", [True, "2", None, 2.5, math.nan, math.inf, 0, [1]])
def test_counts(value: Any) -> None:
    """Whole numbers of any type; fractions are not truncated."""
    assert [count("n", x) for x in (3, np.int32(3), 3.0)] == [3, 3, 3]
    with pytest.raises(ValueError, match=r"^n is .*; it must be a whole number of at least 1$"):
        count("n", value)


@pytest.mark.parametrize("value", [True, "2", None, math.nan, math.inf, -1, [1]])
def test_numbers(value: Any) -> None:
    """Finite, and within the limit."""
    assert real("x", np.float32(0.5), 0) == 0.5
    with pytest.raises(ValueError, match=r"^x is .*; it must be a number >= 0, finite$"):
        real("x", value, 0)


def test_lists_and_mappings() -> None:
    """Text is a list of its letters."""
    assert sequence("x", (k for k in range(2))) == (0, 1)
    assert sequence("x", "ab") == ("a", "b")
    for value in (None, 3):
        with pytest.raises(ValueError, match="x must be a list"):
            sequence("x", value)
        with pytest.raises(ValueError, match="x must be a mapping"):
            mapping("x", value)


def cluster(**changes: Any) -> Cluster:
    """Two devices with a change."""
    return Cluster(NET, Devices(**{"flops": 1e12, "memory_bytes": 1e9, **changes}))


ANY: Any = None


def anything(value: Any) -> Any:
    """Return a value with a type unknown to the type checker."""
    return value


WRONG: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: Network(NET.latency_s, NET.bandwidth_bytes_per_s, ids=anything(5)),
        "ids must be a list",
    ),
    (
        lambda: Network(NET.latency_s, NET.bandwidth_bytes_per_s, regions=anything(5)),
        "regions must be a list",
    ),
    (lambda: NET.index_of(ANY), "index is None; it must be a whole number"),
    (lambda: NET.index_of(anything(0.5)), "index is 0.5; it must be a whole number"),
    (lambda: NET.subset(ANY), "devices must be a list"),
    (
        lambda: NET.replicate(ANY, intra_latency_s=0, intra_bandwidth_bytes_per_s=1),
        "counts must be a mapping",
    ),
    (
        lambda: NET.replicate({"0": ANY}, intra_latency_s=0, intra_bandwidth_bytes_per_s=1),
        "counts of region '0' is None",
    ),
    (
        lambda: NET.replicate({"0": 2}, intra_latency_s={"1": 0}, intra_bandwidth_bytes_per_s=1),
        "intra_latency_s of region '0' is None; it must be a number >= 0",
    ),
    (lambda: Cluster(ANY, Devices(1, 1)), "network must be of type Network, found None"),
    (lambda: Cluster(NET, ANY), "devices must be of type Devices, found None"),
    (lambda: cluster(can_compute="no"), "can_compute must hold true and false, found 'no'"),
    (lambda: cluster(can_aggregate=[0.5, 1]), "can_aggregate must hold true and false"),
    (lambda: cluster(sites=5), "devices.sites must be a list"),
    (
        lambda: cluster(sites=("a", "b"), site_upload_bytes_per_s=[1, 2]),
        "site_upload_bytes_per_s must be a mapping",
    ),
    (
        lambda: cluster(sites=("a", "b"), site_upload_bytes_per_s={"a": "x"}),
        "site_upload_bytes_per_s of 'a' is 'x'; it must be a number",
    ),
    (lambda: Devices.of_gpu(anything([])), "no GPU"),
    (lambda: Devices.of_gpu("A100", anything("x")), "utilization is 'x'; it must be a number"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_networks_and_clusters(make: Callable[[], Any], message: str) -> None:
    """Never an unrelated Python exception."""
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_name_ranges() -> None:
    """Consecutive numbers of the same stem are merged; other names stay."""
    names = ["Oregon/0", "Tokyo", "Oregon/2", "Oregon/1", "Oregon/5", "a/b", "Oregon/07"]
    assert name_ranges(names) == ["Oregon/0-2,5", "Tokyo", "a/b", "Oregon/07"]
