"""Decoder-only transformers: parameters, FLOPs and bytes of each layer.

Parameters are counted weight by weight. A matrix product costs 2 FLOPs per weight and token;
attention adds ``4 w q`` per token (scores and values; q: width of all heads, w: tokens of a sample,
or of the window if shorter; Narayanan et al. 2021, section 5.1). All experts have parameters;
tokens are assumed to be spread evenly over them, without dropping.

A layer saves for its backward pass what norms and attention keep, ``8 s h`` elements if all heads
together are as wide as h and there are two norms, and the two or three activations of the feed-
forward part: ``16 s h`` for GPT-2, the 17 of Korthikanti et al. (2022), eq. 1 with recomputed
attention scores, without dropout masks, which the executor lacks. It sends ``s h`` elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.network.dtype import Dtype
from planner.utils.validate import instance_of
from planner.workload.layers import Architecture, Family, Layer
from planner.workload.precision import Precision

Fields = dict[str, Any]
"""Fields of a `planner.workload.workload.Workload`."""

SAVED_OF_NORMS = 4.0
"""Saved elements per hidden unit: inputs and outputs of two norms."""
SAVED_OF_HEADS = 4.0
"""Saved elements per unit of head width: queries, keys, values, and the attention output."""
SAVED_OF_FFN = {Family.GPT2: 2, Family.LLAMA: 3, Family.GEMMA: 3}
"""Saved elements per unit of feed-forward width: around GELU; or gate, up and their product."""


def transformer(
    name: str,
    arch: Architecture,
    *,
    batch_samples: int,
    microbatch_samples: int = 1,
    precision: Precision | Mapping[str, str] | str = Dtype.BF16,
    source: str = "",
) -> Fields:
    """A decoder-only transformer.

    Parameters
    ----------
    name
        Name of the workload.
    arch
        Sizes of the transformer.
    batch_samples, microbatch_samples
        Sequences per step of all devices, and per microbatch.
    precision
        Number formats: a `Precision`, its fields, or that of ``compute`` alone.
    source
        Where the sizes come from.

    References
    ----------
    D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (2021), 5.1; V. Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models" (2022), eq. 1.
    """
    instance_of(Architecture, arch, "architecture")
    formats = Precision.parse(precision)
    saved_bytes, sent_bytes = formats.compute.bytes, formats.messages.bytes
    h, s = arch.hidden, arch.sequence
    handed_on = float(s * h * sent_bytes)
    stem = Layer("embedding", _stem_parameters(arch), 0.0, handed_on, 0.0)
    head = Layer(
        "head",
        _norm(arch) + (0 if arch.tied else arch.vocabulary * h),
        2.0 * s * h * arch.vocabulary,
        0.0,
        # logits and their gradient are alive only while the head runs
        float(s * arch.vocabulary * saved_bytes),
    )
    return Fields(
        name=name,
        stem=stem,
        layers=tuple(
            Layer(
                f"layer{k}",
                _stored_weights(arch, k) + _vectors(arch, k),
                2.0 * _active_weights(arch, k) * s
                + 4.0 * s * arch.window_of(k) * arch.attention_size * arch.heads,
                handed_on,
                _saved_elements(arch, k) * s * saved_bytes,
            )
            for k in range(arch.layers)
        ),
        head=head,
        batch_samples=batch_samples,
        microbatch_samples=microbatch_samples,
        gradient_bytes_per_parameter=float(formats.gradients.bytes),
        state_bytes_per_parameter=formats.state_bytes,
        boundary_ratio=sent_bytes / saved_bytes,
        tied_parameters=arch.vocabulary * h if arch.tied else 0,
        precision=formats,
        architecture=arch,
        source=source,
    )


def active_parameters(arch: Architecture) -> int:
    """Parameters used by a token: all except those of experts that it is not sent to."""
    layers = sum(_active_weights(arch, k) + _vectors(arch, k) for k in range(arch.layers))
    head = _norm(arch) + (0 if arch.tied else arch.vocabulary * arch.hidden)
    return _stem_parameters(arch) + layers + head


def replicated_parameters(arch: Architecture, start: int, stop: int, *, with_head: bool) -> int:
    """Parameters of a stage's norms and routers: every GPU of a worker has them."""
    layers = sum(_norms(arch) + _router(arch, k) for k in range(start, stop))
    return layers + (_norm(arch) if with_head else 0)


