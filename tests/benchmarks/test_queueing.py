"""Trainers, peers and queues: by hand, counted microbatches, and what happens to peers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.swarm.queueing import Change, FixedPath, Log, Scenario, routers, simulate_queues
from benchmarks.swarm.transfers import EventQueue, Transfers, shared_by
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.simulator.resources import LinkResources
from planner.swarm.routing import Entry, NoPeer, Router, starting_estimates_s
from tests.benchmarks.scenes import even_links, scene


def test_one_microbatch_by_hand() -> None:
    """Two stages: 0.1, 10 ms and 2 s of message, 0.1, 0.2, the same back, 0.2."""
    two = scene([[1.0], [1.0]], latency_s=0.01, bytes_per_s=500.0)
    log = simulate_queues(two, routers(two), 3)
    assert log.finished_s == pytest.approx([4.62, 9.24, 13.86])
    assert log.counts(2) == pytest.approx([3, 3])
    assert log.busy_s == pytest.approx([0.9, 0.9])
    assert log.max_in_flight == [1, 1]


def test_one_microbatch_through_its_trainer() -> None:
    """The trainer sits with stage 0: the output of stage 1's backward pass comes back to it too."""
    three = scene([[1.0], [1.0], [1.0]], latency_s=0.01, bytes_per_s=500.0, relayed=True)
    # forth: to 1, back, to 2; there B follows; back: to the trainer, to 1, back
    log = simulate_queues(three, routers(three), 1)
    assert log.finished_s == pytest.approx([0.9 + 6 * 2.01])


def test_the_response_time_is_what_the_router_hears() -> None:
    """Message, work and the word back, or the output back where it is relayed."""
    for relayed, answer_s in ((False, 2.01 + 0.1 + 0.01), (True, 2.01 + 0.1 + 2.01)):
        three = scene([[1.0], [1.0], [1.0]], 0.01, 500.0, relayed=relayed)
        chosen = routers(three)
        simulate_queues(three, chosen, 1)
        assert chosen[0].estimates_s(1)[1] == pytest.approx(answer_s)  # type: ignore[attr-defined]


def test_messages_share_an_uplink() -> None:
    """Two pairs from one device: half each, then all for the one that is left."""
    network = Network(np.full((3, 3), 0.5), np.full((3, 3), 80.0))
    devices = Devices(1.0, 1.0, upload_bytes_per_s=100.0, download_bytes_per_s=1e9)
    agenda = EventQueue()
    transfers = Transfers(LinkResources.of(Cluster(network, devices)), agenda)
    there: dict[str, float] = {}

    def note(name: str) -> None:
        there[name] = agenda.now_s

    transfers.send(0, 1, 100.0, note, "short")
    transfers.send(0, 2, 260.0, note, "long")
    transfers.send(0, 1, 80.0, note, "after it")
    agenda.run(math.inf, lambda: False)
    # 50 each: short leaves at 2, the next at 3.6; then long, 80 left of it, at 80
    assert there == pytest.approx({"short": 2.5, "after it": 4.1, "long": 5.1})


@pytest.mark.parametrize("seed", range(5))
def test_rates_are_max_min_fair(seed: int) -> None:
    """Every pair has a full resource on which no other is faster, or its own bandwidth."""
    rng = np.random.default_rng(seed)
    n = 6
    network = Network(np.full((n, n), 0.1), rng.uniform(20, 60, (n, n)))
    up, down = rng.uniform(30, 90, (2, n))
    devices = Devices(1.0, 1.0, upload_bytes_per_s=up, download_bytes_per_s=down)
    links = LinkResources.of(Cluster(network, devices))
    transfers = Transfers(links, EventQueue())
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j and rng.random() < 0.6]
    for pair in pairs:
        transfers.send(*pair, 1e6, lambda: None)
    rates = {pair: transfers._going[pair][1] for pair in pairs}
    for pair in pairs:
        bottleneck = rates[pair] >= links.bandwidth_bytes_per_s[pair] * (1 - 1e-9)
        for r in shared_by(links, *pair):
            users = [q for q in pairs if r in shared_by(links, *q)]
            used = sum(rates[q] for q in users)
            assert used <= links.capacity_bytes_per_s[r] * (1 + 1e-9)
            full = used >= links.capacity_bytes_per_s[r] * (1 - 1e-9)
            bottleneck |= full and rates[pair] >= max(rates[q] for q in users) * (1 - 1e-9)
        assert bottleneck


SPEEDS = [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]]


def off(log: Log, speeds: list[list[float]], begin_s: float, end_s: float = math.inf) -> float:
    """Largest relative distance of a peer's share from its part of its stage's speed."""
    counts = log.counts(sum(map(len, speeds)), begin_s, end_s)
    worst, first = 0.0, 0
    for row in speeds:
        part = counts[first : first + len(row)] / counts[first : first + len(row)].sum()
        worst = max(worst, np.abs(part / (np.array(row) / sum(row)) - 1).max())
        first += len(row)
    return float(worst)


