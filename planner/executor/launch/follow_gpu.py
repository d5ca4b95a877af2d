"""The process of a GPU that follows the first one of its worker; started by a rank."""

from __future__ import annotations

import os
import signal

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from planner.executor.comm.device_collectives import LOOPBACK, nccl_shares_gpus
from planner.executor.fault_tolerance.shutdown import FAILED, REFUSED
from planner.executor.launch.arguments import parse_arguments
from planner.executor.launch.gpu_processes import (
    EXCHANGE_FD,
    INDEX,
    RANK,
    STORE_PORT,
    exchange_file,
)
from planner.executor.launch.process import die_with_parent, exit_now, init_process
from planner.executor.launch.setup import first_gpu, torch_device
from planner.executor.tensor_parallel.gpu_group import GpuGroup, LeaderLostError
from planner.executor.tensor_parallel.gpu_stage import GpuStage, follow
from planner.executor.tensor_parallel.sharded_gpu_stage import ShardedGpuStage
from planner.training_plan.file import load_plan
from planner.utils.refusal import Refusal


def main() -> int:
    """Follow the leader until it stops."""
    init_process()
    # the leader ends this process, also after an interrupt or when it is told to end
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    config = parse_arguments(None, __doc__, prog="python -m planner.executor.launch.follow_gpu")
    plan = load_plan(config.plan)
    index, rank = int(os.environ[INDEX]), int(os.environ[RANK])
    gpu = first_gpu(plan, config.devices) + index
    device = torch_device(config.device, gpu, shared=nccl_shares_gpus())
    store = TCPStore(LOOPBACK, int(os.environ[STORE_PORT]))
    group = GpuGroup(store, index, plan.gpu_counts[rank], device)
    stage_type = ShardedGpuStage if plan.shards_optimizer else GpuStage
    follow(
        stage_type(
            plan,
            rank,
            device,
            config.optimizer_config(),
            config.training_data(),
            group,
            exchange_file(int(os.environ[EXCHANGE_FD])),
            compiled=bool(config.compile),
        )
    )
    return 0


if __name__ == "__main__":
    try:
        exit_now(main())
    except Refusal:
        # the leader prints it
        exit_now(REFUSED)
    except LeaderLostError:
        exit_now(FAILED)
