"""The questions that solvers answer, as frozen data with their exact cost.

The cost functions here are the definitions: clear, not fast. Solvers have compiled twins, and
`planner.check` recomputes everything on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cluster import Cluster
from planner.network import Network
from planner.parts import AssignmentPlan
from planner.workload import BACKWARD_TO_FORWARD, Workload

Floats = NDArray[np.float64]


class ProblemError(ValueError):
    """A problem whose data contradict each other; the message names rule, value and remedy."""


@dataclass(frozen=True, init=False)
class AssignmentProblem:
    """Which device holds which stage (DT-FM, eq. 1-4).

    Parameters
    ----------
    network
        Complete network of N devices. Both directions are averaged here, as the paper does.
    stages, pipelines
        Equal groups: ``stages * pipelines == N``.
    stage_sizes
        Instead of the two: devices per stage, summing to N.
    activation_bytes
        c_PP, bytes over one boundary: a scalar, or one per boundary (S - 1).
    gradient_bytes
        c_DP, bytes of one stage's gradients: a scalar, or one per stage (S).

    Attributes
    ----------
    network
        The network with both directions averaged.
    """

    network: Network
    stage_sizes: tuple[int, ...]
    activation_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]

    def __init__(
        self,
        network: Network,
        stages: int | None = None,
        pipelines: int | None = None,
        activation_bytes: ArrayLike = 0.0,
        gradient_bytes: ArrayLike = 0.0,
        *,
        stage_sizes: Sequence[int] | None = None,
    ) -> None:
        network.require_complete()
        n = len(network)
        if stage_sizes is None:
            if stages is None or pipelines is None:
                raise ProblemError(
                    "the shape of the plan is missing; give stages and pipelines, or stage_sizes"
                )
            if stages < 1 or pipelines < 1 or stages * pipelines != n:
                raise ProblemError(
                    f"stages x pipelines must be the number of devices, found {stages} x "
                    f"{pipelines} for {n} devices; change one, or give stage_sizes"
                )
            sizes = (int(pipelines),) * int(stages)
        else:
            if stages is not None or pipelines is not None:
                raise ProblemError(
                    "stage_sizes was given together with stages or pipelines; give one or the other"
                )
            sizes = tuple(int(s) for s in stage_sizes)
            if not sizes or min(sizes) < 1 or sum(sizes) != n:
                raise ProblemError(
                    f"stage_sizes must be >= 1 and sum to the number of devices, found "
                    f"{list(sizes)} for {n} devices"
                )
        for field, value in (
            ("network", network.symmetrised()),
            ("stage_sizes", sizes),
            ("activation_bytes", _bytes("activation_bytes", activation_bytes, len(sizes) - 1)),
            ("gradient_bytes", _bytes("gradient_bytes", gradient_bytes, len(sizes))),
        ):
            object.__setattr__(self, field, value)

    @property
    def stages(self) -> int:
        """S, the number of stages (the paper's D_PP)."""
        return len(self.stage_sizes)

    @property
    def pipelines(self) -> int | None:
        """The paper's D_DP, None when the groups differ in size."""
        return self.stage_sizes[0] if len(set(self.stage_sizes)) == 1 else None

    @property
    def uniform(self) -> bool:
        """Equal groups, and the same bytes over every boundary and in every stage.

        Then the data-parallel cost does not depend on the order of the groups.
        """
        return all(
            len(set(values)) <= 1
            for values in (self.stage_sizes, self.activation_bytes, self.gradient_bytes)
        )

    def exchange_s(self, stage: int) -> Floats:
        """N x N: one pair's summand of eq. 2 in ``stage``, 0 on the diagonal."""
        share = self.gradient_bytes[stage] / self.stage_sizes[stage]
        return 2 * self.network.transfer_s(share)

    def hop_s(self, boundary: int) -> Floats:
        """N x N: ``latency + activation_bytes / bandwidth`` between stages j and j + 1."""
        return self.network.transfer_s(self.activation_bytes[boundary])

    def data_parallel_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Eq. 2 and its maximum over the stages."""
        worst = 0.0
        for stage, group in enumerate(groups):
            if len(group) > 1:
                inside = self.exchange_s(stage)[np.ix_(group, group)]
                worst = max(worst, float(inside.sum(axis=1).max()))
        return worst

    def boundary_s(self, boundary: int, left: Sequence[int], right: Sequence[int]) -> float:
        """B_j of eq. 3: smallest largest hop over matchings that cover the smaller side."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_bipartite_matching

        hops = self.hop_s(boundary)[np.ix_(left, right)]
        levels = np.unique(hops)
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            match = maximum_bipartite_matching(csr_array(hops <= levels[middle]), "column")
            if int((match >= 0).sum()) == min(hops.shape):
                high = middle
            else:
                low = middle + 1
        return float(levels[low])

    def pipeline_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Eq. 4 for the groups in the given order: the sum of ``2 B_j``."""
        return sum(2 * self.boundary_s(j, groups[j], groups[j + 1]) for j in range(len(groups) - 1))

    def cost(self, groups: Sequence[Sequence[int]]) -> float:
        """COMM-COST of eq. 1 in seconds for groups in pipeline order."""
        return self.data_parallel_s(groups) + self.pipeline_s(groups)

    def replace(self, **changes: Any) -> AssignmentProblem:
        """A copy with some of the constructor's fields changed."""
        fields: dict[str, Any] = {
            "network": self.network,
            "stage_sizes": self.stage_sizes,
            "activation_bytes": self.activation_bytes,
            "gradient_bytes": self.gradient_bytes,
        }
        return AssignmentProblem(**{**fields, **changes})


def _bytes(field: str, value: ArrayLike, count: int) -> tuple[float, ...]:
    try:
        array = np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))
    except (TypeError, ValueError):
        raise ProblemError(
            f"{field} must be one number or {count} of them, found shape {np.shape(value)}"
        ) from None
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ProblemError(f"{field} is {array[bad[0]]:g}; it must be >= 0 and finite")
    return tuple(float(x) for x in array)


