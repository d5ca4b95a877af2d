"""Averaging within a machine by collectives gives what averaging through the host gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import levels, make_plan, tiny_workload

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.distributed import HashStore  # type: ignore[attr-defined]  # noqa: E402
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo  # noqa: E402

from planner.executor.comm import device_collectives  # noqa: E402
from planner.executor.comm.chunking import Chunking  # noqa: E402
from planner.executor.comm.codec import WireFormat  # noqa: E402
from planner.executor.comm.device_backend import HOST  # noqa: E402
from planner.executor.comm.device_collectives import (  # noqa: E402
    CollectiveLibrary,
    DeviceCollectives,
    is_uniform,
    open_collectives,
    share_machine,
)
from planner.executor.comm.gradient_buffer import GradientBuffer  # noqa: E402
from planner.executor.comm.group_roles import member_ranges  # noqa: E402
from planner.executor.comm.p2p import Sender  # noqa: E402
from planner.executor.comm.stage_averager import StageAverager  # noqa: E402
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.launch.arguments import parse_arguments  # noqa: E402
from planner.executor.rendezvous.rank_group import LONG_TIMEOUT, RankGroup  # noqa: E402
from planner.executor.transport.connections import ConnectionLost  # noqa: E402
from tests.executor.devices import LONG_S  # noqa: E402
from tests.executor.faults import Started, hurt  # noqa: E402
from tests.executor.forks import run_ranks  # noqa: E402
from tests.executor.launch import torchrun  # noqa: E402
from tests.executor.test_device_backend import late_backend  # noqa: E402
from tests.executor.test_failures import SIX, require_named  # noqa: E402
from tests.executor.test_sharded_allreduce import Members, averaged  # noqa: E402

CPU = torch.device("cpu")


def in_threads(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of all ranks."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks), timeout=LONG_S))


def collectives_of(members: Sequence[int]) -> dict[int, DeviceCollectives]:
    """By rank, with gloo between threads."""
    store, n = HashStore(), len(members)

    def opened(place: int) -> DeviceCollectives:
        prefixed = PrefixStore("g", store)
        group = ProcessGroupGloo(prefixed, place, n, timedelta(seconds=LONG_S))
        return DeviceCollectives({tuple(members): group}, HOST)

    return dict(zip(members, in_threads(n, opened), strict=True))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any),
    st.integers(1, 300),
    st.sampled_from([WireFormat.FP32, WireFormat.BF16, WireFormat.FP16]),
    st.sampled_from([Phase.ALL, Phase.REDUCE, Phase.SPREAD, Phase.WITHIN]),
    st.integers(0, 10**6),
)
def test_a_round_is_that_of_hosts(
    weights: list[int], values: int, wire: WireFormat, phase: Phase, seed: int
) -> None:
    """Uneven and empty shares, in every phase; what a member does not reduce is its own affair."""
    n, total = len(weights), sum(weights)
    group = AveragingGroup(
        tuple(range(n)), tuple(w / total for w in weights), (True,) * n, phase=phase
    )
    random = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(values, generator=random) for _ in range(n)]
    want = averaged(vectors, group, Chunking(2, 1), wire, 0.5)
    found, collectives = [v.clone() for v in vectors], collectives_of(range(n))
    in_threads(n, lambda rank: collectives[rank].run(found[rank], group, wire, 0.5))
    ranges = member_ranges(group, values)
    rough = {"rtol": 2e-2, "atol": 2e-2} if wire is not WireFormat.FP32 else {}
    for rank in range(n):
        # in a reduction each member knows the sum of its own share
        part = slice(*ranges[rank]) if phase is Phase.REDUCE else slice(None)
        torch.testing.assert_close(found[rank][part], want[rank][part], **rough)


class Asked(GradientBuffer):
    """Notes where its values are asked for: whether on the device."""

    def __init__(self, vector: Tensor, asked: list[bool]) -> None:
        super().__init__(vector)
        self.asked = asked

    def to_host(self) -> Tensor:
        self.asked.append(False)
        return super().to_host()

    def to_device(self) -> Tensor:
        self.asked.append(True)
        return super().to_device()


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2)])
def test_hierarchical_averaging_brings_the_vector_along(sizes: tuple[int, ...]) -> None:
    """Within machines on the device, between them on the host; all end with the same sum."""
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    sites = [tuple(range(a, b)) for a, b in pairwise(ends)]
    n, values = ends[-1], 501
    rounds = levels(sites, tuple(1 / len(sites) for _ in sites))
    random = torch.Generator().manual_seed(1)
    vectors = [torch.randn(values, generator=random) for _ in range(n)]
    members, found = Members(n), [v.clone() for v in vectors]
    asked: list[list[bool]] = [[] for _ in range(n)]
    collectives = {r: c for site in sites for r, c in collectives_of(site).items()}

    def work(rank: int) -> float:
        mine = [group for groups in rounds for group in groups if rank in group.members]
        own = StageAverager(
            rank, mine, [Chunking(3, 2)] * len(mine), [WireFormat.FP32] * len(mine), n, 1e9
        )

        peers, one = members.peers[rank], collectives[rank]
        buffer = Asked(found[rank], asked[rank])
        end = own.run(buffer, peers, Sender({}, peers.error_latch, {}), None, one)
        assert asked[rank][0] == own.starts_on_device(one)
        return end

    members.all_do(work)
    members.close()
    for site in sites:
        for place, rank in enumerate(site):
            exchanges = place < min(sizes)
            assert asked[rank] == [True, *([False] if exchanges else []), True]
    for vector in found:
        torch.testing.assert_close(vector, torch.stack(vectors).sum(0))
        assert torch.equal(vector, found[0])


def test_what_collectives_cover() -> None:
    """Groups of one machine whose members have one role, in formats that a library can add."""
    group = AveragingGroup.equal((0, 2))
    collectives = DeviceCollectives({(0, 2): None}, HOST)
    assert collectives.supports(group, WireFormat.FP32)
    assert collectives.supports(replace(group, phase=Phase.SPREAD), WireFormat.BF16)
    assert not collectives.supports(group, WireFormat.INT8)
    assert not collectives.supports(AveragingGroup.equal((0, 1)), WireFormat.FP32)
    aggregated = AveragingGroup((0, 2), (0.0, 1.0), (True, False), (True, False))
    assert not is_uniform(aggregated) and not is_uniform(AveragingGroup.equal((0,)))
    assert not collectives.supports(aggregated, WireFormat.FP32)


@pytest.mark.parametrize(
    ("locations", "want"),
    [
        ([["a", "0"], ["a", "1"]], True),
        ([["a", "0"], ["a", "0"]], False),
        ([["a", "0"], ["b", "1"]], False),
        ([["a", "0"], None], False),
        ([None, None], False),
    ],
)
def test_who_shares_a_machine(locations: list[list[str] | None], want: bool) -> None:
    """With a GPU each."""
    assert share_machine(locations) is want


@pytest.mark.parametrize(
    ("library", "error", "raised", "line"),
    [
        # nobody knows which end is to blame
        (
            "nccl",
            torch.distributed.DistBackendError("closed by peer\nand more"),
            ConnectionLost,
            r"nccl among 'a', 'b' has failed \(closed by peer\)$",
        ),
        (
            "gloo",
            RuntimeError("closed by peer\nand more"),
            ConnectionLost,
            r"gloo among 'a', 'b' has failed \(closed by peer\)$",
        ),
        ("nccl", RuntimeError("shape mismatch"), RuntimeError, "^shape mismatch$"),
        ("nccl", torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError, "no memory"),
        ("gloo", torch.AcceleratorError("illegal access"), torch.AcceleratorError, "illegal acc"),
    ],
)
def test_who_is_to_blame(
    library: str, error: Exception, raised: type[Exception], line: str
) -> None:
    """A library's error is that of a connection; a GPU's, or a wrong call, is its own rank's."""

    class Broken:
        def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
            raise error

    names = {3: "a", 5: "b"}.__getitem__
    collectives = DeviceCollectives({(3, 5): Broken()}, HOST, names, library)
    with pytest.raises(raised, match=line) as raised_error:
        collectives.run(torch.zeros(2), AveragingGroup.equal((3, 5)), WireFormat.FP32, 1.0)
    assert type(raised_error.value) is raised


