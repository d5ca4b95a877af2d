"""Commands that run a plan: torchrun lines, and a Slurm script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from planner.exports.options import ExportOptions, require_name
from planner.exports.ranks import nodes_of
from planner.training_plan.model import TrainingPlan

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Read by the executor on every node."""


def torchrun_lines(plan: TrainingPlan, options: ExportOptions) -> str:
    """A comment with the host, then the line to run there, for every host.

    Parameters
    ----------
    plan
        The plan.
    options
        ``hosts``, ``interface``, ``port``, ``run_id``, ``plan_path``, ``executor_options``.

    Returns
    -------
    str
        Lines for a POSIX shell.

    Raises
    ------
    ExportError
        A name that is none of a host.
    """
    commands = _commands(plan, options)
    lines = "".join(f"# {host}\n{command}\n" for host, command in commands.items())
    return _remark(plan, options, commands) + lines


def slurm_script(plan: TrainingPlan, options: ExportOptions) -> str:
    """One script for sbatch, which starts torchrun once a node.

    Parameters
    ----------
    plan
        The plan.
    options
        As for `torchrun_lines`; hosts are Slurm's names of nodes.

    Returns
    -------
    str
        For bash.

    Raises
    ------
    ExportError
        A name that is none of a host.
    """
    commands = _commands(plan, options)
    cases = "".join(f"    {host}) {command} ;;\n" for host, command in commands.items())
    # a node finds its own line by its name: Slurm sorts nodes as it likes
    return f"""#!/bin/bash
#SBATCH --job-name={options.run_id}
#SBATCH --nodes={len(commands)}
#SBATCH --ntasks-per-node=1
#SBATCH --nodelist={",".join(commands)}

{_remark(plan, options, commands)}on_node() {{
  case "$SLURMD_NODENAME" in
{cases}    *) echo "the plan has no node $SLURMD_NODENAME" >&2; exit 2 ;;
  esac
}}
export -f on_node
srun --kill-on-bad-exit=1 bash -c on_node
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


def _commands(plan: TrainingPlan, options: ExportOptions) -> dict[str, str]:
    """What each host runs."""
    nodes = nodes_of(plan, options)
    for host in nodes:
        require_name("host", host)
    ids = plan.cluster.network.ids
    commands = {}
    for node, (host, devices) in enumerate(nodes.items()):
        words = ["torchrun", "--nnodes", str(len(nodes)), "--node-rank", str(node)]
        words += ["--nproc-per-node", str(len(devices)), "--rdzv-backend", "static"]
        words += ["--rdzv-endpoint", f"{next(iter(nodes))}:{options.port}"]
        words += ["--rdzv-id", options.run_id, "-m", "planner.executor", options.plan_path]
        words += ["--devices", *(ids[d] for d in devices)]
        words += shlex.split(options.executor_options)
        setting = "" if options.interface is None else f"{INTERFACE}={options.interface} "
        commands[host] = setting + shlex.join(words)
    return commands