@dataclass(frozen=True, init=False, eq=False)
class AveragingProblem:
    """Who contributes gradients, and who sums which share of them (DeDLOC, 3.2 and Appendix B).

    Parameters
    ----------
    samples_per_s
        s_i: samples per second that peer i can compute gradients for, ``>= 0``; 0: no accelerator.
    upload_bytes_per_s, download_bytes_per_s
        u_i and d_i in bytes per second: a scalar, or one per peer.
    batch_size
        B: samples per optimiser step.
    gradient_bytes
        P: bytes of the vector that is averaged.
    link_bytes_per_s
        t_ij: n x n, bytes per second from i to j, ``>= 0``; infinite where only u and d limit.
        The diagonal is ignored. None: no pairwise limits.
    can_compute, can_aggregate
        False: c_i = 0 (for instance a firewalled data set), and r_i = 0 (client mode behind NAT).
    overlap
        True: delayed parameter updates, a step takes the longer of computing and averaging.
        False: it takes their sum.

    Notes
    -----
    Reducer i works at the rate r_i: every contributor k (c_k = 1) sends it a_ki = c_k r_i, it
    returns g_ij = r_i to every peer. With R = sum_i r_i, peer i then

    * uploads    ``c_i (R - r_i) + (n - 1) r_i                  <= u_i``,
    * downloads  ``(sum_k c_k - c_i) r_i + (R - r_i)            <= d_i``,
    * uses links ``c_i r_j + r_i                                <= t_ij`` for j != i,

    and the collaboration makes ``min(sum_i s_i c_i / B, R / P)`` steps per second.
    """

    samples_per_s: Floats
    upload_bytes_per_s: Floats
    download_bytes_per_s: Floats
    batch_size: float
    gradient_bytes: float
    link_bytes_per_s: Floats | None
    can_compute: NDArray[np.bool_]
    can_aggregate: NDArray[np.bool_]
    overlap: bool

    def __init__(
        self,
        samples_per_s: ArrayLike,
        upload_bytes_per_s: ArrayLike,
        download_bytes_per_s: ArrayLike,
        batch_size: float,
        gradient_bytes: float,
        link_bytes_per_s: ArrayLike | None = None,
        can_compute: ArrayLike | None = None,
        can_aggregate: ArrayLike | None = None,
        overlap: bool = True,
    ) -> None:
        sizes = {
            int(np.size(values))
            for values in (samples_per_s, upload_bytes_per_s, download_bytes_per_s)
            if np.ndim(values) > 0
        }
        n = max(sizes, default=1)
        samples = _rates("samples_per_s", samples_per_s, n)
        upload = _rates("upload_bytes_per_s", upload_bytes_per_s, n)
        download = _rates("download_bytes_per_s", download_bytes_per_s, n)
        for field, number in (("batch_size", batch_size), ("gradient_bytes", gradient_bytes)):
            if isinstance(number, bool) or not (np.isfinite(number) and number > 0):
                raise ProblemError(f"{field} is {number}; it must be > 0 and finite")
        computes = _flags("can_compute", can_compute, n)
        aggregates = _flags("can_aggregate", can_aggregate, n)
        if not (computes & (samples > 0)).any():
            raise ProblemError(
                "nobody can compute: samples_per_s is 0 or can_compute is false for each of "
                f"{n} peers; at least one peer must compute gradients"
            )
        if not aggregates.any():
            raise ProblemError(
                f"nobody can aggregate: can_aggregate is false for each of {n} peers; at least one "
                "peer must accept connections"
            )
        links = None if link_bytes_per_s is None else _links(link_bytes_per_s, n)
        for array in (samples, upload, download, computes, aggregates):
            array.setflags(write=False)
        for field, value in (
            ("samples_per_s", samples),
            ("upload_bytes_per_s", upload),
            ("download_bytes_per_s", download),
            ("batch_size", float(batch_size)),
            ("gradient_bytes", float(gradient_bytes)),
            ("link_bytes_per_s", links),
            ("can_compute", computes),
            ("can_aggregate", aggregates),
            ("overlap", bool(overlap)),
        ):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.samples_per_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AveragingProblem) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        links = None if self.link_bytes_per_s is None else self.link_bytes_per_s.tobytes()
        return (
            self.samples_per_s.tobytes(),
            self.upload_bytes_per_s.tobytes(),
            self.download_bytes_per_s.tobytes(),
            self.batch_size,
            self.gradient_bytes,
            links,
            self.can_compute.tobytes(),
            self.can_aggregate.tobytes(),
            self.overlap,
        )

    @property
    def contributors(self) -> NDArray[np.bool_]:
        """Peers with a gradient to give: ``can_compute`` and s_i > 0; the others have c_i = 0."""
        return self.can_compute & (self.samples_per_s > 0)

    def upload_of(self, rates: ArrayLike, computes: ArrayLike) -> Floats:
        """Bytes per second that each peer uploads at the rates r_i: the left side of eq. 2."""
        r, c = np.asarray(rates, dtype=np.float64), np.asarray(computes, dtype=np.float64)
        used: Floats = c * (r.sum() - r) + (len(self) - 1) * r
        return used

    def download_of(self, rates: ArrayLike, computes: ArrayLike) -> Floats:
        """Bytes per second that each peer downloads at the rates r_i."""
        r, c = np.asarray(rates, dtype=np.float64), np.asarray(computes, dtype=np.float64)
        used: Floats = (c.sum() - c) * r + (r.sum() - r)
        return used

    def link_of(self, rates: ArrayLike, computes: ArrayLike) -> Floats:
        """``a_ij + g_ij`` in bytes per second; 0 on the diagonal."""
        r, c = np.asarray(rates, dtype=np.float64), np.asarray(computes, dtype=np.float64)
        used: Floats = np.outer(c, r) + r[:, None]
        np.fill_diagonal(used, 0.0)
        return used

    def steps_per_s(self, rates: ArrayLike, computes: ArrayLike) -> float:
        """Steps per second at the rates r_i with the contributors c_i (not checked for limits).

        A single peer averages with nobody, so that only its computing counts.
        """
        total = float(np.sum(np.asarray(rates, dtype=np.float64)))
        samples = float(self.samples_per_s[np.asarray(computes, dtype=bool)].sum())
        return self.steps_of(samples, np.inf if len(self) == 1 else total)

    def steps_of(self, samples_per_s: float, total_rate: float) -> float:
        """Steps per second from ``sum_i s_i c_i`` and R, overlapped or one after the other."""
        if samples_per_s <= 0 or total_rate <= 0:
            return 0.0
        if self.overlap:
            return min(samples_per_s / self.batch_size, total_rate / self.gradient_bytes)
        return 1.0 / (self.batch_size / samples_per_s + self.gradient_bytes / total_rate)

    def replace(self, **changes: Any) -> AveragingProblem:
        """A copy with some fields changed."""
        fields: dict[str, Any] = {
            "samples_per_s": self.samples_per_s,
            "upload_bytes_per_s": self.upload_bytes_per_s,
            "download_bytes_per_s": self.download_bytes_per_s,
            "batch_size": self.batch_size,
            "gradient_bytes": self.gradient_bytes,
            "link_bytes_per_s": self.link_bytes_per_s,
            "can_compute": self.can_compute,
            "can_aggregate": self.can_aggregate,
            "overlap": self.overlap,
        }
        return AveragingProblem(**{**fields, **changes})

    def subset(self, peers: Sequence[int]) -> AveragingProblem:
        """The problem of some peers, in that order: what is left when the others leave."""
        index = [int(i) for i in peers]
        links = self.link_bytes_per_s
        return self.replace(
            samples_per_s=self.samples_per_s[index],
            upload_bytes_per_s=self.upload_bytes_per_s[index],
            download_bytes_per_s=self.download_bytes_per_s[index],
            link_bytes_per_s=None if links is None else links[np.ix_(index, index)],
            can_compute=self.can_compute[index],
            can_aggregate=self.can_aggregate[index],
        )


