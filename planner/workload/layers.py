"""Pieces of a model: layers, what a stage of them costs, and how a transformer is built."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from planner.network.values import choice, count, of_kind, real


@dataclass(frozen=True)
class Layer:
    """One indivisible piece of a model; figures are per sample.

    Attributes
    ----------
    name
        For messages and pictures.
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
        where = f"layer {of_kind(str, self.name, 'name of a layer')!r}"
        parameters = count(f"{where}: parameters", self.parameters, 0)
        object.__setattr__(self, "parameters", parameters)
        for name in ("forward_flops", "output_bytes", "saved_bytes"):
            object.__setattr__(self, name, real(f"{where}: {name}", getattr(self, name), 0))


class Family(enum.StrEnum):
    """Kinds of transformers that the executor can build.

    ``gpt2``: LayerNorm, learned positions, GELU, biases. ``llama``: RMSNorm, rotary positions,
    SwiGLU, no biases.
    """

    GPT2 = "gpt2"
    LLAMA = "llama"


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer, as far as the executor needs to build it.

    Attributes
    ----------
    kind
        Its family; a string is turned into one.
    layers
        Number of layers.
    hidden
        Size of the hidden state, a multiple of ``heads``.
    heads, kv_heads
        Attention heads of queries, and of keys and values; the former a multiple of the latter.
    ffn
        Width of the feed-forward layer.
    vocabulary
        Number of different tokens.
    sequence
        Tokens per sample.
    tied
        Whether embedding and output projection share their weights.

    Raises
    ------
    ValueError
        An unknown family, or sizes that are no whole numbers or do not divide each other.
    """

    kind: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    tied: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", choice(Family, "architecture kind", self.kind))
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence"):
            object.__setattr__(self, name, count(f"architecture {name}", getattr(self, name)))
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden} must be a multiple of heads {self.heads}, and heads one of "
                f"kv_heads {self.kv_heads}"
            )


@dataclass(frozen=True)
class StageLoad:
    """What one stage costs, per sample, head excluded; the fields of `Layer`, summed.

    Attributes
    ----------
    parameters
        Parameters that its layers own.
    forward_flops
        FLOPs of its forward pass.
    output_bytes
        Activations that its last layer hands on.
    saved_bytes
        Activations that its layers keep between forward and backward pass.
    """

    parameters: int
    forward_flops: float
    output_bytes: float
    saved_bytes: float
