"""From GPU to GPU: whoever carries them, transfers never wait for each other in a circle."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.training_plan.choices import Phase
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import levels, make_plan, tiny_workload

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.distributed import HashStore  # type: ignore[attr-defined]  # noqa: E402
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo  # noqa: E402

from planner.executor.comm import device_allreduce  # noqa: E402
from planner.executor.comm import direct as direct_module  # noqa: E402
from planner.executor.comm.averaging import StageAverager  # noqa: E402
from planner.executor.comm.chunking import Chunking  # noqa: E402
from planner.executor.comm.codec import WireFormat  # noqa: E402
from planner.executor.comm.connections import ConnectionLost, ConnectionReset  # noqa: E402
from planner.executor.comm.device_allreduce import HELD, DeviceAllReduce, split_share  # noqa: E402
from planner.executor.comm.direct import DeviceTransfers, TransferBackend, open_device_transfers  # noqa: E402
from planner.executor.comm.p2p import Sender  # noqa: E402
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.launch.options import Library  # noqa: E402
from planner.executor.rendezvous.process_group import ProcessGroup  # noqa: E402
from planner.executor.runtime.device_backend import HOST, DeviceBackend, GpuBackend  # noqa: E402
from planner.training_plan.averaging_group import AveragingGroup  # noqa: E402
from tests.executor.devices import LONG_S, train_in_threads  # noqa: E402
from tests.executor.faults import Started, hurt  # noqa: E402
from tests.executor.launch import torchrun  # noqa: E402
from tests.executor.test_device_backend import GARBAGE, LateGpu  # noqa: E402
from tests.executor.test_exchange import Members, averaged  # noqa: E402
from tests.executor.test_failures import SIX, require_named  # noqa: E402

CPU = torch.device("cpu")


class Hall:
    """Where calls of two ranks meet; each keeps its rank's GPU from all others until they have.

    No more than that is known of NCCL's: it may run one after the other what nobody has put in
    order. Nobody may call where the other end's turn is not taken.
    """

    def __init__(self, ranks: int) -> None:
        self.gpus = [threading.Lock() for _ in range(ranks)]
        self.begun: dict[tuple[int, int], list[Any]] = {}
        self.changed = threading.Condition()
        self.directs: dict[int, DeviceTransfers] = {}
        self.sent: list[tuple[int, int, Tensor]] = []

    def of(self, rank: int) -> _OfHall:
        """As one rank sees it."""
        return _OfHall(self, rank)

    def barrier(self, source: int, destination: int, rank: int, tensor: Tensor) -> None:
        """One end of a transfer."""
        assert self.gpus[rank].acquire(blocking=False), "two transfers of one rank"
        for end in (source, destination) if self.directs else ():
            assert self.directs[end]._turn.locked(), "nobody is there to call at the other end"
        with self.changed:
            if rank == source:
                self.sent.append((source, destination, tensor))
            pair = self.begun.setdefault((source, destination), [None, None])
            pair[rank == destination] = tensor
            if pair[0] is not None and pair[1] is not None:
                pair[1].copy_(pair[0])
                if tensor.is_cuda:
                    torch.cuda.current_stream(tensor.device).synchronize()
                del self.begun[source, destination]
                self.changed.notify_all()
            else:
                met = self.changed.wait_for(
                    lambda: self.begun.get((source, destination)) is not pair, LONG_S
                )
                assert met, "nobody came"
        self.gpus[rank].release()


class _OfHall:
    def __init__(self, hall: Hall, rank: int) -> None:
        self.hall, self.rank = hall, rank

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Met at once, and nothing is left to wait for."""
        self.hall.barrier(self.rank, rank, self.rank, tensors[0])
        return self

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """The same."""
        self.hall.barrier(rank, self.rank, self.rank, tensors[0])
        return self

    def wait(self) -> None:
        """Nothing."""


class OnlyHere:
    """As NCCL, which takes no memory of the host."""

    def __init__(self, group: TransferBackend) -> None:
        self._group = group
        self.received = 0

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """What operations have made."""
        return self._group.send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Into a GPU's own memory."""
        assert hasattr(tensors[0], "here")
        self.received += 1
        return self._group.recv(tensors, rank, tag)


def gloo(ranks: int) -> list[TransferBackend]:
    """PyTorch's own, of threads of this process."""
    store = HashStore()

    def made(rank: int) -> Any:
        return ProcessGroupGloo(PrefixStore("g", store), rank, ranks, timedelta(seconds=LONG_S))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(made, range(ranks)))


