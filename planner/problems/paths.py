"""Path problem: which devices every microbatch visits, and when (SkipPipe)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.network.cluster import Cluster
from planner.problems.answers import AssignmentPlan
from planner.problems.error import ProblemError
from planner.problems.quantities import per_item, whole
from planner.problems.stage_costs import DeviceStageCosts
from planner.utils.text import counted, stage_words
from planner.utils.validate import numbers, short_repr
from planner.workload.workload import Workload

Floats = NDArray[np.float64]

MAX_EXACT = 1 << 53
"""Whole numbers below this are exact as floats."""
MAX_MICROBATCHES = 100_000
"""Most microbatches per start device."""


def transfer_matrix(transfer_s: ArrayLike) -> Floats:
    """N x N seconds, each ``>= 0`` and finite, with zeros on the diagonal; a copy."""
    try:
        transfer = numbers(transfer_s)
    except (TypeError, ValueError):
        raise ProblemError(
            f"transfer_s must be N x N numbers, found a value of type {type(transfer_s).__name__}"
        ) from None
    if transfer.ndim != 2 or transfer.shape[0] != transfer.shape[1]:
        raise ProblemError(f"transfer_s must be N x N, found shape {transfer.shape}")
    np.fill_diagonal(transfer, 0.0)
    bad = np.argwhere(~(np.isfinite(transfer) & (transfer >= 0)))
    if len(bad):
        i, j = (int(k) for k in bad[0])
        raise ProblemError(
            f"transfer_s from {i} to {j} is {transfer[i, j]:g}; it must be >= 0 and finite, "
            "leave out devices that cannot be reached"
        )
    return transfer


def link_matrix(link_s: ArrayLike | None, transfer: Floats) -> Floats | None:
    """N x N seconds from 0 to those of the transfers, with zeros on the diagonal; a copy.

    None stays None.
    """
    if link_s is None:
        return None
    n = len(transfer)
    try:
        link = numbers(link_s)
    except (TypeError, ValueError):
        raise ProblemError(
            f"link_s must be N x N numbers or None, found a value of type {type(link_s).__name__}"
        ) from None
    if link.shape != (n, n):
        raise ProblemError(f"link_s must be {n} x {n}, as transfer_s is, found shape {link.shape}")
    np.fill_diagonal(link, 0.0)
    bad = np.argwhere(~((link >= 0) & (link <= transfer)))
    if len(bad):
        i, j = (int(k) for k in bad[0])
        raise ProblemError(
            f"link_s from {i} to {j} is {link[i, j]:g}; it is a part of transfer_s and must be 0 "
            f"to {transfer[i, j]:g}"
        )
    return link


def device_groups(stage_devices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Devices per stage as whole numbers."""
    try:
        listed = [list(group) for group in stage_devices]
    except TypeError:
        raise ProblemError(
            "stage_devices must be a list of devices for every stage, found "
            f"{short_repr(stage_devices)}"
        ) from None
    return tuple(tuple(whole("a device of stage_devices", d) for d in g) for g in listed)


