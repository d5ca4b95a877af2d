"""Memory of a stage, from the definitions: state, saved activations, the largest operation.

State: fp32 parameters, gradients and moments as the workload states them, and copies of all
parameters but the embedding's in the format of compute. With optimizer state in k shards: one k-th
of the parameters and moments, fp32 gradients of all, and what operations use: copies in the format
of compute, of the embedding in fp32. Saved: what layers save of each microbatch between F and B,
and the stage's output; of the first layers, if they are recomputed, their input instead. The
largest operation: B of one layer, B of the embedding, or H with its logits, of which at most 2**28
are computed at a time, with their gradient or with 2**24 of them in fp32. B frees what F saved
before the first layers are computed again. Four messages are on their way to or from other stages.
With tensor parallelism the bytes are those of all GPUs of a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from planner.search.arrays import Floats
from planner.workload.layers import Family
from planner.workload.workload import Workload

CHUNK_LOGITS, BLOCK_LOGITS = 2**28, 2**24


class StageMemory(NamedTuple):
    """Bytes of the state, of each microbatch between F and B, and of the largest operation.

    The latter two by the number of the stage's first layers that are recomputed.
    """

    state: float
    saved: Floats
    operation: Floats


def stage_memory(workload: Workload, start: int, stop: int, *, runs_head: bool) -> StageMemory:
    """Memory of layers ``start`` to ``stop - 1``; the embedding belongs to layer 0."""
    w, samples, first = workload, workload.microbatch_samples, start == 0
    owned = sum(layer.parameters for layer in w.layers[start:stop])
    embedding = w.stem.parameters if first else 0
    # a head on another stage has a copy of the tied weights
    head = w.head.parameters + (0 if first else w.tied_parameters) if runs_head else 0
    state = (owned + embedding + head) * w.state_bytes_per_parameter
    if w.optimizer_shards > 1:
        # of 16 bytes, 4 of the gradient stay, and 12 / k
        state = (owned + embedding + head) * (4.0 + 12.0 / w.optimizer_shards)
        in_fp32 = w.precision.compute.bytes == 4 or w.architecture is None
        state += 4.0 * (owned + head + embedding if in_fp32 else embedding)
    arch = w.architecture
    kept, repeated = _activations(w, start, stop)
    # a codec's input, not its output
    outputs = [layer.output_bytes / w.boundary_ratio * samples for layer in w.layers]
    saved = kept.copy()
    saved[1:] += 0.0 if first else outputs[start - 1]
    saved[-1] += outputs[stop - 1] if runs_head else 0.0
    beyond_kept = np.maximum(repeated - kept, 0.0)
    if arch is None:
        logits = w.head.saved_bytes * samples if runs_head else 0.0
        return StageMemory(state, saved, np.maximum(logits, beyond_kept))
    compute = w.precision.compute.bytes
    if compute < w.precision.parameters.bytes:
        copied = owned + head + (w.tied_parameters if first and runs_head else 0)
        state += compute * copied
    for vectors, has_copy in _on_every_gpu(w, start, stop, runs_head=runs_head):
        rounded = compute if has_copy and compute < w.precision.parameters.bytes else 0
        held = w.state_bytes_per_parameter
        if w.optimizer_shards > 1:
            # a gradient, and where it is not rounded the parameter; moments only in shares
            held = 4.0 if rounded else 8.0
        state += (w.tensor_parallel - 1) * vectors * (held + rounded)
    tokens = samples * arch.sequence
    # every GPU of a worker gathers a layer's input, and has a gradient of it, for all tokens
    others = w.tensor_parallel - 1
    layer = compute * (tokens * _gradients(w) + _matrix(w))
    if others:
        # the input, and the gradients of two products with it; those of their matrices, too
        layer += others * 3 * compute * tokens * arch.hidden
        layer += 0 if arch.kind is Family.GPT2 else compute * arch.hidden * arch.ffn
    largest = layer + beyond_kept
    if first:
        # the stage's activations are freed by then
        table = arch.vocabulary * arch.hidden
        looked_up = 20.0 * tokens * arch.hidden * w.tensor_parallel
        largest = np.maximum(largest, 4.0 * table + looked_up - kept)
    if runs_head:
        # a position has the logits of every sample; passes over the sequence are equally long
        positions = CHUNK_LOGITS // (samples * arch.vocabulary) or 1
        passes = (arch.sequence + positions - 1) // positions
        positions = (arch.sequence + passes - 1) // passes
        logit_count = samples * positions * arch.vocabulary
        block = w.tensor_parallel * max(BLOCK_LOGITS, arch.vocabulary)
        converted = min(logit_count, block) * (8.0 if compute < 4 else 4.0)
        largest = np.maximum(
            largest,
            compute * logit_count
            + max(compute * logit_count, converted, compute * arch.vocabulary * arch.hidden)
            + 2.0 * compute * tokens * arch.hidden * w.tensor_parallel,
        )
    if arch.window is not None and arch.window < arch.sequence:
        largest += compute * float(arch.sequence) ** 2 * w.tensor_parallel
    if (start, stop) != (0, len(w.layers)):
        largest += w.tensor_parallel * 4 * samples * max(x.output_bytes for x in w.layers)
    return StageMemory(state, saved, largest)


def _activations(w: Workload, start: int, stop: int) -> tuple[Floats, Floats]:
    """Bytes of a microbatch that F saves, and that B computes again, by the number recomputed.

    Both with the output of their last layer, which waits for its gradient.
    """
    layers = np.array([layer.saved_bytes for layer in w.layers[start:stop]])
    layers[0] += w.stem.saved_bytes if start == 0 else 0.0
    repeated = np.append(0.0, layers.cumsum())
    kept = np.append(layers[::-1].cumsum()[::-1], 0.0)
    if w.architecture is not None:
        outputs = [layer.output_bytes / w.boundary_ratio for layer in w.layers[start:stop]]
        repeated[1:] += outputs
        kept[:-1] += outputs[-1]
    return kept * w.microbatch_samples, repeated * w.microbatch_samples


def _on_every_gpu(
    workload: Workload, start: int, stop: int, *, runs_head: bool
) -> Iterator[tuple[int, bool]]:
    """Numbers of parameters that a worker's GPUs do not share, and whether they are rounded."""
    arch = workload.architecture
    assert arch is not None
    is_gpt2 = arch.kind is Family.GPT2
    norm = (2 if is_gpt2 else 1) * arch.hidden
    for k in range(start, stop):
        yield (4 if arch.post_norms else 2) * norm, True
        if arch.qk_norm:
            yield 2 * arch.attention_size, True
        experts = arch.experts_of(k)
        if experts is not None:
            yield arch.hidden * experts.count, True
            yield arch.hidden if experts.shared_gate else 0, True
    if runs_head:
        yield norm, True
    if start == 0 and is_gpt2:
        yield arch.hidden * arch.position_rows, False


