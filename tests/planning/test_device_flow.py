"""Flow between device classes, distributed over devices without changing its totals."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.lp.flow import solve_flow
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.device_flow import PairSpread, device_flow
from planner.planning.joint.layout import Layout
from planner.planning.joint.layout_flow import flow_of
from planner.training_plan.choices import Head
from planner.workload.costs import split_costs
from tests.conftest import regional_network, tiny_workload

COUNTS = st.lists(
    st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any), min_size=2, max_size=3
)


@given(
    COUNTS,
    st.sampled_from([s for s in PairSpread if s is not PairSpread.PAIRED]),
    st.floats(0, 1),
    st.integers(0, 5),
    st.sampled_from(Head),
)
def test_every_spread_keeps_the_flow(
    counts: list[list[int]], name: str, narrow: float, seed: int, head: Head
) -> None:
    """Through each device and pair of classes; no pair exceeds the busiest one."""
    spread = PairSpread(name)
    network = regional_network([max(1, sum(row[c] for row in counts)) for c in range(3)], seed)
    cluster = pl.Cluster(network, pl.Devices(10 ** (9 + 3 * narrow), 16e9))
    classes, work = DeviceClasses.of(cluster), tiny_workload()
    cuts = [round(k * 4 / len(counts)) for k in range(len(counts) + 1)]
    layout = Layout.of(counts, cuts, [False] * len(counts), head)
    costs = split_costs(work, layout.layers, layout.head_stage, layout.recompute)
    nodes, flow = flow_of(classes, layout, costs, 2.0)
    rates = solve_flow(flow, 8)
    # with the head on the first stage, all that leaves the last one returns there
    back = rates.edge_share[flow.stage[flow.target] < flow.stage[flow.source]]
    assert back.sum() == pytest.approx(float(head is Head.FIRST))
    groups = layout.groups(classes)
    node_of = nodes.by_stage(classes, groups)
    starts, edges = device_flow(node_of, nodes, flow, rates, spread)
    through = rates.node_share / nodes.devices
    assert starts == pytest.approx(through[node_of[0]])
    where = {(u, v): e for e, (u, v) in enumerate(zip(flow.source, flow.target, strict=True))}
    for part, (here, there) in zip(edges, pairwise(node_of), strict=True):
        assert part.min() >= 0
        assert part.sum(axis=1) == pytest.approx(through[here], abs=1e-9)
        assert part.sum(axis=0) == pytest.approx(through[there], abs=1e-9)
        for u in set(here):
            for v in set(there):
                e = where[u, v]
                sent = part[np.ix_(np.equal(here, u), np.equal(there, v))]
                assert sent.sum() == pytest.approx(rates.edge_share[e], abs=1e-9)
                busy_s = sent.max() * flow.pair_s[e] * sent.size
                if spread is not PairSpread.FEWEST or len(set(here)) == len(set(there)) == 1:
                    assert busy_s <= rates.period_s * (1 + 1e-6) + 1e-12
                if spread is PairSpread.EVEN:
                    assert sent.max() == pytest.approx(sent.min(), abs=1e-12)


@pytest.mark.parametrize(
    ("spread", "pairs"), [("even", 16), ("few", 4), ("fewest", 4), ("paired", 4)]
)
def test_uncongested_flow_uses_few_pairs(spread: str, pairs: int) -> None:
    """Four devices per stage form separate pipelines."""
    network = pl.Network(np.full((8, 8), 0.001), np.full((8, 8), 1e9))
    classes = DeviceClasses.of(pl.Cluster(network, pl.Devices(1e9, 16e9)))
    layout = Layout.of([[4], [4]], [0, 2, 4], [False, False])
    costs = split_costs(tiny_workload(), layout.layers, 1, layout.recompute)
    nodes, flow = flow_of(classes, layout, costs, 2.0)
    rates = solve_flow(flow, 8)
    node_of = nodes.by_stage(classes, layout.groups(classes))
    _, (part,) = device_flow(node_of, nodes, flow, rates, PairSpread(spread))
    assert np.count_nonzero(part > 1e-9) == pairs


def test_congested_pair_is_split() -> None:
    """A pair carries at most a quarter of the messages, so no microbatches use one pair alone."""
    network = pl.Network(np.full((8, 8), 0.001), np.full((8, 8), 1e9))
    slow = pl.Network(np.full((8, 8), 0.001), np.full((8, 8), 1e6))
    counts = {}
    for name, net in (("fast", network), ("slow", slow)):
        limits = 1e9  # devices' own lines are wide; pairs are not
        cluster = pl.Cluster(net, pl.Devices(1e12, 16e9, limits, limits))
        classes = DeviceClasses.of(cluster)
        layout = Layout.of([[4], [4]], [0, 2, 4], [False, False])
        costs = split_costs(tiny_workload(), layout.layers, 1, layout.recompute)
        nodes, flow = flow_of(classes, layout, costs, 2.0)
        rates = solve_flow(flow, 8)
        node_of = nodes.by_stage(classes, layout.groups(classes))
        _, (part,) = device_flow(node_of, nodes, flow, rates, PairSpread.FEW)
        counts[name] = int(np.count_nonzero(part > 1e-9))
    assert counts == {"fast": 4, "slow": 16}
