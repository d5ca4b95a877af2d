"""Which device sits in which role, when the arrangement is searched together with the paths.

A role is a place in a stage; paths and orders are those of roles. Exchanging the devices of two
roles leaves CC1, CC2 and CC3 as they are and changes every time. A role may be vacant: a device
that goes there moves to another stage, once its paths have been sent to others of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.mapf.dispatch import Numbers
from planner.mapf.moves import Rules, Use, Word, place_of
from planner.mapf.tables import Floats, Ints, Tables
from planner.search.rng import next_below


class Seats(NamedTuple):
    """What a device would bring to each stage.

    Attributes
    ----------
    hop
        Transfers between devices.
    forward, backward, head, memory, room
        As in `Tables`, one row per stage, one column per device.
    vacant
        The device that stands for none.
    """

    hop: Floats
    forward: Floats
    backward: Floats
    head: Floats
    memory: Ints
    room: Ints
    vacant: int

    @classmethod
    def fixed(cls, tables: Tables) -> Seats:
        """Of a given arrangement, in which nobody moves: each device as in its own stage."""
        rows = (len(tables.fewest), 1)
        return cls(
            tables.hop.copy(),
            np.tile(tables.forward, rows),
            np.tile(tables.backward, rows),
            np.tile(tables.head, rows),
            np.tile(tables.memory, rows),
            np.tile(tables.room, rows),
            -1,
        )


@njit(cache=True, nogil=True)
def sit(seats: Seats, num: Numbers, rules: Rules, seat: Ints, role: int, device: int) -> None:
    """Write the numbers of a device into those of its role."""
    s = rules.stage[role]
    seat[role] = device
    num.forward[role] = seats.forward[s, device]
    num.backward[role] = seats.backward[s, device]
    num.head[role] = seats.head[s, device]
    num.memory[role] = seats.memory[s, device]
    rules.room[role] = seats.room[s, device]
    for other in range(len(seat)):
        num.hop[role, other] = seats.hop[device, seat[other]]
        num.hop[other, role] = seats.hop[seat[other], device]


@njit(cache=True, nogil=True)
def exchange(seats: Seats, num: Numbers, rules: Rules, seat: Ints, one: int, other: int) -> None:
    """Exchange the devices of two roles."""
    device = seat[one]
    seat[one] = seat[other]
    seat[other] = device
    sit(seats, num, rules, seat, one, seat[one])
    sit(seats, num, rules, seat, other, device)


@njit(cache=True, nogil=True)
def partner(seats: Seats, rules: Rules, use: Use, seat: Ints, role: int, word: Word) -> int:
    """Another role whose device may take this one's place, and the other way (TC1); or -1."""
    other = next_below(word, len(seat))
    mine = seat[role]
    # devices near each other are the likelier to do well in each other's place
    for _ in range(next_below(word, 4)):
        another = next_below(word, len(seat))
        near = seats.hop[mine, seat[another]] < seats.hop[mine, seat[other]]
        if another != role and (near or other == role):
            other = another
    its = seat[other]
    if its == seats.vacant:
        return other if rules.stage[role] not in (0, rules.stage[other]) else -1
    fits = use.device[role] <= seats.room[rules.stage[role], its]
    fits = fits and use.device[other] <= seats.room[rules.stage[other], mine]
    return other if other != role and fits else -1


@njit(cache=True, nogil=True)
def vacate(rules: Rules, use: Use, paths: Ints, role: int, word: Word) -> bool:
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
