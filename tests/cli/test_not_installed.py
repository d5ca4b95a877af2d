"""Missing or broken optional packages, checkouts that are not installed, and ranks on GPUs."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from planner.cli.main import _version, main
from planner.cli.run_command import _on_gpus


def test_version_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without package metadata, commands work and say that the package is not installed."""
    assert _version() == metadata.version("planner")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == "planner (not installed)"


@pytest.mark.parametrize("available", [False, True])
def test_ranks_on_gpus(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Ranks compute on GPUs where PyTorch finds one, unless the CPU is requested."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert _on_gpus("auto") is available
    assert _on_gpus("cuda") is available
    assert not _on_gpus("cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('raise OSError("libcudart.so.12: cannot open shared object file")', "libcudart.so.12: "),
        ('raise ImportError("undefined symbol:\\n_ZN3c10")', "undefined symbol: _ZN3c10"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("raise ValueError", "ValueError"),
    ],
)
def test_broken_package(
    text: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with its own words; no fault of the output or of the input."""
    (tmp_path / "shtab").mkdir()
    (tmp_path / "shtab/__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shtab", raising=False)
    assert main(["completion", "bash"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"planner completion: needs shtab, which cannot be loaded ({said}")
    assert line.endswith("); install it again: pip install shtab\n") and line.count("\n") == 1


def test_a_rank_without_pytorch() -> None:
    """One line, before any import fails."""
    code = (
        "import sys, importlib.util as u; sys.argv = ['-m']; u.find_spec = lambda name: None; "
        "import planner.executor"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    line = "planner.executor: needs torch, which is not installed; pip install torch\n"
    assert (done.returncode, done.stderr) == (2, line)
