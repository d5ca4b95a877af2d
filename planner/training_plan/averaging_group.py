"""Averaging groups and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.network.dtype import Dtype
from planner.training_plan import coercion
from planner.training_plan.choices import Codec, Phase
from planner.training_plan.error import PlanError
from planner.utils.text import counted
from planner.utils.validate import choice, real, sequence

WHOLE = (0.0, 1.0)
"""The slice of the whole vector."""


@dataclass(frozen=True)
class AveragingGroup:
    """Devices that average together (DeDLOC, 3.2).

    Attributes
    ----------
    shares
        Per member, the fraction of the vector that it reduces; they sum to 1 (eq. 6).
    contributes
        Per member, c_k: whether it contributes its gradients.
    receives
        Per member, whether it receives the result. All that hold the stage do; an aggregator does
        not. Empty if all do.
    slice
        ``(start, stop)``, fractions: the part of the vector that the group averages, and to which
        its shares refer.
    phase
        Part of an averaging that the round performs. Hierarchical averaging has one round each of
        groups that reduce, exchange and spread. With optimizer state in shards, what is spread are
        parameters that the members have updated. In two-frequency averaging, groups average
        gradients `within` in every step; what is exchanged and spread are changes of parameters.
    dtype
        Format of parameters that are spread, where devices use no other; None for the format of
        averaged gradients.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2.
    """

    members: tuple[int, ...]
    shares: tuple[float, ...]
    contributes: tuple[bool, ...]
    receives: tuple[bool, ...] = ()
    slice: tuple[float, float] = WHOLE
    phase: Phase = Phase.ALL
    dtype: Dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", coercion.numbers("members", self.members))
        if not self.members:
            raise PlanError("members must hold a device at least, found none; leave the group out")
        shares = sequence("shares", self.shares, error=PlanError)
        shares = tuple(real("a share of an averaging group", x, 0, error=PlanError) for x in shares)
        object.__setattr__(self, "shares", shares)
        for name in ("contributes", "receives"):
            object.__setattr__(self, name, coercion.flags(name, getattr(self, name)))
        if not self.receives:
            object.__setattr__(self, "receives", (True,) * len(self.members))
        cut = sequence("slice", self.slice, error=PlanError)
        ends = tuple(real("an end of a slice", end, 0, error=PlanError) for end in cut)
        if len(ends) != 2 or not ends[0] < ends[1] <= 1:
            raise PlanError(
                f"slice: must be start < stop, fractions of the vector, found {list(ends)}; give "
                "two numbers from 0 to 1"
            )
        object.__setattr__(self, "slice", ends)
        object.__setattr__(self, "phase", choice(Phase, "phase", self.phase, error=PlanError))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", choice(Dtype, "dtype", self.dtype, error=PlanError))

    def __repr__(self) -> str:
        return f"AveragingGroup({counted(len(self.members), 'member')}, {self.phase})"

    @property
    def aggregators(self) -> tuple[int, ...]:
        """Members that reduce but do not hold the stage."""
        flags = zip(self.members, self.receives, strict=False)
        return tuple(d for d, gets in flags if not gets)

    @property
    def sends_contributions(self) -> tuple[bool, ...]:
        """Per member, whether it sends others the shares that they reduce."""
        return self.contributes if self.phase is not Phase.SPREAD else (False,) * len(self.members)

    @property
    def receives_sums(self) -> tuple[bool, ...]:
        """Per member, whether it receives the reduced shares of others."""
        return self.receives if self.phase is not Phase.REDUCE else (False,) * len(self.members)

    @property
    def width(self) -> float:
        """The fraction of the vector that the group averages."""
        return self.slice[1] - self.slice[0]

    def codec(self, codec: Codec) -> Codec:
        """The encoding of its messages, in a plan with this codec.

        Sums within a site are sent unencoded; what a site receives is bit for bit what others
        receive.
        """
        return codec if self.phase in (Phase.ALL, Phase.EXCHANGE) else Codec.NONE

    def wire_ratio(self, codec: Codec) -> float:
        """Bytes of its messages over those of the vectors, in a plan with this codec."""
        if self.dtype is not None:
            return self.dtype.bytes / Dtype.FP32.bytes
        return self.codec(codec).wire_ratio

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; defaults (all receive, whole slice, phase) are omitted."""
        data: dict[str, Any] = {
            name: list(getattr(self, name)) for name in ("members", "shares", "contributes")
        }
        if not all(self.receives):
            data["receives"] = list(self.receives)
        if self.slice != WHOLE:
            data["slice"] = list(self.slice)
        if self.phase is not Phase.ALL:
            data["phase"] = self.phase
        if self.dtype is not None:
            data["dtype"] = self.dtype
        return data

    @classmethod
    def equal(cls, members: tuple[int, ...]) -> AveragingGroup:
        """All members contribute and reduce equal shares."""
        if not members:
            raise PlanError("an averaging group has no members; give at least one")
        n = len(members)
        return cls(members, (1.0 / n,) * n, (True,) * n)


StageAveraging = tuple[tuple[AveragingGroup, ...], ...]
"""Consecutive rounds of groups of one stage."""


def has_phases(rounds: Sequence[Sequence[AveragingGroup]]) -> bool:
    """Whether a stage's rounds are phases of one averaging."""
    return any(group.phase is not Phase.ALL for groups in rounds for group in groups)


def is_hierarchical(rounds: Sequence[Sequence[AveragingGroup]]) -> bool:
    """Whether a stage averages within sites or regions, and between them."""
    return any(group.phase is Phase.EXCHANGE for groups in rounds for group in groups)


def within(rounds: Sequence[Sequence[AveragingGroup]]) -> StageAveraging:
    """Rounds of a stage that average gradients in every step."""
    return tuple(tuple(groups) for groups in rounds if groups and groups[0].phase is Phase.WITHIN)
