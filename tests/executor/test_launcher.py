"""The launcher with processes that are no ranks: restarts, output, and a store that is silent."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import (
    FAILED,
    HINT,
    LEFT,
    PREFIX,
    REFUSED,
    Shutdown,
)
from planner.executor.launch import local
from planner.executor.launch.process import run_rank
from planner.executor.transport.store import StoreAddress, call_with_timeout
from planner.utils.refusal import Refusal

NOWHERE = StoreAddress("127.0.0.1", 1, served_by_launcher=True)


class Continues:
    """Of a run that goes on on other nodes, whatever happens here."""

    started, finished, aborted, ranks = True, False, False, 9

    @property
    def answered_s(self) -> float:
        """Just now."""
        return time.monotonic()

    def polled_since(self, since_s: float) -> bool:
        """Always."""
        return True


def run_script(script: str, names: list[str], **options: Any) -> tuple[int, list[str], list[str]]:
    """Exit code, lines and errors of processes that run a script."""
    lines: list[str] = []
    errors: list[str] = []
    command = [sys.executable, "-c", script]
    options = {"address": NOWHERE} | options
    code, _ = local.run_local(
        command, names, dict(os.environ), lines.append, errors.append, **options
    )
    return code, lines, errors


def run_elastic(script: str, restarts: int) -> tuple[int, list[str], list[str]]:
    """The same, in an elastic run that continues elsewhere."""
    return run_script(script, ["a"], restarts=restarts, monitor=Continues())


@pytest.mark.parametrize(
    ("error", "code"), [(Refusal("no"), REFUSED), (ValueError("no"), LEFT)], ids=["input", "bug"]
)
def test_a_refusal_after_a_rejoin_is_final(error: Exception, code: int) -> None:
    """What would be refused again is not restarted; what may succeed the next time is."""

    def fail() -> int:
        raise error

    detector = FailureDetector("a", Shutdown())
    detector.on_rank_lost = lambda *_: None
    assert run_rank("a", detector, fail) == code


def test_a_refused_rank_is_not_restarted() -> None:
    """And its exit code is the command's; other ranks of the node go on."""
    code, lines, errors = run_elastic("print('ran'); raise SystemExit(2)", restarts=3)
    assert (code, lines) == (REFUSED, ["ran"])
    assert errors == [f"{PREFIX}a rank exited without an error message"]
    other = (
        "import os, time\n"
        "if os.environ['LOCAL_RANK'] == '0': raise SystemExit(2)\n"
        "time.sleep(2); print('done')"
    )
    found = run_script(other, ["a", "b"], restarts=3, monitor=Continues())
    assert found == (0, ["done"], [])


def test_a_restart_waits_for_no_child_of_the_lost_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which holds its pipes open; what the process itself has written is read."""
    monkeypatch.setattr(local, "RESTART_DELAY_S", 0.1)
    flag = tmp_path / "started"
    script = (
        "import pathlib, subprocess\n"
        f"flag = pathlib.Path({str(flag)!r})\n"
        "if flag.exists(): print('again'); raise SystemExit(0)\n"
        "flag.touch(); subprocess.Popen(['sleep', '30'])\n"
        "print('first', end='', flush=True); raise SystemExit(1)"
    )
    begin_s = time.monotonic()
    code, lines, errors = run_elastic(script, restarts=1)
    assert time.monotonic() - begin_s < 15.0
    assert (code, lines) == (0, ["first", "again"])
    assert errors == ["planner run: restarting device 'a', which ended with exit code 1"]


def test_a_stopped_rank_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost, the others have finished, and it would never end."""
    monkeypatch.setattr(Continues, "finished", True)
    script = (
        "import os, signal\n"
        "if os.environ['LOCAL_RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print('done')"
    )
    found = run_script(script, ["a", "b"], restarts=3, monitor=Continues())
    assert found == (0, ["done"], ["planner run: ending device 'b', which is stopped"])


def test_a_reason_is_printed_once() -> None:
    """Whether or not a rank knows of a checkpoint to continue from."""
    script = (
        "import os, sys, time\n"
        "second = os.environ['LOCAL_RANK'] == '1'\n"
        "time.sleep(second)\n"
        f"hint = '{HINT}5 steps with --resume x' * second\n"
        f"print('{PREFIX}no' + hint, file=sys.stderr); raise SystemExit(2)"
    )
    _, _, errors = run_script(script, ["a", "b"], restarts=0, monitor=Continues())
    assert errors == [f"{PREFIX}no"]


def test_a_store_that_is_silent_holds_up_no_end() -> None:
    """Where the signal that ended a rank cannot be published."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = StoreAddress("127.0.0.1", server.getsockname()[1], served_by_launcher=True)
        begin_s = time.monotonic()
        script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        code, _, errors = run_script(script, ["a"], address=address)
        assert time.monotonic() - begin_s < 5.0
    assert code == FAILED
    assert errors == [f"{PREFIX}device 'a' was ended by SIGKILL; see whether memory ran out"]


def test_a_timeout_is_not_a_value() -> None:
    """A function that returns None in time is told from one that does not return."""
    assert call_with_timeout(5.0, lambda: None) is None
    with pytest.raises(TimeoutError):
        call_with_timeout(0.1, lambda: time.sleep(5))
    with pytest.raises(ValueError, match="wrong"):
        call_with_timeout(5.0, lambda: int("wrong"))
