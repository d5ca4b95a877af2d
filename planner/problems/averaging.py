"""Averaging problem: contributors, and the shares that peers reduce (DeDLOC)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.problems.error import ProblemError
from planner.problems.quantities import per_item, positive
from planner.utils.text import counted, quantity
from planner.utils.validate import numbers, short_repr

Floats = NDArray[np.float64]

MAX_SPEED = 1e100
"""Speeds above this are input errors, and their sums and products would overflow."""


@dataclass(frozen=True, init=False, eq=False)
class AveragingProblem:
    """Choose contributors and the shares that peers reduce (DeDLOC, 3.2 and Appendix B).

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

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2 and
    Appendix B.
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
        samples = per_item("samples_per_s", samples_per_s, n, "peer")
        upload = per_item("upload_bytes_per_s", upload_bytes_per_s, n, "peer")
        download = per_item("download_bytes_per_s", download_bytes_per_s, n, "peer")
        for name, speeds in (
            ("samples_per_s", samples),
            ("upload_bytes_per_s", upload),
            ("download_bytes_per_s", download),
        ):
            if speeds.max(initial=0.0) > MAX_SPEED:
                raise ProblemError(f"{name} is {speeds.max():g}; it must be at most {MAX_SPEED:g}")
        samples_per_step = positive("batch_size", batch_size)
        vector_bytes = positive("gradient_bytes", gradient_bytes)
        if not isinstance(overlap, (bool, np.bool_)):
            raise ProblemError(f"overlap must be true or false, found {overlap!r}")
        computes = _flags("can_compute", can_compute, n)
        aggregates = _flags("can_aggregate", can_aggregate, n)
        if not (computes & (samples > 0)).any():
            raise ProblemError(
                "no peer can compute: samples_per_s is 0 or can_compute is false for each of "
                f"{n} peers; at least one peer must compute gradients"
            )
        if not aggregates.any():
            raise ProblemError(
                f"no peer can aggregate: can_aggregate is false for each of {n} peers; at least "
                "one peer must accept connections"
            )
        links = None if link_bytes_per_s is None else _links(link_bytes_per_s, n)
        for array in (samples, upload, download, computes, aggregates):
            array.setflags(write=False)
        for field, value in (
            ("samples_per_s", samples),
            ("upload_bytes_per_s", upload),
            ("download_bytes_per_s", download),
            ("batch_size", samples_per_step),
            ("gradient_bytes", vector_bytes),
            ("link_bytes_per_s", links),
            ("can_compute", computes),
            ("can_aggregate", aggregates),
            ("overlap", bool(overlap)),
        ):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.samples_per_s)

    def __repr__(self) -> str:
        return (
            f"AveragingProblem({counted(len(self), 'peer')}, {self.samples_per_s.sum():.4g} "
            "samples/s "
            f"together, batch of {self.batch_size:g}, {quantity(self.gradient_bytes, 'B')})"
        )

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
        """Bytes per second that each peer uploads at the rates r_i: the left side of eq. 2.

        Parameters
        ----------
        rates
            ``float[n]``, r_i in bytes per second.
        computes
            ``bool[n]``, c_i.

        Returns
        -------
        ndarray
            ``float[n]``.
        """
        r, c = self._per_peer(rates, computes)
        used: Floats = c * (r.sum() - r) + (len(self) - 1) * r
        return used

    def download_of(self, rates: ArrayLike, computes: ArrayLike) -> Floats:
        """Bytes per second that each peer downloads at the rates r_i.

        Parameters
        ----------
        rates
            ``float[n]``, r_i in bytes per second.
        computes
            ``bool[n]``, c_i.

        Returns
        -------
        ndarray
            ``float[n]``.
        """
        r, c = self._per_peer(rates, computes)
        used: Floats = (c.sum() - c) * r + (r.sum() - r)
        return used

    def link_of(self, rates: ArrayLike, computes: ArrayLike) -> Floats:
        """``a_ij + g_ij`` in bytes per second; 0 on the diagonal.

        Parameters
        ----------
        rates
            ``float[n]``, r_i in bytes per second.
        computes
            ``bool[n]``, c_i.

        Returns
        -------
        ndarray
            ``float[n, n]``.
        """
        r, c = self._per_peer(rates, computes)
        used: Floats = np.outer(c, r) + r[:, None]
        np.fill_diagonal(used, 0.0)
        return used

    def steps_per_s(self, rates: ArrayLike, computes: ArrayLike) -> float:
        """Steps per second at the rates r_i with the contributors c_i (not checked for limits).

        A single peer does not average, so that only its computing counts.

        Parameters
        ----------
        rates
            ``float[n]``, r_i in bytes per second.
        computes
            ``bool[n]``, c_i.
        """
        r, c = self._per_peer(rates, computes)
        samples = float(self.samples_per_s[c > 0].sum())
        return self.steps_of(samples, np.inf if len(self) == 1 else float(r.sum()))

    def _per_peer(self, rates: ArrayLike, computes: ArrayLike) -> tuple[Floats, Floats]:
        """Rates and contributors as numbers, one a peer."""
        found = []
        for field, values, kind in (
            ("rates", rates, "finite numbers"),
            ("computes", computes, "truth values"),
        ):
            try:
                array = np.asarray(values, dtype=np.float64)
            except (TypeError, ValueError):
                array = np.array(np.nan)
            valid = np.isfinite(array) if field == "rates" else np.isin(array, (0.0, 1.0))
            if array.shape != (len(self),) or not valid.all():
                raise ProblemError(
                    f"{field} must be {len(self)} {kind}, one per peer, found {short_repr(values)}"
                )
            found.append(array)
        return found[0], found[1]

    def steps_of(self, samples_per_s: float, total_rate: float) -> float:
        """Steps per second from ``sum_i s_i c_i`` and R, overlapped or one after the other."""
        if samples_per_s <= 0 or total_rate <= 0:
            return 0.0
        if self.overlap:
            return min(samples_per_s / self.batch_size, total_rate / self.gradient_bytes)
        return 1.0 / (self.batch_size / samples_per_s + self.gradient_bytes / total_rate)

    def replace(self, **changes: Any) -> AveragingProblem:
        """A copy with some fields changed."""
        return replace(self, **changes)

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


def _flags(field: str, value: ArrayLike | None, count: int) -> NDArray[np.bool_]:
    if value is None:
        return np.ones(count, dtype=bool)
    array = np.asarray(value)
    if array.dtype != np.bool_ and not np.isin(array, (0, 1)).all():
        raise ProblemError(
            f"{field} must hold true and false, found {array.dtype} {array.tolist()}"
        )
    if array.shape not in ((), (count,)):
        raise ProblemError(
            f"{field} must be one value or {count} of them, found shape {array.shape}"
        )
    return np.array(np.broadcast_to(array.astype(bool), (count,)))


def _links(value: ArrayLike, count: int) -> Floats:
    try:
        links = numbers(value)
        if links.shape not in ((), (count, count)):
            raise ValueError
        array = np.array(np.broadcast_to(links, (count, count)))
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
