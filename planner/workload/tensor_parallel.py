"""Tensor parallelism with sequence parallelism: what it costs.

The GPUs of a worker split every matrix product, and between them the tokens. Attention and
feed-forward part each gather their input from all GPUs and scatter the sum of their outputs: an
all-gather and a reduce-scatter, twice a layer in the forward pass and, with the gradients, twice in
the backward pass. Gathered inputs are not kept: the backward pass gathers them again.

References
----------
V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
4.2.2.
"""

from __future__ import annotations

from planner.network.link import Link
from planner.workload.workload import Workload

LAYER_COLLECTIVES = 10
"""Collectives of a layer, each of a microbatch's activations: 4 forward, 6 backward."""
END_COLLECTIVES = 4
"""Those of the embedding (scatter its sum, gather the gradient) and of the head (the opposite)."""


def worker_flops(workload: Workload, gpu_flops: float, link: Link) -> float:
    """FLOP/s of a worker in training, of which collectives take their part.

    Parameters
    ----------
    workload
        With its number of GPUs per worker.
    gpu_flops
        FLOP/s of one GPU.
    link
        Of a GPU to the others: bandwidth in one direction, latency of a collective.

    Returns
    -------
    float
        FLOPs of a sample, forward and backward, over the time of its operations and collectives.
        Each sample pays the latency of its own collectives, as in microbatches of one.
    """
    degree, arch = workload.tensor_parallel, workload.architecture
    assert arch is not None
    activations = arch.sequence * arch.hidden * workload.precision.compute.bytes
    flops = 3.0 * workload.forward_flops
    collectives = LAYER_COLLECTIVES * len(workload.layers) + END_COLLECTIVES
    # a ring: every GPU receives what the others have
    received = (degree - 1) / degree * activations
    collective_s = received / link.bandwidth_bytes_per_s + link.latency_s
    return flops / (flops / (degree * gpu_flops) + collectives * collective_s)
