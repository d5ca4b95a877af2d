"""A rank is its device by name; whatever does not fit is one clear line."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from planner.training_plan.file import load_plan, save_plan
from tests.conftest import make_plan
from tests.executor.launch import torchrun

torch = pytest.importorskip("torch")

import planner.executor.__main__ as entry  # noqa: E402
import planner.executor.launch.setup as prepared  # noqa: E402
from planner.executor.launch.arguments import parse_arguments  # noqa: E402
from planner.executor.rendezvous.rank_group import RankGroup  # noqa: E402


def test_rank_is_the_named_device_not_the_local_process() -> None:
    """Local process 0 of a node that names device 2 first is rank 2."""
    from planner.executor.rendezvous.rank_assignment import assigned_rank

    plan = make_plan([[0, 1], [2, 3]])
    assert assigned_rank(plan, ["2", "0"], 0) == 2
    assert assigned_rank(plan, ["2", "0"], 1) == 0


def test_the_plan_names_interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment goes before it; one that this machine has not ends the rank."""
    from planner.executor.rendezvous.address import INTERFACE, own_address
    from planner.executor.rendezvous.rank_assignment import (
        RankAssignmentError,
        use_planned_interface,
    )

    plan = make_plan([[0, 1], [2, 3]])
    devices = replace(plan.cluster.devices, interfaces=["lo", "", "none0", ""])
    plan = plan.replace(cluster=plan.cluster.replace(devices=devices))
    save_plan(plan, tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan.cluster.devices.interfaces == ("lo", "", "none0", "")
    assert plan.cluster.subset([2, 0]).devices.interfaces == ("none0", "lo")
    # far away, so that the way there is no loopback
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    for given, rank, wanted in (
        ("", 0, "lo"),
        ("", 1, ""),
        ("eth7", 0, "eth7"),
        ("eth7", 2, "eth7"),
    ):
        monkeypatch.setenv(INTERFACE, given)
        use_planned_interface(plan, rank)
        assert os.environ[INTERFACE] == wanted
        if wanted == "lo" and sys.platform == "linux":
            assert own_address() == "127.0.0.1"
    monkeypatch.setenv(INTERFACE, "")
    with pytest.raises(
        RankAssignmentError, match="device '2': the plan has it listen on none0, which"
    ):
        use_planned_interface(plan, 2)


@pytest.mark.parametrize(
    ("devices", "local", "message"),
    [
        (["7"], 0, "no device '7'"),
        (["1", "1"], 0, "named twice"),
        (["1"], 1, "--nproc-per-node"),
    ],
)
def test_bad_names_are_refused(devices: list[str], local: int, message: str) -> None:
    """Each with the rule and the remedy."""
    from planner.executor.rendezvous.rank_assignment import RankAssignmentError, assigned_rank

    with pytest.raises(RankAssignmentError, match=message):
        assigned_rank(make_plan([[0, 1]]), devices, local)


def test_several_names_need_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process alone it is not asked."""
    from planner.executor.rendezvous.rank_assignment import RankAssignmentError, local_rank

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert local_rank(["a"]) == 0
    with pytest.raises(
        RankAssignmentError, match="names 2 devices and this is one process; name its"
    ):
        local_rank(["a", "b"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_rank(["a", "b"]) == 1


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", "abc"), ("WORLD_SIZE", "-1")])
def test_numbers_of_the_launcher_are_checked(
    name: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line and exit code 2, no traceback."""
    path = tmp_path / "plan.json"
    save_plan(make_plan([[0, 1]]), path)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("planner.executor.fault_tolerance.failure_detector.PUBLISH_S", 0.0)
    before = sys.getswitchinterval()
    try:
        assert entry.main([str(path), "--devices", "0", "--device", "cpu"]) == 2
    finally:
        sys.setswitchinterval(before)
    found = capfd.readouterr().err
    assert f"{name} is '{value}'; it must be a number from 0" in found and found.count("\n") == 1


def test_wrong_number_of_processes_is_refused(tmp_path: Path) -> None:
    """One process for a plan of two devices ends with exit code 2 in the rank and one line."""
    path = tmp_path / "plan.json"
    save_plan(make_plan([[0, 1]]), path)
    done = torchrun(1, "-m", "planner.executor", str(path), "--devices", "0")
    assert done.returncode != 0
    assert "has 2 devices but torchrun starts 1 processes" in done.stderr


def test_ranks_told_something_else_do_not_train_together() -> None:
    """What changes numbers, or is done together; a file may be elsewhere on another node."""

    def settings(*more: str) -> str:
        config = parse_arguments(["plan.json", "--devices", "a", *more], None)
        return config.shared_settings()

    for more in (
        ("--learning-rate", "0.5"),
        ("--optimizer", "sgd"),
        ("--calibrate", "times.json"),
        ("--trace", "trace.json"),
        ("--data", "text"),
    ):
        assert settings(*more) != settings()
    assert settings("--data", "here") == settings("--data", "there")


def test_what_is_switched_off_conflicts_with_nothing() -> None:
    """And reaches a rank as it was given."""
    words = ["plan.json", "--devices", "a", "--no-compile", "--impose", "--rest", "2"]
    config = parse_arguments(words, None)
    config.validate()
    assert config.to_arguments() == words
    assert parse_arguments(config.to_arguments(), None) == config


@pytest.mark.parametrize(
    ("mine", "first", "said"),
    [
        (["--steps", "3"], ["--steps", "4"], "was given --steps 3 but device 'a' --steps 4;"),
        ([], ["--elastic"], "was given no --elastic but device 'a' --elastic;"),
        (["--data", "x"], [], "was given --data but device 'a' no --data;"),
        (["--warmup", "2"], [], "was given --warmup 2 but device 'a' --warmup 0;"),
        (
            [],
            ["--direct", "gloo"],
            "was given no --direct but device 'a' --direct gloo;",
        ),
    ],
)
def test_one_option_that_differs_is_named(mine: list[str], first: list[str], said: str) -> None:
    """And none of the others."""
    from planner.executor.rendezvous.rank_assignment import RankAssignmentError
    from planner.executor.rendezvous.rendezvous import _require_same_settings

    def told(words: list[str]) -> dict[str, str]:
        config = parse_arguments(["plan.json", "--devices", "a", *words], None)
        return {"plan": "p", "settings": config.shared_settings(), "secret": "none"}

    store = torch.distributed.HashStore()
    _require_same_settings(store, "a", told(first))
    _require_same_settings(store, "b", told(first))
    with pytest.raises(RankAssignmentError, match=f"^device 'b' {said}"):
        _require_same_settings(store, "b", told(mine))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--every", "5"], "--every is for --checkpoint; add that, or leave it out"),
        (["--shuffle", "5"], "--shuffle is for --data; add that, or leave it out"),
        (
            ["--schedule-steps", "5"],
            "--schedule-steps is for --schedule cosine; add that, or leave it out",
        ),
        (
            ["--optimizer", "sgd", "--weight-decay", "0.1"],
            "--weight-decay is for --optimizer adamw; add that, or leave it out",
        ),
        (["--eval-every", "5"], "--eval-every is for --eval-data; add that, or leave it out"),
        (["--eval-batches", "5"], "--eval-batches is for --eval-data; add that, or leave it out"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words: list[str], said: str) -> None:
    """Those that say how something is done that is not asked for."""
    with pytest.raises(ValueError, match=f"^{said}$"):
        parse_arguments(["plan.json", "--devices", "a", *words], None).validate()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            torch.distributed.DistStoreError("wait timeout after 600000 ms\nframe #0: ..."),
            3,
            "device '0' lost the store (wait timeout after 600000 ms)",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "t.json"), 3, "t.json: No space left"),
        # both ends of a connection may be told of its loss in many ways
        (OSError(errno.ENOTCONN, "not connected"), 3, "a connection is lost"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), 3, "a connection is lost"),
        (TimeoutError(errno.ETIMEDOUT, "timed out", "/nfs/text"), 2, "'/nfs/text'; check paths"),
        (FileNotFoundError(2, "No such file or directory", "text"), 2, "directory: 'text'; check"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_ranks_end_in_a_line_at_most(
    error: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The store is gone, a file is missing, or Ctrl-C."""
    path = tmp_path / "plan.json"
    save_plan(make_plan([[0, 1]]), path)

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(prepared, "rendezvous", fails)
    monkeypatch.setattr("planner.executor.fault_tolerance.failure_detector.EXIT_CAUSE_S", 0.0)
    monkeypatch.setattr("planner.executor.fault_tolerance.failure_detector.PUBLISH_S", 0.0)
    before = sys.getswitchinterval()
    try:
        assert entry.main([str(path), "--devices", "0", "--device", "cpu"]) == code
    finally:
        sys.setswitchinterval(before)
    found = capfd.readouterr().err
    assert said in found and found.count("\n") == bool(said)


class CountingStore:
    """A store that lists the operations that cost a round trip."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._store = torch.distributed.HashStore()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._store, name)


def test_a_barrier_costs_one_round_trip_after_the_last_rank() -> None:
    """Steps start after barriers, over links whose round trips take long."""
    store = CountingStore()
    RankGroup(0, 1, cast(Any, store)).barrier("all")
    assert store.calls == ["add", "set", "wait"]
