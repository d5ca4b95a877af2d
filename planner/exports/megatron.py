"""Export to Megatron-LM with Megatron-Core 0.16.1."""

from __future__ import annotations

import math

from planner.exports.options import ExportOptions
from planner.exports.trainer_plan import TrainerPlan
from planner.exports.trainer_script import Launch, launch_script, option_lines, prediction
from planner.network.dtype import Dtype
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family

MEGATRON = "Megatron-LM with Megatron-Core 0.16.1"
TRAIN = ("python", "pretrain_gpt.py")


def megatron_script(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return a script that starts Megatron-LM with the plan's stages and Megatron's schedule."""
    trainer = TrainerPlan.for_target(plan, "megatron", options)
    order = trainer.one_f_one_b()
    chunk = math.gcd(*(stop - start for start, stop in plan.stage_layers))
    trainer.require_memory(order, lambda _: chunk)
    step_s = trainer.predicted_step_s(order, waits_for_norm=False)
    return launch_script(
        trainer,
        options,
        Launch(
            MEGATRON,
            prediction(step_s, plan.predicted.step_s, "with Megatron's 1F1B schedule"),
            TRAIN,
            option_lines(
                _parallel_options(trainer, chunk) | _model_options(trainer.architecture(), trainer)
            ),
            variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            notes=("Run it in the folder that contains pretrain_gpt.py.",),
        ),
    )


def _parallel_options(trainer: TrainerPlan, chunk: int) -> dict[str, object]:
    """Return options for parallelism, batch, recomputation, clipping and precision."""
    plan = trainer.plan
    stages = [f"t*{stop - start}" for start, stop in plan.stage_layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "L"
    averaged = plan.workload.precision.gradients
    dtype = trainer.compute_dtype(reduces=(Dtype.FP32, Dtype.BF16), scales_loss=True)
    if dtype is not Dtype.BF16 and averaged is Dtype.BF16:
        raise trainer.refuse(
            f"gradients averaged in bf16 that were computed in {dtype}", "plan gradients in fp32"
        )
    options: dict[str, object] = {
        "tensor-model-parallel-size": trainer.tensor_parallel,
        "pipeline-model-parallel-size": trainer.stages,
    }
    if plan.shards_optimizer:
        options["use-distributed-optimizer"] = True
    if trainer.tensor_parallel > 1:
        options["sequence-parallel"] = True
    if trainer.stages > 1:
        options["pipeline-model-parallel-layout"] = "|".join(stages)
    options |= {
        "micro-batch-size": plan.workload.microbatch_samples,
        "global-batch-size": plan.workload.batch_samples,
        "clip-grad": 0.0 if plan.clip is None else plan.clip,
        "distributed-timeout-minutes": max(10, math.ceil(plan.predicted.step_s / 6)),
    }
    if dtype is Dtype.BF16:
        options["bf16"] = True
        if averaged is Dtype.BF16:
            options["grad-reduce-in-bf16"] = True
    elif dtype is Dtype.FP16:
        options |= {"fp16": True, "accumulate-allreduce-grads-in-fp32": True}
    if trainer.recomputes:
        options |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": chunk,
        }
    return options


def _model_options(arch: Architecture, trainer: TrainerPlan) -> dict[str, object]:
    """Return options for the model's sizes and architecture."""
    unusual = {
        "experts": arch.experts is not None,
        "an attention window": arch.window is not None,
        "norms after attention and feed-forward blocks": arch.post_norms,
        "biases of some matrices": arch.out_bias or arch.ffn_bias,
    }
    if arch.kind is Family.GEMMA:
        raise trainer.refuse("a gemma model", "plan a gpt2 or llama model")
    for feature in (*arch.priced_only, *(name for name, present in unusual.items() if present)):
        raise trainer.refuse(f"a model with {feature}", "plan a model without it")
    options: dict[str, object] = {
        "num-layers": arch.layers,
        "hidden-size": arch.hidden,
        "ffn-hidden-size": arch.ffn,
        "num-attention-heads": arch.heads,
        "kv-channels": arch.attention_size,
        "seq-length": arch.sequence,
        "max-position-embeddings": arch.position_rows,
        "vocab-size": arch.vocabulary,
        "make-vocab-size-divisible-by": 1,
        "norm-epsilon": arch.norm_eps,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    if arch.kv_heads != arch.heads:
        options |= {"group-query-attention": True, "num-query-groups": arch.kv_heads}
    if not arch.tied:
        options["untie-embeddings-and-output-weights"] = True
    if arch.kind is Family.LLAMA:
        options |= {
            "position-embedding-type": "rope",
            "rotary-base": _integer_base(arch.rope_theta, trainer),
            "normalization": "RMSNorm",
            "swiglu": True,
            "disable-bias-linear": True,
        }
        if arch.qkv_bias:
            options["add-qkv-bias"] = True
        if arch.qk_norm:
            options["qk-layernorm"] = True
    return options


def _integer_base(theta: float, trainer: TrainerPlan) -> int:
    if theta != int(theta):
        raise trainer.refuse(f"a rotary base of {theta:g}", "plan a model with a whole number")
    return int(theta)
