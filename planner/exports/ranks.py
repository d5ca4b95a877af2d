"""Rank map and host file."""

from __future__ import annotations

import json
from typing import Any

from planner.exports.error import ExportError
from planner.exports.options import ExportOptions, require_name
from planner.exports.straight import straight_pipelines
from planner.training_plan.model import TrainingPlan


def nodes_of(plan: TrainingPlan, options: ExportOptions) -> dict[str, list[int]]:
    """Group devices by host, in the order of each host's first device.

    Returns
    -------
    dict[str, list[int]]
        Device indices in ascending order, by host.
    """
    nodes: dict[str, list[int]] = {}
    for d, host in enumerate(options.host_of(plan)):
        nodes.setdefault(host, []).append(d)
    return nodes


def rank_map(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return JSON with one entry per rank of the executor."""
    pipelines = straight_pipelines(plan)
    place = {d: i for i, path in enumerate(pipelines or ()) for d in path}
    helped, stage_of = plan.averages_for, plan.stage_of
    ids = plan.cluster.network.ids
    entries: list[dict[str, Any]] = []
    for node, (host, devices) in enumerate(nodes_of(plan, options).items()):
        for local, d in enumerate(devices):
            stage, pipeline = stage_of.get(d), place.get(d)
            mesh = None
            if pipelines is not None and stage is not None and pipeline is not None:
                mesh = (stage * len(pipelines) + pipeline) * plan.gpu_counts[d]
            entries.append(
                {
                    "rank": d,
                    "device": ids[d],
                    "host": host,
                    "node": node,
                    "local_rank": local,
                    "stage": stage,
                    "layers": None if stage is None else list(plan.stage_layers[stage]),
                    "helps_stage": helped.get(d),
                    "pipeline": pipeline,
                    "mesh_rank": mesh,
                }
            )
    entries.sort(key=lambda entry: int(entry["rank"]))
    data = {"plan": plan.content_hash, "world_size": len(ids), "ranks": entries}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def host_file(plan: TrainingPlan, options: ExportOptions) -> str:
    """Return one line per host, ``name slots=processes``, as MPI and DeepSpeed read it."""
    nodes = nodes_of(plan, options)
    for host, devices in nodes.items():
        require_name("host", host)
        if devices[-1] - devices[0] >= len(devices):
            raise ExportError(
                "hostfile needs consecutive ranks on each host, found "
                f"{', '.join(map(str, devices[:8]))} on "
                f"{host!r}; use --to ranks"
            )
    # one process per GPU; devices without a stage have one
    slots = {host: sum(plan.gpu_counts[d] for d in devices) for host, devices in nodes.items()}
    return "".join(f"{host} slots={count}\n" for host, count in slots.items())
