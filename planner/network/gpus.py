"""Data-sheet figures of GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.network.dtype import Dtype
from planner.utils.csv_table import read_csv
from planner.utils.text import closest_match, quantity
from planner.utils.validate import short_repr

USABLE = 0.95
"""Usable part of a GPU's free memory: PyTorch's allocator rounds sizes up and leaves gaps."""
CONTEXT_BYTES = 0.65e9
"""A process's CUDA context, measured on an H200 with CUDA 13."""
LINK_UTILIZATION = 0.8
"""Fraction of a data sheet's link bandwidth that collectives attain: about 360 of 450 GB/s for an
all-gather of nccl-tests on eight H100 (github.com/NVIDIA/nccl-tests)."""
COLLECTIVE_S = 20e-6
"""Default latency of one collective among the GPUs of a machine."""
GIB = 2.0**30


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures of a GPU, and the memory that a process can use.

    Attributes
    ----------
    peak_flops
        Dense 16-bit matrix FLOP/s with 32-bit accumulation, without sparsity.
    fp32_flops
        Matrix FLOP/s in fp32, not TF32.
    total_bytes
        Device memory as PyTorch reports it, which is less than its name says.
    sold_gb
        Memory in its name.
    source
        Source of the FLOP/s.
    memory_source
        Source of `total_bytes`.
    has_bf16
        Whether the hardware multiplies matrices in bf16.
    link, link_bytes_per_s
        Link to the other GPUs of a machine, and its data sheet's bandwidth in one direction.
    usd_per_hour
        On-demand price per GPU on the AWS instance `price_source`; None if not offered.
    price_source
        Instance, region and date.
    """

    peak_flops: float
    fp32_flops: float
    total_bytes: float
    sold_gb: int
    source: str
    memory_source: str
    link: str
    link_bytes_per_s: float
    has_bf16: bool = True
    usd_per_hour: float | None = None
    price_source: str = ""

    def __repr__(self) -> str:
        price = "" if self.usd_per_hour is None else f", {self.usd_per_hour:g} $/h"
        memory = quantity(self.memory_bytes, "B")
        return f"Gpu({quantity(self.peak_flops, 'FLOP/s')} in 16 bits, {memory} usable{price})"

    @property
    def memory_bytes(self) -> float:
        """Memory that a stage may use: what the executor accepts on an otherwise idle GPU."""
        return USABLE * (self.total_bytes - CONTEXT_BYTES)

    def peak(self, dtype: Dtype) -> float:
        """Peak matrix FLOP/s in a format.

        The 16-bit peak holds for fp16 and bf16; T4 and V100 have no bf16 (`has_bf16`).
        """
        return self.fp32_flops if dtype is Dtype.FP32 else self.peak_flops


TABLE = Path(__file__).with_name("gpus.csv")
"""A row per GPU. Driver names are separated by ``;``. Prices change and differ by region; a devices
file states actual ones."""
ROWS = read_csv(TABLE).rows


def _gpu(row: Mapping[str, str]) -> Gpu:
    price = row["usd_per_hour"]
    return Gpu(
        # read with their exponent: the same floats as literals of FLOP/s
        float(f"{row['peak_tflops']}e12"),
        float(f"{row['fp32_tflops']}e12"),
        float(row["memory_gib"]) * GIB,
        int(row["sold_gb"]),
        row["source"],
        row["memory_source"],
        row["link"],
        float(row["link_gbps"]) * 1e9 / 8,
        row["has_bf16"] == "yes",
        float(price) if price else None,
        row["price_source"],
    )


GPUS: dict[str, Gpu] = {row.cells["name"]: _gpu(row.cells) for row in ROWS}
DEFAULT_GPU = "A100"
"""Default GPU: common, and supports bf16, the default format."""

CALLED = {
    called: row.cells["name"] for row in ROWS for called in row.cells["driver_names"].split("; ")
}
"""Names in the table by driver name; other GPUs of a family have other peaks."""

VENDOR = re.compile(r"(nvidia)?(tesla|geforce|quadro)?(rtx)?")
SXM = re.compile(r"sxm\d?")
"""The board whose figures are in the table, for GPUs sold on several."""


def find_gpu(name: str) -> str | None:
    """Name in `GPUS` for a name used by a user, a cloud or the driver.

    Case, blanks, dashes, vendor and memory are ignored: ``RTX 4090`` is ``RTX4090``, ``H100-80GB``
    is ``H100``, ``NVIDIA A100-SXM4-80GB`` is ``A100-80GB``.
    """
    normalized = _normalized(name)
    known = {_normalized(key): key for key in GPUS}
    known |= {_normalized(called): key for called, key in CALLED.items()}
    for key, gpu in GPUS.items():
        units = ("G", "GB", "GiB")
        known |= {_normalized(f"{_family(key)}{gpu.sold_gb}{unit}"): key for unit in units}
    if normalized in known:
        return known[normalized]
    without_board = SXM.sub("", normalized)
    several = [key for key in GPUS if _normalized(_family(key)) == without_board]
    return known.get(without_board) if len(several) < 2 else None


def unknown_gpu(name: object) -> str:
    """Message for an unknown GPU, with the closest name and a remedy."""
    normalized = {_normalized(key): key for key in GPUS}
    closest = closest_match(_normalized(str(name)), normalized)
    hint = "" if closest is None else f" (did you mean {normalized[closest]!r}?)"
    return (
        f"{short_repr(name)} is no GPU in the table{hint}; choose one of {', '.join(GPUS)}, or "
        "leave gpu empty and give tflops and memory_gb in a devices file"
    )


def _family(key: str) -> str:
    """A name in the table without its memory size."""
    return re.sub(r"-\d+GB$", "", key)


def _normalized(name: str) -> str:
    letters = re.sub(r"[\s_-]+", "", name.lower())
    return letters[VENDOR.match(letters).end() :]  # type: ignore[union-attr]
