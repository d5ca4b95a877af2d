"""A lower bound on the mean step of any plan with skipped stages and given stage sizes.

It holds on the clock for every arrangement, every choice of paths and every order of operations
within the devices' memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.problems import ArrangedPathProblem
from planner.problems.stage_numbers import StageNumbers
from planner.workload.workload import Workload


def cycle_bound_s(
    cluster: Cluster,
    workload: Workload,
    stage_sizes: Sequence[int],
    microbatches_per_start: int,
    share_of: Mapping[int, float],
    averaging_s: NDArray[np.float64],
    recompute: Sequence[bool] = (),
) -> float:
    """Seconds that no arrangement can beat on average, compute times by FLOPs.

    At a step's end T all devices of one stage begin their next step together. If that is stage 0,
    the whole pipeline part follows. Otherwise what this stage does follows, and the last
    microbatch's way back to its start device.

    Parameters
    ----------
    cluster
        N devices.
    workload
        What is trained.
    stage_sizes
        Devices of every stage.
    microbatches_per_start
        Microbatches that a device of stage 0 starts.
    share_of
        Share of the iterations whose paths have so many stages; the shares sum to 1.
    averaging_s
        ``float[stages]``: averaging in one round over every stage takes at least this.
    recompute
        Per stage, whether it recomputes its activations; empty: none does.

    Returns
    -------
    float
        Seconds a step.
    """
    from planner.mapf.arranged_bounds import arranged_bound_s

    mean = 0.0
    for path_stages, share in share_of.items():
        problem = _problem(
            cluster, workload, stage_sizes, path_stages, microbatches_per_start, recompute
        )
        # the start devices return the last gradients, so stage 0 averages after all else
        whole = arranged_bound_s(problem) + float(averaging_s[0])
        mean += share * min([whole, *_later_stages_s(problem, float(averaging_s[0]))])
    return mean


def _later_stages_s(problem: ArrangedPathProblem, averaging_s: float) -> list[float]:
    """The same where the devices of stage 1, 2, ... begin together.

    What visits that stage goes on to head and backward pass on a start device, back to the stage
    and home: the stage's own work, or the start devices', is the neck of that walk.
    """
    sizes, stages = problem.stage_sizes, len(problem.stage_sizes)
    count = sizes[0] * problem.microbatches_per_start
    off = ~np.eye(len(problem), dtype=bool)
    hop = float(problem.transfer_s[off].min(initial=np.inf))
    forward, backward = problem.forward_s.min(axis=1), problem.backward_s.min(axis=1)
    busy = (problem.forward_s + problem.backward_s).min(axis=1)
    head = float(problem.head_s.min())
    ending = float((problem.head_s + problem.backward_s[0]).min())
    found = []
    for j in range(1, stages):
        # CC3: every stage but the first is visited by the floor of the mean, or more
        visits = count * (problem.path_stages - 1) // (stages - 1)
        if visits == 0:
            found.append(averaging_s)
            continue
        if sizes[j] == 1:
            continue  # it does not average, so stage 0 ends after it
        away = float(forward[j]) + hop
        # a swap moves a stage by one place; after it the rest of the path, head, and all back
        place = min(j + 1, problem.path_stages - 1)
        others = np.sort(np.delete(backward[1:], j - 1))[: problem.path_stages - 2]
        alone = float(forward[j] + backward[j] + backward[0] + others.sum()) + head
        alone += (2 * problem.path_stages - place) * hop
        own = -(-visits // sizes[j]) * float(busy[j]) + hop + float(backward[0])
        starts = away + -(-visits // sizes[0]) * ending
        found.append(max(alone, own, starts) + averaging_s)
    return found


def _problem(
    cluster: Cluster,
    workload: Workload,
    stage_sizes: Sequence[int],
    path_stages: int,
    each: int,
    recompute: Sequence[bool],
) -> ArrangedPathProblem:
    """As the simulator counts: directions apart, and no message smaller than the smallest."""
    numbers = StageNumbers.of(cluster, workload, len(stage_sizes), recompute)
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
