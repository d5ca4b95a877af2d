"""Compiled moves between layouts, and simulated annealing with them."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

from planner.planning.joint.layout_arrays import (
    ClassArrays,
    LayoutScratch,
    LayoutState,
    ModelArrays,
    classes_in,
)
from planner.planning.joint.layout_estimate import estimate
from planner.search.arrays import Floats, Ints2, Words
from planner.search.compiled import entry, kernel
from planner.search.rng import next_below, next_unit


class LayoutMoveShares(NamedTuple):
    """Probability of each move; the remainder up to 1 merges two stages.

    Attributes
    ----------
    devices
        Devices to another stage, in or out.
    swap
        Exchange of devices between stages.
    layers
        Layers to another stage.
    reorder
        Order of stages.
    split
        Split of a stage.
    add
        New stage for a class.
    chain
        Unused devices of a class as new stages.
    drop
        A stage less, whose devices are then unused.
    """

    devices: float = 0.29
    swap: float = 0.195
    layers: float = 0.155
    reorder: float = 0.115
    split: float = 0.07
    add: float = 0.04
    chain: float = 0.05
    drop: float = 0.02


# rounded, so that sums are the same numbers whatever the order
(
    UP_TO_DEVICES,
    UP_TO_SWAP,
    UP_TO_LAYERS,
    UP_TO_REORDER,
    UP_TO_SPLIT,
    UP_TO_ADD,
    UP_TO_CHAIN,
    UP_TO_DROP,
) = (round(edge, 9) for edge in accumulate(LayoutMoveShares()))
"""Cumulative probabilities of `LayoutMoveShares`."""
P_ALL_DEVICES = 0.4
"""Probability that a move takes all devices of the class."""
P_DISTANT = 0.4
"""Probability that a layer moves to any stage, not to a neighbouring one."""
P_REVERSE = 0.4
"""Probability that a run of stages is reversed, not one of them moved."""
P_HALVE = 0.2
"""Probability that a split halves each class, instead of separating near classes from far ones."""
DISTANCE_NOISE = 0.2
"""Largest relative random increase of distances in a split: classes at equal distance get a random
order."""
P_EVERYWHERE = 0.05
"""Probability that a swap exchanges two classes in all stages."""
P_WITH_LAYERS = 0.5
"""Probability that devices or stages that move take layers along."""
P_OTHER_HEAD = 0.02
"""Probability that a move puts the head on the other end of the pipeline, if that is free."""


@kernel
def _copy_row(counts: Ints2, source: int, target: int) -> None:
    for c in range(counts.shape[1]):
        counts[target, c] = counts[source, c]


@kernel
def _stage_devices(state: LayoutState, j: int) -> int:
    total = 0
    for c in range(state.counts.shape[1]):
        total += state.counts[j, c]
    return total


@kernel
def _stage_flops_per_s(classes: ClassArrays, state: LayoutState, j: int) -> float:
    """FLOP/s of a stage's devices."""
    total = 0.0
    for c in range(state.counts.shape[1]):
        total += state.counts[j, c] * classes.flops_per_s[c]
    return total


@kernel
def _shift_cuts(state: LayoutState, source: int, target: int, layers: int) -> bool:
    """Move layers from one stage to another; returns whether every stage keeps one."""
    for k in range(source + 1, target + 1):
        state.cuts[k] -= layers
    for k in range(target + 1, source + 1):
        state.cuts[k] += layers
    valid = True
    for k in range(min(source, target), max(source, target) + 1):
        valid = valid and state.cuts[k + 1] > state.cuts[k]
    return valid


@kernel
def _has_layers(state: LayoutState) -> bool:
    """Whether every stage has a layer."""
    valid = True
    for k in range(state.stages[0]):
        valid = valid and state.cuts[k + 1] > state.cuts[k]
    return bool(valid)


