"""Export as a NetworkX graph in node-link format."""

from __future__ import annotations

import json
from typing import Any

from planner.exports.options import ExportOptions
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.model import TrainingPlan


def node_link(plan: TrainingPlan, _: ExportOptions) -> str:
    """Return a graph of devices, with the pipelines' traffic per step as edges."""
    network, stage_of, aggregated_stage = plan.cluster.network, plan.stage_of, plan.averages_for
    nodes: list[dict[str, Any]] = []
    for d, name in enumerate(network.ids):
        stage = stage_of.get(d)
        nodes.append(
            {
                "id": name,
                "rank": d,
                "region": network.regions[d],
                "stage": stage,
                "layers": None if stage is None else list(plan.stage_layers[stage]),
                "helps_stage": aggregated_stage.get(d),
            }
        )
    sent_bytes: dict[tuple[int, int], float] = {}
    crossing: dict[tuple[int, int], int] = {}
    _mean, timelines = simulate_cycle(plan)
    for k in plan.cycle:
        microbatches: dict[tuple[int, int], set[int]] = {}
        for t in timelines[k].transfers:
            pair = (t.source, t.destination)
            sent_bytes[pair] = sent_bytes.get(pair, 0.0) + t.message_bytes
            microbatches.setdefault(pair, set()).add(t.microbatch)
        for pair, sent_microbatches in microbatches.items():
            crossing[pair] = crossing.get(pair, 0) + len(sent_microbatches)
    steps = len(plan.cycle)
    edges = [
        {
            "source": network.ids[i],
            "target": network.ids[j],
            "bytes_per_step": total / steps,
            "microbatches": crossing[i, j] / steps,
            "latency_s": float(network.latency_table[i, j]),
            "bandwidth_bytes_per_s": float(network.bandwidth_table[i, j]),
        }
        for (i, j), total in sorted(sent_bytes.items())
    ]
    graph = {"plan": plan.content_hash, "step_s": plan.predicted.step_s}
    data = {
        "directed": True,
        "multigraph": False,
        "graph": graph,
        "nodes": nodes,
        "edges": edges,
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
