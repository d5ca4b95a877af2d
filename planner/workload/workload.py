"""Workload: layers with parameters, FLOPs and activations, and batch sizes.

A `Workload` is a stem (embedding), a chain of layers that can be split into stages, and a head
(final norm, output projection, loss). All figures are per sample; presets with their sources are in
`planner.workload.presets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from dataclasses import replace as _replace
from functools import cached_property
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from planner.network.dtype import Dtype
from planner.utils.html import boxed, line, table
from planner.utils.text import counted, quantity
from planner.utils.validate import choice, count, instance_of, real, sequence
from planner.workload import hf_config, presets
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.layers import Architecture, Family, Layer, StageLoad
from planner.workload.precision import Precision
from planner.workload.transformer import transformer

MAX_SAMPLES = 1_000_000_000
"""Largest batch."""
MAX_PARTS = 40
"""Largest number of rows in a notebook."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes
    ----------
    name
        Name of the workload.
    stem
        What precedes the first layer: the embedding.
    layers
        The chain that can be split into stages.
    head
        What follows the last layer: norm, projection, loss.
    batch_samples
        Samples per optimizer step, over all pipelines.
    microbatch_samples
        Samples per microbatch.
    gradient_bytes_per_parameter
        Bytes of averaging per parameter.
    state_bytes_per_parameter
        Weights, gradients and optimizer state on a device, per parameter.
    architecture
        Set if the executor can build the model.
    source
        Source of the figures.
    boundary_codec
        Encoding of activations between stages, already applied to the layers' ``output_bytes`` (see
        `with_boundary_codec`).
    boundary_ratio
        Encoded bytes over bytes of the activations in memory.
    tied_parameters
        Parameters of the stem that the head uses too. A head on another stage has a copy, which
        takes memory there; both stages average its gradients.
    precision
        Formats of compute, messages and state. The bytes above are in these formats; `transformer`
        and the presets ensure it.
    tensor_parallel
        GPUs that hold a stage together (see `planner.tensor_parallel_workers`).
    optimizer_shards
        Each device of a stage holds at most one part in so many of the stage's optimizer state;
        1: all of it.

    Raises
    ------
    ValueError
        No layers, or an invalid value.
    """

    name: str
    stem: Layer
    layers: tuple[Layer, ...]
    head: Layer
    batch_samples: int
    microbatch_samples: int = 1
    gradient_bytes_per_parameter: float = 4.0
    state_bytes_per_parameter: float = 16.0
    architecture: Architecture | None = None
    source: str = ""
    boundary_codec: BoundaryCodec = BoundaryCodec.NONE
    boundary_ratio: float = 1.0
    tied_parameters: int = 0
    precision: Precision = field(default_factory=Precision)
    tensor_parallel: int = 1
    optimizer_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            instance_of(str, getattr(self, name), f"{name} of a workload")
        object.__setattr__(self, "layers", sequence("layers", self.layers))
        if not self.layers:
            raise ValueError(f"workload {self.name!r} has no layers; give at least one")
        for part, part_name in ((self.stem, "stem"), (self.head, "head")):
            instance_of(Layer, part, part_name)
        for k, layer in enumerate(self.layers):
            instance_of(Layer, layer, f"layers[{k}]")
        if self.architecture is not None:
            instance_of(Architecture, self.architecture, "architecture")
        for name in ("gradient_bytes_per_parameter", "state_bytes_per_parameter"):
            object.__setattr__(self, name, real(name, getattr(self, name), 0))
        for name in ("batch_samples", "microbatch_samples"):
            samples = count(name, getattr(self, name), most=MAX_SAMPLES)
            object.__setattr__(self, name, samples)
        tied = count("tied_parameters", self.tied_parameters, 0)
        if tied > self.stem.parameters:
            raise ValueError(
                f"tied_parameters is {tied}, more than the {self.stem.parameters} of the stem, of "
                "which they are; give at most as many"
            )
        object.__setattr__(self, "tied_parameters", tied)
        codec = choice(BoundaryCodec, "boundary_codec", self.boundary_codec)
        object.__setattr__(self, "boundary_codec", codec)
        instance_of(Precision, self.precision, "precision")
        degree = count("tensor_parallel", self.tensor_parallel)
        object.__setattr__(self, "tensor_parallel", degree)
        self._require_splittable()
        self._require_shardable()
        plain = self.precision.messages.bytes / self.precision.compute.bytes
        ratio = real("boundary_ratio", self.boundary_ratio, 0)
        if ratio == 0 or (ratio != plain and codec is BoundaryCodec.NONE):
            raise ValueError(
                f"boundary_ratio is {ratio:g} with boundary_codec {codec}; it must be above 0, and "
                f"{plain:g} without a codec"
            )
        object.__setattr__(self, "boundary_ratio", ratio)

    def _require_splittable(self) -> None:
        """Refuse GPUs per worker into which the model cannot be split."""
        degree, arch = self.tensor_parallel, self.architecture
        if degree == 1:
            return
        if arch is None:
            raise ValueError(
                f"tensor_parallel is {degree}, and {self.name!r} is no transformer of known "
                "sizes, which could be split; leave it at 1"
            )
        if not arch.splits_into(degree):
            raise ValueError(
                f"tensor_parallel is {degree}; it must divide the {arch.heads} heads, "
                f"{arch.kv_heads} key-value heads, feed-forward width of {arch.ffn} and "
                f"{arch.sequence} tokens of {self.name!r}; give another number"
            )

    def _require_shardable(self) -> None:
        """Refuse to share optimizer state that is not known in bytes."""
        shards = count("optimizer_shards", self.optimizer_shards)
        object.__setattr__(self, "optimizer_shards", shards)
        stated, known = self.state_bytes_per_parameter, self.precision.state_bytes
        if shards > 1 and stated != known:
            reason = (
                "the state of an outer optimizer cannot be shared"
                if self.outer_state_bytes
                else f"state_bytes_per_parameter is {stated:g} and not {known:g}"
            )
            raise ValueError(f"optimizer_shards is {shards}, but {reason}; leave it at 1")
        formats, arch = self.precision, self.architecture
        if shards > 1 and formats.gradients is not Dtype.FP32 and arch is not None:
            # parameters would be rounded that operations use in fp32
            used = formats.compute if arch.kind is not Family.GPT2 else Dtype.FP32
            if used is not formats.gradients:
                raise ValueError(
                    f"optimizer_shards is {shards} with gradients in {formats.gradients}, in which "
                    f"parameters of {self.name!r} would return, used in {used}; plan with "
                    "gradients in fp32"
                )

    def __repr__(self) -> str:
        return (
            f"Workload({self.name!r}, {counted(len(self.layers), 'layer')}, "
            f"{self.parameters / 1e6:,.4g} million parameters, batch of {self.batch_samples} in "
            f"microbatches of {self.microbatch_samples})"
        )

    def _repr_html_(self) -> str:
        parts = [("stem", [self.stem]), *_equal_runs(self.layers), ("head", [self.head])]
        rows = [
            [
                escape(where),
                f"{layers[0].parameters / 1e6:,.4g}",
                quantity(layers[0].forward_flops, "FLOP"),
                quantity(layers[0].output_bytes, "B"),
                quantity(layers[0].saved_bytes, "B"),
            ]
            for where, layers in parts
        ]
        heads = ["part", "million parameters", "forward", "sends", "keeps for backward"]
        shown = table(heads, rows[:MAX_PARTS])
        truncation = f"; {MAX_PARTS} of {len(rows)} parts" if len(rows) > MAX_PARTS else ""
        return boxed(line(repr(self)), shown, line(f"Each layer, of a sample{truncation}."))

    def with_boundary_codec(self, codec: str) -> Workload:
        """The workload with encoded activations and gradients between stages.

        Parameters
        ----------
        codec
            A `BoundaryCodec` or its name.

        Returns
        -------
        Workload
            With other ``output_bytes``; memory is unchanged.

        Raises
        ------
        ValueError
            No such codec, or the workload has one already.
        """
        chosen = choice(BoundaryCodec, "boundary_codec", codec)
        if chosen is self.boundary_codec:
            return self
        if self.boundary_codec is not BoundaryCodec.NONE:
            raise ValueError(
                f"boundary_codec is {self.boundary_codec} already; start from the workload without"
            )
        ratio = chosen.wire_ratio(self.precision.messages.bytes)

        def coded(layer: Layer) -> Layer:
            return _replace(layer, output_bytes=layer.output_bytes * ratio)

        return self.replace(
            stem=coded(self.stem),
            layers=tuple(coded(layer) for layer in self.layers),
            boundary_codec=chosen,
            boundary_ratio=ratio * self.boundary_ratio,
        )

    def with_outer_state(self, *, delayed: bool = False) -> Workload:
        """The workload with memory for the state of an outer optimizer.

        Parameters
        ----------
        delayed
            Whether the outer step is applied a step later.

        Returns
        -------
        Workload
            With `Precision.outer_state_bytes` more per parameter, unless already included.
        """
        outer_bytes = self.precision.outer_state_bytes(delayed=delayed)
        if self.outer_state_bytes == outer_bytes:
            return self
        state = self.state_bytes_per_parameter - self.outer_state_bytes + outer_bytes
        return self.replace(state_bytes_per_parameter=state)

    def without_outer_state(self) -> Workload:
        """The workload without memory for an outer optimizer."""
        state = self.state_bytes_per_parameter - self.outer_state_bytes
        return (
            self if self.outer_state_bytes == 0 else self.replace(state_bytes_per_parameter=state)
        )

    @property
    def outer_state_bytes(self) -> float:
        """Bytes per parameter for an outer optimizer; 0 if there is none.

        Known if all other state follows from the precision.
        """
        rooms = [self.precision.outer_state_bytes(delayed=late) for late in (False, True)]
        outer_bytes = self.state_bytes_per_parameter - self.precision.state_bytes
        return outer_bytes if outer_bytes in rooms else 0.0

    @cached_property
    def known_costs(self) -> dict[Any, Any]:
        """Cache of `stage_costs`, which searches request repeatedly."""
        return {}

    @property
    def unexecuted(self) -> str:
        """Why the executor cannot run it, in one line; empty if it can."""
        arch = self.architecture
        if arch is not None and not arch.unexecuted:
            return ""
        reason = "no transformer of known sizes" if arch is None else arch.unexecuted[0]
        return (
            f"workload.architecture: {self.name!r} can be planned but not run, the executor does "
            f"not do this: {reason}; take a GPT-2, LLaMA, Mistral, Qwen2 or Qwen3 workload without"
        )

    def spread_dtype(self, start: int) -> Dtype | None:
        """Format of the parameters of a stage that owners of optimizer state send to the others.

        Parameters
        ----------
        start
            The stage's first layer.

        Returns
        -------
        Dtype or None
            The format of compute where the others use no other; None for that of averaged
            gradients. Learned positions are added to the embedding in fp32.
        """
        formats, arch = self.precision, self.architecture
        if self.optimizer_shards == 1 or arch is None or formats.gradients is not Dtype.FP32:
            return None
        adds_positions = arch.kind is Family.GPT2 and start == 0
        return Dtype.BF16 if formats.compute is Dtype.BF16 and not adds_positions else None

    @property
    def spread_ratio(self) -> float:
        """Least bytes of a parameter that owners of optimizer state send, over its gradient's."""
        dtype = self.spread_dtype(1)
        return 1.0 if dtype is None else dtype.bytes / Dtype.FP32.bytes

    def held_bytes(self, layer: int) -> float:
        """Activations of one sample after a layer in memory, regardless of encoding.

        Parameters
        ----------
        layer
            Index of the layer.

        Returns
        -------
        float
            Bytes.
        """
        return self.layers[layer].output_bytes / self.boundary_ratio

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Workload:
        """A model of the papers by name, with fields changed, e.g. ``batch_samples=2048``.

        Parameters
        ----------
        name
            One of `planner.workload.presets.PRESETS`.
        changes
            ``sequence`` (tokens per sample), ``precision`` (as for `Precision.parse`), or fields of
            `planner.workload.presets.WORKLOAD_FIELDS`; None keeps the default.

        Returns
        -------
        Workload
            Ready to plan with.

        Raises
        ------
        ValueError
            No such preset or field.
        """
        return cls(**presets.preset(name, **changes))

    @classmethod
    def from_hf_config(cls, path: str | Path, **changes: Any) -> Workload:
        """From a Hugging Face ``config.json``; see `planner.workload.hf_config.from_hf_config`.

        Samples have at most 8,192 tokens unless ``sequence`` requests more.

        Parameters
        ----------
        path
            Path of the file.
        changes
            As for `preset`.

        Returns
        -------
        Workload
            Ready to plan with.

        Raises
        ------
        ValueError
            One line with the path, the field and what is wrong.
        """
        return cls(**hf_config.from_hf_config(path, **changes))

    @classmethod
    def transformer(cls, name: str, architecture: Architecture, **fields: Any) -> Workload:
        """A decoder-only transformer.

        Parameters
        ----------
        name
            Name of the workload.
        architecture
            Sizes of the transformer.
        fields
            ``batch_samples``, sequences per step of all devices; optionally ``microbatch_samples``
            (default 1), ``precision`` (such as ``"fp16"``; default ``"bf16"``) and ``source``.

        Returns
        -------
        Workload
            Ready to plan with.

        Raises
        ------
        ValueError
            An invalid value.
        """
        return cls(**transformer(name, architecture, **fields))

    @cached_property
    def parameters(self) -> int:
        """All parameters, including stem and head."""
        return sum(layer.parameters for layer in (self.stem, *self.layers, self.head))

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of one sample's forward pass, including the head."""
        return sum(layer.forward_flops for layer in (self.stem, *self.layers, self.head))

    def stage(self, start: int, stop: int) -> StageLoad:
        """Costs of the layers ``start`` to ``stop - 1``; layer 0 includes the stem.

        Parameters
        ----------
        start, stop
            Range of layers.

        Returns
        -------
        StageLoad
            Figures per sample.
        """
        cached: StageLoad | None = self.known_costs.get((start, stop))
        if cached is None:
            inside = list(self.layers[start:stop])
            if start == 0:
                inside.insert(0, self.stem)
            cached = self.known_costs[start, stop] = StageLoad(
                sum(layer.parameters for layer in inside),
                sum(layer.forward_flops for layer in inside),
                inside[-1].output_bytes,
                sum(layer.saved_bytes for layer in inside),
            )
        return cached

    def head_parameters(self, start: int) -> int:
        """Parameters of the head on a stage.

        Parameters
        ----------
        start
            First layer of the stage; on layer 0 the tied parameters are already present.

        Returns
        -------
        int
            Including a copy of tied parameters.
        """
        return self.head.parameters + (self.tied_parameters if start > 0 else 0)

    def even_split(self, stages: int) -> tuple[tuple[int, int], ...]:
        """Layer ranges of nearly equal length, the longer ones first.

        Parameters
        ----------
        stages
            Number of stages.

        Returns
        -------
        tuple[tuple[int, int], ...]
            ``(start, stop)`` of every stage.

        Raises
        ------
        ValueError
            More stages than layers, or none.
        """
        n = len(self.layers)
        if not 1 <= count("stages", stages) <= n:
            raise ValueError(
                f"{self.name} has {n} layers and cannot be cut into {stages} stages; "
                f"ask for 1 to {n}"
            )
        short, longer = divmod(n, stages)
        cuts = [0]
        for j in range(stages):
            cuts.append(cuts[-1] + short + (j < longer))
        return tuple(pairwise(cuts))

    def activation_bytes(self, split: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Bytes of one sample across each boundary of a split.

        Parameters
        ----------
        split
            Layers ``(start, stop)`` of every stage.

        Returns
        -------
        tuple[float, ...]
            S - 1 values.
        """
        return tuple(self.layers[stop - 1].output_bytes for _, stop in split[:-1])

    def gradient_bytes(
        self, split: Sequence[tuple[int, int]], head_stage: int
    ) -> tuple[float, ...]:
        """Bytes of each stage's gradients, the head's on ``head_stage``.

        Parameters
        ----------
        split
            Layers ``(start, stop)`` of every stage.
        head_stage
            The stage that runs head and loss.

        Returns
        -------
        tuple[float, ...]
            S values.

        Raises
        ------
        ValueError
            A stage has no range of layers.
        """
        split = [sequence("layers of a stage", span) for span in sequence("split", split)]
        return tuple(
            (self.stage(*span).parameters + (self.head_parameters(span[0]) * (j == head_stage)))
            * self.gradient_bytes_per_parameter
            for j, span in enumerate(split)
        )

    def averaged_bytes(
        self, split: Sequence[tuple[int, int]], head_stage: int, *, apart: bool
    ) -> tuple[float, ...]:
        """Bytes of every averaged vector.

        Parameters
        ----------
        split
            Layers ``(start, stop)`` of every stage.
        head_stage
            The stage that runs head and loss.
        apart
            Whether a matrix shared by embedding and head, on two stages, is averaged separately.

        Returns
        -------
        tuple[float, ...]
            S values, and one more for a shared matrix that is averaged separately.
        """
        vectors = list(self.gradient_bytes(split, head_stage))
        if apart and self.tied_parameters and head_stage > 0:
            matrix = self.tied_parameters * self.gradient_bytes_per_parameter
            vectors[0] -= matrix
            vectors[head_stage] -= matrix
            vectors.append(matrix)
        return tuple(vectors)

    def replace(self, **changes: Any) -> Workload:
        """A copy with some fields changed."""
        return _replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        data = asdict(self)
        data["layers"] = [asdict(layer) for layer in self.layers]
        data["precision"] = self.precision.to_dict()
        if self.architecture is not None:
            data["architecture"] = self.architecture.to_dict()
        if self.tied_parameters == 0:
            del data["tied_parameters"]
        if self.tensor_parallel == 1:
            del data["tensor_parallel"]
        if self.optimizer_shards == 1:
            del data["optimizer_shards"]
        if self.boundary_codec is BoundaryCodec.NONE:
            del data["boundary_codec"]
            if self.boundary_ratio == 1.0:
                del data["boundary_ratio"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Workload:
        """Inverse of `to_dict`.

        Parameters
        ----------
        data
            As in a plan file, validated by its schema.

        Returns
        -------
        Workload
            Validated.
        """
        names = {field.name for field in fields(cls)}
        values = {key: value for key, value in data.items() if key in names}
        values["stem"], values["head"] = Layer(**data["stem"]), Layer(**data["head"])
        values["layers"] = tuple(Layer(**layer) for layer in data["layers"])
        arch = None
        if data.get("architecture") is not None:
            values["architecture"] = arch = Architecture(**data["architecture"])
        if "precision" in data:
            values["precision"] = Precision.parse(data["precision"])
        else:
            # older files have bytes only
            per_layer = values["layers"][0].output_bytes / data.get("boundary_ratio", 1.0)
            per_value = (
                Dtype.BF16.bytes if arch is None else per_layer / (arch.sequence * arch.hidden)
            )
            values["precision"] = Precision.of_bytes(
                per_value, data["gradient_bytes_per_parameter"]
            )
        return cls(**values)


def _equal_runs(layers: Sequence[Layer]) -> list[tuple[str, list[Layer]]]:
    """Runs of layers with equal costs, with their indices."""
    runs, begin = [], 0
    costs = [_replace(layer, name="") for layer in layers]
    for _, run in groupby(range(len(layers)), key=lambda k: costs[k]):
        same = [layers[k] for k in run]
        end = begin + len(same) - 1
        runs.append((f"layers {begin} to {end}" if len(same) > 1 else f"layer {begin}", same))
        begin = end + 1
    return runs
