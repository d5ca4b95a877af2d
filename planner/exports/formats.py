"""All formats that a plan can be written in. To add one: a function, and a line in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.exports.error import ExportError
from planner.exports.graph import node_link
from planner.exports.launch import node_lines, slurm_script, torchrun_lines
from planner.exports.linear_programs import averaging_programme, flow_programme
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
    """One way out.

    Attributes
    ----------
    about
        What is written, for help.
    text
        Makes it; raises `ExportError` for what it cannot express.
    reads
        The options it heeds; others are refused.
    """

    about: str
    text: Callable[[TrainingPlan, ExportOptions], str]
    reads: frozenset[str] = frozenset()


HOSTS = frozenset({"hosts"})
STAGE = frozenset({"stage"})
TRAINER = HOSTS | {"interface", "port", "run_id"}
LAUNCH = HOSTS | {"interface", "port", "run_id", "plan_path", "executor_options"}
FORMATS = {
    "ranks": Format("JSON: device, host, stage and pipeline of each rank", rank_map, HOSTS),
    "hostfile": Format("a line a host: name slots=processes", host_file, HOSTS),
    "torchrun": Format("the line to run on each host", torchrun_lines, LAUNCH),
    "nodes": Format(
        "the same without torchrun, also with --elastic", node_lines, LAUNCH - {"run_id"}
    ),
    "slurm": Format("one sbatch script", slurm_script, LAUNCH),
    "torch-pipelining": Format(
        "CSV of torch.distributed.pipelining", pipelining_csv, frozenset({"pipeline"})
    ),
    "torchtitan": Format("script that starts torchtitan 0.3.0", torchtitan_script, TRAINER),
    "torchft": Format("script that starts torchft 0.2.0 (DiLoCo)", torchft_script, TRAINER),
    "megatron": Format(
        "script that starts Megatron-LM, Megatron-Core 0.16.1", megatron_script, TRAINER
    ),
    "nemo": Format("script that starts NeMo Automodel 0.7.0", nemo_script, TRAINER),
    "networkx": Format("node-link JSON of devices and messages", node_link),
    "flow-lp": Format("linear programme of the flow of microbatches", flow_programme("lp")),
    "flow-mps": Format("the same as MPS", flow_programme("mps")),
    "averaging-lp": Format("LP (5) of DeDLOC for a stage", averaging_programme("lp"), STAGE),
    "averaging-mps": Format("the same as MPS", averaging_programme("mps"), STAGE),
    "chrome-trace": Format(
        "the predicted step for ui.perfetto.dev", chrome_trace, frozenset({"schedule"})
    ),
}
"""By the name that ``planner export --to`` takes."""


def export_plan(plan: TrainingPlan, to: str, path: str | Path | None = None, **options: Any) -> str:
    """Write a plan in another tool's terms.

    Parameters
    ----------
    plan
        The plan.
    to
        Name of a format: a key of `FORMATS`.
    path
        Of the file to write; None: none is written.
    options
        Fields of `ExportOptions` that the format reads.

    Returns
    -------
    str
        The text.

    Raises
    ------
    ExportError
        The format cannot express the plan, does not read an option, or there is none of that name;
        the plan contradicts itself.
    """
    instance_of(TrainingPlan, plan, "plan", error=ExportError)
    if not isinstance(to, str) or to not in FORMATS:
        raise ExportError(
            f"there is no format {short_repr(to)}; choose one of {', '.join(FORMATS)}"
        )
    chosen = FORMATS[to]
    for name in options:
        if name not in chosen.reads:
            read = ", ".join(sorted(chosen.reads)) or "no options"
            raise ExportError(f"{to} does not read {name}; leave it out ({to} reads {read})")
    for problem in contradictions(plan):
        raise ExportError(problem)
    text = chosen.text(plan, ExportOptions(**options))
    if path is not None:
        write_text(path, text)
    return text
