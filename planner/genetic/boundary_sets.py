"""Sets of boundaries of a plan, and chains of sets from all boundaries to none."""

from __future__ import annotations

from collections.abc import Mapping

from planner.genetic.data import AssignmentData

Mask = int
"""Bit j: boundary j is in the set."""

Key = tuple[int, ...]
"""Equivalence class of sets; see `BoundarySets`."""


class BoundarySets:
    """The sets of boundaries up to symmetry.

    A key is the set itself, or, if the order of stages is free, the lengths of its sequences of
    consecutive stages.

    Attributes
    ----------
    keys
        The key of every mask.
    mask_of
        One mask of every key.
    """

    def __init__(self, data: AssignmentData) -> None:
        self.sizes = data.sizes
        self.free_order = data.free_order
        self.boundaries = len(data.sizes) - 1
        self.keys = [self._key(mask) for mask in range(1 << self.boundaries)]
        self.mask_of: dict[Key, Mask] = {}
        for mask, key in enumerate(self.keys):
            self.mask_of.setdefault(key, mask)

    def contains(self, outer: Key, inner: Key) -> bool:
        """Whether a set with key ``outer`` contains one with key ``inner``."""
        if not self.free_order:
            return outer[0] & inner[0] == inner[0]
        return outer != inner and _refines(inner, outer)

    def pairs(self, key: Key) -> int:
        """Number of links over the boundaries of a set."""
        sizes, mask = self.sizes, self.mask_of[key]
        return int(
            sum(min(sizes[j], sizes[j + 1]) for j in range(self.boundaries) if mask >> j & 1)
        )

    def cheapest_chain(self, cost: Mapping[Key, float]) -> tuple[float, list[Key]]:
        """The cheapest chain of sets from all boundaries to none, removing one at a time.

        Its cost is the sum over its non-empty sets (dynamic programming over sets).

        Returns
        -------
        tuple[float, list[Key]]
            The cost of the chain and its keys.
        """
        best: dict[Key, tuple[float, Key | None]] = {self.keys[0]: (0.0, None)}
        for mask in range(1, len(self.keys)):
            key = self.keys[mask]
            if key in best:
                continue
            smaller = (self.keys[mask & ~(1 << j)] for j in range(self.boundaries) if mask >> j & 1)
            rest_cost, after = min((best[k][0], k) for k in smaller)
            best[key] = (cost[key] + rest_cost, after)
        chain: list[Key] = []
        key_at: Key | None = self.keys[-1]
        while key_at is not None and best[key_at][1] is not None:
            chain.append(key_at)
            key_at = best[key_at][1]
        return best[self.keys[-1]][0], chain

    def _key(self, mask: Mask) -> Key:
        if not self.free_order:
            return (mask,)
        runs, length = [], 1
        for j in range(self.boundaries):
            if mask >> j & 1:
                length += 1
            else:
                runs.append(length)
                length = 1
        return tuple(sorted([*runs, length], reverse=True))


def _refines(fine: Key, coarse: Key) -> bool:
    """Whether runs of lengths ``fine`` can be joined to runs of lengths ``coarse``."""
    if not coarse:
        return not fine
    target = coarse[0]

    def pick(start: int, missing: int, candidates: Key) -> bool:
        if missing == 0:
            return _refines(candidates, coarse[1:])
        for i in range(start, len(candidates)):
            repeated = i > start and candidates[i] == candidates[i - 1]
            if (
                not repeated
                and candidates[i] <= missing
                and pick(i, missing - candidates[i], candidates[:i] + candidates[i + 1 :])
            ):
                return True
        return False

    return pick(0, target, fine)
