"""Why no layout fits: the smallest need that is too large, and what would help."""

from __future__ import annotations

from dataclasses import replace

from planner.compose.layer_split import Filled, evenly_filled
from planner.compose.layout_search import LayoutSearch
from planner.network.words import quantity, some
from planner.workload.workload import Workload

SHORTEST = 128
"""Tokens of a sample below which a shorter sequence is no advice."""


def nothing_fits(layouts: LayoutSearch) -> str:
    """One line: the stage that does not fit in the split that comes nearest, and what would help.

    Parameters
    ----------
    layouts
        The search that found none.
    """
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
    at = f"microbatches of {some(samples, 'sample')}"
    if workload.architecture is not None:
        at += f" of {workload.architecture.sequence} tokens"
    layers = f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"
    extra = ["embedding"] if start == 0 else []
    extra += ["head"] if stop == len(workload.layers) else []
    named = " and ".join([layers, *extra])
    single = len(workload.layers)
    kinds = [best.recompute[0]] * single
    divided = evenly_filled(workload, [max(memory)] * single, kinds).share <= 1
    others = [] if asked is None else [s for s in numbers if layouts.tightest(s)[0].share <= 1]
    helps = [
        *_shorter(workload, best),
        *(["recomputation (--recompute all)"] if (False,) in best.recompute else []),
        *(["smaller microbatches (--microbatch-samples)"] if samples > 1 else []),
        *([f"another number of stages (--stages {others[0]})"] if others else []),
        *(["more devices"] if asked is None and divided else []),
        "devices with more memory",
    ]
    return (
        f"no layout fits the devices' memory: of {some(stages, 'stage')}, the one with {named} "
        f"needs {quantity(costs.need_bytes(1), 'B')} ({', '.join(parts)}) for {at}, and its "
        f"device has {quantity(memory[stage], 'B')}; what would help: {', '.join(helps)}"
    )


def _shorter(workload: Workload, best: Filled) -> list[str]:
    """A sequence at which as many stages fit the same devices, if there is one."""
    if workload.architecture is None:
        return []
    tokens = workload.architecture.sequence // 2
    while tokens >= SHORTEST:
        shorter = Workload.transformer(
            workload.name,
            replace(workload.architecture, sequence=tokens),
            batch_samples=workload.batch_samples,
            microbatch_samples=workload.microbatch_samples,
            precision=workload.precision,
        )
        if evenly_filled(shorter, best.memory, best.recompute).share <= 1:
            return [f"a shorter sequence (--sequence {tokens})"]
        tokens //= 2
    return []
