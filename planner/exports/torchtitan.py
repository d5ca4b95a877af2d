"""Export to torchtitan 0.3.0, and to torchft 0.2.0 with torchtitan."""

from __future__ import annotations

import math

from planner.exports.error import ExportError
from planner.exports.options import PORTS, ExportOptions, endpoint
from planner.exports.trainer_plan import DTYPES, TrainerPlan
from planner.exports.trainer_script import (
    Launch,
    launch_script,
    option_lines,
    order_name,
    pipeline_files,
    prediction,
)
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer
from planner.workload.layers import Architecture

TORCHTITAN = "torchtitan 0.3.0"
TORCHFT = f"torchft 0.2.0 with {TORCHTITAN}"
DILOCO = OuterOptimizer()
"""Outer optimizer built into torchtitan's torchft trainer: SGD, rate 0.7, Nesterov momentum 0.9."""
MODULE = "plan_model"
TRAIN = ("python", "-m", "torchtitan.train")
SCHEDULE_CSV = "parallelism.pipeline_parallel_schedule_csv"


def torchtitan_script(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return a script that starts torchtitan with the plan's stages, schedule and ranks."""
    trainer = TrainerPlan.for_target(plan, "torchtitan", options)
    order = trainer.planned_order()
    trainer.require_memory(order, lambda _: 1)
    step_s = trainer.predicted_step_s(order, waits_for_norm=True)
    shards = trainer.replicas if plan.shards_optimizer else 1
    parallelism: dict[str, object] = {
        "parallelism.data_parallel_replicate_degree": trainer.replicas // shards,
        "parallelism.data_parallel_shard_degree": shards,
    }
    if plan.shards_optimizer:
        # weights stay whole between operations, as in the plan
        parallelism["parallelism.fsdp_reshard_after_forward"] = "never"
    if trainer.tensor_parallel > 1:
        parallelism["parallelism.tensor_parallel_degree"] = trainer.tensor_parallel
    files, rank_options = pipeline_files(trainer, SCHEDULE_CSV)
    return launch_script(
        trainer,
        options,
        Launch(
            TORCHTITAN,
            prediction(step_s, plan.predicted.step_s, order_name(trainer)),
            TRAIN,
            _options(trainer, parallelism, "inf" if plan.clip is None else f"{plan.clip:g}"),
            files=_model_file(trainer, fault_tolerant=False) | files,
            rank_options=rank_options,
        ),
    )


def torchft_script(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return a script that starts the lighthouse and one torchft replica group per pipeline."""
    trainer = TrainerPlan.for_target(plan, "torchft", options, local_steps=True, shards=False)
    if trainer.tensor_parallel > 1:
        raise trainer.refuse(
            f"devices of {trainer.tensor_parallel} GPUs", "plan with --tensor-parallel 1"
        )
    method = _semi_sync_method(trainer)
    if options.port + trainer.replicas > PORTS:
        raise ExportError(
            f"port must be at most {PORTS - trainer.replicas} for {trainer.replicas} pipelines, "
            f"which use the ports after it, found {options.port}; give a smaller one"
        )
    order = trainer.planned_order()
    trainer.require_memory(order, lambda _: 1)
    step_s = trainer.predicted_step_s(order, waits_for_norm=False)
    parallelism: dict[str, object] = {
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.data_parallel_shard_degree": 1,
        # groups average for the first time after sync_steps, so equal seeds make parameters equal
        "debug.seed": plan.seed,
        "fault_tolerance.semi_sync_method": method,
        "fault_tolerance.sync_steps": plan.sync.every_steps,
        "fault_tolerance.num_fragments": 1,
        "fault_tolerance.group_size": trainer.replicas,
        "fault_tolerance.min_replica_size": trainer.replicas,
        "fault_tolerance.process_group_timeout_ms": 1000
        * _timeout_s(60, plan.predicted.averaging_s),
    }
    files, rank_options = pipeline_files(trainer, SCHEDULE_CSV)
    lighthouse = trainer.ranks[0].host
    heads = {process.pipeline: process.host for process in trainer.ranks if process.stage == 0}
    return launch_script(
        trainer,
        options,
        Launch(
            TORCHFT,
            prediction(step_s, plan.predicted.step_s, order_name(trainer)),
            TRAIN,
            _options(trainer, parallelism, "inf"),
            files=_model_file(trainer, fault_tolerant=True) | files,
            variables={
                "WORLD_SIZE": str(trainer.stages),
                "TORCHFT_LIGHTHOUSE": f"http://{endpoint(lighthouse, options.port)}",
            },
            rank_options={
                process.rank: " ".join(
                    [
                        f"--fault_tolerance.replica_id {process.pipeline}",
                        *_option_of(rank_options, process.rank),
                    ]
                )
                for process in trainer.ranks
            },
            rank_variables={
                process.rank: {
                    "RANK": str(process.stage),
                    "MASTER_ADDR": heads[process.pipeline],
                    "MASTER_PORT": str(options.port + 1 + process.pipeline),
                }
                for process in trainer.ranks
            },
            notes=("Each pipeline is a replica group; RANK and WORLD_SIZE count within it.",),
            before={
                lighthouse: [
                    f'torchft_lighthouse --bind "[::]:{options.port}" --min_replicas '
                    f"{trainer.replicas} --quorum_tick_ms 100 --join_timeout_ms 10000 &",
                    "lighthouse=$!",
                ]
            },
        ),
    )


def _semi_sync_method(trainer: TrainerPlan) -> str:
    sync = trainer.plan.sync
    if not sync.local_steps:
        raise trainer.refuse(
            "gradients averaged in every step", "use --to torchtitan, or plan with --sync-every"
        )
    if sync.delayed:
        raise trainer.refuse(
            "a delayed outer step, which is x + (z - y) here and an interpolation in torchft",
            "plan without delay",
        )
    if sync.outer is None:
        return "local_sgd"
    if sync.outer != DILOCO:
        raise trainer.refuse(
            f"an outer {sync.outer.optimizer} step of rate {sync.outer.learning_rate:g} and "
            f"momentum {sync.outer.momentum:g}",
            f"plan with {DILOCO.learning_rate:g} and {DILOCO.momentum:g}, the only ones it "
            "supports",
        )
    return "diloco"


def _options(trainer: TrainerPlan, parallelism: dict[str, object], max_norm: str) -> list[str]:
    """Return the options that all ranks share."""
    plan, stages = trainer.plan, trainer.stages
    dtype = DTYPES[trainer.compute_dtype()]
    samples, microbatch = trainer.pipeline_samples, plan.workload.microbatch_samples
    lines = option_lines({"module": MODULE, "config": "planned"} | parallelism)
    lines += option_lines(
        {
            "training.local_batch_size": samples if stages > 1 else microbatch,
            "training.global_batch_size": plan.workload.batch_samples,
            "training.seq_len": trainer.llama().sequence,
            "training.max_norm": max_norm,
            "training.mixed_precision_param": dtype,
            "comm.init_timeout_seconds": _timeout_s(300, plan.predicted.step_s),
            "comm.train_timeout_seconds": _timeout_s(100, plan.predicted.step_s),
            "parallelism.pipeline_parallel_degree": stages,
        }
    )
    if stages > 1:
        modules = " ".join(
            ",".join(names) for names in trainer.modules("tok_embeddings", "layers", "norm")
        )
        lines += option_lines(
            {
                "training.disable_cuda_graphs": True,
                "parallelism.pipeline_parallel_microbatch_size": microbatch,
                "parallelism.pipeline_parallel_schedule": "1F1B",
            }
        )
        lines.append(f"--parallelism.module_fqns_per_model_part {modules}")
    return lines


def _timeout_s(least: int, predicted_s: float) -> int:
    """Return ten times the predicted time, at least the default made for data centres."""
    return max(least, math.ceil(10 * predicted_s))


def _option_of(options: dict[int, str], rank: int) -> list[str]:
    return [options[rank]] if rank in options else []


def _model_file(trainer: TrainerPlan, *, fault_tolerant: bool) -> dict[str, str]:
    """Return a module with the model's configuration; torchtitan has no options for sizes."""
    text = _model_text(trainer.llama(), trainer.recomputes, fault_tolerant=fault_tolerant)
    return {f"{MODULE}.py": text}


def _model_text(arch: Architecture, recomputes: bool, *, fault_tolerant: bool) -> str:
    package = (
        "torchtitan.experiments.torchft.llama3" if fault_tolerant else "torchtitan.models.llama3"
    )
    base = "llama3_torchft_debugmodel" if fault_tolerant else "llama3_debugmodel_ce_loss"
    checkpoint = "FullAC.Config()" if recomputes else "None"
    tie = ""
    if arch.tied:
        tie = """
    model.enable_weight_tying = True
    model.tok_embeddings.param_init = _EMBEDDING_SKIP_INIT"""
    return f'''"""The planned LLaMA, with data, optimizer and checkpoints of the debug model."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.llama3 import (
    _EMBEDDING_SKIP_INIT,
    _build_llama3_layers,
    _output_linear_init,
)
from {package}.config_registry import {base}


def planned():
    config = {base}()
    model = config.model_spec.model
    model.dim, model.vocab_size = {arch.hidden}, {arch.vocabulary}
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = {arch.vocabulary}
    model.tok_embeddings.embedding_dim = model.lm_head.in_features = {arch.hidden}
    model.lm_head.param_init = _output_linear_init({arch.hidden})
    model.norm.normalized_shape, model.norm.eps = {arch.hidden}, {arch.norm_eps!r}
    model.layers = _build_llama3_layers(
        n_layers={arch.layers},
        dim={arch.hidden},
        n_heads={arch.heads},
        n_kv_heads={arch.kv_heads},
        hidden_dim={arch.ffn},
        rope=ComplexRoPE.Config(
            dim={arch.attention_size},
            max_seq_len={arch.position_rows},
            theta={arch.rope_theta!r},
        ),
        attn_backend="flex",
    )
    for layer in model.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = {arch.norm_eps!r}{tie}
    config.loss = CrossEntropyLoss.Config(global_vocab_size={arch.vocabulary})
    config.activation_checkpoint = {checkpoint}
    return config
'''
