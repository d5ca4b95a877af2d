"""One rank with an injected fault: ``python -m benchmarks.faults.rank {...} plan.json ...``.

The first argument is JSON: `device`, `fault`, `phase`, `step`, and `folder`, where time and process
of the fault are recorded; a recorded fault is not injected again. The other arguments are passed to
the executor. Used by `benchmarks.faults.__main__` and by tests.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import planner.executor.__main__ as entry
import planner.executor.checkpoint.checkpoint as checkpoint
import planner.executor.rendezvous.connect as opening
import planner.executor.rendezvous.rendezvous as binding
from planner.executor.comm.gradient_buffer import GradientBuffer
from planner.executor.comm.stage_averager import StageAverager
from planner.executor.elastic.shard_mover import ShardMover
from planner.executor.elastic.step_commit import StoreStepCommitter
from planner.executor.launch.arguments import parse_arguments
from planner.executor.launch.process import exit_now
from planner.executor.rendezvous.rank_assignment import local_device_name
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.evaluate import Evaluation
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.transport.connections import ChannelKind, Connections

PHASES = ("join", "forward", "backward", "averaging", "update")
WRITING, EVALUATING, OUTER = "checkpoint", "evaluation", "outer"
"""Phases of runs that do so."""
SPREADING, MOVING = "spreading", "moving"
"""Before parameters that were updated in shards are spread; while optimizer state is moved after
the loss of the first of two devices."""
COUNTED, LEAVING = "counted", "leaving"
"""After the samples of a change were reported; after the last step, before all ranks know it."""
FAULTS = ("kill", "stop", "cut", "hold", "tear")
BOTH = "+"
"""Between names of devices to which it happens."""
HOLD_S = 6
"""Seconds for which Python's lock is held, so that no thread of the rank does anything."""
LOOK_S = 0.05
JOIN_S = 2.0
"""After a rank has claimed its device: others have seen signs of its life."""


class Fault:
    """What happens, once.

    Parameters
    ----------
    given
        As the first word has it.
    is_first
        Whether this is the first of the devices to which it happens.
    """

    def __init__(self, options: dict[str, Any], *, is_first: bool) -> None:
        self._is_first = is_first
        self._given, self._folder = options, Path(options["folder"])
        self._steps = -1
        self._done = False
        self._open: Connections = {}

    def prepare(self) -> None:
        """Let it happen in its phase."""
        phase = self._given["phase"]
        if self._given["fault"] == "tear":
            self._keep_connections()
        if phase == "join":
            self._before(binding, "_wait_for_all", lambda *_: True)
            return
        self._before(ModelStage, "begin", self._count)
        if phase == COUNTED:
            self._after_counting()
            return
        if phase == LEAVING:
            self._before(StoreStepCommitter, "finish", lambda *_: True)
            return
        if phase == OUTER:  # its mean is there
            self._before(StoreStepCommitter, "commit_outer_step", lambda *_: self._due())
            return
        if phase == SPREADING:
            self._before(StageAverager, "run", lambda *a: self._due() and a[-1] == slice(-1, None))
            return
        if phase == MOVING and not self._is_first:
            self._before(ShardMover, "_exchange", lambda *_: True)
            return
        if phase == WRITING:
            self._before(checkpoint, "write_tensors", lambda *_: self._due())
            return
        if phase == EVALUATING:
            self._before(Evaluation, "_sum_losses", lambda *_: self._due())
            return
        if phase in ("averaging", MOVING):
            self._before(StageAverager, "prepare", lambda *_: self._due())
            self._before(GradientBuffer, "to_host", lambda *_: self._due())
            return
        name, kind = {
            "forward": ("run_op", "F"),
            "backward": ("run_op", "B"),
            "update": ("update", None),
        }[phase]
        self._before(ModelStage, name, lambda *a: self._due() and (kind is None or a[1] == kind))

    def _before(self, owner: Any, name: str, when: Callable[..., bool]) -> None:
        usual = getattr(owner, name)

        def hurt(*args: Any, **extra: Any) -> Any:
            if when(*args) and not self._done:
                self._done = True
                self._happen()
            return usual(*args, **extra)

        setattr(owner, name, hurt)

    def _after_counting(self) -> None:
        usual = RankGroup.all_gather

        def all_gather(ranks: RankGroup, name: str, text: str, **options: Any) -> list[str]:
            if name == f"microbatches/{self._given['step']}" and not self._done:
                self._done = True
                ranks.store.set(f"{name}/{ranks.rank}", text)
                self._happen()
            return usual(ranks, name, text, **options)

        setattr(RankGroup, "all_gather", all_gather)  # noqa: B010

    def _keep_connections(self) -> None:
        usual = opening._open

        def opened(*args: Any, **extra: Any) -> Connections:
            found = usual(*args, **extra)
            self._open |= found
            return found

        opening._open = opened

    def _count(self, *_: Any) -> bool:
        self._steps += 1
        return False

    def _due(self) -> bool:
        return self._steps >= int(self._given["step"])

    def _happen(self) -> None:
        if self._given["phase"] == "join":
            time.sleep(JOIN_S)
        (self._folder / "who").write_text(str(os.getpid()))
        (self._folder / "when").write_text(repr(time.monotonic()))
        fault = self._given["fault"]
        if fault == "cut":  # by somebody else, while this phase lasts
            while not (self._folder / "cut").exists():
                time.sleep(LOOK_S)
        elif fault == "tear":  # one connection, and both processes live
            purpose = ChannelKind[self._given.get("purpose", "PIPELINE")]
            torn = next(c for (what, _), c in self._open.items() if what is purpose)
            torn.shutdown(socket.SHUT_RDWR)
        elif fault == "hold":
            ctypes.PyDLL(None).sleep(HOLD_S)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def _count_late(seconds: float) -> None:
    """A device that comes to tell its samples later than others, every time."""
    usual = ModelStage.take_snapshot

    def count_late(model_stage: ModelStage) -> None:
        time.sleep(seconds)
        usual(model_stage)

    setattr(ModelStage, "take_snapshot", count_late)  # noqa: B010


def main(argv: Sequence[str]) -> int:
    """Run the rank; returns the exit code."""
    torch.set_num_threads(1)
    options, command = json.loads(argv[0]), list(argv[1:])
    devices = parse_arguments(command, None).devices
    happened = (Path(options["folder"]) / "when").exists()
    if local_device_name(devices) == options.get("late"):
        _count_late(float(options["late_s"]))
    hurt = options["device"].split(BOTH)
    if (name := local_device_name(devices)) in hurt and not happened:
        Fault(options, is_first=name == hurt[0]).prepare()
    return entry.main(command)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
