"""What every device would bring to every stage: seconds and microbatches (SkipPipe, 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.workload import BACKWARD_TO_FORWARD, Workload


@dataclass(frozen=True)
class StageNumbers:
    """Layers cut evenly, compute times by FLOPs, memory beside the stage's parameters.

    Attributes
    ----------
    transfer_s
        ``float[N, N]`` for one microbatch's activations. Both directions of a link are averaged,
        as SkipPipe does.
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
        forward = np.empty((stages, len(cluster)))
        memory = np.empty((stages, len(cluster)), dtype=np.int64)
        for j, cut in enumerate(workload.even_split(stages)):
            load = workload.stage(*cut)
            parameters = load.parameters + (head.parameters if j == 0 else 0)
            scratch = head.saved_bytes * samples if j == 0 else 0.0
            forward[j] = load.forward_flops * samples / cluster.flops
            left = cluster.memory_bytes - scratch - parameters * workload.state_bytes_per_parameter
            fits = np.minimum(left // (load.saved_bytes * samples), np.iinfo(np.int32).max)
            memory[j] = np.maximum(0, fits).astype(np.int64)
        message = max(layer.output_bytes for layer in workload.layers) * samples
        return cls(
            cluster.network.symmetrised().transfer_s(message),
            forward,
            BACKWARD_TO_FORWARD * forward,
            (1 + BACKWARD_TO_FORWARD) * head.forward_flops * samples / cluster.flops,
            memory,
        )
