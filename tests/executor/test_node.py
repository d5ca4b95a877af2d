"""The ranks of a node, started and started again by one command, beside those of another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planner.training_plan.choices import Wiring
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from tests.conftest import make_plan, tiny_workload
from tests.executor.launch import ROOT, free_port

torch = pytest.importorskip("torch")

from benchmarks.faults.runs import MARK, marked  # noqa: E402
from planner.executor import node  # noqa: E402
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT  # noqa: E402
from tests.executor.test_elastic import single  # noqa: E402
from tests.executor.test_train import TOLERANCE  # noqa: E402

WITHIN_S = 120.0
FIRST, SECOND = ("0", "1"), ("2", "3")


class Nodes:
    """Commands of nodes that share an address, each writing to files."""

    def __init__(self, folder: Path, plan: TrainingPlan, *more: str) -> None:
        self.folder, self.more = folder, more
        save_plan(plan, folder / "plan.json")
        self.mark = f"nodes-{os.getpid()}-{folder.name}"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            MARK: self.mark,
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *devices: str, more: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """The command of a node."""
        words = [sys.executable, "-m", "planner.executor.node", str(self.folder / "plan.json")]
        words += ["--devices", *devices, "--device", "cpu", "--events", *self.more, *more]
        with self.out(devices).open("ab") as out, self.err(devices).open("ab") as err:
            process = subprocess.Popen(words, env=self.environment, stdout=out, stderr=err)
        self.started.append(process)
        return process

    def out(self, devices: tuple[str, ...]) -> Path:
        """Of a node."""
        return self.folder / f"{'-'.join(devices)}.out"

    def err(self, devices: tuple[str, ...]) -> Path:
        """Of a node."""
        return self.folder / f"{'-'.join(devices)}.err"

    def events(self, kind: str) -> list[dict[str, object]]:
        """Of all nodes, as told so far; the last line may be half there."""
        found = []
        for path in self.folder.glob("*.out"):
            for line in path.read_text().split("\n")[:-1]:
                event = json.loads(line)
                if event["event"] == kind:
                    found.append(event)
        return found

    def wait_for(self, kind: str, count: int) -> None:
        """Until so many events have been told."""
        until = time.monotonic() + WITHIN_S
        while len(self.events(kind)) < count:
            assert time.monotonic() < until, [p.read_text() for p in self.folder.glob("*.err")]
            time.sleep(0.05)

    def ranks(self, of: subprocess.Popen[bytes]) -> list[int]:
        """Processes that a command has started."""
        text = Path(f"/proc/{of.pid}/task/{of.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def losses(self) -> dict[int, float]:
        """By step."""
        told = {e["loss_step"]: e["loss"] for e in self.events("step")}
        told |= {e["step"]: e["loss"] for e in self.events("loss")}
        return {int(str(k)): float(str(x)) for k, x in told.items() if k is not None}


@pytest.fixture
def plan() -> TrainingPlan:
    """Two stages of two; each node has a device of both."""
    return make_plan([[0, 3], [2, 1]], workload=tiny_workload(batch_samples=8))


@pytest.fixture
def nodes(plan: TrainingPlan, tmp_path: Path) -> Iterator[Nodes]:
    """Nothing of them is left."""
    made = Nodes(tmp_path, plan)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    until = time.monotonic() + 30.0
    while (left := marked(made.mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def test_two_nodes_train_as_one_process(nodes: Nodes, plan: TrainingPlan) -> None:
    """The first device's command serves the store; the other may come before it is there."""
    nodes.more = ("--steps", "5")
    second = nodes.start(*SECOND)
    first = nodes.start(*FIRST)
    assert first.wait(WITHIN_S) == 0 and second.wait(WITHIN_S) == 0
    losses = nodes.losses()
    np.testing.assert_allclose([losses[k] for k in range(5)], single(plan, 5), rtol=TOLERANCE)
    assert nodes.err(FIRST).read_text() == nodes.err(SECOND).read_text() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
