"""The bound on the mean step from what sites can compute behind their lines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.bench.job_generator import random_job
from planner.planning.joint.site_bound import site_bound
from planner.training_plan.choices import Codec, Head
from planner.workload.layers import Layer
from tests.planning.joint_plans import (
    layouts,
    mean_bound_s,
    recomputed_layers,
    tiny_model,
    whole_plan,
)
from tests.planning.test_joint_bound import step_ends_s

ROUNDING = 1 + 1e-9


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 4), st.integers(1, 6))
def test_no_plan_beats_the_bound(seed: int, n: int, layers: int, count: int) -> None:
    """Devices in up to four sites with slow lines, or without sites; heavy layers or light ones."""
    rng = np.random.default_rng(seed)
    workload = tiny_model(layers, count, rng)
    workload = workload.replace(
        layers=tuple(
            replace(x, parameters=int(x.parameters * rng.choice([1, 5, 30])) + 1)
            for x in workload.layers
        )
    )
    sites = [f"site {k}" for k in rng.integers(0, 4, n)] if rng.random() < 0.8 else None
    inner, outer = (
        rng.permutation(sorted(set(sites or [])))[:2] if len(set(sites or [])) > 1 else (0, 0)
    )
    scale = 10.0 ** rng.uniform(-1, 1.5)
    up, down = (
        {site: float(rng.uniform(3, 60) * scale) for site in sorted(set(sites or []))} or None
        for _ in range(2)
    )
    devices = pl.Devices(
        flops=100 * rng.uniform(0.3, 1, n) * 10.0 ** rng.choice([0, 0, 2, 4]),
        memory_bytes=float(rng.choice([150.0, 400.0, 1e6])),
        sites=sites,
        site_upload_bytes_per_s=up,
        site_download_bytes_per_s=down,
        site_within={str(inner): str(outer)} if inner and rng.random() < 0.5 else None,
    )
    rate, latency = rng.uniform(0.3, 1, (n, n)) * 100 * scale, rng.uniform(0, 0.02, (n, n))
    cluster = pl.Cluster(pl.Network(latency, rate), devices)
    codec = Codec.INT8 if rng.random() < 0.3 else Codec.NONE
    bounds = {
        head: site_bound(cluster, workload, codec.wire_ratio, heads=[head]).seconds for head in Head
    }
    either = site_bound(cluster, workload, codec.wire_ratio, heads=list(Head)).seconds
    assert either <= min(bounds.values()) * ROUNDING
    tried = list(layouts(n, layers))
    rng.shuffle(tried)
    for groups, split in tried[:30]:
        head = Head.FIRST if rng.random() < 0.3 else Head.LAST
        again = recomputed_layers(split, rng) if rng.random() < 0.3 else ()
        plan = whole_plan(
            cluster, workload, groups, split, rng, recompute=again, codec=codec, head=head
        )
        if plan is not None:
            assert bounds[head] <= step_ends_s(plan)[-1] / 4 * ROUNDING


def two_machines(parameters: int, line: float) -> tuple[pl.Cluster, pl.Workload]:
    """Two machines of one device, 100 FLOP/s each, and two layers: 600 FLOPs each a step."""
    network = pl.Network(np.zeros((2, 2)), np.full((2, 2), 1e6))
    limits = {"a": line, "b": line}
    devices = pl.Devices(100.0, 1e9, sites=["a", "b"], site_upload_bytes_per_s=limits)
    nothing = Layer("nothing", 0, 0.0, 0.0, 0.0)
    layers = tuple(Layer(f"layer {k}", parameters, 20.0, 5.0, 1.0) for k in range(2))
    return pl.Cluster(network, devices), pl.Workload("two", nothing, layers, nothing, 10)


@pytest.mark.parametrize(
    ("parameters", "line", "expected"),
    [
        (10**4, 1e6, 6.0),  # half of the FLOPs each
        (10**4, 8.0, 50 / 8),  # a stage each, 50 bytes of activations
        (10**4, 1.0, 12.0),  # one machine alone
        (1, 1.0, 12.0),  # 4 bytes of gradients a layer take 8 s
        (1, 5.0, 6.8),  # half of the FLOPs each, and a round of one layer
    ],
)
def test_what_limits_two_machines(parameters: int, line: float, expected: float) -> None:
    """Computing, messages, or gradients."""
    cluster, workload = two_machines(parameters, line)
    assert site_bound(cluster, workload).seconds == pytest.approx(expected, rel=1e-6)


def test_rounds_leave_time_that_is_not_needed() -> None:
    """Fast devices behind slow lines, none of which holds the whole model."""
    network = pl.Network(np.zeros((4, 4)), np.full((4, 4), 10.0))
    nothing = Layer("nothing", 0, 0.0, 0.0, 0.0)
    layers = tuple(Layer(f"layer {k}", 4, 1.0, 5.0, 1.0) for k in range(2))
    workload = pl.Workload("light", nothing, layers, nothing, 24)
    cluster = pl.Cluster(network, pl.Devices(1e6, 100.0))
    bound = site_bound(cluster, workload).seconds
    # two devices of each layer: 12 messages of 5 bytes, and gradients of 16 bytes
    made = pl.plan(cluster, workload, stop=pl.Effort(0.3)).plan
    assert made is not None
    assert 0 < bound <= step_ends_s(made)[-1] / 4 * ROUNDING < 9.0


def test_only_two_sites_are_ends_of_a_pipeline() -> None:
    """Sites between them send and receive twice as much."""
    names = [f"machine {k}" for k in range(4)]
    network = pl.Network(np.zeros((4, 4)), np.full((4, 4), 1e6))
    limits = dict.fromkeys(names, 10.0)
    devices = pl.Devices(100.0, 1e9, sites=names, site_upload_bytes_per_s=limits)
    nothing = Layer("nothing", 0, 0.0, 0.0, 0.0)
    layers = tuple(Layer(f"layer {k}", 10**6, 20.0, 5.0, 1.0) for k in range(8))
    workload = pl.Workload("eight", nothing, layers, nothing, 10)
    # 4,800 FLOPs; in 10 s two of the machines could do 2,000, and messages take 5 s or 10 s
    bound = site_bound(pl.Cluster(network, devices), workload).seconds
    assert 10.0 <= bound == pytest.approx(12.0, rel=1e-6)
    two = pl.Cluster(network, devices).subset([0, 1])
    assert site_bound(two, workload).seconds == pytest.approx(24.0, rel=1e-6)


def test_devices_reach_a_site_within_theirs_without_their_own_line() -> None:
    """A machine in a building, and a device of the building: only the machine's line counts."""
    network = pl.Network(np.zeros((2, 2)), np.full((2, 2), 1e6))
    nothing = Layer("nothing", 0, 0.0, 0.0, 0.0)
    layers = tuple(Layer(f"layer {k}", 10**4, 20.0, 5.0, 1.0) for k in range(2))
    workload = pl.Workload("two", nothing, layers, nothing, 10)
    for slow, expected in (("building", 6.0), ("machine", 12.0)):
        devices = pl.Devices(
            100.0,
            1e9,
            sites=["building", "machine"],
            site_within={"machine": "building"},
            site_upload_bytes_per_s={slow: 1.0},
        )
        bound = site_bound(pl.Cluster(network, devices), workload).seconds
        assert bound == pytest.approx(expected, rel=1e-6)


def test_a_model_without_flops_has_no_bound() -> None:
    """Nothing is computed, so that no part of a step is."""
    cluster, workload = two_machines(1, 1.0)
    layers = tuple(replace(layer, forward_flops=0.0) for layer in workload.layers)
    assert site_bound(cluster, workload.replace(layers=layers)).seconds == 0.0


def test_random_jobs_with_slow_lines_have_a_higher_bound() -> None:
    """Machines of four at 1 and 10 Gb/s, of which a device alone could send far more."""
    job = random_job(9)
    assert mean_bound_s(job.cluster, job.workload) > 29.0
