"""Traffic of averaging rounds: sums over members against all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.simulator.resources import LinkResources
from planner.simulator.round_traffic import RoundTraffic
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase


@given(st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_sums_and_slowest_pairs_are_those_of_all_pairs(seed: int, counts: list[int]) -> None:
    """In groups of which some devices are alike, and some members give or get nothing."""
    rng = np.random.default_rng(seed)
    regions = len(counts)
    latency, rate = rng.uniform(0.01, 0.2, (regions, regions)), rng.uniform(1e6, 1e8, (2, 2, 9))
    table = pl.Network(latency, rate[0, 0][:regions, None] + rate[1, 1][None, :regions])
    network = table.replicate(
        dict(zip(table.ids, counts, strict=True)),
        intra_latency_s=0.001,
        intra_bandwidth_bytes_per_s=1e9,
    )
    n = len(network)
    members = rng.permutation(n)[: rng.integers(1, n + 1)]
    m = len(members)
    weights = rng.choice([0.0, 1.0, 2.0], m)
    weights[rng.integers(m)] = 1.0
    group = AveragingGroup(
        tuple(members.tolist()),
        tuple((weights / weights.sum()).tolist()),
        tuple(rng.choice([True, False], m).tolist()),
        tuple(rng.choice([True, False], m).tolist()),
        phase=Phase(rng.choice([Phase.ALL, Phase.REDUCE, Phase.SPREAD])),
    )
    share, size = np.array(group.shares), 1e7
    gives, gets = np.array(group.sends_contributions), np.array(group.receives_sums)
    sent = np.zeros((m, m))
    for i in range(m):
        for k in range(m):
            if i != k:
                sent[i, k] = size * (gives[i] * share[k] + gets[k] * share[i])
    traffic = RoundTraffic.of(group, size)
    assert traffic.sent() == pytest.approx(sent.sum(axis=1), abs=1e-6)
    assert traffic.received() == pytest.approx(sent.sum(axis=0), abs=1e-6)
    inside = rng.choice([True, False], m)
    assert traffic.leaving(inside) == pytest.approx(sent[inside][:, ~inside].sum(), abs=1e-6)
    by_pair = {(members[i], members[k]): sent[i, k] for i, k in np.argwhere(sent).tolist()}
    listed = zip(*traffic.of_pairs(), strict=True)
    assert {(source, target): each for source, target, each in listed} == pytest.approx(by_pair)
    pairs = np.ix_(members, members)
    alone_s = sent / network.bandwidth_bytes_per_s[pairs]
    round_trip_s = network.latency_s[pairs] + network.latency_s[pairs].T
    used = (sent + sent.T > 0) & ~np.eye(m, dtype=bool)
    links = LinkResources.of(pl.Cluster(network, pl.Devices(1e12, 1e10)))
    found = traffic.slowest_pair(links)
    assert found == pytest.approx((alone_s.max(), round_trip_s[used].max(initial=0.0)), abs=1e-12)
    without = rng.choice([True, False], (m, m)) & ~np.eye(m, dtype=bool)
    found = traffic.slowest_pair(links, (np.argwhere(without)[:, 0], np.argwhere(without)[:, 1]))
    kept = ~without & ~np.eye(m, dtype=bool)
    assert found[0] == pytest.approx(alone_s[kept].max(initial=0.0), abs=1e-12)
