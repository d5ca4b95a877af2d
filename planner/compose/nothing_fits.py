"""Why no layout fits: the smallest need that is too large, and what would help."""

from __future__ import annotations

from dataclasses import replace

from planner.compose.request import Question
from planner.network.words import quantity, some
from planner.workload.costs import StageCosts, stage_costs
from planner.workload.workload import Workload

SHORTEST = 128
"""Tokens of a sample below which a shorter sequence is no advice."""


def nothing_fits(question: Question) -> str:
    """One line: stages of the fewest layers, the largest of their needs, and what would help.

    Parameters
    ----------
    question
        Whose devices hold no layout.
    """
    workload, cluster = question.workload, question.cluster
    memory = sorted(cluster.memory_bytes.tolist(), reverse=True)
    stages = question.request.fixed_stages or min(len(cluster), len(workload.layers))
    recompute = question.request.recompute
    stage, costs = _largest(workload, stages, may_recompute=recompute is None)
    start, stop = workload.even_split(stages)[stage]
    parts = [
        f"{quantity(costs.state_bytes, 'B')} of weights, gradients and optimizer",
        f"{quantity(costs.saved_bytes, 'B')} of activations",
        f"{quantity(costs.scratch_bytes, 'B')} of the largest operation",
    ]
    arch, samples = workload.architecture, workload.microbatch_samples
    at = f"microbatches of {some(samples, 'sample')}"
    if arch is not None:
        at += f" of {arch.sequence} tokens"
    layers = f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"
    extra = ["embedding"] if start == 0 else []
    extra += ["head"] if _last(workload, stop) else []
    named = " and ".join([layers, *extra])
    helps = [
        *_shorter(question, stages, memory),
        *(["recomputation (--recompute all)"] if recompute == () else []),
        *(["smaller microbatches (--microbatch-samples)"] if samples > 1 else []),
        *(["more devices"] if stages < len(workload.layers) else []),
        "devices with more memory",
    ]
    return (
        f"no layout fits the devices' memory: of {some(stages, 'stage')}, the one with {named} "
        f"needs {quantity(costs.need_bytes(1), 'B')} ({', '.join(parts)}) for {at}, and the "
        f"largest device has {quantity(memory[0], 'B')}; what would help: {', '.join(helps)}"
    )


def _last(workload: Workload, stop: int) -> bool:
    return stop == len(workload.layers)


def _largest(workload: Workload, stages: int, *, may_recompute: bool) -> tuple[int, StageCosts]:
    """The stage of an even split that needs most, recomputing where that takes less."""
    needs = []
    for start, stop in workload.even_split(stages):
        kinds = (False, True) if may_recompute else (False,)
        each = [
            stage_costs(workload, start, stop, with_head=_last(workload, stop), recompute=again)
            for again in kinds
        ]
        needs.append(min(each, key=lambda costs: costs.need_bytes(1)))
    stage = max(range(stages), key=lambda j: needs[j].need_bytes(1))
    return stage, needs[stage]


def _shorter(question: Question, stages: int, memory: list[float]) -> list[str]:
    """A sequence at which stages of an even split fit the largest devices, if there is one."""
    workload = question.workload
    if workload.architecture is None:
        return []
    tokens = workload.architecture.sequence // 2
    while tokens >= SHORTEST:
        arch = replace(workload.architecture, sequence=tokens)
        shorter = Workload.transformer(
            workload.name,
            arch,
            batch_samples=workload.batch_samples,
            microbatch_samples=workload.microbatch_samples,
            precision=workload.precision,
        )
        if _fits(shorter, stages, memory, may_recompute=question.request.recompute is None):
            return [f"a shorter sequence (--sequence {tokens})"]
        tokens //= 2
    return []


def _fits(workload: Workload, stages: int, memory: list[float], *, may_recompute: bool) -> bool:
    """Whether the largest needs fit the largest devices, one for one."""
    _, costs = _largest(workload, stages, may_recompute=may_recompute)
    return len(memory) >= stages and costs.need_bytes(1) <= memory[stages - 1]
