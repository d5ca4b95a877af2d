"""Temporary memory of operations, beside a stage's state and its saved activations.

These are PyTorch's temporaries in the executor: gradients within a layer, logits, the dense
gradient of the embedding, messages in transfer. Each formula was compared with the live tensors of
a CPU (``tests/executor/test_saved_tensors.py``), all but the head's also with
`torch.cuda.max_memory_allocated` of 42 stages on an H200
(``benchmarks/results/gpu-check-2026-11-28.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

FP32_BYTES = 4
BLOCK_LOGITS = 2**24
"""Logits that are converted to fp32 at a time, for their loss and gradient."""
EMBEDDING_COPIES = 5
"""Copies of a microbatch's activations in fp32 during the backward pass of the embedding."""
HEAD_COPIES = 2
"""Copies of a microbatch's activations: input of the head, and its norm."""
GATHERED_COPIES = 3
"""Copies of a microbatch's activations on each GPU of a worker, beside its part: the gathered input
of matrix products, its gradient, and that of a second product, or in the order to be scattered."""
MESSAGES = 4
"""Messages on a device beside those of its operations: two arriving, two leaving."""


@dataclass(frozen=True)
class WorkingMemory:
    """Temporary bytes for one microbatch, by operation.

    Attributes
    ----------
    layer
        Backward pass of one layer: gradients of its activations and of its largest matrix.
    embedding
        Backward pass of the embedding: its dense gradient in fp32; the stage's activations are
        freed by then.
    head
        Head and loss, forward and backward, for the tokens of one chunk.
    messages
        Messages between stages.
    rounded_bytes
        Per parameter, its copy in the format of compute; 0 for fp32.
    """

    layer: float
    embedding: float
    head: float
    messages: float
    rounded_bytes: float

    @classmethod
    def of_workload(cls, workload: Workload) -> WorkingMemory:
        """The working memory of a workload.

        Without an architecture the executor cannot run it, so only stated bytes are counted.
        """
        arch, samples = workload.architecture, workload.microbatch_samples
        if arch is None:
            return cls(0.0, 0.0, workload.head.saved_bytes * samples, 0.0, 0.0)
        saved_bytes = workload.precision.compute.bytes
        tokens = samples * arch.sequence
        table = arch.vocabulary * arch.hidden
        logits = samples * arch.head_tokens(samples) * arch.vocabulary
        # a window's mask is one tensor for all layers and microbatches
        mask = saved_bytes * arch.sequence**2 if arch.window and arch.window < arch.sequence else 0
        # the GPUs of a worker split matrices and logits, but each gathers activations
        degree, hidden = workload.tensor_parallel, tokens * arch.hidden
        gathered = (degree - 1) * GATHERED_COPIES * saved_bytes * hidden
        mask *= degree
        block = min(logits, degree * max(BLOCK_LOGITS, arch.vocabulary))
        # a block in fp32, unless logits are, and its log-softmax or softmax
        converted = block * FP32_BYTES * (1 + (saved_bytes < FP32_BYTES))
        # compiled, logits and their gradient; else the gradient replaces them
        of_logits = saved_bytes * logits + max(saved_bytes * logits, converted)
        matrices = _largest_matrix(arch)
        if degree > 1 and arch.kind is not Family.GPT2:
            # gradients of gate and up exist together
            matrices += arch.hidden * arch.ffn
        return cls(
            layer=saved_bytes * (tokens * _gradient_elements(arch) + matrices) + gathered + mask,
            embedding=FP32_BYTES * (table + degree * EMBEDDING_COPIES * hidden) + mask,
            head=max(of_logits, saved_bytes * (logits + table))
            + degree * HEAD_COPIES * saved_bytes * hidden
            + mask,
            messages=degree * MESSAGES * samples * max(x.output_bytes for x in workload.layers),
            rounded_bytes=float(
                saved_bytes if saved_bytes < workload.precision.parameters.bytes else 0
            ),
        )

    def scratch_bytes(
        self, kept: float, again: float, *, first: bool, with_head: bool, alone: bool
    ) -> float:
        """Working memory of a stage, in the operation that needs most.

        B first frees the activations that F kept, then recomputes the others.
        """
        peak = self.layer + max(again - kept, 0.0)
        if first:
            peak = max(peak, self.embedding - kept)
        if with_head:
            peak = max(peak, self.head)
        return peak + (0.0 if alone else self.messages)


def block_rows(words: int) -> int:
    """Rows of logits in a block of at most `BLOCK_LOGITS`, or one row."""
    return max(1, BLOCK_LOGITS // words)


def _gradient_elements(arch: Architecture) -> float:
    """Most live elements per token in the backward pass of a feed-forward or attention part."""
    h, q, experts = arch.hidden, arch.attention_size * arch.heads, arch.experts
    width = arch.ffn
    if experts is not None:
        width = max(width, experts.active * experts.ffn + experts.shared_ffn)
    # around GELU; or of gate, up, their product and SiLU
    inner = 2 * width + 3 * h if arch.kind is Family.GPT2 else 4 * width + 2 * h
    # queries, keys, values and output, and results of norms and rotary positions
    return float(max(inner, 6 * q + 3 * h))


def _largest_matrix(arch: Architecture) -> int:
    attention = arch.attention_size * (arch.heads + 2 * arch.kv_heads)
    ffn = arch.ffn
    if arch.experts is not None:
        ffn = max(ffn, arch.experts.ffn, arch.experts.shared_ffn)
    return arch.hidden * max(attention, ffn)
