"""Incrementally updated max-min fair rates compared with rates recomputed from scratch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.simulator.compiled_event_loop import _activate_pair, _deactivate_pair
from planner.simulator.pairs import pairs_of
from planner.simulator.resources import LinkResources
from planner.simulator.run import _flow_state
from planner.simulator.state import ABSENT, EventQueue
from tests.simulator.reference import fair_rates

pytestmark = pytest.mark.interpreted

RATES = st.sampled_from([1.0, 2.0, 3.0, 5.0, 7.0, 10.0])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Devices at two sites, with lines of their own and of the sites."""
    n = draw(st.integers(2, 4))
    rates = [draw(st.lists(RATES, min_size=n, max_size=n)) for _ in range(n + 2)]
    sites = draw(st.lists(st.sampled_from("xy"), min_size=n, max_size=n))
    lines = [{site: draw(RATES) for site in set(sites)} for _ in range(2)]
    network = Network(np.zeros((n, n)), np.array(rates[:n]), [f"d{k}" for k in range(n)])
    devices = Devices(
        1.0,
        1.0,
        upload_bytes_per_s=rates[n],
        download_bytes_per_s=rates[n + 1],
        sites=sites,
        site_upload_bytes_per_s=lines[0],
        site_download_bytes_per_s=lines[1],
    )
    return Cluster(network, devices)


@given(cluster=clusters(), data=st.data())
def test_incremental_rates_equal_recomputed_rates(cluster: Cluster, data: st.DataObject) -> None:
    """After every activation and deactivation of a pair."""
    n = len(cluster)
    ends = np.array([(i, j) for i in range(n) for j in range(n) if i != j])
    pairs, count = pairs_of(ends[:, 0], ends[:, 1], LinkResources.of(cluster)), len(ends)
    flows, queue = _flow_state(pairs, count), EventQueue.of(count, count)
    active: set[int] = set()
    for moment in range(data.draw(st.integers(1, 20))):
        p = data.draw(st.integers(0, count - 1))
        flows.remaining_bytes[p] = 1e9
        if p in active:
            active.remove(p)
            _deactivate_pair(pairs, flows, queue, p, float(moment))
        else:
            active.add(p)
            _activate_pair(pairs, flows, queue, p, float(moment))
        # the scheduled ends of messages are not tested here
        queue.size[0], queue.at[:] = 0, ABSENT
        expected = fair_rates(cluster, {(int(ends[q, 0]), int(ends[q, 1])) for q in active})
        for q in active:
            assert flows.fair_rate[q] == pytest.approx(expected[tuple(ends[q])], rel=1e-11)
            assert flows.rate[q] == pytest.approx(flows.fair_rate[q], rel=2.0**-31)
