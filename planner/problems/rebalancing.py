"""Rebalancing problem: moves of peers between stages on a known trace (SWARM)."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        work, speeds = _real("work_s", work_s).ravel(), _real("speed", speed).ravel()
        times, draws = _real("time_s", time_s).ravel(), _real("leaves", leaves)
        if draws.size % 2:
            raise ProblemError(f"leaves must have two draws a row, found {draws.shape}; correct it")
        arrays: dict[str, Floats | Ints] = {
            "work_s": work,
            "speed": speeds,
            "time_s": times,
            "leaves": draws.reshape(-1, 2),
            "serving": _whole("serving", serving),
            "kind": _whole("kind", kind).ravel(),
            "change": _whole("change", change).ravel(),
            "enters": _whole("enters", enters).ravel(),
        }
        for name, array in arrays.items():
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "end_s", positive("end_s", end_s))
        self._validate_stages()
        self._validate_events()
        object.__setattr__(
            self, "download_s", real("download_s", download_s, 0.0, error=ProblemError)
        )

    def _validate_stages(self) -> None:
        if not (np.all(self.work_s > 0) and np.all(self.speed > 0)) or not (
            self.work_s.size and self.speed.size
        ):
            raise ProblemError(
                "work_s and speed must be above 0, one or more of each; correct them"
            )
        shape = len(self.work_s), len(self.speed)
        if self.serving.shape != shape or np.any(self.serving < 0):
            raise ProblemError(
                f"serving must have {shape[0]} x {shape[1]} counts >= 0, found "
                f"{self.serving.shape}; give a row a stage and a column a kind"
            )

    def _validate_events(self) -> None:
        """Events in order, of known kinds, with a stage or draws for each peer that comes or goes.

        No more peers may go than there are.
        """
        stages, kinds = len(self.work_s), len(self.speed)
        if not len(self.time_s) == len(self.kind) == len(self.change):
            raise ProblemError("time_s, kind and change differ in length; give one each an event")
        if np.any(np.diff(self.time_s, prepend=0.0) < 0) or (
            self.time_s.max(initial=0.0) > self.end_s
        ):
            raise ProblemError("time_s must ascend from 0 to end_s; sort the events")
        if np.any((self.kind < 0) | (self.kind >= kinds)):
            raise ProblemError(f"kind must be 0 to {kinds - 1}; correct the events")
        joins = int(np.maximum(self.change, 0).sum())
        leaves = int(np.maximum(-self.change, 0).sum())
        if len(self.enters) != joins or len(self.leaves) != leaves:
            raise ProblemError(
                f"{joins} peers come and {leaves} go, found {len(self.enters)} stages in enters "
                f"and {len(self.leaves)} draws in leaves; give one each"
            )
        if np.any((self.enters < 0) | (self.enters >= stages)):
            raise ProblemError(f"enters must be 0 to {stages - 1}; correct the stages")
        if np.any((self.leaves < 0) | (self.leaves >= 1)):
            raise ProblemError("leaves must be draws in [0, 1); correct them")
        peers = self.serving.sum(axis=0)
        for k, change in zip(self.kind.tolist(), self.change.tolist(), strict=True):
            peers[k] += change
            if peers[k] < 0:
                raise ProblemError(f"more peers of kind {k} go than there are; correct change")

    def replace(self, **changes: Any) -> RebalancingProblem:
        """A copy with some of the constructor's fields changed."""
        return replace(self, **changes)


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
