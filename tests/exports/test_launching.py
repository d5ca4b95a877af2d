"""Rank maps and commands, parsed by the programs that read them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from planner.executor.launch.arguments import parse_arguments
from planner.executor.rendezvous.rank_assignment import assigned_rank
from planner.exports.error import ExportError
from planner.exports.formats import export_plan
from planner.exports.options import load_hosts
from planner.network.network import Network
from planner.training_plan.model import TrainingPlan
from tests.conftest import make_plan, random_network, tiny_workload

GRID = [[0, 5, 2], [3, 1, 4]]
HOSTS = {"0": "red", "1": "red", "2": "blue.example.org", "3": "green", "4": "green", "5": "green"}


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    """Two pipelines of three stages with 4 layers in total."""
    return make_plan(GRID)


def test_rank_map(plan: TrainingPlan) -> None:
    """Stage, pipeline and mesh rank follow the grid; nodes are ordered by first device."""
    data = json.loads(export_plan(plan, "ranks", hosts=HOSTS))
    assert data["plan"] == plan.content_hash
    assert data["world_size"] == 6
    entries = data["ranks"]
    assert [e["rank"] for e in entries] == list(range(6))
    for e in entries:
        d = plan.cluster.network.index_of(e["device"])
        assert d == e["rank"]
        assert GRID[e["pipeline"]][e["stage"]] == d
        assert e["layers"] == list(plan.stage_layers[e["stage"]])
        assert e["mesh_rank"] == 2 * e["stage"] + e["pipeline"]
        assert e["host"] == HOSTS[e["device"]]
    assert sorted(e["mesh_rank"] for e in entries) == list(range(6))
    assert [(e["node"], e["local_rank"]) for e in entries] == [
        *[(0, 0), (0, 1), (1, 0)],
        *[(2, 0), (2, 1), (2, 2)],
    ]


def test_host_file(plan: TrainingPlan) -> None:
    """Ranks of a host must be consecutive; otherwise the export is rejected."""
    lines = export_plan(plan, "hostfile", hosts=HOSTS).splitlines()
    slots = [line.split(" slots=") for line in lines]
    assert [host for host, n in slots for _ in range(int(n))] == list(HOSTS.values())
    two = make_plan(GRID, workload=tiny_workload().replace(tensor_parallel=2))
    lines = export_plan(two, "hostfile", hosts=HOSTS).splitlines()
    assert sum(int(line.split(" slots=")[1]) for line in lines) == 12
    ranks = json.loads(export_plan(two, "ranks", hosts=HOSTS))["ranks"]
    assert sorted(e["mesh_rank"] for e in ranks) == list(range(0, 12, 2))
    with pytest.raises(
        ExportError, match=r"needs consecutive ranks on each host, found 0, 1, 5 on 'red'.*ranks"
    ):
        export_plan(plan, "hostfile", hosts=HOSTS | {"5": "red"})


def by_host(text: str) -> dict[str, list[str]]:
    """Return the words of each host's command without environment variables."""
    lines = text.splitlines()
    return {
        comment.removeprefix("# "): shlex.split(command)
        for comment, command in zip(lines[::2], lines[1::2], strict=True)
    }


def test_torchrun_lines(plan: TrainingPlan) -> None:
    """Each process gets the rank of its host's device."""
    text = export_plan(
        plan,
        "torchrun",
        hosts=HOSTS,
        interface="eth0",
        port=1234,
        run_id="r",
        plan_path="my plans/p.json",
        executor_options="--steps 7 --checkpoint 'a b'",
    )
    ranks = {}
    for node, (host, words) in enumerate(by_host(text).items()):
        assert words[:2] == ["GLOO_SOCKET_IFNAME=eth0", "torchrun"]
        read = get_args_parser().parse_args(words[2:])
        assert (read.nnodes, read.node_rank, read.rdzv_id) == ("3", node, "r")
        assert (read.rdzv_backend, read.rdzv_endpoint) == ("static", "red:1234")
        assert read.module
        assert read.training_script == "planner.executor"
        args = parse_arguments(read.training_script_args, None)
        assert (args.plan, args.steps, args.checkpoint) == (
            Path("my plans/p.json"),
            7,
            Path("a b"),
        )
        for local in range(int(read.nproc_per_node)):
            ranks[assigned_rank(plan, args.devices, local)] = host
    assert ranks == {d: HOSTS[str(d)] for d in range(6)}


def test_node_lines(plan: TrainingPlan, tmp_path: Path) -> None:
    """The executor's own parser reads them; the first device is on the rendezvous host."""
    how: dict[str, Any] = {"hosts": HOSTS, "interface": "eth0", "port": 1234}
    text = export_plan(plan, "nodes", executor_options="--steps 7 --elastic", **how)
    ranks = {}
    for host, words in by_host(text).items():
        settings = ["GLOO_SOCKET_IFNAME=eth0", "MASTER_ADDR=red", "MASTER_PORT=1234"]
        assert words[:6] == [*settings, "python", "-m", "planner.executor.node"]
        args = parse_arguments(words[6:], None)
        assert args.elastic and args.steps == 7
        for local in range(len(args.devices)):
            ranks[assigned_rank(plan, args.devices, local)] = host
    assert ranks == {d: HOSTS[str(d)] for d in range(6)} and ranks[0] == "red"
    with pytest.raises(ExportError, match="nodes does not use run_id"):
        export_plan(plan, "nodes", run_id="r")
    # Slurm's default is to end all with the first node that is lost
    script = export_plan(plan, "slurm", executor_options="--elastic", **how)
    assert "#SBATCH --no-kill\n" in script and "--kill-on-bad-exit=0" in script
    for line in export_plan(plan, "nodes", executor_options="--elastic", **how).splitlines()[1::2]:
        assert line in script
    assert "torchrun" not in script
    usual = export_plan(plan, "slurm", **how)
    assert "no-kill" not in usual and "--kill-on-bad-exit=1" in usual


