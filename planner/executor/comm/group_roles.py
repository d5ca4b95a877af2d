"""Roles of the members of a round, and the elements that each of them reduces."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase
from planner.training_plan.shares import Range, share_ranges, slice_ranges


class GroupRoles(NamedTuple):
    """Roles of one member; members are numbered within the group.

    Attributes
    ----------
    contributors
        Other members that contribute to its share, in order of summation.
    receivers
        Other members that receive the sum of its share.
    reducers
        Other members whose sums it receives.
    contributes
        Whether it contributes to the shares of others.
    """

    me: int
    others: list[int]
    contributors: list[int]
    receivers: list[int]
    reducers: list[int]
    contributes: bool

    @classmethod
    def from_group(cls, group: AveragingGroup, rank: int) -> GroupRoles:
        """Roles of a rank in its group."""
        n, me = len(group.members), group.members.index(rank)
        # start with the next member, so that not all send to the same one first
        others = [(me + step) % n for step in range(1, n)]
        return cls(
            me,
            others,
            [k for k in sorted(others) if group.sends_contributions[k]],
            [k for k in others if group.receives_sums[k]],
            others if group.receives_sums[me] else [],
            group.sends_contributions[me],
        )


def member_ranges(group: AveragingGroup, length: int) -> list[Range]:
    """Elements of a vector that each member reduces, or holds."""
    if group.phase is Phase.ALL:
        return share_ranges(length, group.shares)
    return slice_ranges(length, group.slice, group.shares)


def chunk_ranges(part: Range, count: int) -> list[Range]:
    """A slice in ``count`` nearly equal pieces."""
    start, stop = part
    ends = [start + (stop - start) * c // count for c in range(count + 1)]
    return list(pairwise(ends))