def test_opening_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each; with two machines each rank has the groups of its own."""
    plan = make_plan([[0, 2], [1, 3]], workload=tiny_workload())
    places = [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1")]
    monkeypatch.setattr(
        device_collectives, "gpu_location", lambda library, rank, device: places[rank]
    )
    store = HashStore()

    def opened(rank: int, plan: TrainingPlan = plan) -> DeviceCollectives:
        ranks = RankGroup(rank, 4, store)
        return open_collectives(CollectiveLibrary.GLOO, plan, ranks, CPU, HOST, store)

    assert plan.assignment.groups == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match="no averaging group has a GPU of one machine"):
        in_threads(4, opened)
    store = HashStore()
    other = make_plan([[0, 1], [2, 3]], workload=tiny_workload())
    assert other.assignment.groups == ((0, 2), (1, 3))
    found = in_threads(4, lambda rank: opened(rank, other))
    assert [sorted(one._groups) for one in found] == [[(0, 2)], [(1, 3)]] * 2
    # lost ranks are noticed by the failure detector; others may take long
    (group,) = found[0]._groups.values()
    assert group.options._timeout == LONG_TIMEOUT
    if not torch.distributed.is_nccl_available():
        with pytest.raises(ValueError, match="this PyTorch is built without NCCL"):
            open_collectives(
                CollectiveLibrary.NCCL, plan, RankGroup(0, 1, HashStore()), CPU, HOST, HashStore()
            )


def test_a_vector_is_where_it_was_asked_for_last() -> None:
    """Brought along in both directions, and the update takes it from there."""
    from planner.executor.runtime.model_stage import ModelStage
    from planner.executor.runtime.optimizer import OptimizerConfig

    plan = make_plan([[0], [1]], workload=tiny_workload())
    model_stage = ModelStage(plan, 0, CPU, OptimizerConfig(), backend=late_backend())
    model_stage.begin(0, plan.schedules[0])
    here = model_stage.gradients.current
    assert model_stage.gradients.to_device() is here
    here.fill_(2.0)
    there = model_stage.gradients.to_host()
    assert there is not here and bool((there == 2.0).all())
    there.fill_(3.0)
    assert model_stage.gradients.current is there
    assert model_stage.gradients.to_device() is here and bool((here == 3.0).all())
    model_stage.gradients.to_host().fill_(4.0)
    model_stage.update()
    assert bool((here == 4.0).all())


def test_a_round_alone_leaves_the_vector_where_it_is() -> None:
    """A mean of one's own is scaled there."""
    one = AveragingGroup.equal((0,))
    rounds = [one, one]
    own = StageAverager(0, rounds, [Chunking(1, 1)] * 2, [WireFormat.FP32] * 2, 3, 1e9)
    asked: list[bool] = []
    vector: Tensor = torch.ones(2)
    members = Members(1)
    own.run(Asked(vector, asked), members.peers[0], Sender({}, ErrorLatch(), {}))
    assert asked == [] and vector.tolist() == [3.0, 3.0]


