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
    """Contents of a trainer's launch script.

    Attributes
    ----------
    release
        Name and version of the trainer.
    prediction
        Comment line with the predicted step time.
    command
        Command before the options.
    options
        Option lines shared by all ranks.
    files
        File contents by name; the script writes them to ``$run_dir``.
    variables
        Environment variables of all ranks.
    rank_options
        Additional options by rank.
    rank_variables
        Additional environment variables by rank; ``RANK`` and ``LOCAL_RANK`` are set by default.
    notes
        Additional comment lines.
    before
        Shell lines to run on a host before its ranks, by host.
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
    """Return ``--name value`` for every option, quoted; True means a flag without a value."""
    return [
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        for name, value in options.items()
    ]


def launch_script(trainer: TrainerPlan, options: ExportOptions, launch: Launch) -> str:
    """Return one script for all hosts; each host starts its own ranks.

    The script sets ``RANK`` and ``LOCAL_RANK`` itself: torchrun numbers the ranks of a host
    consecutively, which does not fit a mesh whose pipelines stay within a host.
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
  {"|".join(dict.fromkeys(process.host for process in trainer.ranks))}) ;;
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
# wait -n may miss a rank that has ended before
while [ ${{#pids[@]}} -gt 0 ]; do
  for k in "${{!pids[@]}}"; do
    if ! kill -0 "${{pids[k]}}" 2>/dev/null; then wait "${{pids[k]}}"; unset "pids[k]"; fi
  done
  sleep 0.2
done
"""


def _head(trainer: TrainerPlan, launch: Launch) -> str:
    """Return the comments: origin, usage, predicted step time and table of ranks."""
    plan = trainer.plan
    ids = plan.cluster.network.ids
    lines = [
        f"{launch.release}, exported by planner {plan.package_version} from plan "
        f"{plan.content_hash[:12]}.",
        "Run on every host: bash FILE [HOST [OPTION ...]]. HOST defaults to `hostname`. OPTIONs "
        "are",
        "passed to the trainer: use them for data, tokenizer and optimizer settings.",
        launch.prediction,
        *launch.notes,
        "",
        "rank  host  local_rank  device  stage  pipeline  layers",
    ]
    for process in trainer.ranks:
        start, stop = plan.stage_layers[process.stage]
        lines.append(
            f"{process.rank}  {process.host}  {process.local_rank}  {ids[process.device]}  "
            f"{process.stage}  "
            f"{process.pipeline}  {start}-{stop - 1}"
        )
    return "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)


def _cases(trainer: TrainerPlan, launch: Launch) -> str:
    hosts: dict[str, list[TrainerRank]] = {}
    for process in trainer.ranks:
        hosts.setdefault(process.host, []).append(process)
    text = ""
    for host, ranks in hosts.items():
        lines = [*launch.before.get(host, ()), *(_rank_line(process, launch) for process in ranks)]
        text += f"  {host})\n" + "".join(f"    {line}\n" for line in lines) + "    ;;\n"
    return text


def _rank_line(process: TrainerRank, launch: Launch) -> str:
    variables = {"RANK": str(process.rank), "LOCAL_RANK": str(process.local_rank)}
    variables |= launch.rank_variables.get(process.rank, {})
    if process.interface is not None:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), process.interface)
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    line = " ".join(["rank", *assignments])
    options = launch.rank_options.get(process.rank)
    return line if options is None else f"{line} -- {options}"


def pipeline_files(trainer: TrainerPlan, option: str) -> tuple[dict[str, str], dict[int, str]]:
    """Return the schedule of each pipeline as CSV, and each rank's option with its file."""
    if trainer.stages == 1:
        return {}, {}
    orders = [trainer.csv_order(pipeline) for pipeline in range(trainer.replicas)]
    names = [f"order{orders.index(order)}.csv" for order in orders]
    return (
        dict(zip(names, orders, strict=True)),
        {
            process.rank: f'--{option} "$run_dir/{names[process.pipeline]}"'
            for process in trainer.ranks
        },
    )


def order_name(trainer: TrainerPlan) -> str:
    """Describe the schedule behind a predicted step time."""
    return "with this schedule" if trainer.stages > 1 else "without pipelines"


def prediction(step_s: float, planned_s: float, order: str) -> str:
    """Return the comment line with the predicted step time."""
    return (
        f"Predicted step time: {step_s:.4g} s {order} and an all-reduce in equal shares "
        f"(the plan itself: {planned_s:.4g} s)."
    )
