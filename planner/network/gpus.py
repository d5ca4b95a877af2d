"""Data-sheet figures of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.network.dtype import Dtype
from planner.network.words import quantity


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures of one GPU.

    Attributes
    ----------
    peak_flops
        Dense 16-bit matrix FLOP/s with 32-bit accumulation, without sparsity.
    fp32_flops
        In 32 bits, not TF32: what a matrix product in fp32 can attain.
    memory_bytes
        As sold, in bytes.
    source
        Where the figures come from.
    usd_per_hour
        Of one on demand, on the AWS instance that `price_source` names; None: not offered there.
    price_source
        Instance, region and date.
    """

    peak_flops: float
    fp32_flops: float
    memory_bytes: float
    source: str
    usd_per_hour: float | None = None
    price_source: str = ""

    def __repr__(self) -> str:
        price = "" if self.usd_per_hour is None else f", {self.usd_per_hour:g} $/h"
        memory = quantity(self.memory_bytes, "B")
        return f"Gpu({quantity(self.peak_flops, 'FLOP/s')} in 16 bits, {memory}{price})"

    def peak(self, dtype: Dtype) -> float:
        """FLOP/s of matrix products in a format.

        T4 and V100 have fp16 in their 16-bit peak but no bf16, which PyTorch emulates there.

        Parameters
        ----------
        dtype
            Of the products.

        Returns
        -------
        float
            FLOP/s.
        """
        return self.fp32_flops if dtype is Dtype.FP32 else self.peak_flops


GIB = 2.0**30


def on_demand(instance: str) -> str:
    """Where a price is from: it changes, and regions differ; a devices file states one's own."""
    return f"AWS EC2 {instance}, us-east-1, on demand, list price of 2024"


GPUS: dict[str, Gpu] = {
    "T4": Gpu(
        65e12,
        8.1e12,
        16 * GIB,
        "NVIDIA T4 data sheet",
        0.526,
        on_demand("g4dn.xlarge"),
    ),
    "V100": Gpu(
        125e12,
        15.7e12,
        16 * GIB,
        "NVIDIA V100 data sheet (SXM2); DT-FM paper, section 1",
        3.06,
        on_demand("p3.2xlarge"),
    ),
    "V100-32GB": Gpu(
        125e12,
        15.7e12,
        32 * GIB,
        "NVIDIA V100 data sheet",
        3.902,
        on_demand("p3dn.24xlarge, an eighth"),
    ),
    "A10": Gpu(
        125e12,
        31.2e12,
        24 * GIB,
        "NVIDIA A10 data sheet",
        1.006,
        on_demand("g5.xlarge, whose A10G is nearly the same"),
    ),
    "A40": Gpu(149.7e12, 37.4e12, 48 * GIB, "NVIDIA A40 data sheet; DT-FM paper, section 10.5"),
    "L4": Gpu(
        121e12,
        30.3e12,
        24 * GIB,
        "NVIDIA L4 data sheet, half of the figure with sparsity",
        0.805,
        on_demand("g6.xlarge"),
    ),
    "A100": Gpu(
        312e12,
        19.5e12,
        40 * GIB,
        "NVIDIA A100 data sheet",
        4.097,
        on_demand("p4d.24xlarge, an eighth"),
    ),
    "A100-80GB": Gpu(
        312e12,
        19.5e12,
        80 * GIB,
        "NVIDIA A100 data sheet",
        5.121,
        on_demand("p4de.24xlarge, an eighth"),
    ),
    "H100": Gpu(
        989e12,
        66.9e12,
        80 * GIB,
        "NVIDIA H100 SXM data sheet, without sparsity",
        12.29,
        on_demand("p5.48xlarge, an eighth"),
    ),
    "H200": Gpu(989e12, 66.9e12, 141e9, "NVIDIA H200 SXM data sheet, without sparsity"),
    "RTX3090": Gpu(71e12, 35.6e12, 24 * GIB, "NVIDIA GA102 white paper, FP32 accumulate"),
    "RTX4090": Gpu(165.2e12, 82.6e12, 24 * GIB, "NVIDIA Ada white paper, FP32 accumulate"),
}

CALLED = {
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "NVIDIA A10": "A10",
    "NVIDIA A40": "A40",
    "NVIDIA L4": "L4",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 4090": "RTX4090",
}
"""Names in the table by those that the driver gives; others of a family have other peaks."""

VENDOR = re.compile(r"(nvidia)?(tesla|geforce|quadro)?")
SXM = re.compile(r"sxm\d?")
"""The board whose figures the table has, where a GPU is sold on several."""


def find_gpu(name: str) -> str | None:
    """The name in `GPUS` of what a user, a cloud or a driver calls a GPU.

    Case, blanks, dashes and the vendor do not count, and the memory may be said: ``RTX 4090`` is
    ``RTX4090``, ``H100-80GB`` is ``H100``, ``NVIDIA A100-SXM4-80GB`` is ``A100-80GB``.

    Returns
    -------
    str or None
        None: it is not in the table, or two of the table could be meant.
    """
    plain = _plain(name)
    known = {_plain(key): key for key in GPUS}
    known |= {_plain(called): key for called, key in CALLED.items()}
    for key, gpu in GPUS.items():
        base = key.partition("-")[0]
        sizes = {round(gpu.memory_bytes / GIB), round(gpu.memory_bytes / 1e9)}
        known |= {
            _plain(f"{base}{size}{unit}"): key for size in sizes for unit in ("G", "GB", "GiB")
        }
    if plain in known:
        return known[plain]
    without = SXM.sub("", plain)
    several = [key for key in GPUS if _plain(key.partition("-")[0]) == without]
    return known.get(without) if len(several) < 2 else None


def _plain(name: str) -> str:
    letters = re.sub(r"[\s_-]+", "", name.lower())
    return letters[VENDOR.match(letters).end() :]  # type: ignore[union-attr]
