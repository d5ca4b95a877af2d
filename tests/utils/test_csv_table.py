"""CSV readers reject ambiguous files in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.exports.options import load_hosts
from planner.network.measured.reading import load_names, read_measured
from planner.network.network import Network
from planner.network.prices import Prices
from planner.problems.peers_file import load_peers
from planner.swarm.traces import load_trace
from planner.utils.csv_table import number_in, number_remedy, parse_csv

PAIRS = "source,destination,latency_ms,bandwidth_gbps\n"
PEERS = "name,samples_per_s,upload_mbps,download_mbps\n"


def load_devices(path: Path) -> Any:
    """Read a devices file for a network of two."""
    network = Network([[0, 1], [1, 0]], [[0, 1], [1, 0]], ["a", "b"])
    return pl.load_devices(path, network)


READERS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "network": (pl.load_network, PAIRS, "a,b,1,1"),
    "measured pairs": (lambda path: read_measured([path]), PAIRS, "a,b,1,1"),
    "matrix": (
        lambda path: read_measured([path], bandwidth_bytes_per_s=1.0),
        "rtt_ms,a,b\n",
        "a,,1",
    ),
    "devices": (load_devices, "name,memory_gb\n", "a,1"),
    "peers": (load_peers, PEERS, "a,1,1,1"),
    "prices": (Prices.load, "from,to,usd_per_gb\n", "a,b,1"),
    "trace": (load_trace, "time_s,change\n", "0,1"),
    "hosts": (load_hosts, "device,host\n", "0,a"),
    "names": (load_names, "address,name\n", "10.0.0.1,a"),
}


@pytest.mark.parametrize("name", READERS)
def test_rows_columns_and_separators(tmp_path: Path, name: str) -> None:
    """One line with the path, the line and the numbers of cells."""
    load, header, row = READERS[name]
    path, cells = tmp_path / "in.csv", row.count(",") + 1
    first, second = header.strip().split(",")[:2]
    for text, said in (
        (f"{header}{row},5\n", f"line 2 has {cells + 1} cells, the header {cells}"),
        (f"{header}\n\n{row.rpartition(',')[0]}\n", f"line 4 has {cells - 1} cells"),
        (f"{header.strip()},{second}\n{row},5\n", f"line 1: column {second!r} is named twice"),
        (f"{header}{row}\n".replace(",", ";"), "has ';' between its columns; give commas"),
        (f"{header}{row}\n".replace(",", "\t"), "has '\\t' between its columns; give commas"),
        (f'{header}"{row}\n{row}\n', "line 2: a cell has a line break; close its quotes"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError) as caught:
            load(path)
        assert said in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).count(str(path)) == 1
    assert first
    for mark in ("utf-16", "utf-16-be"):
        for first in ("\ufeff" * (mark != "utf-16"), ""):
            path.write_bytes((first + header + row).encode(mark))
            with pytest.raises(ValueError, match="is not UTF-8 text but UTF-16; save it as UTF-8"):
                load(path)


def test_decimal_commas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12,50 in two cells is not read as 12."""
    from planner.cli.main import main

    path = tmp_path / "net.csv"
    path.write_text(f"{PAIRS}Oslo,Roma,12,50,0,80\nRoma,Oslo,12,75,0,60\n")
    words = ["--workload", "gpt2-tiny", "--batch-samples", "8", "--effort", "1"]
    assert main(["plan", "--network", str(path), *words]) == 2
    assert capsys.readouterr().err == (
        f"planner plan: {path}: line 2 has 6 cells, the header 4; write decimals with a point\n"
    )


def test_rows_with_too_many_cells() -> None:
    """Decimal commas are suspected in split numbers; a spreadsheet's separator line is skipped."""
    for row, said in (
        ("Oslo,12,5", "write decimals with a point"),
        ("Oslo,12,", "take out the comma at its end"),
        ("Oslo,12,x", "take out what is too much, and put a cell that has a comma in quotes"),
        ("Oslo, Norway,12", "take out what is too much"),
    ):
        with pytest.raises(ValueError, match=f"line 2 has 3 cells, the header 2; {said}"):
            parse_csv(f"name,upload_mbps\n{row}\n")
    table = parse_csv("sep=,\na,b\n1,2\n")
    assert table.columns == ("a", "b") and table.rows == ((3, {"a": "1", "b": "2"}),)


