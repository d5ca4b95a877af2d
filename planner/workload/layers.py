"""Pieces of a model: layers, what a stage of them costs, and how a transformer is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One indivisible piece of a model; figures are per sample.

    Attributes
    ----------
    parameters
        Parameters that this layer owns (0 where it shares another layer's).
    forward_flops
        FLOPs of its forward pass.
    output_bytes
        Activations it hands on, as sent over the network.
    saved_bytes
        Activations kept on the device between its forward and its backward pass.
    """

    name: str
    parameters: int
    forward_flops: float
    output_bytes: float
    saved_bytes: float

    def __post_init__(self) -> None:
        # one form of every number, so that equal workloads have equal hashes
        object.__setattr__(self, "parameters", int(self.parameters))
        for name in ("forward_flops", "output_bytes", "saved_bytes"):
            object.__setattr__(self, name, float(getattr(self, name)))


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer, as far as the executor needs to build it.

    Attributes
    ----------
    kind
        ``"gpt2"`` (LayerNorm, learned positions, GELU, biases) or ``"llama"`` (RMSNorm, rotary
        positions, SwiGLU, no biases).
    sequence
        Tokens per sample.
    tied
        Whether embedding and output projection share their weights.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    tied: bool = False


@dataclass(frozen=True)
class StageLoad:
    """What one stage costs, per sample, head excluded."""

    parameters: int
    forward_flops: float
    output_bytes: float
    saved_bytes: float