@kernel
def _move_devices(
    model: ModelArrays, classes: ClassArrays, state: LayoutState, rng_state: Words
) -> bool:
    """Move some or all devices of a class to another stage, in or out.

    Half of the moves between stages take a proportional number of layers along. ``state`` is
    undefined after False: the cuts may have moved already.
    """
    stages = state.stages[0]
    c = next_below(rng_state, len(classes.size))
    source, target = next_below(rng_state, stages + 1) - 1, next_below(rng_state, stages + 1) - 1
    if source == target:
        return False
    available = state.counts[source, c] if source >= 0 else _unused(classes, state, c)
    if available <= 0:
        return False
    moved = (
        available if next_unit(rng_state) < P_ALL_DEVICES else next_below(rng_state, available) + 1
    )
    if source >= 0 and target >= 0 and model.layers_free and next_unit(rng_state) < P_WITH_LAYERS:
        share = moved * classes.flops_per_s[c] / _stage_flops_per_s(classes, state, source)
        layers = int(share * (state.cuts[source + 1] - state.cuts[source]) + next_unit(rng_state))
        if layers > 0 and not _shift_cuts(state, source, target, layers):
            return False
    if source >= 0:
        state.counts[source, c] -= moved
    if target >= 0:
        state.counts[target, c] += moved
    return True


@kernel
def _unused(classes: ClassArrays, state: LayoutState, c: int) -> int:
    """Devices of a class that are in no stage."""
    unused = classes.size[c]
    for j in range(state.stages[0]):
        unused -= state.counts[j, c]
    return int(unused)


@kernel
def _exchange_classes(classes: ClassArrays, state: LayoutState, a: int, b: int) -> bool:
    """Let two classes take each other's places in all stages, such as two machines."""
    used_a = classes.size[a] - _unused(classes, state, a)
    used_b = classes.size[b] - _unused(classes, state, b)
    if used_a + used_b == 0 or used_a > classes.size[b] or used_b > classes.size[a]:
        return False
    for j in range(state.stages[0]):
        count = state.counts[j, a]
        state.counts[j, a] = state.counts[j, b]
        state.counts[j, b] = count
    return True


@kernel
def _swap_devices(classes: ClassArrays, state: LayoutState, rng_state: Words) -> bool:
    """Exchange devices of two classes between two stages, with unused ones, or everywhere."""
    stages, num_classes = state.stages[0], state.counts.shape[1]
    a, b = next_below(rng_state, num_classes), next_below(rng_state, num_classes)
    if a == b:
        return False
    if next_unit(rng_state) < P_EVERYWHERE:
        return bool(_exchange_classes(classes, state, a, b))
    i, j = next_below(rng_state, stages), next_below(rng_state, stages + 1)
    if j == stages:
        max_devices = min(state.counts[i, a], _unused(classes, state, b))
        if max_devices <= 0:
            return False
        k = 1 if next_unit(rng_state) < 0.5 else max_devices
        state.counts[i, a] -= k
        state.counts[i, b] += k
        return True
    max_devices = min(state.counts[i, a], state.counts[j, b])
    if i == j or max_devices == 0:
        return False
    k = 1 if next_unit(rng_state) < 0.5 else max_devices
    state.counts[i, a] -= k
    state.counts[j, a] += k
    state.counts[j, b] -= k
    state.counts[i, b] += k
    return True


@kernel
def _shift_layer(state: LayoutState, rng_state: Words) -> bool:
    """Move one layer to a neighbouring stage or, through those between, to a distant one."""
    stages = state.stages[0]
    if stages < 2:
        return False
    i = next_below(rng_state, stages)
    j = (
        next_below(rng_state, stages)
        if next_unit(rng_state) < P_DISTANT
        else i + 2 * next_below(rng_state, 2) - 1
    )
    return 0 <= j < stages and i != j and bool(_shift_cuts(state, i, j, 1))


