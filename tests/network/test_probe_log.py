"""Log of a link probe: valid and invalid files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import planner as pl
from planner.cli.main import main
from planner.network.error import NetworkError
from planner.network.probe_log import ALL, LinkFinding, ProbeLog

HEAD = {
    "format": "planner.probe",
    "schema_version": 1,
    "began": "2026-01-02",
    "devices": ["b", "a"],
}


def finding(source: str, destination: str, rate: float, trip: float | None) -> LinkFinding:
    """A finding with a spread of a tenth."""
    trips = None if trip is None else (trip, trip, 2 * trip)
    rates = {1: (rate, 0.9 * rate, 1.1 * rate)}
    return LinkFinding(source, destination, "2026-01-02T03:04:05+00:00", rates, trips, {1024: 0.5})


FOUND = (
    finding("a", "b", 1e6, 0.04),
    finding("b", "a", 2e6, 0.06),
    finding("a", ALL, 3e6, None),
    finding(ALL, "a", 4e6, None),
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write a file with two links and two devices."""
    path = tmp_path / "log.jsonl"
    path.write_text(
        "".join(line + "\n" for line in (json.dumps(HEAD), *(f.to_line() for f in FOUND)))
    )
    return path


def test_a_log_is_a_network(log: Path) -> None:
    """Half the median round trip, the mean rate of one flow; usable by name."""
    network = pl.load_network(log)
    assert network.ids == ("b", "a")
    np.testing.assert_allclose(network.latency_s[[0, 1], [1, 0]], [0.03, 0.02])
    np.testing.assert_allclose(network.bandwidth_bytes_per_s[[0, 1], [1, 0]], [2e6, 1e6])


def test_the_last_finding_of_a_pair_counts(log: Path) -> None:
    """For probes that were restarted."""
    with log.open("a") as file:
        file.write(finding("a", "b", 5e6, 0.04).to_line() + "\n")
    assert pl.load_network(log).bandwidth_bytes_per_s[1, 0] == 5e6


def test_probe_command(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A network file with spread and dates, and a devices file with rates."""
    net, devices = log.with_name("net.csv"), log.with_name("devices.csv")
    words = ["probe", str(log), "--out", str(net), "--devices-out", str(devices)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "2 devices, 2 of 2 ordered pairs" in said and "8.0" in said and "20%" in said
    assert pl.load_network(net) == pl.load_network(log).subset(["a", "b"])
    cluster = pl.load_devices(devices, pl.load_network(net))
    assert cluster.upload_bytes_per_s is not None and 3e6 in cluster.upload_bytes_per_s
    assert main([*words, "--json", "--force"]) == 0
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 4
    assert main(["probe", str(log), "--out", str(log.with_suffix(".csv"))]) == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "not a finding"),
        ("[" * 100_000, "not a finding"),
        (FOUND[0].to_line().replace("1000000.0", "NaN", 1), "above 0"),
        (FOUND[0].to_line().replace('"1":', '"2":'), "one flow"),
        (FOUND[0].to_line().replace("0.04", "-1"), "above 0"),
        (FOUND[0].to_line().replace("0.5", "-0.5"), "above 0"),
        (FOUND[0].to_line().replace("0.5", "9" * 400), "not a finding"),
    ],
)
def test_damaged_logs(log: Path, line: str, said: str) -> None:
    """One line with the path."""
    with log.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(NetworkError, match=said) as error:
        ProbeLog.load(log)
    assert str(log) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "planner.probe", "schema_version": 2}\n', "\x00\x01"]
)
def test_other_files_are_rejected(tmp_path: Path, text: str) -> None:
    """Files that are not logs, or of another release."""
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(NetworkError, match=r"log of a probe|schema_version"):
        ProbeLog.load(path)
