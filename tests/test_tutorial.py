"""The tutorial's commands work, in its order, on its own files."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from planner.cli.main import main, parser

DOCS = Path(__file__).parents[1] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text()
LATER = ("run",)
"""Commands that other tests run, and take long."""


def blocks(language: str) -> list[str]:
    """Fenced code of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TUTORIAL, re.M | re.S)


def test_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are written as it says, commands exit with 0, and print what it promises."""
    monkeypatch.chdir(tmp_path)
    printed: dict[str, str] = {}
    for block in blocks("sh"):
        if file := re.fullmatch(r"cat > (\S+) <<'END'\n(.*)END\n", block, re.S):
            (tmp_path / file[1]).write_text(file[2])
            continue
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line)[1:]
            if words[0] in LATER:
                parser().parse_args(words)
                continue
            assert main(words) == 0, line
            printed.setdefault(words[0], capsys.readouterr().out)
    assert "assumed: bandwidth of 26 ordered pairs" in printed["networks"]
    for promised in ("step time", "tokens/s", "lower bound", "cost", "busiest link", "ranks by"):
        assert promised in printed["plan"]
    assert "valid" in printed["check"] and "torchrun" in printed["export"]
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    (python,) = blocks("python")
    (tmp_path / "tutorial.py").write_text(python)
    runpy.run_path("tutorial.py")
    said = capsys.readouterr().out
    assert "Result(" not in said and "FEASIBLE" in said and "\n[]\n" in said
