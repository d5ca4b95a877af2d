"""Commands that run a plan: lines of torchrun or of the executor's own, and a Slurm script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from planner.exports.options import ExportOptions, endpoint, require_host, require_name
from planner.exports.ranks import nodes_of
from planner.training_plan.model import TrainingPlan

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Read by the executor on every node."""
ELASTIC = "--elastic"
"""Among the executor's options: torchrun would end all ranks of a node with the first lost one."""


def torchrun_lines(plan: TrainingPlan, options: ExportOptions) -> str:
    """A comment with the host, then the line to run there, for every host."""
    return _lines(plan, options, _torchrun(plan, options))


def node_lines(plan: TrainingPlan, options: ExportOptions) -> str:
    """The same with what the executor has to start the ranks of a node, which need no torchrun."""
    return _lines(plan, options, _own(plan, options))


def slurm_script(plan: TrainingPlan, options: ExportOptions) -> str:
    """One script for sbatch, which starts torchrun once a node; elastic runs as `node_lines` do."""
    for host in nodes_of(plan, options):
        require_name("host", host)  # of Slurm, which has no addresses
    elastic = ELASTIC in shlex.split(options.executor_options)
    commands = (_own if elastic else _torchrun)(plan, options)
    ends = "--no-kill --wait=0 --kill-on-bad-exit=0" if elastic else "--kill-on-bad-exit=1"
    cases = "".join(f"    {host}) {command} ;;\n" for host, command in commands.items())
    # a node finds its own line by its name: Slurm sorts nodes as it likes
    return f"""#!/bin/bash
#SBATCH --job-name={options.run_id}
#SBATCH --nodes={len(commands)}
#SBATCH --ntasks-per-node=1
#SBATCH --nodelist={",".join(commands)}{chr(10) + "#SBATCH --no-kill" if elastic else ""}

{_remark(plan, options, commands)}on_node() {{
  case "$SLURMD_NODENAME" in
{cases}    *) echo "the plan has no node $SLURMD_NODENAME" >&2; exit 2 ;;
  esac
}}
export -f on_node
srun {ends} bash -c on_node
"""


def _remark(plan: TrainingPlan, options: ExportOptions, hosts: Mapping[str, str]) -> str:
    """Where ranks will listen if nobody names an interface, which hosts with several may need."""
    named = options.interface is not None or all(plan.cluster.devices.interfaces or [""])
    if named or len(hosts) < 2:
        return ""
    return (
        f"# ranks listen where their host reaches {next(iter(hosts))}; if others cannot reach them "
        "there, name an interface (--interface, or the devices file's)\n"
    )


def _lines(plan: TrainingPlan, options: ExportOptions, commands: Mapping[str, str]) -> str:
    lines = "".join(f"# {host}\n{command}\n" for host, command in commands.items())
    return _remark(plan, options, commands) + lines


def _torchrun(plan: TrainingPlan, options: ExportOptions) -> dict[str, str]:
    """What each host runs."""
    nodes = _nodes(plan, options)
    commands = {}
    for node, (host, devices) in enumerate(nodes.items()):
        words = ["torchrun", "--nnodes", str(len(nodes)), "--node-rank", str(node)]
        words += ["--nproc-per-node", str(len(devices)), "--rdzv-backend", "static"]
        words += ["--rdzv-endpoint", endpoint(next(iter(nodes)), options.port)]
        words += ["--rdzv-id", options.run_id, "-m", "planner.executor"]
        commands[host] = _interface(options) + shlex.join([*words, *_ranks(plan, options, devices)])
    return commands


def _own(plan: TrainingPlan, options: ExportOptions) -> dict[str, str]:
    """The same, by what the executor has for it."""
    nodes = _nodes(plan, options)
    # the first device is the first host's
    place = f"MASTER_ADDR={next(iter(nodes))} MASTER_PORT={options.port} "
    words = ["python", "-m", "planner.executor.node"]
    return {
        host: _interface(options) + place + shlex.join([*words, *_ranks(plan, options, devices)])
        for host, devices in nodes.items()
    }


def _nodes(plan: TrainingPlan, options: ExportOptions) -> dict[str, list[int]]:
    nodes = nodes_of(plan, options)
    for host in nodes:
        require_host(host)
    return nodes


def _interface(options: ExportOptions) -> str:
    """Set before a command."""
    return "" if options.interface is None else f"{INTERFACE}={options.interface} "


def _ranks(plan: TrainingPlan, options: ExportOptions, devices: Sequence[int]) -> list[str]:
    """What the executor is told on a node with these."""
    ids = plan.cluster.network.ids
    named = ["--devices", *(ids[d] for d in devices)]
    return [options.plan_path, *named, *shlex.split(options.executor_options)]