@pytest.mark.parametrize("how", [pytest.param("rank", marks=pytest.mark.slow), "node"])
def test_all_end_with_a_lost_one(how: str, nodes: Nodes) -> None:
    """A rank that is killed, or a node's command: nothing is left, and all know why."""
    nodes.more = ("--steps", "100000")
    first, second = nodes.start(*FIRST), nodes.start(*SECOND)
    nodes.wait_for("step", 3)
    if how == "rank":
        os.kill(nodes.ranks(second)[0], signal.SIGKILL)
        assert second.wait(WITHIN_S) == FAILED
    else:
        second.kill()
    assert first.wait(WITHIN_S) == FAILED
    line = nodes.err(FIRST).read_text()
    assert line.count("\n") == 1 and ("device '2'" in line or "device '3'" in line)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
def test_a_lost_rank_comes_back_on_either_node(nodes: Nodes, plan: TrainingPlan) -> None:
    """Also the first device's, since its rank does not serve the store."""
    nodes.more = ("--steps", "1500", "--elastic")
    first, second = nodes.start(*FIRST), nodes.start(*SECOND)
    nodes.wait_for("step", 5)
    for times, command in enumerate((second, first)):
        os.kill(nodes.ranks(command)[0], signal.SIGKILL)
        nodes.wait_for("came", times + 1)
    assert first.wait(WITHIN_S) == 0 and second.wait(WITHIN_S) == 0
    assert [e["devices"] for e in nodes.events("lost")] == [["2"], ["0"]]
    for devices, lost in ((FIRST, "0"), (SECOND, "2")):
        said = f"{node.PROGRAM}: restarting device {lost!r}, which was ended by SIGKILL\n"
        assert nodes.err(devices).read_text() == said
    losses = nodes.losses()
    assert sorted(losses) == list(range(1500))
    np.testing.assert_allclose([losses[k] for k in range(20)], single(plan, 20), rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_that_is_lost_comes_back(how: signal.Signals, nodes: Nodes) -> None:
    """By the same command; no rank outlives the one that started it."""
    nodes.more = ("--steps", "2000", "--elastic")
    first, second = nodes.start(*FIRST), nodes.start(*SECOND)
    nodes.wait_for("step", 5)
    ranks = nodes.ranks(second)
    second.send_signal(how)
    assert second.wait(WITHIN_S) in (128 + how, -how)
    until = time.monotonic() + WITHIN_S
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < until
        time.sleep(0.05)
    again = nodes.start(*SECOND)
    assert again.wait(WITHIN_S) == 0 and first.wait(WITHIN_S) == 0
    assert {str(d) for e in nodes.events("came") for d in list(e["devices"])} == {"2", "3"}  # type: ignore[call-overload]
    assert sorted(nodes.losses()) == list(range(2000))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
def test_the_store_stays_where_all_ranks_of_its_node_are_lost(nodes: Nodes) -> None:
    """The others go on, and end it with the last of them."""
    nodes.more = ("--steps", "600", "--elastic")
    first, second = nodes.start("0", more=("--restarts", "0")), nodes.start("1", "2", "3")
    nodes.wait_for("step", 5)
    os.kill(nodes.ranks(first)[0], signal.SIGKILL)
    assert second.wait(WITHIN_S) == 0
    assert sorted(nodes.losses()) == list(range(600))
    assert first.wait(WITHIN_S) == 0
    assert (
        nodes.err(("0",)).read_text() == f"{node.PROGRAM}: the others continue without this node\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
def test_a_node_without_ranks_says_that_others_go_on(nodes: Nodes) -> None:
    """Its ranks were stopped for too long, and say so as they leave."""
    nodes.more = ("--steps", "100000", "--elastic", "--patience", "3", "--restarts", "0")
    first, second = nodes.start(*FIRST), nodes.start(*SECOND)
    nodes.wait_for("step", 5)
    ranks = nodes.ranks(second)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    nodes.wait_for("lost", 1)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    assert second.wait(WITHIN_S) == LEFT and first.poll() is None
    said = nodes.err(SECOND).read_text().splitlines()
    assert said[-1] == f"{node.PROGRAM}: the others continue without this node" and len(said) > 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
def test_where_nobody_is_left_nobody_is_started_again(nodes: Nodes) -> None:
    """All of the plan's devices are here, and all are killed: it ends, and says how."""
    nodes.more = ("--steps", "100000", "--elastic")
    only = nodes.start(*FIRST, *SECOND)
    nodes.wait_for("step", 5)
    for rank in nodes.ranks(only):
        os.kill(rank, signal.SIGKILL)
    assert only.wait(WITHIN_S) == FAILED
    said = nodes.err((*FIRST, *SECOND)).read_text()
    assert "was ended by SIGKILL" in said and "restarting" not in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
def test_others_read_why_the_first_node_was_told_to_end(nodes: Nodes) -> None:
    """It serves the store until they have."""
    nodes.more = ("--steps", "100000")
    first, second = nodes.start(*FIRST), nodes.start(*SECOND)
    nodes.wait_for("step", 3)
    first.terminate()
    first.terminate()
    assert first.wait(WITHIN_S) == 128 + signal.SIGTERM
    assert second.wait(WITHIN_S) == FAILED
    assert "was told to end" in nodes.err(SECOND).read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes as Linux tells of them")
def test_a_store_that_answers_no_more_holds_up_no_command(nodes: Nodes) -> None:
    """Stopped with the node that serves it: the other one ends when it is told to."""
    nodes.more = ("--steps", "100000", "--elastic")
    first, second = nodes.start(*FIRST), nodes.start(*SECOND)
    nodes.wait_for("step", 5)
    os.kill(nodes.ranks(second)[0], signal.SIGKILL)
    nodes.wait_for("came", 1)
    first.send_signal(signal.SIGSTOP)
    os.kill(nodes.ranks(second)[0], signal.SIGKILL)
    time.sleep(2.0)
    second.terminate()
    assert second.wait(WITHIN_S) == 128 + signal.SIGTERM
    first.kill()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--devices", "0", "9"], "--devices: the plan has no device '9'"),
        (["--devices", "0", "0"], "a device is named twice"),
        (["--devices", "0", "--elastic", "--own-pace"], "--elastic conflicts with --own-pace"),
        (["--devices", "0", "--restarts", "-1"], "--restarts is -1; give 0 or more"),
        (["--devices", "0", "--restarts", "1"], "--restarts is for --elastic"),
        (["--devices", "0", "--bind", "203.0.113.7"], "203.0.113.7"),
        (
            ["--devices", "0", "--data", "texts", "--checkpoint", "texts/kept"],
            "--checkpoint texts/kept: is in the folder of --data, of which all files are read",
        ),
        (
            ["--devices", "0", "--eval-data", "texts", "--export", "texts"],
            "--export texts: is in the folder of --eval-data",
        ),
    ],
)
def test_what_is_refused(
    words: list[str],
    line: str,
    plan: TrainingPlan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, before any rank is started."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("PLANNER_BIND", raising=False)
    started: list[object] = []
    monkeypatch.setattr(node, "run_local", lambda *how, **more: started.append(how))
    save_plan(plan, tmp_path / "plan.json")
    assert node.main([str(tmp_path / "plan.json"), *words]) == 2
    said = capsys.readouterr().err
    assert not started
    assert line in said and said.startswith("planner.executor.node: ") and said.count("\n") == 1


def test_no_address_is_refused(
    plan: TrainingPlan,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says which variables."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    save_plan(plan.replace(wiring=Wiring.FIXED), tmp_path / "plan.json")
    assert node.main([str(tmp_path / "plan.json"), "--devices", "0"]) == 2
    assert "MASTER_ADDR and MASTER_PORT must say where the store is" in capsys.readouterr().err
