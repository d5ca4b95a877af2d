"""Constraint intervals, conflicts, the queue, and the high level on a toy domain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.mapf.cbs import Branch, CbsOptions, ConflictObjective, ConflictSearch, Node
from planner.mapf.focal_queue import FocalQueue
from planner.mapf.intervals import Occupancy, conflicts
from planner.search.stop import MaxIterations
from tests.mapf.oracles import earliest
from tests.mapf.sipp_windows import EntryConstraint, Window, windows

pytestmark = pytest.mark.interpreted

times = st.integers(0, 12).map(float)


def test_earliest_time_between_blocks() -> None:
    """Half-open: a stay may touch a block; one without length fits anywhere."""
    blocks = [(4.0, 6.0), (1.0, 3.0)]
    assert earliest(0.0, 1.0, blocks) == 0.0
    assert earliest(0.5, 1.0, blocks) == 3.0
    assert earliest(0.5, 1.5, blocks) == 6.0
    assert earliest(2.0, 0.0, blocks) == 2.0
    assert earliest(0.0, 1.0, [(-math.inf, math.inf)]) == math.inf


@given(begin=times, length=times, blocks=st.lists(st.tuples(times, times), max_size=5))
def test_earliest_against_trying(
    begin: float, length: float, blocks: list[tuple[float, float]]
) -> None:
    """Whole times: the first one that works."""
    blocks = [(low, high) for low, high in blocks if low < high]

    def clear(at: float) -> bool:
        return length == 0 or all(at >= high or at + length <= low for low, high in blocks)

    wanted = next(at for at in itertools.count(int(begin)) if clear(at))
    assert earliest(begin, length, blocks) == wanted


@given(st.lists(st.tuples(times, times, st.sampled_from([-math.inf, 5.0, math.inf])), max_size=5))
def test_windows_match_the_constraints(given_rules: list[tuple[float, float, float]]) -> None:
    """Entry and latest exit agree with the constraints at any time; windows ascend, disjoint."""
    constraints = [EntryConstraint(0, low, high, before) for low, high, before in given_rules]
    found = windows(constraints)
    for at in [-1.0, *np.arange(0, 13, 0.5).tolist()]:
        over = [r.before for r in constraints if r.first <= at < r.last]
        here = [w for w in found if w.first <= at < w.last]
        if over and min(over) == -math.inf:
            assert here == []
        else:
            (window,) = here
            assert window.before == min(over, default=math.inf)
            assert window.final == (not over)
    for one, other in itertools.pairwise(found):
        assert one.last < other.first or one[2:] != other[2:]
    assert windows([]) == [Window(-math.inf, math.inf, math.inf, True)]


occupancies = st.lists(
    st.builds(Occupancy, st.integers(0, 3), st.integers(0, 2), times, times), max_size=12
)


@given(occupancies)
def test_conflicts_are_all_overlaps(found: list[Occupancy]) -> None:
    """Against all pairs; touching intervals, own ones and those of no length do not conflict."""
    wanted = {
        frozenset((i, j))
        for (i, one), (j, other) in itertools.combinations(enumerate(found), 2)
        if one.resource == other.resource and one.agent != other.agent
        if one.begin < one.end and other.begin < other.end
        if one.begin < other.end and other.begin < one.end
    }
    pairs = conflicts(found)
    assert len(pairs) == len(wanted)
    for one, other in pairs:
        assert one.begin <= other.begin < one.end
        assert one.resource == other.resource and one.agent != other.agent
    assert [pair[1].begin for pair in pairs] == sorted(pair[1].begin for pair in pairs)


@settings(max_examples=60)
@given(
    slack=st.sampled_from([1.0, 1.5, 3.0]),
    steps=st.lists(st.none() | st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40),
)
def test_focal_queue_against_a_list(slack: float, steps: list[tuple[int, int] | None]) -> None:
    """Pushes and pops in any order, cheaper items later too."""
    queue: FocalQueue[int] = FocalQueue(slack)
    items: dict[int, tuple[int, int]] = {}
    for name, step in enumerate(steps):
        if step is not None:
            queue.push(name, step[0], (step[1],))
            items[name] = step
        elif items:
            least = min(cost for cost, _ in items.values())
            assert queue.least == least
            near = [n for n, (cost, _) in items.items() if cost <= slack * least]
            wanted = min(near, key=lambda n: (items[n][1], n))
            assert queue.pop() == wanted
            del items[wanted]
        assert len(queue) == len(items)
    with pytest.raises(ValueError, match="suboptimality must be at least 1"):
        FocalQueue(0.9)


class Slots:
    """Agents that each take a different slot at a price: an assignment problem."""

    def __init__(self, price: Sequence[Sequence[float]]) -> None:
        self.price = price
        self.asked = 0

    @property
    def agents(self) -> int:
        """Rows of the price list."""
        return len(self.price)

    def plan(self, agent: int, constraints: tuple[int, ...]) -> tuple[int, int] | None:
        """The cheapest slot that is not forbidden."""
        self.asked += 1
        free = [(p, s) for s, p in enumerate(self.price[agent]) if s not in constraints]
        return (agent, min(free)[1]) if free else None

    def cost(self, route: tuple[int, int]) -> float:
        """Its price."""
        return self.price[route[0]][route[1]]

    def conflicts(self, routes: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Pairs in one slot."""
        pairs = itertools.combinations(routes, 2)
        return [(a, b, slot) for (a, slot), (b, other) in pairs if slot == other]

    def priority(self, conflict: tuple[int, int, int]) -> int:
        """All are equal."""
        return 0

    def split(
        self,
        conflict: tuple[int, int, int],
        node: Node[tuple[int, int], int, tuple[int, int, int]],
    ) -> list[Branch[int]]:
        """One or the other leaves."""
        a, b, slot = conflict
        return [[(a, slot)], [(b, slot)]]


