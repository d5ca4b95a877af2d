"""Messages between a plan's devices, and the contents of devices, from the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.checker.wire_ratio import WIRE_RATIO
from planner.network.cluster import Cluster, Devices
from planner.network.dtype import Dtype
from planner.network.pair_table import PairTable
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Head, Phase
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule

Floats = NDArray[np.float64]


class MessageRates:
    """Bytes per second of one message, within the limits of devices and sites."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.cluster = plan.cluster
        around = sites_around(plan.cluster.devices, len(plan.cluster))
        self.inside = {
            site: np.array([site in sites for sites in around])
            for site in sorted({site for sites in around for site in sites})
        }

    def between(self, sources: Any, destinations: Any) -> Floats:
        """Rates from devices to others, in the common shape of both; devices' own are unused."""
        cluster, devices = self.cluster, self.cluster.devices
        rate = cluster.network.bandwidth_table[sources, destinations]
        if cluster.upload_bytes_per_s is not None:
            rate = np.minimum(rate, np.asarray(cluster.upload_bytes_per_s)[sources])
        if cluster.download_bytes_per_s is not None:
            rate = np.minimum(rate, np.asarray(cluster.download_bytes_per_s)[destinations])
        for site, inside in self.inside.items():
            out = (devices.site_upload_bytes_per_s or {}).get(site, math.inf)
            into = (devices.site_download_bytes_per_s or {}).get(site, math.inf)
            leaves = inside[sources] & ~inside[destinations]
            enters = ~inside[sources] & inside[destinations]
            rate = np.where(leaves, np.minimum(rate, out), rate)
            rate = np.where(enters, np.minimum(rate, into), rate)
        return np.asarray(rate)

    def of_all(self) -> Floats:
        """``float[N, N]``, from row to column."""
        devices = np.arange(len(self.cluster))
        return self.between(devices[:, None], devices[None, :])


def sites_around(devices: Devices, n: int) -> list[list[str]]:
    """Each device's site, the site around that, and so on."""
    chains: list[list[str]] = [[] for _ in range(n)]
    outer = devices.site_within or {}
    for chain, site in zip(chains, devices.sites or (), strict=False):
        chain.append(site)
        while chain[-1] in outer:
            chain.append(outer[chain[-1]])
    return chains


def device_rates(cluster: Cluster) -> tuple[Floats, Floats]:
    """Uploads and downloads of devices; those without a limit have their fastest link's."""
    rate = cluster.network.bandwidth_table
    up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
    return (
        fastest_of_rows(rate) if up is None else up,
        fastest_of_rows(rate.T) if down is None else down,
    )


def fastest_of_rows(rate: PairTable) -> Floats:
    """Highest rate of every device to another, infinite for a single device; 0 if none is known."""
    if len(rate) == 1:
        return np.full(1, math.inf)
    fastest = [
        np.nan_to_num(np.delete(rate.row(d), d), posinf=math.inf).max() for d in rate.first.tolist()
    ]
    return np.array(fastest)[rate.class_of]


def pairs_s(plan: TrainingPlan, message_bytes: float) -> Floats:
    """Seconds of one message.

    Returns
    -------
    ndarray
        ``float[N, N]``, from row to column; the diagonal is unused.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(
            plan.cluster.network.latency_s + message_bytes / MessageRates(plan).of_all()
        )


def mean_links(plan: TrainingPlan) -> tuple[Floats, Floats]:
    """Latency and bandwidth of every pair, means of both directions.

    Returns
    -------
    tuple[ndarray, ndarray]
        Each ``float[N, N]``: seconds, and bytes per second; the diagonals are meaningless.
    """
    latency, rate = plan.cluster.network.latency_s, MessageRates(plan).of_all()
    return np.asarray((latency + latency.T) / 2), np.asarray((rate + rate.T) / 2)


def largest_message_bytes(plan: TrainingPlan) -> float:
    """Bytes of a transfer in SkipPipe's model: the largest layer output.

    References
    ----------
    "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks" (2025), section 3.1.
    """
    w = plan.workload
    return float(max(layer.output_bytes for layer in w.layers) * w.microbatch_samples)


def most_live(schedule: Schedule) -> int:
    """Most microbatches between their F and B, by device."""
    peak = 0
    for ops in schedule.order:
        live = 0
        for kind, _ in ops:
            live += (kind == "F") - (kind == "B")
            peak = max(peak, live)
    return peak


def stage_parameters(plan: TrainingPlan, stage: int) -> int:
    """Parameters of a stage; the first has the embedding, the head's stage the head."""
    w, (a, b) = plan.workload, plan.stage_layers[stage]
    count = sum(layer.parameters for layer in w.layers[a:b])
    head_stage = 0 if plan.schedules[0].head is Head.FIRST else -1
    count += w.stem.parameters if stage == 0 else 0
    if stage == head_stage % len(plan.stage_layers):
        # tied weights count once, or twice if the head is on another stage
        count += w.head.parameters + (w.tied_parameters if stage > 0 else 0)
    return count


def gradient_bytes(plan: TrainingPlan, stage: int) -> float:
    """Bytes of a stage's gradients."""
    return stage_parameters(plan, stage) * plan.workload.gradient_bytes_per_parameter


def vector_bytes(plan: TrainingPlan, entry: int) -> float:
    """Bytes that an entry of the plan's averaging covers: a stage, or tied weights."""
    stages = len(plan.stage_layers)
    shared = plan.workload.tied_parameters if len(plan.averaging) > stages else 0
    if entry == stages:
        count = shared
    else:
        count = stage_parameters(plan, entry) - (shared if entry in (0, stages - 1) else 0)
    return count * plan.workload.gradient_bytes_per_parameter


def averaged_bytes(plan: TrainingPlan, stage: int, group: AveragingGroup) -> Floats:
    """Bytes that each member of a round sends to each other member.

    Returns
    -------
    ndarray
        ``float[m, m]``, by place in the group.
    """
    # within sites sums are not compressed
    wire = WIRE_RATIO[plan.codec] if group.phase in (Phase.ALL, Phase.EXCHANGE) else 1.0
    if group.dtype is Dtype.BF16:
        # parameters of which all devices have the rounded values only
        wire = 2 / 4
    sent = vector_bytes(plan, stage) * wire * averaged_parts(group)
    np.fill_diagonal(sent, 0.0)
    return np.asarray(sent)


def averaged_parts(group: AveragingGroup) -> Floats:
    """Part of the vector that each member of a round sends to each other member.

    Returns
    -------
    ndarray
        ``float[m, m]``, by place in the group.
    """
    start, stop = group.slice
    share = np.array(group.shares) * (stop - start)
    contributes = np.array(group.contributes, dtype=np.float64) * (group.phase is not Phase.SPREAD)
    receives = np.array(group.receives, dtype=np.float64) * (group.phase is not Phase.REDUCE)
    return np.asarray(np.outer(contributes, share) + np.outer(share, receives))
