"""The emulated network on this machine (root only): what gets through, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.link_rates import Flow, fair_shares, goodput, send
from planner.cli.main import main
from planner.emulate.links import links_of
from planner.emulate.namespaces import EmulationError, namespaces, require_linux_root
from planner.emulate.network import emulated
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.training_plan.file import save_plan
from tests.conftest import make_plan, random_network, tiny_workload


def refused() -> str:
    """Why this machine has no emulated network; empty if it has."""
    try:
        with namespaces([[1500, 1500]] * 2, 1 << 20):
            return ""
    except EmulationError as error:
        return str(error)


REFUSED = refused()
needs_root = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)


def cluster(devices: int) -> Cluster:
    """Pairs of 2 to 4 MB/s, 20 ms; uploads of 5 MB/s."""
    rng = np.random.default_rng(3)
    network = Network(np.full((devices, devices), 0.02), rng.uniform(2e6, 4e6, (devices, devices)))
    return Cluster(network, Devices(1.0, 1.0, upload_bytes_per_s=5e6))


@needs_root
def test_flows_get_fair_rates() -> None:
    """All-to-all of three devices, limited by pairs and uploads."""
    links = links_of(cluster(3))
    flows = [Flow(i, j, 20_000) for i in range(3) for j in range(3) if i != j]
    with emulated(links) as network:
        found = goodput(network, flows, 2.0, 2.0)
        carried = network.stop()
    for pair, fair in fair_shares(links, flows).items():
        # a loaded machine may deliver less, but the network never lets more through
        assert 0.7 * fair < found[pair] < 1.05 * fair
    assert carried.lost == 0
    assert {int(pair) for pair in carried.busy[:, 0]} == {
        3 * f.source + f.destination for f in flows
    }


@needs_root
def test_no_message_arrives_early() -> None:
    """A message takes at least its size over the rate, plus latency."""
    links = links_of(cluster(2))
    size = 100_000
    with emulated(links) as network:
        arrived = send(network, [Flow(0, 1, size, 5, 0.2)], 2.0)[0, 1]
    least = size / links.rate[1] + links.latency[1]
    assert len(arrived) == 5
    assert all(m.arrived_s - m.sent_s > 0.999 * least for m in arrived)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@needs_root
def test_nothing_is_left_behind() -> None:
    """Also after failures: no processes and no named namespaces."""
    links = links_of(cluster(2))
    before = descriptors()
    with pytest.raises(RuntimeError, match="inside"), emulated(links) as network:
        sleeper = network.start(0, ["sleep", "60"], os.environ)
        switch = network._switch
        try:
            raise RuntimeError("inside")
        finally:
            sleeper.kill()
            sleeper.communicate()
    assert switch.poll() is not None
    assert descriptors() == before


@needs_root
def test_processes_end_with_their_parent() -> None:
    """Even if it is killed without cleaning up."""
    script = (
        "import os, sys\n"
        "from tests.emulate.test_network import cluster, emulated, links_of\n"
        "with emulated(links_of(cluster(2))) as network:\n"
        "    child = network.start(0, ['sleep', '60'], os.environ)\n"
        "    print(child.pid, network._switch.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.communicate()
    for child in children:
        for _ in range(200):
            if not _runs(child):
                break
            subprocess.run(["sleep", "0.05"], check=True)
        assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@needs_root
def test_emulate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks on a slow network: all parts, a trace of both, exit code 0."""
    pytest.importorskip("torch")
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload(), network=random_network(4))
    save_plan(plan, tmp_path / "plan.json")
    trace = tmp_path / "trace.json"
    words = ["emulate", str(tmp_path / "plan.json"), "--steps", "1", "--rest", "1", "--json"]
    assert main([*words, "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    for part in ("pipeline", "averaging", "step"):
        assert found[part]["executed_s"] > 0
        assert found[part]["predicted_s"] > 0
    # one end of each operation, whatever the machine's load: none was done before it could be
    least = float(plan.cluster.network.latency_s.min())
    assert found["pipeline"]["executed_s"] > 2 * least
    kinds = [op["kind"] for op in found["operations"]]
    assert sum(kind in "FHB" for kind in kinds) == sum(map(len, plan.schedules[0].order))
    assert kinds.count("A") == 4
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {1, 2, 3}


def test_missing_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EmulationError, match="root"):
        require_linux_root()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EmulationError, match="Linux"):
        require_linux_root()
