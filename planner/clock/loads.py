"""How full each link is: what a step sends over it, in seconds of its capacity."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.clock.links import NONE, Links
from planner.clock.program import Program
from planner.clock.timeline import LinkLoad


def link_loads(
    program: Program, links: Links, schedule: int, averaged: Mapping[tuple[int, int], float]
) -> tuple[LinkLoad, ...]:
    """Seconds for which a step's bytes fill each pair and each shared up- and downlink.

    No step that follows others at a steady rate is shorter than its fullest link.

    Parameters
    ----------
    program
        A plan.
    links
        Where it runs.
    schedule
        Which of its schedules.
    averaged
        Bytes of averaging by sender and receiver.

    Returns
    -------
    tuple[LinkLoad, ...]
        Of all that carry something, the fullest first.
    """
    work, pairs, rounds = program.work, program.pairs, program.rounds
    n = len(links)
    mine = work.order[work.first[schedule * n] : work.first[(schedule + 1) * n]]
    sent = mine[work.pair[mine] != NONE]
    by_pair = np.bincount(work.pair[sent], work.size[sent], minlength=len(pairs.source))
    by_resource = np.zeros(len(pairs.capacity))
    for place in range(pairs.shared.shape[1]):
        column = pairs.shared[:, place]
        used = column != NONE
        np.add.at(by_resource, column[used], by_pair[used])
    averaging = np.zeros(len(pairs.capacity))
    np.add.at(averaging, rounds.resource, rounds.need)
    used_pairs = zip(pairs.source.tolist(), pairs.destination.tolist(), strict=True)
    piped = {pair: size for pair, size in zip(used_pairs, by_pair.tolist(), strict=True) if size}
    loads = []
    for i, j in {**piped, **averaged}:
        rate = float(links.bandwidth_bytes_per_s[i, j])
        messages, averages = (carried.get((i, j), 0.0) / rate for carried in (piped, averaged))
        name = f"{links.ids[i]} to {links.ids[j]}"
        loads.append(LinkLoad(name, messages, averages, (i, j)))
    # lines of devices, up and down, then those of sites
    devices = [(d,) for d in range(n)] * 2
    sites: list[tuple[int, ...]] = [()] * (len(links.names) - 2 * n)
    loads += [
        LinkLoad(name, messages / capacity, averages / capacity, ends)
        for name, messages, averages, capacity, ends in zip(
            links.names,
            by_resource.tolist(),
            averaging.tolist(),
            pairs.capacity.tolist(),
            [*devices, *sites],
            strict=True,
        )
        if messages + averages > 0 and np.isfinite(capacity)
    ]
    return tuple(sorted(loads, key=lambda load: (-load.busy_s, load.name)))
