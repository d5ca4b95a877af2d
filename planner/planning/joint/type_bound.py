"""Lower bound on the mean step from the types of devices that stages consist of.

Devices of equal speed, memory and links are of one type. `stage_requirements` assumes the m best
devices of all for every stage of m devices; here a stage has a composition, the number of devices
of each type, and all stages together have no more of a type than there are.

A step's operations of a stage lie within those of each stage before it, but for a microbatch's
passes there, and its messages within the operations of the stage before it. Where r is the round of
a stage (names are those of `stage_requirements`) and p are all passes of one microbatch, with their
messages, from that stage to a later one, a stage thus has

    W = D - e    seconds for its operations, with e the largest r + p of stages up to this one
    V = D - e'   seconds for its messages, with e' the largest r + p of the stages before, less the
                 time in which the first bytes arrive or the last ones leave

In the mean, a device with f FLOP/s, an upload of u and a download of d bytes per second, c the
smaller one, and room for h microbatches takes at most

- W f / (F + B + H) microbatches, and (W - b) f / B, since all B begin b after the first operation;
- W h / t, with t the time of a microbatch from its F to the end of its B;
- (V - F / f) u / (a + z), as it sends after the first F, and (V - B / f) d / (a + z), as it
  receives before the last B;
- W c / z, as z is sent after F and what returns arrives before B;
- (D c - v) / (a + z), if it averages.

The devices of a stage together must take all n. If the cheapest split of the layers into such
stages costs more than all devices, whatever each type's price, no plan has steps of D seconds. The
split is a shortest path over layers and e, which is rounded down. The bound holds for any prices;
good ones come from a linear program (column generation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.planning.joint.cheapest_split import fill_cheapest
from planner.planning.joint.device_classes import Floats, Ints
from planner.planning.joint.stage_requirements import StageRequirements

MAX_CASES = 2_000_000
"""Compositions times parts of the layers. Similar types are merged until there are no more."""
MAX_TYPES = 64
"""With more types there is no such bound."""
MAX_PRICES = 40
"""Prices that are tried for each D."""
MAX_LEVELS, MAX_TABLE = 500, 10_000_000
"""Of e; and levels times parts of the layers and compositions that can be stages."""
ROUNDING = 1e-9
"""Relative, on the safe side."""
PRECISION = 5e-4
"""Relative, of D."""
HOPELESS = 1e9
"""If no D up to so many times the known bound suffices, none does."""
VERY_MANY = 1e30
"""Microbatches per second, or in all, where nothing limits them."""
Bools = NDArray[np.bool_]


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


def type_bound(
    requirements: StageRequirements, known_s: float, is_over: Callable[[], bool] = lambda: False
) -> TypeBound | None:
    """The bound, as high as is known once ``is_over``; None if no higher than a known one."""
    table, count, type_of = _types(requirements)
    cases = np.prod(count + 1.0) * len(requirements.starts)
    if len(count) > MAX_TYPES or cases > MAX_CASES or not 0 < known_s < np.inf or is_over():
        return None
    stages = _Compositions(requirements, table, count, is_over)
    if stages.suffice(known_s):
        return None
    seconds = _longest_excluded_s(stages.suffice, known_s, is_over)
    return TypeBound(seconds, stages.proof.tolist(), type_of.tolist())


def _longest_excluded_s(
    suffice: Callable[[float], bool], excluded_s: float, is_over: Callable[[], bool]
) -> float:
    """The longest step that does not suffice, given one that is little shorter as a rule."""
    low = high = excluded_s
    growth = 16 * PRECISION
    while not is_over() and not suffice(high := low * (1 + growth)):
        if high > HOPELESS * excluded_s:
            return np.inf
        low, growth = high, 2 * growth
    while not is_over() and high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (low, middle) if suffice(middle) else (middle, high)
    return low


def _types(requirements: StageRequirements) -> tuple[Floats, Ints, Ints]:
    """Types of devices, as columns of FLOP/s, memory and links, and how many there are of each.

    The last array has the type of every kind of device.
    """
    pool = requirements.pool
    columns = pool.flops_per_s, pool.memory_bytes, pool.up, pool.down
    table, count = np.unique(np.stack(columns), axis=1, return_counts=True)
    type_of, most = np.arange(len(count)), MAX_CASES / len(requirements.starts)
    if len(count) > MAX_TYPES:
        return table, count, type_of
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


class _Stages(NamedTuple):
    """Compositions that can be stages in steps of D seconds, in order of ``stop``.

    Attributes
    ----------
    rows
        Composition.
    start, stop
        Layers.
    own
        The level of e that its round takes.
    most
        The highest level before the stage with which it can be one.
    levels
        Number of levels.
    boundary_levels
        By boundary, how much its messages add to the level.
    """

    rows: Ints
    start: Ints
    stop: Ints
    own: Ints
    most: Ints
    levels: int
    boundary_levels: Ints


class _Rates(NamedTuple):
    """What limits the microbatches of a device, by part, for a type and a choice of recomputation.

    Attributes
    ----------
    per_s
        Microbatches per second of W.
    backward_per_s, first_backward_s
        Microbatches per second of W after b, and b.
    """

    per_s: Floats
    backward_per_s: Floats
    first_backward_s: Floats


class _Compositions:
    """All parts of the layers as rows, all compositions as columns.

    Parameters
    ----------
    requirements
        Of all parts.
    table, available
        The types, and how many devices there are of each.
    is_over
        Whether to prove nothing more.
    """

    def __init__(
        self,
        requirements: StageRequirements,
        table: Floats,
        available: Ints,
        is_over: Callable[[], bool],
    ) -> None:
        self.is_over = is_over
        self.needs = needs = requirements
        self.available = available.astype(np.float64)
        self.prices = np.full(len(available), 1 / self.available.sum())
        # those that excluded the longest step so far
        self.proof, self.excluded_s = self.prices, 0.0
        shape = tuple((available + 1).tolist())
        every = np.unravel_index(np.arange(1, np.prod(shape)), shape)
        self.counts = np.stack(every, axis=1).astype(np.float64)
        counts, devices = self.counts, self.counts.sum(axis=1)
        self.table = table
        flops_per_s, memory, up, down = table
        size = needs.size_of(memory)
        self.rates = [
            [
                self._rates(choice, speed, needs.max_live[choice][:, k])
                for speed, k in zip(flops_per_s, size, strict=True)
            ]
            for choice in needs.recompute_choices
        ]
        self.passes_s = (needs.upstream_s - 2 * needs.hop_in_s)[:, 0]
        self.averages = (devices > 1) & (needs.pool.regions == 0)
        averaging_line = up if needs.has_exchange else np.minimum(up, down)
        slowest_line = np.where(counts > 0, averaging_line, np.inf).min(axis=1)
        averaged = needs.vectors_sent(devices) * needs.vector_bytes
        round_s = needs.least_round_s(averaged, counts @ averaging_line, slowest_line)
        self.round_s = np.where(devices > 1, round_s + needs.rtt_s[devices.astype(int) - 1], 0.0)
        fewest_flops = needs.forward_flops + needs.backward_flops[0] + needs.head_flops
        fastest = np.where(counts > 0, flops_per_s, 0.0).max(axis=1)
        self.window_s = np.maximum(
            np.ceil(needs.microbatches / devices) * fewest_flops / fastest,
            needs.microbatches * needs.output_bytes / (counts @ down),
        )
        sent = needs.microbatches * (needs.input_bytes + needs.output_bytes) + averaged
        all_s = sent / np.minimum(counts @ up, counts @ down)
        tail_s = np.maximum(self.round_s, needs.upstream_s)
        self.least_s = np.maximum(self.window_s + tail_s, all_s)
        lacks_memory = (~needs.holding[:, size]).astype(float) @ counts.T > 0
        self.least_s[lacks_memory | (devices < needs.min_devices)] = np.inf

    def suffice(self, seconds: float) -> bool:
        """Whether no prices show that a mean step takes longer; True once it is over."""
        stages = self._possible(seconds * (1 + ROUNDING))
        used: list[Floats] = []
        while len(used) < MAX_PRICES and not self.is_over():
            cost, devices = self._cheapest_split(stages)
            if cost > 1 + ROUNDING:
                if seconds > self.excluded_s:
                    self.proof, self.excluded_s = self.prices, seconds
                return False
            used.append(devices)
            if not self._set_prices(used):
                return True
        return True

    def _possible(self, seconds: float) -> _Stages:
        """The compositions that can be stages within steps of this length."""
        parts, rows = np.nonzero(self.least_s <= seconds)
        possible = self._take_all(seconds, self.needs.upstream_s[parts, 0], parts, rows)
        parts, rows = parts[possible], rows[possible]
        # e less the passes before, in levels from 0
        own_s = np.maximum(self.round_s[parts, rows] - self.passes_s[parts], 0.0)
        levels = int(np.clip(MAX_TABLE // max(len(parts), 1), 2, MAX_LEVELS))
        boundary_s = np.zeros(self.needs.layers + 1)
        boundary_s[self.needs.stops] = 2 * self.needs.hop_out_s[:, 0]
        inner = boundary_s[1:-1]
        longest_s = own_s.max(initial=0.0) + inner.sum()
        level_s = max(min(longest_s, seconds) / levels, ROUNDING)
        least_s = inner.min(initial=np.inf)
        if level_s <= least_s < np.inf:
            # whole levels for a boundary lose nothing
            level_s = least_s / np.floor(least_s / level_s)
        own = np.minimum(own_s / level_s, levels - 1).astype(int)
        boundary_levels = (boundary_s / level_s * (1 + ROUNDING)).astype(int)
        most, beyond = np.zeros(len(parts), dtype=int), np.full(len(parts), levels)
        # bisection, but first the highest level, with which many can; in the first stage e is 0
        tried = beyond - 1
        while len(open_ := np.flatnonzero((beyond - most > 1) & (self.needs.starts[parts] > 0))):
            level, some = tried[open_], parts[open_]
            before_s = self.passes_s[some] + level * level_s
            before_s = np.maximum(before_s, self.needs.upstream_s[some, 0])
            can = self._take_all(seconds, before_s, some, rows[open_])
            most[open_[can]], beyond[open_[~can]] = level[can], level[~can]
            tried = (most + beyond) // 2
        layers = self.needs.starts[parts], self.needs.stops[parts]
        return _Stages(rows, *layers, own, most, levels, boundary_levels)

    def _take_all(self, seconds: float, before_s: Floats, parts: Ints, rows: Ints) -> Bools:
        """Whether compositions can be stages, with the larger e of ``before_s`` and their round."""
        needs = self.needs
        window_s = seconds - np.maximum(before_s, self.round_s[parts, rows])
        forward, backward = needs.forward_flops[parts, 0], needs.backward_flops[0][parts, 0]
        arriving_s = needs.hop_in_s[parts, 0] - needs.input_latency_s[parts, 0]
        messages_s = seconds - before_s + arriving_s
        output = needs.output_bytes[parts, 0]
        messages = output + needs.input_bytes[parts, 0]
        averaged = np.where(self.averages[rows], needs.vector_bytes[parts, 0], 0.0)
        exchanged = []
        for speed, _, up, down in self.table.T:
            most_bytes = np.minimum.reduce(
                [
                    up * (messages_s - forward / speed),
                    down * (messages_s - backward / speed),
                    seconds * min(up, down) - averaged,
                ]
            )
            most_outputs = _divide(window_s * min(up, down), output)
            exchanged.append(np.minimum(_divide(most_bytes, messages), most_outputs))
        can = np.zeros(len(rows), dtype=bool)
        for types in self.rates:
            taken = np.zeros(len(rows))
            for count, most, rates in zip(self.counts.T, exchanged, types, strict=True):
                late_s = window_s - rates.first_backward_s[parts]
                each = np.minimum(
                    window_s * rates.per_s[parts], late_s * rates.backward_per_s[parts]
                )
                taken += count[rows] * np.clip(np.minimum(each, most), 0.0, needs.microbatches)
            can |= taken >= needs.microbatches * (1 - ROUNDING)
        return np.asarray(can & (self.window_s[parts, rows] <= window_s))

    def _rates(self, choice: int, speed: float, room: Floats) -> _Rates:
        """Of devices with room for so many microbatches of each part."""
        needs = self.needs
        forward, backward = needs.forward_flops[:, 0], needs.backward_flops[choice][:, 0]
        flops, away_s = forward + backward + needs.head_flops[:, 0], needs.away_s[:, 0]
        per_s = np.minimum(_divide(speed, flops), _divide(room, flops / speed + away_s))
        first_backward_s = np.where(backward > 0, forward / speed + away_s, 0.0)
        return _Rates(np.where(room > 0, per_s, 0.0), _divide(speed, backward), first_backward_s)

    def _cheapest_split(self, stages: _Stages) -> tuple[float, Floats]:
        """Price of the cheapest split into stages, and its devices of each type."""
        prices = (self.counts @ self.prices)[stages.rows]
        shape = self.needs.layers + 1, stages.levels
        least, last, before = np.full(shape, np.inf), *np.zeros((2, *shape), dtype=np.int64)
        least[0] = 0.0
        fill_cheapest(*stages[1:5], prices, stages.boundary_levels, least, last, before)
        boundary, level, cost = self.needs.layers, stages.levels - 1, float(least[-1, -1])
        devices = np.zeros(len(self.available))
        while boundary > 0 and cost < np.inf:
            k = last[boundary, level]
            devices += self.counts[stages.rows[k]]
            boundary, level = stages.start[k], before[boundary, level]
        return cost, devices

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


def _divide(numerator: Floats | float, denominator: Floats) -> Floats:
    """Their ratio, or a very large number without a denominator."""
    ratio = np.full(denominator.shape, VERY_MANY)
    return np.asarray(np.divide(numerator, denominator, out=ratio, where=denominator > 0))
