"""Links within machines from the output of nccl-tests and nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import planner as pl
from planner.network.devices_file import load_devices
from planner.network.gpu_link_logs import read_gpu_link

COLLECTIVES = """\
# nThread 1 nGpus 4 minBytes 8 maxBytes 268435456 step: 2(factor) warmup iters: 5 iters: 20
#
# out-of-place in-place
# size count type redop root time algbw busbw #wrong time algbw busbw #wrong
# (B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s)
host-1:4242:4242 [0] NCCL INFO Bootstrap : Using eth0
           0 0 float none -1 0.14 0.00 0.00 0 0.13 0.00 0.00 0
          64 4 float none -1 17.42 0.00 0.00 0 17.01 0.00 0.00 0
     1048576 65536 float none -1 29.80 35.19 26.39 0 29.70 35.31 26.48 0
   268435456 16777216 float none -1 1310.2 204.88 153.66 0 1308.0 205.23 153.92 0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 60.0
"""
OLD = """\
# size count type redop time algbw busbw error time algbw busbw error
# (B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s)
     1048576 262144 float sum 500.0 2.10 3.15 1e-06 500.0 2.10 3.15 1e-06
    33554432 8388608 float sum 4000.0 8.39 12.58 1e-06 4000.0 8.39 12.58 1e-06
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\t{far}\tNV12\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tSYS\t0-31\t0\t\tN/A
GPU2\t{far}\tNV12\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tNV12\tNV12\tNV12\t X \tPXB\t32-63\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\tPXB\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def write(tmp_path: Path, text: str) -> Path:
    """Write a log."""
    path = tmp_path / "log.txt"
    path.write_text(text)
    return path


def test_tables_of_nccl_tests(tmp_path: Path) -> None:
    """The largest bus bandwidth and the shortest time, out of place, of new and old releases."""
    link = read_gpu_link(write(tmp_path, COLLECTIVES), None)
    assert link == pl.Link(17.42e-6, 153.66e9)
    assert read_gpu_link(write(tmp_path, OLD), "T4") == pl.Link(500e-6, 12.58e9)


@pytest.mark.parametrize(
    ("far", "gpu", "bytes_per_s"),
    [
        ("NV12", "A100", 300e9),
        ("NV4", "A100-80GB", 100e9),
        ("SYS", "A100", 31.5e9),
        ("PHB", "H100", 63e9),
        ("NV4", "RTX3090", 56.25e9),
        ("PIX", "RTX3090", 31.5e9),
    ],
)
def test_the_slowest_pair_of_a_topology_counts(
    tmp_path: Path, far: str, gpu: str, bytes_per_s: float
) -> None:
    link = read_gpu_link(write(tmp_path, TOPOLOGY.format(far=far)), gpu)
    assert link.latency_s == 20e-6
    assert link.bandwidth_bytes_per_s == pytest.approx(0.8 * bytes_per_s)


@pytest.mark.parametrize(
    ("text", "gpu", "message"),
    [
        ("hello\n", "A100", "holds neither a table of nccl-tests nor"),
        (OLD[: OLD.index("     1048576")], "A100", "holds neither a table of nccl-tests nor"),
        (TOPOLOGY.format(far="SYS"), None, "is of an unknown GPU; give gpu, or gpu_link_gbps"),
        (TOPOLOGY.format(far="NV4"), "T4", "has NV.*, and T4 has no NVLink"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, gpu: str | None, message: str) -> None:
    with pytest.raises(pl.NetworkError, match=message):
        read_gpu_link(write(tmp_path, text), gpu)


def test_a_devices_file_names_a_log(tmp_path: Path) -> None:
    """Beside it; stated values go first."""
    write(tmp_path, COLLECTIVES)
    network = pl.Network(np.full((2, 2), 0.01), np.full((2, 2), 1e8), ["a", "b"])
    devices = tmp_path / "devices.csv"
    devices.write_text(
        "name,gpu,count,machine,gpu_link_log,gpu_link_us\na,H100,2,m,log.txt,\nb,H100,2,n,log.txt,9\n"
    )
    cluster = load_devices(devices, network)
    assert np.asarray(cluster.devices.gpu_link_bytes_per_s).tolist() == [153.66e9] * 4
    assert np.asarray(cluster.devices.gpu_link_latency_s) == pytest.approx(
        [17.42e-6, 17.42e-6, 9e-6, 9e-6]
    )
    devices.write_text("name,gpu,machine,gpu_link_log\na,H100,m,none.txt\n")
    with pytest.raises(pl.NetworkError, match=r"none\.txt: No such file"):
        load_devices(devices, network)
