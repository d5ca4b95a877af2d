"""What the executor holds of a stage: planned bytes, and what PyTorch makes beside them."""

from __future__ import annotations

from dataclasses import dataclass

from planner.workload.costs import stage_costs
from planner.workload.layers import Architecture
from planner.workload.workload import Workload

SUM_BYTES = 4
"""Of a value in fp32."""
LOSS_COPIES = 3
"""Of logits in fp32: their log-softmax, its gradient and that of the logits."""
ADAMW_COPIES = 2
"""Of the largest parameter, while AdamW updates it alone."""


@dataclass(frozen=True)
class ExecutedBytes:
    """Memory of one rank.

    Attributes
    ----------
    planned
        As plans count: `StageCosts.need_bytes`.
    rounded_weights
        Copies of the parameters in the format of compute.
    operations
        Beyond what is planned for one operation: logits and their gradients in fp32, a layer's
        gradients, the embedding's.
    """

    planned: float
    rounded_weights: float
    operations: float

    @property
    def total(self) -> float:
        """At most at any time."""
        return self.planned + self.rounded_weights + self.operations


def executed_bytes(
    workload: Workload,
    start: int,
    stop: int,
    microbatches: int,
    *,
    with_head: bool = False,
    recompute: bool = False,
    updates_at_once: bool = False,
) -> ExecutedBytes:
    """Memory for the layers ``start`` to ``stop - 1`` as the executor holds them.

    Parameters
    ----------
    workload
        Of an architecture that the executor builds.
    start, stop
        Layers ``start`` to ``stop - 1``.
    microbatches
        Between their F and B at a time.
    with_head, recompute
        As for `stage_costs`.
    updates_at_once
        Whether AdamW works on all parameters together, as it does on a GPU.

    Returns
    -------
    ExecutedBytes
        Of one rank.
    """
    arch = workload.architecture
    assert arch is not None
    costs = stage_costs(workload, start, stop, with_head=with_head, recompute=recompute)
    kept = workload.precision.compute.bytes
    samples = workload.microbatch_samples
    # one microbatch's activations, in B at the latest
    whole = workload.stage(start, stop).saved_bytes * samples
    layer = max(one.saved_bytes for one in workload.layers[start:stop]) * samples
    table = arch.vocabulary * arch.hidden
    matrix = _largest_matrix(arch)
    moments = [(whole if recompute else 0.0) + layer + kept * matrix]
    if start == 0:
        # its gradient is the last of B, when the microbatch's activations are gone
        moments.append(SUM_BYTES * table - (0.0 if recompute else whole))
    if with_head:
        logits = samples * arch.sequence * arch.vocabulary
        moments += [LOSS_COPIES * SUM_BYTES * logits, kept * (logits + table)]
    working = microbatches * costs.saved_bytes + max(moments)
    largest = table if start == 0 or with_head else matrix
    parameters = workload.stage(start, stop).parameters
    parameters += workload.head_parameters(start) if with_head else 0
    updating = SUM_BYTES * (parameters if updates_at_once else ADAMW_COPIES * largest)
    planned = costs.need_bytes(microbatches)
    narrow = kept < workload.precision.parameters.bytes
    rounded = parameters - (workload.stem.parameters if start == 0 else 0)
    # what the embedding looks up in full the head multiplies with rounded; a copy counts already
    rounded += table if with_head and arch.tied and start == 0 else 0
    return ExecutedBytes(
        planned,
        float(kept * rounded if narrow else 0),
        max(costs.state_bytes + max(working, updating) - planned, 0.0),
    )


def unexecuted(workload: Workload) -> str:
    """Why the executor cannot run a workload that can be planned.

    Parameters
    ----------
    workload
        Without an architecture, or with one that has what the executor does not do.

    Returns
    -------
    str
        One line with the field and the remedy.
    """
    arch = workload.architecture
    what = "no transformer of known sizes" if arch is None else arch.unexecuted[0]
    return (
        f"workload.architecture: {workload.name!r} can be planned but not run, the executor does "
        f"not do this: {what}; take a GPT-2, LLaMA, Mistral, Qwen2 or Qwen3 workload without"
    )


def _largest_matrix(arch: Architecture) -> int:
    attention = arch.attention_size * (arch.heads + 2 * arch.kv_heads)
    return arch.hidden * max(attention, arch.ffn)
