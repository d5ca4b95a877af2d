"""From GPU to GPU: whoever carries them, transfers never wait for each other in a circle."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise, permutations
from pathlib import Path
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

from planner.executor import direct as direct_module  # noqa: E402
from planner.executor.averaging import Averaging  # noqa: E402
from planner.executor.codec import Wire  # noqa: E402
from planner.executor.connections import TornError  # noqa: E402
from planner.executor.direct import Direct, Transfers, open_direct  # noqa: E402
from planner.executor.direct_exchange import DirectExchange, pieces_of  # noqa: E402
from planner.executor.options import Library  # noqa: E402
from planner.executor.pace import Pace  # noqa: E402
from planner.executor.ranks import Ranks  # noqa: E402
from planner.executor.side import HOST, GpuSide, Side  # noqa: E402
from planner.executor.transport import Outbox  # noqa: E402
from planner.training_plan.averaging_group import AveragingGroup  # noqa: E402
from tests.executor.devices import LONG_S  # noqa: E402
from tests.executor.faults import Started  # noqa: E402
from tests.executor.launch import torchrun  # noqa: E402
from tests.executor.test_exchange import Members, averaged  # noqa: E402
from tests.executor.test_failures import SIX, all_hurt, require_named  # noqa: E402
from tests.executor.test_side import LateGpu, played  # noqa: E402

CPU = torch.device("cpu")


class Hall:
    """Where calls of two ranks meet; each keeps its rank's GPU from all others until they have.

    No more than that is known of NCCL's: it may run one after the other what nobody has put in
    order.
    """

    def __init__(self, ranks: int) -> None:
        self.gpus = [threading.Lock() for _ in range(ranks)]
        self.begun: dict[tuple[int, int], list[Any]] = {}
        self.changed = threading.Condition()
        self.most_apart_s = 0.0

    def of(self, rank: int) -> Transfers:
        """As one rank sees it."""
        return _OfHall(self, rank)

    def meet(self, source: int, destination: int, rank: int, tensor: Tensor) -> None:
        """One end of a transfer."""
        assert self.gpus[rank].acquire(blocking=False), "two transfers of one rank"
        start = time.monotonic()
        with self.changed:
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
            self.most_apart_s = max(self.most_apart_s, time.monotonic() - start)
        self.gpus[rank].release()


class _OfHall:
    def __init__(self, hall: Hall, rank: int) -> None:
        self._hall, self._rank = hall, rank

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Met at once, and nothing is left to wait for."""
        self._hall.meet(self._rank, rank, self._rank, tensors[0])
        return self

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """The same."""
        self._hall.meet(rank, self._rank, self._rank, tensors[0])
        return self

    def wait(self) -> None:
        """Nothing."""


def gloo(ranks: int) -> list[Transfers]:
    """PyTorch's own, of threads of this process."""
    store = HashStore()

    def made(rank: int) -> Any:
        return ProcessGroupGloo(PrefixStore("g", store), rank, ranks, timedelta(seconds=LONG_S))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(made, range(ranks)))


def directs_of(
    groups: Sequence[Transfers], members: Sequence[int], sides: Sequence[Side]
) -> dict[int, Direct]:
    """By rank."""
    return {
        rank: Direct(group, members, rank, side)
        for group, rank, side in zip(groups, members, sides, strict=True)
    }


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

            def made(number: int = number) -> Tensor:
                time.sleep(naps[pair][number])
                found: Tensor = torch.tensor([source, destination, number])
                return found

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
            pool.submit(directs[source].send, to, destination, made),
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
    (direct,) = (Direct(Hall(2).of(0), (0, 1), 0, HOST),)
    here, there = socket.socketpair()
    there.close()
    with pytest.raises(TornError, match="another rank"):
        direct.receive(here, 1, torch.zeros(1))
    here, there = socket.socketpair()
    there.sendall(b"\x03")
    with pytest.raises(TornError, match="said 3 where ROOM was due"):
        direct.send(here, 1, lambda: torch.zeros(1))

    class Broken(_OfHall):
        def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
            raise RuntimeError("connection closed by peer\nand more")

    here, there = socket.socketpair()
    there.sendall(bytes([1, 4]))  # room, go
    with pytest.raises(TornError, match=r"is gone \(connection closed by peer\)"):
        Direct(Broken(Hall(2), 0), (0, 1), 0, HOST).send(here, 1, lambda: torch.zeros(1))