def _rates(field: str, value: ArrayLike, count: int) -> Floats:
    try:
        array = np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)))
    except (TypeError, ValueError):
        raise ProblemError(
            f"{field} must be one number or {count} of them, found shape {np.shape(value)}"
        ) from None
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ProblemError(
            f"{field} of peer {bad[0]} is {array[bad[0]]:g}; it must be >= 0 and finite"
        )
    return array + 0.0


def _flags(field: str, value: ArrayLike | None, count: int) -> NDArray[np.bool_]:
    if value is None:
        return np.ones(count, dtype=bool)
    array = np.asarray(value)
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise ProblemError(
            f"{field} must hold true and false, found {array.dtype} {array.tolist()}"
        )
    try:
        return np.array(np.broadcast_to(array.astype(bool), (count,)))
    except ValueError:
        raise ProblemError(
            f"{field} must be one value or {count} of them, found shape {array.shape}"
        ) from None


def _links(value: ArrayLike, count: int) -> Floats:
    try:
        array = np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (count, count)))
    except (TypeError, ValueError):
        raise ProblemError(
            f"link_bytes_per_s must be one number or {count} x {count} of them, found shape "
            f"{np.shape(value)}"
        ) from None
    np.fill_diagonal(array, np.inf)
    bad = np.argwhere(~(array >= 0))
    if len(bad):
        i, j = bad[0]
        raise ProblemError(
            f"link_bytes_per_s from {i} to {j} is {array[i, j]:g}; it must be >= 0 "
            "(infinite for no limit)"
        )
    array += 0.0
    array.setflags(write=False)
    return array


