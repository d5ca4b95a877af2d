"""Compiled exchanges of devices, when the arrangement is searched together with the paths.

A role is a place in a stage; paths and orders are those of roles. Exchanging the devices of two
roles leaves CC1, CC2 and CC3 as they are and changes every time. A role may be vacant: a device
that goes there moves to another stage, once its paths have been sent to others of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.dispatch import Numbers
from planner.mapf.moves import PathRules, Use, place_of
from planner.mapf.stage_spans import StageAveragingSpans
from planner.search.arrays import Floats2, Ints, Ints2, Words
from planner.search.compiled import entry, kernel
from planner.search.rng import next_below


class DeviceNumbers(NamedTuple):
    """What a device would bring to each stage.

    Attributes
    ----------
    hop, link
        Transfers between devices, and for how long their links are busy; as in `PathArrays`.
    forward, backward, head, memory, room
        As in `PathArrays`, one row per stage, one column per device.
    vacant
        The device that stands for none.
    """

    hop: Floats2
    link: Floats2
    forward: Floats2
    backward: Floats2
    head: Floats2
    memory: Ints2
    room: Ints2
    vacant: int

    @classmethod
    def fixed(cls, arrays: PathArrays) -> DeviceNumbers:
        """Of a given arrangement, in which nobody moves: each device as in its own stage."""
        rows = (len(arrays.fewest), 1)
        return cls(
            arrays.hop.copy(),
            arrays.link.copy(),
            np.tile(arrays.forward, rows),
            np.tile(arrays.backward, rows),
            np.tile(arrays.head, rows),
            np.tile(arrays.memory, rows),
            np.tile(arrays.room, rows),
            -1,
        )


class ExchangeContext(NamedTuple):
    """What an exchange of devices changes, and where it reads what to write there.

    Attributes
    ----------
    num, rules
        Numbers and limits of the roles, with the devices that fill them now.
    devices
        What every device would bring to every stage; never changed.
    averaging
        What a stage's round takes with the devices there; it may count for nothing.
    """

    num: Numbers
    rules: PathRules
    devices: DeviceNumbers
    averaging: StageAveragingSpans


@entry
def put_device(setting: ExchangeContext, device_of: Ints, role: int, device: int) -> None:
    """Let a device fill a role: write its numbers into those of the role."""
    num, rules, devices = setting.num, setting.rules, setting.devices
    s = rules.stage[role]
    device_of[role] = device
    num.forward[role] = devices.forward[s, device]
    num.backward[role] = devices.backward[s, device]
    num.head[role] = devices.head[s, device]
    num.memory[role] = devices.memory[s, device]
    rules.room[role] = devices.room[s, device]
    for other in range(len(device_of)):
        num.hop[role, other] = devices.hop[device, device_of[other]]
        num.hop[other, role] = devices.hop[device_of[other], device]
    if len(num.links.busy) > 0:
        for other in range(len(device_of)):
            num.links.busy[role, other] = devices.link[device, device_of[other]]
            num.links.busy[other, role] = devices.link[device_of[other], device]


@entry
def exchange_devices(setting: ExchangeContext, device_of: Ints, one: int, other: int) -> None:
    """Exchange the devices of two roles."""
    device = device_of[one]
    device_of[one] = device_of[other]
    device_of[other] = device
    put_device(setting, device_of, one, device_of[one])
    put_device(setting, device_of, other, device)


@entry
def exchange_partner(
    setting: ExchangeContext, use: Use, device_of: Ints, role: int, word: Words
) -> int:
    """Another role whose device may take this one's place, and the other way (TC1); or -1."""
    rules, devices = setting.rules, setting.devices
    other = next_below(word, len(device_of))
    mine = device_of[role]
    # devices near each other are the likelier to do well in each other's place
    for _ in range(next_below(word, 4)):
        another = next_below(word, len(device_of))
        near = devices.hop[mine, device_of[another]] < devices.hop[mine, device_of[other]]
        if another != role and (near or other == role):
            other = another
    its = device_of[other]
    if its == devices.vacant:
        return other if rules.stage[role] not in (0, rules.stage[other]) else -1
    fits = use.device[role] <= devices.room[rules.stage[role], its]
    fits = fits and use.device[other] <= devices.room[rules.stage[other], mine]
    return other if other != role and fits else -1


@kernel
def empty_role(rules: PathRules, use: Use, paths: Ints, role: int, word: Words) -> bool:
    """Send every path through a role to others of its stage; False if they have no room.

    Counts in ``use.device`` even then.
    """
    s = rules.stage[role]
    low, size = rules.first[s], rules.first[s + 1] - rules.first[s]
    for b in range(len(paths)):
        k = place_of(paths[b], rules.stage, s)
        if k < 0 or paths[b, k] != role:
            continue
        offset = next_below(word, size)
        for i in range(size):
            v = rules.members[low + (i + offset) % size]
            if v != role and use.device[v] < rules.room[v]:
                use.device[v] += 1
                use.device[role] -= 1
                paths[b, k] = v
                break
        if paths[b, k] == role:
            return False
    return True
