"""Compiled exchanges of devices for the joint search over arrangement and paths.

A role is a slot for a device in a stage; paths and orders refer to roles. Exchanging the devices of
two roles preserves CC1, CC2 and CC3 and changes durations only. A role may be vacant: moving a
device there moves it to another stage, after its paths have been rerouted within its old stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.list_scheduling import ScheduleData
from planner.mapf.moves import PathCounts, PathRules, position_of
from planner.mapf.stage_spans import StageAveragingSpans
from planner.search.arrays import Floats2, Ints, Ints2, Words
from planner.search.compiled import entry, kernel
from planner.search.rng import next_below


class DeviceStageData(NamedTuple):
    """Durations and capacity of every device on every stage.

    Attributes
    ----------
    transfer, link
        Seconds of a transfer between devices, and for which its link is busy; as in `PathArrays`.
    forward, backward, head, memory, capacity
        As in `PathArrays`, one row per stage, one column per device.
    vacant
        Device index that marks a vacant role.
    """

    transfer: Floats2
    link: Floats2
    forward: Floats2
    backward: Floats2
    head: Floats2
    memory: Ints2
    capacity: Ints2
    vacant: int

    @classmethod
    def fixed(cls, arrays: PathArrays) -> DeviceStageData:
        """For a fixed arrangement: each device as on its own stage."""
        rows = (len(arrays.min_visits), 1)
        return cls(
            arrays.transfer.copy(),
            arrays.link.copy(),
            np.tile(arrays.forward, rows),
            np.tile(arrays.backward, rows),
            np.tile(arrays.head, rows),
            np.tile(arrays.memory, rows),
            np.tile(arrays.capacity, rows),
            -1,
        )


class ExchangeContext(NamedTuple):
    """Data of the roles, updated by an exchange, and the device data that it copies from.

    Attributes
    ----------
    data, rules
        Durations and limits of the roles with their current devices.
    devices
        Data of every device on every stage; read-only.
    averaging
        Data for the duration of a stage's averaging round; empty if the objective has none.
    """

    data: ScheduleData
    rules: PathRules
    devices: DeviceStageData
    averaging: StageAveragingSpans


@entry
def put_device(context: ExchangeContext, device_of: Ints, role: int, device: int) -> None:
    """Assign a device to a role and copy its durations and capacity."""
    data, rules, devices = context.data, context.rules, context.devices
    s = rules.stage[role]
    device_of[role] = device
    data.forward[role] = devices.forward[s, device]
    data.backward[role] = devices.backward[s, device]
    data.head[role] = devices.head[s, device]
    data.memory[role] = devices.memory[s, device]
    rules.capacity[role] = devices.capacity[s, device]
    for other in range(len(device_of)):
        data.transfer[role, other] = devices.transfer[device, device_of[other]]
        data.transfer[other, role] = devices.transfer[device_of[other], device]
    if len(data.links.busy) > 0:
        for other in range(len(device_of)):
            data.links.busy[role, other] = devices.link[device, device_of[other]]
            data.links.busy[other, role] = devices.link[device_of[other], device]


@entry
def exchange_devices(context: ExchangeContext, device_of: Ints, role: int, other: int) -> None:
    """Exchange the devices of two roles."""
    device = device_of[role]
    device_of[role] = device_of[other]
    device_of[other] = device
    put_device(context, device_of, role, device_of[role])
    put_device(context, device_of, other, device)


@entry
def exchange_partner(
    context: ExchangeContext, counts: PathCounts, device_of: Ints, role: int, rng_state: Words
) -> int:
    """A random other role with which the device can be exchanged under TC1, or -1."""
    rules, devices = context.rules, context.devices
    other = next_below(rng_state, len(device_of))
    device = device_of[role]
    # prefer devices close to each other: such exchanges are accepted more often
    for _ in range(next_below(rng_state, 4)):
        closer = next_below(rng_state, len(device_of))
        near = (
            devices.transfer[device, device_of[closer]] < devices.transfer[device, device_of[other]]
        )
        if closer != role and (near or other == role):
            other = closer
    other_device = device_of[other]
    if other_device == devices.vacant:
        return other if rules.stage[role] not in (0, rules.stage[other]) else -1
    fits = counts.device[role] <= devices.capacity[rules.stage[role], other_device]
    fits = fits and counts.device[other] <= devices.capacity[rules.stage[other], device]
    return other if other != role and fits else -1


@kernel
def empty_role(
    rules: PathRules, counts: PathCounts, paths: Ints, role: int, rng_state: Words
) -> bool:
    """Reroute every path through a role within its stage; False if the capacity is insufficient.

    Updates ``counts.device`` even when it fails.
    """
    s = rules.stage[role]
    low, size = rules.stage_ptr[s], rules.stage_ptr[s + 1] - rules.stage_ptr[s]
    for b in range(len(paths)):
        k = position_of(paths[b], rules.stage, s)
        if k < 0 or paths[b, k] != role:
            continue
        offset = next_below(rng_state, size)
        for i in range(size):
            v = rules.members[low + (i + offset) % size]
            if v != role and counts.device[v] < rules.capacity[v]:
                counts.device[v] += 1
                counts.device[role] -= 1
                paths[b, k] = v
                break
        if paths[b, k] == role:
            return False
    return True