@kernel
def _swap_stages(state: LayoutState, i: int, j: int, with_layers: bool) -> None:
    """Exchange the devices of two neighbouring stages, optionally with their numbers of layers."""
    for c in range(state.counts.shape[1]):
        count = state.counts[i, c]
        state.counts[i, c] = state.counts[j, c]
        state.counts[j, c] = count
    if with_layers:
        state.cuts[j] = state.cuts[i] + state.cuts[j + 1] - state.cuts[j]


@kernel
def _reorder_stages(model: ModelArrays, state: LayoutState, rng_state: Words) -> bool:
    """Move a stage in the order, or reverse a run of stages; half of the time with their layers."""
    stages = state.stages[0]
    i, j = next_below(rng_state, stages), next_below(rng_state, stages)
    if i == j:
        return False
    with_layers = model.layers_free and next_unit(rng_state) < P_WITH_LAYERS
    low, high = min(i, j), max(i, j)
    if next_unit(rng_state) < P_REVERSE:
        for end in range(high, low, -1):
            for k in range(low, end):
                _swap_stages(state, k, k + 1, with_layers)
    elif i < j:
        for k in range(i, j):
            _swap_stages(state, k, k + 1, with_layers)
    else:
        for k in range(i - 1, j - 1, -1):
            _swap_stages(state, k, k + 1, with_layers)
    return True


@kernel
def _split_stage(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    rng_state: Words,
) -> bool:
    """Split a stage in two, layers in proportion: by halving each class, or by distance to one."""
    stages = state.stages[0]
    j = next_below(rng_state, stages)
    a, b = state.cuts[j], state.cuts[j + 1]
    if stages == len(state.counts) or b - a < 2 or _stage_devices(state, j) == 0:
        return False
    for k in range(stages, j, -1):
        _copy_row(state.counts, k - 1, k)
        state.cuts[k + 1] = state.cuts[k]
    state.stages[0] += 1
    first_half, second_half = state.counts[j], state.counts[j + 1]
    used = scratch.used[: classes_in(first_half, scratch.used)]
    if len(used) == 1 or next_unit(rng_state) < P_HALVE:
        for c in used:
            first_half[c] //= 2
            second_half[c] -= first_half[c]
    else:
        first = used[next_below(rng_state, len(used))]
        round_trip_bytes, distance_s = 2 * model.output_bytes[a], scratch.distance_s[: len(used)]
        for k, c in enumerate(used):
            round_trip_s = (
                classes.rtt_s[first, c] + round_trip_bytes / classes.pair_bandwidth[first, c]
            )
            distance_s[k] = (
                -1.0 if c == first else round_trip_s * (1.0 + DISTANCE_NOISE * next_unit(rng_state))
            )
        num_near = next_below(rng_state, len(used) - 1) + 1
        near_first = next_unit(rng_state) < 0.5
        for k in range(1, len(used)):
            distance, moved_class, position = distance_s[k], used[k], k - 1
            while position >= 0 and distance_s[position] > distance:
                distance_s[position + 1], used[position + 1] = distance_s[position], used[position]
                position -= 1
            distance_s[position + 1], used[position + 1] = distance, moved_class
        for k, c in enumerate(used):
            if (k < num_near) == near_first:
                second_half[c] = 0
            else:
                first_half[c] = 0
    first_flops_per_s, second_flops_per_s = (
        _stage_flops_per_s(classes, state, j),
        _stage_flops_per_s(classes, state, j + 1),
    )
    if first_flops_per_s == 0.0 or second_flops_per_s == 0.0:
        return False
    cut = int(
        (b - a) * first_flops_per_s / (first_flops_per_s + second_flops_per_s)
        + next_unit(rng_state)
    )
    state.cuts[j + 1] = a + min(max(cut, 1), b - a - 1)
    return True


@kernel
def _merge_stages(state: LayoutState, rng_state: Words) -> bool:
    """Merge two neighbouring stages."""
    stages = state.stages[0]
    if stages < 2:
        return False
    j = next_below(rng_state, stages - 1)
    for c in range(state.counts.shape[1]):
        state.counts[j, c] += state.counts[j + 1, c]
    for k in range(j + 1, stages - 1):
        _copy_row(state.counts, k + 1, k)
    for k in range(j + 1, stages):
        state.cuts[k] = state.cuts[k + 1]
    for c in range(state.counts.shape[1]):
        state.counts[stages - 1, c] = 0
    state.stages[0] -= 1
    return True


