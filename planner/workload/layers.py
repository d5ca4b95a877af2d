"""Pieces of a model: layers, what a stage of them costs, and how a transformer is built."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

from planner.network.values import LARGEST, choice, count, of_kind, real


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
        parameters = count(f"{where}: parameters", self.parameters, 0, LARGEST)
        object.__setattr__(self, "parameters", parameters)
        for name in ("forward_flops", "output_bytes", "saved_bytes"):
            object.__setattr__(self, name, real(f"{where}: {name}", getattr(self, name), 0))


class Family(enum.StrEnum):
    """Kinds of transformers that the executor can build.

    ``gpt2``: LayerNorm, learned positions, GELU (tanh), biases. ``llama``: RMSNorm, rotary
    positions, SwiGLU, no biases but where said; Mistral and Qwen2 are of this kind.
    """

    GPT2 = "gpt2"
    LLAMA = "llama"


ROPE_THETA = 10000.0


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
        Size of the hidden state, a multiple of ``heads`` unless ``head_size`` is given.
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
    head_size
        Of one attention head; None: ``hidden / heads``.
    norm_eps
        What norms add to the variance.
    rope_theta
        ``llama``: base of the rotary frequencies.
    qkv_bias
        ``llama``: whether queries, keys and values have biases, as Qwen2's have.
    window
        ``llama``: tokens, itself included, that a token attends to, as in Mistral; None: all.
    positions
        ``gpt2``: rows of the learned positions; ``llama``: the longest sequence that it is said to
        be good for. None: ``sequence``.

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
    head_size: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = ROPE_THETA
    qkv_bias: bool = False
    window: int | None = None
    positions: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", choice(Family, "architecture kind", self.kind))
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                object.__setattr__(self, name, count(f"architecture {name}", value, 1, most))
        for name in ("norm_eps", "rope_theta"):
            object.__setattr__(self, name, real(f"architecture {name}", getattr(self, name), 0))
        for name in ("tied", "qkv_bias"):
            of_kind(bool, getattr(self, name), f"architecture {name}")
        if (self.head_size is None and self.hidden % self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden} must be a multiple of heads {self.heads}, and heads one of "
                f"kv_heads {self.kv_heads}"
            )
        if self.kind is Family.GPT2:
            self._require_gpt2()
        elif self.attention_size % 2 or not self.rope_theta:
            raise ValueError(
                f"a head of {self.attention_size} with rope_theta {self.rope_theta:g} cannot be "
                "rotated; give an even size and a base above 0"
            )

    def _require_gpt2(self) -> None:
        if self.qkv_bias or self.window is not None or self.rope_theta != ROPE_THETA:
            raise ValueError("qkv_bias, window and rope_theta are for the kind llama; leave them")
        if self.sequence > self.position_rows:
            raise ValueError(
                f"sequence {self.sequence} is longer than the {self.position_rows} positions that "
                "gpt2 has learned; give at most as many"
            )

    @property
    def attention_size(self) -> int:
        """Of one attention head."""
        return self.head_size or self.hidden // self.heads

    @property
    def position_rows(self) -> int:
        """Positions that the model has, or is said to be good for."""
        return self.positions or self.sequence

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; fields after ``tied`` are left out where they are as by default."""
        return {
            f.name: getattr(self, f.name)
            for k, f in enumerate(fields(self))
            if k < ALWAYS or getattr(self, f.name) != f.default
        }


MOST = {"layers": 10_000} | dict.fromkeys(
    ("hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence"), 10**9
)
"""Of a model; beyond is a slip of the pen."""
OPTIONAL = ("head_size", "window", "positions")
MOST |= dict.fromkeys(OPTIONAL, 10**9)
ALWAYS = 9
"""Fields of an `Architecture` that plan files have had from the beginning."""


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
