"""The router against a verbatim Algorithm 1, and its differences."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.swarm.routing import (
    Entry,
    NoPeer,
    Router,
    begun_router,
    starting_estimates_s,
)


class ReferenceRouter:
    """Algorithm 1, lines 1 to 19 and 30: dictionaries instead of priority queues."""

    def __init__(self, stages: int, gamma: float, epsilon: float) -> None:
        self.ema: dict[str, float] = {}
        self.queues: list[dict[str, float]] = [{} for _ in range(stages)]
        self.served: dict[str, tuple[int, ...]] = {}
        self.gamma, self.epsilon = gamma, epsilon

    def add_server(self, server: str, blocks: tuple[int, ...]) -> None:
        """Lines 7 to 10."""
        self.served[server] = blocks
        self.ema[server] = self.epsilon
        for i in blocks:
            self.queues[i][server] = self.epsilon

    def ban_server(self, server: str) -> None:
        """Lines 11 to 13."""
        for i in self.served[server]:
            self.queues[i][server] = math.inf

    def choose_server(self, i: int) -> str | None:
        """Lines 14 to 19; of equal priorities the first that was added."""
        server = min(self.queues[i], key=lambda s: self.queues[i][s], default=None)
        if server is None or math.isinf(self.queues[i][server]):
            return None
        new = self.queues[i][server] + self.ema[server]
        for j in self.served[server]:
            self.queues[j][server] = new
        return server

    def answered(self, server: str, seconds: float) -> None:
        """Line 30."""
        self.ema[server] = self.gamma * seconds + (1 - self.gamma) * self.ema[server]


BLOCKS = {"a": (0,), "b": (0,), "c": (1,), "d": (0, 1), "e": (1,)}
CALLS = st.lists(
    st.tuples(st.sampled_from(["choose", "ban", "back"]), st.integers(0, 4), st.integers(1, 40)),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(CALLS, st.sampled_from([0.1, 0.5, 1.0]))
def test_router_equals_algorithm_1(calls: list[tuple[str, int, int]], gamma: float) -> None:
    """With Entry.EPSILON all choices equal the paper's, with bans, returns and shared peers."""
    # times in 64ths: sums are exact in any order
    reference = ReferenceRouter(2, gamma, 1 / 64)
    router: Router[str] = Router(2, smoothing=gamma, epsilon_s=1 / 64, entry=Entry.EPSILON)
    banned: set[str] = set()
    for name, blocks in BLOCKS.items():
        reference.add_server(name, blocks)
        router.announce(name, blocks)
    for what, number, size in calls:
        name = "abcde"[number]
        if what == "ban":
            reference.ban_server(name)
            router.ban(name)
            banned.add(name)
        elif what == "back" and name in banned:
            reference.add_server(name, BLOCKS[name])
            router.announce(name, BLOCKS[name])
            banned.remove(name)
        elif what == "choose":
            stage = number % 2
            expected = reference.choose_server(stage)
            if expected is None:
                with pytest.raises(NoPeer):
                    router.choose(stage)
                continue
            assert router.choose(stage) == expected
            reference.answered(expected, size / 64)
            router.report(expected, size / 64)
            assert router.estimates_s(stage)[expected] == pytest.approx(reference.ema[expected])


def test_twice_as_fast_is_chosen_twice_as_often() -> None:
    """By hand: priorities (a, b) are 0 0, 1 0, 1 2, 2 2, 3 2, 3 4, 4 4, ..."""
    router: Router[str] = Router(1, smoothing=0)
    router.announce("a", [0], 1.0)
    router.announce("b", [0], 2.0)
    assert [router.choose(0) for _ in range(9)] == list("abaabaaba")
    assert router.shares(0) == pytest.approx({"a": 2 / 3, "b": 1 / 3})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_counts_follow_estimates(times: list[int]) -> None:
    """After n choices every peer is within one of n times its share."""
    router: Router[int] = Router(1, smoothing=0)
    for k, seconds in enumerate(times):
        router.announce(k, [0], float(seconds))
    shares = router.shares(0)
    found: Counter[int] = Counter()
    for n in range(1, 200):
        found[router.choose(0)] += 1
        assert all(abs(found[k] - n * share) <= len(times) for k, share in shares.items())


def busy_router(entry: Entry) -> Router[str]:
    """Two peers of 1 s after 1000 choices."""
    router: Router[str] = Router(1, entry=entry)
    for name in "ab":
        router.announce(name, [0])
    for _ in range(1000):
        router.report(router.choose(0), 1.0)
    return router


