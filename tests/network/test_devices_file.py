"""Devices file: contents, and one line for every mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.cli.main import main
from planner.network.catalogue import measured_inside
from planner.network.devices_file import load_devices
from planner.network.dtype import Dtype
from planner.network.limit_notes import unlimited_sites
from planner.network.link import Link
from tests.conftest import tiny_workload

INSIDE = Link(0.001, 1e9)


def two_regions() -> pl.Network:
    """Two devices in north, one in south; all pairs are equal."""
    off = np.full((3, 3), 1e8)
    return pl.Network(off * 1e-10, off, ["n/0", "n/1", "s/0"], ["north", "north", "south"])


def write_csv(tmp_path: Path, text: str) -> Path:
    """Write the text to a file."""
    path = tmp_path / "devices.csv"
    path.write_text(text)
    return path


def test_rows_name_devices_or_regions(tmp_path: Path) -> None:
    """In the network's order; missing values come from the GPU or the default, or stay unknown."""
    path = write_csv(
        tmp_path,
        "name,gpu,memory_gb,tflops,upload_mbps,usd_per_hour\ns/0,A100,,,,1.5\nnorth,T4,12,20,80,\n",
    )
    cluster = load_devices(path, two_regions())
    assert cluster.network.ids == ("n/0", "n/1", "s/0")
    assert cluster.flops.tolist() == [20e12, 20e12, 0.4 * 312e12]
    assert cluster.memory_bytes.tolist() == [12e9, 12e9, pl.GPUS["A100"].memory_bytes]
    # a device without a limit is held by its fastest pair
    assert cluster.upload_bytes_per_s is not None
    assert cluster.upload_bytes_per_s.tolist() == [1e7, 1e7, 1e8]
    assert cluster.download_bytes_per_s is None
    assert np.asarray(cluster.devices.usd_per_hour).tolist() == [0.526, 0.526, 1.5]


