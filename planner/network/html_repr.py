"""HTML representation of networks and clusters in notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from planner.network.pair_table import PairTable
from planner.utils.html import boxed, line, table
from planner.utils.text import quantity

MAX_REGIONS = 12
"""Largest number of rows and columns of the table."""
MAX_KINDS = 40
"""Largest number of kinds of devices in the table."""


def network_html(
    title: str, regions: Sequence[str], latency_s: PairTable, bandwidth: PairTable
) -> str:
    """Mean one-way latency and mean bandwidth between regions."""
    names = list(dict.fromkeys(regions))
    members = [[d for d, r in enumerate(regions) if r == name] for name in names]
    shown = min(len(names), MAX_REGIONS)
    rows = []
    for i in range(shown):
        cells = [escape(names[i]) + (f" ({len(members[i])})" if len(members[i]) > 1 else "")]
        for j in range(shown):
            cells.append(_between(latency_s, bandwidth, members[i], members[j]))
        rows.append(cells)
    truncation = f"; {shown} of {len(names)} regions" if shown < len(names) else ""
    return boxed(
        line(title),
        table(["from, to", *names[:shown]], rows),
        line(f"Mean one-way latency in ms, mean bandwidth in Gb/s{truncation}."),
    )


def cluster_html(
    title: str, regions: Sequence[str], figures: Mapping[str, Sequence[float]], network: str
) -> str:
    """Number of devices of each kind by region.

    Parameters
    ----------
    figures
        By unit, one value per device, such as ``{"FLOP/s": [...], "B": [...]}``.
    """
    kinds = Counter(zip(regions, *figures.values(), strict=True))
    rows = [
        [escape(region), str(device_count), *map(quantity, values, figures)]
        for (region, *values), device_count in list(kinds.items())[:MAX_KINDS]
    ]
    truncation = f"{MAX_KINDS} of {len(kinds)} kinds" if len(kinds) > MAX_KINDS else ""
    heads = ["region", "devices", "attained", "memory"]
    return boxed(line(title), table(heads, rows), line(truncation), network)


def _between(
    latency_s: PairTable, bandwidth: PairTable, sources: list[int], targets: list[int]
) -> str:
    """Text of a cell; on the diagonal, between devices of the region."""
    if sources == targets and len(sources) == 1:
        return ""
    means = (
        latency_s.mean_between(sources, targets) * 1e3,
        bandwidth.mean_between(sources, targets) * 8e-9,
    )
    parts = ["-" if np.isnan(value) else f"{value:.3g}" for value in means]
    return "not measured" if parts == ["-", "-"] else "\u00a0/\u00a0".join(parts)
