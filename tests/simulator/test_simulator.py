"""The simulator against hand-computed timelines, the checker and its own invariants."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.checker.dispatch import check
from planner.network.cluster import Cluster, Devices
from planner.network.error import NetworkError
from planner.network.network import Network
from planner.simulator.simulator import SimulationError, simulate, simulate_cycle
from planner.simulator.timeline import from_records
from planner.simulator.utilization import busy_share, too_narrow
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.model import TrainingPlan
from planner.workload.compute_times import ComputeTimes
from planner.workload.layers import Layer
from planner.workload.workload import Workload
from tests.conftest import make_plan, random_network, tiny_workload
from tests.simulator.reference import fair_rates

pytestmark = pytest.mark.interpreted


def two_stage_plan(schedule: str, head: str = "last", batch: int = 2) -> TrainingPlan:
    """One pipeline a -> b: F 1 s, H 0.5 s, B 2 s; a message takes 1 s latency + 1 s."""
    layer = Layer("layer", 0, 1.0, 100.0, 0.0)
    w = Workload(
        "two", Layer("stem", 0, 0.0, 100.0, 0.0), (layer, layer), Layer("head", 0, 1, 0, 0), batch
    )
    network = Network(np.ones((2, 2)), np.full((2, 2), 100.0), ["a", "b"])
    plan = make_plan([[0, 1]], workload=w, network=network, schedule=schedule, head=head)
    times = ComputeTimes("by hand", (1.0, 1.0), (2.0, 2.0), (0.5, 0.5), (0.25, 0.0))
    return plan.replace(compute_times=times)


def test_gpipe_by_hand() -> None:
    """a: F0 0-1, F1 1-2; b: F0 3-4, H0, F1 4.5-5.5, H1, B0 6-8, B1 8-10; a: B0 10-12, B1 -14."""
    timeline = simulate(two_stage_plan("gpipe"))
    starts = {(op.kind, op.microbatch, op.device): op.start_s for op in timeline.ops}
    assert starts["F", 1, 1] == 4.5
    assert starts["B", 0, 1] == 6
    assert starts["B", 1, 0] == 12
    assert timeline.makespan_s == 14
    assert timeline.averaging_s == 0
    assert timeline.step_s == 14.25


def test_head_on_the_first_device_adds_a_round_trip() -> None:
    """One microbatch: F 1, hop 2, F 1, hop 2, H 0.5, hop 2, B 2, hop 2, B 2."""
    assert simulate(two_stage_plan("gpipe", "first", batch=1)).makespan_s == 14.5


def heavier(plan: TrainingPlan) -> TrainingPlan:
    """Messages of 1000 bytes: 10 s on the link, 1 s of latency."""
    layers = tuple(replace(layer, output_bytes=1000.0) for layer in plan.workload.layers)
    return plan.replace(workload=plan.workload.replace(layers=layers))


def test_messages_of_a_pair_wait_for_each_other() -> None:
    """F0 leaves a at 1 and has left at 11; F1, ready at 2, has left at 21 and is there at 22.

    On the papers' clock F1 does not wait: it is there at 2 + 10 + 1.
    """
    plan = heavier(two_stage_plan("gpipe"))
    sent = {(t.kind, t.microbatch): t for t in simulate(plan).transfers}
    first, second = sent["F", 0], sent["F", 1]
    assert (first.start_s, first.leaves_s, first.left_s, first.end_s) == (1, 1, 11, 12)
    assert (second.start_s, second.leaves_s, second.left_s, second.end_s) == (2, 11, 21, 22)
    papers = simulate(plan, links="unlimited")
    assert {(t.kind, t.microbatch): t.end_s for t in papers.transfers}["F", 1] == 13


def test_reference_shares_an_upload() -> None:
    """a sends to b and c at once over 100 bytes/s each: with 150 in all each gets 75."""
    network = Network(np.zeros((3, 3)), np.full((3, 3), 100.0), list("abc"))
    cluster = Cluster(network, Devices(1.0, 1.0, upload_bytes_per_s=[150.0, 1e3, 1e3]))
    assert fair_rates(cluster, {(0, 1), (0, 2)}) == {(0, 1): 75.0, (0, 2): 75.0}
    slow = Cluster(network, Devices(1.0, 1.0, upload_bytes_per_s=1e3, download_bytes_per_s=20.0))
    assert fair_rates(slow, {(0, 1), (2, 1), (0, 2)}) == {(0, 1): 10, (2, 1): 10, (0, 2): 20}


def test_averaging_overlaps_with_other_stages() -> None:
    """Stage 1 averages while stage 0 still works."""
    plan = heavier(two_pipelines())
    wide = Devices(1.0, 1e9, upload_bytes_per_s=1e6, download_bytes_per_s=1e6)
    timeline = simulate(plan, plan.cluster.replace(devices=wide))
    averaging = {op.device: op for op in timeline.closing if op.kind == "A"}
    assert averaging[1].end_s < timeline.makespan_s
    # two halves of 100 bytes each way, at 100 bytes/s of the pair, there and back 2 s
    assert averaging[1].end_s - averaging[1].start_s == pytest.approx(100 / 100 + 2)


def two_pipelines() -> TrainingPlan:
    """a -> b and c -> d, as in `two_stage_plan`, with 25 parameters of 4 bytes a stage."""
    layer = Layer("layer", 25, 1.0, 100.0, 0.0)
    w = Workload(
        "two", Layer("stem", 0, 0.0, 100.0, 0.0), (layer, layer), Layer("head", 0, 1, 0, 0), 4
    )
    network = Network(np.ones((4, 4)), np.full((4, 4), 100.0), list("abcd"))
    plan = make_plan([[0, 1], [2, 3]], workload=w, network=network, schedule="gpipe")
    times = ComputeTimes("by hand", (1.0,) * 4, (2.0,) * 4, (0.5,) * 4, (0.25,) * 4)
    return plan.replace(compute_times=times)


def test_cores_are_shared() -> None:
    """Two independent devices on one core take twice as long."""
    plan = make_plan([[0], [1]], workload=tiny_workload(batch_samples=2))
    alone, shared = simulate(plan), simulate(plan, cores=1)
    assert simulate(plan, cores=2).makespan_s == pytest.approx(alone.makespan_s)
    assert shared.makespan_s == pytest.approx(2 * alone.makespan_s)


def test_limits_cut_the_bandwidth() -> None:
    """An upload limit of half the pair's bandwidth doubles the time of bytes, not the latency."""
    plan = two_stage_plan("gpipe", batch=1)
    limited = Cluster(plan.cluster.network, Devices(1.0, 1.0, upload_bytes_per_s=50.0))
    assert simulate(plan, limited).makespan_s == simulate(plan).makespan_s + 2


