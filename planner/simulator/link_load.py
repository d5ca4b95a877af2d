"""Load of each link: seconds that a step's bytes take at its full capacity."""

from __future__ import annotations

import numpy as np

from planner.simulator.program import Program
from planner.simulator.resources import NONE, Floats, Ints, LinkResources
from planner.simulator.timeline import LinkLoad

MAX_PAIRS = 1000
"""Pairs that are reported; groups of hundreds of devices have hundreds of thousands."""


def link_loads(
    program: Program, links: LinkResources, schedule: int, averaged: tuple[Ints, Ints, Floats]
) -> tuple[LinkLoad, ...]:
    """Seconds that a step's bytes take on each pair and each shared up- and downlink.

    In steady state no step is shorter than the load of its fullest link.

    Returns
    -------
    tuple[LinkLoad, ...]
        Of all up- and downlinks and at most `MAX_PAIRS` pairs with traffic, the fullest first.
    """
    operations, pairs, rounds = program.operations, program.pairs, program.rounds
    n = len(links)
    operations_of = operations.order[
        operations.order_ptr[schedule * n] : operations.order_ptr[(schedule + 1) * n]
    ]
    sent = operations_of[operations.pair[operations_of] != NONE]
    by_pair = np.bincount(
        operations.pair[sent], operations.message_bytes[sent], minlength=len(pairs.source)
    )
    by_resource = np.zeros(len(pairs.capacity))
    for place in range(pairs.shared.shape[1]):
        column = pairs.shared[:, place]
        used = column != NONE
        np.add.at(by_resource, column[used], by_pair[used])
    averaging = np.zeros(len(pairs.capacity))
    np.add.at(averaging, rounds.resource, rounds.resource_bytes)
    sources, destinations, sizes = averaged
    key = np.concatenate([pairs.source * n + pairs.destination, sources * n + destinations])
    ends, index = np.unique(key, return_inverse=True)
    i, j = np.divmod(ends, n)
    rate = links.bandwidth_bytes_per_s[i, j]
    count = len(by_pair)
    messages_s, averages_s = (
        np.bincount(where, size, minlength=len(ends)) / rate
        for where, size in ((index[:count], by_pair), (index[count:], sizes))
    )
    busy_s = messages_s + averages_s
    fullest = np.argsort(-busy_s, kind="stable")[:MAX_PAIRS]
    loads = [
        LinkLoad(f"{links.ids[a]} to {links.ids[b]}", piped_s, averaging_s, (a, b))
        for a, b, piped_s, averaging_s in zip(
            *(column[fullest].tolist() for column in (i, j, messages_s, averages_s)), strict=True
        )
        if piped_s + averaging_s > 0
    ]
    # resources: devices' uplinks and downlinks, then those of sites
    devices = [(d,) for d in range(n)] * 2
    sites: list[tuple[int, ...]] = [()] * (2 * links.sites)
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
