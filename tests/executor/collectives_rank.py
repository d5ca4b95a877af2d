"""A rank whose machine is given, and whose library may wait for ever for a peer that is lost.

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
from planner.executor.comm import device_collectives
from planner.executor.comm.device_collectives import CollectiveLibrary
from planner.executor.launch.process import exit_now


class Hanging:
    """As NCCL: a collective with a lost member never ends."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        collective = getattr(self._group, name)

        def begun(*how: Any) -> Hanging:
            work = Hanging(self._group)
            try:
                work._work = collective(*how)
            except RuntimeError:
                threading.Event().wait()
            return work

        return begun

    def wait(self) -> None:
        """Wait for the collective, or for ever."""
        try:
            self._work.wait()
        except RuntimeError:
            threading.Event().wait()

    _work: Any = None


def pretend(machines: list[str], *, hangs: bool) -> None:
    """From now on in this process."""

    def location_of(library: CollectiveLibrary, rank: int, device: torch.device) -> tuple[str, str]:
        return machines[rank], str(rank)

    setattr(device_collectives, "gpu_location", location_of)  # noqa: B010
    if hangs:
        usual = device_collectives.make_process_group
        setattr(device_collectives, "make_process_group", lambda *how: Hanging(usual(*how)))  # noqa: B010


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    pretend(options["machines"], hangs=options["hangs"])
    exit_now(main(sys.argv[1:]))