def test_links_carry_pipeline_and_averaging() -> None:
    """a -> b and c -> d, 4 microbatches of 100 bytes; a and c, b and d swap halves twice."""
    found = simulate(two_pipelines()).loads
    assert all(load[1:3] == (2.0, 1.0) for load in found if "load of" in load.name)
    assert {load.name: load[1:3] for load in found if " to " in load.name} == {
        "a to b": (2.0, 0.0),
        "b to a": (2.0, 0.0),
        "c to d": (2.0, 0.0),
        "d to c": (2.0, 0.0),
        **{f"{i} to {j}": (0.0, 1.0) for i, j in ("ac", "ca", "bd", "db")},
    }
    for load in found:
        ends = ["abcd"[d] for d in load.ends]
        pair = " to ".join(ends)
        lines = [f"{way}load of {pair}" for way in ("up", "down")]
        assert load.name in ([pair] if len(ends) == 2 else lines)


def test_averaging_by_hand(line4: Network) -> None:
    """Three in a row: each sends 2 x 2/3 of the vector; the longest way there and back is 4 s."""
    plan = make_plan([[0], [1], [2]], network=line4.subset("abc"), workload=tiny_workload())
    gradient = plan.workload.gradient_bytes(plan.stage_layers, 0)[0]
    assert simulate(plan).averaging_s == pytest.approx(4 * gradient / 3 / 100.0 + 4)
    # eq. 2: the outer ones have 1 + 2 hops, the middle one 1 + 1
    papers = simulate(plan, links="unlimited")
    assert papers.averaging_s == pytest.approx(2 * ((1 + 2) + 2 * gradient / 3 / 100.0))


def test_deadlock_is_an_error_and_a_violation() -> None:
    """b waits for F1 before it gives B0 back, a gives F1 only after B0."""
    plan = two_stage_plan("1f1b")
    s = plan.schedules[0]
    a = (("F", 0), ("B", 0), ("F", 1), ("B", 1))
    b = (("F", 0), ("F", 1), ("H", 0), ("H", 1), ("B", 0), ("B", 1))
    bad = plan.replace(schedules=(type(s)(s.name, s.head, s.paths, (a, b)),))
    with pytest.raises(SimulationError, match=r"deadlock: device 0 \(a\) waits for B0"):
        simulate(bad)
    assert [(v.rule, "deadlock" in v.message) for v in check(bad)] == [("form", True)]


