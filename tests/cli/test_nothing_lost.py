"""Ctrl-C, full disks, kills and mistyped file names do not lose results."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from planner.checker.dispatch import check
from planner.cli import partial_output
from planner.cli.arguments import Reporting
from planner.cli.main import main
from planner.planning.joint.joint_search import JointSearch
from planner.planning.joint.layout_search import LayoutSearch
from planner.problems import ProblemError
from planner.search.interrupts import INTERRUPTS
from planner.search.stop import MaxIterations, SearchRun
from planner.training_plan import file as plan_files
from planner.training_plan.file import load_plan, save_plan
from planner.utils import atomic_write
from planner.utils.output_files import has_mark

QUICK = [
    *("plan", "--network", "aws4_dtfm_regional_2022", "--workload", "gpt2-tiny"),
    *("--sequence", "64", "--batch-samples", "8", "--effort", "0.2", "--no-compare"),
]

LONG = [
    *("plan", "--network", "aws4_dtfm_regional_2022", "--workload", "gpt3-1.3b"),
    *("--batch-samples", "16", "--effort", "1", "--no-compare"),
]
"""Not solved at once."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, which nobody writes to."""
    path = tmp_path_factory.mktemp("made") / "plan.json"
    assert main([*QUICK, "--no-pictures", "--out", str(path)]) == 0
    return path


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the plan, a network and peers, in which commands run."""
    shutil.copy(made, tmp_path / "plan.json")
    (tmp_path / "net.csv").write_text(
        "source,destination,latency_ms,bandwidth_mbps\na,b,10,100\nb,a,10,100\n"
    )
    (tmp_path / "peers.csv").write_text(
        "name,samples_per_s,upload_mbps,download_mbps\na,2,100,100\nb,1,100,100\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


BENCHED = "averaging/table1a"
AVERAGE = "average peers.csv --workload gpt2-tiny --sequence 64 --batch-samples 8 --out"
COMMANDS = {
    f"{' '.join(QUICK)} --no-pictures --out": "out.json",
    f"{' '.join(QUICK)} --no-pictures --out new.json --report": "out.html",
    f"{AVERAGE}": "out.json",
    "simulate plan.json --trace": "out.json",
    "simulate plan.json --gantt": "out.png",
    "report plan.json --out": "out.html",
    "export plan.json --to torchrun --out": "out.json",
    "networks net.csv --out": "out.csv",
    f"bench --only {BENCHED} --methods ours --markdown": "out.md",
}
"""Words before the name of a file, and such a name."""


def told(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    capsys.readouterr()
    code = main(words.split())
    return code, capsys.readouterr().err


@pytest.mark.parametrize("words", COMMANDS)
def test_files_of_others_are_not_overwritten(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused in one line, before the work."""
    path = here / COMMANDS[words]
    path.write_text("mine")
    code, said = told(f"{words} {path.name}", capsys)
    assert code == 2 and "exists, and" in said and "--force" in said and said.count("\n") == 1
    assert path.read_text() == "mine"


