"""Lower bound on the step of straight pipelines with a given placement, for every order.

As in `planner.planning.step_bound`: T is the end of a step and j the stage of the device whose
update ends then. With one round per stage, all devices of stage j begin their next step at T or
later. Every microbatch passes stage j on its way F0, f0, F1, ..., H, ..., b0, B0 (f and b are the
messages across a boundary), so everything after F of stage j on this way follows T. Devices and
pairs are known here, so each counts with its own speed, and averaging with its group's time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.planning.evaluation import compute_times, stage_averaging
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Shape
from planner.problems.answers import AssignmentPlan
from planner.simulator.averaging_rounds import round_s
from planner.simulator.resources import LinkResources
from planner.training_plan.choices import Codec

Floats = NDArray[np.float64]


def placement_bound_s(problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan) -> float:
    """Seconds that no order of operations beats with this placement."""
    assert assignment.grid is not None
    grid = assignment.grid
    pipelines, stages = grid.shape
    times = compute_times(problem, shape, assignment)
    update_s = np.array(times.update_s)[grid].max(axis=0)
    pipeline_times = _PipelineTimes.of(
        problem, shape, grid, times.forward_s, times.head_s, times.backward_s
    )
    fewest, remainder = divmod(shape.microbatches, pipelines)
    count = np.full(pipelines, fewest)
    count[:remainder] += 1
    # without averaging and updates, stage 0 ends last
    first_alone = pipelines == 1 and not any(times.update_s)
    begins = 1 if first_alone else stages

    def step_s(after_s: Floats, together: bool) -> float:
        least = pipeline_times.after_s(count[:, None], pipeline_times.tail_s(after_s))[:, :begins]
        # if devices of a stage end at different times, any pipeline may end the step
        return float((least.max(axis=0) if together else least.min(axis=0)).min())

    averages_s = _averaging_s(problem, shape, assignment)
    if problem.request.delayed:
        return step_s(update_s, False)
    averaging_step_s = step_s(averages_s + update_s, problem.ends_together)
    return problem.request.sync.mean_s(step_s(update_s, False), averaging_step_s)


def _averaging_s(problem: PlanningProblem, shape: Shape, assignment: AssignmentPlan) -> Floats:
    """Per stage, seconds of its round alone; 0 for several rounds and hierarchical averaging."""
    if not problem.ends_together or shape.pipelines == 1:
        return np.zeros(shape.stages)
    links = LinkResources.of(problem.cluster)
    averaging = stage_averaging(problem, shape, assignment.groups)
    codec = Codec(problem.request.codec)
    # tied parameters are averaged afterwards, in a round that is not counted
    stages = averaging[: shape.stages]
    return np.array([round_s(rounds[0][0], vector, links, codec) for rounds, vector in stages])


class _PipelineTimes:
    """Operations and messages of a microbatch in each pipeline, with their durations."""

    def __init__(self, forward: Floats, head: Floats, backward: Floats, hops: Floats) -> None:
        # hops: [there or back, busy or latency as well, pipelines, boundaries]
        self.forward, self.head, self.backward = forward, head, backward
        self.there, self.back = hops
        # per pipeline, from F of a stage to the last stage and back through B of that stage
        legs = forward + backward
        legs[:, :-1] += self.there[1] + self.back[1]
        self.onward = np.cumsum(legs[:, ::-1], axis=1)[:, ::-1] + head[:, -1:]

    @classmethod
    def of(
        cls,
        problem: PlanningProblem,
        shape: Shape,
        grid: NDArray[np.int64],
        forward_s: tuple[float, ...],
        head_s: tuple[float, ...],
        backward_s: tuple[float, ...],
    ) -> _PipelineTimes:
        """With the devices' compute times and the pairs' latency and bandwidth."""
        network = problem.cluster.limited_network()
        head = np.zeros(grid.shape)
        head_stage = shape.head_stage
        head[:, head_stage] = np.array(head_s)[grid[:, head_stage]]
        sent = np.array([c.output_bytes for c in shape.costs(problem.workload)[:-1]])
        senders, receivers = grid[:, :-1], grid[:, 1:]
        hops = []
        for u, v in ((senders, receivers), (receivers, senders)):
            busy = sent / network.bandwidth_table[u, v]
            hops.append([busy, busy + network.latency_table[u, v]])
        return cls(np.array(forward_s)[grid], head, np.array(backward_s)[grid], np.array(hops))

    def after_s(self, count: NDArray[np.int64], tail: Floats) -> Floats:
        """``float[pipelines, stages]``: from T to the end of the last stage, if that stage starts
        at T.

        ``count`` is a column of microbatches, ``tail`` the result of `tail_s`. Some operation or
        message is the bottleneck: before it comes the way of the first microbatch, then all
        microbatches one after the other, then the way of the last one to some stage's B, and what
        follows the last B of that stage.
        """
        busy, whole = self.there
        legs = self.forward.copy()
        legs[:, :-1] += whole
        passed = np.cumsum(legs, axis=1)
        begin = passed - legs
        through_stage = begin + count * (self.forward + self.head + self.backward) + tail
        through_link = count * busy + (whole - busy) + self.onward[:, 1:] + tail[:, 1:]
        through_stage[:, :-1] = np.maximum(
            through_stage[:, :-1], begin[:, :-1] + self.forward[:, :-1] + through_link
        )

        # a head on the first stage runs when the microbatch has returned
        busy, whole = self.back
        legs = self.backward.copy()
        legs[:, 1:] += whole
        turned_s = passed[:, -1:] + self.head[:, -1:]
        return_begin = turned_s + np.cumsum(legs[:, ::-1], axis=1)[:, ::-1] - legs
        through_return = (return_begin + count * self.backward + tail).max(axis=1)
        through_return_link = (
            return_begin[:, 1:] + self.backward[:, 1:] + count * busy + (whole - busy)
        )
        through_return_link += self.backward[:, :-1] + tail[:, :-1]
        through_return = np.maximum(through_return, through_return_link.max(axis=1, initial=0.0))

        latest = np.maximum.accumulate(through_stage[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(np.maximum(latest, through_return[:, None]) - begin)

    def tail_s(self, after_s: Floats) -> Floats:
        """``float[pipelines, stages]``: from B of a stage on, the most until a stage has ended."""
        tail = np.empty(self.forward.shape)
        tail[:, 0] = after_s[0]
        for m in range(1, self.forward.shape[1]):
            back_s = self.back[1, :, m - 1] + self.backward[:, m - 1]
            tail[:, m] = np.maximum(after_s[m], back_s + tail[:, m - 1])
        return tail
