"""Measurements of other tools become a network, or are rejected in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.cli.main import main
from planner.network.assumed import assumed_sentences
from planner.network.error import NetworkError
from planner.network.measured.iperf3 import read_iperf3
from planner.network.measured.nccl_tests import read_nccl_tests
from planner.network.measured.reading import load_names, read_measured
from planner.network.measured.tables import read_table

DATA = Path(__file__).parents[1] / "data/measured"


def iperf3(name: str) -> str:
    """Output of iperf3 3.12 between two hosts, without its intervals."""
    return (DATA / f"iperf3_{name}.json").read_text()


def received(name: str, field: str = "sum_received") -> float:
    """Bytes per second."""
    return float(json.loads(iperf3(name))["end"][field]["bits_per_second"]) / 8


def test_iperf3_both_ways() -> None:
    """Forward, --reverse and --bidir; names from the file or from a table."""
    there, back = ("oregon", "tokyo.example.org"), ("tokyo.example.org", "oregon")
    assert read_iperf3(iperf3("fwd"), {}).bandwidth_bytes_per_s == {there: received("fwd")}
    assert read_iperf3(iperf3("rev"), {}).bandwidth_bytes_per_s == {back: received("rev")}
    names = {"10.0.0.1": "a", "10.0.0.2": "b"}
    found = read_iperf3(iperf3("bidir"), names)
    other = received("bidir", "sum_received_bidir_reverse")
    assert found.bandwidth_bytes_per_s == {("a", "b"): received("bidir"), ("b", "a"): other}
    assert found.latency_s == {}


def test_iperf3_with_duplicate_keys(tmp_path: Path) -> None:
    """Releases 3.7 to 3.10: the client's direction, then the server's; also after tags."""
    text = iperf3("bidir").replace("_bidir_reverse", "")
    assert text.count('"sum_received"') == 2
    other = received("bidir", "sum_received_bidir_reverse")
    there, back = ("oregon", "tokyo.example.org"), ("tokyo.example.org", "oregon")
    wanted = {there: received("bidir"), back: other}
    assert read_iperf3(text, {}).bandwidth_bytes_per_s == wanted
    path = tmp_path / "run.json"
    for tag in ("0: ", " 3: ", "[1,0]<stdout>:", "[1,0]<stdout>: ", "[prterun-x-12@1,0]<stdout>: "):
        path.write_text("".join(f"{tag}{line}" for line in text.splitlines(keepends=True)))
        found = read_measured([path], latency_s=0.1).network
        assert found.bandwidth_bytes_per_s[0, 1] == received("bidir")
        assert found.bandwidth_bytes_per_s[1, 0] == other
    with pytest.raises(NetworkError, match="'sum_received' more than twice"):
        read_iperf3(
            text.replace(
                '"end":', '"end": {"sum_received": 1, "sum_received": 2, "sum_received": 3}, "end":'
            ),
            {},
        )
    path.write_text(f"0: {{\n1: {{\n0: {text[1:]}")
    with pytest.raises(NetworkError, match="has the output of 2 tasks; give each a file of its"):
        read_measured([path], latency_s=0.1)


def test_nccl_tests() -> None:
    """Time of the smallest message and bus bandwidth of the largest one, out of place."""
    text = (DATA / "sendrecv.txt").read_text()
    found = read_nccl_tests(text, {"node-b": "b"})
    for ends in (("node-a", "b"), ("b", "node-a")):
        assert found.latency_s[ends] == pytest.approx(34.24e-6)
        assert found.bandwidth_bytes_per_s[ends] == pytest.approx(2.23e9)
    for tag in (
        *("[1,0]<stdout>:", "[1,0]<stdout>: ", "[0] ", "0: ", "12: ", "[j@1,0]<stdout>: "),
        *(
            "[0]: ",
            "[default0]:",
            "node-1: ",
            "2026-05-01T10:00:00.125Z ",
            "May  1 10:00:00 ",
            "[2026-05-01 10:00:00] ",
        ),
    ):
        tagged = "".join(f"{tag}{line}" for line in text.splitlines(keepends=True))
        assert read_nccl_tests(tagged, {"node-b": "b"}) == found
    before = "PING b (10.0.0.2) 56(84) bytes of data.\nrtt min/avg/max/mdev = 1/1/1/0 ms\n"
    assert read_nccl_tests(before + text, {"node-b": "b"}) == found
    empty = text.replace("           8 ", "           0 ", 1)
    rows = sorted(int(line.split()[0]) for line in text.splitlines() if line.strip()[:1].isdigit())
    assert rows[0] == 8
    latency = read_nccl_tests(empty, {}).latency_s
    assert latency[("node-a", "node-b")] > 0 and latency != read_nccl_tests(text, {}).latency_s
    one_host = text.replace("node-b device  0", "node-a device  1")
    assert ("node-a/0", "node-a/1") in read_nccl_tests(one_host, {}).latency_s
    older = "\n".join(
        [
            "#   Rank  0 Pid   1320 on        x0 device  0 [0x00] V100",
            "#   Rank  1 Pid   1321 on        x1 device  0 [0x00] V100",
            "#       size         count      type     time   algbw   busbw  error     time   algbw",
            "    36777216      37748744     uint8    11732    3.22    3.25  0e+00    11698    3.23",
            "# Out of bounds values : 0 OK",
        ]
    )
    found = read_nccl_tests(older, {})
    # a large message's time is no latency
    assert found.bandwidth_bytes_per_s[("x0", "x1")] == 3.25e9 and not found.latency_s
    ending = text.replace("   134217728      33554432 ", "        2048           512 ")
    assert not read_nccl_tests(ending, {}).bandwidth_bytes_per_s


def test_invalid_nccl_tests() -> None:
    """Ranks ran separately, results were wrong, or a file has several runs."""
    text = (DATA / "sendrecv.txt").read_text()
    ranks = [line for line in text.splitlines() if "Rank" in line]
    assert len(ranks) == 2
    alone = text.replace(ranks[1], ranks[1].replace("Rank  1", "Rank  0"))
    nothing = "\n".join(
        [
            *ranks,
            "#       size         count      type   redop    root     time   algbw   busbw #wrong",
            "           0             0     float    none      -1     0.12    0.00    0.00      0",
        ]
    )
    for bad, said in (
        (alone, "has 2 ranks with the number 0: they did not connect"),
        (text.replace(ranks[1], ""), "is of 1 ranks"),
        (text + text, "rank 0 more than once; give each run a file of its own"),
        (nothing, "has rows of size 0 only, for which NCCL sends nothing"),
        (text + "\n# Out of bounds values : 3 FAILED\n", "3 values that arrived were wrong"),
        (
            text.replace("0.03      0", "0.03      5"),
            r"size 1024: values that arrived were wrong \(#",
        ),
        (text.partition("# Out")[0], "ends before the line '# Out of bounds values'"),
        (
            f"{text}beta: Test NCCL failure common.cu:401 'remote process exited'\n",
            "is of a run that failed: .beta: Test NCCL failure common.cu:401",
        ),
        (f"{text} .. beta pid 5678: Test failure common.cu:590\n", "is of a run that failed"),
    ):
        with pytest.raises(NetworkError, match=said):
            read_nccl_tests(bad, {})


def test_rows_and_columns_of_a_matrix_are_the_same_devices() -> None:
    """Names on one side only, and summary rows, are reported."""
    for text, said in (
        ("rtt_ms,A,B,Mean\nA,,1,1\nB,1,,1\n", "column 'Mean' is a figure over all devices"),
        ("rtt_ms,A,B\nA,,1\nB,1,\nAverage,1,1\n", "row 'Average' is a figure over all"),
        ("rtt_ms,A,B\nX (A),,1\nY (B),1,\n", "row 'X .A.' has no column, and column 'A' has no"),
        ("rtt_ms,A,B\nA,,1\nA,1,\n", "row 'A' is given twice; keep one of them"),
        ("rtt_ms,A,B\nA,,1\nB,1,\nC,1,1\n", "row 'C' has no column; call each device the same"),
    ):
        with pytest.raises(NetworkError, match=said):
            read_table(text)
    assert read_table("rtt_ms,max-1,Maxwell\nmax-1,,1\nMaxwell,1,\n").latency_s
    assert read_table("source,destination,rtt_ms\nmax-1,All-in,1\n").latency_s
    for name in (
        *("Median", "TOTAL", "avg", "Std Dev", "Mean (ms)", "Avg. RTT", "p95", "p99 latency"),
        *("Average ping", "90th percentile", "Mean to others", "All", "jitter"),
    ):
        with pytest.raises(NetworkError, match=re.escape(f"column '{name}' is a figure over")):
            read_table(f"rtt_ms,A,B,{name}\nA,,1,1\nB,1,,1\n")


def test_half_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One triangle counts for both directions, which the command reports."""
    upper = "rtt_ms,a,b,c\na,,10,20\nb,,,30\nc,,,\n"
    lower = "rtt_ms,a,b,c\na,0,,\nb,10,0,\nc,20,30,0\n"
    wanted = {("a", "b"): 0.005, ("a", "c"): 0.01, ("b", "c"): 0.015}
    wanted |= {(b, a): value for (a, b), value in wanted.items()}
    assert read_table(upper).latency_s == read_table(lower).latency_s == wanted
    # as numpy.triu and numpy.tril write it
    zeros = upper.replace(",,", ",0,").replace(",,", ",0,").replace(",\n", ",0.0\n")
    assert zeros.count("0,0") and read_table(zeros).latency_s == wanted
    assert read_table(lower.replace(",,", ",0,").replace(",\n", ",0\n")).latency_s == wanted
    pair = read_table("bandwidth_mbps,a,b\na,0,8\nb,0,0\n").bandwidth_bytes_per_s
    assert pair == {("a", "b"): 1e6}
    # of which a pair may be missing
    gap = read_table("rtt_ms,a,b,c,d\na,,10,20,30\nb,,,,50\nc,,,,60\nd,,,,\n").latency_s
    assert len(gap) == 10 and gap["d", "b"] == 0.025 and ("c", "b") not in gap
    # what one device measured says nothing of the other direction
    rows = "a,,10,20\n", "b,11,,30\n", "c,21,31,\n"
    assert [len(read_table(f"rtt_ms,a,b,c\n{row}").latency_s) for row in rows] == [2, 2, 2]
    # with one more figure it is a matrix with gaps
    assert len(read_table(upper.replace("b,,,", "b,11,,")).latency_s) == 4
    path = tmp_path / "half.csv"
    path.write_text(upper)
    assert main(["networks", str(path), "--bandwidth-gbps", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 latencies and 0 bandwidths were measured, 3 taken from the other direction" in said


MTR = {
    "report": {
        "mtr": {"src": "home", "dst": "cloud.example.org", "tests": 10},
        "hubs": [
            {"count": 1, "host": "gw", "Loss%": 0.0, "Snt": 10, "Last": 1.0, "Avg": 1.0},
            {"count": 2, "host": "192.0.2.7", "Loss%": 0.0, "Snt": 10, "Last": 9.0, "Avg": 8.0},
        ],
    }
}
MTR_REPORT = """Start: 2024-02-01T10:00:00+0000
HOST: home                        Loss%   Snt   Last   Avg  Best  Wrst StDev
  1.|-- gw                         0.0%    10    1.0   1.0   0.9   1.2   0.1
  2.|-- cloud.example.org          0.0%    10    9.0   8.0   7.9   9.2   0.4
"""
CLOUDPING: dict[str, dict[str, Any]] = {
    "metadata": {"percentile": "p_50", "timeframe": "1D", "unit": "milliseconds"},
    "data": {
        "us-east-1": {"us-east-1": 4.1, "eu-west-1": 68.0},
        "eu-west-1": {"us-east-1": 70.0, "eu-west-1": 3.2},
    },
}
CLOUDPING_BEFORE = [
    {"region": a, "averages": [{"regionTo": b, "average": rtt} for b, rtt in row.items()]}
    for a, row in CLOUDPING["data"].items()
]


def test_latencies_of_other_tools(tmp_path: Path) -> None:
    """mtr names both ends; cloudping.co and nested objects are matrices."""
    pair = {("home", "cloud.example.org"): 0.004}
    between = {("us-east-1", "eu-west-1"): 0.034, ("eu-west-1", "us-east-1"): 0.035}
    for name, text, wanted in (
        ("a.json", json.dumps(MTR), pair),
        ("a.txt", json.dumps(MTR), pair),
        ("a.txt", MTR_REPORT, pair),
        ("a.json", json.dumps(CLOUDPING), between),
        ("a.json", json.dumps(CLOUDPING_BEFORE), between),
        ("a.json", json.dumps(CLOUDPING["data"]), between),
        (
            "a.json",
            json.dumps(
                [
                    {"source": a, "destination": b, "rtt_ms": rtt}
                    for a, row in CLOUDPING["data"].items()
                    for b, rtt in row.items()
                    if a != b
                ]
            ),
            between,
        ),
    ):
        path = tmp_path / name
        path.write_text(text)
        found = read_measured([path], unit="rtt_ms", bandwidth_bytes_per_s=1.0).network
        for (a, b), seconds in wanted.items():
            assert found.latency_s[found.index_of(a), found.index_of(b)] == seconds
    path.write_text(json.dumps(CLOUDPING["data"]))
    with pytest.raises(NetworkError, match="is a matrix without a unit; say it with --unit"):
        read_measured([path], bandwidth_bytes_per_s=1.0)
    path.write_text(json.dumps(MTR).replace('"host": "192.0.2.7"', '"host": "???"'))
    with pytest.raises(NetworkError, match=r"cloud\.example\.org did not answer mtr"):
        read_measured([path], bandwidth_bytes_per_s=1.0)


def test_surrounding_text_and_options(tmp_path: Path) -> None:
    """Lines before and after JSON, mtr with addresses and networks, and a given unit."""
    pair = {("home", "cloud.example.org"): 0.004}
    hop = "cloud.example.org          0.0%"
    for text in (
        f"srun: job 7 queued\nWarning: Permanently added 'b'.\n{json.dumps(MTR)}\nbye\n",
        MTR_REPORT.replace(hop, "cloud.example.org (192.0.2.7)  0.0%"),
        MTR_REPORT.replace("  2.|-- ", "  2. AS64500 ").replace("  1.|-- ", "  1. AS???   "),
    ):
        for name in ("a.json", "a.txt", "slurm-1.out", "a.csv"):
            path = tmp_path / name
            path.write_text(text)
            found = read_measured([path], bandwidth_bytes_per_s=1.0).network
            assert {(found.ids[1], found.ids[0]): found.latency_s[1, 0]} == pair
    path = tmp_path / "a.json"
    for text in (json.dumps(CLOUDPING), json.dumps(CLOUDPING_BEFORE)):
        path.write_text(text)
        for unit, seconds in (("latency_ms", 0.068), ("rtt_ms", 0.034), ("bandwidth_mbps", 0.034)):
            found = read_measured([path], unit=unit, bandwidth_bytes_per_s=1.0).network
            there = found.index_of("us-east-1"), found.index_of("eu-west-1")
            assert found.latency_s[there] == pytest.approx(seconds)
    path = tmp_path / "a.csv"
    path.write_text(
        (DATA / "sendrecv.txt")
        .read_text()
        .replace("  8    ", "9999    ")
        .replace(" 1024 ", " 9998 ")
    )
    with pytest.raises(
        NetworkError, match=r"no latency was measured; give .* nccl-tests from -b 8"
    ):
        read_measured([path])


def test_records_with_other_columns(tmp_path: Path) -> None:
    """Columns of all records count; names may be numbers."""
    path = tmp_path / "a.json"
    path.write_text(
        '[{"source": 1, "destination": 2, "rtt_ms": 10},'
        ' {"source": 2.0, "destination": 1, "rtt_ms": 12, "bandwidth_mbps": 8}]'
    )
    found = read_measured([path], both_ways=True).network
    assert found.ids == ("1", "2") and found.bandwidth_bytes_per_s[0, 1] == 1e6


def test_plan_reads_measurements(tmp_path: Path) -> None:
    """With suffixes in any case; a missing quantity gets a remedy."""
    half = "bandwidth_mbps,a,b,c\na,,8,8\nb,,,8\nc,,,\n"
    (tmp_path / "net.CSV").write_text("source,destination,rtt_ms,bandwidth_mbps\na,b,10,8\n")
    assert pl.load_network(tmp_path / "net.CSV").latency_s[0, 1] == 0.005
    pl.load_network(tmp_path / "net.CSV").save(tmp_path / "net.JSON")
    assert pl.load_network(tmp_path / "net.JSON").ids == ("a", "b")
    (tmp_path / "run.log").write_text((DATA / "sendrecv.txt").read_text())
    assert pl.load_network(tmp_path / "run.log").ids == ("node-a", "node-b")
    for name, text, option in (
        ("half.csv", half, "--latency-ms 50"),
        ("HALF.CSV", half.replace("bandwidth_mbps", "rtt_ms"), "--bandwidth-gbps 1"),
        ("run.Json", iperf3("bidir"), "--latency-ms 50"),
        ("pairs.csv", "source,destination,rtt_ms\na,b,1\n", "--bandwidth-gbps 1"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(NetworkError, match=f"planner networks FILE {option}") as caught:
            pl.load_network(path)
        assert str(caught.value).startswith(f"{path}: ")


def test_tables() -> None:
    """One row per pair with either column, and matrices with the unit in their corner."""
    pairs = read_table("source,destination,rtt_ms\na,b,10\nb,a,-\n")
    assert pairs.latency_s == {("a", "b"): 0.005}
    matrix = read_table("rtt_ms,a,b\na,,10\nb,12,0\n")
    assert matrix.latency_s == {("a", "b"): 0.005, ("b", "a"): 0.006}
    assert read_table("rtt_ms,a,b\na,,10\n", "bandwidth_mbps").latency_s == {("a", "b"): 0.005}
    named = read_table("to,a,b\na,0,8\nb,,0\n", "bandwidth_mbps")
    assert named.bandwidth_bytes_per_s == {("a", "b"): 1e6}


def test_files_complete_each_other(tmp_path: Path) -> None:
    """A ping table and iperf3's files make a network; assumptions are reported."""
    (tmp_path / "rtt.csv").write_text("rtt_ms,a,b,c\na,,10,20\nb,10,,30\nc,20,30,\n")
    (tmp_path / "run.json").write_text(iperf3("bidir"))
    names = {"10.0.0.1": "a", "10.0.0.2": "b"}
    found = read_measured([tmp_path], names=names, bandwidth_bytes_per_s=1e6)
    assert found.network.ids == ("a", "b", "c")
    assert (found.latencies, found.bandwidths, found.mirrored) == (6, 2, 0)
    assert found.assumed == ("bandwidth of 4 ordered pairs, 0.008 Gb/s",)
    assert found.network.bandwidth_bytes_per_s[0, 1] == received("bidir")
    assert found.network.bandwidth_bytes_per_s[2, 0] == 1e6
    assert found.network.latency_s[1, 2] == 0.015
    # without a default they are missing, and the device that stands in the way is named
    part = read_measured([tmp_path], names=names).network
    assert len(part.missing_pairs()) == 4 and "without 'c' (1 of 3)" in part.describe_missing()
    with pytest.raises(NetworkError, match="without 'c'"):
        part.require_complete()
    assert part.complete().ids == ("a", "b")


def test_both_ways_option(tmp_path: Path) -> None:
    """Only on request, and only where the other direction is missing."""
    (tmp_path / "half.csv").write_text(
        "source,destination,latency_ms,bandwidth_mbps\na,b,5,8\nb,a,6,\n"
    )
    found = read_measured([tmp_path / "half.csv"], both_ways=True)
    np.testing.assert_allclose(found.network.latency_s, [[0, 0.005], [0.006, 0]])
    np.testing.assert_allclose(found.network.bandwidth_bytes_per_s[[0, 1], [1, 0]], 1e6)
    assert found.mirrored == 1
    # what is copied is no measurement
    assert found.assumed_pairs["bandwidth"].tolist() == [[False, False], [True, False]]
    assert not found.assumed_pairs["latency"].any()


def test_other_columns_are_no_quantity(tmp_path: Path) -> None:
    """Such as bytes in tables of iperf."""
    path = tmp_path / "a.csv"
    path.write_text("source,destination,bandwidth_mbps,transfer_MB\na,b,8,10\nb,a,8,10\n")
    found = read_measured([path], latency_s=0.01)
    assert found.bandwidths == 2 and found.latencies == 0


def test_measurements_replace_what_was_copied(tmp_path: Path) -> None:
    """A file with copied values is merged with later measurements."""
    half, out, more = (tmp_path / name for name in ("half.csv", "net.csv", "more.csv"))
    half.write_text("source,destination,latency_ms,bandwidth_mbps\na,b,5,8\n")
    assert main(["networks", str(half), "--both-ways", "--out", str(out)]) == 0
    more.write_text("source,destination,latency_ms,bandwidth_mbps\nb,a,6,80\n")
    network = read_measured([out, more]).network
    np.testing.assert_allclose(network.bandwidth_bytes_per_s[[0, 1], [1, 0]], [1e6, 1e7])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "rtt_ms,a,b\na,1\n", "line 2 has 2 cells"),
        ("a.csv", "rtt_ms;a;b\na;;1\n", "separate cells by commas"),
        ("a.csv", "source,destination,rtt_ms\na,b\n", "line 2 has 2 cells"),
        ("a.csv", "rtt_ms,a,b\ra,,1\r", "is not CSV"),
        (
            "a.json",
            iperf3("fwd").replace('"bits_per_second": ', '"bits_per_second": 1e400, "x": '),
            "",
        ),
        (
            "a.txt",
            (DATA / "sendrecv.txt").read_text().replace("sum      -1", "        -1"),
            "cells",
        ),
        ("a.csv", "rtt_ms,a,b\na,,fast\n", "rtt_ms is 'fast'"),
        ("a.csv", "rtt_ms,a,b\na,,nan\n", "rtt_ms is 'nan'"),
        ("a.csv", "rtt_ms,a,b\na,,-3\n", "measure it again"),
        ("a.csv", "rtt_ms,a,b\na,,1\na,,1\n", "given twice"),
        ("a.csv", "source,destination\na,b\n", "no column of numbers"),
        ("a.csv", "source,destination,rtt_ms,latency_ms\na,b,1,1\n", "several columns"),
        ("a.csv", "source,destination,bandwidth_mbps\na,b,0\n", "a bandwidth of 0"),
        ("a.csv", "source,destination,rtt_ms\n,b,1\n", "empty name"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON"),
        ("a.json", "[]", "not of iperf3"),
        ("a.json", '{"start": {}, "end": {}}', "lacks fields of an iperf3 TCP client"),
        ("a.json", iperf3("err"), "iperf3 failed: unable to connect"),
        ("a.json", iperf3("fwd").replace('"TCP"', '"UDP"'), "over TCP"),
        ("a.json", iperf3("fwd").replace("tokyo.example.org", "oregon"), "to itself"),
        ("a.txt", "", "is none of the outputs read here, found ''"),
        (
            "a.txt",
            "hello\nworld\n",
            "is none of the outputs read here, found 'hello'; give that of",
        ),
        ("slurm-1.out", "hello\n", "is none of the outputs read here, found 'hello'"),
        ("a.json", "hello\n", "is none of the outputs read here, found 'hello'"),
        ("a.txt", "10.0.0.2 is alive (12.5 ms)\n", "is what fping prints"),
        (
            "a.txt",
            " 1?: [LOCALHOST]    pmtu 1500\n 1:  gw  0.5ms\n     Resume: pmtu 1500\n",
            "is what traceroute prints",
        ),
        ("a.txt", "tcp_lat:\n    latency  =  24 us\n", "is what qperf or sockperf prints"),
        ("a.txt", "sockperf: ====> avg-latency=12.3\n", "is what qperf or sockperf prints"),
        ("a.txt", "MIGRATED TCP STREAM TEST from 0.0.0.0 to b\n", "is what netperf prints"),
        ("a.txt", "h 0 10.0.0.1\np 0 1234\n", "is what mtr --raw or --csv prints"),
        (
            "a.csv",
            "Mtr_Version,Start_Time,Status,Host,Hop,Ip,Loss%, ,\nMTR.0.95,1,OK,b,1,gw,0.00\n",
            "is what mtr --raw or --csv prints",
        ),
        ("a.txt", "# Size          Latency (us)\n0    1.23\n", "is what an OSU"),
        ("a.txt", "Server listening on 5201 (test #1)\n", "is what iperf3 prints for people"),
        (
            "a.txt",
            "Server listening on TCP port 5001\n",
            "is what iperf 2 prints; run iperf3 --json",
        ),
        (
            "a.json",
            "Client connecting to b, TCP port 5001\n[ ID] Interval       Transfer\n",
            "is what iperf 2 prints",
        ),
        ("a.csv", "PING b (10.0.0.2) 56(84) bytes of data.\n", "is what ping prints"),
        (
            "a.json",
            '{"event":"start","data":{}}\n{"event":"end","data":{}}\n',
            "iperf3 --json-stream",
        ),
        (
            "a.json",
            f"{iperf3('fwd').strip()}{iperf3('rev')}",
            "several documents of JSON; give each run",
        ),
        (
            "a.json",
            iperf3("fwd").replace('"tcp_mss_default"', '"connecting_to": {}, "tcp_mss_default"'),
            "the key 'connecting_to' twice",
        ),
        (
            "a.json",
            iperf3("fwd").replace('"sum_received"', '"sum_received": {}, "sum_received"'),
            "has sum_received twice, but was not measured with --bidir",
        ),
        ("a.csv", "rtt_ms,a,b,c\na,0,1,2\nb,1,0,0\nc,2,0,0\n", "line 3, column 'c': rtt_ms is '0'"),
        (
            "a.json",
            '{"metadata": {"unit": "ms"}, "data": {"a": {"b": 1, "c": 0}, "b": {"c": 2}}}',
            "'a' to 'c': rtt_ms is 0, between two",
        ),
        (
            "a.json",
            '{"metadata": {"unit": "ms"}, "data": {"a": {"All": 2}, "All": {"a": 2}}}',
            "'All' is a figure over all devices",
        ),
        (
            "a.csv",
            "source,destination,rtt_ms\na,b,1\nMean,a,2\n",
            "line 3: source 'Mean' is a figure",
        ),
        ("a.csv", "source,destination,rtt_ms,RTT_ms\na,b,1,2\n", "'rtt_ms' and 'RTT_ms' differ in"),
        (
            "a.json",
            '[{"source": "a", "destination": "b", "rtt_ms": 1}, {"latency_ms": 1}]',
            "has several columns of latency",
        ),
        (
            "a.csv",
            "Source,Destination,RTT_ms\na,b,1\n",
            "(rename 'Source' to 'source') (rename 'Destination' to 'destination'); correct the",
        ),
        (
            "a.csv",
            "sending_region,receiving_region,milliseconds\na,b,1\n",
            "has no column of numbers, found sending_region, receiving_region, milliseconds",
        ),
        ("a.csv", "source,target,dst,rtt_ms\na,b,c,1\n", "(rename 'target' to 'destination')"),
        (
            "a.csv",
            "source,destination,rtt_ms\na,a,1\n",
            "or move the row to the file that is made, if it is the link within a place",
        ),
        (
            "a.csv",
            "from,to,latency,gbps\na,b,1,1\n",
            "(name 'latency' with its unit: latency_s or latency_ms)",
        ),
        (
            "a.csv",
            "from,to,RTT,bandwidth_gbps\na,b,1,1\n",
            "has no column of latency with a unit (name 'RTT' with its unit: rtt_s or rtt_ms)",
        ),
        (
            "a.csv",
            "from,to,latency_ms,bandwidth\na,b,1,1\n",
            "has no column of bandwidth with a unit (name 'bandwidth' with its unit",
        ),
        ("a.csv", "x,a,b\na,,1\n", "or say it with --unit"),
        ("a.txt", "PING b (10.0.0.2) 56(84) bytes of data.\n", "is what ping prints"),
        ("a.txt", (DATA / "sendrecv.txt").read_text().split("# ", 4)[-1], "ranks"),
        ("a.toml", "", "unknown kind"),
        ("a.txt", "a : 1.23 1.40 - 1.1\nb : 5.10 5.2 5.1 5.4\n", "is what fping prints"),
        ("a.txt", "a : xmt/rcv/%loss = 5/5/0%, min/avg/max = 0.1/0.2/0.3\n", "is what fping"),
        ("a.log", "a : [0], 64 bytes, 1.2 ms (1.2 avg, 0% loss)\n", "is what fping prints"),
        ("a.txt", "traceroute to b (10.0.0.2), 30 hops max\n", "is what traceroute prints"),
        ("a.txt", "# OSU MPI Latency Test v7.2\n# Size  Latency (us)\n1  1.5\n", "is what an OSU"),
        ("a.txt", "0: # OSU MPI Bandwidth Test v7.2\n0: 1  1.5\n", "is what an OSU"),
        (
            "a.txt",
            "---\n                    RDMA_Write BW Test\n Dual-port       : OFF\n",
            "is what perftest",
        ),
        (
            "a.txt",
            "        GPU0    GPU1    CPU Affinity\nGPU0     X      NV12    0-63\n",
            "is what nvidia-smi topo -m prints",
        ),
        ("a.txt", "Connecting to host b, port 5201\n", "run it with --json"),
        ("a.json", '{"a": 1}', "not of iperf3, nor of mtr --json"),
        ("a.json", '{"assignment": {}, "averaging": {}}', "is a plan; give the network"),
        ("a.json", "[[1, 2], [3, 4]]", "not of iperf3, nor of mtr --json"),
        ("a.csv", "figures\nsource,destination,rtt_ms\na,b,1\n", "line 1 must be the header"),
        (
            "a.csv",
            "source,destination,rtt_ms,bandwidth_MBps\na,b,1,2\n",
            "no column of bandwidth with a unit ('bandwidth_MBps' is in bytes",
        ),
        ("a.csv", "source,destination,latncy_ms,bandwidth_mbps\na,b,1,2\n", "to 'latency_ms'"),
        ("a.json", '{"report": {"mtr": {}, "hubs": []}}', "all that mtr --json wrote"),
        ("a.json", '{"a": {"b": 1}, "b": {"a": 1, "a": 2}}', "the key 'a' twice"),
        ("a.csv", "rtt_ms,a,b\na,,12.3 ms\n", "give the number alone"),
    ],
)
def test_files_that_are_no_measurements(
    tmp_path: Path, name: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the path, exit code 2."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(NetworkError) as error:
        read_measured([path], latency_s=0.1, bandwidth_bytes_per_s=1e6)
    assert said in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value) and str(error.value).count(str(path)) == 1
    assert main(["networks", str(path), "--latency-ms", "1", "--bandwidth-gbps", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_networks_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a ping table to a network that plans read; inputs are not overwritten."""
    rtt, out = tmp_path / "rtt.csv", tmp_path / "net.csv"
    rtt.write_text("rtt_ms,a,b\na,,10\nb,10,\n")
    assert main(["networks", str(rtt), "--out", str(out)]) == 2
    assert "no bandwidth was measured" in capsys.readouterr().err and not out.exists()
    assert main(["networks", str(rtt), "--bandwidth-gbps", "1", "--out", str(out)]) == 0
    assert "assumed: bandwidth of 2 ordered pairs, 1 Gb/s" in capsys.readouterr().out
    assert pl.load_network(out).latency_s[0, 1] == 0.005
    # its own file is overwritten; a table of the user is not
    assert main(["networks", str(rtt), "--bandwidth-gbps", "2", "--out", str(out)]) == 0
    mine = tmp_path / "mine.csv"
    mine.write_text("source,destination,latency_s,bandwidth_bytes_per_s\na,b,1,1\n")
    assert main(["networks", str(rtt), "--bandwidth-gbps", "1", "--out", str(mine)]) == 2
    assert "exists, and this command did not make it" in capsys.readouterr().err
    mine.unlink()
    assert main(["networks", str(rtt), "--bandwidth-gbps", "1", "--out", str(rtt)]) == 2
    assert main(["networks", "--out", str(out)]) == 2
    assert "give measurement files" in capsys.readouterr().err
    assert main(["networks", str(tmp_path / "none")]) == 2
    assert main(["networks", str(rtt), "--bandwidth-gbps", "-1"]) == 2
    assert main(["networks", str(rtt), "--bandwidth-gbps", "nan"]) == 2
    # in a folder, names and what was written before are no measurements
    (tmp_path / "names.csv").write_text("address,name\na,x\n")
    words = ["networks", str(tmp_path), "--names", str(tmp_path / "names.csv")]
    assert main([*words, "--bandwidth-gbps", "1", "--out", str(out), "--force"]) == 0
    assert pl.load_network(out).ids == ("b", "x")


def test_duplicate_names_are_rejected(tmp_path: Path) -> None:
    """Two names of one address."""
    path = tmp_path / "names.csv"
    path.write_text("address, name\n10.0.0.1, a\n10.0.0.2, b\n")
    assert load_names(path) == {"10.0.0.1": "a", "10.0.0.2": "b"}
    for text, said in (
        ("address,name\nx,a\nx,b\n", "two names"),
        ("a,b\n", "column 'address' is missing"),
        ("addr,name\nx,a\n", "column 'address' is missing, found addr, name; give"),
        ("address,name\n", "has no names"),
    ):
        path.write_text(text)
        with pytest.raises(NetworkError, match=said):
            load_names(path)


def test_measurements_in_a_folder_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even with ``--force``; a network that was made there is overwritten."""
    mine = tmp_path / "pairs.csv"
    mine.write_text("source,destination,rtt_ms\na,b,1\nb,a,2\n")
    words = ["networks", str(tmp_path), "--bandwidth-gbps", "1", "--force", "--out"]
    for name, code in (("pairs.csv", 2), ("net.csv", 0), ("net.csv", 0)):
        assert main([*words, str(tmp_path / name)]) == code
    assert "which is an input; name another file" in capsys.readouterr().err
    assert mine.read_text().startswith("source,destination,rtt_ms")


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_assumed_links_are_marked(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans print the marked links, and merging does not count them as measured."""
    rtt, out = tmp_path / "rtt.csv", tmp_path / f"net.{kind}"
    rtt.write_text("source,destination,rtt_ms,bandwidth_mbps\na,b,10,70\nb,a,10,\n")
    assert main(["networks", str(rtt), "--bandwidth-gbps", "0.035", "--out", str(out)]) == 0
    if kind == "csv":
        assert out.read_text().splitlines() == [
            "source,destination,latency_s,bandwidth_bytes_per_s,assumed",
            "a,b,0.005,8750000.0,",
            "b,a,0.005,4375000.0,bandwidth",
        ]
    (said,) = assumed_sentences(str(out))
    assert said == f"1 of 2 pairs in {out} has an assumed bandwidth of 0.035 Gb/s"
    assert assumed_sentences(str(rtt)) == assumed_sentences("aws4_dtfm_regional_2022") == []
    found = read_measured([out])
    assert (found.latencies, found.bandwidths) == (2, 1)
    # the values and their hash do not depend on the mark
    bare = tmp_path / f"bare.{kind}"
    pl.load_network(out).save(bare)
    assert pl.load_network(bare) == pl.load_network(out) and "assumed" not in bare.read_text()
    words = (
        f"--workload gpt2-tiny --sequence 64 --batch-samples 8 --effort 0.1 --out {tmp_path}/p.json"
    )
    capsys.readouterr()
    assert main(["plan", "--network", str(out), *words.split(), "--no-pictures"]) == 0
    assert "an assumed bandwidth of 0.035 Gb/s." in " ".join(capsys.readouterr().out.split())


def test_other_names_of_the_ends_are_read(tmp_path: Path) -> None:
    """One column each, in network files and in measurements."""
    path = tmp_path / "net.csv"
    path.write_text("From,to,rtt_ms,bandwidth_mbps\na,b,10,8\nb,a,10,8\n")
    network = pl.load_network(path)
    assert network.ids == ("a", "b") and network.latency_s[0, 1] == 0.005
    assert read_measured([path]).network == network
    assert read_table("src,receiver,rtt_ms\na,b,10\n").latency_s == {("a", "b"): 0.005}


def test_missing_pairs_name_the_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a network is made, and when a plan refuses it."""
    table, out = tmp_path / "rtt.csv", tmp_path / "net.csv"
    table.write_text("source,destination,rtt_ms,bandwidth_mbps\na,b,10,8\nb,a,10,\n")
    assert main(["networks", str(table), "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "none is missing; measure them, or --both-ways copies them from the other direction, or "
        "--bandwidth-gbps assumes a bandwidth wrote"
    ) in said
    assert main(["plan", "--network", str(out), "--workload", "gpt2-tiny"]) == 2
    assert (
        f"measure them, or take the other direction's figures: planner networks {out} --both-ways "
        "--out net.csv, or assume them: --bandwidth-gbps 1 in that command, or leave devices out"
    ) in capsys.readouterr().err