def position_parameters(arch: Architecture) -> int:
    """Parameters of learned positions: every GPU of a first stage's worker has them."""
    return (arch.position_rows if arch.kind is Family.GPT2 else 0) * arch.hidden


def _stem_parameters(arch: Architecture) -> int:
    return arch.vocabulary * arch.hidden + position_parameters(arch)


def _widths(arch: Architecture) -> tuple[int, int]:
    """Total width of queries, and of keys or values."""
    return arch.attention_size * arch.heads, arch.attention_size * arch.kv_heads


def _norm(arch: Architecture) -> int:
    return arch.hidden * (2 if arch.kind is Family.GPT2 else 1)


def _attention_weights(arch: Architecture) -> int:
    q, kv = _widths(arch)
    return arch.hidden * (q + 2 * kv) + q * arch.hidden


def _ffn_weights(arch: Architecture, width: int) -> int:
    return (2 if arch.kind is Family.GPT2 else 3) * arch.hidden * width


def _router(arch: Architecture, k: int) -> int:
    experts = arch.experts_of(k)
    return 0 if experts is None else arch.hidden * (experts.count + experts.shared_gate)


def _stored_weights(arch: Architecture, k: int) -> int:
    """Entries of the matrices of a layer."""
    experts = arch.experts_of(k)
    inactive = 0 if experts is None else (experts.count - experts.active)
    width = 0 if experts is None else experts.ffn
    return _active_weights(arch, k) + inactive * _ffn_weights(arch, width)


def _active_weights(arch: Architecture, k: int) -> int:
    """Entries of the matrices with which a token is multiplied."""
    experts = arch.experts_of(k)
    if experts is None:
        return _attention_weights(arch) + _ffn_weights(arch, arch.ffn)
    widths = experts.active * experts.ffn + experts.shared_ffn
    return _attention_weights(arch) + _router(arch, k) + _ffn_weights(arch, widths)


def _norms(arch: Architecture) -> int:
    """Parameters of the norms of a layer."""
    norms = _norm(arch) * (4 if arch.post_norms else 2)
    return norms + (2 * arch.attention_size if arch.qk_norm else 0)


def _vectors(arch: Architecture, k: int) -> int:
    """Biases and norms of a layer."""
    h, (q, kv) = arch.hidden, _widths(arch)
    everywhere = arch.kind is Family.GPT2
    biases = (q + 2 * kv) if everywhere or arch.qkv_bias else 0
    biases += h if everywhere or arch.out_bias else 0
    if everywhere:
        biases += arch.ffn + h
    elif arch.ffn_bias and arch.experts_of(k) is None:
        biases += 2 * arch.ffn + h
    return _norms(arch) + biases


def _saved_elements(arch: Architecture, k: int) -> float:
    """Elements per token that a layer saves for its backward pass."""
    h, (q, kv) = arch.hidden, _widths(arch)
    around = SAVED_OF_NORMS * h * (2 if arch.post_norms else 1) + SAVED_OF_HEADS * q
    # inputs of these norms; their outputs count with the heads
    around += q + kv if arch.qk_norm else 0.0
    tensors, experts = SAVED_OF_FFN[arch.kind], arch.experts_of(k)
    if experts is None:
        inner = float(tensors * arch.ffn)
    else:
        # each expert's copy of the token, and its output before weighting
        inner = experts.active * (tensors * experts.ffn + 2.0 * h) + tensors * experts.shared_ffn
        inner += experts.count + (h if experts.shared_gate else 0.0)
    return around + inner
