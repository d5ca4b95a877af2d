"""Processes of a device's GPUs but the first, which its rank starts and watches."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.executor.launch.process import LAUNCHER_PID
from planner.executor.tensor_parallel.gpu_group import GRACE_S
from planner.utils.output_files import NO_ROOM

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
        self._folder = _folder_with_file(exchange_bytes)
        self._on_failure = on_failure
        self._stopping = False
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

    def remove_files(self) -> None:
        """Remove the files, which all processes have opened."""
        self._folder.cleanup()

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


def _folder_with_file(size: int) -> tempfile.TemporaryDirectory[str]:
    """A folder with an exchange file of so many bytes: in memory, or on disk for want of room."""
    in_memory = (SHARED_MEMORY,) if os.access(SHARED_MEMORY, os.W_OK) else ()
    for place in (*in_memory, None):
        folder = tempfile.TemporaryDirectory(prefix="planner-worker-", dir=place)
        try:
            # takes the room now: a mapped file that finds none later ends a process by a signal
            with (Path(folder.name) / EXCHANGE_FILE).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            folder.cleanup()
            if place is None or error.errno not in NO_ROOM:
                raise
        else:
            return folder
    raise AssertionError
