"""How full each link is: what a step sends over it, in seconds of its capacity."""

from __future__ import annotations

import numpy as np

from planner.clock.links import NONE, Links
from planner.clock.program import Program
from planner.clock.timeline import LinkLoad


def link_loads(program: Program, links: Links, schedule: int) -> tuple[LinkLoad, ...]:
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

    Returns
    -------
    tuple[LinkLoad, ...]
        Of all that carry something, the fullest first. Averaging over pairs that carry no
        pipeline messages is counted on their devices' links.
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
    loads = [
        LinkLoad(f"{links.ids[i]} to {links.ids[j]}", size / rate, 0.0)
        for i, j, size, rate in zip(
            pairs.source.tolist(),
            pairs.destination.tolist(),
            by_pair.tolist(),
            pairs.bandwidth.tolist(),
            strict=True,
        )
        if size > 0
    ]
    loads += [
        LinkLoad(links.names[r], by_resource[r] / capacity, averaging[r] / capacity)
        for r, capacity in enumerate(pairs.capacity.tolist())
        if by_resource[r] + averaging[r] > 0 and np.isfinite(capacity)
    ]
    return tuple(sorted(loads, key=lambda load: (-load.pipeline_s - load.averaging_s, load.name)))