def _gradients(workload: Workload) -> float:
    """Peak number of live elements per token in the backward pass of one layer.

    Counted tensor by tensor, in the feed-forward part and in attention.
    """
    arch = workload.architecture
    assert arch is not None
    hidden, query = [arch.hidden], [arch.attention_size * arch.heads]
    inner = [_feed_forward_width(workload)]
    # GELU's input and its gradient; the layer's gradient, the norm's and the residual
    gelu = inner * 2 + hidden * 3
    # gate, up and a gradient of each; the layer's gradient and the residual
    swiglu = inner * 4 + hidden * 2
    # queries, keys and values and a gradient of each, keys and values repeated for all heads
    attention = query * 3 + query * 3 + hidden * 3
    feed_forward = gelu if arch.kind is Family.GPT2 else swiglu
    return float(max(sum(feed_forward), sum(attention)))


def _feed_forward_width(workload: Workload) -> int:
    """Feed-forward width of a token in one layer, summed over the experts it is routed to."""
    arch = workload.architecture
    assert arch is not None
    if arch.experts is None:
        return arch.ffn
    experts = [arch.experts.ffn] * arch.experts.active + [arch.experts.shared_ffn]
    return max(arch.ffn, sum(experts))


def _matrix(workload: Workload) -> float:
    """Elements of the largest weight matrix of a layer."""
    arch = workload.architecture
    assert arch is not None
    size, hidden = arch.attention_size, arch.hidden
    shapes = [
        (hidden, size * arch.heads + size * arch.kv_heads + size * arch.kv_heads),
        (size * arch.heads, hidden),
        (hidden, arch.ffn),
    ]
    if arch.experts is not None:
        shapes += [(hidden, arch.experts.ffn), (hidden, arch.experts.shared_ffn)]
    return float(max(rows * columns for rows, columns in shapes))