def losses_of(
    plan: TrainingPlan,
    folder: Path,
    *more: str,
    device: str = "cpu",
    machines: Sequence[str] | None = None,
) -> tuple[list[float], list[Any]]:
    """Losses of five steps of all ranks, and what they report of their devices."""
    path = folder / "plan.json"
    save_plan(plan, path)
    ranks, words = len(plan.cluster), [str(path), "--devices", *plan.cluster.network.ids]
    words += ["--steps", "5", "--device", device, "--events", *more]
    if device == "cpu" and machines is None:
        done = run_ranks(ranks, "planner.executor.__main__", *words)
        code, out, error = done.code, done.out, done.error
    else:
        module = ["planner.executor"]
        if machines is not None:
            nothing = {"device": "none", "fault": "kill", "phase": "join", "step": 0, "folder": "/"}
            options = nothing | {"machines": machines, "hangs": False}
            module = ["tests.executor.collectives_rank", json.dumps(options)]
        ended = torchrun(ranks, "-m", *module, *words)
        code, out, error = ended.returncode, ended.stdout, ended.stderr
    assert code == 0, error[-3000:]
    events = [json.loads(line) for line in out.splitlines() if line[:1] == "{"]
    losses = {e["loss_step"]: e["loss"] for e in events if e["event"] == "step"}
    losses |= {e["step"]: e["loss"] for e in events if e["event"] == "loss"}
    (devices,) = (e["devices"] for e in events if e["event"] == "devices")
    return [losses[k] for k in range(5)], devices


