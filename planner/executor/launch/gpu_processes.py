"""Processes of a device's GPUs but the first, which its rank starts and watches."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.executor.launch.process import LAUNCHER_PID

INDEX, RANK, FOLDER = "PLANNER_GPU_INDEX", "PLANNER_GPU_RANK", "PLANNER_GPU_FOLDER"
"""Environment variables: a GPU's number in its worker, the worker's rank, and the folder in memory
through which the GPUs find each other and exchange vectors."""
SHARED_MEMORY = Path("/dev/shm")
STORE_FILE, EXCHANGE_FILE = "store", "exchange"
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
        in_memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="planner-worker-", dir=in_memory)
        self._on_failure = on_failure
        self._stopping = False
        with self.exchange_file.open("wb") as file:
            file.truncate(exchange_bytes)
        command = [sys.executable, "-m", "planner.executor.launch.follow_gpu", *arguments]
        environment = os.environ | {
            RANK: str(rank),
            FOLDER: self._folder.name,
            LAUNCHER_PID: str(os.getpid()),
        }
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment | {INDEX: str(index)}
            )
            for index in range(1, size)
        ]
        for index, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(index, process), daemon=True).start()

    @property
    def store_file(self) -> Path:
        """File through which the processes find each other."""
        return Path(self._folder.name) / STORE_FILE

    @property
    def exchange_file(self) -> Path:
        """File with the exchanged vector."""
        return Path(self._folder.name) / EXCHANGE_FILE

    def stop(self) -> None:
        """Wait for the processes, which have been told to end."""
        self._stopping = True
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._folder.cleanup()

    def _watch(self, index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._stopping:
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._on_failure(f"the process of its GPU {index} has ended ({end})")
