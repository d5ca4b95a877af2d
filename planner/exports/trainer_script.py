"""Shell scripts that start another trainer with an explicit rank for every planned device."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.exports.options import ExportOptions
from planner.exports.trainer_plan import TrainerPlan, TrainerRank
from planner.utils.text import printable


@dataclass(frozen=True)
class Launch:
    """What a trainer's script runs.

    Attributes
    ----------
    release
        Name and release of the trainer.
    prediction
        The predicted step, and of what, for the head of the script.
    command
        Words before the options.
    options
        Lines of options that all ranks share.
    files
        Contents by name; the script writes them into ``$run_dir``.
    variables
        Environment of all ranks.
    rank_options
        More options of a rank, by its number.
    rank_variables
        Environment of a rank, by its number; ``RANK`` and ``LOCAL_RANK`` need not be given.
    notes
        More lines for the head.
    before
        Lines of shell to run on a host before its ranks, by host.
    """

    release: str
    prediction: str
    command: Sequence[str]
    options: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    rank_options: Mapping[int, str] = field(default_factory=dict)
    rank_variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    before: Mapping[str, Sequence[str]] = field(default_factory=dict)


def option_lines(options: Mapping[str, object]) -> list[str]:
    """``--name value`` for every option, quoted; True is a flag without a value."""
    return [
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        for name, value in options.items()
    ]


def launch_script(trainer: TrainerPlan, options: ExportOptions, launch: Launch) -> str:
    """One script for all hosts; each starts its own ranks.

    torchrun numbers the ranks of a host consecutively, which a mesh whose pipelines stay within a
    host does not allow. The script therefore sets ``RANK`` and ``LOCAL_RANK`` itself.
    """
    first = trainer.ranks[0].host
    variables = {
        "WORLD_SIZE": str(len(trainer.ranks)),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(options.port),
    } | dict(launch.variables)
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    files = "".join(
        f"cat > \"$run_dir/{name}\" <<'EOF'\n{text}EOF\n" for name, text in launch.files.items()
    )
    rows = "".join(f"  {line}\n" for line in launch.options)
    path = ""
    if any(name.endswith(".py") for name in launch.files):
        path = 'export PYTHONPATH="$run_dir${PYTHONPATH:+:$PYTHONPATH}"\n'
    return f"""#!/bin/bash
{_head(trainer, launch)}set -euo pipefail
host=${{1:-$(hostname)}}
shift $(( $# > 0 ))
case "$host" in
  {"|".join(dict.fromkeys(one.host for one in trainer.ranks))}) ;;
  *) echo "the plan has no host $host" >&2; exit 2 ;;
esac
run_dir={options.run_id}.${{host//:/_}}
mkdir -p "$run_dir"
export {exports}
{path}{files}options=(
{rows})
pids=()
trap 'kill "${{pids[@]}}" ${{lighthouse:-}} 2>/dev/null || true' EXIT
rank() {{  # NAME=VALUE ... [-- OPTION ...]
  local variables=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do variables+=("$1"); shift; done
  shift $(( $# > 0 ))
  env "${{variables[@]}}" {shlex.join(launch.command)} "${{options[@]}}" "$@" "${{user[@]}}" &
  pids+=($!)
}}
user=("$@")
case "$host" in
{_cases(trainer, launch)}esac
for _ in "${{pids[@]}}"; do wait -n; done
"""


def _head(trainer: TrainerPlan, launch: Launch) -> str:
    """Comments: what this is, how to start it, what it should take, which rank is where."""
    plan = trainer.plan
    ids = plan.cluster.network.ids
    lines = [
        f"{launch.release}, exported by planner {plan.package_version} from plan "
        f"{plan.content_hash[:12]}.",
        "Run on every host: bash FILE [HOST [OPTION ...]]. HOST is `hostname` by default; options",
        "are passed to the trainer: give it data, tokenizer and optimizer settings there.",
        launch.prediction,
        *launch.notes,
        "",
        "rank  host  local_rank  device  stage  pipeline  layers",
    ]
    for one in trainer.ranks:
        start, stop = plan.stage_layers[one.stage]
        lines.append(
            f"{one.rank}  {one.host}  {one.local_rank}  {ids[one.device]}  {one.stage}  "
            f"{one.pipeline}  {start}-{stop - 1}"
        )
    return "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)


def _cases(trainer: TrainerPlan, launch: Launch) -> str:
    hosts: dict[str, list[TrainerRank]] = {}
    for one in trainer.ranks:
        hosts.setdefault(one.host, []).append(one)
    text = ""
    for host, ranks in hosts.items():
        lines = [*launch.before.get(host, ()), *(_rank_line(one, launch) for one in ranks)]
        text += f"  {host})\n" + "".join(f"    {line}\n" for line in lines) + "    ;;\n"
    return text


def _rank_line(one: TrainerRank, launch: Launch) -> str:
    variables = {"RANK": str(one.rank), "LOCAL_RANK": str(one.local_rank)}
    variables |= launch.rank_variables.get(one.rank, {})
    if one.interface is not None:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), one.interface)
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    line = " ".join(["rank", *words])
    more = launch.rank_options.get(one.rank)
    return line if more is None else f"{line} -- {more}"


def pipeline_files(trainer: TrainerPlan, option: str) -> tuple[dict[str, str], dict[int, str]]:
    """The order of each pipeline as CSV, and the option of each rank that names its file."""
    if trainer.stages == 1:
        return {}, {}
    orders = [trainer.csv_order(pipeline) for pipeline in range(trainer.replicas)]
    names = [f"order{orders.index(order)}.csv" for order in orders]
    return (
        dict(zip(names, orders, strict=True)),
        {one.rank: f'--{option} "$run_dir/{names[one.pipeline]}"' for one in trainer.ranks},
    )


def order_name(trainer: TrainerPlan) -> str:
    """What a predicted step is of."""
    return "in this order of operations" if trainer.stages > 1 else "without pipelines"


def prediction(step_s: float, planned_s: float, order: str) -> str:
    """The line of a script that states its predicted step."""
    return (
        f"Predicted step: {step_s:.4g} s, {order}, all-reduce in equal shares "
        f"(the plan itself: {planned_s:.4g} s)."
    )
