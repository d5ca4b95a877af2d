"""Workloads of the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.utils.text import did_you_mean
from planner.utils.validate import short_repr
from planner.workload.layers import Architecture, Family, Layer
from planner.workload.transformer import Fields, transformer


def _gpt(
    layers: int, hidden: int, heads: int, sequence: int, batch: int, source: str
) -> Callable[[str], Fields]:
    arch = Architecture(Family.GPT2, layers, hidden, heads, heads, 4 * hidden, 50257, sequence)
    return lambda name: transformer(name, arch, batch_samples=batch, source=source)


def _llama_ffn(hidden: int) -> int:
    """Two thirds of 4 h, rounded up to a multiple of 256 (Touvron et al. 2023)."""
    return -(-(8 * hidden // 3) // 256) * 256


def _llama(
    layers: int, hidden: int, heads: int, sequence: int, batch_tokens: int, source: str
) -> Callable[[str], Fields]:
    ffn = _llama_ffn(hidden)
    arch = Architecture(Family.LLAMA, layers, hidden, heads, heads, ffn, 32000, sequence)
    batch = max(1, batch_tokens // sequence)
    return lambda name: transformer(name, arch, batch_samples=batch, source=source)


def _swarm_encoder(hidden: int, heads: int, note: str) -> Callable[[str], Fields]:
    # no embedding or head: the paper times bare TransformerEncoderLayers
    arch = Architecture(Family.GPT2, 12, hidden, heads, heads, 4 * hidden, 1, 512)

    def build(name: str) -> Fields:
        bare = transformer(name, arch, batch_samples=1, source=note)
        no_layer = Layer("none", 0, 0.0, bare["stem"].output_bytes, 0.0)
        last = replace(no_layer, output_bytes=0.0)
        return bare | {"stem": no_layer, "head": last, "architecture": None}

    return build


def _albert_large(name: str) -> Fields:
    """All 24 layers share their weights, so only the first owns parameters."""
    hidden, ffn, embedding, vocabulary, s = 1024, 4096, 128, 30000, 512
    arch = Architecture(Family.GPT2, 24, hidden, 16, 16, ffn, vocabulary, s)
    like_gpt = transformer(name, arch, batch_samples=4096)
    first, *shared = like_gpt["layers"]
    layers = (first, *(replace(layer, parameters=0) for layer in shared))
    stem = Layer(
        "embedding",
        # words, positions, token types, LayerNorm, projection to the hidden size
        (vocabulary + s + 2 + 2) * embedding + embedding * hidden + hidden,
        2.0 * s * embedding * hidden,
        like_gpt["stem"].output_bytes,
        0.0,
    )
    head = Layer(
        "head",  # the projection to words is tied to the embedding
        hidden * embedding + embedding + 2 * embedding + vocabulary,
        2.0 * s * (hidden * embedding + embedding * vocabulary),
        0.0,
        like_gpt["head"].saved_bytes,
    )
    return Fields(
        name=name,
        stem=stem,
        layers=layers,
        head=head,
        batch_samples=4096,
        source="Lan et al. 2020 (ALBERT-large, batch 4096), which DeDLOC, section 4.2, follows",
    )


def _resnet_50(name: str) -> Fields:
    """Bottleneck blocks at 224 x 224, counted convolution by convolution."""

    def conv(cin: int, cout: int, kernel: int, side: int) -> tuple[int, float]:
        weights = cin * cout * kernel * kernel
        return weights + 2 * cout, 2.0 * weights * side * side  # BatchNorm's scale and shift

    layers: list[Layer] = []
    cin, side = 64, 56
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for k in range(count):
            stride = 2 if stage and k == 0 else 1
            inner = side  # the stride sits on the 3 x 3 convolution
            side //= stride
            blocks = [
                conv(cin, width, 1, inner),
                conv(width, width, 3, side),
                conv(width, 4 * width, 1, side),
            ]
            if k == 0:
                blocks.append(conv(cin, 4 * width, 1, side))
            cin = 4 * width
            elements = inner * inner * width + side * side * (width + cin)
            layers.append(
                Layer(
                    f"block{stage + 1}.{k}",
                    sum(p for p, _ in blocks),
                    sum(f for _, f in blocks),
                    side * side * cin * 2.0,
                    2 * elements * 2.0,  # convolution outputs before and after normalisation
                )
            )
    parameters, flops = conv(3, 64, 7, 112)
    stem = Layer("stem", parameters, flops, 56 * 56 * 64 * 2.0, 2 * 112 * 112 * 64 * 2.0)
    head = Layer("head", 2048 * 1000 + 1000, 2.0 * 2048 * 1000, 0.0, 0.0)
    return Fields(
        name=name,
        stem=stem,
        layers=tuple(layers),
        head=head,
        batch_samples=32768,
        microbatch_samples=32,
        source="He et al. 2016 (ResNet-50, 224 x 224); batch 32,768 of DeDLOC, section 4.1",
    )


_DTFM = (
    "DT-FM paper, section 4.1 (GPT3-1.3B of Brown et al. 2020, {} layers, batch 1024); untied head"
)
_SKIP = "SkipPipe paper, Table 2; feed-forward width by the LLaMA rule, vocabulary 32000"
_DILOCO = "DiLoCo-SWARM paper, Table 1 and section 4.2 (untied head, batch 512, sequence 1024)"
_SWARM = "SWARM paper, Appendix F: {}; 12 layers, 1 x 512 tokens, no embedding or head"

PRESETS: dict[str, Callable[[str], Fields]] = {
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048, 1024, _DTFM.format(24)),
    "gpt3-1.3b-32l": _gpt(32, 2048, 16, 2048, 1024, _DTFM.format(32)),
    "gpt3-1.3b-40l": _gpt(40, 2048, 16, 2048, 1024, _DTFM.format(40)),
    "llama-50m": _llama(12, 288, 6, 256, 500_000, _SKIP),
    "llama-500m": _llama(24, 1024, 16, 1024, 500_000, _SKIP),
    "llama-1.5b": _llama(24, 2048, 16, 4096, 184_320, _SKIP + "; batch of its Table 3"),
    "llama-3-1b": lambda name: transformer(
        name,
        Architecture(Family.LLAMA, 16, 2048, 32, 8, 8192, 128256, 8192, tied=True),
        batch_samples=61,
        source="SkipPipe paper, Table 2; key-value heads, width and vocabulary of Llama 3.2 1B "
        "(Dubey et al. 2024); 500k tokens a batch",
    ),
    "gpt2-tiny": _gpt(4, 128, 4, 1024, 512, _DILOCO),
    "gpt2-small": _gpt(12, 768, 12, 1024, 512, _DILOCO),
    "gpt2-medium": _gpt(24, 1024, 16, 1024, 512, _DILOCO),
    "gpt2-large": _gpt(36, 1280, 20, 1024, 512, _DILOCO),
    "albert-large": _albert_large,
    "resnet-50": _resnet_50,
    "swarm-base": _swarm_encoder(768, 12, _SWARM.format("'base', d_model 768")),
    "swarm-xxlarge": _swarm_encoder(4096, 32, _SWARM.format("'xxlarge', d_model 4096")),
    "swarm-gpt3": _swarm_encoder(12288, 96, _SWARM.format("'GPT-3', d_model 12288")),
    "swarm-ours": _swarm_encoder(
        4096, 32, _SWARM.format("'Ours', d_model 4096, meant for 3 layers a stage")
    ),
}

WORKLOAD_FIELDS = (
    "batch_samples",
    "microbatch_samples",
    "gradient_bytes_per_parameter",
    "state_bytes_per_parameter",
)


def preset(name: str, **changes: Any) -> Fields:
    """A preset by name, with ``sequence`` or fields of `WORKLOAD_FIELDS` changed."""
    if not isinstance(name, str) or name not in PRESETS:
        suggestion = did_you_mean(name, PRESETS) if isinstance(name, str) else ""
        raise ValueError(
            f"no workload {short_repr(name)}{suggestion}; choose one of {', '.join(PRESETS)}, or "
            "give a config.json of Hugging Face"
        )
    return changed(PRESETS[name](name), changes)


def changed(workload: Fields, changes: dict[str, Any]) -> Fields:
    """A workload with ``sequence`` or other fields changed, as in `preset`."""
    changes = {key: value for key, value in changes.items() if value is not None}
    sequence = changes.pop("sequence", None)
    precision = changes.pop("precision", None)
    unknown = set(changes) - set(WORKLOAD_FIELDS)
    if unknown:
        raise ValueError(
            f"a workload has no field {sorted(unknown)[0]!r} to change; it has sequence, "
            f"precision, {', '.join(WORKLOAD_FIELDS)}"
        )
    if sequence is not None or precision is not None:
        if workload.get("architecture") is None:
            raise ValueError(
                f"workload {workload['name']!r} is no transformer whose sequence or precision can "
                "be set; leave them out"
            )
        arch = workload["architecture"]
        if sequence is not None:
            arch = replace(arch, sequence=sequence)
        workload = transformer(
            workload["name"],
            arch,
            batch_samples=workload["batch_samples"],
            microbatch_samples=workload.get("microbatch_samples", 1),
            precision=workload["precision"] if precision is None else precision,
            source=workload["source"],
        )
    return workload | changes
