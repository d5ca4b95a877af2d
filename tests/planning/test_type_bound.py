"""The bound on the mean step from the types of devices that stages consist of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, repeat
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.bench.plan_instances import INSTANCES
from planner.network.cluster import device_limits
from planner.planning.joint import type_bound as module
from planner.planning.joint.mean_bound import mean_bounds
from planner.planning.joint.stage_requirements import DevicePool, StageRequirements
from planner.planning.joint.type_bound import type_bound
from planner.workload.costs import stage_costs
from planner.workload.layers import Layer
from tests.planning.joint_plans import layouts, mean_bound_s, tiny_model, whole_plan
from tests.planning.test_joint_bound import step_ends_s

LITTLE_S = 1e-6
PRECISION = 1 + 1e-3


def of_types(seed: int, n: int, layers: int, count: int) -> tuple[pl.Cluster, pl.Workload]:
    """Devices of up to three types, and a model."""
    rng = np.random.default_rng(seed)
    workload = tiny_model(layers, count, rng).replace(tied_parameters=0)
    kind, scale = rng.integers(0, 3, n), 10.0 ** rng.uniform(-1, 2)
    figures = rng.uniform(0.1, 1.0, (3, 3))
    devices = pl.Devices(
        flops=100 * figures[0][kind],
        memory_bytes=rng.choice([150.0, 400.0, 1e6], 3)[kind],
        upload_bytes_per_s=100 * scale * figures[1][kind],
        download_bytes_per_s=100 * scale * figures[2][kind],
    )
    network = pl.Network(np.full((n, n), rng.uniform(0, 0.1)), np.full((n, n), 200.0 * scale))
    return pl.Cluster(network, devices), workload


def bound_s(cluster: pl.Cluster, workload: pl.Workload) -> float:
    """Return the bound by itself, without recomputation."""
    needs = StageRequirements(DevicePool.of(cluster), workload, 1.0, False)
    proof = type_bound(needs, LITTLE_S)
    return 0.0 if proof is None else proof.seconds


class BruteForce:
    """What the docstring of the bound says of a stage, device by device."""

    def __init__(self, cluster: pl.Cluster, workload: pl.Workload) -> None:
        self.cluster, self.workload = cluster, workload
        self.up, self.down = device_limits(cluster)
        self.rtt_s = 2 * float(cluster.network.latency_s[0, 1])
        self.fastest = float(cluster.flops.max())
        self.fastest_link = float(cluster.limited_network().fastest_bytes_per_s[0].max())

    def least_s(self) -> float:
        """Return the shortest mean step of any layout."""
        tried = layouts(len(self.cluster), len(self.workload.layers))
        return min(self._layout_s(groups, split) for groups, split in tried)

    def _layout_s(
        self, groups: Sequence[tuple[int, ...]], split: Sequence[tuple[int, int]]
    ) -> float:
        least_s = 0.0
        for j, (devices, part) in enumerate(zip(groups, split, strict=True)):
            # after the rounds of the stages before, and passes since
            before_s = max(
                (
                    self._round_s(groups[i], split[i])
                    + sum(self._passes_s(*split[k], boundary=split[k][1]) for k in range(i, j))
                    for i in range(j)
                ),
                default=0.0,
            )
            least_s = max(least_s, self._stage_s(devices, part, before_s))
        return least_s

    def _round_s(self, devices: tuple[int, ...], part: tuple[int, int]) -> float:
        if len(devices) == 1:
            return 0.0
        last = part[1] == len(self.workload.layers)
        vector = stage_costs(self.workload, *part, with_head=last).gradient_bytes
        line = np.minimum(self.up, self.down)[list(devices)]
        sent_s = 2 * (len(devices) - 1) * vector / line.sum()
        return float(max(sent_s, vector / line.min()) + self.rtt_s)

    def _stage_s(self, devices: tuple[int, ...], part: tuple[int, int], before_s: float) -> float:
        low, high = 0.0, 1.0
        while not self._suffices(devices, part, before_s, high):
            low, high = high, 2 * high
            if high > 1e6:
                return math.inf
        for _ in range(40):
            middle = (low + high) / 2
            suffices = self._suffices(devices, part, before_s, middle)
            low, high = (low, middle) if suffices else (middle, high)
        return high

    def _passes_s(self, first: int, stop: int, *, boundary: int) -> float:
        """Return the time of one microbatch in these layers and over a boundary, both ways."""
        if first == stop:
            return 0.0
        last = stop == len(self.workload.layers)
        costs = stage_costs(self.workload, first, stop, with_head=last)
        size = stage_costs(self.workload, 0, boundary).output_bytes
        hop_s = self.rtt_s / 2 + size / self.fastest_link
        return (3 * costs.forward_flops + costs.head_flops) / self.fastest + 2 * hop_s

    def _suffices(
        self, devices: tuple[int, ...], part: tuple[int, int], before_s: float, seconds: float
    ) -> bool:
        work, layers = self.workload, len(self.workload.layers)
        costs = stage_costs(work, *part, with_head=part[1] == layers)
        ends = [boundary for boundary in part if 0 < boundary < layers]
        messages = sum(stage_costs(work, 0, boundary).output_bytes for boundary in ends)
        line = np.minimum(self.up, self.down)[list(devices)]
        vector = costs.gradient_bytes if len(devices) > 1 else 0.0
        window_s = seconds - max(self._round_s(devices, part), before_s)
        output = stage_costs(work, 0, part[1]).output_bytes if part[1] < layers else 0.0
        input_bytes = stage_costs(work, 0, part[0]).output_bytes if part[0] else 0.0
        messages_s = seconds - before_s + input_bytes / self.fastest_link
        away_s = self._passes_s(part[1], layers, boundary=part[1])
        flops = costs.forward_flops + costs.backward_flops + costs.head_flops
        most_flops_per_s = max(self.cluster.flops[list(devices)])
        if math.ceil(work.batch_samples / len(devices)) * flops / most_flops_per_s > window_s:
            return False
        taken = 0.0
        for d, c in zip(devices, line, strict=True):
            f, room = self.cluster.flops[d], costs.room(self.cluster.memory_bytes[d])
            if costs.state_bytes > self.cluster.memory_bytes[d]:
                return False
            limits = [
                window_s * f / flops,
                (window_s - costs.forward_flops / f - away_s) * f / costs.backward_flops,
                window_s * min(room, work.batch_samples) / (flops / f + away_s),
            ]
            if messages:
                limits.append((seconds * c - vector) / messages)
                limits.append((messages_s - costs.forward_flops / f) * self.up[d] / messages)
                limits.append((messages_s - costs.backward_flops / f) * self.down[d] / messages)
            if output:
                limits.append(window_s * c / output)
            taken += max(min(limits), 0.0)
        return taken >= work.batch_samples


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 3), st.integers(1, 6))
def test_no_layout_beats_the_bound(seed: int, n: int, layers: int, count: int) -> None:
    """Layouts by brute force, and plans of layouts."""
    cluster, workload = of_types(seed, n, layers, count)
    least_s, bound = BruteForce(cluster, workload).least_s(), bound_s(cluster, workload)
    assert bound <= least_s * PRECISION
    rng = np.random.default_rng(seed)
    tried = list(layouts(n, layers))
    rng.shuffle(tried)
    for groups, split in tried[:20]:
        plan = whole_plan(cluster, workload, groups, split, rng)
        if plan is not None:
            assert bound <= step_ends_s(plan)[-1] / 4 * (1 + 1e-9)


def test_unlike_devices_take_fewer_microbatches() -> None:
    """Three types of eight devices: fast ones compute more than they can send."""
    instance = INSTANCES["mixed"]
    cluster, workload = instance.cluster(), instance.model()
    of_stages, of_types, of_sites = mean_bounds(cluster, workload)
    assert max(of_stages.value, of_sites.value) < 19.5 and of_types.value > 21.0


def test_less_time_bounds_less() -> None:
    """Whenever the time is up, what is proven until then is a bound."""
    instance = INSTANCES["mixed"]
    cluster, workload = instance.cluster(), instance.model()
    whole_s = mean_bounds(cluster, workload)[1].value
    found = []
    for checks in (0, 8, 14, 10**6):
        is_over = chain(repeat(False, checks), repeat(True)).__next__
        found.append(mean_bounds(cluster, workload, is_over=is_over)[1].value)
    assert found[0] < found[1] < found[2] < found[3] == whole_s


def test_layers_without_flops() -> None:
    """They take no time, and no device cannot run them."""
    nothing = Layer("nothing", 0, 0.0, 0.0, 0.0)
    network = pl.Network(np.zeros((3, 3)), np.full((3, 3), 1e3))
    cluster = pl.Cluster(network, pl.Devices(np.array([100.0, 50.0, 50.0]), 1610.0))
    for flops in (10.0, 0.0):
        layers = Layer("first", 1, flops, 1.0, 1.0), Layer("last", 100, 0.0, 0.0, 1.0)
        workload = pl.Workload("free", nothing, layers, nothing, 4)
        bound = mean_bound_s(cluster, workload)
        result = pl.plan(cluster, workload, stop=pl.Effort(0.5))
        assert result.objective is not None and bound <= result.objective * (1 + 1e-9)


def test_merged_types_bound_less() -> None:
    """Types are merged into better ones, of which two remain, then one."""
    cluster, workload = of_types(4, 5, 3, 4)
    bounds = []
    for most in (10**6, 60, 1):
        with patch.object(module, "MAX_CASES", most):
            bounds.append(bound_s(cluster, workload))
    assert bounds[0] >= bounds[1] / PRECISION > 0 == bounds[2]
    # here prices lose nothing
    assert bounds[0] >= BruteForce(cluster, workload).least_s() / PRECISION
