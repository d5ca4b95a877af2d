"""Processes of a worker's other GPUs as forks, which need not import PyTorch again.

A rank forks them while it has a single thread; each waits until the rank would start it.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress

from planner.executor.launch import gpu_processes

MAX_MESSAGE_BYTES = 1 << 20


class Forks:
    """Stands in for the module ``subprocess`` in `gpu_processes`."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self, processes: int) -> None:
        self._waiting: list[tuple[int, socket.socket]] = []
        for _ in range(processes):
            ours, its = socket.socketpair()
            process = os.fork()
            if not process:
                # the others' ends too, so that their processes see this rank's end
                for end in (ours, *(channel for _, channel in self._waiting)):
                    end.close()
                _wait_for_start(its)
            its.close()
            self._waiting.append((process, ours))

    def Popen(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: tuple[int], stdin: int
    ) -> subprocess.Popen[bytes]:
        """Let the next process run a command ``python -m module words``."""
        process, channel = self._waiting.pop(0)
        words = {"module": command[2], "words": command[3:], "env": dict(env), "fd": pass_fds[0]}
        socket.send_fds(channel, [json.dumps(words).encode()], pass_fds)
        channel.close()
        started = subprocess.Popen.__new__(subprocess.Popen)
        started.__dict__ |= {
            "args": command,
            "pid": process,
            "returncode": None,
            "stdin": None,
            "stdout": None,
            "stderr": None,
            "_child_created": True,
            "_waitpid_lock": threading.Lock(),
        }
        return started


def fork_gpus(processes: int) -> None:
    """From now on this rank's other GPUs are forks."""
    vars(gpu_processes)["subprocess"] = Forks(processes)


def _wait_for_start(channel: socket.socket) -> None:
    """In the forked process: run what comes, and never return."""
    code: object = 1
    try:
        message, files, *_ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1)
        if message:
            start = json.loads(message)
            os.dup2(files[0], start["fd"])
            os.environ |= start["env"]
            sys.argv = [start["module"], *start["words"]]
            runpy.run_module(start["module"], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
