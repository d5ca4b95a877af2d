"""Commands in a checkout that is not installed, and ranks on GPUs."""

from __future__ import annotations

from importlib import metadata

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