@dataclass(frozen=True, init=False, eq=False)
class PathProblem:
    """Which devices every microbatch visits, in which order, when (SkipPipe, 3.1).

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

    Notes
    -----
    Microbatch b starts at ``stage_devices[0][b // microbatches_per_start]``.
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
    ) -> None:
        transfer = np.array(transfer_s, dtype=np.float64)
        if transfer.ndim != 2 or transfer.shape[0] != transfer.shape[1]:
            raise ProblemError(f"transfer_s must be N x N, found shape {transfer.shape}")
        n = len(transfer)
        np.fill_diagonal(transfer, 0.0)
        if not (np.isfinite(transfer) & (transfer >= 0)).all():
            i, j = (int(k) for k in np.argwhere(~(np.isfinite(transfer) & (transfer >= 0)))[0])
            raise ProblemError(
                f"transfer_s from {i} to {j} is {transfer[i, j]:g}; it must be >= 0 and finite, "
                "leave out devices that cannot be reached"
            )
        groups = tuple(tuple(int(d) for d in group) for group in stage_devices)
        listed = sorted(d for group in groups for d in group)
        if listed != list(range(n)) or any(not group for group in groups):
            raise ProblemError(
                f"stage_devices must hold each of the {n} devices once and no empty stage, found "
                f"{[list(g) for g in groups]}"
            )
        if not 1 <= path_stages <= len(groups):
            raise ProblemError(
                f"path_stages is {path_stages}; it must be 1 to the {len(groups)} stages"
            )
        if microbatches_per_start < 1:
            raise ProblemError(
                f"microbatches_per_start is {microbatches_per_start}; it must be at least 1"
            )
        if max_swaps < 0:
            raise ProblemError(f"max_swaps is {max_swaps}; it must be >= 0")
        room = np.array(np.broadcast_to(np.asarray(memory), (n,)))
        if not (room == np.floor(room)).all() or (room < 0).any():
            raise ProblemError(f"memory is {memory!r}; it must be whole numbers >= 0")
        room = room.astype(np.int64)
        times = {
            name: _seconds(name, value, n)
            for name, value in (
                ("forward_s", forward_s),
                ("backward_s", backward_s),
                ("head_s", head_s),
            )
        }
        for array in (transfer, room, *times.values()):
            array.setflags(write=False)
        for field, value in (
            ("transfer_s", transfer),
            ("stage_devices", groups),
            *times.items(),
            ("path_stages", int(path_stages)),
            ("memory", room),
            ("microbatches_per_start", int(microbatches_per_start)),
            ("max_swaps", int(max_swaps)),
            ("live_memory", bool(live_memory)),
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
    ) -> PathProblem:
        """The problem of an arrangement: layers cut evenly, compute times by FLOPs.

        ``memory`` defaults to the microbatches that each device's memory holds beside its stage.
        Both directions of a link are averaged, as SkipPipe does.
        """
        cluster.network.require_complete()
        groups = assignment.groups
        split = workload.even_split(len(groups))
        samples = workload.microbatch_samples
        n = len(cluster)
        forward, backward, room = np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.int64)
        head = (1 + BACKWARD_TO_FORWARD) * workload.head.forward_flops * samples / cluster.flops
        for j, group in enumerate(groups):
            load = workload.stage(*split[j])
            parameters = load.parameters + (workload.head.parameters if j == 0 else 0)
            scratch = workload.head.saved_bytes * samples if j == 0 else 0.0
            for d in group:
                forward[d] = load.forward_flops * samples / cluster.flops[d]
                backward[d] = BACKWARD_TO_FORWARD * forward[d]
                left = cluster.memory_bytes[d] - scratch
                left -= parameters * workload.state_bytes_per_parameter
                room[d] = max(0, int(left // (load.saved_bytes * samples)))
        message = max(layer.output_bytes for layer in workload.layers) * samples
        return cls(
            cluster.network.symmetrised().transfer_s(message),
            groups,
            forward,
            backward,
            head,
            path_stages,
            room if memory is None else memory,
            microbatches_per_start,
            max_swaps,
            live_memory,
        )

    def __len__(self) -> int:
        return len(self.transfer_s)

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
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return PathProblem(**{**fields, **changes})


def _seconds(field: str, value: ArrayLike, n: int) -> Floats:
    try:
        array = np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (n,)))
    except (TypeError, ValueError):
        raise ProblemError(
            f"{field} must be one number or {n} of them, found shape {np.shape(value)}"
        ) from None
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ProblemError(
            f"{field} of device {bad[0]} is {array[bad[0]]:g}; it must be >= 0 and finite"
        )
    return array
