"""Compiled memory model of stages: bytes of their state, and microbatches that fit in the rest."""

from __future__ import annotations

import numpy as np

from planner.planning.joint.layout_arrays import ClassArrays, LayoutState, ModelArrays
from planner.search.compiled import kernel


@kernel
def head_stage(state: LayoutState) -> int:
    """The stage that runs head and loss."""
    return 0 if state.head_first[0] else int(state.stages[0] - 1)


@kernel
def stage_parameters(model: ModelArrays, state: LayoutState, j: int) -> float:
    """Parameters of a stage, one of which has the head."""
    parameters = model.parameters[state.cuts[j + 1]] - model.parameters[state.cuts[j]]
    if j == head_stage(state):
        parameters += model.head_parameters + (model.tied_parameters if j > 0 else 0.0)
    return float(parameters)


@kernel
def stage_memory(model: ModelArrays, state: LayoutState, j: int) -> tuple[float, float]:
    """Bytes of stage j, and of each microbatch between its F and B."""
    runs_head = j == head_stage(state)
    first_layer, end_layer = state.cuts[j], state.cuts[j + 1]
    first_kept = first_layer + state.recompute[j]
    parameters = stage_parameters(model, state, j)
    rounded = parameters
    if j == 0:
        rounded -= model.stem_parameters - (model.tied_parameters if runs_head else 0.0)
    kept_bytes = _graph_bytes(model, first_kept, end_layer)
    again_bytes = _graph_bytes(model, first_layer, first_kept)
    working_bytes = model.layer_bytes + max(again_bytes - kept_bytes, 0.0)
    if j == 0:
        working_bytes = max(working_bytes, model.embedding_bytes - kept_bytes)
    if runs_head:
        working_bytes = max(working_bytes, model.head_bytes)
    if state.stages[0] > 1:
        working_bytes += model.message_bytes
    saved_bytes = kept_bytes
    if first_kept > first_layer and j > 0:
        saved_bytes += model.held_bytes[first_layer - 1]
    if first_kept == end_layer and runs_head:
        saved_bytes += model.held_bytes[end_layer - 1]
    state_bytes = parameters * model.state_bytes + rounded * model.rounded_bytes
    return float(state_bytes + working_bytes), float(saved_bytes)


@kernel
def _graph_bytes(model: ModelArrays, start: int, stop: int) -> float:
    """Activations that B of some layers needs, of one microbatch, and their output."""
    if start == stop:
        return 0.0
    output_bytes = model.held_bytes[stop - 1] if model.saves_output else 0.0
    return float(model.saved_bytes[stop] - model.saved_bytes[start] + output_bytes)


@kernel
def stage_room(model: ModelArrays, classes: ClassArrays, state: LayoutState, j: int) -> float:
    """Microbatches that fit on all devices of stage j; 0 if one of them holds none."""
    room, (stage_bytes, saved_bytes) = 0.0, stage_memory(model, state, j)
    max_live = min(model.microbatches, model.max_in_flight)
    for c in range(state.counts.shape[1]):
        if state.counts[j, c] > 0:
            free_bytes, each = classes.memory_bytes[c] - stage_bytes, max_live
            if saved_bytes > 0:
                each = min(np.floor(free_bytes / saved_bytes), max_live)
            if free_bytes < 0 or each < 1:
                return 0.0
            room += state.counts[j, c] * each
    return room


@kernel
def recompute_to_fit(model: ModelArrays, classes: ClassArrays, state: LayoutState, j: int) -> float:
    """Let stage j recompute the fewest layers with which it fits; its room, 0 if it never fits.

    One microbatch needs least memory if about half of its activations are recomputed, or more as
    long as H needs more.
    """
    first, end = state.cuts[j], state.cuts[j + 1]
    of_head = max(model.head_bytes - model.layer_bytes, 0.0) if j == head_stage(state) else 0.0
    fewest, most = 0, 1
    while (
        first + most < end
        and _graph_bytes(model, first, first + most)
        < _graph_bytes(model, first + most, end) + of_head
    ):
        most += 1
    state.recompute[j] = most
    room = stage_room(model, classes, state, j)
    if room == 0.0:
        most -= 1
        state.recompute[j] = most
        room = stage_room(model, classes, state, j)
        if room == 0.0:
            return 0.0
    while most - fewest > 1:
        state.recompute[j] = (fewest + most) // 2
        middle_room = stage_room(model, classes, state, j)
        if middle_room > 0:
            most, room = state.recompute[j], middle_room
        else:
            fewest = state.recompute[j]
    state.recompute[j] = most
    return room
