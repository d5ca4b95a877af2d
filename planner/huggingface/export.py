"""Exports a trained model as a folder that ``transformers`` loads: one file per stage, index,
config."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from planner.executor.checkpoint.checkpoint import newest_with, read_parameters
from planner.executor.checkpoint.safetensors_io import write_tensors
from planner.executor.data.tokenizer import TOKENIZER, tokenizer_file
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.model import PROJECTION
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.stage_module import has_head, require_executable
from planner.huggingface.names import TensorPart, tensor_parts
from planner.huggingface.weights import INDEX, SINGLE, WeightsError, require_same_model
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import write_bytes, write_text
from planner.utils.output_files import NO_ROOM, make_writable
from planner.workload.hf_config import CONFIG, read_config, to_hf_config
from planner.workload.layers import Architecture

METADATA = {"format": "pt"}
"""Without it ``transformers`` refuses a file."""
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("merges.txt", "tokenizer.model"),
)
"""Files of a tokenizer next to weights."""

T = TypeVar("T")


class Export:
    """Exports a trained model.

    Parameters
    ----------
    folder
        New, or without weights.
    like
        The folder of initial weights, whose config and tokenizer are copied.
    tokenizer
        A ``tokenizer.json``, or a folder with one, copied instead of that of ``like``.
    """

    def __init__(
        self,
        folder: Path,
        plan: TrainingPlan,
        like: Path | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        self.folder, self._plan, self._like = folder, plan, like
        self._copied: dict[str, Path] = {}
        if like is not None:
            self._copied[GENERATION] = like / GENERATION
        if (source := tokenizer or like) is not None:
            file = tokenizer_file(source)
            self._copied[TOKENIZER] = file
            if file.name == TOKENIZER:  # its settings are next to it
                self._copied |= {name: file.with_name(name) for name in TOKENIZER_FILES}
        self._arch: Architecture = require_executable(plan)
        written = ("*.safetensors*", CONFIG, GENERATION, *TOKENIZER_FILES)
        for existing in (path for name in written for path in sorted(folder.glob(name))):
            raise WeightsError(f"{folder}: holds {existing.name} already; name a new folder")
        self._config = to_hf_config(self._arch)
        if like is not None:
            require_same_model(like, self._arch)
        try:  # now rather than after the last step
            make_writable(folder)
        except OSError as error:
            raise WeightsError(
                f"{folder}: cannot be written to ({error.strerror}); name another folder"
            ) from None

    def for_plan(self, plan: TrainingPlan) -> Export:
        """The same for another plan, after devices moved."""
        other = copy.copy(self)
        other._plan = plan
        return other

    def into(self, folder: Path) -> Export:
        """The same into another folder."""
        other = copy.copy(self)
        other.folder = folder
        return other

    def writes(self, rank: int) -> bool:
        """Whether a rank writes its stage: the first device of each does."""
        return any(group[0] == rank for group in self._plan.assignment.groups)

    def write(self, rank: int, parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Write the file of a rank's stage.

        Returns
        -------
        dict[str, list[int]]
            Bytes of each tensor by name, in a list with the stage: for `finish`.
        """
        stage = self._plan.stage_of[rank]
        tensors: dict[str, Tensor] = {}
        for name, parts in self._parts(rank).items():
            parameter = parameters[name].detach().to("cpu", torch.float32)
            for part in parts:
                rows = parameter if part.rows is None else parameter[slice(*part.rows)]
                tensors[part.name] = (rows.t() if part.transposed else rows).contiguous()
        write_tensors(self.folder / self._file(stage), tensors, METADATA)
        return {name: [stage, tensor.nbytes] for name, tensor in tensors.items()}

    def finish(self, written: Mapping[str, list[int]]) -> None:
        """Write index and config; on every node that has files of the model."""
        if len(self._plan.stage_layers) > 1:
            index = {
                "metadata": {"total_size": sum(size for _, size in written.values())},
                "weight_map": {name: self._file(stage) for name, (stage, _) in written.items()},
            }
            write_text(self.folder / INDEX, json.dumps(index, indent=2) + "\n")
        config = self._config
        if self._like is not None:
            config = read_config(self._like / CONFIG)
            # loaders would convert the values back
            config |= {name: "float32" for name in ("dtype", "torch_dtype") if name in config}
        for name, path in self._copied.items():
            if path.is_file():
                write_bytes(self.folder / name, path.read_bytes())
        write_text(self.folder / CONFIG, json.dumps(config, indent=2) + "\n")

    def names(self, rank: int) -> list[str]:
        """Names of the parameters in the file of a rank's stage."""
        return list(self._parts(rank))

    def _parts(self, rank: int) -> dict[str, tuple[TensorPart, ...]]:
        start, stop = self._plan.stage_layers[self._plan.stage_of[rank]]
        parts = tensor_parts(self._arch, start, stop, head=has_head(self._plan, rank))
        # who has the embedding writes a tied head
        tied = self._arch.tied
        return {name: each for name, each in parts.items() if not (tied and name == PROJECTION)}

    def _file(self, stage: int) -> str:
        stages = len(self._plan.stage_layers)
        return SINGLE if stages == 1 else f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def export_trained(export: Export, ranks: RankGroup, model_stage: ModelStage | None) -> None:
    """At the end of a run, export each stage by its first rank; a collective call."""
    writes = model_stage is not None and export.writes(ranks.rank)
    stages: dict[str, list[int]] = {}
    if writes and model_stage is not None:
        rank, trained = ranks.rank, model_stage.global_parameters()
        export, stages = _where_room(export, lambda place: place.write(rank, trained))
    written_by = [json.loads(text) for text in ranks.all_gather("export", json.dumps(stages))]
    if writes:
        written = {name: place for files in written_by for name, place in files.items()}
        _where_room(export, lambda place: place.finish(written))


def _where_room(export: Export, write: Callable[[Export], T]) -> tuple[Export, T]:
    """Write to another folder if the disk is full."""
    try:
        return export, write(export)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        other = export.into(Path(tempfile.mkdtemp(prefix="planner-export-")))
        result = write(other)
        print(
            f"planner.executor: {error.filename}: {error.strerror}; what found no room is in "
            f"{other.folder}: bring all files into one folder",
            file=sys.stderr,
            flush=True,
        )
        return other, result


def export_checkpoint(export: Export, plan: TrainingPlan, folder: Path) -> int:
    """Export the newest checkpoint of a folder that has the shards of all devices."""
    names = {group[0]: export.names(group[0]) for group in plan.assignment.groups}
    files = newest_with(folder, plan, names)
    written: dict[str, list[int]] = {}
    for rank, own in names.items():
        written |= export.write(rank, read_parameters(files, plan, rank, own))
    export.finish(written)
    return files.steps
