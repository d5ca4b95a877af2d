"""The largest models that fit on a cluster, with optimizer state in shards and tensor parallelism.

    python -m benchmarks.what_fits [--out FILE.md]

Layers of one width are added as long as a plan is found that passes the checker, with
recomputation and microbatches of one sample of 2,048 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import planner as pl
from benchmarks.command_line import report_path, run, versions
from benchmarks.machines import Instance
from planner.workload.layers import Architecture, Family

PACKAGES = ("planner", "numpy", "numba", "ortools", "scipy")
MOST_LAYERS = 256
EFFORT = 0.02
MODELS = {
    "GPT-3 13B": (Family.GPT2, 5120, 40, 40, 20480, 50257),
    "GPT-3 175B": (Family.GPT2, 12288, 96, 96, 49152, 50257),
    "LLaMA 8B": (Family.LLAMA, 4096, 32, 8, 14336, 128256),
    "LLaMA 70B": (Family.LLAMA, 8192, 64, 8, 28672, 128256),
}
"""Models whose layers are taken: width, heads, key-value heads, feed-forward width and words."""
SMALL, LARGE = ("GPT-3 13B", "LLaMA 8B"), ("GPT-3 175B", "LLaMA 70B")


class Fit(NamedTuple):
    """The largest model of a kind.

    Attributes
    ----------
    layers
        Their number; 0 if one does not fit.
    server_share
        The largest share of a stage's optimizer state that a device without a stage owns.
    """

    layers: int
    parameters: int
    step_s: float
    shape: str
    server_share: float


def homes() -> pl.Cluster:
    """Two homes, each with a machine of four cards of 24 GB."""
    machines = (("a", "RTX4090", 4), ("b", "RTX4090", 4))
    return Instance("homes", machines, 1, 0.5, "3B", 64).cluster()


def regions() -> pl.Cluster:
    """Two regions, each with a machine of eight cards of 80 GB."""
    machines = (("a", "A100-80GB", 8), ("b", "A100-80GB", 8))
    return Instance("regions", machines, 100, 5, "8B", 64).cluster()


def volunteers() -> pl.Cluster:
    """Twenty volunteers with a card of 24 GB, and a server with 256 GB and no card."""
    n = 21
    network = pl.Network(np.full((n, n), 0.02), np.full((n, n), 1e9 / 8))
    server = np.arange(n) == n - 1
    memory = pl.Devices.of_gpu("RTX4090", 1, dtype="bf16").memory_bytes
    devices = pl.Devices(
        66e12,
        np.where(server, 256e9, float(np.max(memory))),
        upload_bytes_per_s=np.where(server, 1e9 / 8, 100e6 / 8),
        download_bytes_per_s=np.where(server, 1e9 / 8, 300e6 / 8),
        can_compute=(~server).tolist(),
    )
    return pl.Cluster(network, devices)


CLUSTERS = {
    "8 cards of 24 GB, two homes": (homes, 4, SMALL),
    "16 cards of 80 GB, two regions": (regions, 8, LARGE),
    "20 volunteers of 24 GB, a server of 256 GB": (volunteers, 1, SMALL),
}
"""Cluster, GPUs of a machine, and models."""


def cases(cluster: pl.Cluster, gpus: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Stages, how their state is held, and the fields of the request."""
    able = int(np.asarray(cluster.devices.can_compute).sum())
    for stages in (1, 2, 4, able):
        fields: dict[str, Any] = {"stages": stages, "averaging": "adaptive"}
        yield str(stages), "whole", fields
        # of all devices of a stage, or of those at each of two places
        most = able // stages
        for shards in (most, most // 2 if gpus > 1 else 0):
            if shards > 1:
                yield str(stages), f"in {shards} shards", fields | {"optimizer_shards": shards}
        if gpus > 1 and able // gpus % stages == 0:
            yield str(stages), f"{gpus} GPUs a worker", fields | {"tensor_parallel": gpus}


def fitted(
    cluster: pl.Cluster, model: str, layers: int, fields: dict[str, Any]
) -> pl.TrainingPlan | None:
    """A plan of a model with so many layers; None if none was found."""
    kind, hidden, heads, kv_heads, ffn, words = MODELS[model]
    arch = Architecture(kind, layers, hidden, heads, kv_heads, ffn, words, 2048)
    workload = pl.Workload.transformer(model, arch, batch_samples=80, precision="bf16")
    try:
        result = pl.plan(cluster, workload, stop=pl.Effort(EFFORT), **fields)
    except pl.ProblemError:
        return None
    if result.plan is not None and (violations := pl.check(result.plan, cluster)):
        raise AssertionError(f"{model} with {layers} layers: {violations[0]}")
    return result.plan


def largest(cluster: pl.Cluster, model: str, fields: dict[str, Any]) -> Fit:
    """The largest model, by bisection."""
    # each stage has a layer at least
    fits, too_many, best = fields["stages"] - 1, MOST_LAYERS, None
    while too_many - fits > 1:
        layers = (fits + too_many) // 2 if best is not None else max(fits + 1, too_many // 4)
        plan = fitted(cluster, model, layers, fields)
        if plan is None:
            too_many = layers
        else:
            fits, best = layers, plan
    if best is None:
        return Fit(0, 0, 0.0, "", 0.0)
    owned = [
        share
        for rounds in best.averaging
        for group in rounds[-1]
        for share, holds in zip(group.shares, group.receives, strict=True)
        if not holds
    ]
    shape = " ".join(str(len(group)) for group in best.assignment.groups)
    return Fit(fits, best.workload.parameters, best.predicted.step_s, shape, max(owned, default=0))


def main(argv: Sequence[str] | None = None) -> int:
    """Find the largest models, and write a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    lines = [
        "| cluster | layers of | stages | optimizer state | billion parameters | layers "
        "| devices of each stage | share of the server | step s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (make, gpus, models) in CLUSTERS.items():
        cluster = make()
        for model in models:
            for stages, state, fields in cases(cluster, gpus):
                fit = largest(cluster, model, fields)
                server = f"{fit.server_share:.2f}" if fit.server_share else ""
                figures = f"{fit.parameters / 1e9:.2f} | {fit.layers} | {fit.shape} | {server}"
                step = f"{fit.step_s:.1f}" if fit.layers else ""
                line = f"| {name} | {model} | {stages} | {state} | {figures} | {step} |"
                lines.append(line)
                print(line, flush=True)
    text = "\n".join(
        [
            f"# What fits, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{versions(*PACKAGES)}. Regenerate with `python -m "
            "benchmarks.what_fits`. As many layers of a model as fit, bf16, batches of 80 samples "
            "of 2,048 tokens, recomputation as needed; every plan passes the checker. Steps "
            "are the simulator's, after little search.",
            "",
            *lines,
            "",
        ]
    )
    (args.out or report_path("what-fits")).write_text(text)
    return 0


if __name__ == "__main__":
    run(main)
