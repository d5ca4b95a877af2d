"""What every device would bring to every stage: seconds and microbatches (SkipPipe, 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.workload.compute_times import ComputeTimes
from planner.workload.workload import Workload


@dataclass(frozen=True)
class StageNumbers:
    """Layers cut evenly, compute times by FLOPs, memory beside the stage's parameters.

    Attributes
    ----------
    transfer_s
        ``float[N, N]`` for one microbatch's activations, within the devices' limits. Both
        directions of a link are averaged, as SkipPipe does.
    forward_s, backward_s
        ``float[stages, N]``.
    head_s
        ``float[N]``; it runs on the devices of stage 0.
    memory
        ``int[stages, N]``, microbatches that fit.
    """

    transfer_s: NDArray[np.float64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    head_s: NDArray[np.float64]
    memory: NDArray[np.int64]

    @classmethod
    def of(cls, cluster: Cluster, workload: Workload, stages: int) -> StageNumbers:
        """For ``stages`` equal cuts of a workload on a cluster."""
        cluster.network.require_complete()
        samples, head = workload.microbatch_samples, workload.head
        shape = (stages, len(cluster))
        forward, backward, last = np.empty(shape), np.empty(shape), np.empty(shape)
        memory = np.empty(shape, dtype=np.int64)
        for j, cut in enumerate(workload.even_split(stages)):
            load = workload.stage(*cut)
            times = ComputeTimes.from_flops(cluster, workload, [range(len(cluster))], [cut])
            forward[j], backward[j], last[j] = times.forward_s, times.backward_s, times.head_s
            parameters = load.parameters + (head.parameters if j == 0 else 0)
            scratch = head.saved_bytes * samples if j == 0 else 0.0
            left = cluster.memory_bytes - scratch - parameters * workload.state_bytes_per_parameter
            fits = np.where(left >= 0, np.inf, 0.0)  # where nothing is kept for B
            if load.saved_bytes > 0:
                fits = left // (load.saved_bytes * samples)
            memory[j] = np.clip(fits, 0, np.iinfo(np.int32).max).astype(np.int64)
        message = max(layer.output_bytes for layer in workload.layers) * samples
        mean = cluster.limited_network().symmetrised()
        return cls(mean.transfer_s(message), forward, backward, last[0], memory)
