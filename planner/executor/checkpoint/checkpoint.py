"""Saving checkpoints and resuming from them.

The folder may be shared by all nodes or local to each: every rank writes the same index next to its
shard, when all shards are complete.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.executor.checkpoint.checkpoint_files import (
    VERSION,
    CheckpointError,
    CheckpointFiles,
    complete_checkpoints,
    newest_with_shards,
    started_checkpoints,
)
from planner.executor.checkpoint.reshard import description, differences, source_shards
from planner.executor.checkpoint.safetensors_io import write_tensors
from planner.executor.data.microbatches import Microbatches
from planner.executor.data.synthetic import SYNTHETIC
from planner.executor.rendezvous.file_digest import file_digest
from planner.executor.rendezvous.rank_assignment import environment_number
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.loss_scaler import GROWTH_TRACKER, SCALE
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.runtime.optimizer import OptimizerConfig
from planner.executor.runtime.optimizer_segments import MASTER, SEGMENT, joined_segments
from planner.executor.runtime.outer_optimizer import MEAN, MOMENTUM, PARAMETER
from planner.executor.runtime.sharded_aggregator import ShardedAggregator
from planner.training_plan.model import TrainingPlan
from planner.utils.atomic_write import sync_folder, write_text
from planner.utils.output_files import NO_ROOM, make_writable
from planner.utils.refusal import Refusal

CheckpointedState = ModelStage | ShardedAggregator
"""State of one rank, of which a checkpoint has a shard."""
MAX_KEPT = 2
"""Number of complete checkpoints kept."""
BESIDE_SHARE = 4
"""A checkpoint beside training is completed before this part of the steps to the next is done."""


class _Unfinished(NamedTuple):
    """A checkpoint that is being written: its shard's entry, and the steps to complete it after."""

    files: CheckpointFiles
    entry: Future[str]
    due_after: int


