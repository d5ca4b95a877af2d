"""Run command-line tests in an empty folder, so that a user's plan.json does not affect them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the working directory."""
    monkeypatch.chdir(tmp_path)
