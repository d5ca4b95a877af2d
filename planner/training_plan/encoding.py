"""Compact encoding of plan files: device classes, shared routes, orders as text.

Every function has its inverse next to it; numbers are restored bit by bit.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from planner.network.cluster import Devices
from planner.network.error import NetworkError
from planner.network.network import Network
from planner.network.pair_table import PairTable
from planner.training_plan.error import PlanError

FIGURES = ("flops", "memory_bytes", "upload_bytes_per_s", "download_bytes_per_s")
ABILITIES = ("can_compute", "can_aggregate")
"""Written only if some device lacks one."""
LINES = ("site_upload_bytes_per_s", "site_download_bytes_per_s")
NAMED = ("sites", "interfaces", "machines")
GPU_COUNTS = "gpu_counts"
BESIDE = ("peak_flops", "gpus")
"""Fields that the hash does not cover."""
OPERATION = re.compile("([FHB])([0-9]*)")

Visits = Mapping[str, Sequence[int]]
"""Microbatches of a device by kind of operation, ascending."""


def network_fields(network: Network) -> dict[str, Any]:
    """Devices by class, latency and bandwidth between and within classes.

    Returns
    -------
    dict[str, Any]
        ``ids``, ``regions`` and ``class_of`` of N; ``latency_s`` and ``bandwidth_bytes_per_s`` of K
        x K, null if not measured, and within a class of one device.
    """
    classes = network.alike
    first = [members[0] for members in classes]
    # any two devices represent the links within a class
    second = [members[-1] for members in classes]
    alone = [len(members) == 1 for members in classes]

    def between(pairs: PairTable) -> list[list[float | None]]:
        table = pairs.between(first)
        np.fill_diagonal(table, np.where(alone, np.nan, pairs[first, second]))
        return [[None if math.isnan(x) else x for x in row] for row in table.tolist()]

    return {
        "ids": list(network.ids),
        "regions": list(network.regions),
        "class_of": network.class_of.tolist(),
        "latency_s": between(network.latency_table),
        "bandwidth_bytes_per_s": between(network.bandwidth_table),
    }


def network_of(raw: Mapping[str, Any]) -> Network:
    """Inverse of `network_fields`."""
    ids, classes = raw["ids"], len(raw["latency_s"])
    index = _index("network.class_of", raw["class_of"], len(ids), classes)
    members: list[list[int]] = [[] for _ in range(classes)]
    for d, c in enumerate(index):
        members[c].append(d)
    tables = []
    for name in ("latency_s", "bandwidth_bytes_per_s"):
        table = raw[name]
        if len(table) != classes or any(len(row) != classes for row in table):
            raise PlanError(f"network.{name}: must be {classes} x {classes}; correct it")
        values = np.array(table, dtype=np.float64)
        for c, k in np.argwhere(np.isnan(values)).tolist():
            for i, j in product(members[c][:2], members[k][:2]):
                if i != j:
                    raise PlanError(
                        f"network.{name}[{c}][{k}]: {ids[i]!r} cannot reach {ids[j]!r}, found "
                        "null; measure the pair, or plan on network.complete()"
                    )
        tables.append(values)
    try:
        return Network.of_classes(tables[0], tables[1], index, ids, raw["regions"])
    except NetworkError as error:
        raise PlanError(f"network: {error}") from None


def device_fields(devices: Devices) -> dict[str, Any]:
    """Properties by kind of device, and the kind of each device.

    Returns
    -------
    dict[str, Any]
        ``kind_of`` of N, each property by kind; limits of sites by site.
    """
    columns: dict[str, list[Any]] = {
        name: np.asarray(value).tolist()
        for name in FIGURES
        if (value := getattr(devices, name)) is not None
    }
    for name in ABILITIES:
        flags = np.asarray(getattr(devices, name))
        if not flags.all():
            columns[name] = flags.tolist()
    if devices.usd_per_hour is not None:
        columns["usd_per_hour"] = np.asarray(devices.usd_per_hour).tolist()
    for name in (*NAMED, GPU_COUNTS):
        if (values := getattr(devices, name)) is not None:
            columns[name] = np.asarray(values).tolist()
    number: dict[tuple[Any, ...], int] = {}
    rows = zip(*columns.values(), strict=True)
    kind_of = [number.setdefault(row, len(number)) for row in rows]
    by_kind = dict(zip(columns, map(list, zip(*number, strict=True)), strict=True))
    fields = {"kind_of": kind_of, **dict.fromkeys(FIGURES), **by_kind}
    if devices.sites is not None:
        fields |= {name: getattr(devices, name) for name in LINES}
        if devices.site_within is not None:
            fields["site_within"] = devices.site_within
    return fields


def devices_of(raw: Mapping[str, Any], n: int) -> Devices:
    """Inverse of `device_fields`."""
    kinds = len(raw["flops"])
    index = _index("devices.kind_of", raw["kind_of"], n, kinds)
    fields: dict[str, Any] = {name: raw.get(name) for name in (*LINES, "site_within")}
    for name in (*FIGURES, *ABILITIES, "usd_per_hour", *NAMED, GPU_COUNTS):
        values = raw.get(name)
        if values is not None:
            if len(values) != kinds:
                raise PlanError(
                    f"devices.{name}: must have {kinds} entries, found {len(values)}; give one per "
                    "kind of device"
                )
            values = [values[k] for k in index]
        elif name in ABILITIES:
            values = True
        fields[name] = values
    named: dict[str, Any] = {name: _per_device(raw, name, n) for name in BESIDE}
    return Devices(**fields, **named)


def gpu_fields(devices: Devices) -> dict[str, Any]:
    """Peaks and names of GPUs, a single value if all are equal; empty if unknown.

    No decision depends on them, so they define no kinds, and the hash ignores them.
    """
    data: dict[str, Any] = {}
    for name in BESIDE:
        if (entries := getattr(devices, name)) is not None:
            values = np.asarray(entries).tolist()
            data[name] = values[:1] if len(set(values)) == 1 else values
    return data


def _per_device(raw: Mapping[str, Any], name: str, n: int) -> Sequence[Any] | None:
    values: Sequence[Any] | None = raw.get(name)
    if values is not None and len(values) not in (1, n):
        raise PlanError(
            f"devices.{name}: must have {n} entries, found {len(values)}; give one per device, "
            "or one for all"
        )
    return [*values] * n if values is not None and len(values) == 1 else values


def _index(field: str, numbers: Sequence[Any], n: int, largest: int) -> list[int]:
    if len(numbers) != n:
        raise PlanError(
            f"{field}: must have {n} entries, found {len(numbers)}; give one per device"
        )
    index = [int(number) for number in numbers]
    for d, number in enumerate(index):
        if number >= largest:
            raise PlanError(f"{field}[{d}]: there are {largest}, found {number}; name one of them")
    return index


def route_fields(paths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Distinct paths, and the index of every microbatch's path.

    Returns
    -------
    dict[str, Any]
        ``routes`` in order of first use, ``route_of`` one number per microbatch.
    """
    number: dict[tuple[int, ...], int] = {}
    route_of = [number.setdefault(tuple(path), len(number)) for path in paths]
    return {"routes": [list(route) for route in number], "route_of": route_of}