@pytest.mark.parametrize("in_flight, trainers", [(1, 1), (32, 8)])
def test_shares_follow_throughput(in_flight: int, trainers: int) -> None:
    """Within 2% where nobody waits, and where everybody is busy all the time."""
    busy = scene(SPEEDS, 1e-6, in_flight=in_flight, homes=tuple(range(trainers)))
    log = simulate_queues(busy, routers(busy), 12000)
    assert off(log, SPEEDS, log.finished_s[4000]) < 0.02


@pytest.mark.parametrize("in_flight, trainers", [(1, 1), (4, 4), (32, 8)])
def test_told_of_the_work_shares_follow_throughput(in_flight: int, trainers: int) -> None:
    """Within 2% at any load, with a latency as long as the work."""
    homes = tuple(range(trainers))
    busy = scene(SPEEDS, 0.05, in_flight=in_flight, homes=homes, told_work=True)
    log = simulate_queues(busy, routers(busy), 12000)
    assert off(log, SPEEDS, log.finished_s[4000]) < 0.02


class Heard(Router[int]):
    """A router that keeps every answer."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.answers: list[tuple[int, float]] = []

    def report(self, peer: int, seconds: float) -> None:
        """Keep it."""
        super().report(peer, seconds)
        self.answers.append((peer, seconds))


def test_peers_of_a_stage_hold_as_many_each() -> None:
    """Little's law: shares inverse to response times are equal numbers of requests at every peer.

    Also where latency counts, and shares do not follow speeds.
    """
    some = scene(SPEEDS, 0.05, in_flight=4, homes=(0, 1, 2, 3))
    chosen = [Heard(3) for _ in some.homes]
    for router in chosen:
        for d, stage in enumerate(some.stage):
            router.announce(d, [stage])
    log = simulate_queues(some, chosen, 6000)
    assert off(log, SPEEDS, log.finished_s[1000]) > 0.2
    for stage in range(3):
        # requests times their seconds
        held = np.zeros(4)
        for router in chosen:
            for peer, seconds in router.answers:
                if some.stage[peer] == stage:
                    held[peer - 4 * stage] += seconds
        assert held.max() / held.min() < 1.2


def changed(changes: list[Change], late: tuple[int, ...] = (), entry: Entry = Entry.LEVEL) -> Log:
    """Peers of speeds 1, 1, 2, 4 in three stages."""
    rows = [[1.0, 1.0, 2.0, 4.0]] * 3
    some = scene(rows, homes=(0, 1), in_flight=2, timeout_s=5.0, announce_s=30.0, late=late)
    return simulate_queues(some, routers(some, entry=entry), 4000, changes=changes)


def part(log: Log, begin_s: float, end_s: float) -> list[float]:
    """Shares in the second stage."""
    counts = log.counts(12, begin_s, end_s)[4:8]
    return [float(c) for c in counts / counts.sum()]


def test_a_peer_dies() -> None:
    """It is banned after the timeout, nothing is lost, and others have its part."""
    log = changed([Change(100.0, 4, math.inf)])
    assert {peer for _, peer in log.failed} == {4}
    assert all(105.0 <= time <= 111.0 for time, _ in log.failed)
    assert len(log.finished_s) == 4000
    assert part(log, 110.0, 250.0) == pytest.approx([0, 1 / 7, 2 / 7, 4 / 7], abs=0.04)


def test_a_peer_becomes_slow() -> None:
    """A third of its speed: its share falls within twenty seconds."""
    log = changed([Change(100.0, 6, 3.0)])
    expected = np.array([1, 1, 2 / 3, 4]) / (20 / 3)
    assert part(log, 120.0, 300.0) == pytest.approx(expected, abs=0.04)


def test_a_peer_joins_and_one_returns() -> None:
    """From the first seconds on they have their part."""
    log = changed([Change(100.0, 5, 1.0)], late=(5,))
    assert part(log, 0.0, 100.0)[1] == 0
    assert part(log, 101.0, 121.0) == pytest.approx([1 / 8, 1 / 8, 1 / 4, 1 / 2], abs=0.05)
    back = changed([Change(100.0, 5, math.inf), Change(160.0, 5, 1.0)])
    assert part(back, 161.0, 181.0) == pytest.approx([1 / 8, 1 / 8, 1 / 4, 1 / 2], abs=0.05)


def test_the_text_floods_a_new_peer() -> None:
    """Algorithm 1's epsilon: three times its part and more for a while."""
    log = changed([Change(100.0, 5, 1.0)], late=(5,), entry=Entry.EPSILON)
    assert part(log, 101.0, 121.0)[1] > 3 / 8


def test_a_stage_without_peers_waits() -> None:
    """Its only peer dies and comes back; the microbatches that it had are done again."""
    two = scene([[1.0], [1.0]], timeout_s=2.0, announce_s=10.0)
    changes = [Change(5.0, 1, math.inf), Change(50.0, 1, 1.0)]
    log = simulate_queues(two, routers(two), 100, changes=changes)
    assert len(log.finished_s) == 100
    gaps = np.diff(log.finished_s)
    assert 45 < gaps.max() < 49


