"""Messages between a plan's devices, and what devices hold, from the definitions."""

from __future__ import annotations

from planner.training_plan.model import Schedule, TrainingPlan


def pair_rate(plan: TrainingPlan, i: int, j: int) -> float:
    """Bytes per second of one message, within the limits of devices and sites.

    Parameters
    ----------
    plan
        What is judged.
    i, j
        From device i to device j.

    Returns
    -------
    float
        Bytes per second.
    """
    cluster = plan.cluster
    rate = cluster.network.bandwidth_bytes_per_s[i, j]
    if cluster.upload_bytes_per_s is not None:
        rate = min(rate, cluster.upload_bytes_per_s[i])
    if cluster.download_bytes_per_s is not None:
        rate = min(rate, cluster.download_bytes_per_s[j])
    sites = cluster.devices.sites
    if sites is not None and sites[i] != sites[j]:
        out = cluster.devices.site_upload_bytes_per_s or {}
        into = cluster.devices.site_download_bytes_per_s or {}
        rate = min(rate, out.get(sites[i], rate), into.get(sites[j], rate))
    return float(rate)


def pair_s(plan: TrainingPlan, i: int, j: int, message_bytes: float) -> float:
    """Seconds of one message.

    Parameters
    ----------
    plan
        What is judged.
    i, j
        From device i to device j.
    message_bytes
        Size of the message.

    Returns
    -------
    float
        Seconds.
    """
    return float(plan.cluster.network.latency_s[i, j]) + message_bytes / pair_rate(plan, i, j)


def mean_link(plan: TrainingPlan, i: int, j: int) -> tuple[float, float]:
    """Latency and bandwidth of a pair, means of both directions.

    Parameters
    ----------
    plan
        What is judged.
    i, j
        Two devices.

    Returns
    -------
    tuple[float, float]
        Seconds, and bytes per second.
    """
    latency = plan.cluster.network.latency_s
    rate = (pair_rate(plan, i, j) + pair_rate(plan, j, i)) / 2
    return float(latency[i, j] + latency[j, i]) / 2, rate


def mean_link_s(plan: TrainingPlan, i: int, j: int) -> float:
    """The part of SkipPipe's transfer for which a link is busy: the largest layer output's bytes.

    Parameters
    ----------
    plan
        What is judged.
    i, j
        From device i to device j.

    Returns
    -------
    float
        Seconds.

    References
    ----------
    "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks" (2025), section 3.1.
    """
    w = plan.workload
    message = max(layer.output_bytes for layer in w.layers) * w.microbatch_samples
    return message / mean_link(plan, i, j)[1]


def held_bytes(plan: TrainingPlan, stage: int, runs_head: bool) -> tuple[float, float]:
    """What a device of a stage holds beside the stage's state.

    Parameters
    ----------
    plan
        What is judged.
    stage
        Which stage.
    runs_head
        Whether the device runs head and loss.

    Returns
    -------
    tuple[float, float]
        Bytes of each microbatch between its F and its B, and of one operation while it runs.
    """
    w = plan.workload
    start, stop = plan.stage_layers[stage]
    whole = sum(layer.saved_bytes for layer in w.layers[start:stop])
    whole += w.stem.saved_bytes if stage == 0 else 0.0
    logits = w.head.saved_bytes if runs_head else 0.0
    if not plan.recompute[stage]:
        return whole * w.microbatch_samples, logits * w.microbatch_samples
    # what is kept is what the codec took in, not what it sent
    given = 0.0 if stage == 0 else w.layers[start - 1].output_bytes / w.boundary_ratio
    made = w.layers[stop - 1].output_bytes / w.boundary_ratio if runs_head else 0.0
    return (given + made) * w.microbatch_samples, max(logits, whole) * w.microbatch_samples


def most_live(schedule: Schedule) -> int:
    """Microbatches that a device holds between their F and B, at most."""
    most = 0
    for ops in schedule.order:
        live = 0
        for kind, _ in ops:
            live += (kind == "F") - (kind == "B")
            most = max(most, live)
    return most
