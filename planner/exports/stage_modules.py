"""Which layers a stage has, as torchtitan and Megatron are told."""

from __future__ import annotations

import json
import shlex

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions
from planner.exports.straight import Pipelines, first_schedule, require_trainable
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family


def torchtitan_toml(plan: TrainingPlan, _: ExportOptions) -> str:
    """The parts of torchtitan's configuration that the plan decides.

    Parameters
    ----------
    plan
        Of a LLaMA, untied.

    Returns
    -------
    str
        TOML: degrees of parallelism, modules of every stage, batch of a pipeline.

    Raises
    ------
    ExportError
        What torchtitan cannot express.
    """
    pipelines = require_trainable(plan, "torchtitan")
    architecture = _transformer(plan, "torchtitan")
    if architecture.kind is not Family.LLAMA:
        raise ExportError(
            f"torchtitan cannot express a {architecture.kind} model; plan one of the llama family"
        )
    if architecture.tied:
        raise ExportError(
            "torchtitan cannot express a head tied to the embedding across stages; plan a "
            "workload with a head of its own"
        )
    stages = len(plan.stage_layers)
    modules = [[f"layers.{k}" for k in range(*ends)] for ends in plan.stage_layers]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", "output"]
    rows = "".join(f"  {json.dumps(row)},\n" for row in modules)
    return (
        "[training]\n"
        f"local_batch_size = {_microbatches(plan, pipelines) * plan.workload.microbatch_samples}\n"
        f"seq_len = {architecture.sequence}\n"
        "\n[parallelism]\n"
        f"data_parallel_replicate_degree = {len(pipelines)}\n"
        "data_parallel_shard_degree = 1\n"
        f"pipeline_parallel_degree = {stages}\n"
        f"pipeline_parallel_microbatch_size = {plan.workload.microbatch_samples}\n"
        f"module_fqns_per_model_part = [\n{rows}]\n"
    )


def megatron_options(plan: TrainingPlan, _: ExportOptions) -> str:
    """Megatron's options that the plan decides.

    Parameters
    ----------
    plan
        Of a transformer.

    Returns
    -------
    str
        One line. In the layout ``E`` is the embedding, ``t*n`` are layers, ``L`` is the head with
        the loss, and ``|`` lies between stages.

    Raises
    ------
    ExportError
        What Megatron cannot express.
    """
    require_trainable(plan, "megatron")
    _transformer(plan, "megatron")
    parts = [f"t*{stop - start}" for start, stop in plan.stage_layers]
    parts[0] = f"E{parts[0]}"
    parts[-1] += "L"
    workload = plan.workload
    words = ["--tensor-model-parallel-size", "1"]
    words += ["--pipeline-model-parallel-size", str(len(parts))]
    words += ["--pipeline-model-parallel-layout", "|".join(parts)]
    words += ["--micro-batch-size", str(workload.microbatch_samples)]
    words += ["--global-batch-size", str(workload.batch_samples)]
    return shlex.join(words) + "\n"


def _transformer(plan: TrainingPlan, target: str) -> Architecture:
    architecture = plan.workload.architecture
    if architecture is None:
        raise ExportError(
            f"{target} cannot express workload {plan.workload.name!r}, which is no known "
            "transformer; plan a preset or a config.json"
        )
    return architecture


def _microbatches(plan: TrainingPlan, pipelines: Pipelines) -> int:
    """Of each pipeline."""
    return len(first_schedule(plan).paths) // len(pipelines)
