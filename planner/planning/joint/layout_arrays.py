"""Arrays of the compiled layout search: model, device classes, and layouts under search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.search.arrays import Bools, Bools2, Floats, Floats2, Ints, Ints2, Words
from planner.search.compiled import kernel

ROUNDS_KEPT = 1 << 14
"""Entries of the table of averaging rounds."""


class ModelArrays(NamedTuple):
    """The model, by layer; L layers.

    Attributes
    ----------
    flops, parameters, saved_bytes
        ``float[L + 1]``: sums over the first layers, for one microbatch, including the embedding.
    output_bytes, held_bytes
        ``float[L]``: output of each layer for one microbatch, on the wire and in memory.
    stem_parameters, tied_parameters
        Parameters of the embedding; parameters that the head shares with it.
    saves_output
        Whether a stage keeps its output until the gradient arrives.
    layer_bytes, embedding_bytes, head_bytes, message_bytes, rounded_bytes
        Fields of `planner.workload.working_memory.WorkingMemory`.
    gradient_bytes, state_bytes
        Bytes per parameter: of gradients on the wire, and of weights and optimizer state.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    every_steps, delayed, two_frequency
        Average every this many steps; overlap averaging with the next step; average within regions
        in every step as well.
    by_cost, wait_usd_per_s
        Whether the objective is cost, and the value of waiting.
    max_in_flight
        Microbatches between forward and backward that a device may hold.
    min_devices
        Least devices of a stage.
    max_devices
        ``int[S + 1]``: most devices of a stage, by the number of stages.
    layers_free, recompute_free, head_free
        Whether layers may move, whether layers may be recomputed where memory is short, and whether
        the head may change between first and last stage.
    recompute
        ``int[S]``: first layers of each stage that are always recomputed, at most.
    """

    flops: Floats
    parameters: Floats
    saved_bytes: Floats
    output_bytes: Floats
    held_bytes: Floats
    head_flops: float
    head_parameters: float
    stem_parameters: float
    tied_parameters: float
    saves_output: bool
    layer_bytes: float
    embedding_bytes: float
    head_bytes: float
    message_bytes: float
    rounded_bytes: float
    gradient_bytes: float
    state_bytes: float
    wire_ratio: float
    microbatches: float
    every_steps: float
    delayed: bool
    two_frequency: bool
    by_cost: bool
    wait_usd_per_s: float
    max_in_flight: float
    min_devices: int
    max_devices: Ints
    layers_free: bool
    recompute_free: bool
    head_free: bool
    recompute: Ints


class ClassArrays(NamedTuple):
    """`DeviceClasses` (`planner.planning.joint.device_classes`) as arrays, with ordered pairs.

    ``inside`` tells of each site and class whether the devices are in it. ``pair_source`` and
    ``pair_target`` list all pairs by rising round-trip time, ``pair_rank`` the position of each
    pair in that list; ``equal_shares`` forbids adaptive shares.
    """

    size: Ints
    rtt_s: Floats2
    bandwidth: Floats2
    pair_bandwidth: Floats2
    capacity: Floats
    flops_per_s: Floats
    memory_bytes: Floats
    can_aggregate: Bools
    sites: Ints2
    inside: Bools2
    site_bandwidth: Floats
    region: Ints
    pair_source: Ints
    pair_target: Ints
    pair_rank: Ints2
    equal_shares: bool
    usd_per_s: Floats
    usd_per_byte: Floats2


class LayoutState(NamedTuple):
    """A layout under search, with up to ``max_stages`` stages.

    Attributes
    ----------
    stages
        ``int[1]``: number of stages.
    counts
        ``int[max_stages, C]``: devices per stage and class.
    cuts
        ``int[max_stages + 1]``: first layer of every stage, and the number of layers.
    recompute
        ``int[max_stages]``: first layers of each stage that are recomputed, as the estimate chose.
    head_first
        ``int[1]``: 1 if the first stage runs head and loss, 0 if the last one does.
    """

    stages: Ints
    counts: Ints2
    cuts: Ints
    recompute: Ints
    head_first: Ints


class LayoutScratch(NamedTuple):
    """Work arrays of the estimate.

    Attributes
    ----------
    share
        ``float[S, C]``: fraction of the microbatches by stage and class.
    unrouted
        ``float[2, C]``: what is still to be routed over a boundary, on both sides.
    reduce_share
        ``float[C]``: share of the vector that a device reduces.
    delay_s, compute_s, period_s, in_flight_room, averaging_s, messages_usd
        ``float[S]``: per stage, seconds to the next stage and back, seconds of computation, period
        of the stage alone, microbatches that fit, seconds of averaging, and dollars of a
        microbatch's messages. The next stage after the last one is the first, if it runs the head.
    mixing
        ``float[S]``: mixing of the flow to the next stage. 0 if each class of devices exchanges
        messages with one other alone, towards 1 the more it splits.
    site_bytes
        ``float[S, K]``: bytes over each site's line for one microbatch.
    averaged_bytes, site_devices, sites_inside
        ``float[K]``: bytes of averaging over each site's line, devices of a stage in the site, and
        innermost sites in it that have some.
    round_keys, round_s_per_byte, round_latency_s
        Table of averaging rounds by a hash of their devices; seconds for each byte of the vector,
        and for any vector.
    subset
        ``int[C]``: some of a stage's devices.
    region_devices
        ``float[C]``: devices of a stage by region.
    pairs, used, others
        Pairs of classes in use; classes that a stage uses, and those of its neighbour.
    pair_bits
        ``uint64``: a bit for every pair of classes, 0 between uses.
    distance_s
        ``float[C]``: seconds from a class to the others.
    """

    share: Floats2
    unrouted: Floats2
    reduce_share: Floats
    delay_s: Floats
    compute_s: Floats
    period_s: Floats
    mixing: Floats
    in_flight_room: Floats
    averaging_s: Floats
    messages_usd: Floats
    site_bytes: Floats2
    averaged_bytes: Floats
    site_devices: Floats
    sites_inside: Floats
    round_keys: Words
    round_s_per_byte: Floats
    round_latency_s: Floats
    subset: Ints
    region_devices: Floats
    pairs: Ints
    pair_bits: Words
    used: Ints
    others: Ints
    distance_s: Floats

    @classmethod
    def of(cls, max_stages: int, num_classes: int, num_sites: int) -> LayoutScratch:
        """Allocate for the numbers of stages, device classes and sites."""
        per_class, per_stage, per_site = num_classes, max_stages, num_sites
        return cls(
            share=np.zeros((max_stages, num_classes)),
            unrouted=np.zeros((2, num_classes)),
            reduce_share=np.zeros(per_class),
            delay_s=np.zeros(per_stage),
            compute_s=np.zeros(per_stage),
            period_s=np.zeros(per_stage),
            mixing=np.zeros(per_stage),
            in_flight_room=np.zeros(per_stage),
            averaging_s=np.zeros(per_stage),
            messages_usd=np.zeros(per_stage),
            site_bytes=np.zeros((max_stages, num_sites)),
            averaged_bytes=np.zeros(per_site),
            site_devices=np.zeros(per_site),
            sites_inside=np.zeros(per_site),
            round_keys=np.zeros(ROUNDS_KEPT, dtype=np.uint64),
            round_s_per_byte=np.zeros(ROUNDS_KEPT),
            round_latency_s=np.zeros(ROUNDS_KEPT),
            subset=np.zeros(per_class, dtype=np.int64),
            region_devices=np.zeros(per_class),
            pairs=np.zeros(num_classes**2, dtype=np.int64),
            pair_bits=np.zeros(-(-(num_classes**2) // 64), dtype=np.uint64),
            used=np.zeros(per_class, dtype=np.int64),
            others=np.zeros(per_class, dtype=np.int64),
            distance_s=np.zeros(per_class),
        )


@kernel
def classes_in(counts: Ints, used: Ints) -> int:
    """List the classes that have devices at the front of ``used``; return their number."""
    count = 0
    for c in range(len(counts)):
        if counts[c] > 0:
            used[count] = c
            count += 1
    return count
