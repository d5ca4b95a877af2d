"""A rank as of ``python -m planner.executor`` whose device has memory of its own, as a GPU has."""

from __future__ import annotations

from collections.abc import Sequence

from planner.executor import __main__
from planner.executor.runtime import model_stage
from tests.executor.test_device_backend import late_backend


def main(words: Sequence[str]) -> int:
    """Run the rank."""
    model_stage.make_backend = lambda device: late_backend()  # type: ignore[assignment]
    return __main__.main(words)
