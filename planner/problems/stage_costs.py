"""Compute times and memory of every device in every stage (SkipPipe, 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.workload.costs import split_costs
from planner.workload.workload import Workload


@dataclass(frozen=True)
class DeviceStageCosts:
    """Times from FLOPs, and memory left beside a stage's parameters; stage 0 has the head.

    Attributes
    ----------
    transfer_s
        ``float[N, N]`` for one microbatch's activations, within the devices' limits. Both
        directions of a link are averaged, as SkipPipe does.
    link_s
        ``float[N, N]``, the part of ``transfer_s`` that is not latency.
    forward_s, backward_s
        ``float[stages, N]``.
    head_s
        ``float[N]``; it runs on the devices of stage 0.
    memory
        ``int[stages, N]``, microbatches that fit.
    """

    transfer_s: NDArray[np.float64]
    link_s: NDArray[np.float64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    head_s: NDArray[np.float64]
    memory: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        workload: Workload,
        split: Sequence[tuple[int, int]],
        recompute: Sequence[int] = (),
    ) -> DeviceStageCosts:
        """The costs of a workload that is split into stages, on a cluster.

        References
        ----------
        "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
        Networks" (2025), section 3.1.
        """
        cluster.network.require_complete()
        shape = (len(split), len(cluster))
        forward, backward, last = np.empty(shape), np.empty(shape), np.empty(shape)
        memory = np.empty(shape, dtype=np.int64)
        for j, costs in enumerate(split_costs(workload, split, 0, recompute)):
            for d, flops in enumerate(cluster.flops.tolist()):
                forward[j, d], backward[j, d] = costs.forward_s(flops), costs.backward_s(flops)
                last[j, d] = costs.head_s(flops)
            fits = [costs.room(have) for have in cluster.memory_bytes.tolist()]
            memory[j] = np.clip(fits, 0, np.iinfo(np.int32).max).astype(np.int64)
        message = max(layer.output_bytes for layer in workload.layers)
        message *= workload.microbatch_samples
        mean = cluster.limited_network().symmetrised()
        link = message / mean.bandwidth_bytes_per_s
        return cls(mean.transfer_s(message), link, forward, backward, last[0], memory)
