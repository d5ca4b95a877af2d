"""Start and end of a rank's process: one line with the reason, and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError

from planner.executor.elastic.elastic_run import EmptyStageError, RunRefused
from planner.executor.elastic.membership import Evicted
from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import FAILED, REFUSED, RunAborted
from planner.executor.rendezvous.rendezvous import RendezvousTimeout
from planner.executor.runtime.loss_scaler import TrainingDiverged
from planner.executor.transport.connections import ConnectionLost, is_network_error
from planner.executor.transport.store import StoreMissingError
from planner.utils.output_files import NO_ROOM
from planner.utils.refusal import Refusal

LAUNCHER_PID = "PLANNER_STARTER"
"""Environment variable: process id of the launcher, which ends this process."""
SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux."""


SWITCH_S = 0.0005
"""Python's thread switch interval: a thread with a message should not wait long."""


def init_process() -> None:
    """Set up this process as a rank: thread switching and file descriptors."""
    sys.setswitchinterval(SWITCH_S)
    allow_descriptors()


def allow_descriptors() -> None:
    """Raise the limit on file descriptors to the maximum: each rank needs many connections."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where ``/proc`` does not say."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def die_with_parent(death_signal: signal.Signals = signal.SIGTERM) -> None:
    """Receive a signal when the launcher dies; Linux only."""
    launcher_pid = os.environ.get(LAUNCHER_PID)
    if launcher_pid is None or sys.platform != "linux":
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, death_signal, 0, 0, 0)
    if str(os.getppid()) != launcher_pid:  # the launcher died before the call
        os.kill(os.getpid(), death_signal)


def run_rank(name: str, detector: FailureDetector, run: Callable[[], int]) -> int:
    """Run a rank; returns the exit code."""
    try:
        return run()
    except RunAborted:
        return detector.exit_code()
    except Evicted as error:
        return detector.exit_alone(str(error))
    except (ConnectionLost, EmptyStageError) as error:
        return detector.exit_for_peer_error(str(error))
    except DistError as error:
        summary = (str(error).splitlines() or [""])[0]
        reason = f"device {name!r} lost the store ({summary})"
        # the others may still have the store, and continue
        return (
            detector.exit_for_peer_error(reason)
            if detector.on_rank_lost is None
            else detector.exit_unless_store_lost(reason)
        )
    except (StoreMissingError, RendezvousTimeout) as error:
        return detector.exit_for_own_error(str(error), FAILED)
    except RunRefused as error:
        return detector.exit_for_own_error(_with_device(name, str(error)), REFUSED, for_all=True)
    except Refusal as error:
        return detector.exit_for_own_error(_with_device(name, str(error)), REFUSED)
    except TrainingDiverged as error:
        return detector.exit_for_own_error(_with_device(name, str(error)), FAILED, for_all=True)
    except OSError as error:
        if is_network_error(error):
            return detector.exit_for_peer_error(
                _with_device(name, f"a connection is lost ({error})")
            )
        if error.errno in NO_ROOM:
            where = f"{error.filename}: " if error.filename else ""
            return detector.exit_for_own_error(
                _with_device(name, f"{where}{error.strerror}; free some room"), FAILED
            )
        return detector.exit_for_own_error(
            _with_device(name, f"{error}; check paths and permissions"), REFUSED
        )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # before rendezvous; the launcher prints one line
    except Exception as error:
        traceback.print_exc()
        return detector.exit_for_own_error(
            _with_device(name, f"{type(error).__name__}: {error}"), FAILED
        )


def exit_now(code: int) -> NoReturn:
    """Exit at once, without waiting for threads."""
    with suppress(OSError):  # the reading end may be closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _with_device(name: str, message: str) -> str:
    """One line, with the device's name unless it contains it."""
    message = " ".join(message.split())
    return message if message.startswith(f"device {name!r}") else f"device {name!r}: {message}"
