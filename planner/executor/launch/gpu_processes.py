"""Processes of a device's GPUs but the first, which its rank starts and watches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from planner.executor.comm.device_collectives import LOOPBACK
from planner.executor.launch.process import LAUNCHER_PID
from planner.executor.tensor_parallel.gpu_group import GRACE_S

INDEX, RANK = "PLANNER_GPU_INDEX", "PLANNER_GPU_RANK"
EXCHANGE_FD, STORE_PORT = "PLANNER_GPU_EXCHANGE", "PLANNER_GPU_STORE"
"""Environment variables: a GPU's number in its worker, the worker's rank, and how the processes
exchange vectors and find each other."""
STOP_S = 10.0


class GpuProcesses:
    """The processes of a worker's other GPUs.

    Parameters
    ----------
    arguments
        Of the rank, for `planner.executor.launch.follow_gpu`.
    on_failure
        Called in a thread, with the reason, when a process ends before `stop`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        rank: int,
        size: int,
        exchange_bytes: int,
        on_failure: Callable[[str], None],
    ) -> None:
        # memory without a name: nothing is left when the processes end
        self._exchange = os.memfd_create("planner-exchange")
        os.posix_fallocate(self._exchange, 0, exchange_bytes)
        self.store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self._on_failure = on_failure
        self._stopping = False
        command = [sys.executable, "-m", "planner.executor.launch.follow_gpu", *arguments]
        environment = os.environ | {
            RANK: str(rank),
            EXCHANGE_FD: str(self._exchange),
            STORE_PORT: str(self.store.port),
            LAUNCHER_PID: str(os.getpid()),
        }
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=environment | {INDEX: str(index)},
                pass_fds=(self._exchange,),
            )
            for index in range(1, size)
        ]
        for index, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(index, process), daemon=True).start()

    @property
    def exchange_file(self) -> Path:
        """File with the exchanged vector."""
        return exchange_file(self._exchange)

    def stop(self, send_stop: Callable[[], None]) -> None:
        """Tell the processes to end, and wait for them."""
        self._stopping = True
        send_stop()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _watch(self, index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        time.sleep(GRACE_S)
        if not self._stopping:
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._on_failure(f"the process of its GPU {index} has ended ({end})")


def exchange_file(descriptor: int) -> Path:
    """The path by which a process opens its file descriptor."""
    return Path(f"/proc/self/fd/{descriptor}")
