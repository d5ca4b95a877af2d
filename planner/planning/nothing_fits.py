"""Explains why no layout fits: the smallest requirement that is too large, and remedies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.planning.layer_split import Filled, evenly_filled
from planner.planning.layout_search import LayoutSearch
from planner.utils.text import counted, quantity
from planner.workload.workload import Workload

SHORTEST = 128
"""Tokens of a sample below which a shorter sequence is no advice."""


def nothing_fits(layouts: LayoutSearch) -> str:
    """One line: which stage exceeds memory in the nearest split, and what would help."""
    workload, asked = layouts.workload, layouts.given.stages
    numbers = range(1, layouts.most + 1)
    tried = [layouts.tightest(s)[0] for s in (numbers if asked is None else [asked])]
    best = min(tried)
    split, memory, needs = best.layers, best.memory, best.costs(workload)
    stages = len(split)
    stage = max(range(stages), key=lambda j: needs[j].need_bytes(1) / memory[j])
    costs, (start, stop) = needs[stage], split[stage]
    parts = [
        f"{quantity(costs.state_bytes, 'B')} of weights, gradients and optimizer",
        f"{quantity(costs.saved_bytes, 'B')} of activations",
        f"{quantity(costs.scratch_bytes, 'B')} of the largest operation",
    ]
    samples = workload.microbatch_samples
    at = f"microbatches of {counted(samples, 'sample')}"
    if workload.architecture is not None:
        at += f" of {workload.architecture.sequence} tokens"
    layers = f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"
    extra = ["embedding"] if start == 0 else []
    extra += ["head"] if stop == len(workload.layers) else []
    named = " and ".join([layers, *extra])
    helps = [*_helps(layouts, best), "devices with more memory"]
    return (
        f"no layout fits the devices' memory: of {counted(stages, 'stage')}, the one with {named} "
        f"needs {quantity(costs.need_bytes(1), 'B')} ({', '.join(parts)}) for {at}, and its "
        f"device has {quantity(memory[stage], 'B')}; what would help: {', '.join(helps)}"
    )


def _helps(layouts: LayoutSearch, best: Filled) -> Iterator[str]:
    """What by itself makes the split fit, or another one."""
    workload, given = layouts.workload, layouts.given
    kinds, everyone = best.recompute, max(best.memory)

    def fits(
        workload: Workload, recompute: Sequence[tuple[bool, ...]], memory: Sequence[float]
    ) -> bool:
        filled = evenly_filled(workload, memory, recompute, given.layers)
        return filled.share <= 1

    for tokens, shorter in _shorter(workload):
        if fits(shorter, kinds, best.memory):
            yield f"a shorter sequence (--sequence {tokens})"
            break
    if (False,) in kinds and fits(workload, [(False, True)] * len(kinds), best.memory):
        yield "recomputation (--recompute all)"
    samples = workload.microbatch_samples
    if samples > 1 and fits(workload.replace(microbatch_samples=1), kinds, best.memory):
        yield "smaller microbatches (--microbatch-samples 1)"
    if given.layers is not None:
        return
    if given.stages is not None:
        numbers = range(1, layouts.most + 1)
        others = [s for s in numbers if layouts.tightest(s)[0].share <= 1]
        if others:
            yield f"another number of stages (--stages {others[0]})"
    elif fits(workload, kinds[:1] * len(workload.layers), [everyone] * len(workload.layers)):
        yield "more devices"


def _shorter(workload: Workload) -> Iterator[tuple[int, Workload]]:
    """The same with ever shorter samples, longest first."""
    arch = workload.architecture
    tokens = 0 if arch is None else arch.sequence // 2
    while arch is not None and tokens >= SHORTEST:
        shorter = Workload.transformer(
            workload.name,
            replace(arch, sequence=tokens),
            batch_samples=workload.batch_samples,
            microbatch_samples=workload.microbatch_samples,
            precision=workload.precision,
        ).replace(state_bytes_per_parameter=workload.state_bytes_per_parameter)
        yield tokens, shorter.with_boundary_codec(workload.boundary_codec)
        tokens //= 2
