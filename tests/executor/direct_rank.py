"""A rank whose machine is said, and whose library maybe never tells that its peer is gone.

The first word is JSON: `machines`, the name of each rank's, `hangs`, and what
`benchmarks.faults.rank` reads. Other words are for the executor.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch

from benchmarks.faults.rank import main
from planner.executor.comm import direct
from planner.executor.launch.options import Library
from planner.executor.launch.process import exit_now


class Hanging:
    """As NCCL: a call whose other end is gone never ends."""

    def __init__(self, group: direct.TransferBackend) -> None:
        self._group = group

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Begun, or not."""
        return self._begun(self._group.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Any:
        """Begun, or not."""
        return self._begun(self._group.recv, tensors, rank, tag)

    def wait(self) -> None:
        """Done, or never."""
        try:
            self._work.wait()
        except RuntimeError:
            threading.Event().wait()

    def _begun(self, way: Any, *how: Any) -> Hanging:
        made = Hanging(self._group)
        try:
            made._work = way(*how)
        except RuntimeError:
            threading.Event().wait()
        return made

    _work: Any = None


def pretend(machines: list[str], *, hangs: bool) -> None:
    """From now on in this process."""

    def place_of(library: Library, rank: int, device: torch.device) -> tuple[str, str]:
        return machines[rank], str(rank)

    setattr(direct, "gpu_location", place_of)  # noqa: B010
    if hangs:
        usual = direct._group
        setattr(direct, "_group", lambda *how: Hanging(usual(*how)))  # noqa: B010


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    pretend(told["machines"], hangs=told["hangs"])
    exit_now(main(sys.argv[1:]))