def test_deadlock_names_the_device_waiting_for_an_operation() -> None:
    """Device 0 has ended its operations and waits for device 2 to average."""
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload(batch_samples=4), schedule="1f1b")
    s = plan.schedules[0]
    order = list(s.order)
    # microbatches 1 and 3 take the second pipeline
    order[2] = (("F", 1), ("B", 1), ("F", 3), ("B", 3))
    order[3] = (("F", 1), ("F", 3), ("H", 1), ("H", 3), ("B", 1), ("B", 3))
    bad = plan.replace(schedules=(replace(s, order=tuple(order)),))
    with pytest.raises(SimulationError, match=r"deadlock: device 2 \(2\) waits for B1"):
        simulate(bad)


def test_plans_that_contradict_themselves_are_refused() -> None:
    """Compiled loops would read out of bounds."""
    plan = two_stage_plan("1f1b")
    s = plan.schedules[0]
    for bad, said in (
        (plan.replace(cycle=(0, 7)), r"paths.cycle\[1\]: there are 1 schedules, found 7"),
        (plan.replace(schedules=(replace(s, order=s.order[:1]),)), "order: must have 2 lists"),
        (plan.replace(schedules=(replace(s, paths=s.paths[:1]),)), "paths: must be 2"),
        (plan.replace(schedules=(replace(s, paths=((0, 9),) * 2),)), "device 9 holds no stage"),
        (plan.replace(averaging=plan.averaging[:1]), "averaging.stages: must have 2 entries"),
        (
            plan.replace(averaging=(((AveragingGroup((0,), (), (True,)),),), plan.averaging[1])),
            r"averaging.stages\[0\].rounds\[0\]: members, shares, contributes and receives diff",
        ),
    ):
        for way in (simulate, simulate_cycle):
            with pytest.raises(SimulationError, match=said):
                way(bad)


def test_missing_schedules_cores_and_layers_are_refused() -> None:
    """Schedules, cores and layers."""
    plan = two_stage_plan("1f1b")
    for schedule in (1, -1, 0.5, None):
        with pytest.raises(ValueError, match="schedule is "):
            simulate(plan, schedule=schedule)  # type: ignore[arg-type]
    for cores in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="cores is "):
            simulate(plan, cores=cores)  # type: ignore[arg-type]
    fewer = plan.workload.replace(layers=plan.workload.layers[:1], architecture=None)
    with pytest.raises(SimulationError, match=r"layers, the workload 1; give one with as many"):
        simulate(plan, workload=fewer)
    smaller = plan.workload.replace(batch_samples=4, microbatch_samples=2)
    as_asked = smaller.replace(microbatch_samples=1)
    chosen = make_plan([[0, 1]], workload=smaller)
    assert simulate(chosen, workload=as_asked).step_s == simulate(chosen).step_s
    larger = plan.workload.replace(batch_samples=2 * plan.workload.batch_samples)
    with pytest.raises(SimulationError, match=r"is for batch_samples .* make a plan"):
        simulate(plan, workload=larger)


