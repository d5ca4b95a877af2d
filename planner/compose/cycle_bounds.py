"""A lower bound on the mean step of any plan with skipped stages and given stage sizes.

It holds for every arrangement, every choice of paths and every order of operations within the
devices' memory, under the simulator's default rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

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
    *,
    equal_shares: bool = True,
) -> float:
    """Seconds that no arrangement can beat on average, compute times by FLOPs.

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
    equal_shares
        Averaging in one round of full precision with equal shares; otherwise it is bounded by 0.

    Returns
    -------
    float
        Seconds a step.
    """
    from planner.mapf.arranged_bounds import arranged_bound_s

    pipeline = 0.0
    for path_stages, share in share_of.items():
        problem = _problem(cluster, workload, stage_sizes, path_stages, microbatches_per_start)
        pipeline += share * arranged_bound_s(problem)
    averaging = averaging_bound_s(cluster, workload, stage_sizes) if equal_shares else 0.0
    return pipeline + averaging


def _problem(
    cluster: Cluster, workload: Workload, stage_sizes: Sequence[int], path_stages: int, each: int
) -> ArrangedPathProblem:
    """As the simulator counts: directions apart, and no message smaller than the smallest."""
    numbers = StageNumbers.of(cluster, workload, len(stage_sizes))
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


def averaging_bound_s(cluster: Cluster, workload: Workload, stage_sizes: Sequence[int]) -> float:
    """Eq. 2 of DT-FM for stages of unlike size, every device exchanging with its nearest ones.

    A device of a stage of m devices exchanges 1/m of the gradient with m - 1 others. A stage has m
    devices, so at least the m-th cheapest of all; and every device has some stage.

    Parameters
    ----------
    cluster
        N devices.
    workload
        What is trained.
    stage_sizes
        Devices of every stage.

    Returns
    -------
    float
        Seconds.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 2.
    """
    gradients = workload.gradient_bytes(workload.even_split(len(stage_sizes)), 0)
    mean = cluster.network.symmetrised()
    best, anywhere = 0.0, np.full(len(cluster), np.inf)
    for size, gradient in zip(stage_sizes, gradients, strict=True):
        pair = 2 * mean.transfer_s(gradient / size)
        np.fill_diagonal(pair, np.inf)
        nearest = np.sort(pair, axis=1)[:, : size - 1].sum(axis=1)
        best = max(best, float(np.sort(nearest)[size - 1]))
        anywhere = np.minimum(anywhere, nearest)
    return max(best, float(anywhere.max()))
