"""Make the plan files of gpu_check: ``python benchmarks/gpu_check/make_plans.py FOLDER``.

Needs the planner with its solvers; running the sections does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.solve import plan
from planner.search.stop import MaxIterations
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

GPT2, LLAMA = Family.GPT2, Family.LLAMA
H200_FLOPS, H200_BYTES = 4e14, 1.4e11
"""What a device is assumed to attain, and its memory."""


def make_plan(
    model: str,
    arch: Architecture,
    samples: int,
    microbatch: int,
    precision: str,
    devices: int = 1,
    stages: int = 1,
    **options: Any,
) -> TrainingPlan:
    """Plan a model for equal devices of one machine."""
    workload = Workload.transformer(
        model, arch, batch_samples=samples, microbatch_samples=microbatch, precision=precision
    )
    ones = np.ones((devices, devices))
    ids = [f"g{k}" for k in range(devices)]
    # links as fast as those between processes, so that sends are not throttled
    network = Network(1e-4 * ones, 2e9 * ones, ids)
    cluster = Cluster(network, Devices(H200_FLOPS, H200_BYTES))
    found = plan(cluster, workload, stages=stages, stop=MaxIterations(1), seed=0, **options).plan
    assert found is not None, model
    return found


def cuda_plans() -> Iterator[tuple[str, TrainingPlan]]:
    """Plans of full size."""
    medium = Architecture(GPT2, 24, 1024, 16, 16, 4096, 50257, 1024)
    llama16 = Architecture(LLAMA, 16, 2048, 16, 16, 5504, 32000, 1024)
    gpt13 = Architecture(GPT2, 24, 2048, 16, 16, 8192, 50257, 2048)
    llama32 = Architecture(LLAMA, 16, 2048, 32, 8, 8192, 128256, 2048, tied=True, rope_theta=5e5)
    small = Architecture(GPT2, 12, 768, 12, 12, 3072, 256, 512)
    yield "over_gpt2m", make_plan("gpt2-medium", medium, 32, 8, "bf16")
    yield "over_llama16", make_plan("llama-16x2048", llama16, 16, 4, "bf16")
    yield "mfu_gpt13", make_plan("gpt-1.3b", gpt13, 32, 4, "bf16")
    yield "mfu_llama1b", make_plan("llama-3.2-1b", llama32, 32, 4, "bf16")
    yield "speed_gpt13", make_plan("gpt-1.3b", gpt13, 16, 4, "bf16")
    yield "speed_llama1b", make_plan("llama-3.2-1b", llama32, 16, 4, "bf16")
    for stages in (1, 2, 4):
        # with microbatches of 8, four whole models would not fit a GPU of 80 GB
        yield f"share_gpt2m_{stages}", make_plan("gpt2-medium", medium, 32, 4, "bf16", 4, stages)
    yield "share_llama16_4", make_plan("llama-16x2048", llama16, 16, 4, "bf16", 4, 4)
    for shards in (1, 2):
        options = {"optimizer_shards": shards, "clip": 1.0}
        yield (
            f"shards_{shards}",
            make_plan("llama-16x2048", llama16, 16, 4, "bf16", 2, 1, **options),
        )
    yield "train", make_plan("gpt2-small-bytes", small, 64, 16, "bf16")
    yield "grid", make_plan("gpt2-small-bytes", small, 32, 4, "bf16", 4, 2)


def cpu_plans() -> Iterator[tuple[str, TrainingPlan]]:
    """Tiny plans of the same names, to try the sections without a GPU."""
    gpt = Architecture(GPT2, 4, 64, 4, 4, 256, 256, 64)
    llama = Architecture(LLAMA, 4, 64, 4, 2, 176, 256, 64, tied=True)
    yield "over_gpt2m", make_plan("tiny-gpt", gpt, 16, 4, "fp32")
    yield "over_llama16", make_plan("tiny-llama", llama, 16, 4, "fp32")
    yield "mfu_gpt13", make_plan("tiny-gpt", gpt, 16, 4, "bf16")
    yield "mfu_llama1b", make_plan("tiny-llama", llama, 16, 4, "bf16")
    yield "speed_gpt13", make_plan("tiny-gpt", gpt, 8, 4, "bf16")
    yield "speed_llama1b", make_plan("tiny-llama", llama, 8, 4, "bf16")
    for stages in (1, 2, 4):
        yield f"share_gpt2m_{stages}", make_plan("tiny-gpt", gpt, 16, 4, "fp32", 4, stages)
    yield "share_llama16_4", make_plan("tiny-llama", llama, 16, 4, "fp32", 4, 4)
    for shards in (1, 2):
        options = {"optimizer_shards": shards, "clip": 1.0}
        yield f"shards_{shards}", make_plan("tiny-llama", llama, 16, 4, "bf16", 2, 1, **options)
    yield "train", make_plan("tiny-gpt", gpt, 32, 8, "fp32")
    yield "grid", make_plan("tiny-gpt", gpt, 16, 2, "fp32", 4, 2)


def comparison_plans() -> Iterator[tuple[str, TrainingPlan]]:
    """Small plans for sections that compare devices, or streams, to a reference."""
    archs = {
        "gpt2": Architecture(GPT2, 4, 128, 4, 4, 512, 509, 64),
        "gpt2_tied": Architecture(GPT2, 4, 128, 4, 4, 512, 509, 64, tied=True),
        "llama_gqa": Architecture(LLAMA, 4, 128, 8, 2, 344, 512, 64),
        "mistral_window": Architecture(LLAMA, 4, 128, 8, 2, 344, 512, 64, window=24),
        "qwen3_norms": Architecture(LLAMA, 4, 128, 8, 2, 344, 512, 64, qk_norm=True),
    }
    for name, arch in archs.items():
        for precision in ("fp32", "bf16"):
            yield f"equal_{name}_{precision}", make_plan(name, arch, 8, 2, precision)
    for precision in ("fp32", "bf16"):
        yield f"race_{precision}", make_plan("race", archs["gpt2"], 8, 1, precision, 6, 3)


def memory_plans(hidden: int, vocabulary: int, sequence: int) -> Iterator[tuple[str, TrainingPlan]]:
    """Pipelines of two stages, whose memory is compared to what is expected."""
    h, v, t = hidden, vocabulary, sequence
    f = 8 * h // 3 // 64 * 64
    archs = {
        "gpt2": Architecture(GPT2, 6, h, 16, 16, 4 * h, 6 * v, t),
        "gpt2_tied": Architecture(GPT2, 6, h, 16, 16, 4 * h, 6 * v, t, tied=True),
        "llama_gqa": Architecture(LLAMA, 6, h, 16, 4, f, 4 * v, t),
        "llama_tied_words": Architecture(LLAMA, 6, h, 16, 4, f, 16 * v, t, tied=True),
        "mistral_window": Architecture(LLAMA, 6, h, 16, 4, f, 4 * v, t, window=t // 2),
        "qwen2_bias": Architecture(LLAMA, 6, h, 16, 4, f, 16 * v, t, qkv_bias=True),
        "qwen3_norms": Architecture(LLAMA, 6, h, 16, 4, f, 16 * v, t, qk_norm=True),
    }
    for name, arch in archs.items():
        for precision, recompute in (("bf16", "none"), ("bf16", "all"), ("fp32", "none")):
            options = {"recompute": recompute} | ({"head": "first"} if arch.tied else {})
            yield (
                f"mem_{name}_{precision}_{recompute}",
                make_plan(name, arch, 8, 2, precision, 2, 2, **options),
            )


def main() -> None:
    """Write all plan files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for kind, plans in (
        ("cuda", cuda_plans()),
        ("cpu", cpu_plans()),
        ("both", comparison_plans()),
        ("cuda", memory_plans(2048, 32000, 2048)),
        ("cpu", memory_plans(128, 1000, 64)),
    ):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name, made in plans:
            path = folder / kind / f"{name}.json"
            save_plan(made, path)
            print(
                f"{path}: {made.workload.parameters / 1e6:.1f}M parameters, "
                f"{len(made.cluster)} devices, {len(made.stage_layers)} stages",
                flush=True,
            )


if __name__ == "__main__":
    main()