def memory_counts(memory: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Whole numbers >= 0 of a shape, from a scalar, one per device, or all of them; a copy."""
    want = " x ".join(map(str, shape))
    rule = f"one number, {shape[-1]} or {want}" if len(shape) > 1 else f"one number or {want}"
    try:
        counts = numbers(memory)
    except (TypeError, ValueError):
        raise ProblemError(
            f"memory must be {rule} of them, found a value of type {type(memory).__name__}"
        ) from None
    if counts.shape not in ((), shape[-1:], shape):
        raise ProblemError(f"memory must be {rule} of them, found shape {counts.shape}")
    fine = (counts == np.floor(counts)) & (counts >= 0) & (counts < MAX_EXACT)
    if not fine.all():
        at = np.argwhere(~fine)[0].tolist()
        where = f" at {', '.join(map(str, at))}" if at else ""
        raise ProblemError(
            f"memory is {counts[tuple(at)]:g}{where}; it must be whole numbers >= 0, under "
            f"{MAX_EXACT}"
        )
    return np.array(np.broadcast_to(counts, shape), dtype=np.int64, order="C")


def boolean(field: str, value: object) -> bool:
    """Return the value if it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ProblemError(f"{field} must be True or False, found {value!r}")
    return bool(value)


@dataclass(frozen=True, init=False, eq=False)
class PathProblem:
    """Choose each microbatch's path over devices and the times of its operations (SkipPipe, 3.1).

    One problem is one wave, or with ``live_memory`` a whole iteration.

    Parameters
    ----------
    transfer_s
        N x N seconds for one microbatch's activations, ``>= 0``; the diagonal is ignored.
    stage_devices
        Per stage, its devices; every device holds one stage.
    forward_s, backward_s, head_s
        Seconds of F, B and H: scalars, or one per device. H runs on the start device.
    path_stages
        Stages on every path, the first included; the others are skipped.
    memory
        m: most paths through a device (TC1), or with ``live_memory`` most microbatches between the
        start of their F and the end of their B on it at any time. A scalar, or one per device.
    microbatches_per_start
        Microbatches from every device of stage 0.
    max_swaps
        Most disjoint pairs of neighbouring stages that a path may visit in reverse (CC2).
    max_total_swaps
        Most such pairs over all paths together (Appendix D.2); None for no further limit.
    link_s
        N x N seconds, the part of each transfer for which its link is busy: from 0 to
        ``transfer_s``; the diagonal is ignored. None: links carry any number of messages at a time
        (the paper).

    Notes
    -----
    Microbatch b starts at ``stage_devices[0][b // microbatches_per_start]``.

    With ``link_s``, link u -> v carries one message at a time, in the order in which the sending
    operations end; of those that end together, the message that is needed first. A message arrives
    ``transfer_s[u, v]`` after its sending begins. The two directions are two links.
    """

    transfer_s: Floats
    stage_devices: tuple[tuple[int, ...], ...]
    forward_s: Floats
    backward_s: Floats
    head_s: Floats
    path_stages: int
    memory: NDArray[np.int64]
    microbatches_per_start: int
    max_swaps: int
    live_memory: bool
    max_total_swaps: int | None
    link_s: Floats | None

    def __init__(
        self,
        transfer_s: ArrayLike,
        stage_devices: Sequence[Sequence[int]],
        forward_s: ArrayLike,
        backward_s: ArrayLike,
        head_s: ArrayLike,
        path_stages: int,
        memory: ArrayLike,
        microbatches_per_start: int,
        max_swaps: int = 1,
        live_memory: bool = False,
        max_total_swaps: int | None = None,
        link_s: ArrayLike | None = None,
    ) -> None:
        transfer = transfer_matrix(transfer_s)
        link = link_matrix(link_s, transfer)
        n = len(transfer)
        groups = device_groups(stage_devices)
        listed = sorted(d for group in groups for d in group)
        if listed != list(range(n)) or any(not group for group in groups):
            raise ProblemError(
                f"stage_devices must hold each of the {n} devices once and no empty stage, found "
                f"{[list(g) for g in groups]}"
            )
        path_stages = whole("path_stages", path_stages)
        microbatches_per_start = whole("microbatches_per_start", microbatches_per_start)
        max_swaps = whole("max_swaps", max_swaps)
        if not 1 <= path_stages <= len(groups):
            raise ProblemError(
                f"path_stages is {path_stages}; it must be 1 to the {len(groups)} stages"
            )
        if not 1 <= microbatches_per_start <= MAX_MICROBATCHES:
            raise ProblemError(
                f"microbatches_per_start is {microbatches_per_start}; it must be at least 1 and at "
                f"most {MAX_MICROBATCHES}"
            )
        if max_swaps < 0:
            raise ProblemError(f"max_swaps is {max_swaps}; it must be >= 0")
        if max_total_swaps is not None and whole("max_total_swaps", max_total_swaps) < 0:
            raise ProblemError(
                f"max_total_swaps is {max_total_swaps}; it must be >= 0, or None for no limit"
            )
        room = memory_counts(memory, (n,))
        times = {
            name: per_item(name, value, n, "device")
            for name, value in (
                ("forward_s", forward_s),
                ("backward_s", backward_s),
                ("head_s", head_s),
            )
        }
        for array in (transfer, link, room, *times.values()):
            if array is not None:
                array.setflags(write=False)
        for field, value in (
            ("transfer_s", transfer),
            ("stage_devices", groups),
            *times.items(),
            ("path_stages", path_stages),
            ("memory", room),
            ("microbatches_per_start", microbatches_per_start),
            ("max_swaps", max_swaps),
            ("live_memory", boolean("live_memory", live_memory)),
            ("max_total_swaps", None if max_total_swaps is None else int(max_total_swaps)),
            ("link_s", link),
        ):
            object.__setattr__(self, field, value)

    @classmethod
    def from_assignment(
        cls,
        cluster: Cluster,
        workload: Workload,
        assignment: AssignmentPlan,
        *,
        path_stages: int,
        microbatches_per_start: int,
        memory: ArrayLike | None = None,
        max_swaps: int = 1,
        live_memory: bool = False,
        queueing: bool = False,
        stage_layers: Sequence[tuple[int, int]] | None = None,
        recompute: Sequence[int] = (),
    ) -> PathProblem:
        """The problem of an arrangement, with compute times from FLOPs.

        ``memory`` defaults to the microbatches that each device's memory holds beside its stage.
        With ``queueing`` a link is busy for a message's bytes over its bandwidth (``link_s``).
        ``stage_layers`` are ranges ``(start, stop)``, by default even ones; stages that
        ``recompute`` run F again in B, by default none.
        """
        layers = stage_layers or workload.even_split(len(assignment.groups))
        numbers = DeviceStageCosts.of(cluster, workload, layers, recompute)
        stage = np.empty(len(cluster), dtype=np.int64)
        for j, group in enumerate(assignment.groups):
            stage[list(group)] = j
        every = np.arange(len(cluster))
        return cls(
            numbers.transfer_s,
            assignment.groups,
            numbers.forward_s[stage, every],
            numbers.backward_s[stage, every],
            numbers.head_s,
            path_stages,
            numbers.memory[stage, every] if memory is None else memory,
            microbatches_per_start,
            max_swaps,
            live_memory,
            link_s=numbers.link_s if boolean("queueing", queueing) else None,
        )

    def __len__(self) -> int:
        return len(self.transfer_s)

    def __repr__(self) -> str:
        sizes = stage_words([len(group) for group in self.stage_devices])
        return (
            f"PathProblem({counted(len(self), 'device')}, {sizes}, paths of {self.path_stages}, "
            f"{self.microbatches_per_start} microbatches a start)"
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """Start device of each microbatch."""
        return tuple(d for d in self.stage_devices[0] for _ in range(self.microbatches_per_start))

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Stage of each device."""
        where = {d: j for j, group in enumerate(self.stage_devices) for d in group}
        return tuple(where[d] for d in range(len(self)))

    @property
    def visits(self) -> tuple[int, int]:
        """CC3: fewest and most paths through each stage but the first."""
        others = len(self.stage_devices) - 1
        if others == 0:
            return 0, 0
        total = len(self.starts) * (self.path_stages - 1)
        return total // others, -(-total // others)

    def replace(self, **changes: Any) -> PathProblem:
        """A copy with some of the constructor's fields changed."""
        return replace(self, **changes)