def directs_of(
    groups: Sequence[TransferBackend], members: Sequence[int], sides: Sequence[DeviceBackend]
) -> dict[int, DeviceTransfers]:
    """By rank; a hall knows them from now on."""
    found = {
        rank: DeviceTransfers(group, members, rank, side, carrier="nccl")
        for group, rank, side in zip(groups, members, sides, strict=True)
    }
    for group, rank in zip(groups, members, strict=True):
        if isinstance(group, _OfHall):
            group.hall.directs[group.rank] = found[rank]
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_traffic_of_all_with_all_comes_to_an_end(ranks: int, seed: int) -> None:
    """One transfer a rank at a time, nothing begun whose other end does not begin: no circle.

    Messages are made at any time, room is there at any time.
    """
    chance = random.Random(seed)
    hall = Hall(ranks)
    directs = directs_of([hall.of(r) for r in range(ranks)], range(ranks), [HOST] * ranks)
    counts = {pair: chance.randint(0, 6) for pair in permutations(range(ranks), 2)}
    naps = {pair: [chance.choice([0, 0, 1e-3]) for _ in range(12)] for pair in counts}
    ends = {pair: socket.socketpair() for pair in counts}

    def sends(pair: tuple[int, int]) -> None:
        source, destination = pair
        for number in range(counts[pair]):
            time.sleep(naps[pair][number])
            made = torch.tensor([source, destination, number])
            directs[source].send(ends[pair][0], destination, made)

    def receives(pair: tuple[int, int]) -> list[list[int]]:
        source, destination = pair
        found = []
        for number in range(counts[pair]):
            time.sleep(naps[pair][6 + number])
            room = torch.zeros(3, dtype=torch.int64)
            directs[destination].receive(ends[pair][1], source, room)
            found.append(room.tolist())
        return found

    with ThreadPoolExecutor(2 * len(counts)) as pool:
        sent = [pool.submit(sends, pair) for pair in counts]
        got = {pair: pool.submit(receives, pair) for pair in counts}
        for done in sent:
            done.result(LONG_S)
        for pair, one in got.items():
            assert one.result(LONG_S) == [[*pair, number] for number in range(counts[pair])]
    for both in ends.values():
        for end in both:
            end.close()


def test_nobody_holds_its_turn_while_a_message_is_made_or_room_is_not_there() -> None:
    """Others go on with each of the two, in both directions."""
    hall = Hall(3)
    directs = directs_of([hall.of(r) for r in range(3)], range(3), [HOST] * 3)
    late, free = threading.Event(), torch.ones(2)

    def carried(source: int, destination: int, made: Callable[[], Tensor], room: Any) -> Any:
        to, of = socket.socketpair()
        return (
            pool.submit(lambda: directs[source].send(to, destination, made())),
            pool.submit(lambda: directs[destination].receive(of, source, room())),
        )

    def waits() -> Tensor:
        late.wait(LONG_S)
        made: Tensor = free + 0.0
        return made

    with ThreadPoolExecutor(20) as pool:
        held = [
            *(carried(source, 1, waits, lambda: torch.zeros(2)) for source in (0, 2)),
            *(carried(1, other, lambda: torch.ones(2), waits) for other in (0, 2)),
        ]
        for _ in range(5):
            for source, destination in permutations(range(3), 2):
                for one in carried(source, destination, lambda: torch.ones(2), lambda: free):
                    one.result(LONG_S)
        assert not any(one.done() for pair in held for one in pair)
        late.set()
        for pair in held:
            for one in pair:
                one.result(LONG_S)


def test_who_is_gone_and_who_says_what_is_not_due() -> None:
    """One error, of the connection or of the library."""
    (direct,) = (DeviceTransfers(Hall(2).of(0), (0, 1), 0, HOST),)
    here, there = socket.socketpair()
    there.close()
    with pytest.raises(ConnectionReset, match="another rank"):
        direct.receive(here, 1, torch.zeros(1))
    here, there = socket.socketpair()
    there.sendall(b"\x03")
    with pytest.raises(ConnectionReset, match="said 3 where ROOM was due"):
        direct.send(here, 1, torch.zeros(1))