def test_gpus_of_machines(tmp_path: Path) -> None:
    """Their links are of the GPU or stated; a machine's line carries its fastest pair outside."""
    rates = np.array([[1.0, 2e8, 3e8], [1e8, 1.0, 1e8], [1e8, 1e8, 1.0]])
    network = pl.Network(np.full((3, 3), 0.02), rates, ["a", "b", "c"])
    path = write_csv(
        tmp_path,
        "name,gpu,count,machine,gpu_link_gbps,gpu_link_us\n"
        "a,A100,4,node1,,\nb,A100,2,node2,100,5\nc,T4,,,,\n",
    )
    cluster = load_devices(path, network)
    devices = cluster.devices
    assert cluster.network.ids == ("a/0", "a/1", "a/2", "a/3", "b/0", "b/1", "c/0")
    assert devices.machines == ("node1",) * 4 + ("node2",) * 2 + ("",)
    assert devices.sites == ("node1",) * 4 + ("node2",) * 2 + ("device 6",)
    assert devices.site_upload_bytes_per_s == {"node1": 3e8, "node2": 1e8}
    assert devices.site_download_bytes_per_s == {"node1": 1e8, "node2": 2e8}
    links = np.asarray(devices.gpu_link_bytes_per_s).tolist()
    assert links[:6] == [0.8 * 2400e9 / 8] * 4 + [100e9 / 8] * 2
    assert cluster.network.bandwidth_bytes_per_s[0, 1] == links[0]
    assert cluster.network.latency_s[4, 5] == pytest.approx(5e-6)
    assert cluster.network.bandwidth_bytes_per_s[3, 4] == 2e8
    workers, _ = pl.tensor_parallel_workers(cluster, tiny_workload(), 2)
    assert workers.network.ids == ("node1/w0", "node1/w1", "node2")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("name,gpu,gpu_link_gbps\nnorth,A100,100\n", "'north' has gpu_link_gbps.*no machine"),
        ("name,tflops,memory_gb,machine\nnorth,9,8,m\n", "no GPU whose link is known; give gpu"),
    ],
)
def test_links_without_machine_or_gpu(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(pl.NetworkError, match=message):
        load_devices(write_csv(tmp_path, rows), two_regions())


def test_partial_prices(tmp_path: Path) -> None:
    """All or none; a default price applies to rows without one."""
    rows = "name,gpu,usd_per_hour\nnorth,H200,{}\ns/0,V100,\n"
    unknown = load_devices(write_csv(tmp_path, rows.format("")), two_regions())
    assert unknown.devices.usd_per_hour is None
    stated = load_devices(write_csv(tmp_path, rows.format(9)), two_regions())
    assert np.asarray(stated.devices.usd_per_hour).tolist() == [9, 9, 3.06]
    path = write_csv(tmp_path, rows.format(""))
    given = load_devices(path, two_regions(), usd_per_hour=1.0)
    assert np.asarray(given.devices.usd_per_hour).tolist() == [1, 1, 1]
    path = write_csv(tmp_path, "name,gpu,usd_per_hour\nnorth,H200,\ns/0,V100,2\n")
    with pytest.raises(pl.NetworkError, match="usd_per_hour of 'north' is not stated"):
        load_devices(path, two_regions())
    path = write_csv(tmp_path, "name,gpu,can_compute\nnorth,T4,\ns/0,,no\n")
    helped = load_devices(path, two_regions())
    assert np.asarray(helped.devices.usd_per_hour).tolist() == [0.526, 0.526, 0]


def test_memory_of_rows_without_any(tmp_path: Path) -> None:
    """It counts more than that of their GPU, and less than their own."""
    path = write_csv(tmp_path, "name,gpu,memory_gb\nnorth,H200,\ns/0,V100,12\n")
    cluster = load_devices(path, two_regions(), memory_bytes=5e9)
    assert np.asarray(cluster.devices.memory_bytes).tolist() == [5e9, 5e9, 12e9]


def test_numbers_in_other_units_are_refused(tmp_path: Path) -> None:
    """FLOP/s in place of TFLOP/s, bytes in place of GB."""
    for column, value in (("tflops", "23e12"), ("peak_tflops", "1e14"), ("memory_gb", "24e9")):
        path = write_csv(tmp_path, f"name,{column}\nnorth,{value}\n")
        message = f"line 2: {column} is '{value}', but no device has more than 100,000; mind"
        with pytest.raises(pl.NetworkError, match=message):
            load_devices(path, two_regions())


def test_count_replicates_a_region(tmp_path: Path) -> None:
    """With the link within the region, which is required."""
    network = pl.Network(np.full((2, 2), 0.1), np.full((2, 2), 1e8), ["a", "b"])
    path = write_csv(tmp_path, "name,count,gpu\na,2,V100\nb,,T4\n")
    cluster = load_devices(path, network, inside=INSIDE)
    assert cluster.network.ids == ("a/0", "a/1", "b/0")
    assert cluster.network.latency_s[0, 1] == 0.001
    assert cluster.flops[0] == cluster.flops[1] != cluster.flops[2]
    with pytest.raises(
        pl.NetworkError, match="is unknown; give its latency and bandwidth in a row a,a"
    ):
        load_devices(path, network)


def test_example_of_the_documentation(tmp_path: Path) -> None:
    """Its devices are in the network that it names, and compute in bf16."""
    page = (Path(__file__).parents[2] / "docs/reference/devices-file.md").read_text()
    rows = page.partition("\nname,count,gpu")[2].partition("```")[0]
    path = write_csv(tmp_path, f"name,count,gpu{rows}")
    cluster = load_devices(path, pl.load_network("aws8_dtfm_worldwide_2022"), inside=INSIDE)
    assert len(cluster.network) == 6 and cluster.lacks(Dtype.BF16) == []


def test_count_of_one(tmp_path: Path) -> None:
    """No link within the region is needed."""
    network = pl.Network(np.full((2, 2), 0.1), np.full((2, 2), 1e8), ["a", "b"])
    cluster = load_devices(write_csv(tmp_path, "name,count,gpu\na,1,V100\nb,1,T4\n"), network)
    assert cluster.network == network


def test_links_within_places_are_rows_of_the_network_file(tmp_path: Path) -> None:
    """From a place to itself; the diagonal of a matrix says nothing."""
    text = "source,destination,latency_ms,bandwidth_gbps\n"
    text += "a,b,10,1\nb,a,10,1\na,a,0.1,8\nb,b,0,0\n"
    path = tmp_path / "net.csv"
    path.write_text(text)
    inside, network = measured_inside(str(path)), pl.load_network(path)
    assert inside == {"a": pl.Link(1e-4, 1e9)} and measured_inside("aws_4") == {}
    devices = write_csv(tmp_path, "name,count\na,2\nb,1\n")
    cluster = load_devices(devices, network, inside=inside)
    assert cluster.network.latency_s[0, 1] == 1e-4
    assert cluster.network.bandwidth_bytes_per_s[0, 1] == 1e9
    assert load_devices(devices, path) == load_devices(devices, str(path)) == cluster
    more = write_csv(tmp_path, "name,count\na,2\nb,2\n")
    with pytest.raises(pl.NetworkError, match="between devices of b is unknown"):
        load_devices(more, network, inside=inside)


def test_bytes_are_not_taken_for_bits(tmp_path: Path) -> None:
    """The remedy for a column in megabytes is no other name alone."""
    path = tmp_path / "net.csv"
    path.write_text("source,destination,latency_ms,bandwidth_MBps\na,b,10,1\n")
    with pytest.raises(pl.NetworkError, match="'bandwidth_MBps' is in bytes: give bandwidth_byt"):
        pl.load_network(path)


def test_peaks_of_all_or_no_devices(tmp_path: Path) -> None:
    """Known for named GPUs, otherwise stated."""
    peaks = pl.GPUS["H100"].peak_flops, pl.GPUS["A100"].peak_flops
    path, usual = write_csv(tmp_path, "name,gpu\nn/0,H100\ns/0,\n"), pl.Devices.of_gpu("A100")
    cluster = load_devices(path, two_regions(), default=usual)
    assert cluster.devices.peak_flops == pytest.approx(peaks)
    text = "name,gpu,tflops,peak_tflops\nn/0,H100,200,\ns/0,,30,90\n"
    stated = load_devices(write_csv(tmp_path, text), two_regions())
    assert stated.devices.peak_flops == pytest.approx((peaks[0], 9e13))
    assert stated.flops.tolist() == [2e14, 3e13]
    # who cannot compute needs none
    text = "name,gpu,tflops,can_compute\nn/0,A100,,\ns/0,,1,no\n"
    helped = load_devices(write_csv(tmp_path, text), two_regions())
    assert helped.devices.peak_flops == pytest.approx((peaks[1], 1e12))
    unknown = load_devices(write_csv(tmp_path, "name,tflops\nn/0,1\ns/0,\n"), two_regions())
    assert unknown.devices.peak_flops is None


def test_a_gpu_is_no_guess_where_others_name_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without one would be planned with the default GPU."""
    path = write_csv(tmp_path, "name,gpu,can_compute\nn/0,T4,\nn/1,,no\ns/0,,\n")
    with pytest.raises(
        pl.NetworkError, match=r"line 4: device 's/0' has no gpu, .*; name it, give"
    ):
        load_devices(path, two_regions())
    assert len(load_devices(path, two_regions(), without=["s/0"])) == 2
    with pytest.raises(pl.NetworkError, match="column 'tflop' is unknown"):
        load_devices(write_csv(tmp_path, "name,gpu,tflop\nn/0,T4,\ns/0,,10\n"), two_regions())
    words = ["--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny", "--effort", "0.1"]
    regions = "name,gpu\nOregon,A10\nVirginia,\n"
    words += ["--devices", str(write_csv(tmp_path, regions)), "--batch-samples", "8"]
    words += ["--out", str(tmp_path / "plan.json"), "--no-pictures", "--sequence", "64"]
    assert main(["plan", *words]) == 2
    assert "line 3: device 'Virginia' has no gpu" in capsys.readouterr().err
    assert main(["plan", *words, "--gpu", "L4"]) == 0


def test_interfaces_are_kept(tmp_path: Path) -> None:
    """Also in the plan; omitted if no row has one."""
    cluster = load_devices(write_csv(tmp_path, "name,interface\nn/0,eth1\ns/0,\n"), two_regions())
    assert cluster.devices.interfaces == ("eth1", "")
    found = pl.plan(cluster, tiny_workload(batch_samples=2), stages=2, stop=pl.Effort(0.1)).plan
    assert found is not None and found.cluster.devices.interfaces == ("eth1", "")
    assert pl.check(found, cluster) == []
    none = load_devices(write_csv(tmp_path, "name,interface\nn/0,\n"), two_regions())
    assert none.devices.interfaces is None
    assert none.devices == load_devices(write_csv(tmp_path, "name\nn/0\n"), two_regions()).devices


def test_sites_share_a_link(tmp_path: Path) -> None:
    """Its limit applies to all pairs that enter or leave the site, in plans and in the checker."""
    path = write_csv(
        tmp_path,
        "name,tflops,site,site_upload_mbps,site_download_mbps\n"
        "n/0,1,lab,8,\nn/1,1,lab,,16\ns/0,1,,,\n",
    )
    cluster = load_devices(path, two_regions())
    rate = cluster.limited_network().bandwidth_bytes_per_s
    assert rate[0, 2] == rate[1, 2] == 1e6
    assert rate[2, 0] == rate[2, 1] == 2e6
    assert rate[0, 1] == 1e8
    from planner.training_plan.file import from_dict

    workload = tiny_workload(batch_samples=6)
    plan = pl.plan(cluster, workload, stages=3, stop=pl.MaxIterations(5)).plan
    assert plan is not None
    again = from_dict(plan.to_dict())
    assert again.cluster.devices.sites == ("lab", "lab", "device 2")
    assert pl.check(again) == []
    free = pl.plan(
        pl.Cluster(two_regions(), pl.Devices(1e12, 16e9)),
        workload,
        stages=3,
        stop=pl.MaxIterations(5),
    )
    assert free.objective is not None and plan.predicted.step_s > free.objective


NESTED = (
    "name,machine,site,within,gpu,count,site_upload_mbps,site_download_mbps\n"
    "a,m1,west,,A100,2,800,\nb,m2,west,,A100,2,,1600\nc,,south,land,T4,,,\n"
    ",,west,land,,,,\n,,m2,,,,80,\n,,land,,,,400,400\nd,,,,T4,,,\n"
)


def four_places() -> pl.Network:
    return pl.Network(np.full((4, 4), 0.02), np.full((4, 4), 1e9), ["a", "b", "c", "d"])


def test_lines_around_lines(tmp_path: Path) -> None:
    """Of two machines and their site, beside another site in the same land."""
    cluster = load_devices(write_csv(tmp_path, NESTED), four_places())
    devices = cluster.devices
    assert devices.sites == ("m1", "m1", "m2", "m2", "south", "device 5")
    assert devices.site_within == {"m1": "west", "m2": "west", "south": "land", "west": "land"}
    assert [devices.sites_around(d) for d in (0, 4, 5)] == [
        ("m1", "west", "land"),
        ("south", "land"),
        ("device 5",),
    ]
    # a machine without a rate has that of its fastest pair
    assert devices.site_upload_bytes_per_s == {"west": 1e8, "m2": 1e7, "land": 5e7, "m1": 1e9}
    assert devices.site_download_bytes_per_s == {"west": 2e8, "land": 5e7, "m1": 1e9, "m2": 1e9}
    rate = cluster.limited_network().bandwidth_bytes_per_s
    assert [rate[0, 2], rate[2, 0], rate[0, 4], rate[4, 0], rate[0, 5]] == [
        *(1e9, 1e7, 1e8, 2e8, 5e7)
    ]
    part = cluster.subset([2, 4, 5])
    assert part.devices.site_within == {"m2": "west", "south": "land", "west": "land"}
    assert set(part.devices.site_upload_bytes_per_s) == {"west", "m2", "land"}
    workers, _ = pl.tensor_parallel_workers(cluster, tiny_workload(), 2)
    assert workers.devices.sites == ("m1", "m2")
    assert set(workers.devices.site_upload_bytes_per_s) == {"m1", "m2", "west", "land"}


@pytest.mark.parametrize(
    "fields", [{"stages": 3}, {"tensor_parallel": 2, "stages": 1}, {"stages": 1}]
)
def test_plans_know_lines_around_lines(tmp_path: Path, fields: dict[str, Any]) -> None:
    """By both simulators; averaging within sites, or sites in sites, is one of the choices."""
    cluster = load_devices(write_csv(tmp_path, NESTED), four_places())
    made = pl.plan(cluster, tiny_workload(batch_samples=60), stop=pl.Effort(0.05), **fields)
    assert made.plan is not None
    assert pl.check(made.plan, cluster) == []
    pl.save_plan(made.plan, tmp_path / "plan.json")
    again = pl.load_plan(tmp_path / "plan.json").cluster.devices
    for field in ("sites", "site_within", "site_upload_bytes_per_s", "site_download_bytes_per_s"):
        assert getattr(again, field) == getattr(made.plan.cluster.devices, field)
    slower = replace(cluster.devices, site_within={"m1": "west", "south": "land", "west": "land"})
    assert pl.check(made.plan, cluster.replace(devices=slower)) != []


def test_unstated_rates_of_lines_are_told() -> None:
    """Also of a line around sites with rates of their own; of all devices there is none to tell."""
    network = pl.Network(np.full((4, 4), 0.02), np.full((4, 4), 1e8))
    lines = dict.fromkeys("abcd", 1e7)
    within = {"a": "germany", "b": "germany", "c": "france", "d": "france", "germany": "eu"}
    fields: dict[str, Any] = {"sites": list("abcd"), "site_upload_bytes_per_s": lines}
    fields |= {"site_within": within | {"france": "eu"}, "site_download_bytes_per_s": lines}
    told = unlimited_sites(pl.Cluster(network, pl.Devices(1e12, 1e9, **fields)))
    assert "no rate is given for the shared line of germany, france" in told
    for wrong in (3, None, ["x"]):
        with pytest.raises(ValueError, match=r"site_within of .a. is .*; name the site"):
            pl.Cluster(network, pl.Devices(1e12, 1e9, **fields | {"site_within": {"a": wrong}}))


def test_generated_names_of_sites_are_new(tmp_path: Path) -> None:
    rows = "name,machine,site,within,gpu\na,device 1,s,device 2,T4\nb,,,,T4\nc,,,,T4\n"
    sites = load_devices(write_csv(tmp_path, rows), four_places()).devices.sites
    assert sites == ("device 1", "device 1'", "device 2'")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "name,site,within\na,x,y\nb,y,x\n",
            "line 3: within 'x' of 'y' makes 'x' lie in itself; correct",
        ),
        ("name,site,within\na,x,y\nb,x,z\n", "line 3: 'x' lies in 'z', in line 2 in 'y'; give"),
        ("name,within\na,y\n", "line 2: 'a' has within, where its site lies, but no site"),
        ("name,site\na,x\n,z\n", "line 3: no device is in site 'z'; name it as site or within"),
        ("name,site,gpu\na,x,T4\n,x,T4\n", "line 3: name is empty, but gpu; give each device"),
        ("name,site,within\na,x,\n,,x\n", "line 3: name is empty, and no site"),
        ("name,site\n,x\n", "no rows; give one per device or region"),
    ],
)
def test_sites_that_contradict_themselves(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(pl.NetworkError, match=message):
        load_devices(write_csv(tmp_path, rows), four_places())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu\nT4\n", "column 'name' is missing"),
        ("name,colour\nn/0,red\n", "column 'colour' is unknown"),
        ("name,memory\nn/0,9\n", r"column 'memory' is unknown \(did you mean 'memory_gb'\?\)"),
        ("name\nn/0\nSouht\n", r"line 3: 'Souht' is no device .* \(did you mean 'south'\?\)"),
        ("name\n", "no rows"),
        ("name,gpu\nn/0,Z80\n", "line 2: gpu 'Z80' is no GPU in the table; choose one of"),
        ("name,tflops\nn/0,fast\n", "line 2: tflops is 'fast'; give a number > 0"),
        ("name,memory_gb\nn/0,1e400\n", "memory_gb is '1e400', but no device has more"),
        ("name,usd_per_hour\nn/0,-1\n", "usd_per_hour is '-1'; give a number >= 0, or nothing"),
        ("name,count\nn/0,1.5\n", "line 2: count is '1.5'; give a whole number"),
        ("name,memory_gb\nn/0,-1\n", "line 2: memory_gb is '-1'"),
        ("name,upload_mbps\nn/0,1e200\n", "line 2: upload_mbps is '1e200'; in SI units it must"),
        ("name,memory_gb\nn/0,1e200\n", "line 2: memory_gb is '1e200', but no device has more"),
        ('name,memory_gb\nn/0,"1,5"\n', "line 2: memory_gb is '1,5'; write decimals with a point"),
        ("name,memory_gb\nn/0,80 GB\n", "line 2: memory_gb is '80 GB'; give the number alone"),
        ("name,upload_mbps\nn/0,nan\n", "line 2: upload_mbps is 'nan'"),
        ("name,can_compute\nn/0,maybe\n", "line 2: can_compute is 'maybe'; give yes or no"),
        ("name\nn/0\nn/0\n", "line 3: 'n/0' is listed twice"),
        ("name\nnorth\nn/0\n", "line 3: device 'n/0' has a row in line 2 already"),
        ("name\nwest\n", "'west' is no device and no region of the network"),
        ("name,count\nnorth,3\n", "line 2: count of 'north' is 3, the network has 2 devices there"),
        ("name,tflops\nn/0,1,2\n", "line 2 has 3 cells, the header 2"),
        (
            "name,site_upload_mbps\nn/0,1\n",
            "line 2: 'n/0' has site_upload_mbps, a limit of",
        ),
        ("name,tflops,peak_tflops\nn/0,9,3\n", "line 2: peak_tflops is 3, less than the 9"),
        ("name,gpu,tflops\nn/0,T4,90\n", "line 2: tflops is 90, more than the peak of 65 of T4"),
        ("name,interface\nn/0,eth1;ls\n", "devices.interfaces has 'eth1;ls'; give at most 15"),
        (
            "name,site,site_upload_mbps\nn/0,lab,1\nn/1,lab,2\n",
            "line 3: site_upload_mbps of site 'lab' is 2, in line 2 1; give one",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """Path, line, value and remedy."""
    path = write_csv(tmp_path, text)
    with pytest.raises(pl.NetworkError, match=message) as caught:
        load_devices(path, two_regions(), inside=INSIDE)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_device_that_cannot_compute_holds_no_stage(tmp_path: Path) -> None:
    """`pl.plan` leaves it out."""
    path = write_csv(tmp_path, "name,can_compute\nn/0,yes\nn/1,no\n")
    from tests.conftest import tiny_workload

    cluster = load_devices(path, two_regions())
    message = "stages is 2; it must be from 1 to the 1 devices that can compute"
    with pytest.raises(ValueError, match=message):
        pl.plan(cluster, tiny_workload(), stages=2, stop=pl.MaxIterations(1))
    made = pl.plan(cluster, tiny_workload(), stages=1, stop=pl.MaxIterations(1)).plan
    assert made is not None and made.left_out == ("n/1",)
    cluster = cluster.replace(devices=pl.Devices(1e12, 1e9, can_compute=False))
    with pytest.raises(ValueError, match="no device can compute: can_compute is no"):
        pl.plan(cluster, tiny_workload(), stages=1, stop=pl.MaxIterations(1))


def test_devices_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three GPUs in two regions of a bundled network."""
    path = write_csv(tmp_path, "name,count,gpu\nOregon,2,A100\nVirginia,1,L4\n")
    out = tmp_path / "plan.json"
    argv = ["plan", "--network", "aws8_dtfm_worldwide_2022", "--devices", str(path)]
    argv += ["--workload", "gpt2-tiny", "--sequence", "64", "--batch-samples", "6"]
    argv += ["--stages", "3", "--effort", "1", "--no-pictures", "--random-placements", "0"]
    assert main([*argv, "--out", str(out)]) == 0
    capsys.readouterr()
    plan = pl.load_plan(out)
    assert plan.cluster.network.ids == ("Oregon/0", "Oregon/1", "Virginia/0")
    assert len(set(plan.cluster.flops.tolist())) == 2
    assert pl.check(plan) == []
