"""HTML reports: well formed, escaped, self-contained and correct."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import planner as pl
from planner.cli.main import main
from planner.report.critical import critical_path
from planner.report.figures import memory, mfu, utilization
from planner.report.page import report_html
from planner.report.sensitivity import SLOWER, sensitivity
from planner.simulator.simulator import predicted_timeline, simulate, step_s
from planner.training_plan.alternative import Alternative
from planner.training_plan.file import from_dict, load_plan, save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import remove_devices
from tests.conftest import make_plan, random_network, tiny_workload
from tests.simulator.test_simulator import two_pipelines

VOID = {"meta", "link", "br"}
EVIL = "</script><b>&東京"


class Reader(HTMLParser):
    """Collects open tags, the page's data and URLs."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.data, self.text, self.fetched = "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens."""
        self.tags.add(tag)
        self.fetched += sum(name in ("src", "href") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closes the last one open."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """The script's data, and what is read."""
        if self.open and self.open[-1] == "script" and data.startswith("{"):
            self.data += data
        self.text += data


def plan_with_html_in_names() -> TrainingPlan:
    """A plan whose names contain HTML."""
    network = random_network(4)
    ids = [EVIL, "b", "c", "d"]
    return make_plan([[0, 1], [2, 3]], network=network.replace(ids=ids, regions=ids))


def test_page_is_balanced_escaped_and_has_the_plan() -> None:
    """It contains all operations, and names stay text."""
    plan = plan_with_html_in_names()
    page = report_html(plan)
    reader = Reader()
    reader.feed(page)
    assert reader.open == [] and reader.fetched == 0 and "b" not in reader.tags
    assert "http" not in page.replace("http-equiv", "")
    assert f"{plan.predicted.step_s:.4g} s" in reader.text and EVIL in reader.text
    data, timeline = json.loads(reader.data), predicted_timeline(plan)
    assert data["devices"][0]["name"] == EVIL
    drawn = sum(len(row["ops"]) for row in data["devices"])
    assert drawn == len(timeline.ops) + len(timeline.closing)


def test_alternatives() -> None:
    """They are stored in the plan file, and names stay text."""
    plan = plan_with_html_in_names()
    assert "no alternatives were evaluated" in report_html(plan)
    others = (Alternative("2 stages", EVIL, 3.0), Alternative("2 stages", "9", None, why="no room"))
    known = from_dict(plan.replace(alternatives=others).to_dict())
    assert known.content_hash == plan.content_hash and known != plan
    reader = Reader()
    reader.feed(report_html(known))
    assert EVIL in reader.text and "about 3 s" in reader.text and "b" not in reader.tags
    assert "no room" in reader.text


def test_baselines_are_stored_and_shown() -> None:
    """Relative to the plan's step time; they are not part of the hash."""
    plan = plan_with_html_in_names()
    assert "Not compared with baselines" in report_html(plan)
    step_s = plan.predicted.step_s
    others = (
        Alternative("ranks by region", EVIL, 2 * step_s),
        Alternative("one region alone", "", None, why="none holds the model"),
    )
    known = from_dict(plan.replace(baselines=others).to_dict())
    assert known.baselines == others and known.content_hash == plan.content_hash
    page = report_html(known)
    reader = Reader()
    reader.feed(page)
    assert f"<td>{2 * step_s:.4g} s</td><td>2.00</td>" in page and "width:100%" in page
    assert EVIL in reader.text and "one region alone: none holds the model" in reader.text


def test_page_starts_with_four_metrics() -> None:
    """There are no empty sections, and rows are ordered by stage."""
    plan = make_plan([[0, 3], [2, 1]], network=random_network(4))
    page = report_html(plan, tokens=1e9)
    head = page.split('<dl class="head">')[1].split("</dl>")[0]
    names = [part.split("</dt>")[0] for part in head.split("<dt>")[1:]]
    assert names == ["step time", "tokens/s", "MFU", "training"]
    assert "<h2>Sensitivity" not in page and "<h2>Predicted and executed" not in page
    reader = Reader()
    reader.feed(page)
    data = json.loads(reader.data)
    assert [row["stage"] for row in data["devices"]] == [0, 0, 1, 1]
    assert [row["idle"] for row in data["devices"]] == [
        predicted_timeline(plan).idle()[d] for d in (0, 2, 1, 3)
    ]
    assert len(data["stages"]) == 2 and len(set(data["stages"])) == 2


def test_mfu_is_relative_to_peaks(tmp_path: Path) -> None:
    """Also from a plan file; None if peaks are unknown, which the hash leaves out."""
    plan = make_plan([[0, 1], [2, 3]])
    assert mfu(plan) is None and "<dt>MFU</dt><dd>not known" in report_html(plan)
    cluster = plan.cluster
    peaks = cluster.flops * [2.0, 2.0, 4.0, 8.0]
    known = plan.replace(
        cluster=cluster.replace(devices=replace(cluster.devices, peak_flops=peaks))
    )
    save_plan(known, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == known and again.content_hash == plan.content_hash
    part = utilization(plan) * cluster.flops.sum() / peaks.sum()
    assert mfu(again) == pytest.approx(part)
    assert f"<dt>MFU</dt><dd>{part:.1%}" in report_html(again)


def test_memory_rows_are_merged() -> None:
    """No device is missing."""
    page = report_html(plan_with_html_in_names())
    memory_part = page.split("<h2>Memory</h2>")[1].split("</section>")[0]
    assert memory_part.count("<meter") == 2
    assert ">b, d<" in memory_part and memory_part.count('class="names"') == 2


def test_tied_matrix_is_shown() -> None:
    """Only in plans with one."""
    said = "tied embedding and head"
    for tied in (True, False):
        page = report_html(make_plan([[0, 1]], workload=tiny_workload(tied=tied)))
        assert (said in page) is tied


def test_critical_path_covers_the_makespan() -> None:
    """Each element starts when its predecessor ends."""
    timeline = simulate(plan_with_html_in_names())
    path = critical_path(timeline)
    assert path[0].start_s == 0
    assert path[-1].end_s == timeline.makespan_s
    for one, after in pairwise(path):
        assert after.start_s == pytest.approx(one.end_s)


def test_sensitivity_of_single_links_and_devices() -> None:
    """In regions with several devices: the busiest links, and the devices that compute longest."""
    plan = two_pipelines()
    network = plan.cluster.network.replace(regions=["x", "x", "y", "y"])
    devices = replace(plan.cluster.devices, upload_bytes_per_s=100.0, download_bytes_per_s=100.0)
    plan = plan.replace(cluster=plan.cluster.replace(network=network, devices=devices))
    found = {one.what: one.step_s for one in sensitivity(plan)}
    for what in (
        "device a",
        "device d",
        "uplink and downlink of a",
        "link between a and b",
        "uplinks and downlinks of x",
    ):
        assert found[what] >= step_s(plan) * (1 - 1e-9)
    assert sum(what.startswith("link between") for what in found) == 4
    assert "links within x" in found and "devices of y" in found
    page = report_html(plan, slower=sensitivity(plan))
    part = page.split("<h2>Sensitivity</h2>")[1].split("</section>")[0]
    # equal ones share a row, and none is left out
    assert part.count("<tr>") - 1 < len(found)
    assert "<td>devices of x; y</td>" in part and "<td>device b; d</td>" in part


def test_sensitivity_with_one_bottleneck_link() -> None:
    """Messages wait for the link only; uplinks, downlinks and the site's link are not full."""
    made = make_plan([[0, 1]], network=random_network(2))
    latency, rate = np.zeros((2, 2)), np.full((2, 2), 100.0)
    network = pl.Network(latency, rate, ["a", "b"], ["x", "x"])
    wide = np.full(2, 1e6)
    devices = pl.Devices(
        made.cluster.flops,
        made.cluster.memory_bytes,
        upload_bytes_per_s=wide,
        download_bytes_per_s=wide,
        sites=["one", "one"],
        site_upload_bytes_per_s={"one": 1e6},
    )
    plan = made.replace(cluster=pl.Cluster(network, devices))
    found, step = {one.what: one.step_s for one in sensitivity(plan)}, step_s(plan)
    for what in (
        "uplink and downlink of a",
        "uplink and downlink of b",
        "uplinks and downlinks of x",
        "shared link of site one",
    ):
        assert found[what] == pytest.approx(step)
    slow = network.replace(bandwidth_bytes_per_s=rate * SLOWER)
    slower = step_s(plan.replace(cluster=pl.Cluster(slow, devices)))
    assert found["link between a and b"] == found["links within x"] == pytest.approx(slower)
    assert slower > step


def test_sensitivity_of_a_shared_site_link() -> None:
    """The site's link is the bottleneck, not the uplinks of its devices."""
    made = make_plan([[0, 2], [1, 3]], network=random_network(4))
    network = made.cluster.network.replace(regions=["x", "x", "y", "y"])
    devices = pl.Devices(
        made.cluster.flops,
        made.cluster.memory_bytes,
        upload_bytes_per_s=np.full(4, 1e12),
        download_bytes_per_s=np.full(4, 1e12),
        sites=["one", "one", "two", "three"],
        site_upload_bytes_per_s={"one": 1.0},
    )
    plan = made.replace(cluster=pl.Cluster(network, devices))
    found, step = {one.what: one.step_s for one in sensitivity(plan)}, step_s(plan)
    ids = network.ids
    assert (
        found[f"uplink and downlink of {ids[0]}"]
        == found[f"uplink and downlink of {ids[1]}"]
        == pytest.approx(step)
    )
    assert found["shared link of site one"] == found["uplinks and downlinks of x"] > 1.2 * step


def test_sensitivity_of_all_pairs_regions_and_devices() -> None:
    """All pairs and regions are slowed, and one device per region is removed."""
    plan = plan_with_html_in_names()
    found = sensitivity(plan)
    assert len(found) == 6 + 4 + 4 + 4
    lost = [one for one in found if one.what.startswith("without ")]
    # a lost device may also be one whose links kept others waiting
    named = {one.what.removeprefix("without "): one.step_s for one in lost}
    wanted = {name: step_s(remove_devices(plan, [name])) for name in plan.cluster.network.ids}
    assert named == wanted and max(named.values()) > plan.predicted.step_s
    lines = [one.step_s for one in found if one.what.startswith("uplinks and downlinks of ")]
    assert len(lines) == 4 and max(lines) > plan.predicted.step_s
    assert max(x.step_s for x in found) > plan.predicted.step_s
    assert all(m.reserve_bytes > 0 and m.live > 0 for m in memory(plan))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes beside the plan; rejects files of others and files that are not runs."""
    path, run, other = tmp_path / "p.json", tmp_path / "r.jsonl", tmp_path / "o.html"
    save_plan(plan_with_html_in_names(), path)
    run.write_text('{"event": "step", "step": 3, "took_s": 4.5}\n')
    assert main(["report", str(path), "--run", str(run)]) == 0
    assert "<td>4.5</td>" in path.with_suffix(".html").read_text()
    event = {
        "event": "step",
        "step": 3,
        "took_s": 4.5,
        "plan": plan_with_html_in_names().content_hash,
    }
    run.write_text(json.dumps(event))
    assert main(["report", str(path), "--run", str(run)]) == 0
    foreign = tmp_path / "f.json"
    foreign.write_text(json.dumps({"plan": "0" * 64, "steps": [{"step": 0, "measured_s": 1.0}]}))
    assert main(["report", str(path)]) == 0
    other.write_text("mine")
    capsys.readouterr()
    for bad in (
        ["--out", str(other)],
        ["--tokens", "nan"],
        ["--run", str(path)],
        ["--run", str(foreign)],
    ):
        assert main(["report", str(path), *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert other.read_text() == "mine"


def test_assumptions_are_on_the_page() -> None:
    """As below a plan: here, that pairs of devices of two machines have the measured rate each."""
    network = pl.Network(np.full((4, 4), 0.001), np.full((4, 4), 1e8))
    plan = make_plan([[0, 1], [2, 3]], network=network)
    machines = ["a", "a", "b", "b"]
    rates = {"a": 1e12, "b": 1e12}
    devices = replace(
        plan.cluster.devices,
        sites=machines,
        machines=machines,
        site_upload_bytes_per_s=rates,
        site_download_bytes_per_s=rates,
    )
    assumed = plan.replace(cluster=plan.cluster.replace(devices=devices))
    text = "pairs of devices of machines"
    assert text in report_html(assumed) and text not in report_html(plan)
