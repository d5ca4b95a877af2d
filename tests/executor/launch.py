"""Starting ranks under torchrun on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in so many local processes."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), *command),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )


def free_port() -> int:
    """Of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
