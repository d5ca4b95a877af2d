"""Names of rows and columns that hold summaries, such as ``Mean``, instead of devices."""

from __future__ import annotations

import re

from planner.network.error import NetworkError

SUMMARIES = {
    *("mean", "average", "avg", "median", "total", "sum", "min", "max", "minimum", "maximum"),
    *("std", "stdev", "stddev", "deviation", "variance", "overall", "percentile", "quantile"),
    *("all", "jitter", "mdev", "count", "best", "worst", "wrst", "loss"),
}
BESIDE = {
    *("row", "column", "rtt", "latency", "bandwidth", "throughput", "ping", "delay", "packet"),
    *("dev", "standard", "grand", "round", "trip", "time", "value", "values", "of", "to", "from"),
    *("the", "per", "over", "across", "every", "each", "other", "others", "nodes", "devices"),
    *("regions", "hosts", "servers", "peers", "sites", "pairs", "links"),
    *("ms", "s", "us", "gbps", "mbps"),
}
"""Words in names of summaries, with at least one of the first set."""
PERCENTILE = re.compile(r"\bp\d\d(\.\d+)?\b|\b\d+(\.\d+)?(st|nd|rd|th)?[ _-]*percentile\b")


def refuse_summary(name: str, label: str) -> None:
    """Refuse a summary over all devices in place of a device."""
    name_words = set(re.findall(r"[^\W_]+", PERCENTILE.sub("percentile", name.lower())))
    if name_words & SUMMARIES and name_words <= SUMMARIES | BESIDE:
        raise NetworkError(
            f"{label} {name!r} is a figure over all devices and no device; take it out, or rename "
            "the device"
        )