def test_new_peer_enters_at_the_lowest_priority() -> None:
    """It gets its share at once; with the paper's epsilon it gets all microbatches for long."""
    router = busy_router(Entry.LEVEL)
    router.announce("c", [0])
    counts: Counter[str] = Counter()
    for _ in range(30):
        peer = router.choose(0)
        counts[peer] += 1
        router.report(peer, 1.0)
    assert counts == {"a": 10, "b": 10, "c": 10}

    flooded = busy_router(Entry.EPSILON)
    flooded.announce("c", [0])
    for _ in range(400):
        assert flooded.choose(0) == "c"
        flooded.report("c", 1.0)


def test_returning_peer_enters_at_the_lowest_priority() -> None:
    """It keeps its estimate, unlike in the paper."""
    router = busy_router(Entry.LEVEL)
    router.ban("a")
    assert {router.choose(0) for _ in range(500)} == {"b"}
    assert router.estimates_s(0).keys() == {"b"}
    router.announce("a", [0])
    assert router.estimates_s(0)["a"] == pytest.approx(1.0)
    counts = Counter(router.choose(0) for _ in range(20))
    assert counts == {"a": 10, "b": 10}


def test_announcing_again_changes_nothing() -> None:
    """Repeated announcements of a peer have no effect."""
    router, other = busy_router(Entry.LEVEL), busy_router(Entry.LEVEL)
    for _ in range(50):
        router.announce("a", [0])
        assert router.choose(0) == other.choose(0)


def test_a_guess_is_replaced_by_the_first_answer() -> None:
    """A given estimate is averaged instead."""
    router: Router[str] = Router(1)
    router.announce("a", [0], 2.0)
    router.announce("b", [0])
    assert router.estimates_s(0) == {"a": 2.0, "b": 2.0}
    router.report("a", 1.0)
    router.report("b", 1.0)
    assert router.estimates_s(0) == pytest.approx({"a": 1.9, "b": 1.0})


def test_a_peer_moves_and_leaves() -> None:
    """A peer that announces another stage is removed from the old one."""
    router: Router[str] = Router(2)
    for name, stage in (("a", 0), ("b", 0), ("c", 1)):
        router.announce(name, [stage])
    router.announce("b", [1])
    assert {router.choose(0) for _ in range(5)} == {"a"}
    assert {router.choose(1) for _ in range(5)} == {"b", "c"}
    router.leave("a")
    with pytest.raises(NoPeer, match="no peer of stage 0"):
        router.choose(0)
    router.report("a", 1.0)
    router.ban("a")


def test_starting_estimates() -> None:
    """Shares of 3 to 1 are reproduced by the router."""
    router: Router[str] = Router(1, smoothing=0)
    for name, seconds in starting_estimates_s({"a": 6.0, "b": 2.0}, 4.0).items():
        router.announce(name, [0], seconds)
    assert router.shares(0) == pytest.approx({"a": 0.75, "b": 0.25})
    assert Counter(router.choose(0) for _ in range(400)) == {"a": 300, "b": 100}


def test_invalid_numbers_raise() -> None:
    """One line each."""
    with pytest.raises(ValueError, match="1 stage or more, found 0"):
        Router(0)
    with pytest.raises(ValueError, match="smoothing must be from 0 to 1, found 2"):
        Router(1, smoothing=2)
    router: Router[str] = Router(1)
    with pytest.raises(ValueError, match="stages are 0 to 0, found 1"):
        router.announce("a", [1])
    with pytest.raises(ValueError, match="stages are 0 to 0, found -1"):
        router.announce("a", [])
    router.announce("a", [0])
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a response time must be a finite number above 0"):
            router.report("a", wrong)


def test_router_with_initial_shares() -> None:
    """Shares are reproduced, and trainers start with different peers."""
    router = begun_router(2, 0.0, 1, {0: ({0: 1.0, 1: 3.0}, 0.5), 1: ({2: 1.0, 3: 1.0}, 0.1)})
    assert [router.choose(0) for _ in range(8)].count(1) == 6
    assert router.estimates_s(1) == {2: 0.1, 3: 0.1}
    alike = {0: ({0: 1.0, 1: 1.0, 2: 1.0}, 1.0)}
    assert [begun_router(1, 0.1, own, alike).choose(0) for own in range(4)] == [0, 1, 2, 0]