class CheckpointManager:
    """Writes checkpoints.

    If all ranks compute on GPUs, they write beside training: each copies its state to host memory,
    and a thread writes the copy. Ranks complete the checkpoint together some steps later.

    Parameters
    ----------
    plan, ranks
        The plan and the rank group.
    model_stage
        This rank's part of the model; None without one.
    settings
        Options, other than the plan, that losses depend on.
    on_complete
        Called with the number of steps of each complete checkpoint.
    beside
        Whether shards are written beside training; the same on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        plan: TrainingPlan,
        ranks: RankGroup,
        model_stage: CheckpointedState | None,
        settings: dict[str, Any],
        on_complete: Callable[[int], None],
        beside: bool = False,
    ) -> None:
        self._folder, self._every, self._settings = folder, every, settings
        self._on_complete, self._beside = on_complete, beside
        self._start(plan, ranks, model_stage)

    def _start(
        self, plan: TrainingPlan, ranks: RankGroup, model_stage: CheckpointedState | None
    ) -> None:
        self._ranks, self._model_stage = ranks, model_stage
        self._index = {
            "version": VERSION,
            "plan": plan.content_hash,
            **description(plan),
            "settings": self._settings,
        }
        self._unfinished: _Unfinished | None = None
        self._writer, self._given_up = ThreadPoolExecutor(1, "checkpoint"), threading.Event()

    def set_plan(
        self,
        plan: TrainingPlan,
        model_stage: CheckpointedState | None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Continue with another plan.

        A checkpoint that is not complete is given up.
        """
        self._given_up.set()
        self._writer.shutdown()
        self._start(plan, ranks or self._ranks, model_stage)

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return (step + 1) % self._every == 0

    def after_step(self, step: int) -> None:
        """Begin the checkpoint that is due after a step, or complete an earlier one.

        A collective call.
        """
        if self._unfinished is not None and step + 1 >= self._unfinished.due_after:
            self.finish()
        if not self.due(step):
            return
        files = CheckpointFiles(self._folder, step + 1)
        entry = self._writer.submit(self._write_shard, files, *self._shard(files.steps))
        self._unfinished = _Unfinished(
            files, entry, files.steps + max(1, self._every // BESIDE_SHARE)
        )
        if not self._beside:
            self.finish()

    def finish(self) -> None:
        """Complete the last checkpoint, when all ranks have written their shards; collective."""
        if self._unfinished is None:
            return
        (files, entry, _), self._unfinished = self._unfinished, None
        name = f"checkpoint/{files.steps}"
        entries = [json.loads(text) for text in self._ranks.all_gather(name, entry.result())]
        failed = [(rank, t["error"]) for rank, t in enumerate(entries) if t.get("error")]
        if not failed:
            shards = {files.shard(r).name: t for r, t in enumerate(entries) if t}
            # any rank that reads data knows the position
            data = next((one["data"] for one in shards.values() if "data" in one), None)
            index = self._index | {"steps": files.steps, "data": data, "shards": shards}
            # all or none: one rank without it makes the checkpoint of all incomplete
            error = self._write_index(files, json.dumps(index, indent=1))
            errors = self._ranks.all_gather(f"{name}/index", error)
            failed = [(rank, error) for rank, error in enumerate(errors) if error]
        if failed:
            self._discard(files, *failed[0])
            return
        self._on_complete(files.steps)
        recent = complete_checkpoints(self._folder)[-MAX_KEPT:]
        # without an index: incomplete because a device was lost
        for old in started_checkpoints(self._folder):
            if old.steps < files.steps and old not in recent and not old.has_foreign_files():
                shutil.rmtree(old.path, ignore_errors=True)

    def warn_if_missing(self, steps: int) -> None:
        """Print a line if the checkpoint after the last of ``steps`` is due, and not complete."""
        files = CheckpointFiles(self._folder, steps)
        if self.due(steps - 1) and not files.has_index():
            _warn_missing(files, "a device was lost while it was written")

    def _shard(self, steps: int) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Tensors of this rank's shard, and what the index says of it."""
        stage = self._model_stage
        if stage is None:
            return {}, {}
        tensors = stage.host_state_dict() if self._beside else stage.state_dict()
        if stage.data is None:
            return tensors, {}
        position = {"says": stage.data.description, "position": stage.data.position(steps)}
        return tensors, {"data": position}

    def _write_shard(
        self, files: CheckpointFiles, tensors: Mapping[str, Tensor], entry: Mapping[str, Any]
    ) -> str:
        """Write this rank's shard; returns its entry of the index."""
        if self._model_stage is None:
            return "{}"
        try:
            files.path.mkdir(parents=True, exist_ok=True)
            path = files.shard(self._ranks.rank)
            return json.dumps(
                {"sha256": write_tensors(path, tensors, cancelled=self._given_up), **entry}
            )
        except OSError as error:
            return json.dumps({"error": error.strerror or str(error)})

    def _write_index(self, files: CheckpointFiles, index: str) -> str:
        """Write the index; returns why it failed, or nothing."""
        try:
            files.path.mkdir(parents=True, exist_ok=True)
            write_text(files.index, index, sync=True)
            sync_folder(self._folder)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _discard(self, files: CheckpointFiles, rank: int, reason: str) -> None:
        """Continue the run without this checkpoint."""
        for path in (files.index, files.shard(self._ranks.rank)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            files.path.rmdir()  # by the last one
        if self._ranks.rank in (0, rank):
            _warn_missing(files, f"device {self._ranks.name(rank)!r}: {reason}; the run continues")


def _warn_missing(files: CheckpointFiles, reason: str) -> None:
    print(
        f"planner.executor: no checkpoint after {files.steps} steps: {reason}",
        file=sys.stderr,
        flush=True,
    )


def require_fresh_folder(folder: Path, resumed: Path | None) -> None:
    """Refuse a folder with checkpoints of another run, or one that cannot be written.

    A full disk is not refused: it costs checkpoints, not the run.
    """
    complete = complete_checkpoints(folder)
    if complete and (resumed is None or resumed.resolve() != folder.resolve()):
        raise CheckpointError(
            f"--checkpoint {folder}: holds checkpoints, the last after {complete[-1].steps} steps; "
            f"continue from there with --resume {folder}, or name another folder"
        )
    try:
        make_writable(folder)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise CheckpointError(
                f"--checkpoint {folder}: cannot be written to ({error.strerror}); name another "
                "folder"
            ) from None


def lock_folder(folder: Path) -> int:
    """Refuse a folder into which another run writes; returns a descriptor that keeps others out."""
    # a full disk may have no room for the folder
    lock = os.open(folder if folder.exists() else os.devnull, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CheckpointError(
            f"--checkpoint {folder}: another run writes to it; name another folder"
        ) from None
    except (ImportError, OSError):
        pass  # some file systems have no locks
    return lock


def resume(
    folder: Path,
    plan: TrainingPlan,
    ranks: RankGroup,
    model_stage: CheckpointedState | None,
    settings: Mapping[str, Any],
    steps: int,
) -> int:
    """Load the newest checkpoint that all ranks have, of this plan or another of the same model.

    Optimizer settings must be the same, unless none of the run's ``steps`` is left. A collective
    call; returns the number of steps done.
    """
    files = _latest_common(folder, plan, ranks, model_stage)
    if model_stage is None:
        return files.steps
    index = files.read_index()
    same_plan = index["plan"] == plan.content_hash
    changes = [] if same_plan else _require_same_model(files, index, plan)
    if files.steps < steps:
        _require_settings(files, index, settings)
    if same_plan:
        model_stage.load_state_dict(files.read_shard(ranks.rank, index))
    else:
        model_stage.load_state_dict(_read_resharded(files, index, plan, ranks.rank, model_stage))
    if isinstance(model_stage, ModelStage) and model_stage.data is not None:
        _restore_position(model_stage, model_stage.data, index["data"], files)
    if not same_plan and ranks.rank == min(plan.stage_of):
        changed = "".join(f"; {name} was {was}, is {now}" for name, was, now in changes)
        print(
            f"planner.executor: resuming at step {files.steps} from plan {index['plan'][:12]} with "
            f"plan {plan.content_hash[:12]}{changed}",
            file=sys.stderr,
            flush=True,
        )
    return files.steps


def _latest_common(
    folder: Path, plan: TrainingPlan, ranks: RankGroup, model_stage: CheckpointedState | None
) -> CheckpointFiles:
    """The newest checkpoint that all ranks with a stage have; a collective call."""
    complete = [
        # the index has the digests of all shards
        (files.steps, file_digest(files.index))
        for files in complete_checkpoints(folder)
        if model_stage is None or _can_load(files, plan, ranks.rank, model_stage)
    ]
    by_rank: list[set[tuple[int, str]]] = [
        set(map(tuple, json.loads(text)))
        for text in ranks.all_gather("checkpoints", json.dumps(complete))
    ]
    # a device without a stage needs no shard, and may have no folder
    loadable = {r: found for r, found in enumerate(by_rank) if r in plan.stage_updated_by}
    common = set.intersection(*loadable.values())
    numbers = set.intersection(*({steps for steps, _ in found} for found in loadable.values()))
    if numbers and not common:
        raise CheckpointError(
            f"{folder}: the checkpoint after {max(numbers)} steps is another one than on other "
            "devices; give all nodes the folder of the same run"
        )
    if not common:
        raise CheckpointError(
            f"{folder}: there is no complete checkpoint that all devices have; name the folder "
            "that was given with --checkpoint, and after another plan bring the nodes' folders "
            "together"
        )
    chosen = CheckpointFiles(folder, max(common)[0])
    first_of_node = environment_number("LOCAL_RANK", 0) == 0
    for files in started_checkpoints(folder) if first_of_node else ():
        if files.steps > chosen.steps and files.index.is_file():
            reason = "is empty or not JSON, as after a power failure"
            if files.has_index():
                entry = files.steps, file_digest(files.index)
                lacking = next(r for r, found in loadable.items() if entry not in found)
                reason = f"device {ranks.name(lacking)!r} does not have its file of it"
            print(
                f"planner.executor: {files.index}: {reason}; resuming from the checkpoint after "
                f"{chosen.steps} steps",
                file=sys.stderr,
                flush=True,
            )
    return chosen


def _restore_position(
    model_stage: ModelStage, data: Microbatches, saved: dict[str, Any], files: CheckpointFiles
) -> None:
    """Continue at the saved position in the data, which must be the same."""
    try:
        description, position = str(saved["says"]), [int(number) for number in saved["position"]]
    except (KeyError, TypeError, ValueError):
        raise files.unreadable("no position in the data") from None
    if description != data.description:
        remedy = "give the same --data, --tokenizer and --shuffle, with the release that wrote it"
        if description.startswith(SYNTHETIC) and data.description.startswith(SYNTHETIC):
            remedy = "plan with the same --microbatch-samples, by which synthetic text is made"
        raise CheckpointError(
            f"{files.index}: was trained on {description}, this run has {data.description}; "
            + remedy
        )
    model_stage.seek(position)


def _require_settings(
    files: CheckpointFiles, index: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Refuse optimizer settings other than the checkpoint's."""
    theirs = index["settings"]
    with suppress(Refusal, TypeError):  # settings without effect do not count
        theirs = OptimizerConfig(**theirs).to_dict()
    changed = [name for name, value in settings.items() if theirs.get(name) != value]
    if changed:
        was, has = (
            " ".join(f"--{name.replace('_', '-')} {values.get(name)}" for name in changed)
            for values in (theirs, settings)
        )
        raise CheckpointError(
            f"{files.index}: was trained with {was}, this run has {has}; give {was}"
        )


def require_checkpoint(folder: Path, settings: Mapping[str, Any], steps: int) -> int | None:
    """Refuse what cannot be resumed from before anything starts.

    Returns the number of steps done; None if shards of all checkpoints are elsewhere.
    """
    complete = complete_checkpoints(folder)
    if not complete:
        raise CheckpointError(
            f"--resume {folder}: there is no complete checkpoint; name the folder that was given "
            "with --checkpoint, or leave --resume out"
        )
    newest = newest_with_shards(folder)
    if newest is None:
        return None
    # another plan may need fewer shards, so that ranks can load a newer one
    if newest.steps < steps and newest == complete[-1]:
        _require_settings(newest, newest.read_index(), settings)
    return newest.steps


def newest_with(
    folder: Path, plan: TrainingPlan, names: Mapping[int, Sequence[str]]
) -> CheckpointFiles:
    """The newest complete checkpoint of a model whose shards with some parameters are all here.

    Of this plan, or of another one of the same model.

    Parameters
    ----------
    names
        By rank, names of parameters of its stage.
    """
    missing: Path | None = None
    for files in reversed(complete_checkpoints(folder)):
        index = files.read_index()
        _require_model(files, index, plan)
        needed = {
            device
            for rank, own in names.items()
            for device in _source_shards(files, index, plan, rank, own, all_holders=True)
        }
        absent = [path for path in map(files.shard, sorted(needed)) if not path.is_file()]
        if not absent:
            return files
        missing = missing or absent[0]
    if missing is None:
        raise CheckpointError(
            f"{folder}: there is no complete checkpoint; name the folder that was given with "
            "--checkpoint"
        )
    raise CheckpointError(f"{missing}: is not here; bring the nodes' folders together first")


def read_parameters(
    files: CheckpointFiles, plan: TrainingPlan, rank: int, names: Sequence[str]
) -> dict[str, Tensor]:
    """Parameters of a rank's stage by name; with averaging every H steps, the global ones."""
    state = _read_parts(files, files.read_index(), plan, rank, names)
    return {name: state.get(PARAMETER + name, state[f"{MASTER}/{name}"]) for name in names}


def _require_same_model(
    files: CheckpointFiles, index: dict[str, Any], plan: TrainingPlan
) -> list[tuple[str, Any, Any]]:
    """Refuse a checkpoint of another model; returns differences in training."""
    path, ours = files.index, _require_model(files, index, plan)
    for of, sync in (("its", index["training"]["sync"]), ("this", ours["training"]["sync"])):
        if sync.get("delayed"):
            raise CheckpointError(
                f"{path}: {of} plan applies outer steps a step late (sync.delayed), and only the "
                "plan that wrote such a checkpoint can resume from it; use that plan"
            )
        if files.steps % int(sync["every_steps"]):
            raise CheckpointError(
                f"{path}: {files.steps} steps were done, {of} plan averages every "
                f"{sync['every_steps']} steps, and another plan can resume only after an outer "
                "step; write checkpoints with --every a multiple of it"
            )
    # older checkpoints have no shards
    return differences({"optimizer_shards": 1, **index["training"]}, ours["training"])


def _described(plan: TrainingPlan) -> dict[str, Any]:
    """Description of a plan as a file has it."""
    described: dict[str, Any] = json.loads(json.dumps(description(plan)))
    return described


def _require_model(
    files: CheckpointFiles, index: dict[str, Any], plan: TrainingPlan
) -> dict[str, Any]:
    """Refuse a checkpoint of another model; returns the description of this plan."""
    ours = _described(plan)
    for name, was, now in differences(index["model"], ours["model"]):
        raise CheckpointError(
            f"{files.index}: is of plan {index['plan'][:12]}, whose model has {name} {was}, this "
            f"plan's has {now}; plan the same model, batch and seed"
        )
    return ours


def _read_resharded(
    files: CheckpointFiles,
    index: dict[str, Any],
    plan: TrainingPlan,
    rank: int,
    model_stage: CheckpointedState,
) -> dict[str, Tensor]:
    """A rank's state from the shards of another plan's devices."""
    tensors = _read_parts(files, index, plan, rank, model_stage.parameter_names)
    for key in () if model_stage.outer is None else model_stage.outer.state_dict():
        if key in tensors:
            continue
        # the checkpoint has no outer optimizer: start one
        if key.startswith(MOMENTUM):
            tensors[key] = torch.zeros_like(tensors[f"{MASTER}/{key.removeprefix(MOMENTUM)}"])
        else:
            tensors[key] = tensors[f"{MASTER}/{key.removeprefix(PARAMETER)}"]
    return tensors


def _read_parts(
    files: CheckpointFiles,
    index: dict[str, Any],
    plan: TrainingPlan,
    rank: int,
    names: Sequence[str],
) -> dict[str, Tensor]:
    """State of parameters of a rank, by their names in its stage."""
    tensors: dict[str, Tensor] = {}
    sources = _source_shards(files, index, plan, rank, names)
    for device, renamed in _source_shards(
        files, index, plan, rank, names, all_holders=True
    ).items():
        chosen = sources.get(device, {})

        def wanted(
            key: str, renamed: dict[str, str] = renamed, chosen: dict[str, str] = chosen
        ) -> bool:
            name = key.rpartition("/")[2]
            if key.startswith(SEGMENT):
                return name in renamed
            return key in (SCALE, GROWTH_TRACKER) or (not key.startswith(MEAN) and name in chosen)

        for key, tensor in files.read_shard(device, index, wanted).items():
            kind, slash, name = key.rpartition("/")
            tensors[f"{kind}{slash}{renamed.get(name, name)}"] = tensor
    return joined_segments(tensors)


def _source_shards(
    files: CheckpointFiles,
    index: dict[str, Any],
    plan: TrainingPlan,
    rank: int,
    names: Sequence[str],
    *,
    all_holders: bool = False,
) -> dict[int, dict[str, str]]:
    """By device, names in its shard of these parameters of a rank, each from one device.

    With ``all_holders``, from all devices that have a part of their optimizer state.
    """
    all_holders &= index["training"].get("optimizer_shards", 1) > 1
    holds = {**index["holds"], **index.get("owns", {})} if all_holders else index["holds"]
    try:
        return source_shards(holds, plan, rank, names, all_holders=all_holders)
    except Refusal as error:
        raise files.unreadable(str(error)) from None


def _can_load(
    files: CheckpointFiles, plan: TrainingPlan, rank: int, model_stage: CheckpointedState
) -> bool:
    """Whether the shards that a rank needs are here; their content is validated when read."""
    try:
        index = files.read_index()
    except CheckpointError:
        return files.shard(rank).is_file()
    if index["plan"] == plan.content_hash:
        return files.shard(rank).is_file()
    if index["model"] != _described(plan)["model"]:
        return True
    needed = _source_shards(files, index, plan, rank, model_stage.parameter_names, all_holders=True)
    return all(files.shard(device).is_file() for device in needed)
