"""Layers of a model, and the architecture of a transformer."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from planner.utils.validate import LARGEST, choice, count, instance_of, mapping, real, sequence
from planner.workload.experts import Experts, layer_numbers


@dataclass(frozen=True)
class Layer:
    """An indivisible part of a model; figures are per sample.

    Attributes
    ----------
    name
        For messages and pictures.
    parameters
        Parameters that the layer owns (0 if it shares another layer's).
    forward_flops
        FLOPs of its forward pass.
    output_bytes
        Activations sent to the next layer, on the wire.
    saved_bytes
        Activations kept on the device between forward and backward pass.
    """

    name: str
    parameters: int
    forward_flops: float
    output_bytes: float
    saved_bytes: float

    def __post_init__(self) -> None:
        # normalise numbers, so that equal workloads have equal hashes
        where = f"layer {instance_of(str, self.name, 'name of a layer')!r}"
        parameters = count(f"{where}: parameters", self.parameters, 0, LARGEST)
        object.__setattr__(self, "parameters", parameters)
        for name in ("forward_flops", "output_bytes", "saved_bytes"):
            object.__setattr__(self, name, real(f"{where}: {name}", getattr(self, name), 0))


class Family(enum.StrEnum):
    """Families of transformers.

    ``gpt2``: LayerNorm, learned positions, GELU (tanh), biases. ``llama``: RMSNorm, rotary
    positions, SwiGLU, no biases by default; includes Mistral, Mixtral and Qwen. ``gemma``: as
    ``llama``, with GELU in the gate and scaled embeddings: Gemma 2 and 3.
    """

    GPT2 = "gpt2"
    LLAMA = "llama"
    GEMMA = "gemma"


ROPE_THETA = 10000.0
MAX_LOGITS = 2**28
"""Most logits at a time: beyond, the head runs in chunks of tokens."""


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer: all that determines its sizes and that the executor needs.

    `unexecuted` lists features that can be planned but not run.

    Attributes
    ----------
    kind
        A `Family` or its value.
    hidden
        Size of the hidden state, a multiple of ``heads`` unless ``head_size`` is given.
    heads, kv_heads
        Attention heads of queries, and of keys and values; the former is a multiple of the latter.
    ffn
        Width of the feed-forward layer.
    vocabulary
        Number of distinct tokens.
    sequence
        Tokens per sample.
    layers
        Number of layers.
    tied
        Whether embedding and output projection share their weights.
    head_size
        Size of an attention head; None for ``hidden / heads``.
    norm_eps
        Added to the variance in norms.
    rope_theta
        ``llama``: base of the rotary frequencies.
    qkv_bias
        Whether queries, keys and values have biases, as in Qwen2.
    window
        Tokens, including itself, that a token attends to, as in Mistral; None for all.
    positions
        ``gpt2``: rows of the learned positions; others: longest supported sequence. None for
        ``sequence``.
    qk_norm
        Whether queries and keys are normalised per head, as in Qwen3.
    out_bias, ffn_bias
        Whether attention output and feed-forward layers have biases.
    post_norms
        Whether attention and feed-forward part are followed by a norm too, as in Gemma.
    full_layers
        Indices of layers that attend to all tokens in spite of ``window``.
    experts
        `Experts` in place of the feed-forward part, or its fields as a mapping; None for none.
    priced_only
        Features that change no size and that the executor lacks, in the words of ``config.json``.
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
    qk_norm: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    post_norms: bool = False
    full_layers: tuple[int, ...] = ()
    experts: Experts | None = None
    priced_only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", choice(Family, "architecture kind", self.kind))
        for name, limit in MAX.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                object.__setattr__(self, name, count(f"architecture {name}", value, 1, limit))
        for name in ("norm_eps", "rope_theta"):
            object.__setattr__(self, name, real(f"architecture {name}", getattr(self, name), 0))
        for name in ("tied", "qkv_bias", *NOT_GPT2):
            instance_of(bool, getattr(self, name), f"architecture {name}")
        self._require_parts()
        if (self.head_size is None and self.hidden % self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden} (hidden_size) must be a multiple of heads {self.heads} "
                f"(num_attention_heads), and heads one of kv_heads {self.kv_heads} "
                "(num_key_value_heads); correct one"
            )
        if self.kind is Family.GPT2:
            self._require_gpt2()
        elif self.attention_size % 2 or not self.rope_theta:
            raise ValueError(
                f"a head of {self.attention_size} with rope_theta {self.rope_theta:g} cannot be "
                "rotated; give an even size and a base above 0"
            )

    def _require_parts(self) -> None:
        """Validate and normalise layer indices, experts and notes."""
        full = layer_numbers("architecture full_layers", self.full_layers)
        object.__setattr__(self, "full_layers", full)
        reasons = sequence("architecture priced_only", self.priced_only)
        for reason in reasons:
            instance_of(str, reason, "an entry of architecture priced_only")
        object.__setattr__(self, "priced_only", reasons)
        if self.experts is not None and not isinstance(self.experts, Experts):
            experts = mapping("architecture experts", self.experts)
            try:
                object.__setattr__(self, "experts", Experts(**experts))
            except TypeError as error:
                raise ValueError(f"architecture experts: {error}; correct its fields") from None
        dense = () if self.experts is None else self.experts.dense_layers
        for name, numbers in (("full_layers", full), ("experts.dense_layers", dense)):
            if numbers and numbers[-1] >= self.layers:
                raise ValueError(
                    f"architecture {name} has layer {numbers[-1]}, and the last of {self.layers} "
                    f"layers is {self.layers - 1}; correct it"
                )
        if full and self.window is None:
            raise ValueError("architecture full_layers has no effect without a window; give one")

    def _require_gpt2(self) -> None:
        later = [name for name in NOT_GPT2 if getattr(self, name)]
        if self.qkv_bias or self.window is not None or self.rope_theta != ROPE_THETA:
            raise ValueError("qkv_bias, window and rope_theta are for the kind llama; leave them")
        if later or self.experts is not None:
            raise ValueError(
                f"architecture {[*later, 'experts'][0]} is for the kinds llama and gemma; leave it"
            )
        if self.sequence > self.position_rows:
            raise ValueError(
                f"sequence {self.sequence} is longer than the {self.position_rows} positions that "
                "gpt2 has learned; give at most as many"
            )

    @property
    def attention_size(self) -> int:
        """Size of an attention head."""
        return self.head_size or self.hidden // self.heads

    @property
    def position_rows(self) -> int:
        """Learned positions, or longest supported sequence."""
        return self.positions or self.sequence

    def splits_into(self, parts: int) -> bool:
        """Whether heads, feed-forward width and tokens can be split into equal parts."""
        widths = [self.heads, self.kv_heads, self.sequence, self.ffn]
        if self.experts is not None:
            widths += [self.experts.ffn, self.experts.shared_ffn]
        return all(width % parts == 0 for width in widths)

    def head_tokens(self, samples: int) -> int:
        """Tokens of each sample for which head and loss run at a time.

        All samples together have at most `MAX_LOGITS` logits at a time, unless a single token of
        each has more.
        """
        most = max(1, MAX_LOGITS // (samples * self.vocabulary))
        chunks = math.ceil(self.sequence / most)
        return math.ceil(self.sequence / chunks)

    def window_of(self, layer: int) -> int:
        """Tokens that a token of this layer attends to at most."""
        if self.window is None or layer in self._full:
            return self.sequence
        return min(self.window, self.sequence)

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None for an ordinary feed-forward part."""
        return None if layer in self._dense else self.experts

    @cached_property
    def _full(self) -> frozenset[int]:
        return frozenset(self.full_layers)

    @cached_property
    def _dense(self) -> frozenset[int]:
        return frozenset(() if self.experts is None else self.experts.dense_layers)

    @property
    def unexecuted(self) -> tuple[str, ...]:
        """Features that the executor lacks, in words; empty if it can build and train the model."""
        if self.kind is Family.GEMMA:
            return "Gemma's layers", *self.priced_only
        reasons = {
            "experts": self.experts is not None,
            "a window in some of the layers": bool(self.full_layers),
            "norms behind attention and feed-forward part": self.post_norms,
            "biases of attention's output": self.out_bias,
            "biases of a gated feed-forward part": self.ffn_bias,
        }
        return (*(reason for reason, applies in reasons.items() if applies), *self.priced_only)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; fields after ``tied`` only if they differ from their defaults."""
        data = _unusual(self, ALWAYS)
        for name in ("full_layers", "priced_only"):
            if name in data:
                data[name] = list(data[name])
        if self.experts is not None:
            data["experts"] = _unusual(self.experts, ALWAYS_OF_EXPERTS)
            if self.experts.dense_layers:
                data["experts"]["dense_layers"] = list(self.experts.dense_layers)
        return data


def _unusual(data: Architecture | Experts, always: int) -> dict[str, Any]:
    """The first ``always`` fields, and those that differ from their defaults."""
    return {
        f.name: getattr(data, f.name)
        for k, f in enumerate(fields(data))
        if k < always or getattr(data, f.name) != f.default
    }


MAX = {"layers": 10_000} | dict.fromkeys(
    ("hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence"), 10**9
)
"""Largest sizes of a model; more is a typing error."""
OPTIONAL = ("head_size", "window", "positions")
MAX |= dict.fromkeys(OPTIONAL, 10**9)
ALWAYS = 9
"""Number of fields of an `Architecture` that plan files always contain."""
ALWAYS_OF_EXPERTS = 3
NOT_GPT2 = ("qk_norm", "out_bias", "ffn_bias", "post_norms")
"""Boolean fields that are fixed for GPT-2."""


@dataclass(frozen=True)
class StageLoad:
    """Costs of a stage per sample, without the head; sums over the fields of `Layer`.

    Attributes
    ----------
    parameters
        Parameters that its layers own.
    forward_flops
        FLOPs of its forward pass.
    output_bytes
        Activations sent by its last layer.
    saved_bytes
        Activations kept between forward and backward pass.
    """

    parameters: int
    forward_flops: float
    output_bytes: float
    saved_bytes: float
