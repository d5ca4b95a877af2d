"""Networks that ship with the package: measured tables, and networks built from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from planner.network.error import NetworkError
from planner.network.formats import ENDS, FORMAT, end_columns, links_within
from planner.network.link import Link
from planner.network.measured.reading import KINDS, read_measured
from planner.network.network import Network
from planner.network.probe_log import ProbeLog
from planner.utils.input_files import read_text
from planner.utils.text import did_you_mean

_PACKAGE = Path(__file__).parent.parent
# in a wheel the tables lie inside the package, in a checkout beside it
FOLDER = next(
    (d for d in (_PACKAGE / "netmeasure", _PACKAGE.parent / "datasets/netmeasure") if d.is_dir()),
    _PACKAGE / "netmeasure",
)


@cache
def _catalog() -> dict[str, Any]:
    catalog: dict[str, Any] = json.loads((FOLDER / "catalog.json").read_text())
    return catalog


def list_networks() -> dict[str, str]:
    """Name and one-line description of every shipped network."""
    catalog = _catalog()
    return {
        name: entry["about"]
        for section in ("measured", "built")
        for name, entry in catalog[section].items()
    }


def load_network(name_or_path: str | Path) -> Network:
    """Load a shipped network by name, or a network from a file.

    Parameters
    ----------
    name_or_path
        A name listed by `list_networks`, or the path of a network file (``.csv`` or ``.json``), or
        of a file that ``planner networks`` reads (docs/how-to/measure.md) with both latency and
        bandwidth.

    Returns
    -------
    Network
        Validated; pairs may be missing.

    Raises
    ------
    NetworkError
        No such name or file, or the content is not a network.
    """
    catalog = _catalog()
    name = str(name_or_path)
    if name in catalog["measured"]:
        return _measured(name, catalog["measured"][name])
    if name in catalog["built"]:
        return _built(catalog["built"][name])
    kind = Path(name).suffix.lower()
    if kind == ".jsonl":
        return ProbeLog.load(name).network()
    if kind in KINDS:
        if not _is_measurement(name, kind):
            return Network.load(name)
        try:
            return read_measured([name]).network
        except NetworkError as error:
            named = str(error).startswith(f"{name}: ")
            raise error if named else NetworkError(f"{name}: {error}") from None
    if os.path.isdir(name):  # noqa: PTH112 - of a name that is too long too
        raise NetworkError(f"{name}: is a folder; name a .csv, .json or a probe's .jsonl in it")
    hint = did_you_mean(name, [*catalog["measured"], *catalog["built"]])
    raise NetworkError(
        f"no network {name!r}{hint}: give a name that 'planner networks' lists, or a .csv, .json "
        "or a probe's .jsonl file"
    )


def _is_measurement(path: str, kind: str) -> bool:
    """Whether a file is the output of a measuring tool, not a network file."""
    if not Path(path).is_file() or kind not in (".csv", ".json"):
        return True
    text = read_text(path, error=NetworkError)
    if kind == ".json":
        return f'"{FORMAT}"' not in text
    header = {cell.strip().strip('"') for cell in text.lstrip().partition("\n")[0].split(",")}
    return not (set(ENDS) & header or all(end_columns(list(header))))


def intra_link(name: str) -> Link | None:
    """The link within a region that the source of a network assumes; None if it states none."""
    entry = _catalog()["measured"].get(name, {})
    return _link(entry["intra"]) if "intra" in entry else None


def measured_inside(name: str) -> dict[str, Link]:
    """Links within places of which a network file has a row from the place to itself."""
    kind = Path(name).suffix.lower()
    if kind != ".csv" or _is_measurement(name, kind):
        return {}
    return links_within(name)


def _link(entry: Mapping[str, Any]) -> Link:
    return Link(entry["latency_ms"] * 1e-3, entry["bandwidth_gbps"] * 1e9 / 8)


def _measured(name: str, entry: Mapping[str, Any]) -> Network:
    network = Network.load(FOLDER / f"{entry.get('file', name)}.csv")
    if "repair" not in entry:
        return network
    bandwidth = network.bandwidth_bytes_per_s.copy()
    for fix in entry["repair"]:
        pair = network.index_of(fix["source"]), network.index_of(fix["destination"])
        bandwidth[pair] = fix["bandwidth_gbps"] * 1e9 / 8
    return network.replace(bandwidth_bytes_per_s=bandwidth)


def _built(entry: Mapping[str, Any]) -> Network:
    if "base" in entry:
        inside = _link(entry["intra"])
        return load_network(entry["base"]).replicate(
            entry["counts"],
            intra_latency_s=inside.latency_s,
            intra_bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s,
        )
    counts: dict[str, int] = {}
    latency: dict[str, float] = {}
    bandwidth: dict[str, float] = {}
    for site, spec in entry["sites"].items():
        inside = _link(spec.get("intra", entry.get("intra")))
        for k in range(spec["count"]):
            name = site if spec["count"] == 1 else f"{site}{k}"
            counts[name] = spec["devices"]
            latency[name] = inside.latency_s
            bandwidth[name] = inside.bandwidth_bytes_per_s
    names = list(counts)
    arrays = np.full((2, len(names), len(names)), np.nan)
    if "between" in entry:
        between = _link(entry["between"])
        arrays[0], arrays[1] = between.latency_s, between.bandwidth_bytes_per_s
    for raw in entry.get("links", ()):
        link = _link(raw)
        i, j = names.index(raw["source"]), names.index(raw["destination"])
        arrays[:, i, j] = link.latency_s, link.bandwidth_bytes_per_s
    return Network(arrays[0], arrays[1], names).replicate(
        counts, intra_latency_s=latency, intra_bandwidth_bytes_per_s=bandwidth
    )
