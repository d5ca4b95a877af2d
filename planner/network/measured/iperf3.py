"""Output of ``iperf3 --json``: bandwidth of one TCP run, in one or both directions.

Its round-trip times are those of a loaded link, so they give no latency. Releases 3.7 to 3.10 write
the sums of ``--bidir`` under the same keys twice, the client's direction first; later ones add a
suffix to the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.network.error import NetworkError
from planner.network.measured.findings import Measurements
from planner.utils.input_files import parse_json
from planner.utils.validate import real

REVERSE = {f"sum{part}": f"sum{part}_bidir_reverse" for part in ("", "_sent", "_received")}
"""Keys of the client's direction, and their names for the server's after release 3.10."""


def read_iperf3(text: str, names: Mapping[str, str]) -> Measurements:
    """Bandwidth of a run."""
    data = parse_json(text, "what iperf3 wrote", error=NetworkError, second=REVERSE)
    if isinstance(data, dict) and {"assignment", "averaging"} <= data.keys():
        raise NetworkError("is a plan; give the network that it was made for, as measured")
    if not isinstance(data, dict) or not isinstance(data.get("start"), dict):
        raise NetworkError(
            "has no field 'start': not of iperf3, nor of mtr --json, a matrix or a network "
            "file; give what one of these tools wrote"
        )
    if "error" in data:
        raise NetworkError(f"iperf3 failed: {str(data['error'])[:200]}; run it again")
    try:
        start, end = data["start"], data["end"]
        test, ends = start["test_start"], start["connected"][0]
        host, system = str(start["connecting_to"]["host"]), str(start["system_info"]).split()
        local, remote = str(ends["local_host"]), str(ends["remote_host"])
        if test["protocol"] != "TCP":
            raise NetworkError(f"was measured over {test['protocol']}; run it over TCP")
        client = _first(names, (*system[1:2], local)) or (system[1] if len(system) > 1 else local)
        server = _first(names, (host, remote)) or host
        twice = next((key for key, second in REVERSE.items() if second in end), None)
        if twice and len(start["connected"]) != 2 * test["num_streams"]:
            raise NetworkError(
                f"has {twice} twice, but was not measured with --bidir; give each run a file of "
                "its own"
            )
        forward, backward = _rate(end["sum_received"]), end.get(REVERSE["sum_received"])
        measurements = Measurements()
        flow = (server, client) if test.get("reverse") else (client, server)
        measurements.set_bandwidth(*flow, forward)
        if backward is not None:
            measurements.set_bandwidth(*flow[::-1], _rate(backward))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise NetworkError(
            "lacks fields of an iperf3 TCP client; give the output of iperf3 --json"
        ) from None
    return measurements


def _rate(summary: Any) -> float:
    return real("bits_per_second", summary["bits_per_second"], 0, error=NetworkError) / 8


def _first(names: Mapping[str, str], keys: tuple[str, ...]) -> str | None:
    return next((names[key] for key in keys if key in names), None)