@pytest.mark.parametrize("library", ["gloo", "hall"])
@pytest.mark.parametrize("head", ["last", "first"])
def test_the_pipeline_is_the_same_to_the_last_bit(head: str, library: str) -> None:
    """However late what is begun ends: nothing is sent before it is made, or used before it is."""
    plan = make_plan([[0, 1, 2], [4, 5, 3]], workload=tiny_workload(), head=head)
    want, _, losses = played(plan, [HOST] * 6)
    sides = [GpuSide(LateGpu(seed)) for seed in range(6)]
    hall = Hall(4)
    groups = gloo(4) if library == "gloo" else [hall.of(place) for place in range(4)]
    # of the others each goes by its host, alone
    directs = directs_of(groups, [0, 1, 2, 4], [sides[d] for d in (0, 1, 2, 4)])
    found, records, same = played(plan, sides, directs=directs)
    assert same == losses
    for one, other in zip(found, want, strict=True):
        assert all(map(torch.equal, one.parameters, other.parameters))
    assert all(record.messages for own in records for record in own)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=4).filter(
        lambda m: sum(share for share, _ in m) > 0 and any(gives for _, gives in m)
    ),
    st.integers(1, 99),
    st.sampled_from(list(Wire)),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
)
def test_averaging_is_the_same_to_the_last_bit(
    values: int,
    members: list[tuple[int, bool]],
    most: int,
    wire: Wire,
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
    most = values if wire in (Wire.INT8, Wire.INT4) else most
    want = averaged(vectors, group, Pace(1, 1), wire, scale)
    hall, connected = Hall(n), Members(n)
    sides: list[Side] = [GpuSide(LateGpu(r)) if late and n < 4 else HOST for r in range(n)]
    directs = directs_of([hall.of(r) for r in range(n)], range(n), sides)
    found = [v.clone() for v in vectors]

    def work(rank: int) -> float:
        how = (connected.peers[rank], directs[rank], sides[rank], wire, scale, (), most)
        return DirectExchange(found[rank], group, rank, *how).run()

    connected.all_do(work)
    connected.close()
    for one, other in zip(found, want, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_pieces_cover_a_share() -> None:
    """None is empty or too large, and they follow each other."""
    for part, most in (((3, 20), 5), ((0, 4), 4), ((7, 7), 3), ((0, 1), 9)):
        found = pieces_of(part, most)
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
        directs: dict[int, Direct] = {}
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
            directs: dict[int, Direct] = directs,
        ) -> float:
            mine = [group for groups in rounds for group in groups if rank in group.members]
            own = Averaging(rank, mine, [Pace(3, 2)] * len(mine), [Wire.FP32] * len(mine), n, 1e9)

            def where(here: bool) -> Tensor:
                asked[rank].append(here)
                return found[rank]

            peers, one = members.peers[rank], directs.get(rank)
            end = own.run(where, peers, Outbox({}, peers.failure, {}), None, one)
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
    from planner.executor.learner import Learner
    from planner.executor.optimizing import Optimizing

    plan = make_plan([[0], [1]], workload=tiny_workload())
    learner = Learner(plan, 0, CPU, Optimizing(), side=GpuSide(LateGpu()))
    learner.begin(0, plan.schedules[0])
    here = learner.gradients()
    assert learner.gradients(here=True) is here
    here.fill_(2.0)
    there = learner.gradients(here=False)
    assert there is not here and bool((there == 2.0).all())
    there.fill_(3.0)
    assert learner.gradients() is there
    assert learner.gradients(here=True) is here and bool((here == 3.0).all())
    learner.gradients(here=False).fill_(4.0)
    learner.update()
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
    monkeypatch.setattr(direct_module, "_place", lambda library, rank, device: places[rank])
    store = HashStore()

    def opened(rank: int) -> Direct | None:
        ranks = Ranks(rank, len(places), store)
        return open_direct(Library.GLOO, ranks, CPU, HOST, store)

    with ThreadPoolExecutor(len(places)) as pool:
        found = list(pool.map(opened, range(len(places))))
    assert [None if one is None else sorted(one.members) for one in found] == want
    pair = next(one for one in want if one)[:2]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda r: found[r].meet(set(pair) - {r}), pair))


def test_nobody_reaches_anybody() -> None:
    """One line each."""
    with pytest.raises(ValueError, match="no two ranks of a machine have a GPU each"):
        open_direct(Library.GLOO, Ranks(0, 1, HashStore()), CPU, HOST, HashStore())
    if not torch.distributed.is_nccl_available():
        with pytest.raises(ValueError, match="this PyTorch is built without NCCL"):
            open_direct(Library.NCCL, Ranks(0, 1, HashStore()), CPU, HOST, HashStore())


def losses_of(
    plan: TrainingPlan, folder: Path, *more: str, device: str = "cpu"
) -> tuple[list[float], list[Any]]:
    """Of five steps of all ranks, and what a device told."""
    path = folder / "plan.json"
    save_plan(plan, path)
    done = torchrun(
        len(plan.cluster),
        *("-m", "planner.executor", str(path), "--devices", *plan.cluster.network.ids),
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
    assert found == want and json.loads(times.read_text())["message_s"] > 0
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


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "averaging", "update"])
@pytest.mark.parametrize("device", [0, 4])
def test_kill_is_named(device: int, phase: str, tmp_path: Path) -> None:
    """As where messages go by hosts."""
    with Started(tmp_path) as run:
        others = all_hurt(run, tmp_path, SIX, device, phase, more=("--direct", "gloo"))
        require_named(run, others, device)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--elastic"], "--direct goes without --elastic; leave one out"),
        (["--impose"], "--impose runs no model; leave out --direct"),
        (["--move", "a:1@3"], "--direct goes without --move; leave one out"),
    ],
)
def test_what_it_goes_without(more: list[str], line: str) -> None:
    """One line, before anything begins."""
    from planner.executor.arguments import arguments, require_sensible

    args = arguments(["plan.json", "--devices", "a", "--direct", "nccl", *more], None)
    with pytest.raises(ValueError, match=line):
        require_sensible(args)
