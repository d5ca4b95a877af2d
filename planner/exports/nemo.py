"""Export to NeMo Automodel 0.7.0."""

from __future__ import annotations

import json
import math

from planner.exports.options import ExportOptions
from planner.exports.trainer_plan import DTYPES, TrainerPlan
from planner.exports.trainer_script import (
    Launch,
    launch_script,
    order_name,
    pipeline_files,
    prediction,
)
from planner.network.dtype import Dtype
from planner.training_plan.model import TrainingPlan

NEMO = "NeMo Automodel 0.7.0"
TRAIN = ("python", "-m", "nemo_automodel.cli.app")


def nemo_script(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return a script that starts NeMo Automodel with a YAML file of the plan."""
    trainer = TrainerPlan.for_target(plan, "nemo", options)
    trainer.llama()
    per_pipeline = trainer.pipeline_samples // plan.workload.microbatch_samples
    if trainer.stages > 1 and per_pipeline < trainer.stages:
        raise trainer.refuse(
            f"{per_pipeline} microbatches in a pipeline of {trainer.stages} stages",
            "plan at least as many microbatches as stages",
        )
    order = trainer.planned_order()
    trainer.require_memory(order, lambda _: 1)
    step_s = trainer.predicted_step_s(order, waits_for_norm=True)
    orders, rank_options = pipeline_files(trainer, "distributed.pipeline.pp_schedule_csv")
    return launch_script(
        trainer,
        options,
        Launch(
            NEMO,
            prediction(step_s, plan.predicted.step_s, order_name(trainer)),
            TRAIN,
            ['"$run_dir/plan.yaml"'],
            files={"plan.yaml": _yaml(trainer)} | orders,
            # without this variable the command would launch ranks itself
            variables={"TORCHELASTIC_RUN_ID": options.run_id},
            rank_options=rank_options,
            notes=(
                "FSDP2 keeps a shard of parameters and optimizer state on each rank: gradients are "
                "reduce-scattered",
                "and parameters all-gathered once a step, which moves the bytes of an all-reduce.",
            )
            if trainer.replicas > 1
            else (),
        ),
    )


def _yaml(trainer: TrainerPlan) -> str:
    """Return the recipe with the plan's settings and a mock dataset to replace."""
    plan, arch = trainer.plan, trainer.llama()
    precision = plan.workload.precision
    dtype = DTYPES[trainer.compute_dtype(reduces=(Dtype.FP32, Dtype.BF16))]
    microbatch = plan.workload.microbatch_samples
    local = trainer.pipeline_samples if trainer.stages > 1 else microbatch
    sequence_parallel = "  sequence_parallel: true\n" if trainer.tensor_parallel > 1 else ""
    pipeline = ""
    if trainer.stages > 1:
        # every stage needs the rotary embedding
        named = trainer.modules("model.embed_tokens", "model.layers", "model.norm")
        stages = [[*modules, "model.rotary_emb"] for modules in named]
        rows = "".join(f"      - {json.dumps(modules)}\n" for modules in stages)
        pipeline = (
            "  pipeline:\n    pp_schedule: 1f1b\n"
            f"    pp_microbatch_size: {microbatch}\n"
            f"    pp_seq_len: {arch.sequence}\n"
            f"    module_fqns_per_model_part:\n{rows}"
        )
    return f"""recipe: TrainFinetuneRecipeForNextTokenPrediction

step_scheduler:
  global_batch_size: {plan.workload.batch_samples}
  local_batch_size: {local}

dist_env:
  backend: nccl
  timeout_minutes: {max(10, math.ceil(plan.predicted.step_s / 6))}

distributed:
  strategy: fsdp2
  pp_size: {trainer.stages}
  dp_size: {trainer.replicas}
  tp_size: {trainer.tensor_parallel}
{sequence_parallel}  cp_size: 1
  activation_checkpointing: {json.dumps(trainer.recomputes)}
  defer_fsdp_grad_sync: true
  reshard_after_forward: false
  mp_policy:
    _target_: torch.distributed.fsdp.MixedPrecisionPolicy
    param_dtype: {dtype}
    reduce_dtype: {DTYPES[precision.gradients]}
    output_dtype: {dtype}
{pipeline}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  torch_dtype: float32
  config:
    _target_: transformers.LlamaConfig
    architectures: [LlamaForCausalLM]
    vocab_size: {arch.vocabulary}
    hidden_size: {arch.hidden}
    intermediate_size: {arch.ffn}
    num_hidden_layers: {arch.layers}
    num_attention_heads: {arch.heads}
    num_key_value_heads: {arch.kv_heads}
    max_position_embeddings: {arch.position_rows}
    rms_norm_eps: {_float(arch.norm_eps)}
    rope_theta: {_float(arch.rope_theta)}
    tie_word_embeddings: {json.dumps(arch.tied)}
    use_cache: false

clip_grad_norm:
  max_norm: {".inf" if plan.clip is None else _float(plan.clip)}

loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy

optimizer:
  _target_: torch.optim.AdamW
  lr: 0.0003

dataset:
  _target_: nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDatasetConfig
  vocab_size: {arch.vocabulary}
  seq_len: {arch.sequence}
  batch_size: {local}

dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  batch_size: null
"""


def _float(value: float) -> str:
    """Format a float for YAML 1.1, which needs a decimal point before an exponent."""
    text = repr(float(value))
    return text if "." in text else text.replace("e", ".0e")
