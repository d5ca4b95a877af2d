"""Ranks that begin at once: forks of a process that has imported PyTorch already.

Run as a program it waits for jobs; a fork does what ``python -m module words`` would do.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from planner.executor.fault_tolerance.shutdown import REFUSED

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "benchmarks.faults.rank",
    "planner.executor.__main__",
    "tests.executor.gpu_forks",
    # PyTorch's optimizers import it, which takes a second of each rank
    "torch._dynamo",
    "planner.probe.__main__",
    "tests.executor.late_rank",
    "tests.executor.moving_rank",
    "tests.executor.rank_main",
)
PR_SET_PDEATHSIG = 1
END_S, LIMIT_S = 5.0, 240.0
"""For others after the first rank has failed; for all."""


class Done(NamedTuple):
    """What all ranks left behind: the exit code of ``planner run``, output, and every code."""

    code: int
    out: str
    error: str
    codes: list[int]


def run_ranks(
    ranks: int, module: str, *words: str, go_on: bool = False, other_gpus: int = 0
) -> Done:
    """So many processes that run ``module.main(words)``, told where they are as by torchrun.

    Their output is that of rank 0, then that of rank 1, and so on. Unless they ``go_on``, all are
    ended soon after the first that fails. The processes of each rank's ``other_gpus`` are forks.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        job = {"ranks": ranks, "module": module, "words": words, "folder": folder}
        job |= {"go_on": go_on, "other_gpus": other_gpus}
        server.stdin.write(json.dumps(job | {"port": store.port}) + "\n")
        server.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(server.stdout, selectors.EVENT_READ)
            if not ready.select(LIMIT_S):
                _server.cache_clear()
                server.kill()
                raise AssertionError(f"ranks did not end within {LIMIT_S:g} s")
        code, *codes = json.loads(server.stdout.readline())
        out, error = (
            "".join((Path(folder) / f"{rank}.{kind}").read_text() for rank in range(ranks))
            for kind in ("out", "err")
        )
    return Done(code, out, error, codes)


def run_plan(
    path: Path,
    names: Sequence[str],
    *more: str,
    module: str = "planner.executor.__main__",
    gpu_forks: bool = True,
) -> tuple[int, list[dict[str, Any]], list[str]]:
    """All ranks of a plan's file; exit code, events, and stderr with a failure's reason once."""
    from planner.executor.fault_tolerance.shutdown import PREFIX
    from planner.training_plan.file import load_plan

    words = [str(path), "--devices", *names, "--device", "cpu", "--events", *more]
    others = load_plan(path).workload.tensor_parallel - 1 if gpu_forks else 0
    done = run_ranks(len(names), module, *words, other_gpus=others)
    events = [json.loads(line) for line in done.out.splitlines()]
    said = [line for line in done.error.splitlines() if not line.startswith(PREFIX)]
    reasons = [line for line in done.error.splitlines() if line.startswith(PREFIX)]
    return done.code, events, [*said, *reasons[:1]]


def losses_by_step(
    path: Path, names: Sequence[str], *more: str, module: str = "planner.executor.__main__"
) -> tuple[int, dict[int, float], list[str]]:
    """As `run_plan`, with losses in place of events."""
    code, events, said = run_plan(path, names, *more, module=module)
    return code, losses_in(events), said


def losses_in(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Known losses by step."""
    told = [event for event in events if "loss" in event]
    losses = {e["loss_step"] if e["event"] == "step" else e["step"]: e["loss"] for e in told}
    losses.pop(None, None)
    return losses


@cache
def _server() -> subprocess.Popen[str]:
    variables = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.executor.forks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    import importlib

    for module in MODULES:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(job: dict[str, object]) -> list[int]:
    """Fork all ranks; returns one exit code as ``planner run`` would, and then those of all.

    Of a refused rank and one that ends with it, either may be the first to be gone.
    """
    alive = {_fork(job, rank): rank for rank in range(int(str(job["ranks"])))}
    codes = [0] * len(alive)
    code, failed_s = 0, 0.0
    while alive:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            codes[alive.pop(done)] = os.waitstatus_to_exitcode(status)
            if (found := os.waitstatus_to_exitcode(status)) and not code:
                code, failed_s = found, time.monotonic()
            continue
        time.sleep(0.01)
        if code and not job["go_on"] and time.monotonic() - failed_s > END_S:
            for process in alive:
                os.kill(process, signal.SIGKILL)
    return [REFUSED if REFUSED in codes else code, *codes]


def _fork(job: dict[str, object], rank: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, kind in ((1, "out"), (2, "err")):
            path = f"{job['folder']}/{rank}.{kind}"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job["port"]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if others := int(str(job["other_gpus"])):
            from tests.executor.gpu_forks import fork_gpus

            fork_gpus(others)
        code = sys.modules[str(job["module"])].main(job["words"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
