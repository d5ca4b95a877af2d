"""Names and layout of parameters in files of ``transformers``."""

from __future__ import annotations

from typing import NamedTuple

from planner.executor.runtime.model import EMBEDDING, PROJECTION
from planner.workload.layers import Architecture, Family

PREFIX = {Family.GPT2: "transformer.", Family.LLAMA: "model."}
"""Prefix of all names except the output projection; absent in files of the bare model."""


class TensorPart(NamedTuple):
    """A tensor of a file as part of one of our parameters.

    Attributes
    ----------
    rows
        ``(start, stop)`` of ours; None for all.
    transposed
        Whether the file stores it with inputs first.
    """

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False


def tensor_parts(
    arch: Architecture, start: int, stop: int, *, head: bool
) -> dict[str, tuple[TensorPart, ...]]:
    """The tensors of each parameter of a stage and its head.

    Returns
    -------
    dict[str, tuple[TensorPart, ...]]
        By the name in `ModelStage`.
    """
    gpt2 = arch.kind is Family.GPT2
    prefix = PREFIX[arch.kind]
    found: dict[str, tuple[TensorPart, ...]] = {}
    embedding = (TensorPart(prefix + ("wte.weight" if gpt2 else "embed_tokens.weight")),)
    if start == 0:
        found[EMBEDDING] = embedding
        if gpt2:
            found["stage.stem.positions.weight"] = (TensorPart(f"{prefix}wpe.weight"),)
    for k in range(start, stop):
        layer = _gpt2_layer(k) if gpt2 else _llama_layer(arch, k)
        found |= {f"stage.layers.{k - start}.{name}": parts for name, parts in layer.items()}
    if head:
        if gpt2:
            found["head.norm.weight"] = (TensorPart(f"{prefix}ln_f.weight"),)
            found["head.norm.bias"] = (TensorPart(f"{prefix}ln_f.bias"),)
        else:
            found["head.norm.weight"] = (TensorPart(f"{prefix}norm.weight"),)
        if not arch.tied:
            found[PROJECTION] = (TensorPart("lm_head.weight"),)
        elif start > 0:
            found[PROJECTION] = embedding  # a copy
    return found


def _gpt2_layer(k: int) -> dict[str, tuple[TensorPart, ...]]:
    theirs = {
        "norm1": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "norm2": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    return {
        # Conv1D stores the transposed weight
        f"{ours}.{what}": (
            TensorPart(f"transformer.h.{k}.{name}.{what}", None, what == "weight" and "c_" in name),
        )
        for ours, name in theirs.items()
        for what in ("weight", "bias")
    }


def _llama_layer(arch: Architecture, k: int) -> dict[str, tuple[TensorPart, ...]]:
    place = f"model.layers.{k}."
    theirs = {
        "norm1": "input_layernorm",
        "attention.out": "self_attn.o_proj",
        "norm2": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    }
    parts: dict[str, tuple[TensorPart, ...]] = {
        f"{ours}.weight": (TensorPart(f"{place}{name}.weight"),) for ours, name in theirs.items()
    }
    q, kv = (arch.attention_size * heads for heads in (arch.heads, arch.kv_heads))
    rows = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    for what in ("weight", "bias") if arch.qkv_bias else ("weight",):
        parts[f"attention.qkv.{what}"] = tuple(
            TensorPart(f"{place}self_attn.{part}_proj.{what}", span) for part, span in rows.items()
        )
    for part in "qk" if arch.qk_norm else "":
        parts[f"attention.norm_{part}.weight"] = (
            TensorPart(f"{place}self_attn.{part}_norm.weight"),
        )
    return parts
