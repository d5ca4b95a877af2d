"""A path problem as arrays for compiled code, and the feasible numbers of visits per stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.problems import PathProblem
from planner.search.arrays import Floats, Ints


@dataclass(frozen=True)
class PathArrays:
    """Arrays of a path problem. Durations in seconds; one entry per device unless stated.

    Attributes
    ----------
    transfer
        Seconds of a message between two devices.
    link
        Seconds for which a message keeps its link busy; 0 x 0 where links do not queue.
    members, stage_ptr
        Devices stage by stage; those of stage s are ``members[stage_ptr[s]:stage_ptr[s + 1]]``.
    capacity
        Maximum number of paths through a device (TC1); with live memory all of them, or 0 without
        memory.
    memory
        Maximum number of live microbatches per device; not binding without live memory.
    min_visits, max_visits
        Visits per stage that CC3 and TC1 allow; every microbatch visits stage 0.
    max_total_swaps
        Limit on the swaps of all paths together; without one, the total that ``max_swaps`` allows.
    """

    transfer: Floats
    link: Floats
    forward: Floats
    backward: Floats
    head: Floats
    stage: Ints
    members: Ints
    stage_ptr: Ints
    starts: Ints
    capacity: Ints
    memory: Ints
    min_visits: Ints
    max_visits: Ints
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
            capacity = np.where(problem.memory > 0, count, 0).astype(np.int64)
            memory = np.minimum(problem.memory, count)
        else:
            capacity = np.minimum(problem.memory, count)
            memory = np.full(len(problem), count, dtype=np.int64)
        fewest, most = problem.visits
        min_visits = np.full(len(groups), fewest, dtype=np.int64)
        max_visits = np.array(
            [min(most, int(capacity[list(g)].sum())) for g in groups], dtype=np.int64
        )
        min_visits[0] = max_visits[0] = count
        link = np.zeros((0, 0)) if problem.link_s is None else problem.link_s
        # kernels are compiled for read-only arrays, as the problem's arrays are
        link.setflags(write=False)
        max_total_swaps = problem.max_total_swaps
        swaps = (
            problem.max_swaps
            if max_total_swaps is None
            else min(max_total_swaps, problem.max_swaps)
        )
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
            capacity,
            memory.astype(np.int64),
            min_visits,
            max_visits,
            problem.path_stages,
            swaps,
            count * swaps if max_total_swaps is None else min(max_total_swaps, count * swaps),
        )

    def with_vacancies(self, extra: int) -> PathArrays:
        """Arrays with ``extra`` vacant roles added to every stage but the first."""
        stages = len(self.min_visits)
        stage = np.concatenate([self.stage, np.repeat(np.arange(1, stages), extra)])
        num_added = len(stage) - len(self.stage)
        members = np.argsort(stage, kind="stable")
        stage_ptr = np.searchsorted(stage[members], np.arange(stages + 1))
        # roles keep the order of a stage's devices, vacant ones last
        for s in range(stages):
            group = self.members[self.stage_ptr[s] : self.stage_ptr[s + 1]]
            members[stage_ptr[s] : stage_ptr[s] + len(group)] = group
        return replace(
            self,
            transfer=np.pad(self.transfer, (0, num_added)),
            link=np.pad(self.link, (0, num_added if self.queueing else 0)),
            forward=np.pad(self.forward, (0, num_added)),
            backward=np.pad(self.backward, (0, num_added)),
            head=np.pad(self.head, (0, num_added)),
            stage=stage,
            members=members,
            stage_ptr=stage_ptr,
            capacity=np.pad(self.capacity, (0, num_added)),
            memory=np.pad(self.memory, (0, num_added)),
        )

    def infeasibility(self) -> str | None:
        """Why no paths exist (CC3 with TC1), or None; exact.

        Visits per stage that add up to all visits, none above the number of microbatches, can
        always be distributed so that every path visits a stage at most once, and ascending stages
        satisfy CC2. With live memory, running one microbatch at a time satisfies TC1.
        """
        for d in dict.fromkeys(self.starts.tolist()):
            needed = int((self.starts == d).sum())
            if self.capacity[d] < needed:
                return (
                    f"device {d} starts {needed} microbatches, its memory allows {self.capacity[d]}"
                )
        for s in range(1, len(self.stage_ptr) - 1):
            if self.max_visits[s] < self.min_visits[s]:
                return (
                    f"stage {s} must be visited {self.min_visits[s]} times, its memory allows "
                    f"{self.max_visits[s]}"
                )
        visits = self.microbatches * (self.path_stages - 1)
        if self.max_visits[1:].sum() < visits:
            return f"{visits} visits are needed, memory allows {self.max_visits[1:].sum()}"
        return None

    def visits_per_stage(self) -> Ints:
        """Visits per stage; stages with more spare memory get the remainder."""
        visits = self.min_visits.copy()
        visits_left = self.microbatches * (self.path_stages - 1) - int(visits[1:].sum())
        spare = [
            int(self.capacity[self.members[self.stage_ptr[s] : self.stage_ptr[s + 1]]].sum())
            for s in range(len(visits))
        ]
        for s in sorted(range(1, len(visits)), key=lambda s: (-spare[s], s)):
            if visits_left > 0 and visits[s] < self.max_visits[s]:
                visits[s] += 1
                visits_left -= 1
        return visits
