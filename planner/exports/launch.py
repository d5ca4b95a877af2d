"""Commands that run a plan: torchrun, ``planner.executor.node``, or Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from planner.exports.options import ExportOptions, endpoint, require_host, require_name
from planner.exports.ranks import nodes_of
from planner.training_plan.model import TrainingPlan

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable from which the executor reads the network interface."""
ELASTIC = "--elastic"
"""Executor option that torchrun does not support: it ends all ranks of a node if one ends."""


def torchrun_lines(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return a comment with the host and its torchrun command, for every host."""
    return _lines(plan, options, _torchrun_commands(plan, options))


def node_lines(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return the same with ``planner.executor.node`` in place of torchrun."""
    return _lines(plan, options, _node_commands(plan, options))


def slurm_script(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return an sbatch script that runs one command per node, torchrun unless elastic."""
    nodes = nodes_of(plan, options)
    for host in nodes:
        require_name("host", host)  # Slurm node names, not addresses
    gpus = max(sum(plan.gpu_counts[d] for d in devices) for devices in nodes.values())
    elastic = ELASTIC in shlex.split(options.executor_options)
    commands = (_node_commands if elastic else _torchrun_commands)(plan, options)
    ends = "--no-kill --wait=0 --kill-on-bad-exit=0" if elastic else "--kill-on-bad-exit=1"
    cases = "".join(f"    {host}) {command} ;;\n" for host, command in commands.items())
    # each node looks up its command by name, since Slurm may reorder the node list
    return f"""#!/bin/bash
#SBATCH --job-name={options.run_id}
#SBATCH --nodes={len(commands)}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
# Where GPUs are a generic resource, also: sbatch --gpus-per-node={gpus}
#SBATCH --nodelist={",".join(commands)}{chr(10) + "#SBATCH --no-kill" if elastic else ""}

{_interface_comment(plan, options, commands)}on_node() {{
  case "$SLURMD_NODENAME" in
{cases}    *) echo "the plan has no node $SLURMD_NODENAME" >&2; exit 2 ;;
  esac
}}
export -f on_node
srun {ends} bash -c on_node
"""


def _interface_comment(plan: TrainingPlan, options: ExportOptions, hosts: Mapping[str, str]) -> str:
    """Return a comment if hosts with several network interfaces may pick the wrong one."""
    named = options.interface is not None or all(plan.cluster.devices.interfaces or [""])
    if named or len(hosts) < 2:
        return ""
    return (
        f"# Each rank uses the network interface that routes to {next(iter(hosts))}. If other "
        "hosts cannot reach it there, set --interface, or interface in the devices file.\n"
    )


def _lines(plan: TrainingPlan, options: ExportOptions, commands: Mapping[str, str]) -> str:
    lines = "".join(f"# {host}\n{command}\n" for host, command in commands.items())
    return _interface_comment(plan, options, commands) + lines


def _torchrun_commands(plan: TrainingPlan, options: ExportOptions) -> dict[str, str]:
    """Return the torchrun command of each host."""
    nodes = _nodes(plan, options)
    commands = {}
    for node, (host, devices) in enumerate(nodes.items()):
        command = ["torchrun", "--nnodes", str(len(nodes)), "--node-rank", str(node)]
        command += ["--nproc-per-node", str(len(devices)), "--rdzv-backend", "static"]
        command += ["--rdzv-endpoint", endpoint(next(iter(nodes)), options.port)]
        command += ["--rdzv-id", options.run_id, "-m", "planner.executor"]
        commands[host] = _interface(options) + shlex.join(
            [*command, *_executor_arguments(plan, options, devices)]
        )
    return commands


def _node_commands(plan: TrainingPlan, options: ExportOptions) -> dict[str, str]:
    """Return the command of ``planner.executor.node`` for each host."""
    nodes = _nodes(plan, options)
    # rank 0 runs on the first host
    rendezvous = f"MASTER_ADDR={next(iter(nodes))} MASTER_PORT={options.port} "
    command = ["python", "-m", "planner.executor.node"]
    return {
        host: _interface(options)
        + rendezvous
        + shlex.join([*command, *_executor_arguments(plan, options, devices)])
        for host, devices in nodes.items()
    }


def _nodes(plan: TrainingPlan, options: ExportOptions) -> dict[str, list[int]]:
    nodes = nodes_of(plan, options)
    for host in nodes:
        require_host(host)
    return nodes


def _interface(options: ExportOptions) -> str:
    """Return the environment variable assignment to put before a command."""
    return "" if options.interface is None else f"{INTERFACE}={options.interface} "


def _executor_arguments(
    plan: TrainingPlan, options: ExportOptions, devices: Sequence[int]
) -> list[str]:
    """Return the executor's arguments on a node with these devices."""
    ids = plan.cluster.network.ids
    named = ["--devices", *(ids[d] for d in devices)]
    return [options.plan_path, *named, *shlex.split(options.executor_options)]
