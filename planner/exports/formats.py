"""Registry of export formats.

To add a format, write a function and add an entry to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.exports.error import ExportError
from planner.exports.graph import node_link
from planner.exports.launch import node_lines, slurm_script, torchrun_lines
from planner.exports.linear_programs import averaging_exporter, flow_exporter
from planner.exports.megatron import megatron_script
from planner.exports.nemo import nemo_script
from planner.exports.options import ExportOptions
from planner.exports.ranks import host_file, rank_map
from planner.exports.torch_pipelining import pipelining_csv
from planner.exports.torchtitan import torchft_script, torchtitan_script
from planner.exports.trace import chrome_trace
from planner.training_plan.model import TrainingPlan
from planner.training_plan.validation import contradictions
from planner.utils.atomic_write import write_text
from planner.utils.validate import instance_of, short_repr


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes
    ----------
    about
        Description for the help text.
    text
        Returns the exported text; raises `ExportError` if the format cannot express the plan.
    reads
        Names of the options that the format uses; others are rejected.
    """

    about: str
    text: Callable[[TrainingPlan, ExportOptions], str]
    reads: frozenset[str] = frozenset()


HOSTS = frozenset({"hosts"})
STAGE = frozenset({"stage"})
TRAINER = HOSTS | {"interface", "port", "run_id"}
LAUNCH = HOSTS | {"interface", "port", "run_id", "plan_path", "executor_options"}
FORMATS = {
    "ranks": Format("JSON with device, host, stage and pipeline of each rank", rank_map, HOSTS),
    "hostfile": Format("one line per host: name slots=processes", host_file, HOSTS),
    "torchrun": Format("command line for each host, with torchrun", torchrun_lines, LAUNCH),
    "nodes": Format(
        "command line for each host, without torchrun; allows --elastic",
        node_lines,
        LAUNCH - {"run_id"},
    ),
    "slurm": Format("sbatch script", slurm_script, LAUNCH),
    "torch-pipelining": Format(
        "schedule CSV of torch.distributed.pipelining", pipelining_csv, frozenset({"pipeline"})
    ),
    "torchtitan": Format("script that starts torchtitan 0.3.0", torchtitan_script, TRAINER),
    "torchft": Format("script that starts torchft 0.2.0 (DiLoCo)", torchft_script, TRAINER),
    "megatron": Format(
        "script that starts Megatron-LM, Megatron-Core 0.16.1", megatron_script, TRAINER
    ),
    "nemo": Format("script that starts NeMo Automodel 0.7.0", nemo_script, TRAINER),
    "networkx": Format("node-link JSON of devices and messages", node_link),
    "flow-lp": Format(
        "linear program of the microbatch flow, CPLEX LP format", flow_exporter("lp")
    ),
    "flow-mps": Format("linear program of the microbatch flow, MPS format", flow_exporter("mps")),
    "averaging-lp": Format(
        "DeDLOC's linear program (5) for a stage, CPLEX LP format", averaging_exporter("lp"), STAGE
    ),
    "averaging-mps": Format(
        "DeDLOC's linear program (5) for a stage, MPS format", averaging_exporter("mps"), STAGE
    ),
    "chrome-trace": Format(
        "trace of the predicted step for ui.perfetto.dev", chrome_trace, frozenset({"schedule"})
    ),
}
"""Formats by the name given to ``planner export --to``."""


def export_plan(plan: TrainingPlan, to: str, path: str | Path | None = None, **options: Any) -> str:
    """Export a plan to the format of another tool.

    Parameters
    ----------
    plan
        The plan.
    to
        Name of the format, a key of `FORMATS`.
    path
        File to write; None: write no file.
    options
        Fields of `ExportOptions` that the format uses.

    Returns
    -------
    str
        The exported text.

    Raises
    ------
    ExportError
        The format is unknown, cannot express the plan or does not use an option, or the plan
        contradicts itself.
    """
    instance_of(TrainingPlan, plan, "plan", error=ExportError)
    if not isinstance(to, str) or to not in FORMATS:
        raise ExportError(f"unknown format {short_repr(to)}; choose one of {', '.join(FORMATS)}")
    chosen = FORMATS[to]
    for name in options:
        if name not in chosen.reads:
            read = ", ".join(sorted(chosen.reads)) or "no options"
            raise ExportError(f"format {to} does not use {name}; leave it out ({to} uses {read})")
    for problem in contradictions(plan):
        raise ExportError(problem)
    text = chosen.text(plan, ExportOptions(**options))
    if path is not None:
        write_text(path, text)
    return text
