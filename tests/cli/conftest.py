"""Commands run where nothing lies: a plan.json of the user's own must not change what is tested."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the working directory."""
    monkeypatch.chdir(tmp_path)