def test_slurm_script_runs_the_torchrun_lines(plan: TrainingPlan, tmp_path: Path) -> None:
    """With simulated Slurm commands: srun starts one task per node."""
    names = [f"d {k}'s" for k in range(6)]
    network = random_network(6)
    own = Network(network.latency_s, network.bandwidth_bytes_per_s, names)
    plan = make_plan(GRID, network=own)
    hosts = dict(zip(names, HOSTS.values(), strict=True))
    script = tmp_path / "job.sh"
    export_plan(plan, "slurm", script, hosts=hosts, interface="eth0")
    head = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=3" in head
    # otherwise a task gets one core
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0"} <= set(head)
    most = max(Counter(HOSTS.values()).values())
    assert f"sbatch --gpus-per-node={most}\n" in script.read_text()
    nodes = next(line for line in head if "nodelist" in line).split("=")[1].split(",")
    assert nodes == ["red", "blue.example.org", "green"]
    for name, body in (
        ("srun", 'shift; for n in $NODES; do SLURMD_NODENAME=$n "$@" || exit; done'),
        ("torchrun", 'echo "$GLOO_SOCKET_IFNAME"; for w; do echo "$w"; done; echo'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def play(names: list[str]) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "NODES": " ".join(names),
        }
        return subprocess.run(
            ["bash", str(script)], capture_output=True, text=True, env=environment, check=False
        )

    found = play(sorted(nodes)).stdout.split("\n\n")[:-1]
    wanted = by_host(export_plan(plan, "torchrun", hosts=hosts, interface="eth0"))
    for host, said in zip(sorted(nodes), found, strict=True):
        assert said.split("\n") == ["eth0", *wanted[host][2:]]
    done = play(["black"])
    assert done.returncode == 2
    assert "no node black" in done.stderr


def test_hosts_with_ipv6_addresses(plan: TrainingPlan, tmp_path: Path) -> None:
    """Brackets around the address only before a port."""
    file = tmp_path / "hosts.csv"
    names = plan.cluster.network.ids
    written = ["[fd00::1]", "FD00:0::2", "fd00::2"]
    rows = [f"{name},{written[min(k, 2)]}\n" for k, name in enumerate(names)]
    file.write_text("device,host\n" + "".join(rows))
    hosts = load_hosts(file)
    assert set(hosts.values()) == {"fd00::1", "fd00::2"}
    text = export_plan(plan, "torchrun", hosts=hosts)
    assert text.count("--rdzv-endpoint '[fd00::1]:29500'") == 2 and "# fd00::2\n" in text
    assert "MASTER_ADDR=fd00::1 MASTER_PORT=29500 " in export_plan(plan, "nodes", hosts=hosts)
    for kind in ("slurm", "hostfile"):
        with pytest.raises(ExportError, match="host is 'fd00::1'; this format does not allow IPv6"):
            export_plan(plan, kind, hosts=hosts)
    with pytest.raises(ExportError, match="host is"):
        export_plan(plan, "torchrun", hosts=hosts | {names[0]: "fd00::1%$(x)"})


def test_invalid_hosts_and_options(plan: TrainingPlan, tmp_path: Path) -> None:
    """One line each."""
    file = tmp_path / "hosts.csv"
    for text, said in (
        ("device,node\n0,a\n", "give device,host"),
        ("", "give device,host"),
        ("device,host\n0,a\n0,b\n", "line 3: device '0' is listed twice"),
        ("device,host\n0\n", "line 2"),
    ):
        file.write_text(text)
        with pytest.raises(ExportError, match=said):
            load_hosts(file)
    file.write_text("host,device\na, 0\n\nb,1\n")
    assert load_hosts(file) == {"0": "a", "1": "b"}
    with pytest.raises(ExportError, match="device '2' has no host"):
        export_plan(plan, "ranks", hosts=load_hosts(file))
    with pytest.raises(ExportError, match="no device '9'"):
        export_plan(plan, "ranks", hosts=HOSTS | {"9": "a"})
    for options, said in (
        ({"hosts": HOSTS | {"0": "a;b"}}, "host is 'a;b'.*--hosts"),
        ({"hosts": HOSTS | {"0": 3}}, "host of device '0'"),
        ({"port": 70000}, "port must be 1 to 65535, found 70000"),
        ({"interface": "$(x)"}, "interface is"),
        ({"executor_options": "'"}, "cannot be parsed"),
        ({"executor_options": "more"}, "must start with an option such as --steps, found 'more'"),
        ({"plan_path": ""}, "plan_path"),
        ({"pipeline": 0}, "does not use pipeline"),
    ):
        with pytest.raises(ExportError, match=said):
            export_plan(plan, "torchrun", **options)
    with pytest.raises(ExportError, match="unknown format 'nonsense'; choose one of ranks"):
        export_plan(plan, "nonsense")
