"""Rebalancing problem: moves of peers between stages on a known trace (SWARM)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.problems.error import ProblemError
from planner.problems.quantities import positive
from planner.utils.validate import numbers, real

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_NUMBER = 1e9
"""Most peers, and greatest value of other whole numbers."""


class TimedMove(NamedTuple):
    """Serving peers of one kind leave a stage and download the state of another."""

    time_s: float
    source: int
    target: int
    kind: int
    number: int


@dataclass(frozen=True)
class RebalancingPlan:
    """All moves, sorted by time.

    Attributes
    ----------
    moves
        Moves at the same time are in the order in which they are applied.
    """

    moves: tuple[TimedMove, ...]


@dataclass(frozen=True, init=False, eq=False)
class RebalancingProblem:
    """Peers of K kinds serve S stages; the slowest stage determines the pipeline's rate.

    A stage with n_k peers of kind k processes ``sum_k n_k speed_k / work_s`` microbatches per
    second. Peers join and leave at known times; a peer that joins or moves downloads the stage's
    state for `download_s` before it serves. At equal times downloads end first, then events happen,
    then peers move.

    Leaving peers are drawn in advance, independently of the moves: with draws (a, b), stage
    ``floor(a S)`` loses a peer, or the next stage (cyclically) that has one of that kind. Of its n
    peers of the kind, serving ones first and then downloading ones in the order of their begin,
    the one with index ``floor(b n)`` leaves.

    Parameters
    ----------
    work_s
        ``float[S]``: seconds of a microbatch on a peer of speed 1.
    speed
        ``float[K]``: speed of each kind.
    serving
        ``int[S, K]``: initial number of peers.
    time_s
        ``float[E]``: times of events, ascending, above 0.
    kind, change
        ``int[E]``: kind, and number of peers that join (above 0) or leave (below 0).
    enters
        ``int[A]``: stages of the joining peers, in order.
    leaves
        ``float[B, 2]`` in [0, 1): draws of the leaving peers, in order.
    download_s
        Seconds of a download.
    end_s
        End of the trace, in seconds.

    References
    ----------
    M. Ryabinin et al., "SWARM Parallelism: Training Large Models Can Be Surprisingly
    Communication-Efficient" (2023), 4.4 and Appendix I.
    """

    work_s: Floats
    speed: Floats
    serving: Ints
    time_s: Floats
    kind: Ints
    change: Ints
    enters: Ints
    leaves: Floats
    download_s: float
    end_s: float

    def __init__(
        self,
        work_s: ArrayLike,
        speed: ArrayLike,
        serving: ArrayLike,
        time_s: ArrayLike,
        kind: ArrayLike,
        change: ArrayLike,
        enters: ArrayLike,
        leaves: ArrayLike,
        download_s: float,
        end_s: float,
    ) -> None:
        work, counts = _real("work_s", work_s).ravel(), _real("speed", speed).ravel()
        times = _real("time_s", time_s).ravel()
        draws = _real("leaves", leaves)
        if draws.size % 2:
            raise ProblemError(f"leaves must have two draws a row, found {draws.shape}; correct it")
        draws = draws.reshape(-1, 2)
        all_counts = {
            "serving": _whole("serving", serving),
            "kind": _whole("kind", kind).ravel(),
            "change": _whole("change", change).ravel(),
            "enters": _whole("enters", enters).ravel(),
        }
        end = positive("end_s", end_s)
        if not (np.all(work > 0) and np.all(counts > 0) and work.size and counts.size):
            raise ProblemError(
                "work_s and speed must be above 0, one or more of each; correct them"
            )
        if all_counts["serving"].shape != (len(work), len(counts)) or np.any(
            all_counts["serving"] < 0
        ):
            raise ProblemError(
                f"serving must have {len(work)} x {len(counts)} counts >= 0, found "
                f"{all_counts['serving'].shape}; give a row a stage and a column a kind"
            )
        if not len(times) == len(all_counts["kind"]) == len(all_counts["change"]):
            raise ProblemError("time_s, kind and change differ in length; give one each an event")
        if np.any(np.diff(times, prepend=0.0) < 0) or times.max(initial=0.0) > end:
            raise ProblemError("time_s must ascend from 0 to end_s; sort the events")
        if np.any((all_counts["kind"] < 0) | (all_counts["kind"] >= len(counts))):
            raise ProblemError(f"kind must be 0 to {len(counts) - 1}; correct the events")
        come = int(np.maximum(all_counts["change"], 0).sum())
        go = int(np.maximum(-all_counts["change"], 0).sum())
        if len(all_counts["enters"]) != come or len(draws) != go:
            raise ProblemError(
                f"{come} peers come and {go} go, found {len(all_counts['enters'])} stages in "
                f"enters and {len(draws)} draws in leaves; give one each"
            )
        if np.any((all_counts["enters"] < 0) | (all_counts["enters"] >= len(work))):
            raise ProblemError(f"enters must be 0 to {len(work) - 1}; correct the stages")
        if np.any((draws < 0) | (draws >= 1)):
            raise ProblemError("leaves must be draws in [0, 1); correct them")
        there = all_counts["serving"].sum(axis=0)
        for k, by in zip(all_counts["kind"].tolist(), all_counts["change"].tolist(), strict=True):
            there[k] += by
            if there[k] < 0:
                raise ProblemError(f"more peers of kind {k} go than there are; correct change")
        down_s = real("download_s", download_s, 0.0, error=ProblemError)
        for name, value in (
            ("work_s", work),
            ("speed", counts),
            ("time_s", times),
            ("leaves", draws),
            *all_counts.items(),
        ):
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "download_s", down_s)
        object.__setattr__(self, "end_s", end)

    def replace(self, **changes: Any) -> RebalancingProblem:
        """A copy with some of the constructor's fields changed."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return RebalancingProblem(**{**values, **changes})


def _real(name: str, values: ArrayLike) -> Floats:
    try:
        array = numbers(values)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if not np.isfinite(array).all():
        raise ProblemError(f"{name} must be finite numbers; correct them")
    return array


def _whole(name: str, values: ArrayLike) -> Ints:
    array = _real(name, values)
    if np.any(array != np.round(array)) or np.any(np.abs(array) > MAX_NUMBER):
        raise ProblemError(
            f"{name} must be whole numbers, at most {MAX_NUMBER:g} in size; correct them"
        )
    return np.array(array, dtype=np.int64)
