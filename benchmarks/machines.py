"""Plans on machines of several GPUs, with and without tensor parallelism.

    python -m benchmarks.machines [--effort 4] [--seed 0] [--out FILE.md]

Every degree of tensor parallelism is planned with the same effort, and so is what ``auto`` chooses
for unlike machines. Each is compared with the best consecutive ranks and the rules of SAILOR and
Metis with the same workers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np

import planner as pl
from benchmarks.command_line import report_path, run, versions
from planner.bench.job_generator import MODELS
from planner.planning.baselines.metis import metis_rule
from planner.planning.baselines.sailor import sailor_rule
from planner.planning.problem import PlanningProblem
from planner.planning.workers import degrees, kinds_of_machines, mix_words
from planner.workload.layers import Architecture, Family

PACKAGES = ("planner", "numpy", "numba", "ortools")
NEAR_S, FAR_S = 0.1e-3, 0.035


@dataclass(frozen=True)
class Instance:
    """Machines at several places.

    Attributes
    ----------
    machines
        Place, GPU and number of GPUs of each machine.
    near_gbps, far_gbps
        Line of a machine to others of its place, and of other places.
    model
        Of `benchmarks.baselines.MODELS`.
    """

    name: str
    machines: tuple[tuple[str, str, int], ...]
    near_gbps: float
    far_gbps: float
    model: str
    batch_samples: int
    precision: str = "bf16"

    def cluster(self) -> pl.Cluster:
        """The GPUs, as a devices file describes them."""
        n = len(self.machines)
        places = np.array([place for place, _, _ in self.machines])
        near = places[:, None] == places
        names = [f"m{k}" for k in range(n)]
        network = pl.Network(
            np.where(near, NEAR_S, FAR_S),
            np.where(near, self.near_gbps, self.far_gbps) * 1e9 / 8,
            names,
            places.tolist(),
        )
        rows = [
            f"{name},{name},{gpu},{count}"
            for name, (_, gpu, count) in zip(names, self.machines, strict=True)
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "devices.csv")
            path.write_text("\n".join(["name,machine,gpu,count", *rows]) + "\n")
            return pl.load_devices(path, network)

    def workload(self) -> pl.Workload:
        """A LLaMA with samples of 2,048 tokens."""
        layers, hidden, heads, kv_heads, ffn, vocabulary = MODELS[self.model]
        arch = Architecture(Family.LLAMA, layers, hidden, heads, kv_heads, ffn, vocabulary, 2048)
        return pl.Workload.transformer(
            self.model, arch, batch_samples=self.batch_samples, precision=self.precision
        )


INSTANCES = (
    Instance(
        "4 x 8 H100, two regions",
        (("a", "H100", 8),) * 2 + (("b", "H100", 8),) * 2,
        100,
        5,
        "70B",
        512,
    ),
    Instance("2 x 8 A100-80GB, one place", (("a", "A100-80GB", 8),) * 2, 100, 100, "32B", 128),
    Instance(
        "2 x 4 RTX4090, two homes", (("a", "RTX4090", 4), ("b", "RTX4090", 4)), 1, 0.5, "3B", 64
    ),
    Instance(
        "4 x 2 RTX3090, four homes", tuple((p, "RTX3090", 2) for p in "abcd"), 1, 0.2, "3B", 64
    ),
    Instance(
        "8 single A100, three places", tuple((p, "A100", 1) for p in "aaabbbcc"), 25, 2, "8B", 128
    ),
    Instance(
        "4 x 4 V100-32GB, two places",
        tuple((p, "V100-32GB", 4) for p in "aabb"),
        25,
        2,
        "8B",
        128,
        "fp16",
    ),
    Instance(
        "8 H100, 4 A100-80GB, 2 x 2 L40S, three places",
        (("a", "H100", 8), ("b", "A100-80GB", 4), ("c", "L40S", 2), ("c", "L40S", 2)),
        25,
        5,
        "32B",
        128,
    ),
    Instance(
        "2 x 4 H100, 2 x 8 RTX4090, 2 x 2 A6000, three places",
        (*(("a", "H100", 4),) * 2, *(("b", "RTX4090", 8),) * 2, *(("c", "A6000", 2),) * 2),
        25,
        5,
        "32B",
        128,
    ),
    Instance(
        "4 RTX4090, 2 x 2 RTX3090, 4 single RTX4090, seven homes",
        (
            ("a", "RTX4090", 4),
            *((p, "RTX3090", 2) for p in "bc"),
            *((p, "RTX4090", 1) for p in "defg"),
        ),
        1,
        0.5,
        "8B",
        64,
    ),
    Instance(
        "5 x 8 T4, five places", tuple((p, "T4", 8) for p in "abcde"), 10, 1, "1B", 128, "fp16"
    ),
)


def step_or_none(make: Callable[[], float]) -> float | None:
    """A step time; None if nothing fits."""
    try:
        return make()
    except (pl.ProblemError, pl.NetworkError):
        return None


def rules_s(
    cluster: pl.Cluster, workload: pl.Workload, degree: int | Mapping[str, int]
) -> tuple[float | None, float | None]:
    """Steps by the rules of SAILOR and Metis."""

    def problem() -> PlanningProblem:
        request = pl.PlanRequest(tensor_parallel=degree)
        return PlanningProblem.of(cluster, workload, request, 0, {})

    sailor = step_or_none(lambda: sailor_rule(problem()).plan.step_s)
    metis = step_or_none(lambda: metis_rule(problem()).plan.predicted.step_s)
    return sailor, metis


def row(instance: Instance, degree: int | Literal["auto"], effort: float, seed: int) -> str:
    """A line of the table."""
    cluster, workload = instance.cluster(), instance.workload()
    try:
        result = pl.plan(
            cluster, workload, tensor_parallel=degree, stop=pl.Effort(effort), seed=seed
        )
    except pl.ProblemError as error:
        return f"| {instance.name} | {degree} | {str(error).split(';')[0][:80]} | | | | | | |"
    assert result.plan is not None and result.objective is not None
    problems = pl.check(result.plan, cluster)
    ranks = None if result.baselines is None else result.baselines.ranks
    ranks_s = None if ranks is None else ranks.best[1].step_s
    chosen = result.request.tensor_parallel
    sailor_s, metis_s = rules_s(cluster, workload, chosen)
    others = [s for s in (ranks_s, sailor_s, metis_s) if s is not None]
    ratio = result.objective / min(others) if others else None
    figures = [result.objective, result.bound, ranks_s, sailor_s, metis_s]
    shape = " ".join(str(len(group)) for group in result.plan.assignment.groups)
    text = " | ".join("none" if value is None else f"{value:.2f}" for value in figures)
    times = "none" if ratio is None else f"{ratio:.3f}"
    invalid = f" INVALID {problems[0]}" if problems else ""
    words = degree if isinstance(chosen, int) else mix_words(cluster, chosen).split(": ")[1]
    return f"| {instance.name} | {words} | {shape} | {text} | {times} |{invalid}"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan all instances with every degree, and write a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--effort", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    lines = [
        "| machines | GPUs a worker | devices of each stage | step s | bound s | ranks s "
        "| SAILOR s | Metis s | step / fastest rule |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for instance in INSTANCES:
        cluster, workload = instance.cluster(), instance.workload()
        tried: list[int | Literal["auto"]] = [*degrees(cluster, workload)]
        tried += ["auto"] * bool(kinds_of_machines(cluster, workload))
        for degree in tried:
            line = row(instance, degree, args.effort, args.seed)
            lines.append(line)
            print(line, flush=True)
    out = args.out or report_path("machines")
    text = "\n".join(
        [
            f"# Machines of several GPUs, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{versions(*PACKAGES)}. Regenerate with `python -m "
            f"benchmarks.machines --effort {args.effort:g} --seed {args.seed}`. LLaMA models with "
            "samples of 2,048 tokens, GPUs at 40% of their peak, links of GPUs and machines as in "
            "`benchmarks/machines.py`. Bounds hold for such workers; a rule's step is "
            "the simulator's.",
            "",
            *lines,
            "",
        ]
    )
    out.write_text(text)
    return 0


if __name__ == "__main__":
    run(main)
