"""When a round of averaging begins, and how finely it is cut."""

import numpy as np
import pytest

from planner.executor.pace import pace_of, round_s, spare_s
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.training_plan.choices import Phase
from planner.training_plan.model import AveragingGroup

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
    ("shares", "megabytes", "spare_s_"),
    [
        # each link carries half a vector there and half a vector back: half of 0.1 s is spared
        ((0.5, 0.5), 1.0, 0.05),
        # and no more than the way
        ((0.5, 0.5), 20.0, WAY_S),
        # one sums all: contributions and returns have links of their own
        ((1.0, 0.0), 1.0, 0.0),
        ((1.0, 0.0), 20.0, 0.0),
    ],
)
def test_by_how_much_a_round_is_shorter_than_planned(
    shares: tuple[float, ...], megabytes: float, spare_s_: float
) -> None:
    """Against what links do with contributions first and each return as soon as it can leave."""
    group, cluster = group_of(shares), cluster_of()
    assert spare_s(group, 1e6 * megabytes, cluster) == pytest.approx(spare_s_)
    planned = round_s(group, 1e6 * megabytes, cluster) + 2 * WAY_S
    # by hand: a link's contributions leave from 0, its returns from one way later
    ends = []
    for i, j in ((0, 1), (1, 0)):
        there, back = (1e6 * megabytes * share / RATE for share in (shares[j], shares[i]))
        # the last sum comes back a way there and back after its contribution has left
        ends += [max(there + back, (WAY_S + back) if back else 0.0) + WAY_S, there + 2 * WAY_S]
    assert planned - max(ends) == pytest.approx(spare_s_)


@pytest.mark.parametrize("phase", [Phase.REDUCE, Phase.SPREAD])
def test_one_way_only(phase: Phase) -> None:
    """Nothing waits for an answer, so that a way is spared; word from all takes just that."""
    group = group_of((0.5, 0.5), phase)
    assert spare_s(group, 1e6, cluster_of()) == WAY_S
    assert pace_of(group, 1e6, cluster_of()).early_s is None


@pytest.mark.parametrize(
    ("shares", "megabytes", "early_s"),
    [((0.5, 0.5), 20.0, None), ((0.5, 0.5), 1.0, 0.05), ((1.0, 0.0), 20.0, 0.0)],
)
def test_when_members_wait_for_word_from_all(
    shares: tuple[float, ...], megabytes: float, early_s: float | None
) -> None:
    """Where the round then takes what is planned, or nearly; else as long as it would spare."""
    found = pace_of(group_of(shares), 1e6 * megabytes, cluster_of()).early_s
    assert found == (None if early_s is None else pytest.approx(early_s))
    # an executed round of a third of the time waits a third as long
    third = pace_of(group_of(shares), 1e6 * megabytes, cluster_of(), speed=3.0).early_s
    assert third == (None if early_s is None else pytest.approx(early_s / 3))
