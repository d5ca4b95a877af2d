"""Memory of a stage, from the definitions: state, saved activations, the largest operation.

State: fp32 parameters, gradients and moments as the workload states them, and copies of all
parameters but the embedding's in the format of compute. Saved: what layers save of each microbatch
between F and B, and the stage's output. The largest operation: B of one layer, B of the embedding,
or H with its logits in fp32. Four messages are on their way to or from other stages.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.workload.layers import Family
from planner.workload.workload import Workload


class StageMemory(NamedTuple):
    """Bytes: of the state, of each microbatch between its F and its B, of the largest operation."""

    state: float
    saved: float
    operation: float


def stage_memory(
    workload: Workload, start: int, stop: int, *, runs_head: bool, recomputes: bool
) -> StageMemory:
    """Memory of layers ``start`` to ``stop - 1``; layer 0 brings the embedding."""
    w, samples, first = workload, workload.microbatch_samples, start == 0
    owned = sum(layer.parameters for layer in w.layers[start:stop])
    embedding = w.stem.parameters if first else 0
    # a head on another stage has a copy of what it shares with the embedding
    head = w.head.parameters + (0 if first else w.tied_parameters) if runs_head else 0
    state = (owned + embedding + head) * w.state_bytes_per_parameter
    activations = sum(layer.saved_bytes for layer in w.layers[start:stop])
    activations += w.stem.saved_bytes if first else 0.0
    # what a codec took in, not what it sent
    outputs = [layer.output_bytes / w.boundary_ratio for layer in w.layers]
    given = 0.0 if first else outputs[start - 1]
    made = outputs[stop - 1]
    arch = w.architecture
    if arch is None:
        logits = w.head.saved_bytes if runs_head else 0.0
        if recomputes:
            kept = given + (made if runs_head else 0.0)
            return StageMemory(state, kept * samples, max(logits, activations) * samples)
        return StageMemory(state, activations * samples, logits * samples)
    activations += made
    compute = w.precision.compute.bytes
    if compute < w.precision.parameters.bytes:
        copied = owned + head + (w.tied_parameters if first and runs_head else 0)
        state += compute * copied
    tokens = samples * arch.sequence
    again = activations * samples if recomputes else 0.0
    operations = [compute * (tokens * _gradients(w) + _matrix(w)) + again]
    if first:
        # its stage's activations are freed by then
        freed = 0.0 if recomputes else activations * samples
        table = arch.vocabulary * arch.hidden
        operations.append(4.0 * table + 20.0 * tokens * arch.hidden - freed)
    if runs_head:
        words = tokens * arch.vocabulary
        plain = compute * (words + arch.vocabulary * arch.hidden)
        operations.append(max(12.0 * words, plain) + 2.0 * compute * tokens * arch.hidden)
    largest = max(operations)
    if arch.window is not None and arch.window < arch.sequence:
        largest += compute * float(arch.sequence) ** 2
    if (start, stop) != (0, len(w.layers)):
        largest += 4 * samples * max(layer.output_bytes for layer in w.layers)
    if recomputes:
        return StageMemory(state, (given + (made if runs_head else 0.0)) * samples, largest)
    return StageMemory(state, activations * samples, largest)


def _gradients(workload: Workload) -> float:
    """Elements of a token in the backward pass of one layer, its attention or feed-forward part."""
    arch = workload.architecture
    assert arch is not None
    heads = arch.attention_size * arch.heads
    widest = float(arch.ffn)
    if arch.experts is not None:
        routed = arch.experts.active * arch.experts.ffn + arch.experts.shared_ffn
        widest = max(widest, float(routed))
    gated = arch.kind is not Family.GPT2
    around = 4 * widest + 2 * arch.hidden if gated else 2 * widest + 3 * arch.hidden
    return float(max(around, 6 * heads + 3 * arch.hidden))


def _matrix(workload: Workload) -> float:
    """Elements of the largest weight of a layer."""
    arch = workload.architecture
    assert arch is not None
    widths = [arch.ffn, arch.attention_size * (arch.heads + 2 * arch.kv_heads)]
    if arch.experts is not None:
        widths += [arch.experts.ffn, arch.experts.shared_ffn]
    return float(arch.hidden * max(widths))
