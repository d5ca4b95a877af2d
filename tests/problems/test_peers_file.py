"""Peers of an averaging problem from a file, and `planner average` on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli.main import main
from planner.problems.peers_file import load_peers

HEADER = "name,samples_per_s,upload_mbps,download_mbps,can_compute,can_aggregate\n"


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """Two fast peers, a slow one behind NAT, and a server without a GPU."""
    path = tmp_path / "peers.csv"
    rows = ["a,1,1000,1000,,", "b,1,1000,1000,yes,yes", "c,1,200,200,,no", "d,0,2500,2500,,"]
    path.write_text(HEADER + "\n".join(rows) + "\n")
    return path


def test_units_and_flags(peers: Path) -> None:
    """Megabits become bytes, empty flags mean yes."""
    found = load_peers(peers)
    assert found.upload_bytes_per_s[2] == 25e6
    assert found.can_aggregate == (True, True, False, True)


def test_average_prints_roles_and_shares(peers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The client reduces nothing, shares add up to one, the batch is distributed."""
    argv = ["average", str(peers), "--batch-samples", "4096", "--gradient-bytes", "1e9", "--json"]
    assert main(argv) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["status"] == "OPTIMAL"
    assert sum(p["share"] for p in data["peers"]) == pytest.approx(1)
    assert data["peers"][2]["share"] == 0
    assert sum(p["samples_per_step"] for p in data["peers"]) == pytest.approx(4096)
    assert data["strategy"]


def test_a_slow_download_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who receives the average as fast as it can limits everybody's rate."""
    path = tmp_path / "peers.csv"
    path.write_text("name,samples_per_s,upload_mbps,download_mbps\nlab,2,200,200\ncafe,1,5,20\n")
    argv = ["average", str(path), "--batch-samples", "64", "--gradient-bytes", "1e8"]
    assert main([*argv, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["objective"] == pytest.approx(20e6 / 8 / 1e8) and data["limited_by"] == ["cafe"]
    assert main(argv) == 0
    assert "cafe limits the rate: its download, 20 Mb/s," in capsys.readouterr().out
    path.write_text("name,samples_per_s,upload_mbps,download_mbps\na,2,200,200\nb,1,200,200\n")
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limited_by"] == []


def test_pair_limits_come_from_a_network(
    peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow pairs lower the rate; a network without a peer is refused."""
    argv = ["average", str(peers), "--batch-samples", "1", "--gradient-bytes", "1e9", "--json"]
    assert main(argv) == 0
    free = json.loads(capsys.readouterr().out)["objective"]
    links = tmp_path / "links.csv"
    pairs = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    rows = "".join(f"{a},{b},1,0.05\n" for a, b in pairs)
    links.write_text("source,destination,latency_ms,bandwidth_gbps\n" + rows)
    assert main([*argv, "--links", str(links)]) == 0
    slow = json.loads(capsys.readouterr().out)["objective"]
    assert slow < free
    # other devices are left out
    others = "".join(f"{a},e,1,0.01\ne,{a},1,0.01\n" for a in "abcd")
    links.write_text("source,destination,latency_ms,bandwidth_gbps\n" + rows + others)
    assert main([*argv, "--links", str(links)]) == 0
    assert json.loads(capsys.readouterr().out)["objective"] == pytest.approx(slow)
    assert main([*argv, "--links", "aws4_dtfm_regional_2022"]) == 2
    capsys.readouterr()
    for text, said in (
        (
            rows.replace("d", "dd"),
            "peer 'd' is no device of the network (did you mean 'dd'?); name one of a, b, c, dd",
        ),
        (
            rows.replace("b,a,1,0.05\n", ""),
            "1 ordered pair is not measured, the first is 'b' to 'a'; without 'a' (1 of 4) none is "
            "missing; measure them, or take the other direction's figures: planner networks FILE "
            "--both-ways --out net.csv",
        ),
    ):
        links.write_text("source,destination,latency_ms,bandwidth_gbps\n" + text)
        assert main([*argv, "--links", str(links)]) == 2
        assert f"{links}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,upload_mbps\n", "column 'samples_per_s' is missing"),
        ("name,samples_per_s,upload_mpbs,download_mbps\na,1,1,1\n", "mean 'upload_mbps'?); give"),
        (HEADER + "a,2 /s,1,1,,\n", "samples_per_s is '2 /s'; give the number alone"),
        (HEADER, "has no rows"),
        (HEADER + "a,x,1,1,,\n", "line 2: samples_per_s is 'x'"),
        (HEADER + "a,nan,1,1,,\n", "give a finite number"),
        (HEADER + "a,1,1,1,maybe,\n", "can_compute is 'maybe'"),
        (HEADER + "a,1,1,1,,\na,1,1,1,,\n", "peer 'a' is listed twice"),
        (HEADER + "a,1,-1,1,,\n", "upload"),
        (HEADER + "a,1,1,1,,,7\n", "line 2 has 7 cells, the header 6"),
        (HEADER.replace("aggregate", "agregate") + "a,1,1,1,,no\n", "'can_agregate' is unknown"),
    ],
)
def test_invalid_files_give_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has file, line, value and remedy; exit code 2."""
    path = tmp_path / "peers.csv"
    path.write_text(text)
    argv = ["average", str(path), "--batch-samples", "1", "--gradient-bytes", "1"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
