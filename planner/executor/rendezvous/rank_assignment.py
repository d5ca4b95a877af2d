"""Assigns a device of the plan to this process, as stated by its launcher, never guessed.

torchrun numbers processes arbitrarily; here the rank is the index of the device in the plan. The
node's command line names its devices, and ``LOCAL_RANK`` selects one of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from planner.executor.rendezvous.address import INTERFACE, interface_address
from planner.training_plan.model import TrainingPlan
from planner.utils.refusal import Refusal

NODE = "GROUP_RANK"
"""Environment variable of torchrun: number of the node; the store is on the first."""


class RankAssignmentError(Refusal):
    """Processes and plan do not fit together."""


def local_rank(devices: Sequence[str]) -> int:
    """Number of this process on its node."""
    if "LOCAL_RANK" not in os.environ and len(devices) > 1:
        raise RankAssignmentError(
            f"--devices names {len(devices)} devices and this is one process; name its own, or "
            "start all of the node with torchrun"
        )
    return environment_number("LOCAL_RANK", 0)


def environment_number(name: str, default: int) -> int:
    """A number that the launcher sets in the environment."""
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit()):
        raise RankAssignmentError(
            f"{name} is {value!r}; it must be a number from 0, as torchrun sets it"
        )
    return int(value)


def local_device_name(devices: Sequence[str]) -> str:
    """Name of this process before the plan is known."""
    with suppress(RankAssignmentError):  # raised again by `local_rank`
        local = environment_number("LOCAL_RANK", 0)
        return devices[local] if local < len(devices) else f"local process {local}"
    return devices[0]


def assigned_rank(plan: TrainingPlan, devices: Sequence[str], local_rank: int) -> int:
    """The rank of this process: the index of its device in the plan."""
    ids = plan.cluster.network.ids
    unknown = [name for name in devices if name not in ids]
    if unknown:
        raise RankAssignmentError(
            f"--devices: the plan has no device {unknown[0]!r}; it has {', '.join(ids[:8])}"
            + (", ..." if len(ids) > 8 else "")
        )
    if len(set(devices)) < len(devices):
        raise RankAssignmentError(
            f"--devices: a device is named twice in {list(devices)}; name each once"
        )
    if local_rank >= len(devices):
        raise RankAssignmentError(
            f"--devices names {len(devices)} devices but this is local process {local_rank}; set "
            "torchrun's --nproc-per-node to the number of devices"
        )
    return ids.index(devices[local_rank])


def use_planned_interface(plan: TrainingPlan, rank: int) -> None:
    """Listen on the plan's interface, unless the environment names one."""
    interface = (plan.cluster.devices.interfaces or ("",) * (rank + 1))[rank]
    if not interface or os.environ.get(INTERFACE):
        return
    if interface_address(interface) is None:
        raise RankAssignmentError(
            f"device {plan.cluster.network.ids[rank]!r}: the plan has it listen on {interface}, "
            f"which this machine does not have, or without an address; name another in {INTERFACE}"
        )
    os.environ[INTERFACE] = interface
