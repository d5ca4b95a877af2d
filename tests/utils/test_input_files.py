"""Networks from and to CSV, JSON, pandas and NetworkX."""

from __future__ import annotations

from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.network import formats
from planner.network.error import NetworkError
from planner.network.network import Network

DATA = Path(__file__).parent.parent / "data" / "networks"


@given(st.integers(1, 5), st.integers(0, 10_000))
def test_round_trips_keep_every_bit(n: int, seed: int) -> None:
    """CSV, JSON, graph and frame; CSV needs two devices, since it stores pairs."""
    rng = np.random.default_rng(seed)
    latency, bandwidth = rng.exponential(0.1, (n, n)), rng.exponential(1e8, (n, n)) + 1
    latency[rng.random((n, n)) < 0.1] = np.nan
    network = Network(latency, bandwidth, [f"d{i}" for i in range(n)])
    json_back = Network(*formats.from_json_text(formats.to_json_text(network.matrices())))
    assert json_back.content_hash == network.content_hash
    if n > 1:
        csv_back = Network(*formats.from_csv_text(formats.to_csv_text(network.matrices())))
        assert csv_back.subset(network.ids).content_hash == network.content_hash
    if not network.missing_pairs():
        graph_back = Network.from_networkx(network.to_networkx())
        assert graph_back.content_hash == network.content_hash


def test_units_come_from_the_column_names() -> None:
    """Round trips are halved, gigabits become bytes."""
    network = Network(
        *formats.from_csv_text("source,destination,rtt_ms,bandwidth_gbps\na,b,10,8\n")
    )
    assert network.latency_s[0, 1] == pytest.approx(0.005)
    assert network.bandwidth_bytes_per_s[0, 1] == 1e9
    assert network.missing_pairs() == [(1, 0)]


