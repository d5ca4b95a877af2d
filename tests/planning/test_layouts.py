"""Device classes, layout estimates and layout search, compared with enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.plans import catalogue
from planner.bench.plan_instances import INSTANCES
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.averaging.stage_averaging import adaptive_group
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.flow_paths import interleaved_paths
from planner.planning.joint.initial_layouts import InitialLayout
from planner.planning.joint.layout import Layout, Outline
from planner.planning.joint.layout_averaging import one_round_s
from planner.planning.joint.layout_estimate import estimate
from planner.planning.joint.layout_memory import stage_memory
from planner.planning.joint.layout_problem import Constraints
from planner.planning.joint.layout_search import LayoutSearch
from planner.search.stop import MaxIterations
from planner.search.worker_pool import WorkerPool
from planner.simulator.averaging_rounds import round_s
from planner.simulator.resources import LinkResources
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Head
from planner.workload.costs import stage_costs
from planner.workload.layers import Layer
from planner.workload.workload import Workload

STARTS = (InitialLayout.NEARBY, InitialLayout.SPREAD, InitialLayout.NEARBY_SUBSET)


def regions(sizes: list[int], seed: int = 0, memory_bytes: float = 1e9) -> Cluster:
    """Regions of equal devices with random links between them."""
    rng = np.random.default_rng(seed)
    place = np.repeat(np.arange(len(sizes)), sizes)
    latency = rng.uniform(0.01, 0.2, (len(sizes),) * 2)
    bandwidth = rng.uniform(1e6, 1e7, (len(sizes),) * 2)
    np.fill_diagonal(latency, 0.001)
    np.fill_diagonal(bandwidth, 2e7)
    at = np.ix_(place, place)
    return Cluster(Network(latency[at], bandwidth[at]), Devices(1e12, memory_bytes))


def model(layers: int = 4, batch: int = 16) -> Workload:
    """Layers of different sizes."""
    rng = np.random.default_rng(1)
    parts = [
        Layer(f"layer {k}", int(rng.integers(1, 9) * 1e5), rng.uniform(1, 4) * 1e10, 1e6, 4e6)
        for k in range(layers)
    ]
    stem, head = Layer("stem", 300_000, 1e9, 1e6, 1e6), Layer("head", 200_000, 5e9, 1e6, 2e6)
    return Workload("test", stem, tuple(parts), head, batch_samples=batch)


def test_device_classes() -> None:
    """Two regions; one device of the first is faster, one of the second cannot compute."""
    cluster = regions([3, 2])
    fast = np.array([1e12, 2e12, 1e12, 1e12, 1e12])
    able = np.array([True, True, True, True, False])
    classes = DeviceClasses.of(cluster.replace(devices=Devices(fast, 1e9, can_compute=able)))
    assert sorted(classes.members) == [(0, 2), (1,), (3,)]
    alone = classes.members.index((3,))
    assert math.isinf(classes.bandwidth[alone, alone])
    both = classes.members.index((0, 2))
    assert classes.rtt_s[both, both] == pytest.approx(0.002)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=3, max_size=3), st.integers(0, 10**6))
def test_averaging_estimate_is_between_best_and_equal_shares(row: list[int], seed: int) -> None:
    """Its shares are feasible, and equal shares are among the candidates."""
    cluster = regions([3, 3, 3], seed)
    classes = DeviceClasses.of(cluster)
    search = LayoutSearch(classes, model())
    problem = search.problem
    found = one_round_s(1e7, np.array(row), problem.class_arrays, problem.scratch)
    # from the table
    again = one_round_s(2e7, np.array(row), problem.class_arrays, problem.scratch)
    fresh = LayoutSearch(classes, model()).problem
    assert again == one_round_s(2e7, np.array(row), fresh.class_arrays, fresh.scratch)
    members = tuple(d for c, k in enumerate(row) for d in classes.members[c][:k])
    if len(members) < 2:
        assert found == 0.0
        return
    links = LinkResources.of(cluster)
    equal = round_s(AveragingGroup.equal(members), 1e7, links)
    least = round_s(adaptive_group(cluster, members, 1e7), 1e7, links)
    assert least <= found * (1 + 1e-6) and found <= equal * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_memory_equals_that_of_stage_costs(seed: int) -> None:
    """For every stage of a random split, however many layers are recomputed."""
    rng = np.random.default_rng(seed)
    cluster, work = regions([2, 2], memory_bytes=rng.uniform(1e7, 1e8)), model(5)
    classes = DeviceClasses.of(cluster)
    search = LayoutSearch(classes, work)
    cuts = [0, *sorted(rng.choice(np.arange(1, 5), 2, replace=False).tolist()), 5]
    layout = Layout.of([[1, 0], [1, 1], [0, 1]], cuts, [False] * 3, BOTH[seed % 2])
    state = search.problem.state_of(layout)
    for j, (a, b) in enumerate(layout.layers):
        for recomputed in range(b - a + 1):
            state.recompute[j] = recomputed
            stage_bytes, saved_bytes = stage_memory(search.problem.model, state, j)
            costs = stage_costs(work, a, b, with_head=j == layout.head_stage, recomputed=recomputed)
            assert stage_bytes == pytest.approx(costs.need_bytes(0), rel=1e-12)
            assert saved_bytes == pytest.approx(costs.saved_bytes, rel=1e-12)


def test_mixing_of_the_flow() -> None:
    """None if regions keep to themselves; half if one sends to two in equal parts."""
    search = LayoutSearch(DeviceClasses.of(regions([2, 2])), model())
    for counts, mixing in (
        ([[2, 0], [2, 0]], 0.0),
        ([[1, 1], [1, 1]], 0.0),
        ([[2, 0], [1, 1]], 0.5),
    ):
        # links do not limit
        search.problem.class_arrays.pair_bandwidth[:] = 1e12
        search.scored(Layout.of(counts, [0, 2, 4], [False] * 2))
        assert search.problem.scratch.mixing[0] == pytest.approx(mixing)


@pytest.mark.parametrize("seed", range(20))
def test_recomputation_is_chosen_where_it_costs_nothing(seed: int) -> None:
    """Where links limit and memory is short, as if all stages recomputed."""
    memory_bytes = np.random.default_rng(seed).uniform(3e7, 6e7)
    free, kept, repeated = estimates(seed, memory_bytes, flops=1e18)
    assert free <= repeated * (1 + 1e-9)
    assert free <= kept * (1 + 1e-9)


@pytest.mark.parametrize(("in_flight", "batch"), [(1, 16), (2, 16), (None, 2), (None, 4)])
def test_recomputation_is_not_chosen_where_it_gains_nothing(
    in_flight: int | None, batch: int
) -> None:
    """Where not memory limits the microbatches in flight."""
    free, kept, _ = estimates(3, 1e9, 1e12, batch, in_flight)
    assert free == kept


def estimates(
    seed: int, memory_bytes: float, flops: float, batch: int = 16, in_flight: int | None = None
) -> list[float]:
    """Of a layout with one region a stage: free, without and with recomputation."""
    cluster = regions([2, 2, 2], seed, memory_bytes=memory_bytes)
    classes = DeviceClasses.of(cluster.replace(devices=replace(cluster.devices, flops=flops)))
    layout = Layout.of([[2, 0, 0], [0, 2, 0], [0, 0, 2]], [0, 1, 2, 4], [False] * 3)
    choices = [Constraints(recompute=r, in_flight=in_flight) for r in (None, (), "all")]
    return [
        LayoutSearch(classes, model(batch=batch), constraints=choice).scored(layout).value
        for choice in choices
    ]


BOTH = (Head.LAST, Head.FIRST)


def every_layout(
    classes: DeviceClasses, layers: int, heads: tuple[Head, ...] = (Head.LAST,)
) -> Iterator[Layout]:
    """Return all numbers of devices of each class on each stage, with all splits."""
    for stages in range(1, layers + 1):
        rows = [range(size + 1) for size in classes.size.tolist()]
        columns = [list(itertools.product(*rows)) for _ in range(stages)]
        for counts in itertools.product(*columns):
            total = np.sum(counts, axis=0)
            if (total > classes.size).any() or any(sum(row) == 0 for row in counts):
                continue
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                for head in heads[: 2 if stages > 1 else 1]:
                    ends = [0, *cuts, layers]
                    yield Layout.of([list(c) for c in counts], ends, [False] * stages, head)


@pytest.mark.parametrize("heads", [(Head.LAST,), (Head.FIRST,), BOTH])
@pytest.mark.parametrize("seed", range(4))
def test_search_finds_the_lowest_estimate(seed: int, heads: tuple[Head, ...]) -> None:
    """Three layers over two regions of two and one device."""
    classes, work = DeviceClasses.of(regions([2, 1, 1], seed, 6e7)), model(3)
    search = LayoutSearch(classes, work, seed=seed, constraints=Constraints(heads=heads))
    best = min(search.scored(one).value for one in every_layout(classes, 3, heads))
    search.search(MaxIterations(10**9).start(), 60_000)
    found = search.ranked()[0]
    assert found.value == pytest.approx(best, rel=1e-9)
    assert search.scored(found.layout).value == pytest.approx(found.value)


def test_the_same_seed_finds_the_same_layouts() -> None:
    """No device is used twice."""
    classes, work = DeviceClasses.of(regions([4, 3, 5])), model(6, 48)
    found = []
    for _ in range(2):
        search = LayoutSearch(classes, work, seed=7)
        search.search(MaxIterations(10**9).start(), 20_000)
        found.append(search.ranked())
    assert found[0] == found[1]
    for one in found[0]:
        assert (np.sum(one.layout.counts, axis=0) <= classes.size).all()
        devices = [d for group in one.layout.groups(classes) for d in group]
        assert len(set(devices)) == len(devices)


def test_rounds_with_given_numbers_of_stages_keep_to_them() -> None:
    """Each gets a layout, no better than the best with any number."""
    classes, work = DeviceClasses.of(regions([2, 1, 1], 1, 6e7)), model(3)
    search = LayoutSearch(classes, work, seed=3)
    best: dict[Outline, float] = {}
    for one in every_layout(classes, 3, BOTH):
        scored = search.scored(one)
        best[one.outline] = min(best.get(one.outline, math.inf), scored.value)
    outlines = [(2, Head.LAST), (3, Head.FIRST)]
    search.search_fixed(MaxIterations(10**9).start(), outlines, 60_000, WorkerPool(1))
    found = search.best_by_outline()
    assert {outline: scored.value for outline, scored in found.items()} == {
        outline: pytest.approx(best[outline], rel=1e-9) for outline in outlines
    }


# boundaries that need longer periods at first than in the end
@example(1208, 1.0, 1, False)
@example(2948, 1.0, 1, False)
@given(st.integers(0, 10**6), st.floats(0.5, 1.5), st.sampled_from([1, 5]), st.booleans())
def test_truncated_estimates_exceed_the_limit(
    seed: int, part: float, every: int, delayed: bool
) -> None:
    """Estimates are exact up to the limit."""
    rng = np.random.default_rng(seed)
    memory = float(rng.choice([rng.uniform(4e7, 9e7), 1e9]))
    classes = DeviceClasses.of(regions([2, 1, 3], seed, memory))
    given_ = Constraints(every_steps=every, delayed=delayed, heads=BOTH)
    search = LayoutSearch(classes, model(5), seed=seed, constraints=given_)
    outline = int(rng.integers(1, 5)), BOTH[seed % 2]
    state = search.initial.make(outline, STARTS[int(rng.integers(3))])
    limits = search.problem.model, search.problem.class_arrays, state, search.problem.scratch
    whole = estimate(*limits, math.inf)
    most = part * whole if whole < math.inf else 1.0
    found = estimate(*limits, most)
    if found < math.inf:
        assert found == whole
    else:
        assert whole > most
    assert estimate(*limits, 1.001 * whole) == whole
    if every == 1 and not delayed:
        assert estimate(*limits, 0.3 * whole) == math.inf


@settings(deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_mutations_are_valid_layouts(seed: int, fixed: bool, bound: bool) -> None:
    """Also after a stage lost all its devices; constraints are kept."""
    rng = np.random.default_rng(seed)
    classes, stages = DeviceClasses.of(regions([2, 1, 3], seed)), int(rng.integers(1, 5))
    work = model(5)
    layers = work.even_split(stages) if bound else None
    given_ = Constraints(stages=stages if fixed else None, layers=layers, heads=BOTH)
    search = LayoutSearch(classes, work, seed=seed, constraints=given_)
    outline = stages, BOTH[seed % 2]
    state = search.initial.make(outline, STARTS[int(rng.integers(3))])
    for _ in range(12):
        before = state.cuts.copy()
        if not search._random_move(state):
            # a change that cannot be may have been begun
            state = search.initial.make(outline, STARTS[int(rng.integers(3))])
            continue
        count = int(state.stages[0])
        assert 1 <= count <= search.problem.max_stages
        assert count == stages or not (fixed or bound)
        ends = state.cuts[: count + 1]
        assert ends[0] == 0 and ends[-1] == 5 and (np.diff(ends) > 0).all()
        assert not bound or (before == state.cuts).all()
        assert not fixed or stages == 1 or state.head_first[0] == (outline[1] is Head.FIRST)
        assert (state.counts >= 0).all() and (state.counts[count:] == 0).all()
        assert (state.counts.sum(axis=0) <= classes.size).all()


def test_other_seeds_find_layouts_as_good() -> None:
    """Twelve regions: which of them share a stage, and in which order, is soon settled wrongly.

    88 searches found none of less than 14.3257 s; 16.4 s is where shorter ones may stay.
    """
    instance, found = INSTANCES["gcp-v100"], []
    for seed in range(2):
        search = LayoutSearch(DeviceClasses.of(instance.cluster()), instance.model(), seed=seed)
        search.search(MaxIterations(10**9).start(), 600_000)
        found.append(search.ranked()[0].value)
    assert max(found) <= 1.02 * 14.3257


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("gcp12_skippipe_2025_repaired/llama-1.5b", 13.274),
        ("aws10_dtfm_code_2022/llama-1.5b", 12.662),
    ],
)
def test_few_close_regions_are_found(name: str, least: float) -> None:
    """Searches that start with all devices would stop at 16.2 s and 13.4 s."""
    instance, found = catalogue()[name], []
    for seed in range(2):
        search = LayoutSearch(DeviceClasses.of(instance.cluster()), instance.model(), seed=seed)
        search.search(MaxIterations(10**9).start(), 200_000)
        found.append(search.ranked()[0].value)
    assert max(found) <= 1.02 * least


def test_infeasible_layers() -> None:
    """A layer needs more memory than any device has."""
    search = LayoutSearch(DeviceClasses.of(regions([2, 2], memory_bytes=1e5)), model())
    search.search(MaxIterations(10**9).start(), 5_000)
    assert search.ranked() == []


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 10**6))
def test_every_stretch_of_paths_follows_the_flow(count: int, seed: int) -> None:
    """After b microbatches no device is off its part of b by more than two."""
    rng = np.random.default_rng(seed)
    groups = [(0, 1), (2, 3, 4), (5, 6)]
    starts = rng.dirichlet(np.ones(2))
    middle = rng.dirichlet(np.ones(3))
    last = rng.dirichlet(np.ones(2))
    paths = interleaved_paths(
        groups, starts, [np.outer(starts, middle), np.outer(middle, last)], count
    )
    assert len(paths) == count
    for j, part in enumerate((starts, middle, last)):
        seen = np.zeros(len(part))
        for b, path in enumerate(paths):
            seen[groups[j].index(path[j])] += 1
            assert np.abs(seen - (b + 1) * part).max() < 2.0
