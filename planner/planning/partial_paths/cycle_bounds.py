"""Lower bound on the mean step of plans with skipped stages and given stage sizes.

It holds in the simulator for every placement, every choice of paths and every order of operations
within the devices' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.planning.averaging.averaging_bound import AveragingBound
from planner.problems import ArrangedPathProblem
from planner.problems.stage_costs import DeviceStageCosts
from planner.workload.workload import Workload

Floats = NDArray[np.float64]


def cycle_bound_s(
    cluster: Cluster,
    workload: Workload,
    stage_sizes: Sequence[int],
    microbatches_per_start: int,
    path_stages: Sequence[int],
    averaging: AveragingBound,
    layers: Sequence[tuple[int, int]],
    recompute: Sequence[int] = (),
) -> float:
    """Seconds of a mean step that no placement beats; compute times follow from FLOPs.

    Let T be the end of the last step of a cycle; all devices of one stage begin the next cycle
    together then. If that is stage 0, the whole cycle follows. Otherwise the first step that visits
    that stage is only sure to follow from there on, but from the end of that step stage 0 continues
    with the others.
    """
    least = {
        k: _Least.of(
            _problem(cluster, workload, stage_sizes, k, microbatches_per_start, layers, recompute)
        )
        for k in set(path_stages)
    }
    steps = [least[k] for k in path_stages]
    bounds = [_in_turn_s(steps, averaging)]
    for j, size in enumerate(stage_sizes):
        if j == 0 or size == 1:
            continue  # a stage of one device does not average, so stage 0 ends after it
        visited = [t for t, step in enumerate(steps) if step.from_stage_s[j] is not None]
        if not visited:
            # stage 0 may be several steps ahead, but both stages average
            bounds.append(len(steps) * float(averaging.stage_s[[0, j]].min()))
            continue
        first = visited[0]
        begun = min(steps[first].work_s[0], steps[first].from_stage_s[j] or 0.0)
        begun += float(averaging.stage_s[0])
        bounds.append(begun + _in_turn_s(steps[first + 1 :], averaging))
    return min(bounds) / len(steps)


class _Least(NamedTuple):
    """Lower bounds on a step without averaging.

    Attributes
    ----------
    work_s
        ``float[stages]``: of stage 0, from its start to its last backward; of the others, the
        work of the device with most visits.
    from_stage_s
        To the last backward of stage 0 from the start of stage j; None if no path need visit it.
    """

    work_s: Floats
    from_stage_s: list[float | None]

    @classmethod
    def of(cls, problem: ArrangedPathProblem) -> _Least:
        from planner.mapf.arranged_bounds import arranged_bound_s

        work = _stage_work_s(problem)
        # a start device's F comes before another stage's work, and B after it
        first_stage_s = float(problem.forward_s[0].min() + problem.backward_s[0].min())
        longest_s = (
            float(work.max()) + first_stage_s + 2 * _least_hop_s(problem) if work.any() else 0.0
        )
        work[0] = max(arranged_bound_s(problem), longest_s)
        return cls(work, [None, *_later_stages_s(problem)])


def _in_turn_s(steps: Sequence[_Least], averaging: AveragingBound) -> float:
    """Steps from the moment at which stage 0 begins the first: each stage does them in turn.

    Each step of a stage takes its work and its averaging, in which every device takes part.
    """
    work = sum((step.work_s for step in steps), np.zeros(len(averaging.stage_s)))
    devices = work[:, None] + len(steps) * averaging.device_s
    stages = work + len(steps) * averaging.stage_s
    return float(max(devices.min(axis=0).max(), stages.max()))


def _visits(problem: ArrangedPathProblem) -> int:
    """Visits of every stage but the first: at least the mean, rounded down (CC3)."""
    count = problem.stage_sizes[0] * problem.microbatches_per_start
    return count * (problem.path_stages - 1) // max(len(problem.stage_sizes) - 1, 1)


def _least_hop_s(problem: ArrangedPathProblem) -> float:
    off = ~np.eye(len(problem), dtype=bool)
    return float(problem.transfer_s[off].min(initial=np.inf))


def _stage_work_s(problem: ArrangedPathProblem) -> Floats:
    """F and B of the visits that some device of each stage but the first must take."""
    busy = (problem.forward_s + problem.backward_s).min(axis=1)
    visits = [-(-_visits(problem) // size) for size in problem.stage_sizes]
    return np.asarray(busy * [0, *visits[1:]])


def _later_stages_s(problem: ArrangedPathProblem) -> list[float | None]:
    """If the devices of stage 1, 2, ... begin together; None without a certain visit.

    What visits that stage continues to head and backward on a start device, back to the stage, and
    on to stage 0: the work of the stage, or of the start devices, is the bottleneck.
    """
    sizes, stages, visits = problem.stage_sizes, len(problem.stage_sizes), _visits(problem)
    if visits == 0:
        return [None] * (stages - 1)
    hop = _least_hop_s(problem)
    forward, backward = problem.forward_s.min(axis=1), problem.backward_s.min(axis=1)
    work = _stage_work_s(problem)
    head = float(problem.head_s.min())
    ending = float((problem.head_s + problem.backward_s[0]).min())
    times_s: list[float | None] = []
    for j in range(1, stages):
        away = float(forward[j]) + hop
        # a swap moves a stage by one position; then follow the rest, the head, and the way back
        place = min(j + 1, problem.path_stages - 1)
        others = np.sort(np.delete(backward[1:], j - 1))[: problem.path_stages - 2]
        alone = float(forward[j] + backward[j] + backward[0] + others.sum()) + head
        alone += (2 * problem.path_stages - place) * hop
        own = float(work[j]) + hop + float(backward[0])
        starts = away + -(-visits // sizes[0]) * ending
        times_s.append(max(alone, own, starts))
    return times_s


def _problem(
    cluster: Cluster,
    workload: Workload,
    stage_sizes: Sequence[int],
    path_stages: int,
    each: int,
    layers: Sequence[tuple[int, int]],
    recompute: Sequence[int],
) -> ArrangedPathProblem:
    """As the simulator counts: directions apart, every message as small as the smallest."""
    numbers = DeviceStageCosts.of(cluster, workload, layers, recompute)
    least = min(layer.output_bytes for layer in workload.layers) * workload.microbatch_samples
    return ArrangedPathProblem(
        cluster.limited_network().transfer_s(least),
        stage_sizes,
        numbers.forward_s,
        numbers.backward_s,
        numbers.head_s,
        path_stages,
        numbers.memory,
        each,
        live_memory=True,
    )