@pytest.mark.parametrize("words", [w for w in COMMANDS if "bench" not in w])
@pytest.mark.parametrize("kind", ["link", "hard link", "relative"])
def test_inputs_are_not_overwritten(
    words: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whatever name, and with ``--force`` too."""
    path = here / COMMANDS[words]
    read = here / next((w for w in words.split() if w in ("peers.csv", "net.csv")), "plan.json")
    if "plan.json" not in words and not words.startswith(("average", "networks")):
        words = words.replace("aws4_dtfm_regional_2022", "net.csv")
        read = here / "net.csv"
    before = read.read_bytes()
    name = path.name
    if kind == "link":
        path.symlink_to(read)
    elif kind == "hard link":
        path.hardlink_to(read)
    else:
        read.rename(here / f"read{path.suffix}")
        words = words.replace(read.name, f"read{path.suffix}")
        read = here / f"read{path.suffix}"
        name = f"../{here.name}/{read.name}"
    code, said = told(f"{words} {name} --force", capsys)
    assert code == 2 and "is also an input" in said
    assert read.read_bytes() == before


@pytest.mark.parametrize("words", [w for w in COMMANDS if "bench" not in w])
def test_rerun_overwrites_its_own_files(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other files need ``--force``."""
    path = here / COMMANDS[words]
    assert told(f"{words} {path.name}", capsys)[0] == 0
    path.touch()
    again = told(f"{words} {path.name}", capsys)[0]
    assert again == (2 if words.startswith("export") else 0)
    path.write_text("mine")
    assert told(f"{words} {path.name} --force", capsys)[0] == 0
    assert path.read_bytes() != b"mine"


def test_two_outputs_with_the_same_path(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if one path is derived from another option, as the trace's is."""
    code, said = told("simulate plan.json --trace a.json --gantt b.png", capsys)
    assert code == 0
    (here / "c.png").symlink_to(here / "a.json")
    code, said = told("simulate plan.json --trace a.json --gantt c.png", capsys)
    assert code == 2 and "--trace names it too" in said
    (here / "new.gantt.png").write_text("mine")
    code, said = told(f"{' '.join(QUICK)} --out new.json", capsys)
    assert code == 2 and "new.gantt.png: exists" in said and not (here / "new.json").exists()


def test_symbolic_link_is_kept(here: Path) -> None:
    """Its target is written."""
    (here / "kept.json").write_text("")
    (here / "link.json").symlink_to(here / "kept.json")
    save_plan(load_plan(here / "plan.json"), here / "link.json")
    assert (here / "link.json").is_symlink()
    assert load_plan(here / "kept.json") == load_plan(here / "plan.json")


def test_own_files_are_recognised_by_beginning_or_end(tmp_path: Path) -> None:
    """An empty file may be overwritten."""
    path = tmp_path / "file"
    assert has_mark(path, "") and has_mark(path, "mark")
    path.write_bytes(b"")
    assert has_mark(path, "mark")
    for data in (b"mark" + bytes(50_000), bytes(50_000) + b"mark", b"a mark"):
        path.write_bytes(data)
        assert has_mark(path, "mark") and has_mark(path, ["other", "mark"])
        assert not has_mark(path, "other") and not has_mark(path, ())
    path.write_bytes(bytes(50_000) + b"mark" + bytes(50_000))
    assert not has_mark(path, "mark")


def interrupt(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Send these signals in a search, once there is something."""
    waiting = list(numbers)

    def reason(_: Reporting, run: SearchRun) -> str | None:
        if run.objective is not None and waiting:
            os.kill(os.getpid(), waiting.pop(0))
        return None

    monkeypatch.setattr(Reporting, "reason", reason)


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
        ([signal.SIGTERM, signal.SIGINT], 143),
    ],
)
def test_signals_during_a_search_keep_the_incumbent(
    numbers: list[int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, valid, and the exit code says that it is not all."""
    interrupt(monkeypatch, *numbers)
    path = tmp_path / "plan.json"
    assert main([*LONG, "--out", str(path)]) == code
    assert check(load_plan(path)) == []
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
    assert not INTERRUPTS.requested


def test_signals_before_the_first_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends the layout search, the second arrives during the first evaluation."""
    calls: list[int] = []
    search, price = LayoutSearch.annealed, JointSearch._evaluate_fallback

    def anneal(self: LayoutSearch, *given: Any) -> Any:
        found = search(self, *given)
        calls.append(0)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    def anything(self: JointSearch) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        price(self)

    monkeypatch.setattr(LayoutSearch, "annealed", anneal)
    monkeypatch.setattr(JointSearch, "_evaluate_fallback", anything)
    path = tmp_path / "plan.json"
    assert main([*LONG, "--out", str(path)]) == 130
    assert len(calls) == 3 and check(load_plan(path)) == []


def test_signal_while_the_plan_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is noted, and what is optional is left out."""

    def slow(plan: Any, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        save_plan(plan, path)

    monkeypatch.setattr(plan_files, "save_plan", slow)
    path = tmp_path / "plan.json"
    assert main([*QUICK, "--out", str(path)]) == 130
    assert check(load_plan(path)) == []
    assert "not drawn: interrupted" in capsys.readouterr().out


def test_effect_of_each_signal() -> None:
    """The first raises if nothing was found, otherwise only where allowed; the third raises."""
    with INTERRUPTS.handling("noted"):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert INTERRUPTS.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with INTERRUPTS.handling("noted"):
        INTERRUPTS.has_plan = True
        run = MaxIterations(10).start()
        assert run.check() is None
        os.kill(os.getpid(), signal.SIGINT)
        assert run.check() == "interrupted" and run.remaining_iterations == 0
        with run.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), run.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
    with INTERRUPTS.handling("noted"):
        run = MaxIterations(10).start()
        with run.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError
        os.kill(os.getpid(), signal.SIGINT)  # what the search has is made an answer of
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with INTERRUPTS.handling("noted"):
        INTERRUPTS.has_plan = True
        run = MaxIterations(10).start()
        with run.interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError
        assert run.reason == "interrupted" and INTERRUPTS.number == signal.SIGTERM
    assert not INTERRUPTS.requested and MaxIterations(10).start().check() is None


def test_ignored_signals_stay_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with INTERRUPTS.handling("noted"):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            assert not INTERRUPTS.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was found is written elsewhere, and the line says where; a file that was there stays."""
    full, room = tmp_path / "full", tmp_path / "room"
    for folder in (full, room):
        folder.mkdir()
    assert main([*QUICK, "--no-pictures", "--out", str(full / "plan.json")]) == 0
    before = (full / "plan.json").read_bytes()
    replace = Path.replace

    def no_room(self: Path, target: Path) -> Path:
        if target.parent == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", no_room)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(room))
    capsys.readouterr()
    assert main([*QUICK, "--json", "--seed", "1", "--out", str(full / "plan.json")]) == 2
    printed = capsys.readouterr()
    (found,) = json.loads(printed.out)["written"]
    assert f"No space left on device; written to {found}" in printed.err
    assert check(load_plan(found)) == [] and room in Path(found).parents
    assert (full / "plan.json").read_bytes() == before
    assert [one.name for one in full.iterdir()] == ["plan.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_standard_output(made: Path) -> None:
    """One line, and no traceback at exit."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "planner.cli", "networks"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == (
        "planner networks: standard output: No space left on device; free some room\n"
    )


def test_a_refused_plan_leaves_no_incumbent_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the search if the request shows it; and where a search finds it out."""
    monkeypatch.setattr(partial_output, "EVERY_S", 0.0)
    shape = ["--stages", "3", "--wiring", "flow", "--out", str(tmp_path / "plan.json")]
    compared = [word for word in LONG if word != "--no-compare"]
    with monkeypatch.context() as patch:
        patch.setattr("planner.planning.solve.Baselines.of", None)  # not called
        assert main([*compared, *shape, "--recompute", "0,9"]) == 2
    assert "recompute names stage 9; stages are 0 to 2" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(JointSearch, "result", MagicMock(side_effect=ProblemError("too large")))
        assert main([*compared, "--out", str(tmp_path / "plan.json")]) == 2
    assert not list(tmp_path.iterdir())


def test_incumbents_have_the_requested_number_of_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of straight pipelines, which are searched first."""
    found: list[int] = []
    monkeypatch.setattr(
        partial_output.IncumbentFile,
        "offer",
        lambda self, objective, plan: found.append(len(plan.stage_layers)),
    )
    compared = [word for word in LONG if word != "--no-compare"]
    out = ["--no-pictures", "--out", str(tmp_path / "plan.json")]
    assert main([*compared, *out, "--stages", "3", "--wiring", "flow"]) == 0
    assert set(found) == {3}


@pytest.mark.parametrize("more", [[], ["--stages", "2", "--random-placements", "0"]])
def test_kill_keeps_the_incumbent_file(
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beside the output, as a plan; the next run says so, and keeps it under another name."""
    monkeypatch.setattr(partial_output, "EVERY_S", 0.0)

    def killed(plan: Any, path: Path) -> None:
        raise MemoryError

    path, part = tmp_path / "plan.json", tmp_path / "plan.part.json"
    with monkeypatch.context() as patch:
        patch.setattr(plan_files, "save_plan", killed)
        with pytest.raises(MemoryError):
            main([*LONG, *more, "--out", str(path)])
    assert check(load_plan(part)) == []
    assert [one.name for one in tmp_path.iterdir()] == [part.name]
    capsys.readouterr()
    assert main([*LONG, *more, "--no-pictures", "--out", str(path)]) == 0
    killed_file = tmp_path / "plan.killed.json"
    assert f"{killed_file}: best result of an earlier search" in capsys.readouterr().err
    assert check(load_plan(killed_file)) == []
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name, killed_file.name]
    part.write_text("")
    partial_output.IncumbentFile(path, bool, str)
    assert (tmp_path / "plan.killed1.json").exists() and load_plan(killed_file)


def test_stale_temporary_files_are_deleted(tmp_path: Path) -> None:
    """Unless they are recent or still being written."""
    path = tmp_path / "file.txt"
    old, young, held, other = (
        tmp_path / name
        for name in (".file.txt.abcdefgh", ".file.txt.ijklmnop", ".file.txt.qrstuvwx", ".file.txt")
    )
    for one in (old, young, held, other):
        one.write_text("half")
        if one is not young:
            os.utime(one, (time.time() - 60,) * 2)
    with held.open("rb") as file:
        assert atomic_write._hold(file)
        atomic_write.write_text(path, "whole")
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == sorted([path, young, held, other])
    young.unlink()
    atomic_write.write_text(path, "again")
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


PARETO = [
    *("pareto", "--network", "aws4_dtfm_regional_2022", "--workload", "gpt3-1.3b"),
    *("--batch-samples", "16", "--effort", "0.05"),
]


def test_pareto_deletes_only_its_own_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that its table names; and nothing of others is written over."""
    assert main([*PARETO, "--worth", "inf,0", "--out", str(tmp_path)]) == 0
    mine = tmp_path / "plan-mine.json"
    mine.write_text("mine")
    (tmp_path / "plan-7.json").write_text("mine too")
    capsys.readouterr()
    assert main([*PARETO, "--worth", "inf", "--out", str(tmp_path)]) == 2
    assert "plan-7.json: exists, and" in capsys.readouterr().err
    (tmp_path / "plan-7.json").unlink()
    assert main([*PARETO, "--worth", "inf", "--out", str(tmp_path)]) == 0
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"front.csv", "front.png", "plan-1.json", "plan-mine.json"}
    assert mine.read_text() == "mine"


def test_interrupted_pareto_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of its searches, whole."""
    interrupt(monkeypatch, signal.SIGINT)
    assert main([*PARETO, "--out", str(tmp_path)]) == 130
    assert check(load_plan(tmp_path / "plan-1.json")) == []
    assert len((tmp_path / "front.csv").read_text().splitlines()) == 2


def test_interrupted_run_reports_finished_steps(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its JSON, with the reason."""
    from planner.executor.launch import local

    def run_local(*words: Any, **_: Any) -> None:
        event = {"event": "step", "step": 0, "took_s": 1.0, "tokens_per_s": 5.0}
        words[3](json.dumps(event | {"loss": None, "loss_step": None}))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(local, "run_local", run_local)
    monkeypatch.setattr("planner.cli.run_command.predict_on_host", lambda *_: [1.0])
    measured = SimpleNamespace(software={})
    monkeypatch.setattr("planner.cli.run_command.Calibration.load", lambda _: measured)
    words = ["run", str(made), "--json", "--calibration", "times.json"]
    assert main(words) == 143
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == "interrupted" and len(data["steps"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.3, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("times", [1, 2])
def test_interrupt_at_any_time(after_s: float, times: int, tmp_path: Path) -> None:
    """No traceback, no incomplete file; exit code 130, or 0 if the command completed."""
    command = [sys.executable, "-m", "planner.cli", *LONG, "--out", "plan.json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(after_s)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, error = process.communicate(timeout=300)
    assert process.returncode in (0, 130) and "Traceback" not in error
    if (tmp_path / "plan.json").exists():
        assert check(load_plan(tmp_path / "plan.json")) == [] and "wrote plan.json" in out
    assert not list(tmp_path.glob(".*"))


BENCH = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from planner.bench.task import start_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=start_worker)
    print(*{pool.submit(os.getpid).result() for _ in range(4)}, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_benchmark_leaves_no_process(tmp_path: Path) -> None:
    """Workers end with their parent: their output pipe closes only when the last one has ended."""
    script = tmp_path / "bench.py"
    script.write_text(BENCH)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split()
