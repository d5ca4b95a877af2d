"""This process among all of a plan, and the store through which they meet.

Only before the first step and after the last one: within steps ranks wait for messages alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """One rank of many.

    Attributes
    ----------
    rank
        This process: the device's index in the plan.
    world
        How many there are.
    store
        Shared by all.
    """

    rank: int
    world: int
    store: Store

    def share(self, name: str, text: str) -> list[str]:
        """What every rank gave, in order of ranks; waits for all.

        Parameters
        ----------
        name
            The same on all ranks, used once.
        text
            Of this rank.

        Returns
        -------
        list[str]
            One text a rank.
        """
        self.store.set(f"{name}/{self.rank}", text)
        keys = [f"{name}/{r}" for r in range(self.world)]
        self.store.wait(keys, TIMEOUT)
        return [value.decode() for value in self.store.multi_get(keys)]

    def meet(self, name: str) -> None:
        """Wait for all ranks.

        Parameters
        ----------
        name
            The same on all ranks, used once.
        """
        if self.store.add(f"{name}/count", 1) == self.world:
            self.store.set(f"{name}/all", "")
        self.store.wait([f"{name}/all"], TIMEOUT)

    def part(self) -> None:
        """Wait for all ranks for the last time; the store's own process leaves last."""
        self.meet("parting")
        if self.store.add("parted", 1) == self.world:
            self.store.set("parted/all", "")
        if self.rank == 0:
            self.store.wait(["parted/all"], TIMEOUT)