def paths_of(raw: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], ...]:
    """Inverse of `route_fields`."""
    routes = [tuple(int(d) for d in route) for route in raw["routes"]]
    for b, k in enumerate(raw["route_of"]):
        if k >= len(routes):
            raise PlanError(
                f"{where}.route_of[{b}]: there are {len(routes)} routes, found {k}; name one of "
                "them"
            )
    return tuple(routes[int(k)] for k in raw["route_of"])


def order_text(operations: Sequence[tuple[str, int]], visits: Visits) -> str:
    """A device's operations in order, such as ``FFFHBHB``.

    A letter alone stands for the device's next microbatch after the last one of that kind; a number
    names another.
    """
    reached = dict.fromkeys(visits, 0)
    texts = []
    for kind, b in operations:
        visited, position = visits[kind], reached[kind]
        texts.append(kind if position < len(visited) and visited[position] == b else f"{kind}{b}")
        reached[kind] = bisect_right(visited, b)
    return "".join(texts)


def order_of(text: str, visits: Visits, where: str) -> tuple[tuple[str, int], ...]:
    """Inverse of `order_text`."""
    reached = dict.fromkeys(visits, 0)
    operations: list[tuple[str, int]] = []
    for kind, number in OPERATION.findall(text):
        visited, position = visits[kind], reached[kind]
        if not number and position == len(visited):
            raise PlanError(
                f"{where}: after {len(operations)} operations {kind} has no next microbatch, "
                f"{len(visited)} visit the device; let the order follow the routes"
            )
        b = int(number) if number else visited[position]
        operations.append((kind, b))
        reached[kind] = bisect_right(visited, b)
    return tuple(operations)
