"""Lower bound on the mean step from the types of devices that stages consist of.

Devices of equal speed, memory and links are of one type. `stage_requirements` assumes the m best
devices of all for every stage of m devices; here a stage has a composition, the number of devices
of each type, and all stages together have no more of a type than there are.

A stage has W seconds for the operations of a step, D less what follows them (e in the steady state
of `stage_requirements`, whose names are used here). In the mean, a device with f FLOP/s, up- and
downloads of at least c bytes per second and room for h microbatches takes at most

- W f / (F + B + H) microbatches, and (W - b) f / B, since all B begin b after the first operation;
- (D c - v) / (a + z), as it sends and receives their messages, and its gradients if it averages;
- W h / t, with t the time of a microbatch from its F to the end of its B.

The devices of a stage together must take all n. If the cheapest split of the layers into such
stages costs more than all devices, whatever each type's price, no plan has steps of D seconds. The
bound holds for any prices; good ones come from a linear program (column generation).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.planning.joint.bisection import least_feasible_s
from planner.planning.joint.device_classes import Floats, Ints
from planner.planning.joint.stage_requirements import StageRequirements

MAX_CASES = 2_000_000
"""Compositions times parts of the layers. Similar types are merged until there are no more."""
MAX_TYPES = 64
"""With more types there is no such bound."""
MAX_PRICES = 40
"""Prices that are tried for each D."""
ROUNDING = 1e-9
"""Relative, on the safe side."""
HALVINGS = 11
"""Of the interval of D in which the bound lies: to 0.05%."""


class TypeBound(NamedTuple):
    """A lower bound in seconds on the mean step, and what proves it.

    Attributes
    ----------
    seconds
        The bound.
    prices
        A device's price, by type.
    type_of
        The type of each kind of device, in the order of `DevicePool.to_dict`.
    """

    seconds: float
    prices: list[float]
    type_of: list[int]


def type_bound(requirements: StageRequirements, known_s: float) -> TypeBound | None:
    """The bound; None if it is no higher than a known one."""
    table, count, type_of = _types(requirements)
    if len(count) < 2 or not 0 < known_s < np.inf:
        return None
    stages = _Compositions(requirements, table, count)
    if stages.suffice(known_s):
        return None
    seconds = least_feasible_s(stages.suffice, known_s, HALVINGS)
    return TypeBound(seconds, stages.proof.tolist(), type_of.tolist())


def _types(requirements: StageRequirements) -> tuple[Floats, Ints, Ints]:
    """Types of devices, as columns of FLOP/s, memory and links, and how many there are of each.

    The last array has the type of every kind of device.
    """
    pool = requirements.pool
    columns = pool.flops_per_s, pool.memory_bytes, pool.up, pool.down
    table, count = np.unique(np.stack(columns), axis=1, return_counts=True)
    type_of, most = np.arange(len(count)), MAX_CASES / len(requirements.starts)
    if len(count) > MAX_TYPES:
        return table[:, :1], count[:1], type_of
    while np.prod(count + 1.0) > most and len(count) > 1:
        # devices of the merged type are at least as good: of two types that differ least
        better = np.maximum(table[:, :, None], table[:, None, :])
        with np.errstate(divide="ignore", invalid="ignore"):
            gains = np.nan_to_num(np.log(better / table[:, :, None])).sum(axis=0)
        loss = gains * count[:, None] + (gains * count[:, None]).T
        np.fill_diagonal(loss, np.inf)
        a, b = np.unravel_index(int(np.argmin(loss)), loss.shape)
        table[:, a], count[a] = better[:, a, b], count[a] + count[b]
        table, count = np.delete(table, b, axis=1), np.delete(count, b)
        type_of[type_of == b] = a
        type_of[type_of > b] -= 1
    return table, count, type_of


class _Compositions:
    """All parts of the layers as rows, all compositions as columns.

    Parameters
    ----------
    requirements
        Of all parts.
    table, available
        The types, and how many devices there are of each.
    """

    def __init__(self, requirements: StageRequirements, table: Floats, available: Ints) -> None:
        self.needs = needs = requirements
        self.available = available.astype(np.float64)
        self.prices = np.full(len(available), 1 / self.available.sum())
        # those that excluded the longest step so far
        self.proof, self.excluded_s = self.prices, 0.0
        shape = tuple((available + 1).tolist())
        every = np.unravel_index(np.arange(1, np.prod(shape)), shape)
        self.counts = np.stack(every, axis=1).astype(np.float64)
        counts, devices = self.counts, self.counts.sum(axis=1)
        self.flops_per_s, memory, up, down = table
        self.line = np.minimum(up, down)
        size = needs.size_of(memory)
        self.room = [room[:, size] for room in needs.max_live]
        self.averages = (devices > 1) & (needs.pool.regions == 0)
        averaging_line = up if needs.has_exchange else self.line
        slowest_line = np.where(counts > 0, averaging_line, np.inf).min(axis=1)
        averaged = needs.vectors_sent(devices) * needs.vector_bytes
        round_s = needs.least_round_s(averaged, counts @ averaging_line, slowest_line)
        round_s = np.where(devices > 1, round_s + needs.rtt_s[devices.astype(int) - 1], 0.0)
        self.tail_s = np.maximum(round_s, needs.upstream_s)
        fastest = np.where(counts > 0, self.flops_per_s, 0.0).max(axis=1)
        fewest_flops = needs.forward_flops + needs.backward_flops[0] + needs.head_flops
        window_s = np.maximum(
            np.ceil(needs.microbatches / devices) * fewest_flops / fastest,
            needs.microbatches * needs.output_bytes / (counts @ down),
        )
        sent = needs.microbatches * (needs.input_bytes + needs.output_bytes) + averaged
        all_s = sent / np.minimum(counts @ up, counts @ down)
        self.least_s = np.maximum(window_s + self.tail_s, all_s)
        lacks_memory = (~needs.holding[:, size]).astype(float) @ counts.T > 0
        self.least_s[lacks_memory | (devices < needs.min_devices)] = np.inf

    def suffice(self, seconds: float) -> bool:
        """Whether no prices show that a mean step takes longer."""
        parts, rows = self._possible(seconds * (1 + ROUNDING))
        used: list[Floats] = []
        while len(used) < MAX_PRICES:
            cost, devices = self._cheapest_split(parts, rows)
            if cost > 1 + ROUNDING:
                if seconds > self.excluded_s:
                    self.proof, self.excluded_s = self.prices, seconds
                return False
            used.append(devices)
            if not self._set_prices(used):
                return True
        return True

    def _possible(self, seconds: float) -> tuple[Ints, Ints]:
        """Parts in order, and compositions that can run them within steps of this length."""
        parts, rows = np.nonzero(self.least_s <= seconds)
        window_s = seconds - self.tail_s[parts, rows]
        taken = np.zeros(len(rows))
        for choice in self.needs.recompute_choices:
            np.maximum(taken, self._taken(choice, seconds, window_s, parts, rows), out=taken)
        possible = taken >= self.needs.microbatches * (1 - ROUNDING)
        return parts[possible], rows[possible]

    def _taken(
        self, choice: int, seconds: float, window_s: Floats, parts: Ints, rows: Ints
    ) -> Floats:
        """Most microbatches of some parts on some compositions, which recompute as in a choice."""
        needs = self.needs
        forward, backward = needs.forward_flops[parts, 0], needs.backward_flops[choice][parts, 0]
        flops, away_s = forward + backward + needs.head_flops[parts, 0], needs.away_s[parts, 0]
        messages = (needs.input_bytes + needs.output_bytes)[parts, 0]
        averaged = np.where(self.averages[rows], needs.vector_bytes[parts, 0], 0.0)
        taken = np.zeros(len(rows))
        types = zip(self.flops_per_s, self.line, self.room[choice].T, self.counts.T, strict=True)
        for speed, line, room, count in types:
            held_s, has_room = flops / speed + away_s, room[parts] > 0
            with np.errstate(divide="ignore", invalid="ignore"):
                limits = (
                    np.where(flops > 0, window_s * speed / flops, np.inf),
                    np.where(
                        backward > 0,
                        (window_s - forward / speed - away_s) * speed / backward,
                        np.inf,
                    ),
                    np.where(held_s > 0, window_s * room[parts] / held_s, np.inf),
                    np.where(messages > 0, (seconds * line - averaged) / messages, np.inf),
                )
            each = np.where(has_room, np.maximum(np.min(limits, axis=0), 0.0), 0.0)
            is_used = count[rows] > 0
            taken[is_used] += (count[rows] * each)[is_used]
        return taken

    def _cheapest_split(self, parts: Ints, rows: Ints) -> tuple[float, Floats]:
        """Price of the cheapest split into stages, and its devices of each type."""
        needs, prices = self.needs, (self.counts @ self.prices)[rows]
        first = np.flatnonzero(np.diff(parts, prepend=-1))
        found, ends = parts[first], np.append(first[1:], len(parts))
        by_part = np.full((needs.layers, needs.layers + 1), np.inf)
        if len(found):
            by_part[needs.starts[found], needs.stops[found]] = np.minimum.reduceat(prices, first)
        place = np.zeros(by_part.shape, dtype=np.int64)
        place[needs.starts[found], needs.stops[found]] = np.arange(len(found))
        least, start = np.full(needs.layers + 1, np.inf), np.zeros(needs.layers + 1, dtype=int)
        least[0] = 0.0
        for stop in range(1, needs.layers + 1):
            totals = least[:stop] + by_part[:stop, stop]
            start[stop] = totals.argmin()
            least[stop] = totals[start[stop]]
        devices, stop = np.zeros(len(self.available)), needs.layers
        while stop > 0 and least[-1] < np.inf:
            k = place[start[stop], stop]
            devices += self.counts[rows[first[k] + prices[first[k] : ends[k]].argmin()]]
            stop = start[stop]
        return float(least[-1]), devices

    def _set_prices(self, used: list[Floats]) -> bool:
        """Prices at which each of these splits costs most; whether one costs more than 1."""
        from scipy.optimize import linprog  # nodes that read plans have none

        types = len(self.available)
        result = linprog(
            np.append(np.zeros(types), -1.0),
            A_ub=np.hstack([-np.array(used), np.ones((len(used), 1))]),
            b_ub=np.zeros(len(used)),
            A_eq=[np.append(self.available, 0.0)],
            b_eq=[1.0],
            bounds=[(0, None)] * types + [(None, None)],
        )
        if result.x is None or result.x[-1] <= 1 + ROUNDING:
            return False
        # rounded so that all devices cost 1
        self.prices = np.maximum(result.x[:-1], 0.0)
        self.prices /= self.prices @ self.available
        return True
