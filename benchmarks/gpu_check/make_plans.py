"""The plan files of gpu_check: run it where ortools, pulp and deap are, from the root of a checkout.

python gpu_check/make_plans.py gpu_check/plans
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from planner.compose.planning import plan
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.search.stop import MaxIterations
from planner.training_plan.file import save_plan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

GPT2, LLAMA = Family.GPT2, Family.LLAMA


def made(name, arch, samples, microbatch, precision, devices=1, stages=1, **more):
    workload = Workload.transformer(
        name, arch, batch_samples=samples, microbatch_samples=microbatch, precision=precision
    )
    square = np.ones((devices, devices))
    names = [f"g{k}" for k in range(devices)]
    # links as between processes of one machine, so that no chunk is paced for a slow network
    cluster = Cluster(Network(1e-4 * square, 2e9 * square, names), Devices(4e14, 1.4e11))
    found = plan(cluster, workload, stages=stages, stop=MaxIterations(1), seed=0, **more).plan
    assert found is not None, name
    return found


def cuda():
    medium = Architecture(GPT2, 24, 1024, 16, 16, 4096, 50257, 1024)
    llama16 = Architecture(LLAMA, 16, 2048, 16, 16, 5504, 32000, 1024)
    gpt13 = Architecture(GPT2, 24, 2048, 16, 16, 8192, 50257, 2048)
    llama32 = Architecture(LLAMA, 16, 2048, 32, 8, 8192, 128256, 2048, tied=True, rope_theta=5e5)
    small = Architecture(GPT2, 12, 768, 12, 12, 3072, 256, 512)
    yield "over_gpt2m", made("gpt2-medium", medium, 32, 8, "bf16")
    yield "over_llama16", made("llama-16x2048", llama16, 16, 4, "bf16")
    yield "mfu_gpt13", made("gpt-1.3b", gpt13, 32, 4, "bf16")
    yield "mfu_llama1b", made("llama-3.2-1b", llama32, 32, 4, "bf16")
    yield "speed_gpt13", made("gpt-1.3b", gpt13, 16, 4, "bf16")
    yield "speed_llama1b", made("llama-3.2-1b", llama32, 16, 4, "bf16")
    for stages in (1, 2, 4):
        # in microbatches of 8, as planner bench overhead has them, four whole models do not fit 80 GB
        yield f"share_gpt2m_{stages}", made("gpt2-medium", medium, 32, 4, "bf16", 4, stages)
    yield "share_llama16_4", made("llama-16x2048", llama16, 16, 4, "bf16", 4, 4)
    yield "train", made("gpt2-small-bytes", small, 64, 16, "bf16")
    yield "grid", made("gpt2-small-bytes", small, 32, 4, "bf16", 4, 2)


def cpu():
    """The same names, so that the same commands can be tried where there is no GPU."""
    gpt = Architecture(GPT2, 4, 64, 4, 4, 256, 256, 64)
    llama = Architecture(LLAMA, 4, 64, 4, 2, 176, 256, 64, tied=True)
    yield "over_gpt2m", made("tiny-gpt", gpt, 16, 4, "fp32")
    yield "over_llama16", made("tiny-llama", llama, 16, 4, "fp32")
    yield "mfu_gpt13", made("tiny-gpt", gpt, 16, 4, "bf16")
    yield "mfu_llama1b", made("tiny-llama", llama, 16, 4, "bf16")
    yield "speed_gpt13", made("tiny-gpt", gpt, 8, 4, "bf16")
    yield "speed_llama1b", made("tiny-llama", llama, 8, 4, "bf16")
    for stages in (1, 2, 4):
        yield f"share_gpt2m_{stages}", made("tiny-gpt", gpt, 16, 4, "fp32", 4, stages)
    yield "share_llama16_4", made("tiny-llama", llama, 16, 4, "fp32", 4, 4)
    yield "train", made("tiny-gpt", gpt, 32, 8, "fp32")
    yield "grid", made("tiny-gpt", gpt, 16, 2, "fp32", 4, 2)


def both():
    """Small ones that are computed on both, and compared."""
    cases = {
        "gpt2": (GPT2, 4, 128, 4, 4, 512, 509, 64),
        "gpt2_tied": (GPT2, 4, 128, 4, 4, 512, 509, 64, True),
        "llama_gqa": (LLAMA, 4, 128, 8, 2, 344, 512, 64),
    }
    archs = {name: Architecture(*sizes) for name, sizes in cases.items()}
    archs["mistral_window"] = Architecture(LLAMA, 4, 128, 8, 2, 344, 512, 64, window=24)
    archs["qwen3_norms"] = Architecture(LLAMA, 4, 128, 8, 2, 344, 512, 64, qk_norm=True)
    for name, arch in archs.items():
        for precision in ("fp32", "bf16"):
            yield f"equal_{name}_{precision}", made(name, arch, 8, 2, precision)
    tiny = archs["gpt2"]
    for precision in ("fp32", "bf16"):
        yield f"race_{precision}", made("race", tiny, 8, 1, precision, 6, 3)


def memory(size):
    """Pipelines of two stages of five families, whose peaks are compared with what is expected.

    `size` scales the hidden state, the vocabulary and the sequence.
    """
    h, v, t = 256 * size, 4000 * size, 256 * size
    f = 8 * h // 3 // 64 * 64
    archs = {
        "gpt2": Architecture(GPT2, 6, h, 16, 16, 4 * h, 6 * v, t),
        "gpt2_tied": Architecture(GPT2, 6, h, 16, 16, 4 * h, 6 * v, t, True),
        "llama_gqa": Architecture(LLAMA, 6, h, 16, 4, f, 4 * v, t),
        "llama_tied_words": Architecture(LLAMA, 6, h, 16, 4, f, 16 * v, t, True),
        "mistral_window": Architecture(LLAMA, 6, h, 16, 4, f, 4 * v, t, window=t // 2),
        "qwen2_bias": Architecture(LLAMA, 6, h, 16, 4, f, 16 * v, t, qkv_bias=True),
        "qwen3_norms": Architecture(LLAMA, 6, h, 16, 4, f, 16 * v, t, qk_norm=True),
    }
    for name, arch in archs.items():
        for precision, recompute in (("bf16", "none"), ("bf16", "all"), ("fp32", "none")):
            more = {"recompute": recompute}
            if arch.tied:
                more["head"] = "first"
            yield (
                f"mem_{name}_{precision}_{recompute}",
                made(name, arch, 8, 2, precision, 2, 2, **more),
            )


def main(folder: Path) -> None:
    sets = (
        ("cuda", cuda()),
        ("cpu", cpu()),
        ("both", both()),
        ("cuda", memory(8)),
        ("cpu", memory(1)),
    )
    for kind, plans in sets:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name, found in plans:
            path = folder / kind / f"{name}.json"
            save_plan(found, path)
            w = found.workload
            print(
                f"{path}: {w.parameters / 1e6:.1f}M parameters, {len(found.cluster)} devices, "
                f"{len(found.stage_layers)} stages, {path.stat().st_size} bytes",
                flush=True,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