@kernel
def _add_stage(
    model: ModelArrays, classes: ClassArrays, state: LayoutState, rng_state: Words
) -> bool:
    """Make a stage of all devices of a class, anywhere in the order.

    It takes a proportional number of layers from the stage that had most of these devices.
    """
    stages = state.stages[0]
    c, j = next_below(rng_state, len(classes.size)), next_below(rng_state, stages + 1)
    if stages == len(state.counts):
        return False
    donor, total = -1, classes.size[c] * classes.flops_per_s[c]
    for k in range(stages):
        total += _stage_flops_per_s(classes, state, k) - state.counts[k, c] * classes.flops_per_s[c]
        if state.counts[k, c] > 0 and (donor < 0 or state.counts[k, c] > state.counts[donor, c]):
            donor = k
    if donor < 0:
        donor = next_below(rng_state, stages)
    share = classes.size[c] * classes.flops_per_s[c] / total
    layers = max(1, int(len(model.output_bytes) * share + next_unit(rng_state)))
    layers = min(layers, state.cuts[donor + 1] - state.cuts[donor] - 1)
    if layers < 1:
        return False
    for k in range(stages):
        state.counts[k, c] = 0
    for k in range(stages, j, -1):
        _copy_row(state.counts, k - 1, k)
        state.cuts[k + 1] = state.cuts[k]
    state.cuts[j + 1] = state.cuts[j]
    for other in range(state.counts.shape[1]):
        state.counts[j, other] = 0
    state.counts[j, c] = classes.size[c]
    state.stages[0] += 1
    return bool(_shift_cuts(state, donor + (donor >= j), j, layers))


