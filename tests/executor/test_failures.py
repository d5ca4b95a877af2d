"""A run that fails ends everywhere, with one line that names the device."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import make_plan, tiny_workload
from tests.executor.faults import PREFIX, Started, hurt, saved, whole
from tests.executor.forks import losses_by_step
from tests.executor.launch import ROOT, torchrun

torch = pytest.importorskip("torch")

from benchmarks.faults.__main__ import cut  # noqa: E402
from benchmarks.faults.rank import PHASES  # noqa: E402
from benchmarks.faults.runs import MARK, marked  # noqa: E402
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.fault_tolerance.failure_detector import FailureDetector  # noqa: E402
from planner.executor.fault_tolerance.heartbeat import Heartbeat, heartbeats, publish  # noqa: E402
from planner.executor.fault_tolerance.shutdown import FAILED, REFUSED, Shutdown  # noqa: E402
from planner.executor.launch.local import run_local  # noqa: E402
from planner.executor.rendezvous.connect import connections_to  # noqa: E402
from planner.executor.rendezvous.rank_assignment import RankAssignmentError  # noqa: E402
from planner.executor.rendezvous.rank_group import RankGroup  # noqa: E402
from planner.executor.rendezvous.rendezvous import _claim_rejoin  # noqa: E402
from planner.executor.transport.store import StoreAddress, StoreMissingError  # noqa: E402
from tests.emulate.test_network import REFUSED as NO_NETWORK  # noqa: E402

SIX = [[0, 1, 2], [3, 4, 5]]
KILLED = -signal.SIGKILL
STORE = r"the store at 127.0.0.1:"


def wait_for(path: Path, text: str = "") -> None:
    """Until a file is there, and holds a text."""
    until = time.monotonic() + 60
    while time.monotonic() < until and not (path.exists() and text in path.read_text()):
        time.sleep(0.1)


def plan_of(grid: list[list[int]], folder: Path, seed: int = 0) -> Path:
    """Three stages that train in milliseconds."""
    plan = make_plan(grid, workload=tiny_workload(batch_samples=8), seed=seed)
    return saved(plan, folder / f"plan{seed}.json")


def all_hurt(
    run: Started,
    folder: Path,
    grid: list[list[int]],
    device: int,
    phase: str,
    fault: str = "kill",
) -> list[str]:
    """Start all ranks; returns the others than the one to which it happens."""
    path = plan_of(grid, folder)
    given = {"device": str(device), "fault": fault, "phase": phase, "step": 2}
    devices = [str(d) for row in grid for d in row]
    for d in devices:
        run.start(d, d, hurt(path, given | {"folder": str(folder)}))
    return [d for d in devices if d != str(device)]


def require_named(run: Started, others: list[str], device: int) -> None:
    """All end with the code of a failed run, and with a line that names the device."""
    assert set(run.codes(others).values()) == {FAILED}
    reasons = {run.reason(name) for name in others}
    assert len(reasons) == 1, reasons
    (reason,) = reasons
    if device == 0:
        assert reason.endswith("which device '0' serves, is gone")
    else:
        assert reason == f"device '{device}' is gone: its process has ended"


def test_kill_of_the_rank_that_serves_the_store(tmp_path: Path) -> None:
    """In the middle of a step of six ranks: nobody has a store to read the reason from."""
    with Started(tmp_path) as run:
        others = all_hurt(run, tmp_path, SIX, 0, "forward")
        require_named(run, others, 0)
        assert run.codes(["0"]) == {"0": KILLED}


@pytest.mark.parametrize("phase", ["averaging", pytest.param("update", marks=pytest.mark.slow)])
def test_kill_of_an_owner_of_optimizer_state(phase: str, tmp_path: Path) -> None:
    """No other device has its share: all end, and go on from the last checkpoint as before."""
    workload = tiny_workload(batch_samples=8).replace(optimizer_shards=2)
    plan = make_plan([[0, 1], [2, 3]], workload=workload)
    path, names = saved(plan, tmp_path / "plan.json"), plan.cluster.network.ids
    at = ("--checkpoint", str(tmp_path / "kept"), "--every", "2")
    fault = {"device": "2", "fault": "kill", "phase": phase, "step": 5, "folder": str(tmp_path)}
    with Started(tmp_path) as run:
        for name in names:
            run.start(name, name, hurt(path, fault, *at))
        others = [name for name in names if name != "2"]
        assert set(run.codes(others).values()) == {FAILED}
        (reason,) = {run.reason(name) for name in others}
    assert reason.startswith("device '2' is gone: its process has ended; continue after 4 steps")
    code, resumed, said = losses_by_step(path, names, "--steps", "8", "--resume", at[1])
    assert code == 0, said
    code, expected, said = losses_by_step(path, names, "--steps", "8")
    assert code == 0, said
    assert [resumed[t] for t in range(4, 8)] == [expected[t] for t in range(4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("device", [0, 4])
def test_kill_in_every_phase(device: int, phase: str, tmp_path: Path) -> None:
    """Rank 0 and another one."""
    with Started(tmp_path) as run:
        require_named(run, all_hurt(run, tmp_path, SIX, device, phase), device)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
def test_kill_of_a_stages_only_device(phase: str, tmp_path: Path) -> None:
    """Three stages of one device each, which average nothing."""
    with Started(tmp_path) as run:
        require_named(run, all_hurt(run, tmp_path, [[0, 1, 2]], 1, phase), 1)


@pytest.mark.slow
def test_kill_while_others_have_not_come(tmp_path: Path) -> None:
    """It gave signs of life before, and gives none any more."""
    with Started(tmp_path) as run:
        path = plan_of([[0, 1, 2]], tmp_path)
        given = {"device": "1", "fault": "kill", "phase": "join", "step": 0}
        for d in ("0", "1"):
            run.start(d, d, hurt(path, given | {"folder": str(tmp_path)}))
        assert run.codes(["0"]) == {"0": FAILED}
        assert run.reason("0").startswith("device '1' gave no sign of life for 10 s")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("device", [0, 2])
def test_a_stopped_process_is_named(device: int, phase: str, tmp_path: Path) -> None:
    """SIGSTOP: the others do not wait for ever; when it goes on it ends too."""
    with Started(tmp_path) as run:
        others = all_hurt(run, tmp_path, SIX, device, phase, fault="stop")
        assert set(run.codes(others).values()) == {FAILED}
        for name in others:
            reason = run.reason(name)
            if reason.startswith(STORE):
                assert "which device '0' serves" in reason and device == 0
            else:
                assert reason.startswith(f"device '{device}' gave no sign of life")
        assert run.processes[str(device)].poll() is None
        run.processes[str(device)].send_signal(signal.SIGCONT)
        assert run.codes([str(device)]) == {str(device): FAILED}
        assert run.reason(str(device))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "hold"])
def test_a_short_silence_is_survived(fault: str, tmp_path: Path) -> None:
    """A process stopped for some seconds, or whose threads all wait for Python's lock."""
    with Started(tmp_path) as run:
        others = all_hurt(run, tmp_path, [[0, 1, 2]], 1, "backward", fault=fault)
        wait_for(tmp_path / "when")
        time.sleep(6)
        if fault == "stop":
            run.processes["1"].send_signal(signal.SIGCONT)
        lines = (tmp_path / "0.out").read_text().count("\n")
        time.sleep(6)
        assert (tmp_path / "0.out").read_text().count("\n") > lines
        assert [run.processes[d].poll() for d in (*others, "1")] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "device '1' was told to end (SIGTERM)"),
        (signal.SIGINT, 130, "device '1' was told to end (SIGINT)"),
    ],
)
def test_who_is_told_to_end_tells_the_others(
    number: signal.Signals, code: int, said: str, tmp_path: Path
) -> None:
    """Who was interrupted need not read it."""
    with Started(tmp_path) as run:
        path = plan_of([[0, 1, 2]], tmp_path)
        for d in ("0", "1", "2"):
            run.start(d, d, whole(path))
        wait_for(tmp_path / "0.out", "step")
        run.processes["1"].send_signal(number)
        assert run.codes(["0", "1", "2"]) == {"0": FAILED, "1": code, "2": FAILED}
        assert [run.reason(d) for d in ("0", "2")] == [said] * 2
        if number == signal.SIGINT:
            assert (tmp_path / "1.err").read_text() == ""
        else:
            assert run.reason("1") == said


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_NETWORK), reason=NO_NETWORK)
@pytest.mark.parametrize(("victim", "others"), [(0, [1, 2, 3, 4, 5]), (4, [5])])
def test_a_cut_is_named(victim: int, others: list[int]) -> None:
    """All links of rank 0, and the link of two neighbours: connections stay open, nothing comes."""
    row = cut("cut", victim, others, "forward")
    assert row.seconds is not None and row.left == []
    assert row.codes == [FAILED] * 6 and sum(row.said.values()) == 6
    assert all(repr(row.victim) in reason for reason in row.said)