@pytest.mark.parametrize(
    ("error", "raised", "line"),
    [
        # whose doing it is nobody knows
        (
            RuntimeError("closed by peer\nand more"),
            ConnectionLost,
            r"nccl between 'a' and 'b' has failed \(closed by peer\)$",
        ),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError, "no memory"),
        (torch.AcceleratorError("illegal access"), torch.AcceleratorError, "illegal access"),
    ],
)
def test_who_is_to_blame(error: Exception, raised: type[Exception], line: str) -> None:
    """A library's error is both ends', a GPU's is its own rank's; the turn is let go of."""

    class Broken(_OfHall):
        def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
            raise error

    direct = DeviceTransfers(
        Broken(Hall(2), 0), (3, 5), 3, HOST, {3: "a", 5: "b"}.__getitem__, "nccl"
    )
    here, there = socket.socketpair()
    there.sendall(bytes([1, 5, 4]))  # room, later, go
    with pytest.raises(raised, match=line) as found:
        direct.send(here, 5, torch.zeros(1))
    assert getattr(found.value, "device", "") == "" and not direct._turn.locked()
    # made, and asked for twice
    assert there.recv(9) == bytes([2, 3, 3])
    with pytest.raises(raised, match=line):
        direct.connect([5])


def test_libraries_meet_in_both_directions() -> None:
    """Of each pair that will carry, and of no other."""
    hall = Hall(4)
    directs = directs_of([hall.of(r) for r in range(4)], range(4), [HOST] * 4)
    hall.directs = {}  # before the first turn
    pairs = {0: {1, 3}, 1: {0, 2}, 2: {1}, 3: {0}}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda r: directs[r].connect(pairs[r]), range(4)))
    ways = [(0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (3, 0)]
    assert sorted((a, b) for a, b, _ in hall.sent) == ways


@pytest.mark.parametrize("library", ["gloo", "hall"])
@pytest.mark.parametrize("head", ["last", "first"])
def test_the_pipeline_is_the_same_to_the_last_bit(head: str, library: str) -> None:
    """However late what is begun ends: nothing is sent before it is made, or used before it is."""
    plan = make_plan([[0, 1, 2], [4, 5, 3]], workload=tiny_workload(), head=head)
    want, _, losses = train_in_threads(plan, [HOST] * 6)
    sides = [GpuBackend(LateGpu(seed)) for seed in range(6)]
    members, hall = [0, 1, 2, 4, 5], Hall(5)
    whose = gloo(5) if library == "gloo" else [hall.of(number) for number in range(5)]
    groups = [OnlyHere(group) for group in whose]
    # what the other one sends and gets goes by hosts
    directs = directs_of(groups, members, [sides[d] for d in members])
    found, records, same = train_in_threads(plan, sides, directs=directs)
    assert same == losses
    for one, other in zip(found, want, strict=True):
        assert all(map(torch.equal, one.parameters, other.parameters))
    assert all(record.messages for own in records for record in own)
    assert all(group.received for group in groups)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=4).filter(
        lambda m: sum(share for share, _ in m) > 0 and any(gives for _, gives in m)
    ),
    st.integers(1, 99),
    st.sampled_from(list(WireFormat)),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
)
def test_averaging_is_the_same_to_the_last_bit(
    values: int,
    members: list[tuple[int, bool]],
    most: int,
    wire: WireFormat,
    scale: float,
    late: bool,
) -> None:
    """As by the host, whatever shares and contributors, and pieces of any size."""
    total = sum(share for share, _ in members)
    group = AveragingGroup(
        tuple(range(len(members))),
        tuple(share / total for share, _ in members),
        tuple(gives for _, gives in members),
    )
    n = len(members)
    generator = torch.Generator().manual_seed(values)
    vectors = [torch.randn(values, generator=generator) for _ in members]
    # blocks of a codec begin where pieces do
    most = values if wire in (WireFormat.INT8, WireFormat.INT4) else most
    want = averaged(vectors, group, Chunking(1, 1), wire, scale)
    hall, connected = Hall(n), Members(n)
    sides: list[DeviceBackend] = [
        GpuBackend(LateGpu(r)) if late and n < 4 else HOST for r in range(n)
    ]
    directs = directs_of([hall.of(r) for r in range(n)], range(n), sides)
    found = [v.clone() for v in vectors]
    for vector, value, side in zip(found, vectors, sides, strict=True):
        if isinstance(side, GpuBackend):
            # it is being made
            vector.fill_(GARBAGE)
            side._gpu.computing().give(partial(vector.copy_, value))

    def work(rank: int) -> float:
        how = (connected.peers[rank], directs[rank], sides[rank], wire, scale, most)
        return DeviceAllReduce(found[rank], group, rank, *how).run()

    connected.all_do(work)
    connected.close()
    for one, other in zip(found, want, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


class Told(GpuBackend):
    """What was said to be complete, and what operations were told of, in order."""

    def __init__(self, gpu: LateGpu) -> None:
        self.log: list[tuple[str, int, int]] = []
        super().__init__(gpu)

    def made(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Noted when it has been waited for."""
        ready = super().made(tensor)

        def noted() -> Tensor:
            found = ready()
            self.log.append(("made", tensor.data_ptr(), len(tensor)))
            return found

        return noted

    def to_device(self, message: Tensor) -> Tensor:
        """Noted."""
        self.log.append(("enter", message.data_ptr(), len(message)))
        return super().to_device(message)


def test_sums_leave_when_they_are_made_and_parts_are_lent_to_operations() -> None:
    """Each piece of the own share is waited for; each part of others is told of; two wait."""
    n, values, most = 3, 300, 10
    group, hall, connected = AveragingGroup.equal((0, 1, 2)), Hall(3), Members(3)
    sides = [Told(LateGpu(r)) for r in range(n)]
    directs = directs_of([hall.of(r) for r in range(n)], range(n), sides)
    vectors = [torch.ones(values) for _ in range(n)]
    waited: list[int] = []

    class Slow(DeviceAllReduce):
        def _reduce(self, c: int) -> None:
            time.sleep(2e-3)
            with self._peers.changed:
                waited.append(max(Counter(k for k, _ in self._parts).values()))
            super()._reduce(c)

    def work(rank: int) -> float:
        how = (connected.peers[rank], directs[rank], sides[rank], WireFormat.FP32, 1.0, most)
        return Slow(vectors[rank], group, rank, *how).run()

    connected.all_do(work)
    connected.close()
    assert all(bool((v == n).all()) for v in vectors)
    assert max(waited) <= HELD
    for rank, (vector, side) in enumerate(zip(vectors, sides, strict=True)):
        own = range(rank * values // n, (rank + 1) * values // n, most)
        made = [(at, size) for kind, at, size in side.log if kind == "made"]
        start = vector.data_ptr()
        assert made == [(start, values), *((start + 4 * begin, most) for begin in own)]
        # each after the parts that are in it
        kinds = "".join(kind[0] for kind, *_ in side.log)
        assert kinds == "m" + "eem" * len(own)


def test_codecs_work_beside_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written for others, and what they gave back is read into the vector."""
    threads: list[str] = []

    def noted(name: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            threads.append(f"{name} {threading.current_thread().name}")
            return real(*args)

        return call

    for name in ("encode", "decode"):
        monkeypatch.setattr(device_allreduce, name, noted(name, getattr(device_allreduce, name)))
    group, hall, connected = AveragingGroup.equal((0, 1)), Hall(2), Members(2)
    sides = [GpuBackend(LateGpu(r)) for r in range(2)]
    directs = directs_of([hall.of(r) for r in range(2)], range(2), sides)

    def work(rank: int) -> float:
        how = (connected.peers[rank], directs[rank], sides[rank], WireFormat.BF16)
        return DeviceAllReduce(torch.ones(100), group, rank, *how).run()

    connected.all_do(work)
    connected.close()
    lanes = [side._across._lane._thread_name_prefix for side in sides]
    beside = [one for one in threads if any(f" {lane}_" in one for lane in lanes)]
    # of each rank: a part and a sum are written; a sum that comes and its own are read
    assert sorted(one.split()[0] for one in beside) == ["decode"] * 4 + ["encode"] * 4
    # and a part is read where it is summed
    assert len(threads) == len(beside) + 2


def test_pieces_cover_a_share() -> None:
    """None is empty or too large, and they follow each other."""
    for part, most in (((3, 20), 5), ((0, 4), 4), ((7, 7), 3), ((0, 1), 9)):
        found = split_share(part, most)
        assert [x for one in found for x in range(*one)] == list(range(*part))
        assert all(0 < stop - start <= most for start, stop in found)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (3, 1, 2)])
def test_levels_whose_sites_are_machines(sizes: tuple[int, ...]) -> None:
    """Within machines from GPU to GPU, between them by hosts: what was summed is brought along."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    sites = [tuple(range(a, b)) for a, b in pairwise(ends)]
    n, values = ends[-1], 501
    rounds = levels(sites, tuple(1 / len(sites) for _ in sites))
    vectors = [torch.randn(values, generator=torch.Generator().manual_seed(k)) for k in range(n)]
    results = []
    for direct in (False, True):
        members = Members(n)
        found = [v.clone() for v in vectors]
        asked: list[list[bool]] = [[] for _ in range(n)]
        directs: dict[int, DeviceTransfers] = {}
        for site in sites if direct else ():
            hall = Hall(len(site))
            if len(site) > 1:
                groups = [hall.of(place) for place in range(len(site))]
                directs |= directs_of(groups, site, [HOST] * len(site))

        def work(
            rank: int,
            found: list[Tensor] = found,
            asked: list[list[bool]] = asked,
            members: Members = members,
            directs: dict[int, DeviceTransfers] = directs,
        ) -> float:
            mine = [group for groups in rounds for group in groups if rank in group.members]
            own = StageAverager(
                rank, mine, [Chunking(3, 2)] * len(mine), [WireFormat.FP32] * len(mine), n, 1e9
            )

            def where(here: bool | None) -> Tensor:
                if here is not None:
                    asked[rank].append(here)
                return found[rank]

            peers, one = members.peers[rank], directs.get(rank)
            end = own.run(where, peers, Sender({}, peers.failure, {}), None, one)
            assert asked[rank][:1] in ([own.begins_here(one)], [])
            return end

        members.all_do(work)
        members.close()
        results.append([v.numpy().tobytes() for v in found])
        if direct:
            slices = min(sizes)
            for site in sites:
                for place, rank in enumerate(site):
                    inner, exchanges = len(site) > 1, place < slices
                    assert asked[rank] == [
                        *([True] if inner else []),
                        *([False] if exchanges else []),
                        *([True] if inner else []),
                    ]
    assert results[0] == results[1] and len(set(results[0])) == 1


def test_a_vector_is_where_it_was_asked_for_last() -> None:
    """Brought along in both directions, and the update takes it from there."""
    from planner.executor.runtime.optimizer import OptimizerConfig
    from planner.executor.runtime.stage_module import StageModule

    plan = make_plan([[0], [1]], workload=tiny_workload())
    stage_module = StageModule(plan, 0, CPU, OptimizerConfig(), side=GpuBackend(LateGpu()))
    stage_module.begin(0, plan.schedules[0])
    here = stage_module.gradients()
    assert stage_module.gradients(here=True) is here
    here.fill_(2.0)
    there = stage_module.gradients(here=False)
    assert there is not here and bool((there == 2.0).all())
    there.fill_(3.0)
    assert stage_module.gradients() is there
    assert stage_module.gradients(here=True) is here and bool((here == 3.0).all())
    stage_module.gradients(here=False).fill_(4.0)
    stage_module.update()
    assert bool((here == 4.0).all())


@pytest.mark.parametrize(
    ("places", "want"),
    [
        ([("a", "0"), ("a", "1")], [[0, 1], [0, 1]]),
        # who shares a GPU, who has none, and who is alone on a machine go by their hosts
        (
            [("a", "0"), ("a", "1"), ("a", "1"), None, ("b", "0"), ("a", "2")],
            [[0, 5], None, None, None, None, [0, 5]],
        ),
        (
            [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1")],
            [[0, 2], [1, 3], [0, 2], [1, 3]],
        ),
    ],
)
def test_who_reaches_whom(
    places: list[tuple[str, str] | None], want: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with a GPU each for themselves, machine by machine; the same on both ends."""
    monkeypatch.setattr(direct_module, "gpu_location", lambda library, rank, device: places[rank])
    store = HashStore()

    def opened(rank: int) -> DeviceTransfers | None:
        ranks = ProcessGroup(rank, len(places), store)
        return open_device_transfers(Library.GLOO, ranks, CPU, HOST, store)

    with ThreadPoolExecutor(len(places)) as pool:
        found = list(pool.map(opened, range(len(places))))
    assert [None if one is None else sorted(one.members) for one in found] == want
    pair = next(one for one in want if one)[:2]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda r: found[r].connect(set(pair) - {r}), pair))


