"""Reads checkpoints that runs have written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from planner.executor.checkpoint.checkpoint_files import CheckpointFiles, complete_checkpoints
from planner.training_plan.model import TrainingPlan


def latest_step(folder: Path, ranks: Iterable[int]) -> int:
    """Steps of the newest complete checkpoint, which has the shards of these ranks."""
    newest = complete_checkpoints(folder)[-1]
    assert all(newest.shard(rank).is_file() for rank in ranks)
    return newest.steps


def read_shard(folder: Path, steps: int, rank: int, plan: TrainingPlan) -> dict[str, Tensor]:
    """The shard of a rank in a checkpoint of this plan."""
    files = CheckpointFiles(folder, steps)
    index = files.read_index()
    assert index["plan"] == plan.content_hash
    return files.read_shard(rank, index)