@pytest.mark.slow
def test_ranks_end_with_who_started_them(tmp_path: Path) -> None:
    """SIGKILL of the process that serves the store for all of one machine: nothing goes on."""
    path, names = plan_of([[0, 1, 2]], tmp_path), ["0", "1", "2"]
    given = {"device": "none", "fault": "kill", "phase": "forward", "step": 0, "folder": "/"}
    words = hurt(path, given, "--device", "cpu", "--devices", *names)
    mark = f"starter-{os.getpid()}"
    with (tmp_path / "out").open("w") as out:
        starter = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.local", *words],
            env=os.environ | {"PYTHONPATH": str(ROOT), MARK: mark},
            stdout=out,
            stderr=out,
        )
    try:
        wait_for(tmp_path / "out", "step")
        starter.kill()
        starter.wait()
        until = time.monotonic() + 60
        while (left := marked(mark)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == []
    finally:
        for number in marked(mark):
            os.kill(number, signal.SIGKILL)


def test_a_missing_rank_is_named_after_the_wait(tmp_path: Path) -> None:
    """By all who came; the wait is an option."""
    with Started(tmp_path) as run:
        run.start("0", "0", whole(plan_of([[0, 1, 2]], tmp_path), "--wait", "2"))
        assert run.codes(["0"]) == {"0": FAILED}
        lines = (tmp_path / "0.err").read_text().splitlines()
        missing = "devices '1', '2' (2 of 3)"
        assert lines[0] == f"planner.executor: waiting for {missing}, 1 s more"
        assert lines[1].endswith(
            f"{missing} did not join within 2 s; start all, see what they print, or raise --wait"
        )
        assert len(lines) == 2


def test_another_plan_ends_all(tmp_path: Path) -> None:
    """Who was refused says so with its own exit code, and the others say it too."""
    with Started(tmp_path) as run:
        path, other = plan_of([[0, 1]], tmp_path), plan_of([[0, 1]], tmp_path, seed=1)
        for d, given in (("0", path), ("1", other)):
            run.start(d, d, whole(given))
        codes = run.codes(["0", "1"])
        reasons = {run.reason(d) for d in codes}
        assert len(reasons) == 1
        assert reasons.pop().endswith("; give every node the same plan file")
        assert sorted(codes.values()) == [REFUSED, FAILED]  # who came first is right


@pytest.mark.parametrize(
    ("device", "more", "said"),
    [
        ("0", (), "device '0' is claimed by two processes; name each device once"),
        pytest.param(
            *("7", (), "device '7': --devices: the plan has no device '7'; it has 0, 1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("1", ("--device", "cuda"), "device '1': --device cuda: this machine has no usable"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_refused_rank_ends_the_others(
    device: str, more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Claimed twice, unknown, without its GPU: told to all, at once."""
    if more and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with Started(tmp_path) as run:
        path = plan_of([[0, 1]], tmp_path)
        run.start("first", "0", whole(path))
        until = time.monotonic() + 60
        while not _listens(int(run.environment["MASTER_PORT"])) and time.monotonic() < until:
            time.sleep(0.1)
        run.start("second", device, whole(path), *more)
        assert run.codes(["first", "second"]) == {"first": FAILED, "second": REFUSED}
        assert run.reason("second").startswith(said)
        assert run.reason("first").startswith(said)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_ranks_of_one_machine_end_with_the_one_that_was_killed(tmp_path: Path) -> None:
    """As ``planner run`` starts them: one line, exit code 3, no process and no file left."""
    path, names = plan_of([[0, 1, 2]], tmp_path), ["0", "1", "2"]
    given = {"device": "1", "fault": "kill", "phase": "backward", "step": 2}
    words = hurt(path, given | {"folder": str(tmp_path)}, "--devices", *names, "--device", "cpu")
    told: list[str] = []
    said: list[str] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *words]
    code, reason = run_local(words, names, environment, told.append, said.append)
    assert code == FAILED
    assert reason is not None and reason.startswith("device '1' ")
    assert said == [PREFIX + reason]
    assert len(told) >= 1


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """Its agent tells the others to end: they say which device is gone, not that they were told."""
    path, names = plan_of(SIX, tmp_path), [str(d) for d in range(6)]
    given = {"device": "4", "fault": "kill", "phase": "backward", "step": 2}
    words = hurt(path, given | {"folder": str(tmp_path)}, "--devices", *names, "--device", "cpu")
    done = torchrun(6, *words)
    assert done.returncode != 0
    found = [line for line in done.stderr.splitlines() if line.startswith(PREFIX)]
    assert found == [f"{PREFIX}device '4' is gone: its process has ended"] * 5


def test_the_first_reason_counts() -> None:
    """In the store, and in a process; those who wait are woken once."""
    store = torch.distributed.HashStore()
    assert publish(store, "a") == "a"
    assert publish(store, "b") == "a"
    shutdown, woken = Shutdown(), []
    shutdown.on_failure(lambda: woken.append(1))
    shutdown.request("a", 5)
    shutdown.request("b")
    shutdown.on_failure(lambda: woken.append(2))
    assert (shutdown.reason, shutdown.code, woken) == ("a", 5, [1, 2])


def test_silence_is_counted_in_ones_own_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was stopped itself for an hour takes none of it for the silence of others."""
    clock = [0.0]
    monkeypatch.setattr(
        "planner.executor.fault_tolerance.heartbeat.time.monotonic", lambda: clock[0]
    )
    store = torch.distributed.HashStore()
    store.set("heartbeat/1", "7")
    heard: list[float] = []
    heartbeat = Heartbeat(store, lambda reason: None, lambda: None, lambda: store)

    def look(silent_s: float) -> None:
        heard.append(silent_s)
        clock[0] += 3600.0 if len(heard) == 2 else 1.0
        if len(heard) == 5:
            store.set("heartbeat/1", "8")
        if len(heard) == 7:
            heartbeat.stop()

    heartbeat.set_watched_rank(0, 1, look)
    monkeypatch.setattr("planner.executor.fault_tolerance.heartbeat.PERIOD_S", 0.0)
    before = heartbeat._count
    heartbeat.run()
    assert heard == [0.0, 1.0, 4.0, 5.0, 6.0, 0.0, 1.0]
    assert int(store.get("heartbeat/0")) == before + 7


def test_a_new_target_does_not_inherit_the_silence_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watched rank changes while an answer of the store is awaited."""
    clock = [0.0]
    monkeypatch.setattr(
        "planner.executor.fault_tolerance.heartbeat.time.monotonic", lambda: clock[0]
    )
    monkeypatch.setattr("planner.executor.fault_tolerance.heartbeat.PERIOD_S", 0.0)
    store = torch.distributed.HashStore()
    store.set("heartbeat/1", "7")
    store.set("heartbeat/2", "3")
    heard: list[tuple[int, float]] = []

    class SlowStore:
        """Answers the fifth read after the target has changed."""

        def __init__(self) -> None:
            self.reads = 0

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.reads += 1
            if self.reads == 5:
                heartbeat.set_watched_rank(0, 2, lambda silent_s: note(2, silent_s))
            values: list[bytes] = store.multi_get(keys)
            return values

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    def note(rank: int, silent_s: float) -> None:
        heard.append((rank, silent_s))
        clock[0] += 1.0
        if len(heard) == 7:
            heartbeat.stop()

    slow: Any = SlowStore()
    heartbeat = Heartbeat(slow, lambda reason: None, lambda: None, lambda: slow)
    heartbeat.set_watched_rank(0, 1, lambda silent_s: note(1, silent_s))
    heartbeat.run()
    assert next(silent_s for rank, silent_s in heard if rank == 2) == 0.0
    assert [silent_s for rank, silent_s in heard if rank == 1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_heartbeat_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A farewell is nothing, silence is named after the limit, and an end at once."""
    detector = FailureDetector("here", Shutdown(), 1.0)
    proposed: list[str] = []
    monkeypatch.setattr(detector, "abort_run", lambda line, code=FAILED: proposed.append(line))
    pairs = [socket.socketpair() for _ in range(3)]
    with detector.watching_connections({pair[0]: f"there {k}" for k, pair in enumerate(pairs)}):
        pairs[0][1].sendall(b"\1\0")
        pairs[0][1].close()
        detector._poll()
        detector._measure_silence(0.9)
        assert proposed == []
        pairs[1][1].sendall(b"\1")
        detector._poll()
        detector._measure_silence(0.2)
        assert len(proposed) == 1
        assert proposed[0].startswith("device 'there 2' gave no sign of life to 'here' for 1 s")
        pairs[1][1].close()
        detector._poll()
        assert proposed[1:] == ["device 'there 1' is gone: its process has ended"]
    assert pairs[2][1].recv(1) == b"\0"


def test_who_fell_silent_earlier_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole site is silent from one moment on; what was silent for half as long is not of it."""
    for silences, lost in (((10.1, 5.2, 0.2), ["a"]), ((10.1, 9.0, 0.2), ["a", "b"])):
        detector = FailureDetector("here", Shutdown())
        reported: list[tuple[list[str], bool]] = []
        monkeypatch.setattr(
            detector,
            "on_rank_lost",
            lambda names, line, alone, to=reported: to.append((list(names), alone)),
        )
        pairs = [socket.socketpair() for _ in silences]
        with detector.watching_connections(
            {pair[0]: name for pair, name in zip(pairs, "abc", strict=True)}
        ):
            for (end, _), silent_s in zip(pairs, silences, strict=True):
                detector._heartbeats[end].silent_s = silent_s
            detector._measure_silence(0.0)
        assert reported == [(lost, False)]


def test_who_listens_and_answers_nothing_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for as long as was said, though PyTorch itself waits without end."""
    monkeypatch.setattr("planner.executor.transport.store.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = StoreAddress("127.0.0.1", server.getsockname()[1], served_by_launcher=False)
        with pytest.raises(StoreMissingError, match=STORE + r".* 0.5 s as a store does: it is"):
            address.connect(0.5)


def test_nobody_serves_the_store() -> None:
    """The address is said."""
    from planner.executor.transport.store import StoreMissingError

    with pytest.raises(StoreMissingError, match=r"127.0.0.1:1 did not answer within 1 s"):
        StoreAddress("127.0.0.1", 1, True).connect(1.0)


def test_json_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``planner run --json`` of a run that fails: what was done, the reason, exit code 3."""
    from planner.cli.main import main

    def fails(*_: object, **__: object) -> tuple[int, str]:
        return FAILED, "device '1' is gone"

    monkeypatch.setattr("planner.executor.launch.local.run_local", fails)
    assert main(["run", str(plan_of([[0, 1]], tmp_path)), "--json"]) == FAILED
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == "device '1' is gone" and found["steps"] == []


def test_an_unexpected_error_of_a_helper_thread_ends_the_run() -> None:
    """A rank must not train on while nothing watches the others."""
    store = torch.distributed.HashStore()
    reasons: list[str] = []
    heartbeat = Heartbeat(store, reasons.append, lambda: None, lambda: store)

    def broken(_: Any) -> None:
        raise KeyError("job")

    heartbeat.run_later(broken)
    with pytest.raises(KeyError):
        heartbeat.run()
    assert reasons == ["the heartbeat thread failed (KeyError: 'job')"]
    shutdown = Shutdown()
    detector = FailureDetector("a", shutdown)
    detector._heartbeat = heartbeat
    timers: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "_poll", lambda: broken(None))
        patch.setattr(
            "planner.executor.fault_tolerance.failure_detector.threading.Timer",
            lambda seconds, function: SimpleNamespace(start=lambda: timers.append(seconds)),
        )
        with pytest.raises(KeyError):
            detector.run()
    assert shutdown.reason == "device 'a': its failure detector failed (KeyError: 'job')"
    assert timers  # a main thread that is blocked is ended too


def test_heartbeats_of_many_ranks_take_two_requests() -> None:
    """However many ranks there are: silence is counted up to a limit a request."""
    store, requests = torch.distributed.HashStore(), []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            requests.append(name)
            return getattr(store, name)

    for rank in range(64):
        store.set(f"heartbeat/{rank}", str(rank))
    counted: Any = Counted()
    assert heartbeats(counted, range(64)) == [str(rank).encode() for rank in range(64)]
    assert requests == ["check", "multi_get"]
    assert heartbeats(counted, [63, 64, 0]) == [b"63", b"", b"0"]
    assert heartbeats(counted, []) == []


def test_one_process_rejoins_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one with its name is refused, whether it comes at the same time or later."""
    monkeypatch.setattr("planner.executor.rendezvous.rendezvous.REJOIN_SILENCE_S", 0.2)
    store = torch.distributed.HashStore()
    store.set("heartbeat/1", "7")
    refused: list[str] = []

    def rejoin() -> None:
        try:
            _claim_rejoin(store, 1, "b")
        except RankAssignmentError as error:
            refused.append(str(error))

    both = [threading.Thread(target=rejoin) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert refused == ["device 'b' is claimed by two processes; name each device once"]
    # the process sends heartbeats
    timer = threading.Timer(0.1, lambda: store.set("heartbeat/1", "8"))
    timer.start()
    rejoin()
    timer.join()
    assert len(refused) == 2
    # it is lost, and is started again
    rejoin()
    assert len(refused) == 2


def test_callbacks_end_with_their_connections() -> None:
    """Those for a lost rank, too: connections are opened and closed many times in a generation."""
    latch, detector = ErrorLatch(), FailureDetector("a", Shutdown())
    store = torch.distributed.HashStore()
    ranks = RankGroup(0, 1, store, ("a",), detector, rank_lost=latch, address="127.0.0.1")
    with ranks.error_latch(), connections_to(ranks, [], "nothing"):
        assert latch._callbacks and detector.shutdown._callbacks
    assert not latch._callbacks and not detector.shutdown._callbacks
