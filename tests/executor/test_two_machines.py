"""torchrun as README says, on two machines of two processes whose host names mislead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.emulate.links import links_of
from planner.emulate.network import emulated
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.training_plan.file import save_plan
from tests.conftest import make_plan, tiny_workload
from tests.emulate.test_network import REFUSED
from tests.executor.launch import ROOT

torch = pytest.importorskip("torch")

from tests.executor.test_elastic import single  # noqa: E402
from tests.executor.test_train import TOLERANCE  # noqa: E402

STEPS = 5
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
"""Addresses of the emulated machines."""
BEGIN = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; unset GLOO_SOCKET_IFNAME; exec "$@"'
"""In namespaces of its own: a host name, and what names mean there."""
LOCAL = "127.0.0.1 localhost\n"


@pytest.mark.slow
@pytest.mark.skipif(bool(REFUSED), reason=REFUSED)
@pytest.mark.parametrize(
    ("names", "hosts", "endpoint", "devices"),
    [
        # both have the same name, and it is the loopback's
        (("same", "same"), ("127.0.0.1 same\n",) * 2, FIRST, ("01", "23")),
        # each has its own name for the other's address
        (("a", "b"), (f"{SECOND} a\n", f"{FIRST} b\n"), FIRST, ("01", "23")),
        # as Debian has it, and the store's name is the loopback's where the store is
        (
            ("a", "b"),
            (f"127.0.1.1 a\n{SECOND} b\n", f"{FIRST} a\n127.0.1.1 b\n"),
            "a",
            ("01", "23"),
        ),
        (
            ("a", "b"),
            (f"127.0.1.1 a\n{SECOND} b\n", f"{FIRST} a\n127.0.1.1 b\n"),
            "a",
            ("32", "10"),
        ),
    ],
)
def test_torchrun_on_two_machines(
    names: tuple[str, str],
    hosts: tuple[str, str],
    endpoint: str,
    devices: tuple[str, str],
    tmp_path: Path,
) -> None:
    """Training is that of one process, and no interface has to be named."""
    plan = make_plan([[0, 3], [2, 1]], workload=tiny_workload(batch_samples=8))
    save_plan(plan, tmp_path / "plan.json")
    links = links_of(
        Cluster(Network(np.full((2, 2), 0.005), np.full((2, 2), 1e8)), Devices(1.0, 1.0))
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[str]] = []
    with emulated(links) as network:
        for node in range(2):
            known = tmp_path / f"hosts-{node}"
            known.write_text(LOCAL + hosts[node])
            started.append(
                network.start(
                    node,
                    [
                        *("unshare", "--uts", "--mount", "sh", "-c", BEGIN, "sh"),
                        *(names[node], str(known)),
                        *(sys.executable, "-m", "torch.distributed.run"),
                        *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
                        *("--rdzv-backend", "static", "--rdzv-endpoint", f"{endpoint}:29500"),
                        *("--rdzv-id", "run1", "-m", "planner.executor"),
                        *(str(tmp_path / "plan.json"), "--devices", *devices[node]),
                        *("--device", "cpu", "--steps", str(STEPS), "--events"),
                    ],
                    environment,
                )
            )
        try:
            ended = [process.communicate(timeout=240) for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    events = [json.loads(line) for out, _ in ended for line in out.splitlines()]
    losses = {e["loss_step"]: e["loss"] for e in events if e["event"] == "step"}
    losses |= {e["step"]: e["loss"] for e in events if e["event"] == "loss"}
    np.testing.assert_allclose(
        [losses[k] for k in range(STEPS)], single(plan, STEPS), rtol=TOLERANCE
    )