def test_nobody_reaches_anybody() -> None:
    """One line each."""
    with pytest.raises(ValueError, match="no two ranks of a machine have a GPU each"):
        open_device_transfers(Library.GLOO, ProcessGroup(0, 1, HashStore()), CPU, HOST, HashStore())
    if not torch.distributed.is_nccl_available():
        with pytest.raises(ValueError, match="this PyTorch is built without NCCL"):
            open_device_transfers(
                Library.NCCL, ProcessGroup(0, 1, HashStore()), CPU, HOST, HashStore()
            )


def losses_of(
    plan: TrainingPlan,
    folder: Path,
    *more: str,
    device: str = "cpu",
    machines: Sequence[str] | None = None,
) -> tuple[list[float], list[Any]]:
    """Of five steps of all ranks, and what a device told."""
    path = folder / "plan.json"
    save_plan(plan, path)
    module = ["planner.executor"]
    if machines is not None:
        nothing = {"device": "none", "fault": "kill", "phase": "join", "step": 0, "folder": "/"}
        how = nothing | {"machines": machines, "hangs": False}
        module = ["tests.executor.direct_rank", json.dumps(how)]
    done = torchrun(
        len(plan.cluster),
        *("-m", *module, str(path), "--devices", *plan.cluster.network.ids),
        *("--steps", "5", "--device", device, "--events", *more),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    told = {e["loss_step"]: e["loss"] for e in events if e["event"] == "step"}
    told |= {e["step"]: e["loss"] for e in events if e["event"] == "loss"}
    (devices,) = (e["devices"] for e in events if e["event"] == "devices")
    return [told[k] for k in range(5)], devices


def test_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Two stages of two, clipped, with a tied matrix; bytes are counted as by the host."""
    plan = make_plan([[0, 3], [2, 1]], workload=tiny_workload(tied=True), clip=1.0)
    want, devices = losses_of(plan, tmp_path)
    times = tmp_path / "times.json"
    found, told = losses_of(plan, tmp_path, "--direct", "gloo", "--calibrate", str(times))
    assert found == want and json.loads(times.read_text())["software"]["direct"] == "gloo"
    for one, other in zip(told, devices, strict=True):
        assert one["sent_bytes"].keys() == other["sent_bytes"].keys()
        for to, size in one["sent_bytes"].items():
            assert size == pytest.approx(other["sent_bytes"][to], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("rare", ["outer", "delayed", "two clocks", "int8", "own pace", "levels"])
def test_other_ways_to_train(rare: str, tmp_path: Path) -> None:
    """Outer steps go by the host, what is averaged in every step from GPU to GPU."""
    workload = tiny_workload(batch_samples=8)
    plan = make_plan([[0, 3], [2, 1]], workload=workload)
    more: list[str] = []
    if rare == "int8":
        plan = make_plan([[0, 3], [2, 1]], workload=workload.with_boundary_codec("int8"))
    elif rare in ("outer", "delayed"):
        plan = plan.replace(sync=Sync(2, OuterOptimizer(), delayed=rare == "delayed"))
    elif rare == "own pace":
        plan, more = make_plan([[0], [1], [2]], workload=workload), ["--own-pace"]
    else:
        plan = make_plan([[k] for k in range(4)], workload=workload)
        first = Phase.WITHIN if rare == "two clocks" else Phase.REDUCE
        plan = plan.replace(averaging=(levels([(0, 1), (2, 3)], (0.5, 0.5), first),))
        if rare == "two clocks":
            plan = plan.replace(sync=Sync(2, OuterOptimizer()))
    want, _ = losses_of(plan, tmp_path, *more)
    found, _ = losses_of(plan, tmp_path, "--direct", "gloo", *more)
    if rare == "own pace":
        # who does which microbatch is not planned
        assert found == pytest.approx(want, rel=1e-5)
    else:
        assert found == want


@pytest.mark.parametrize("grid", [[[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_machines_of_two(grid: list[list[int]], tmp_path: Path) -> None:
    """A pipeline within a machine and averaging between them, and the other way round."""
    plan = make_plan(grid, workload=tiny_workload())
    want, _ = losses_of(plan, tmp_path)
    found, _ = losses_of(plan, tmp_path, "--direct", "gloo", machines=["a", "a", "b", "b"])
    assert found == want


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward", "averaging", "update"])
@pytest.mark.parametrize("device", [0, 4])
def test_kill_is_named(device: int, phase: str, hangs: bool, tmp_path: Path) -> None:
    """As where messages go by hosts, also where a library waits for its peer for ever."""
    with Started(tmp_path) as run:
        plan = make_plan(SIX, workload=tiny_workload(batch_samples=8))
        path = tmp_path / "plan.json"
        save_plan(plan, path)
        given = {"device": str(device), "fault": "kill", "phase": phase, "step": 2}
        given |= {"folder": str(tmp_path), "machines": ["a"] * 6, "hangs": hangs}
        names = plan.cluster.network.ids
        for name in names:
            module = "tests.executor.direct_rank"
            run.start(name, name, hurt(path, given, "--direct", "gloo", module=module))
        require_named(run, [name for name in names if name != str(device)], device)


def test_paths_that_are_chosen_are_refused() -> None:
    """There, words lie between the bytes."""
    from planner.executor.launch.arguments import parse_arguments, validate_for_plan

    args = parse_arguments(["plan.json", "--devices", "a", "--direct", "nccl"], None)
    plan = make_plan([[0, 1]], workload=tiny_workload())
    validate_for_plan(args, plan)
    with pytest.raises(ValueError, match="--direct: messages' order must be planned"):
        validate_for_plan(args, plan.replace(wiring="stochastic"))


@pytest.mark.parametrize(
    ("measured", "asked", "line"),
    [
        (None, None, ""),
        ("nccl", "nccl", ""),
        ("nccl", None, "measured with --direct nccl, this run sends through host memory"),
        (None, "gloo", "measured through host memory, this run sends with --direct gloo"),
    ],
)
def test_a_link_measured_another_way_is_refused(
    measured: str | None, asked: str | None, line: str
) -> None:
    """A prediction stands on the way that messages go."""
    from planner.cli.run_command import require_same_transport

    software = {} if measured is None else {"direct": measured}
    how: Any = SimpleNamespace(software=software)
    run: Any = SimpleNamespace(direct=asked, calibration="times.json")
    if not line:
        require_same_transport(how, run)
        return
    with pytest.raises(ValueError, match=f"times.json: {line}; measure again"):
        require_same_transport(how, run)


def test_a_message_is_made_before_it_leaves() -> None:
    """Handed over at once, while it is still being made."""
    hall = Hall(2)
    side = GpuBackend(LateGpu())
    directs = directs_of([hall.of(0), hall.of(1)], (0, 1), [side, HOST])
    here, there = socket.socketpair()
    soon = threading.Event()
    message = torch.zeros(4)

    def makes() -> None:
        soon.wait(LONG_S)
        message.fill_(7.0)

    side._gpu.computing().give(makes)
    sender = Sender({1: here}, ErrorLatch(), {1: 1e9}, side=side, direct=directs[0])
    sender.send(message, 1)
    room = torch.zeros(4)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(directs[1].receive, there, 0, room)
        time.sleep(0.05)
        assert not got.done() and not hall.sent
        soon.set()
        got.result(LONG_S)
    sender.finish()
    assert bool((room == 7.0).all())


def test_a_round_alone_leaves_the_vector_where_it_is() -> None:
    """A mean of one's own is scaled there."""
    one = AveragingGroup.equal((0,))
    rounds = [one, one]
    own = StageAverager(0, rounds, [Chunking(1, 1)] * 2, [WireFormat.FP32] * 2, 3, 1e9)
    asked: list[bool | None] = []
    vector: Tensor = torch.ones(2)

    def where(here: bool | None) -> Tensor:
        asked.append(here)
        return vector

    members = Members(1)
    own.run(where, members.peers[0], Sender({}, ErrorLatch(), {}))
    assert asked == [None] and vector.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--elastic"], "--direct conflicts with --elastic; leave one out"),
        (["--impose"], "--impose runs no model; leave out --direct"),
        (["--move", "a:1@3"], "--direct conflicts with --move; leave one out"),
        (["--rebalance", "5"], "--direct conflicts with --rebalance; leave one out"),
    ],
)
def test_what_it_goes_without(more: list[str], line: str) -> None:
    """One line, before anything begins."""
    from planner.executor.launch.arguments import parse_arguments, validate

    args = parse_arguments(["plan.json", "--devices", "a", "--direct", "nccl", *more], None)
    with pytest.raises(ValueError, match=line):
        validate(args)
