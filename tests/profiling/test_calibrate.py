"""When each rank measures its compute times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.profiling import calibrate  # noqa: E402


def test_ranks_on_one_gpu_calibrate_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On others beside each other; on a processor as many as it has cores for."""
    told: list[str] = []

    def all_gather(name: str, text: str) -> list[str]:
        told.append(text)
        return told

    ranks: Any = SimpleNamespace(all_gather=all_gather)
    monkeypatch.setattr(calibrate, "machine_id", lambda: "b")
    monkeypatch.setattr(calibrate, "cores", lambda: 2 * torch.get_num_threads())
    for place in ("a 1", "a 2", "a 1", "cpu", "cpu", "a 1", "cpu"):
        monkeypatch.setattr(
            calibrate, "gpu_identity", lambda device, gpu=place: ("NVIDIA H100", gpu)
        )
        device = torch.device("cpu") if place == "cpu" else torch.device("cuda", 0)
        # whatever a rank computes on, it waits for the same word of all
        places = calibrate._places(ranks, device, 1)
    assert calibrate._turns(places) == [0, 0, 1, 0, 0, 2, 1]