@pytest.mark.parametrize("stage", range(3))
def test_no_microbatch_is_lost(stage: int) -> None:
    """Peers of a stage die one after the other, between forward and backward passes too."""
    rows = [[1.0] * 4] * 3
    some = scene(rows, homes=(0, 5), in_flight=6, timeout_s=8.0, announce_s=60.0)
    changes = [Change(20.03 + 0.3 * k, 4 * stage + k, math.inf) for k in range(3)]
    log = simulate_queues(some, routers(some), 400, changes=changes, drain=True)
    assert len(log.finished_s) == 400


def test_holders_choose_what_is_near() -> None:
    """Each of two peers has one of the next stage nearby, which one trainer's mean does not see."""
    latency = np.full((4, 4), 1e-3)
    latency[0, 3] = latency[3, 0] = latency[1, 2] = latency[2, 1] = 1.0
    network = Network(latency, np.full((4, 4), 1e9))
    links = LinkResources.of(Cluster(network, Devices(1.0, 1.0)))
    times = np.full(4, 0.1)
    share = {}
    for by_holder in (False, True):
        some = Scenario(links, (0, 0, 1, 1), times, times, 1e3, (0,), 2, by_holder=by_holder)
        log = simulate_queues(some, routers(some), 600)
        share[by_holder] = log.per_s(100)
    assert share[True] > 1.3 * share[False]


def test_fixed_paths_are_straight_pipelines() -> None:
    """Two pipelines: the slow one holds nobody up."""
    rows = [[1.0, 2.0], [1.0, 2.0]]
    straight = scene(rows, 1e-6, homes=(0, 1), in_flight=4)
    log = simulate_queues(straight, [FixedPath([0, 2]), FixedPath([1, 3])], 600)
    counts = log.counts(4)
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.02)
    assert log.per_s(100) == pytest.approx(10, rel=0.02)


def test_starting_weights_save_the_learning() -> None:
    """Peers of a tenth of the speed of one: with weights they get no more than their part."""
    rows = [[1.0] * 5 + [10.0]]
    given = scene(rows, 1e-6, in_flight=6)
    known = starting_estimates_s({d: rows[0][d] for d in range(6)}, 0.055)
    first = [
        simulate_queues(given, routers(given, estimates_s=estimates), 15).finished_s[-1]
        for estimates in (None, known)
    ]
    assert first[1] < first[0]


def test_the_same_seed_gives_the_same() -> None:
    """Another one other latencies."""
    some = scene(SPEEDS, 0.1, in_flight=3, homes=(0, 5), jitter_s=0.05)
    logs = [simulate_queues(some, routers(some), 300, seed=seed).finished_s for seed in (1, 1, 2)]
    assert logs[0] == logs[1] != logs[2]


def test_wrong_scenes() -> None:
    """One line each."""
    links = even_links(2, 0.1, 1e3)
    with pytest.raises(ValueError, match="must have 2 entries"):
        Scenario(links, (0,), np.ones(2), np.ones(2), 1.0, (0,), 1)
    with pytest.raises(ValueError, match=r"stages must be 0 to S - 1, found \[0, 2\]"):
        Scenario(links, (0, 2), np.ones(2), np.ones(2), 1.0, (0,), 1)
    with pytest.raises(ValueError, match="a trainer, a microbatch in flight and bytes"):
        Scenario(links, (0, 1), np.ones(2), np.ones(2), 1.0, (), 1)
    fine = Scenario(links, (0, 1), np.ones(2), np.ones(2), 1.0, (0,), 1)
    with pytest.raises(ValueError, match="needs 1 choosers, found 2"):
        simulate_queues(fine, [FixedPath([0, 1])] * 2, 1)
    nobody = Scenario(links, (0, 1), np.ones(2), np.ones(2), 1.0, (0,), 1, late=(1,))
    with pytest.raises(NoPeer, match="no peer of stage 1 may be chosen; announce one"):
        simulate_queues(nobody, routers(nobody), 1)


def test_peers_begin_no_forward_pass_beyond_their_room() -> None:
    """What would be held without it is more; all are finished all the same."""
    speeds = [[4.0, 4.0], [4.0, 4.0], [1.0, 1.0]]
    free = scene(speeds, homes=(0, 1), in_flight=8)
    log = simulate_queues(free, routers(free), 40, drain=True)
    assert max(log.max_in_flight[2:4]) > 2
    tight = scene(speeds, homes=(0, 1), in_flight=8, room=(8, 8, 2, 2, 1, 1))
    log = simulate_queues(tight, routers(tight), 40, drain=True)
    assert len(log.finished_s) == 40
    assert max(log.max_in_flight[2:4]) == 2 and max(log.max_in_flight[4:]) == 1
