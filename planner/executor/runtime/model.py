"""Stages of a decoder-only transformer, built identically by every device.

GPT-2, LLaMA, Mistral, Qwen2 and Qwen3 as in ``transformers``, so that weights are interchangeable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import islice
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.executor.runtime.cross_entropy import cross_entropy
from planner.executor.runtime.recompute import recomputed
from planner.workload.layers import Architecture, Family

ModuleT = TypeVar("ModuleT", bound=nn.Module)

INIT_STD = 0.02
CPU = torch.device("cpu")

EMBEDDING, PROJECTION = "stage.stem.tokens.weight", "head.project.weight"
"""Names of the matrices that are one if tied."""


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        scale = recomputed(partial(_scale, self.eps), x)
        return recomputed(_scaled, x, scale, self.weight)


def _scale(eps: float, x: Tensor) -> Tensor:
    # in fp32 for all formats of activations, as in LayerNorm
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def _scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * scale).type_as(x) * weight


def _norm(arch: Architecture) -> nn.Module:
    if arch.kind is Family.GPT2:
        return nn.LayerNorm(arch.hidden, arch.norm_eps)
    return RMSNorm(arch.hidden, arch.norm_eps)


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Apply rotary positions (Su et al. 2021) to ``[batch, tokens, heads, size]``.

    The first half of a head is rotated with the second, as in files of ``transformers``.
    """
    cos, sin = _rotary_tables(x.shape[1], x.shape[-1], theta, x.device)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).type_as(x)


@lru_cache(maxsize=4)
def _rotary_tables(
    tokens: int, size: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, cached for all layers and microbatches."""
    places = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    angle = torch.outer(
        torch.arange(tokens, device=device, dtype=torch.float32), 1.0 / theta ** (places / size)
    )
    return angle.cos()[:, None], angle.sin()[:, None]


@lru_cache(maxsize=4)
def _window_mask(tokens: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Added to scores: 0 for the last ``window`` tokens, minus infinity for all others.

    In the format of scores, since attention kernels would convert and save a boolean mask in every
    layer.
    """
    pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    seen = pairs.tril().triu(1 - window)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)


class Attention(nn.Module):
    """Causal self-attention, with grouped key-value heads if the architecture has them."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = arch.heads, arch.kv_heads, arch.attention_size
        self.rotary, self.theta = arch.kind is Family.LLAMA, arch.rope_theta
        self.window = arch.window
        bias = arch.kind is Family.GPT2
        width = (arch.heads + 2 * arch.kv_heads) * self.size
        self.qkv = nn.Linear(arch.hidden, width, bias=bias or arch.qkv_bias)
        self.out = nn.Linear(arch.heads * self.size, arch.hidden, bias=bias)
        self.norm_q, self.norm_k = (
            RMSNorm(self.size, arch.norm_eps) if arch.qk_norm else None for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        projected = self.qkv(x)
        batch, tokens, _ = projected.shape
        widths = [n * self.size for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(batch, tokens, -1, self.size) for part in projected.split(widths, dim=-1)
        )
        if self.norm_q is not None and self.norm_k is not None:
            # copies, or the norms would save the whole projection
            q, k = self.norm_q(q.contiguous()), self.norm_k(k.contiguous())
        if self.rotary:
            # a copy, or v would keep the whole projection alive
            q, k, v = _rotate(q, self.theta), _rotate(k, self.theta), v.contiguous()
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.kv_heads < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        seen = None
        if self.window is not None and self.window < tokens:
            seen = _window_mask(tokens, self.window, q.dtype, q.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, -1))
        return result


class FeedForward(nn.Module):
    """GELU (tanh) with biases (GPT-2), or SwiGLU without (LLaMA)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        bias = arch.kind is Family.GPT2
        self.gate = None if bias else nn.Linear(arch.hidden, arch.ffn, bias=False)
        self.up = nn.Linear(arch.hidden, arch.ffn, bias=bias)
        self.down = nn.Linear(arch.ffn, arch.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate is None:
            inner = F.gelu(up, approximate="tanh")
        else:
            inner = recomputed(swish, self.gate(x), up)
        result: Tensor = self.down(inner)
        return result


def swish(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gate) * up


class Layer(nn.Module):
    """A transformer layer with pre-norms."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.norm1, self.attention = _norm(arch), Attention(arch)
        self.norm2, self.feed_forward = _norm(arch), FeedForward(arch)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.feed_forward(self.norm2(x))
        return result


class Stem(nn.Module):
    """Token embedding, with learned positions for GPT-2."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.tokens = nn.Embedding(arch.vocabulary, arch.hidden)
        self.positions = (
            nn.Embedding(arch.position_rows, arch.hidden) if arch.kind is Family.GPT2 else None
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        return x


class Head(nn.Module):
    """Final norm, output projection and summed cross-entropy."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.norm = _norm(arch)
        self.project = nn.Linear(arch.hidden, arch.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.project(self.norm(x)).flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """Consecutive layers, with the stem before layer 0."""

    def __init__(self, stem: Stem | None, layers: list[Layer]) -> None:
        super().__init__()
        self.stem = stem
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        if self.stem is not None and start == 0:
            x = self.stem(x)
        for layer in islice(self.layers, start, stop):
            x = layer(x)
        return x


def build_stage(
    arch: Architecture, start: int, stop: int, seed: int, device: torch.device = CPU
) -> Stage:
    """Layers ``start`` to ``stop - 1``, with weights that depend on the seed alone."""
    stem = seeded(lambda: Stem(arch), arch, seed, 0, device) if start == 0 else None
    layers = [seeded(lambda: Layer(arch), arch, seed, 1 + k, device) for k in range(start, stop)]
    return Stage(stem, layers)


def build_head(
    arch: Architecture, seed: int, stem: Stem | None = None, device: torch.device = CPU
) -> Head:
    """The head, with weights that depend on the seed alone."""
    head = seeded(lambda: Head(arch), arch, seed, 1 + arch.layers, device)
    if arch.tied:
        first_stem = seeded(lambda: Stem(arch), arch, seed, 0, device) if stem is None else stem
        head.project.weight = first_stem.tokens.weight
    return head


def seeded(
    make: Callable[[], ModuleT],
    arch: Architecture,
    seed: int,
    place: int,
    device: torch.device,
) -> ModuleT:
    """Build a module on a device from its own random stream, independent of other modules.

    Values are drawn on the CPU, so that they are the same on all types of device; only this module
    lies in host memory.
    """
    if device.type == "meta":
        with device:
            return make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + place)
        module = make()
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2:
                continue  # norms and biases keep their ones and zeros
            # residual branches are scaled down with depth (Radford et al. 2019)
            branch = name.endswith(("out.weight", "down.weight"))
            std = INIT_STD / math.sqrt(2 * arch.layers) if branch else INIT_STD
            nn.init.normal_(parameter, std=std)
        for part in module.modules():
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
    return module.to(device)
