"""Upgrades plan files of schema 1.

They listed the network's matrices, every path and every operation in full, without recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.training_plan.choices import Head
from planner.training_plan.encoding import device_fields, network_fields
from planner.training_plan.error import PlanError, require_hash
from planner.training_plan.model import SCHEMA_VERSION as NEWEST
from planner.training_plan.model import hash_of
from planner.training_plan.schedule import Schedule

SCHEMA_VERSION = 1
HASHED = (
    *("seed", "network", "devices", "workload", "compute_times"),
    *("assignment", "paths", "averaging", "wiring", "sync"),
)
"""Fields covered by the content hash, except the network's name."""


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan in the current schema, with its original hash.

    The hash proves that inputs and decisions are as written by a release that validated them, so
    they are not validated in their old form.

    Returns
    -------
    dict[str, Any]
        Still to be validated as any other.
    """
    try:
        content = {name: data[name] for name in HASHED}
        content["network"] = {k: v for k, v in data["network"].items() if k != "name"}
        require_hash("content_hash", data["content_hash"], hash_of(content))
        return {**data, "schema_version": NEWEST, **_new_fields(data)}
    except PlanError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PlanError(
            f"schema_version: is 1, but this is no plan of schema 1 ({error}); make the plan again"
        ) from None


def _new_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    raw, assignment, paths = data["network"], data["assignment"], data["paths"]
    network = Network(raw["latency_s"], raw["bandwidth_bytes_per_s"], raw["ids"], raw["regions"])
    cluster = Cluster(network, Devices(**data["devices"]))
    schedules = [
        Schedule(
            s["name"],
            Head(s["head"]),
            s["paths"],
            tuple(tuple((op[0], int(op[1:])) for op in ops) for ops in s["order"]),
        )
        for s in paths["schedules"]
    ]
    return {
        "network": {"name": raw["name"], "hash": raw["hash"], **network_fields(network)},
        "devices": device_fields(cluster.devices),
        "assignment": {
            **assignment,
            "recompute": [False] * len(assignment["layers"]),
            "left_out": [],
        },
        "paths": {**paths, "schedules": [s.to_dict() for s in schedules]},
    }
