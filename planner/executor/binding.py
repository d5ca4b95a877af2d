"""Which device of the plan this process is: said by whoever starts it, never guessed.

torchrun numbers processes as they come; a rank here is the device's index in the plan. The node's
command line names its devices, ``LOCAL_RANK`` picks one of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from planner.executor.ranks import TIMEOUT, Ranks
from planner.training_plan.model import TrainingPlan


class BindingError(ValueError):
    """Processes and plan do not fit together."""


def rank_of(plan: TrainingPlan, devices: Sequence[str], local_rank: int) -> int:
    """The rank of this process: the plan's index of the device it was named.

    Parameters
    ----------
    plan
        The plan.
    devices
        Names of this node's devices, in the order of its processes.
    local_rank
        Number of the process on its node.

    Returns
    -------
    int
        Index of the device in the plan.

    Raises
    ------
    BindingError
        The plan has no such device, one is named twice, or there are more processes than names.
    """
    ids = plan.cluster.network.ids
    unknown = [name for name in devices if name not in ids]
    if unknown:
        raise BindingError(
            f"--devices: the plan has no device {unknown[0]!r}; it has {', '.join(ids[:8])}"
            + (", ..." if len(ids) > 8 else "")
        )
    if len(set(devices)) < len(devices):
        raise BindingError(f"--devices: a device is named twice in {list(devices)}; name each once")
    if local_rank >= len(devices):
        raise BindingError(
            f"--devices names {len(devices)} devices but this is local process {local_rank}; set "
            "torchrun's --nproc-per-node to the number of devices"
        )
    return ids.index(devices[local_rank])


def join(plan: TrainingPlan, devices: Sequence[str], settings: str = "") -> Ranks:
    """Meet the other processes as the named device.

    Parameters
    ----------
    plan
        The plan.
    devices
        Names of this node's devices, in the order of its processes.
    settings
        What all processes must have been told alike.

    Returns
    -------
    Ranks
        This process among all.

    Raises
    ------
    BindingError
        A device is claimed twice, the number of processes is not the number of devices, or another
        process has another plan or other settings.
    """
    rank = rank_of(plan, devices, int(os.environ.get("LOCAL_RANK", "0")))
    world = len(plan.cluster)
    started = int(os.environ.get("WORLD_SIZE", world))
    if started != world:
        raise BindingError(
            f"the plan has {world} devices but torchrun starts {started} processes; start one a "
            "device"
        )
    # read what torchrun says of the address, but not which rank it gave us
    store, _, _ = next(rendezvous("env://", rank, world, timeout=TIMEOUT))
    store = PrefixStore("planner", store)
    name = plan.cluster.network.ids[rank]
    if store.add(f"claim/{rank}", 1) > 1:
        raise BindingError(f"device {name!r} is claimed by two processes; name each device once")
    for what, mine, remedy in (
        ("plan", plan.content_hash[:12], "give every node the same plan file"),
        ("settings", settings, "start every node with the same options"),
    ):
        store.set(f"{what}/{rank}", mine)
        first = store.get(f"{what}/0").decode()
        if first != mine:
            raise BindingError(
                f"device {name!r} has {what} {mine} but device 0 has {first}; {remedy}"
            )
    return Ranks(rank, world, store)
