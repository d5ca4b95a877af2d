"""Solutions of the solvers as immutable data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.problems.error import ProblemError
from planner.problems.quantities import device_groups
from planner.utils.text import counted, stage_words
from planner.utils.validate import short_repr


@dataclass(frozen=True, eq=False)
class AssignmentPlan:
    """Assignment of devices to stages.

    Attributes
    ----------
    groups
        One tuple of devices per stage, in pipeline order, each sorted.
    grid
        ``int[pipelines, stages]``: row i is pipeline i. Its rows realise the bottleneck matchings.
        None when the groups differ in size.
    """

    groups: tuple[tuple[int, ...], ...]
    grid: NDArray[np.int64] | None

    @classmethod
    def of_grid(cls, grid: Sequence[Sequence[int]] | NDArray[np.int64]) -> AssignmentPlan:
        """Build from a grid; its rows are sorted by their first device.

        Parameters
        ----------
        grid
            ``int[pipelines, stages]``.

        Returns
        -------
        AssignmentPlan
            Its groups are sorted.

        Raises
        ------
        ProblemError
            The grid is no matrix of whole numbers.
        """
        try:
            array = np.array(grid)
        except ValueError:  # rows of unequal length
            array = np.array(0)
        if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
            raise ProblemError(
                f"grid is {short_repr(grid)}; give a row of whole numbers for every pipeline, all "
                "of one length"
            )
        array = array.astype(np.int64)
        array = array[np.argsort(array[:, 0], kind="stable")]
        array.setflags(write=False)
        return cls(tuple(tuple(sorted(map(int, column))) for column in array.T), array)

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[int]]) -> AssignmentPlan:
        """Build from groups alone; for groups of equal size `match_stages` adds the grid.

        Parameters
        ----------
        groups
            Devices of every stage.

        Returns
        -------
        AssignmentPlan
            Without a grid.

        Raises
        ------
        ProblemError
            The groups are no lists of whole numbers.
        """
        return cls(device_groups(groups), None)

    def __repr__(self) -> str:
        return f"AssignmentPlan({stage_words([len(group) for group in self.groups])})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AssignmentPlan) or self.groups != other.groups:
            return False
        if self.grid is None or other.grid is None:
            return self.grid is other.grid
        return bool(np.array_equal(self.grid, other.grid))

    def __hash__(self) -> int:
        return hash(self.groups)


@dataclass(frozen=True, eq=False)
class AveragingPlan:
    """Contributors, and the share of the vector that each reducer averages (DeDLOC, 3.2).

    Attributes
    ----------
    computes
        ``bool[n]``, c_i: whether peer i contributes gradients.
    rates
        ``float[n]``, r_i in bytes per second: what reducer i accepts from each contributor and
        returns to each peer.
    steps_per_s
        Optimiser steps per second that these rates attain.
    samples_per_step
        ``float[n]``: samples that peer i is expected to contribute to one batch,
        B s_i c_i / sum_k s_k c_k. Peers accumulate at their own pace (3.1), so actual numbers
        differ.
    """

    computes: NDArray[np.bool_]
    rates: NDArray[np.float64]
    steps_per_s: float
    samples_per_step: NDArray[np.float64]

    def __post_init__(self) -> None:
        for field, kind in (("computes", bool), ("rates", float), ("samples_per_step", float)):
            value = getattr(self, field)
            try:
                array = np.array(value, dtype=kind)
            except (TypeError, ValueError, OverflowError):
                raise ProblemError(
                    f"{field} must be one value a peer, found {short_repr(value)}"
                ) from None
            array.setflags(write=False)
            object.__setattr__(self, field, array)

    @property
    def shares(self) -> NDArray[np.float64]:
        """``float[n]``, r_i / R: fraction of the vector that peer i reduces (eq. 6).

        They add up to 1, or are all 0 if nothing is averaged (R = 0).
        """
        total = self.rates.sum()
        return self.rates / total if total > 0 else np.zeros_like(self.rates)

    @property
    def a(self) -> NDArray[np.float64]:
        """``float[n, n]``, a_ki = c_k r_i in bytes per second: gradients from k to reducer i."""
        return np.outer(self.computes.astype(np.float64), self.rates)

    @property
    def g(self) -> NDArray[np.float64]:
        """``float[n, n]``, g_ij = r_i in bytes per second: averages from reducer i to peer j."""
        return np.repeat(self.rates[:, None], len(self.rates), axis=1)

    @property
    def reducers(self) -> tuple[int, ...]:
        """Peers that reduce a share, ascending."""
        return tuple(int(i) for i in np.flatnonzero(self.rates > 0))

    def __repr__(self) -> str:
        return (
            f"AveragingPlan({int(self.computes.sum())} of {counted(len(self.rates), 'peer')} "
            f"contribute, {len(self.reducers)} sum, {self.steps_per_s:.4g} steps/s)"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AveragingPlan) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Canonical serialisation: equal plans give equal bytes on every peer."""
        return b"".join(
            np.ascontiguousarray(array).astype(kind).tobytes()
            for array, kind in (
                (self.computes, "u1"),
                (self.rates + 0.0, "<f8"),
                (self.samples_per_step + 0.0, "<f8"),
            )
        )


class PathOp(NamedTuple):
    """One operation of a microbatch on a device: F, H or B.

    Attributes
    ----------
    kind
        F, H or B.
    """

    microbatch: int
    device: int
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PathPlan:
    """Path of every microbatch, and the times of its operations.

    Attributes
    ----------
    paths
        Per microbatch, its devices in the order visited; the first is its start device.
    ops
        Every F, H and B with its times, sorted by start.
    """

    paths: tuple[tuple[int, ...], ...]
    ops: tuple[PathOp, ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], ops: Sequence[PathOp]) -> PathPlan:
        """Build in canonical form: operations sorted by start, device, kind, microbatch.

        Parameters
        ----------
        paths
            Devices of every microbatch.
        ops
            In any order.

        Returns
        -------
        PathPlan
            Equal decisions give equal plans.
        """
        return cls(
            tuple(tuple(int(d) for d in path) for path in paths),
            tuple(sorted(ops, key=lambda o: (o.start_s, o.device, o.kind, o.microbatch))),
        )

    def __repr__(self) -> str:
        words = counted(len(self.paths), "microbatch"), counted(len(self.ops), "operation")
        return f"PathPlan({', '.join(words)}, {self.makespan_s:.4g} s)"

    @property
    def makespan_s(self) -> float:
        """Latest end of an operation."""
        return max((op.end_s for op in self.ops), default=0.0)

    def order(self, devices: int) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Per device, its operations ``(kind, microbatch)`` in order, as a plan file has them.

        Parameters
        ----------
        devices
            N.

        Returns
        -------
        tuple[tuple[tuple[str, int], ...], ...]
            N tuples.
        """
        rows: list[list[tuple[str, int]]] = [[] for _ in range(devices)]
        # simultaneous operations of duration 0 are ordered F, H, B
        for op in sorted(self.ops, key=lambda o: (o.start_s, o.end_s, "FHB".index(o.kind))):
            rows[op.device].append((op.kind, op.microbatch))
        return tuple(tuple(row) for row in rows)


@dataclass(frozen=True)
class ArrangedPathPlan:
    """Assignment of devices to stages, and the paths on it.

    Attributes
    ----------
    groups
        Devices per stage, each sorted; microbatches are numbered by the devices of stage 0.
    """

    groups: tuple[tuple[int, ...], ...]
    paths: PathPlan

    def __repr__(self) -> str:
        return f"ArrangedPathPlan({stage_words([len(g) for g in self.groups])}, {self.paths!r})"
