"""When a round of averaging begins, and how finely it is cut."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.executor.comm.chunking import (
    choose_chunking,
    compare_with_plan_s,
    longest_round_trip_s,
    planned_round_trip_s,
    round_end_s,
    round_s,
)
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.simulator.averaging_rounds import round_s as clock_round_s
from planner.simulator.resources import LinkResources
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase

WAY_S, RATE = 0.2, 10e6


def cluster_of(count: int = 2) -> Cluster:
    """Devices that are equally far from each other."""
    latency = np.full((count, count), WAY_S)
    np.fill_diagonal(latency, 0.0)
    network = Network(latency, np.full((count, count), RATE))
    return Cluster(network, Devices(flops=1e12, memory_bytes=16e9))


def group_of(shares: tuple[float, ...], phase: Phase = Phase.ALL) -> AveragingGroup:
    """All members give and get."""
    members = tuple(range(len(shares)))
    every = (True,) * len(shares)
    return AveragingGroup(members, shares, every, every, phase=phase)


@pytest.mark.parametrize(
    ("shares", "megabytes", "together_s", "with_word_s"),
    [
        # each link carries half a vector there and half a vector back, half of 0.1 s each: planned
        # 0.5 s, and over after a way, the contribution, and a way
        ((0.5, 0.5), 1.0, 0.45, 0.65),
        # contributions fill a link until returns come: a way less than planned
        ((0.5, 0.5), 20.0, 2.2, 2.4),
        # one sums all: contributions and returns have links of their own
        ((1.0, 0.0), 1.0, 0.5, 0.7),
        ((1.0, 0.0), 20.0, 2.4, 2.6),
    ],
)
def test_when_a_round_is_over(
    shares: tuple[float, ...], megabytes: float, together_s: float, with_word_s: float
) -> None:
    """Begun by all at once, or when word from the other has come."""
    group, cluster, size = group_of(shares), cluster_of(), 1e6 * megabytes
    assert round_end_s(group, size, cluster, np.zeros(2)) == pytest.approx(together_s)
    assert round_end_s(group, size, cluster, np.full(2, WAY_S)) == pytest.approx(with_word_s)
    planned_s = round_s(group, size, cluster) + longest_round_trip_s(group, cluster)
    saved_s, late_s = planned_s - together_s, with_word_s - planned_s
    assert compare_with_plan_s(group, size, cluster) == pytest.approx((saved_s, late_s))


@pytest.mark.parametrize("phase", [Phase.REDUCE, Phase.SPREAD])
def test_one_way_only(phase: Phase) -> None:
    """Nothing waits for an answer; with word from all it takes what is planned."""
    group, cluster = group_of((0.5, 0.5), phase), cluster_of()
    assert round_end_s(group, 1e6, cluster, np.zeros(2)) == pytest.approx(0.05 + WAY_S)
    assert compare_with_plan_s(group, 1e6, cluster) == pytest.approx((WAY_S, 0.0))
    assert choose_chunking(group, 1e6, cluster).start_early_s is None


@pytest.mark.parametrize(
    ("shares", "megabytes", "begin_s"),
    [
        ((0.5, 0.5), 20.0, None),
        ((0.5, 0.5), 1.0, 0.05),
        ((1.0, 0.0), 1.0, 0.0),
        # what would leave early is more than a way is worth
        ((1.0, 0.0), 20.0, None),
    ],
)
def test_executed_faster(
    shares: tuple[float, ...], megabytes: float, begin_s: float | None
) -> None:
    """A round of a third of the time waits a third as long."""
    for speed in (1.0, 3.0):
        chunking = choose_chunking(group_of(shares), 1e6 * megabytes, cluster_of(), speed=speed)
        assert chunking.start_early_s == (
            None if begin_s is None else pytest.approx(begin_s / speed)
        )


@pytest.mark.parametrize(
    ("shares", "megabytes", "slack_s"),
    [
        # with word from the other it takes what is planned
        ((0.5, 0.5), 20.0, None),
        # a way later: 0.2 s of 2.4, and of 20.4
        ((1.0, 0.0), 20.0, 0.0),
        ((1.0, 0.0), 200.0, None),
    ],
)
def test_word_is_sent_ahead_where_it_matters(
    shares: tuple[float, ...], megabytes: float, slack_s: float | None
) -> None:
    """More than a twentieth of the round."""
    found = choose_chunking(group_of(shares), 1e6 * megabytes, cluster_of()).slack_s
    assert found == (None if slack_s is None else pytest.approx(slack_s))


@given(st.integers(0, 10**6))
@example(787205)
def test_seconds_are_the_clocks(seed: int) -> None:
    """Bytes over the fullest link, device or site's line, and the way there and back."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 6))
    latency = rng.uniform(0.001, 0.2, (n, n))
    np.fill_diagonal(latency, 0.0)
    network = Network(latency, rng.uniform(1e6, 50e6, (n, n)))
    sites = [f"site {k}" for k in rng.integers(0, 3, n)]
    limits = dict.fromkeys(sites, float(rng.uniform(1e6, 50e6)))
    devices = Devices(flops=1e12, memory_bytes=16e9)
    if rng.random() < 0.5:
        devices = replace(devices, upload_bytes_per_s=rng.uniform(1e6, 50e6, n))
    if rng.random() < 0.5:
        devices = replace(
            devices,
            sites=sites,
            site_upload_bytes_per_s=limits,
            site_download_bytes_per_s=limits,
        )
    cluster = Cluster(network, devices)
    share = rng.choice([0.0, 1.0, 2.0], n)
    share[0] += 1.0
    contributes = (*(rng.random(n - 1) < 0.7).tolist(), True)
    group = AveragingGroup(tuple(range(n)), tuple((share / share.sum()).tolist()), contributes)
    planned_s = round_s(group, 1e7, cluster) + planned_round_trip_s(group, cluster)
    assert planned_s == pytest.approx(clock_round_s(group, 1e7, LinkResources.of(cluster)))
    saved_s, late_s = compare_with_plan_s(group, 1e7, cluster)
    assert 0.0 <= saved_s <= planned_s
    # directions of a pair have latencies of their own: notification, contribution and sum may each
    # take a slow one, while the plan counts the longest round trip of a pair
    assert late_s <= 3 * latency.max() - planned_round_trip_s(group, cluster) + 1e-9
