"""Path problem with a free arrangement of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.network.cluster import Cluster
from planner.problems.error import ProblemError
from planner.problems.group_averaging import GroupAveraging
from planner.problems.paths import (
    PathProblem,
    boolean,
    link_matrix,
    memory_counts,
    transfer_matrix,
)
from planner.problems.quantities import instance_of, per_item, whole
from planner.problems.stage_costs import DeviceStageCosts
from planner.utils.text import counted, stage_words
from planner.utils.validate import numbers
from planner.workload.workload import Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True, init=False, eq=False)
class ArrangedPathProblem:
    """A `PathProblem` with a free arrangement of devices; the size of stage 0 is given.

    SkipPipe first arranges devices for full pipelines (eq. 1) and then searches for paths. Paths
    that skip stages have other optimal arrangements, so here both are decided together.

    Parameters
    ----------
    stage_sizes
        Devices per stage; their sum is N. The size of stage 0 is fixed.
    fixed_sizes
        Whether the sizes of the other stages are fixed too.
    forward_s, backward_s
        Seconds of F and B: scalars, one per device, or ``[stages, N]`` if stages differ.
    head_s
        Seconds of H: a scalar, or one per device.
    memory
        m of TC1: a scalar, one per device, or ``[stages, N]``.
    averaging
        None: the objective is the makespan, as in the paper. Otherwise it is the longest time of
        any stage from the start of its first F to the end of its last B plus its averaging round,
        which approximates the step time without a barrier.
    """

    transfer_s: Floats
    stage_sizes: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    head_s: Floats
    path_stages: int
    memory: NDArray[np.int64]
    microbatches_per_start: int
    max_swaps: int
    live_memory: bool
    max_total_swaps: int | None
    fixed_sizes: bool
    link_s: Floats | None
    averaging: GroupAveraging | None

    def __init__(
        self,
        transfer_s: ArrayLike,
        stage_sizes: Sequence[int],
        forward_s: ArrayLike,
        backward_s: ArrayLike,
        head_s: ArrayLike,
        path_stages: int,
        memory: ArrayLike,
        microbatches_per_start: int,
        max_swaps: int = 1,
        live_memory: bool = False,
        max_total_swaps: int | None = None,
        fixed_sizes: bool = False,
        link_s: ArrayLike | None = None,
        averaging: GroupAveraging | None = None,
    ) -> None:
        transfer = transfer_matrix(transfer_s)
        n = len(transfer)
        try:
            sizes = tuple(whole("a stage size", size) for size in stage_sizes)
        except TypeError:
            raise ProblemError(
                f"stage_sizes must be a list of whole numbers, found {stage_sizes!r}"
            ) from None
        if min(sizes, default=0) < 1 or sum(sizes) != n:
            raise ProblemError(
                f"stage_sizes must be at least 1 and add up to the {n} devices, found {list(sizes)}"
            )
        shape = (len(sizes), n)
        rows = {}
        for name, value in (("forward_s", forward_s), ("backward_s", backward_s)):
            try:
                quantity = numbers(value)
                rows[name] = np.array(np.broadcast_to(quantity, shape), order="C")
            except (TypeError, ValueError):
                raise ProblemError(
                    f"{name} must be one number, {n} or {len(sizes)} x {n} of them, found "
                    f"{_form(value)}"
                ) from None
        fields: tuple[tuple[str, Any], ...] = (
            ("transfer_s", transfer),
            ("stage_sizes", sizes),
            ("forward_s", rows["forward_s"]),
            ("backward_s", rows["backward_s"]),
            ("head_s", per_item("head_s", head_s, n, "device")),
            ("path_stages", path_stages),
            ("memory", memory_counts(memory, shape)),
            ("microbatches_per_start", microbatches_per_start),
            ("max_swaps", max_swaps),
            ("live_memory", live_memory),
            ("max_total_swaps", max_total_swaps),
            ("fixed_sizes", boolean("fixed_sizes", fixed_sizes)),
            ("link_s", link_matrix(link_s, transfer)),
            ("averaging", _averaging(averaging, shape)),
        )
        for field, value in fields:
            object.__setattr__(self, field, value)
        # validate each stage's row of values by the rules of `PathProblem`
        arrangement = self._cut(list(range(n)))
        for s in range(len(sizes)):
            self._problem(arrangement, [s] * n)
        for name in ("transfer_s", "forward_s", "backward_s", "head_s", "memory", "link_s"):
            array: NDArray[Any] | None = getattr(self, name)
            if array is not None:
                array.setflags(write=False)

    @classmethod
    def from_workload(
        cls,
        cluster: Cluster,
        workload: Workload,
        stage_sizes: Sequence[int],
        *,
        path_stages: int,
        microbatches_per_start: int,
        memory: ArrayLike | None = None,
        max_swaps: int = 1,
        live_memory: bool = False,
        queueing: bool = False,
        stage_layers: Sequence[tuple[int, int]] | None = None,
        recompute: Sequence[int] = (),
    ) -> ArrangedPathProblem:
        """The problem of a cluster; numbers as in `PathProblem.from_assignment`."""
        layers = stage_layers or workload.even_split(len(stage_sizes))
        numbers = DeviceStageCosts.of(cluster, workload, layers, recompute)
        return cls(
            numbers.transfer_s,
            stage_sizes,
            numbers.forward_s,
            numbers.backward_s,
            numbers.head_s,
            path_stages,
            numbers.memory if memory is None else memory,
            microbatches_per_start,
            max_swaps,
            live_memory,
            link_s=numbers.link_s if boolean("queueing", queueing) else None,
        )

    @classmethod
    def of(cls, problem: PathProblem) -> ArrangedPathProblem:
        """A path problem with its arrangement freed; a device is the same in every stage."""
        sizes = [len(group) for group in problem.stage_devices]
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        del fields["stage_devices"]
        return cls(stage_sizes=sizes, **fields)

    def __len__(self) -> int:
        return len(self.transfer_s)

    def __repr__(self) -> str:
        return (
            f"ArrangedPathProblem({counted(len(self), 'device')}, {stage_words(self.stage_sizes)}, "
            f"paths of {self.path_stages}, {self.microbatches_per_start} microbatches a start)"
        )

    def arranged(self, groups: Sequence[Sequence[int]]) -> PathProblem:
        """The path problem of an arrangement."""
        sizes = [len(group) for group in groups]
        same = sizes == list(self.stage_sizes)
        near = len(sizes) == len(self.stage_sizes) and sizes[:1] == list(self.stage_sizes[:1])
        if not (same or (near and not self.fixed_sizes)):
            raise ProblemError(
                f"groups must have the sizes {list(self.stage_sizes)}"
                f"{'' if self.fixed_sizes else ', at least in stage 0'}, found {sizes}"
            )
        stage = {int(d): j for j, group in enumerate(groups) for d in group}
        return self._problem(groups, [stage.get(d, 0) for d in range(len(self))])

    def _cut(self, devices: Sequence[int]) -> list[list[int]]:
        ends = np.cumsum(self.stage_sizes).tolist()
        return [
            list(devices[end - size : end])
            for size, end in zip(self.stage_sizes, ends, strict=True)
        ]

    def _problem(self, groups: Sequence[Sequence[int]], stage: Sequence[int]) -> PathProblem:
        every = np.arange(len(self))
        return PathProblem(
            self.transfer_s,
            groups,
            self.forward_s[stage, every],
            self.backward_s[stage, every],
            self.head_s,
            self.path_stages,
            self.memory[stage, every],
            self.microbatches_per_start,
            self.max_swaps,
            self.live_memory,
            self.max_total_swaps,
            self.link_s,
        )

    def replace(self, **changes: Any) -> ArrangedPathProblem:
        """A copy with some of the constructor's fields changed."""
        return replace(self, **changes)


def _averaging(value: Any, shape: tuple[int, int]) -> GroupAveraging | None:
    """Check that averaging has the problem's numbers of stages and devices."""
    if value is None:
        return None
    averaging = instance_of(GroupAveraging, value, "averaging")
    lengths = len(averaging.vector_bytes), len(averaging.line_s_per_byte)
    if lengths != shape:
        raise ProblemError(
            f"averaging must be of {shape[0]} stages and {shape[1]} devices, found "
            f"{lengths[0]} and {lengths[1]}"
        )
    return averaging


def _form(value: Any) -> str:
    """Shape or type of a value that is not valid, for messages."""
    try:
        return f"shape {np.shape(value)}"
    except ValueError:
        return f"a value of type {type(value).__name__}"