def test_frames_and_undirected_graphs() -> None:
    """A pandas frame with a missing value; an undirected edge counts for both directions."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "source": ["a", "b"],
            "destination": ["b", "a"],
            "latency_ms": [1.0, None],
            "bandwidth_mbps": [8.0, 8.0],
        }
    )
    network = Network.from_pandas(frame)
    assert network.missing_pairs() == [(1, 0)]
    assert Network.from_pandas(network.to_pandas()).content_hash == network.content_hash
    graph: networkx.Graph[str] = networkx.Graph()
    graph.add_node("x", region="north")
    graph.add_edge("x", "y", latency_ms=2, bandwidth_gbps=1)
    both = Network.from_networkx(graph)
    assert both.latency_s[0, 1] == both.latency_s[1, 0] == 0.002
    assert both.regions == ("north", "y")
    for what in (None, 3, {"a": [1]}):
        with pytest.raises(NetworkError, match="frame must be a pandas frame, found"):
            Network.from_pandas(what)


def test_frames_whose_devices_are_numbers() -> None:
    """Numeric names work like text, in pairs and in matrices."""
    pandas = pytest.importorskip("pandas")
    pairs = pandas.DataFrame(
        {"source": [0, 7], "destination": [7, 0], "rtt_ms": [10, 20], "bandwidth_gbps": [8, 8]}
    )
    network = Network.from_pandas(pairs)
    assert network.ids == ("0", "7") and network.latency_s[0, 1] == 0.005
    # pandas makes floats of a column with a gap, and of a matrix with labels of both kinds
    pairs["destination"] = [7.0, 0.0]
    assert Network.from_pandas(pairs).ids == ("0", "7")
    floats = pandas.DataFrame([[0, 1], [2, 0]], index=[3.0, 7.0], columns=[3, 7])
    assert Network(floats, floats).ids == ("3", "7")
    latency = pandas.DataFrame([[0, 1], [2, 0]], index=[3, 7], columns=[3, 7])
    assert Network(latency, latency).ids == ("3", "7")
    assert Network(latency, latency.to_numpy(), ["3", "7"]).ids == ("3", "7")
    with pytest.raises(NetworkError, match="frame is a matrix, with devices along both sides"):
        Network.from_pandas(latency)
    other = latency.loc[[7, 3], [7, 3]]
    with pytest.raises(NetworkError, match="is of 3, 7, bandwidth_bytes_per_s of 7, 3"):
        Network(latency, other)
    with pytest.raises(NetworkError, match="rows 3, 7 and columns 7, 3"):
        Network(latency[[7, 3]], latency)
    with pytest.raises(NetworkError, match="ids are a, b, the frames' labels 3, 7"):
        Network(latency, latency, ["a", "b"])
    with pytest.raises(NetworkError, match=r"has no column of latency, .* found nothing at all"):
        Network.from_pandas(pandas.DataFrame())
    twice = pairs.rename(columns={"bandwidth_gbps": "rtt_ms"})
    with pytest.raises(NetworkError, match="column 'rtt_ms' is named twice"):
        Network.from_pandas(twice)
    for value, said in ((True, "rtt_ms is True"), (-1.0, "rtt_ms is -1.0; it must be >= 0")):
        pairs["rtt_ms"] = [value, value]
        with pytest.raises(NetworkError, match=f"line 2: {said}"):
            Network.from_pandas(pairs)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("12.3 ms", "edge 'a' to 'b': rtt_ms is '12.3 ms'; give the number alone"),
        (None, "edge 'a' to 'b': rtt_ms is None; give a number, or leave the edge out"),
        (float("nan"), "edge 'a' to 'b': rtt_ms is nan; give a number, or leave the edge out"),
        (True, "edge 'a' to 'b': rtt_ms is True"),
        ([1], "rtt_ms is .1."),
        (-10, "rtt_ms is -10; it must be >= 0"),
        (float("inf"), "rtt_ms is inf; it must be finite"),
    ],
)
def test_non_numeric_graph_attributes(what: object, said: str) -> None:
    """One line with the edge, the attribute and its value."""
    graph: networkx.Graph[str] = networkx.Graph()
    graph.add_edge("a", "b", rtt_ms=what, bandwidth_gbps=1)
    with pytest.raises(NetworkError, match=said):
        Network.from_networkx(graph)


@pytest.mark.parametrize("kind", [networkx.MultiGraph, networkx.MultiDiGraph])
def test_parallel_edges_and_other_objects(kind: type) -> None:
    """Two edges of a pair are rejected like two rows; one per direction is valid."""
    link = {"rtt_ms": 10, "bandwidth_gbps": 1}
    graph = kind([("a", "b", link), ("a", "b", link)])
    with pytest.raises(NetworkError, match="edge 'a' to 'b' is given twice; keep one"):
        Network.from_networkx(graph)
    both: networkx.MultiDiGraph[str] = networkx.MultiDiGraph([("a", "b", link), ("b", "a", link)])
    assert Network.from_networkx(both).latency_s[1, 0] == 0.005
    for thing in ({"a": 1}, None, [("a", "b")], networkx.Graph):
        with pytest.raises(NetworkError, match="graph must be a NetworkX graph, found"):
            Network.from_networkx(thing)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source,Destination,rtt_ms,bandwidth_mbps", "'destination' is missing.*rename 'Destinat"),
        ("source,destination,RTT_MS,bandwidth_mbps", "no column of latency.* .rename 'RTT_MS' to"),
        ("source,destination,rtt_ms,bandwith_mbps", "rename 'bandwith_mbps' to 'bandwidth_mbps'"),
        ("source,destination,rtt_ms,RTT_ms,bandwidth_mbps", "'rtt_ms' and 'RTT_ms' differ in"),
        ("source,destination,rtt_ms,bandwidth_mbps\nAll,a,1,1", "line 2: source 'All' is a figure"),
    ],
)
def test_unknown_columns_get_a_suggestion(text: str, said: str) -> None:
    """And unknown names."""
    with pytest.raises(NetworkError, match=said):
        formats.from_csv_text(f"{text}\n")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing_column.csv", "column 'destination' is missing"),
        ("two_latencies.csv", "exactly one latency column is needed"),
        ("no_bandwidth.csv", "has no column of bandwidth, such as bandwidth_gbps"),
        ("duplicate_pair.csv", "line 3: 'a' to 'b' is given twice"),
        ("not_a_number.csv", "line 2: latency_ms is 'fast'"),
        ("nan.csv", "line 2: bandwidth_gbps is 'nan'"),
        ("zero_bandwidth.csv", "must be > 0"),
        ("negative_latency.csv", "must be >= 0"),
        ("no_name.csv", "line 2: source and destination"),
        ("empty.csv", "has no column of latency, such as latency_ms, found nothing at all"),
        ("semicolons.csv", "has ';' between its columns; give commas"),
        ("broken.json", "not JSON"),
        ("wrong_format.json", "field 'format'"),
        ("wrong_version.json", "schema_version is 99"),
        ("missing_field.json", "field 'bandwidth_bytes_per_s' is missing"),
        ("not_square.json", "array of numbers|N x N"),
    ],
)
def test_malformed_files(file: str, message: str) -> None:
    """One file per error; one line names the file and the error."""
    with pytest.raises(NetworkError, match=message) as caught:
        Network.load(DATA / file)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_unsupported_files(tmp_path: Path) -> None:
    """Path and remedy."""
    with pytest.raises(NetworkError, match="cannot be read"):
        Network.load(tmp_path / "none.csv")
    with pytest.raises(NetworkError, match="unknown format"):
        Network.load(tmp_path / "none.xlsx")


def test_save_is_atomic(line4: Network, tmp_path: Path) -> None:
    """No temporary file is left behind."""
    for name in ("n.csv", "n.json"):
        line4.save(tmp_path / name)
        assert Network.load(tmp_path / name).content_hash == line4.content_hash
    assert sorted(p.name for p in tmp_path.iterdir()) == ["n.csv", "n.json"]