def test_training_with_collectives(tmp_path: Path) -> None:
    """Two stages of two, clipped, with a tied matrix: nothing is averaged by way of the host."""
    plan = make_plan([[0, 3], [2, 1]], workload=tiny_workload(tied=True), clip=1.0)
    want, devices = losses_of(plan, tmp_path)
    found, reported = losses_of(plan, tmp_path, "--direct", "gloo")
    assert found == pytest.approx(want, rel=1e-6)
    for one, other in zip(reported, devices, strict=True):
        assert sum(one["sent_bytes"].values()) < sum(other["sent_bytes"].values()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("rare", ["outer", "delayed", "two frequencies", "own pace", "levels"])
def test_other_ways_to_train(rare: str, tmp_path: Path) -> None:
    """Outer steps go by the host, what is averaged in every step by collectives."""
    workload = tiny_workload(batch_samples=8)
    plan = make_plan([[0, 3], [2, 1]], workload=workload)
    more: list[str] = []
    if rare in ("outer", "delayed"):
        plan = plan.replace(sync=Sync(2, OuterOptimizer(), delayed=rare == "delayed"))
    elif rare == "own pace":
        plan, more = make_plan([[0], [1], [2]], workload=workload), ["--own-pace"]
    else:
        plan = make_plan([[k] for k in range(4)], workload=workload)
        first = Phase.WITHIN if rare == "two frequencies" else Phase.REDUCE
        plan = plan.replace(averaging=(levels([(0, 1), (2, 3)], (0.5, 0.5), first),))
        if rare == "two frequencies":
            plan = plan.replace(sync=Sync(2, OuterOptimizer()))
    want, _ = losses_of(plan, tmp_path, *more)
    found, _ = losses_of(plan, tmp_path, "--direct", "gloo", *more)
    assert found == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_a_stage_within_each_machine(tmp_path: Path) -> None:
    """Averaging within machines, and a pipeline between them."""
    plan = make_plan([[0, 2], [1, 3]], workload=tiny_workload())
    want, _ = losses_of(plan, tmp_path)
    found, _ = losses_of(plan, tmp_path, "--direct", "gloo", machines=["a", "a", "b", "b"])
    assert found == pytest.approx(want, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("phase", ["forward", "averaging", "update"])
@pytest.mark.parametrize("device", [0, 4])
def test_kill_is_named(device: int, phase: str, hangs: bool, tmp_path: Path) -> None:
    """As where messages go by hosts, also where a library waits for its peer for ever."""
    with Started(tmp_path) as run:
        plan = make_plan(SIX, workload=tiny_workload(batch_samples=8))
        path = tmp_path / "plan.json"
        save_plan(plan, path)
        options = {"device": str(device), "fault": "kill", "phase": phase, "step": 2}
        options |= {"folder": str(tmp_path), "machines": ["a"] * 6, "hangs": hangs}
        names = plan.cluster.network.ids
        for name in names:
            module = "tests.executor.collectives_rank"
            run.start(name, name, hurt(path, options, "--direct", "gloo", module=module))
        require_named(run, [name for name in names if name != str(device)], device)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--elastic"], "--direct conflicts with --elastic; leave one out"),
        (["--impose"], "--impose runs no model; leave out --direct"),
        (["--rebalance", "5"], "--direct conflicts with --rebalance; leave one out"),
    ],
)
def test_options_that_exclude_collectives(more: list[str], line: str) -> None:
    """One line, before anything begins."""
    config = parse_arguments(["plan.json", "--devices", "a", "--direct", "nccl", *more], None)
    with pytest.raises(ValueError, match=line):
        config.validate()


def test_stochastic_wiring_excludes_collectives() -> None:
    """Its messages have no planned order."""
    config = parse_arguments(["plan.json", "--devices", "a", "--direct", "nccl"], None)
    plan = make_plan([[0, 1]], workload=tiny_workload())
    config.validate_for_plan(plan)
    with pytest.raises(ValueError, match="--direct: messages' order must be planned"):
        config.validate_for_plan(plan.replace(wiring="stochastic"))
