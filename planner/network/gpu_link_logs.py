"""Links between the GPUs of a machine, from nccl-tests and ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from pathlib import Path

from planner.network.error import NetworkError
from planner.network.gpus import COLLECTIVE_S, GPUS, LINK_UTILIZATION
from planner.network.link import Link

NVLINK_BYTES_PER_S = {
    **dict.fromkeys(("NVLink 2", "NVLink 3", "NVLink 4", "PCIe 5.0 x16"), 25e9),
    "NVLink 5": 50e9,
    "PCIe 4.0 x16": 14.0625e9,
}
"""One NVLink in one direction by the link of a GPU in the table, from NVIDIA's data sheets: the
bridge of H100-PCIE has links of 25 GB/s, that of Ampere cards (RTX 3090, A40) of 14."""
PCIE_BYTES_PER_S = {
    "NVLink 2": 15.75e9,
    "NVLink 3": 31.5e9,
    "NVLink 4": 63e9,
    "NVLink 5": 63e9,
}
"""PCIe x16 in one direction of GPUs whose link in the table is NVLink: generations 3, 4 and 5."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")
GPU = re.compile(r"GPU[0-9]+")
NVLINKS = re.compile(r"NV([0-9]+)")
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")


def read_gpu_link(path: str | Path, gpu: str | None) -> Link:
    """The link of a GPU to the others of its machine, from a tool's output.

    Parameters
    ----------
    path
        Output of a test of nccl-tests, such as ``all_gather_perf -b 8 -e 256M -f 2 -g 8``, or of
        ``nvidia-smi topo -m``.
    gpu
        Name in `planner.GPUS`, whose NVLinks and PCIe a topology means.

    Returns
    -------
    Link
        From nccl-tests the largest bus bandwidth, and the shortest time of a collective. From a
        topology the slowest pair, of which collectives attain `LINK_UTILIZATION`.

    Raises
    ------
    NetworkError
        One line with the path and what is wrong.
    """
    try:
        lines = STYLE.sub("", Path(path).read_text(errors="replace")).splitlines()
    except OSError as error:
        raise NetworkError(f"{path}: {error.strerror}; give the output of nccl-tests") from None
    link = _of_collectives(lines)
    if link is None:
        link = _of_topology(lines, path, gpu)
    if link is None:
        raise NetworkError(
            f"{path}: holds neither a table of nccl-tests nor the matrix of nvidia-smi topo -m; "
            "give the whole output of one of them"
        )
    return link


def _of_collectives(lines: list[str]) -> Link | None:
    """The link of a table of nccl-tests; None without one."""
    header: list[str] = []
    times_us, rates = [], []
    for line in lines:
        words = line.lstrip("# ").split()
        if line.startswith("#"):
            header = words if {"time", "busbw"} <= set(words) else header
        elif header and len(words) > header.index("busbw") and words[0].isdecimal():
            if not int(words[0]) or not int(words[1]):
                continue  # all_gather of fewer values than GPUs moves nothing
            times_us.append(float(words[header.index("time")]))
            rates.append(float(words[header.index("busbw")]) * 1e9)
    if not rates or max(rates) <= 0 or min(times_us) <= 0:
        return None
    return Link(min(times_us) * 1e-6, max(rates))


def _of_topology(lines: list[str], path: str | Path, gpu: str | None) -> Link | None:
    """The slowest pair of a matrix of ``nvidia-smi``; None without one."""
    rows = [words for line in lines if (words := line.split()) and GPU.fullmatch(words[0])]
    # the first names the columns
    size = max((sum(map(bool, map(GPU.fullmatch, row))) for row in rows), default=0)
    kinds = {kind for row in rows[1:] for kind in row[1 : size + 1] if kind != "X"}
    if not kinds or not all(kind in PCIE or NVLINKS.fullmatch(kind) for kind in kinds):
        return None
    if gpu is None:
        raise NetworkError(f"{path}: is of an unknown GPU; give gpu, or gpu_link_gbps")
    table = GPUS[gpu]
    rates = []
    for kind in kinds:
        if (links := NVLINKS.fullmatch(kind)) is None:
            rates.append(PCIE_BYTES_PER_S.get(table.link, table.link_bytes_per_s))
        elif table.link in NVLINK_BYTES_PER_S:
            rates.append(int(links[1]) * NVLINK_BYTES_PER_S[table.link])
        else:
            raise NetworkError(
                f"{path}: has {kind}, and {gpu} has no NVLink; correct gpu, or give gpu_link_gbps"
            )
    return Link(COLLECTIVE_S, LINK_UTILIZATION * min(rates))
