"""A path problem as arrays for compiled code, and which visits per stage are possible at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.problems import PathProblem
from planner.search.arrays import Floats, Ints


@dataclass(frozen=True)
class PathArrays:
    """The numbers of a problem.

    Attributes
    ----------
    link
        Seconds for which a message keeps its link busy; 0 x 0 where links do not queue.
    members, first
        Devices stage by stage; those of stage s are ``members[first[s]:first[s + 1]]``.
    room
        Most paths through a device (TC1); with live memory all of them, or none without memory.
    memory
        Most live microbatches per device; more than there are without live memory.
    fewest, most
        Visits per stage that CC3 and TC1 allow; stage 0 counts every microbatch.
    max_total_swaps
        Swaps that all paths may have together; without a limit, all that ``max_swaps`` allows.
    """

    hop: Floats
    link: Floats
    forward: Floats
    backward: Floats
    head: Floats
    stage: Ints
    members: Ints
    first: Ints
    starts: Ints
    room: Ints
    memory: Ints
    fewest: Ints
    most: Ints
    path_stages: int
    max_swaps: int
    max_total_swaps: int

    @property
    def microbatches(self) -> int:
        """Number of paths."""
        return len(self.starts)

    @property
    def queueing(self) -> bool:
        """Whether links carry one message at a time."""
        return len(self.link) > 0

    @property
    def steps(self) -> int:
        """Operations per microbatch: F on every device, H, B on every device."""
        return 2 * self.path_stages + 1

    @classmethod
    def of(cls, problem: PathProblem) -> PathArrays:
        """Arrays of a problem."""
        starts = np.array(problem.starts, dtype=np.int64)
        count = len(starts)
        groups = problem.stage_devices
        if problem.live_memory:
            room = np.where(problem.memory > 0, count, 0).astype(np.int64)
            memory = np.minimum(problem.memory, count)
        else:
            room = np.minimum(problem.memory, count)
            memory = np.full(len(problem), count, dtype=np.int64)
        low, high = problem.visits
        fewest = np.full(len(groups), low, dtype=np.int64)
        most = np.array([min(high, int(room[list(g)].sum())) for g in groups], dtype=np.int64)
        fewest[0] = most[0] = count
        link = np.zeros((0, 0)) if problem.link_s is None else problem.link_s
        # compiled code is compiled for one kind of array
        link.setflags(write=False)
        cap = problem.max_total_swaps
        swaps = problem.max_swaps if cap is None else min(cap, problem.max_swaps)
        return cls(
            problem.transfer_s,
            link,
            problem.forward_s,
            problem.backward_s,
            problem.head_s,
            np.array(problem.stage_of, dtype=np.int64),
            np.array([d for g in groups for d in g], dtype=np.int64),
            np.cumsum([0, *(len(g) for g in groups)]).astype(np.int64),
            starts,
            room,
            memory.astype(np.int64),
            fewest,
            most,
            problem.path_stages,
            swaps,
            count * swaps if cap is None else min(cap, count * swaps),
        )

    def with_vacancies(self, extra: int) -> PathArrays:
        """The same with ``extra`` more places in every stage but the first, nobody in them."""
        stages = len(self.fewest)
        stage = np.concatenate([self.stage, np.repeat(np.arange(1, stages), extra)])
        more = len(stage) - len(self.stage)
        members = np.argsort(stage, kind="stable")
        first = np.searchsorted(stage[members], np.arange(stages + 1))
        # places keep the order of a stage's devices, vacancies behind them
        for s in range(stages):
            group = self.members[self.first[s] : self.first[s + 1]]
            members[first[s] : first[s] + len(group)] = group
        return replace(
            self,
            hop=np.pad(self.hop, (0, more)),
            link=np.pad(self.link, (0, more if self.queueing else 0)),
            forward=np.pad(self.forward, (0, more)),
            backward=np.pad(self.backward, (0, more)),
            head=np.pad(self.head, (0, more)),
            stage=stage,
            members=members,
            first=first,
            room=np.pad(self.room, (0, more)),
            memory=np.pad(self.memory, (0, more)),
        )

    def impossible(self) -> str | None:
        """Why no paths exist (CC3 with TC1), or None; exact.

        Visits per stage that add up to all visits, none above the number of microbatches, can
        always be dealt out with every path visiting a stage once, and stages in ascending order
        satisfy CC2. With live memory one microbatch after the other satisfies TC1.
        """
        for d in dict.fromkeys(self.starts.tolist()):
            needed = int((self.starts == d).sum())
            if self.room[d] < needed:
                return f"device {d} starts {needed} microbatches, its memory allows {self.room[d]}"
        for s in range(1, len(self.first) - 1):
            if self.most[s] < self.fewest[s]:
                return (
                    f"stage {s} must be visited {self.fewest[s]} times, its memory allows "
                    f"{self.most[s]}"
                )
        visits = self.microbatches * (self.path_stages - 1)
        if self.most[1:].sum() < visits:
            return f"{visits} visits are needed, memory allows {self.most[1:].sum()}"
        return None

    def shares(self) -> Ints:
        """Visits per stage, those with more memory to spare first in line for the odd ones."""
        share = self.fewest.copy()
        left = self.microbatches * (self.path_stages - 1) - int(share[1:].sum())
        spare = [
            int(self.room[self.members[self.first[s] : self.first[s + 1]]].sum())
            for s in range(len(share))
        ]
        for s in sorted(range(1, len(share)), key=lambda s: (-spare[s], s)):
            if left > 0 and share[s] < self.most[s]:
                share[s] += 1
                left -= 1
        return share
