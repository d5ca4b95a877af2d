"""Files of one checkpoint: a shard for each device with a stage, and an index.

``FOLDER/step-000020/`` holds the state after 20 steps. The index is written last: a checkpoint
is incomplete without one, or if it is not JSON, as after a power failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from planner.executor.checkpoint.safetensors_io import read_tensors
from planner.utils.refusal import Refusal

INDEX = "index.json"
VERSION = 3
SHARD = "device-"


class CheckpointError(Refusal):
    """A checkpoint that cannot be resumed from."""


@dataclass(frozen=True)
class CheckpointFiles:
    """The checkpoint after some steps.

    Attributes
    ----------
    folder
        Folder of all checkpoints.
    """

    folder: Path
    steps: int

    @property
    def path(self) -> Path:
        """Folder of this checkpoint."""
        return self.folder / f"step-{self.steps:06d}"

    @property
    def index(self) -> Path:
        """Path of the index."""
        return self.path / INDEX

    def shard(self, rank: int) -> Path:
        """Path of the shard of a rank."""
        return self.path / f"{SHARD}{rank:04d}.safetensors"

    def read_index(self) -> dict[str, Any]:
        """Read and validate the index."""
        try:
            index: dict[str, Any] = json.loads(self.index.read_text())
            version, index["plan"] = index["version"], str(index["plan"])
        except KeyError as error:
            raise self.unreadable(f"no {error.args[0]}") from None
        except (OSError, ValueError, TypeError) as error:
            raise self.unreadable(str(error)) from None
        if version != VERSION:
            raise CheckpointError(
                f"{self.index}: has version {version}, this release reads {VERSION}; resume with "
                "the release that wrote it"
            )
        for name in ("settings", "data", "model", "training", "holds", "shards"):
            if not isinstance(index.get(name), dict):
                raise self.unreadable(f"no {name}")
        sync = index["training"].get("sync")
        if not isinstance(sync, dict) or not isinstance(sync.get("every_steps"), int):
            raise self.unreadable("no training.sync")
        return index

    def read_shard(
        self, rank: int, index: dict[str, Any], wanted: Callable[[str], bool] | None = None
    ) -> dict[str, Tensor]:
        """Read tensors of a shard, verified by the index."""
        path = self.shard(rank)
        try:
            sha256 = str(index["shards"][path.name]["sha256"])
        except (KeyError, TypeError):
            raise self.unreadable(f"no {path.name}") from None
        return read_tensors(path, sha256, wanted)

    def has_index(self) -> bool:
        """Whether the index is JSON: after a power failure it may be empty or cut off."""
        try:
            json.loads(self.index.read_text())
        except ValueError:
            return False
        except OSError:
            return self.index.is_file()  # it exists, but cannot be read
        return True

    def has_shards(self) -> bool:
        """Whether all files of the index are here."""
        return all((self.path / name).is_file() for name in self.read_index()["shards"])

    def unreadable(self, reason: str) -> CheckpointError:
        """The error for an invalid index."""
        return CheckpointError(
            f"{self.index}: cannot be read ({reason}); delete this checkpoint, so that an "
            "earlier one is taken"
        )

    def has_foreign_files(self) -> bool:
        """Whether the folder cannot be read, or has files that are not of a checkpoint."""
        try:
            names = [path.name for path in self.path.iterdir()]
        except OSError:  # a file, or another rank has just removed it
            return True
        return not all(name.lstrip(".").startswith((SHARD, INDEX)) for name in names)


def started_checkpoints(folder: Path) -> list[CheckpointFiles]:
    """All checkpoints in a folder, incomplete ones too, in order of steps."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return [CheckpointFiles(folder, n) for n in sorted(int(n) for n in names if n.isdecimal())]


def complete_checkpoints(folder: Path) -> list[CheckpointFiles]:
    """The checkpoints with an index, in order of steps."""
    return [files for files in started_checkpoints(folder) if files.has_index()]


def newest_with_shards(folder: Path) -> CheckpointFiles | None:
    """The newest checkpoint with an index and all its shards; None if there is none."""
    return next(
        (files for files in reversed(complete_checkpoints(folder)) if files.has_shards()), None
    )