@kernel
def _add_chain(
    model: ModelArrays, classes: ClassArrays, state: LayoutState, rng_state: Words
) -> bool:
    """Insert unused devices of a class, such as a machine's, as stages of the fewest that may be.

    The others give them a proportional part of their layers.
    """
    stages = state.stages[0]
    c, j = next_below(rng_state, len(classes.size)), next_below(rng_state, stages + 1)
    each = model.min_devices
    added = min(_unused(classes, state, c) // each, len(state.counts) - stages)
    if added <= 0:
        return False
    total = added * each * classes.flops_per_s[c]
    share = total
    for k in range(stages):
        total += _stage_flops_per_s(classes, state, k)
    share /= total
    layers = len(model.output_bytes)
    for k in range(stages, j, -1):
        _copy_row(state.counts, k - 1, k - 1 + added)
    for k in range(stages, j - 1, -1):
        # what follows the chain ends where it did before; the chain is before it
        before = state.cuts[k]
        state.cuts[k + added] = layers - int((layers - before) * (1.0 - share) + 0.5)
    for k in range(1, j + 1):
        state.cuts[k] = int(state.cuts[k] * (1.0 - share) + 0.5)
    first, last = state.cuts[j], state.cuts[j + added]
    for k in range(added):
        state.cuts[j + k] = first + (last - first) * k // added
        for other in range(state.counts.shape[1]):
            state.counts[j + k, other] = 0
        state.counts[j + k, c] = each
    state.stages[0] += added
    return bool(_has_layers(state))


@kernel
def _drop_stage(model: ModelArrays, state: LayoutState, rng_state: Words) -> bool:
    """Leave out a stage; the others take its layers in proportion to their own."""
    stages = state.stages[0]
    if stages < 2:
        return False
    j = next_below(rng_state, stages)
    layers, dropped = len(model.output_bytes), state.cuts[j + 1] - state.cuts[j]
    scale = layers / (layers - dropped)
    for k in range(j, stages - 1):
        _copy_row(state.counts, k + 1, k)
        state.cuts[k + 1] = state.cuts[k + 2] - dropped
    for k in range(1, stages - 1):
        state.cuts[k] = int(state.cuts[k] * scale + 0.5)
    state.cuts[stages - 1] = layers
    for c in range(state.counts.shape[1]):
        state.counts[stages - 1, c] = 0
    state.stages[0] -= 1
    return bool(_has_layers(state))


@entry
def random_move(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    scratch: LayoutScratch,
    rng_state: Words,
    fixed_stages: bool,
) -> bool:
    """Apply one random move; returns whether it was possible. If not, ``state`` is undefined.

    With ``fixed_stages`` the number of stages stays, as does the place of the head: a merge is
    followed by a split. If layers are fixed, they and the number of stages stay.
    """
    if model.head_free and not fixed_stages and next_unit(rng_state) < P_OTHER_HEAD:
        state.head_first[0] = 1 - state.head_first[0]
        return bool(state.stages[0] > 1)
    draw, layers_free = next_unit(rng_state), model.layers_free
    if draw < UP_TO_DEVICES or (draw >= UP_TO_REORDER and not layers_free):
        return bool(_move_devices(model, classes, state, rng_state))
    if draw < UP_TO_SWAP or (draw < UP_TO_LAYERS and not layers_free):
        return bool(_swap_devices(classes, state, rng_state))
    if draw < UP_TO_LAYERS:
        return bool(_shift_layer(state, rng_state))
    if draw < UP_TO_REORDER:
        return bool(_reorder_stages(model, state, rng_state))
    if fixed_stages:
        return bool(_merge_stages(state, rng_state)) and bool(
            _split_stage(model, classes, state, scratch, rng_state)
        )
    if draw < UP_TO_SPLIT:
        return bool(_split_stage(model, classes, state, scratch, rng_state))
    if draw < UP_TO_ADD:
        return bool(_add_stage(model, classes, state, rng_state))
    if draw < UP_TO_CHAIN:
        return bool(_add_chain(model, classes, state, rng_state))
    if draw < UP_TO_DROP:
        return bool(_drop_stage(model, state, rng_state))
    return bool(_merge_stages(state, rng_state))


@kernel
def _copy_layout(source: LayoutState, target: LayoutState) -> None:
    """Copy the stages of both: counts of others are 0 already."""
    stages = max(source.stages[0], target.stages[0])
    target.stages[0] = source.stages[0]
    target.head_first[0] = source.head_first[0]
    for j in range(stages):
        target.cuts[j] = source.cuts[j]
        target.recompute[j] = source.recompute[j]
        for c in range(source.counts.shape[1]):
            target.counts[j, c] = source.counts[j, c]
    target.cuts[stages] = source.cuts[stages]


@entry
def anneal(
    model: ModelArrays,
    classes: ClassArrays,
    state: LayoutState,
    candidate: LayoutState,
    best: LayoutState,
    scratch: LayoutScratch,
    rng_state: Words,
    current_and_best: Floats,
    moves: int,
    t_start: float,
    t_end: float,
    fixed_stages: bool,
) -> None:
    """Anneal ``state`` for ``moves`` moves; ``current_and_best`` holds its estimate and
    that of ``best``.

    The temperature, relative to the estimate, falls from ``t_start`` to ``t_end``.
    """
    for move in range(moves):
        _copy_layout(state, candidate)
        if not random_move(model, classes, candidate, scratch, rng_state, fixed_stages):
            continue
        temperature = t_start * (t_end / t_start) ** (move / moves) * current_and_best[0]
        threshold = current_and_best[0] - temperature * math.log(max(next_unit(rng_state), 1e-300))
        value = estimate(model, classes, candidate, scratch, threshold)
        if value > threshold:
            continue
        _copy_layout(candidate, state)
        current_and_best[0] = value
        if value < current_and_best[1] * (1 - 1e-12):
            _copy_layout(candidate, best)
            current_and_best[1] = value
