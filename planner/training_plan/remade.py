"""Parts of a plan that follow from who is where, made anew by rules that need no search.

So all devices come to the same plan by themselves when one of them moves, is lost or comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from planner.training_plan.choices import Head, Phase
from planner.training_plan.model import AveragingGroup, Operation, Schedule, TrainingPlan


def one_round(
    plan: TrainingPlan, stage: int, holders: Sequence[int], gone: Collection[int] = ()
) -> tuple[tuple[AveragingGroup, ...], ...]:
    """All of a stage at once, and who helps it; shares as they were where that can be.

    Parameters
    ----------
    plan
        As it was.
    stage
        Which.
    holders
        Who holds it now.
    gone
        Devices that are not there any more, helpers too.

    Returns
    -------
    tuple
        One round of one group.
    """
    rounds = plan.averaging[stage]
    helpers = sorted({d for groups in rounds for g in groups for d in g.helpers} - set(gone))
    members = (*holders, *helpers)
    alone = len(rounds) == 1 and len(rounds[0]) == 1 and rounds[0][0].phase is Phase.ALL
    able = np.asarray(plan.cluster.devices.can_aggregate)
    shares = [float(able[d]) for d in holders] + [0.0] * len(helpers)
    if alone:
        (group,) = rounds[0]
        known = dict(zip(group.members, group.shares, strict=True))
        mean = sum(known.values()) / len(known)
        shares = [known.get(d, mean * float(able[d])) for d in members]
        if sum(shares) <= 0:
            shares = [float(able[d]) for d in members]
    if sum(shares) <= 0:  # nobody can sum; a device that is alone need not
        shares = [1.0] * len(members)
    total = sum(shares)
    contributes = (True,) * len(holders) + (False,) * len(helpers)
    parts = tuple(share / total for share in shares)
    return ((AveragingGroup(members, parts, contributes, contributes),),)


def shared_out(each: Mapping[int, float], microbatches: int) -> list[int]:
    """Devices of microbatches, to whoever would be done with it first; all get one."""
    done, found = dict.fromkeys(each, 0.0), []
    for left in range(microbatches, 0, -1):
        idle = [d for d in each if not done[d]]
        among = idle if len(idle) >= left else list(each)
        d = min(among, key=lambda d: (done[d] + each[d], d))
        done[d] += max(each[d], 1e-12)
        found.append(d)
    return found


def ordered(
    schedule: Schedule, devices: int, room: Mapping[int, int]
) -> tuple[tuple[Operation, ...], ...]:
    """Operations one after the other, forward passes as long as there is room: nobody waits."""
    chains = [schedule.chain(b) for b in range(len(schedule.paths))]
    place = [0] * len(chains)
    held = [0] * devices
    found: list[list[Operation]] = [[] for _ in range(devices)]
    last = Head.LAST is schedule.head
    while True:
        ready: list[dict[str, list[int]]] = [{"F": [], "H": [], "B": []} for _ in range(devices)]
        for b, chain in enumerate(chains):
            if place[b] < len(chain):
                kind, d = chain[place[b]]
                ready[d][kind].append(b)
        some = False
        for d, waiting in enumerate(ready):
            if waiting["F"] and held[d] < room[d]:
                kind = "F"
            elif waiting["H"]:
                kind = "H"
            elif waiting["B"]:
                kind = "B"
            else:
                continue
            some = True
            b = waiting[kind][0]
            held[d] += {"F": 1, "H": 0, "B": -1}[kind]
            found[d].append((kind, b))
            place[b] += 1
            if last and kind == "F" and chains[b][place[b]] == ("H", d):
                # the last stage holds none for longer than it must
                found[d] += [("H", b), ("B", b)]
                place[b] += 2
                held[d] -= 1
        if not some:
            return tuple(map(tuple, found))
