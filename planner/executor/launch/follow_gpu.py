"""The process of a GPU that follows the first one of its worker; started by a rank."""

from __future__ import annotations

import os
from pathlib import Path

from planner.executor.launch.arguments import parse_arguments
from planner.executor.launch.gpu_processes import (
    EXCHANGE_FILE,
    FOLDER,
    INDEX,
    RANK,
    STORE_FILE,
)
from planner.executor.launch.process import die_with_parent, exit_now, init_process
from planner.executor.launch.setup import torch_device
from planner.executor.tensor_parallel.gpu_group import GpuGroup
from planner.executor.tensor_parallel.gpu_stage import GpuStage, follow
from planner.training_plan.file import load_plan


def main() -> int:
    """Follow the leader until it stops."""
    init_process()
    die_with_parent()
    config = parse_arguments(None, __doc__, prog="python -m planner.executor.launch.follow_gpu")
    plan = load_plan(config.plan)
    index, folder = int(os.environ[INDEX]), Path(os.environ[FOLDER])
    size = plan.workload.tensor_parallel
    device = torch_device(config.device, index, size)
    group = GpuGroup(folder / STORE_FILE, index, size, device)
    follow(
        GpuStage(
            plan,
            int(os.environ[RANK]),
            device,
            config.optimizer_config(),
            config.training_data(),
            group,
            folder / EXCHANGE_FILE,
        )
    )
    return 0


if __name__ == "__main__":
    exit_now(main())