def cheapest(price: Sequence[Sequence[float]], objective: ConflictObjective) -> float | None:
    """Least cost by brute force."""
    slots = range(len(price[0]))
    ways = itertools.permutations(slots, len(price))
    costs = [objective.of(row[s] for row, s in zip(price, way, strict=True)) for way in ways]
    return min(costs, default=None)


@settings(max_examples=150, deadline=None)
@given(
    price=st.integers(1, 4).flatmap(
        lambda slots: st.lists(
            st.lists(st.integers(1, 6).map(float), min_size=slots, max_size=slots),
            min_size=1,
            max_size=4,
        )
    ),
    objective=st.sampled_from(list(ConflictObjective)),
    slack=st.sampled_from([1.0, 1.2, 2.0]),
    bypass=st.booleans(),
    max_classified=st.sampled_from([1, 3, 9]),
)
def test_optimum_of_assignments(
    price: list[list[float]],
    objective: ConflictObjective,
    slack: float,
    bypass: bool,
    max_classified: int,
) -> None:
    """The first solution is within the suboptimality factor of optimum and bound."""
    run = MaxIterations(10**6).start()
    options = CbsOptions(objective, slack, bypass, max_classified)
    search = ConflictSearch(Slots(price), run, options)
    root = search.root()
    assert root is not None
    first = next(search.solutions([root]), None)
    wanted = cheapest(price, objective)
    if wanted is None:
        assert first is None and search.bound == math.inf
        return
    assert first is not None and first.conflicts == ()
    assert wanted <= first.cost <= slack * wanted
    assert search.bound <= wanted and first.cost <= slack * search.bound


@settings(max_examples=50, deadline=None)
@given(
    price=st.lists(
        st.lists(st.integers(1, 6).map(float), min_size=4, max_size=4), min_size=2, max_size=4
    )
)
def test_all_solutions_come_in_order(price: list[list[float]]) -> None:
    """Best first without bypass: costs ascend, and the limit cuts the rest off."""
    run = MaxIterations(10**6).start()
    options = CbsOptions(bypass=False)
    search = ConflictSearch(Slots(price), run, options)
    root = search.root()
    assert root is not None
    costs = [node.cost for node in search.solutions([root])]
    assert costs == sorted(costs) and search.bound == math.inf
    assert costs[0] == cheapest(price, ConflictObjective.SUM)
    again = ConflictSearch(Slots(price), run, options)
    again.upper_bound = costs[0] + 1
    assert all(node.cost < again.upper_bound for node in again.solutions([root]))
    assert again.bound >= again.upper_bound


def test_only_constrained_agents_are_replanned() -> None:
    """One plan per branch of one agent."""
    domain = Slots([[1.0, 2.0, 3.0]] * 3)
    search = ConflictSearch(
        domain, MaxIterations(1).start(), CbsOptions(bypass=False, max_classified=1)
    )
    root = search.root()
    assert root is not None and domain.asked == 3
    assert list(search.solutions([root])) == []
    assert domain.asked == 5


class Recorded(Slots):
    """Records the conflict that was split last."""

    def split(
        self,
        conflict: tuple[int, int, int],
        node: Node[tuple[int, int], int, tuple[int, int, int]],
    ) -> list[Branch[int]]:
        """Split and record."""
        self.last = conflict
        return super().split(conflict, node)


def test_cardinal_conflicts_are_split_first() -> None:
    """Two agents that can share a second slot for nothing, two that cannot."""
    # slots 0, 1 cost the same for agents 0 and 1; agents 2 and 3 want slot 2 alone
    price = [[1.0, 1.0, 9.0, 9.0], [1.0, 1.0, 9.0, 9.0], [9.0, 9.0, 1.0, 3.0], [9.0, 9.0, 1.0, 4.0]]
    domain = Recorded(price)
    search = ConflictSearch(domain, MaxIterations(1).start(), CbsOptions(bypass=False))
    root = search.root()
    assert root is not None and [c[2] for c in root.conflicts] == [0, 2]
    assert list(search.solutions([root])) == []
    assert domain.last == (2, 3, 2) and search.bound == root.cost + 2


def test_bypass_adopts_a_child_of_equal_cost() -> None:
    """The node adopts the other route without a split or a new constraint."""
    price = [[1.0, 1.0, 9.0], [1.0, 1.0, 9.0], [9.0, 9.0, 1.0]]

    def rules_at_the_end(bypass: bool) -> int:
        constraints: list[int] = []
        search = ConflictSearch(
            Slots(price),
            MaxIterations(100).start(),
            CbsOptions(bypass=bypass),
            lambda node: constraints.append(sum(map(len, node.constraints))),
        )
        root = search.root()
        assert root is not None
        assert next(search.solutions([root])).cost == 3.0
        return constraints[-1]

    assert [rules_at_the_end(bypass) for bypass in (True, False)] == [0, 1]


def test_constraints_in_another_order_are_one_node() -> None:
    """Four agents that prefer one slot: each set of constraints is expanded once."""
    price = [[1.0, 5.0, 6.0, 7.0]] * 4
    taken: list[tuple[frozenset[int], ...]] = []
    search = ConflictSearch(
        Slots(price),
        MaxIterations(10**4).start(),
        CbsOptions(bypass=False, max_classified=1),
        lambda node: taken.append(tuple(frozenset(of) for of in node.constraints)),
    )
    root = search.root()
    assert root is not None
    assert min(node.cost for node in search.solutions([root])) == 19.0
    assert len(taken) == len(set(taken))