def test_networks_of_other_sizes_are_refused(line4: Network) -> None:
    """A network of another size or with a missing pair is refused."""
    plan = make_plan([[0, 1]])
    with pytest.raises(NetworkError, match="has 2 devices, the network 4"):
        simulate(plan, Cluster(line4, Devices(1.0, 1.0)))
    # devices that the plan leaves out do not matter
    more = random_network(4).replace(ids=["x", *plan.cluster.network.ids, "y"])
    part, turned = more.subset([1, 2]), more.subset([2, 1])
    expected = simulate(plan, Cluster(part, Devices(1.0, 1.0))).step_s
    for network in (more, turned):
        assert simulate(plan, Cluster(network, Devices(1.0, 1.0))).step_s == expected
    holed = Network(np.array([[0, np.nan], [1, 0]]), np.ones((2, 2)))
    with pytest.raises(NetworkError, match="not measured"):
        simulate(plan, Cluster(holed, Devices(1.0, 1.0)))


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["eager-1f1b", "1f1b", "gpipe"]),
    st.sampled_from(["first", "last"]),
    st.integers(0, 1000),
)
def test_checker_agrees_on_random_straight_plans(
    pipelines: int, stages: int, schedule: str, head: str, seed: int
) -> None:
    """Simulator and checker agree; no overlap on a device; order of each chain is kept."""
    rng = np.random.default_rng(seed)
    n = pipelines * stages
    plan = make_plan(
        rng.permutation(n).reshape(pipelines, stages).tolist(),
        network=random_network(n, seed),
        schedule=schedule,
        head=head,
    )
    # a random grid need not realise the matchings, the rest must hold
    assert {v.rule for v in check(plan)} <= {"eq. 3"}
    timeline = simulate(plan)
    for d in range(n):
        mine = [op for op in timeline.ops if op.device == d]
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
    times = {(op.microbatch, op.kind, op.device): op for op in timeline.ops}
    for b in range(len(plan.schedules[0].paths)):
        chain = plan.schedules[0].chain(b)
        for (kind, d), (after, e) in pairwise(chain):
            gap = times[b, after, e].start_s - times[b, kind, d].end_s
            assert gap >= (0 if d == e else plan.cluster.network.latency_s[d, e])
    papers = simulate(plan, links="unlimited").makespan_s
    assert papers <= timeline.makespan_s * (1 + 1e-9)


def test_pictures_and_traces(tmp_path: Path) -> None:
    """Perfetto finds every operation and a flow for every message; the Gantt is a PNG."""
    timeline = simulate(make_plan([[0, 3], [2, 1]]))
    timeline.to_chrome_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "transfer"]
    assert len(slices) == len(timeline.ops) + len(timeline.closing)
    busy = [e for e in events if e["ph"] == "X" and e["cat"] == "transfer"]
    for row in {(e["pid"], e["tid"]) for e in busy}:
        # a link carries one message after the other
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in busy if (e["pid"], e["tid"]) == row)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(mine))
    flows = [e["id"] for e in events if e["ph"] == "s"]
    assert flows == [e["id"] for e in events if e["ph"] == "f"]
    assert len(flows) == len(timeline.transfers) == 16
    timeline.gantt(tmp_path / "g.png")
    assert (tmp_path / "g.png").read_bytes()[:4] == b"\x89PNG"


def test_picture_of_many_devices_is_subsampled(tmp_path: Path) -> None:
    """Devices are evenly chosen, including first and last, and the title says how many."""
    ops = [(d, d, "F", 0.0, 1.0) for d in range(1000)]
    timeline = from_records([f"d{d}" for d in range(1000)], ops)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        timeline.gantt(tmp_path / "g.svg")
    text = (tmp_path / "g.svg").read_text()
    assert "128 of 1000 devices" in text
    drawn = [int(d) for d in re.findall(r">d(\d+)<", text)]
    assert len(drawn) == 128 and drawn[0] == 0 and drawn[-1] == 999
    assert max(b - a for a, b in pairwise(drawn)) <= 8


def test_busy_share_of_bins() -> None:
    """Each bin has its part of every span, and the parts add up to the spans."""
    spans = [(0.5, 1.5), (3.0, 3.25), (1.75, 3.0)]
    assert busy_share(spans, np.arange(5.0)).tolist() == [0.5, 0.75, 1.0, 0.25]
    assert busy_share([], np.arange(3.0)).tolist() == [0, 0]
    rng = np.random.default_rng(0)
    many = [(a, a + b) for a, b in rng.random((500, 2)).tolist()]
    edges = np.linspace(0, 2, 37)
    total = (busy_share(many, edges) * np.diff(edges)).sum()
    assert total == pytest.approx(sum(b - a for a, b in many))
    assert too_narrow([(0, 1)] * 3, 1000, 900) and not too_narrow([(0, 1)] * 3, 100, 900)


def test_narrow_operations_are_drawn_as_shares(tmp_path: Path) -> None:
    """The picture says so, groups rows by stage and tells how long each device is idle."""
    ops = [(k, d, "F", k / 1000, (k + 0.5) / 1000) for d in range(2) for k in range(1000)]
    timeline = from_records(["a", "b"], [*ops, (-1, 0, "A", 1.0, 2.0)])
    assert timeline.idle() == pytest.approx([0.75, 0.75])
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        timeline.gantt(tmp_path / "g.svg", groups=[[1], [0]])
    text = (tmp_path / "g.svg").read_text()
    assert "height: share of time" in text
    assert text.index("stage 0  b  idle 75%") < text.index("stage 1  a  idle 75%")
