"""Loads weights from a folder in the format of ``transformers``: each rank its own tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from planner.executor.checkpoint.safetensors_io import TensorEntry, read_entries, read_tensor
from planner.executor.rendezvous.file_digest import file_digest
from planner.executor.runtime.model import EMBEDDING
from planner.huggingface.names import PREFIX, TensorPart, tensor_parts
from planner.utils.input_files import read_json
from planner.utils.refusal import Refusal
from planner.workload.hf_config import CONFIG, architecture_of, read_config
from planner.workload.layers import Architecture, Family

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_WEIGHTS = re.compile(r".*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""Constants in old files, of any type."""
HEAD = "lm_head.weight"


class WeightsError(Refusal):
    """A folder whose weights cannot be used."""


def load_weights(
    folder: Path,
    arch: Architecture,
    start: int,
    stop: int,
    parameters: Mapping[str, Tensor],
) -> None:
    """Replace the parameters of a stage by those of a folder."""
    require_same_model(folder, arch)
    files = _Files(folder, arch)
    head = any(name.startswith("head.") for name in parameters)
    if arch.tied and head:
        files.require_tied_head(tensor_parts(arch, 0, 0, head=False)[EMBEDDING][0])
    with torch.no_grad():
        for name, parts in tensor_parts(arch, start, stop, head=head).items():
            target = parameters[name]
            for part in parts:
                rows = target if part.rows is None else target[slice(*part.rows)]
                rows.copy_(files.read(part, rows.shape))


def require_weights(folder: Path, arch: Architecture) -> None:
    """Validate a folder as `load_weights` would, without reading tensors.

    A stored head is compared with the embedding if they are tied.
    """
    require_same_model(folder, arch)
    files = _Files(folder, arch)
    if arch.tied:
        files.require_tied_head(tensor_parts(arch, 0, 0, head=False)[EMBEDDING][0])


def require_same_model(folder: Path, arch: Architecture) -> None:
    """Refuse a folder whose ``config.json`` is of another model than the plan's."""
    if folder.is_dir() and not (folder / CONFIG).exists():
        raise WeightsError(f"{folder}: holds no {CONFIG}; name the folder of a Hugging Face model")
    try:
        stored = architecture_of(read_config(folder / CONFIG), folder / CONFIG)
    except ValueError as error:
        raise WeightsError(str(error)) from None
    if stored.unexecuted:
        raise WeightsError(
            f"{folder / CONFIG}: the executor does not do this: {stored.unexecuted[0]}; take a "
            "model without"
        )
    theirs, ours = _says(stored, arch), _says(arch, arch)
    for name, value in ours.items():
        if theirs[name] != value:
            raise WeightsError(
                f"{folder}: its model has {name} {theirs[name]}, the plan's has {value}; plan with "
                f"--workload {folder / CONFIG}"
            )


def _says(arch: Architecture, planned: Architecture) -> dict[str, object]:
    """Fields that must be equal; a window no shorter than samples is ignored."""
    window = None if arch.window is None or arch.window >= planned.sequence else arch.window
    rows = arch.position_rows if arch.kind is Family.GPT2 else None
    names = (
        *("kind", "layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "tied"),
        *("norm_eps", "rope_theta", "qkv_bias", "qk_norm", "attention_size"),
    )
    return {name: getattr(arch, name) for name in names} | {"window": window, "positions": rows}


def weight_digests(
    folder: Path, arch: Architecture, start: int, stop: int, *, head: bool
) -> dict[str, str]:
    """Digests of the files that a stage reads.

    Returns
    -------
    dict[str, str]
        By name, for `require_same_files`.
    """
    read = _Files(folder, arch).read_by(
        part for parts in tensor_parts(arch, start, stop, head=head).values() for part in parts
    )
    return {path.name: file_digest(path) for path in sorted(read)}


class _Files:
    """Tensors of a folder by name."""

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self._folder = folder
        self._places: dict[Path, dict[str, TensorEntry]] = {}
        self._file_of = self._found()
        prefix = PREFIX[arch.kind]
        bare = not any(name.startswith(prefix) for name in self._file_of)
        self._left_out = prefix if bare else ""
        parts = tensor_parts(arch, 0, arch.layers, head=True).values()
        expected = {self._name(part) for several in parts for part in several}
        if arch.tied:
            expected.add(HEAD)  # written twice by some
        elif HEAD not in self._file_of and bare:
            raise WeightsError(
                f"{folder}: has no {HEAD!r}: it is of a model without a language-model head, which "
                "the plan's model needs; take weights of the model with its head"
            )
        unexpected = sorted(n for n in set(self._file_of) - expected if not NO_WEIGHTS.fullmatch(n))
        if unexpected:
            raise WeightsError(
                f"{folder}: holds {unexpected[0]!r} ({len(unexpected)} such), which the "
                "plan's model does not have; take another model"
            )

    def read(self, part: TensorPart, shape: torch.Size) -> Tensor:
        """Read a part in the layout of our parameter."""
        name = self._name(part)
        path = self._file_of.get(name)
        place = None if path is None else self._in(path).get(name)
        if path is None or place is None:
            raise WeightsError(f"{self._folder}: has no {name!r}; give all files of the model")
        tensor = read_tensor(path, place)
        tensor = tensor.t() if part.transposed else tensor
        if tensor.shape != shape:
            raise WeightsError(
                f"{self._folder}: {name!r} is {list(place.shape)}, the plan's model needs "
                f"{list(shape[::-1] if part.transposed else shape)}; its config.json is of another "
                "model"
            )
        return tensor

    def require_tied_head(self, embedding: TensorPart) -> None:
        """Refuse a stored head that differs from the tied embedding."""
        path = self._file_of.get(HEAD)
        if path is None or HEAD not in (places := self._in(path)):
            return
        head = read_tensor(path, places[HEAD])
        tokens = self.read(embedding, head.shape)
        if not torch.equal(head.float(), tokens.float()):
            raise WeightsError(
                f"{self._folder}: {HEAD!r} is not the embedding, although {CONFIG} says "
                "tie_word_embeddings: the model has a head of its own; set tie_word_embeddings to "
                "false there, and plan again"
            )

    def read_by(self, parts: Iterable[TensorPart]) -> set[Path]:
        """Files that contain these parts."""
        return {self._file_of[self._name(part)] for part in parts}

    def _name(self, part: TensorPart) -> str:
        return part.name.removeprefix(self._left_out)

    def _in(self, path: Path) -> dict[str, TensorEntry]:
        if path not in self._places:
            self._places[path] = read_entries(path, NO_WEIGHTS.fullmatch)
        return self._places[path]

    def _found(self) -> dict[str, Path]:
        if (single := self._folder / SINGLE).is_file():
            return dict.fromkeys(self._in(single), single)
        index = self._folder / INDEX
        if not index.is_file():
            raise WeightsError(
                f"{self._folder}: holds neither {SINGLE} nor {INDEX}; save the model with "
                "safetensors"
            )
        try:
            file_of = read_json(index)["weight_map"]
            files = {str(name): str(file) for name, file in file_of.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index}: is no index ({error}); give the model's own") from None
        for file in files.values():
            if Path(file).name != file:
                raise WeightsError(f"{index}: names {file!r}, no file beside it; give its own")
        return {name: self._folder / file for name, file in files.items()}
