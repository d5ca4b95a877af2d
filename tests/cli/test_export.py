"""``planner export``, end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.exports.formats import FORMATS, export_plan
from planner.training_plan.file import load_plan, save_plan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import make_plan, tiny_workload


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipelines of three stages of a LLaMA."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(make_plan([[0, 5, 2], [3, 1, 4]], workload=tiny_workload("llama")), path)
    return path


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_is_printed_and_written(
    plan_file: Path, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same text as in Python; nodes find the plan where the command did."""
    if to == "torchft":
        local = load_plan(plan_file).replace(sync=Sync(5, OuterOptimizer()))
        plan_file = tmp_path / "local.json"
        save_plan(local, plan_file)
    plan, out = load_plan(plan_file), tmp_path / "out"
    more = {"plan_path": str(plan_file)} if "plan_path" in FORMATS[to].reads else {}
    text = export_plan(plan, to, **more)
    assert main(["export", str(plan_file), "--to", to]) == 0
    assert capsys.readouterr().out == text.removesuffix("\n") + "\n"
    assert main(["export", str(plan_file), "--to", to, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"format": to, "written": str(out)}
    assert out.read_text() == text


def test_hosts_file(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lines for two hosts."""
    hosts = tmp_path / "hosts.csv"
    hosts.write_text("device,host\n" + "".join(f"{d},{'ab'[d % 2]}\n" for d in range(6)))
    words = ["export", str(plan_file), "--to", "torchrun", "--hosts", str(hosts)]
    assert main([*words, "--interface", "eth1", "--executor-options=--steps 3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[2]] == ["# a", "# b"]
    assert lines[1].startswith("GLOO_SOCKET_IFNAME=eth1 torchrun --nnodes 2 --node-rank 0 ")
    assert lines[3].endswith(f"{plan_file} --devices 1 3 5 --steps 3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stpes 3", "unrecognized arguments: --stpes 3"),
        ("--steps many", "--steps: must be a whole number, found 'many'"),
        ("--elastic", "torchrun would end all ranks of a node when one fails"),
        ("--devices 0", "--devices differs from host to host"),
        ("--bind 10.0.0.1", "--bind differs from host to host"),
        ("--help", "--help is not allowed"),
        ("--learning-rate -1", "learning_rate is -1.0"),
        ("--move zzz", "zzz"),
        ("--impose --checkpoint kept", "--impose runs no model; leave out --checkpoint"),
    ],
)
def test_invalid_executor_options_are_rejected(
    words: str, said: str, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before they are sent to nodes."""
    line = ["export", str(plan_file), "--to", "torchrun", f"--executor-options={words}"]
    assert main(line) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err
    assert printed.err.count("\n") == 1


def test_options_of_the_node_launcher_are_passed_on(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the executor's own command does; torchrun does not know them."""
    line = ["export", str(plan_file), "--executor-options=--elastic --restarts 1 --no-store"]
    for to in ("nodes", "slurm"):
        assert main([*line, "--to", to]) == 0
        assert capsys.readouterr().out.count("--elastic --restarts 1 --no-store") == 6
    for words, to, said in (
        ("--restarts 1", "nodes", "--restarts is for --elastic"),
        ("--elastic --restarts -1", "nodes", "--restarts is -1"),
        ("--restarts x", "nodes", "--restarts"),
        ("--no-store", "slurm", "--no-store"),
        ("--no-store", "torchrun", "--no-store"),
    ):
        assert main(["export", str(plan_file), "--to", to, f"--executor-options={words}"]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and said in printed.err and printed.err.count("\n") == 1


def test_executor_options_are_not_checked_without_pytorch(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs PyTorch, which who plans may not have."""
    monkeypatch.setitem(sys.modules, "planner.executor.launch.arguments", None)
    line = ["export", str(plan_file), "--to", "torchrun", "--executor-options=--steps 3"]
    assert main(line) == 0
    assert "--steps 3" in capsys.readouterr().out


def test_several_hosts_without_an_interface_get_a_comment(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a comment; one host has nothing to choose."""
    hosts = tmp_path / "hosts.csv"
    for names, told in (("ab", True), ("aa", False)):
        hosts.write_text("device,host\n" + "".join(f"{d},{names[d % 2]}\n" for d in range(6)))
        for to in ("torchrun", "slurm"):
            assert main(["export", str(plan_file), "--to", to, "--hosts", str(hosts)]) == 0
            assert ("set --interface" in capsys.readouterr().out) is told


def test_errors_write_nothing_and_exit_with_2(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr; files that are read stay as they are."""
    before, out = plan_file.read_bytes(), tmp_path / "out"
    for more, said in (
        (["--to", "megatron", "--pipeline", "0"], "megatron does not use pipeline"),
        (["--to", "torch-pipelining", "--pipeline", "7"], "must be 0 to 1 for this plan"),
        (["--to", "ranks", "--hosts", str(tmp_path / "none.csv")], "cannot be read"),
    ):
        assert main(["export", str(plan_file), *more, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not out.exists()
    assert main(["export", str(plan_file), "--to", "ranks", "--out", str(plan_file)]) == 2
    assert "is also an input" in capsys.readouterr().err
    assert plan_file.read_bytes() == before