def test_comments_are_skipped() -> None:
    """Before the header and between rows."""
    text = '# of Monday; "3 hosts\n#\na,b\n1,2\n # slow, again\n3,4 # not one\n#5,6\n'
    table = parse_csv(text)
    assert table.columns == ("a", "b")
    assert [row.line for row in table.rows] == [4, 6, 7]
    assert table.rows[1].cells["b"] == "4 # not one" and table.rows[2].cells["a"] == "#5"
    assert parse_csv("#,a\nb,1\n").columns == ("#", "a")


def test_blanks_empty_columns_and_lines() -> None:
    """Blanks around cells, empty columns and empty lines are ignored."""
    table = parse_csv('a, b ,,\n\n1, "x, y" ,,\n,,,\n2,,,\n')
    assert table.columns == ("a", "b")
    assert [(row.line, row.cells) for row in table.rows] == [
        (3, {"a": "1", "b": "x, y"}),
        (5, {"a": "2", "b": ""}),
    ]
    assert parse_csv("").columns == () and parse_csv("a,b\n").rows == ()
    with pytest.raises(ValueError, match="two have no name"):
        parse_csv("a,,\n1,2,3\n")


def test_invalid_numbers_get_a_remedy() -> None:
    """Decimal commas and units are named."""
    assert [number_in(text) for text in ("1", "-1.5", ".5", "2.", "1e-05", "+3E2")] == [
        *(1.0, -1.5, 0.5, 2.0, 1e-5, 300.0),
    ]
    for text in ("", "nan", "inf", "1_000", "12,5", "12 ms", "0x1", "1 2", "١٢"):
        assert number_in(text) != number_in(text)
    for text in ("12,5", "1.234,5", "1,234"):
        assert "write decimals with a point" in number_remedy(text, "")
    for text in (
        "12.3 ms",
        "1.2 Gbit/s",
        "5%",
        "100Mbps",
        "3 µs",
        "2 /s",
        "0.05 $",
        "€ 3",
        "1 $/GB",
    ):
        assert "give the number alone" in number_remedy(text, "")
    assert number_remedy("fast", "give a number") == "give a number"


@pytest.mark.parametrize("name", ["network", "measured pairs"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('a,b,"12,50",1', "line 2: latency_ms is '12,50'; write decimals with a point"),
        ("a,b,12.3 ms,1", "line 2: latency_ms is '12.3 ms'; give the number alone"),
        ("a,b,1,1.2 Gbit/s", "line 2: bandwidth_gbps is '1.2 Gbit/s'; give the number alone"),
        ("a,b,-10,1", "line 2: latency_ms is '-10'; it must be >= 0"),
        ("a,b,1e999,1", "line 2: latency_ms is '1e999'; it must be finite"),
        ("a,b,1,-2", "line 2: bandwidth_gbps is '-2'; it must be > 0"),
        ("a,b,1e40,1", "line 2: latency_ms is '1e40'; in SI units it must be 0 or 1e-30 to 1e+30"),
    ],
)
def test_errors_quote_the_users_value(tmp_path: Path, name: str, row: str, said: str) -> None:
    """With column, line and unit of the file."""
    path = tmp_path / "net.csv"
    path.write_text(f"{PAIRS}{row}\n")
    with pytest.raises(pl.NetworkError) as caught:
        READERS[name][0](path)
    assert said in str(caught.value)


def test_peers_with_blanks_and_a_negative_rate(tmp_path: Path) -> None:
    """Blanks after commas are removed; a negative rate is reported with line and unit."""
    path = tmp_path / "peers.csv"
    path.write_text("name, samples_per_s, upload_mbps, download_mbps\na, 1, 8, 16\nb , 2, 8, 8\n")
    peers = load_peers(path)
    assert peers.names == ("a", "b") and peers.upload_bytes_per_s == (1e6, 1e6)
    for row, said in (
        ("a,1,-5,1", "line 2: upload_mbps is '-5'; give a finite number >= 0"),
        ('a,1,"1,5",1', "line 2: upload_mbps is '1,5'; write decimals with a point"),
        (",1,1,1", "line 2: name is empty"),
    ):
        path.write_text(f"{PEERS}{row}\n")
        with pytest.raises(pl.ProblemError, match=said):
            load_peers(path)
