"""Data-sheet figures of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.network.dtype import Dtype
from planner.utils.text import closest_match, quantity
from planner.utils.validate import short_repr

USABLE = 0.95
"""Usable part of a GPU's free memory: PyTorch's allocator rounds sizes up and leaves gaps."""
CONTEXT_BYTES = 0.65e9
"""A process's CUDA context, measured on an H200 with CUDA 13."""
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


REPORTED = "total capacity in PyTorch's OutOfMemoryError"


def on_demand(instance: str) -> str:
    """Source of a price. Prices change and differ by region; a devices file states actual ones."""
    return f"AWS EC2 {instance}, us-east-1, on demand, list price of 2024"


GPUS: dict[str, Gpu] = {
    "T4": Gpu(
        *(65e12, 8.1e12, 14.56 * GIB),
        16,
        "NVIDIA T4 data sheet",
        f"{REPORTED}, github.com/Zheng-Chong/CatVTON/issues/133",
        has_bf16=False,
        usd_per_hour=0.526,
        price_source=on_demand("g4dn.xlarge"),
    ),
    "V100": Gpu(
        *(125e12, 15.7e12, 15.77 * GIB),
        16,
        "NVIDIA V100 data sheet (SXM2); DT-FM paper, section 1",
        f"{REPORTED}, as of V100-32GB",
        has_bf16=False,
        usd_per_hour=3.06,
        price_source=on_demand("p3.2xlarge"),
    ),
    "V100-32GB": Gpu(
        *(125e12, 15.7e12, 31.74 * GIB),
        32,
        "NVIDIA V100 data sheet",
        f"{REPORTED}, github.com/liucongg/ChatGLM-Finetuning/issues/73",
        has_bf16=False,
        usd_per_hour=3.902,
        price_source=on_demand("p3dn.24xlarge, an eighth"),
    ),
    "V100-PCIE": Gpu(
        *(112e12, 14e12, 15.77 * GIB),
        16,
        "NVIDIA V100 data sheet (PCIe)",
        f"{REPORTED}, as of V100-32GB",
        has_bf16=False,
    ),
    "V100-PCIE-32GB": Gpu(
        *(112e12, 14e12, 31.74 * GIB),
        32,
        "NVIDIA V100 data sheet (PCIe)",
        f"{REPORTED}, as of V100-32GB",
        has_bf16=False,
    ),
    "A10": Gpu(
        *(125e12, 31.2e12, 22.0 * GIB),
        24,
        "NVIDIA A10 data sheet",
        "22.6 GiB in nvidia-smi, github.com/signalnine/q27/issues/1, less the driver's part",
        usd_per_hour=1.006,
        price_source=on_demand("g5.xlarge, which has an A10G"),
    ),
    "A10G": Gpu(
        *(70e12, 31.52e12, 22.0 * GIB),
        24,
        "NVIDIA A10G data sheet for AWS, without sparsity",
        f"{REPORTED} of an A10, 21.99 GiB, github.com/zai-org/CogVLM/issues/236",
        usd_per_hour=1.006,
        price_source=on_demand("g5.xlarge"),
    ),
    "A40": Gpu(
        *(149.7e12, 37.4e12, 44.4 * GIB),
        48,
        "NVIDIA A40 data sheet; DT-FM paper, section 10.5",
        f"{REPORTED} of an L40S, 44.53 GiB, github.com/Wan-Video/Wan2.1/issues/205",
    ),
    "L40S": Gpu(
        *(362e12, 91.6e12, 44.4 * GIB),
        48,
        "NVIDIA L40S data sheet, without sparsity",
        f"{REPORTED}, 44.53 GiB, github.com/Wan-Video/Wan2.1/issues/205; others less",
        usd_per_hour=1.861,
        price_source=on_demand("g6e.xlarge"),
    ),
    "RTXA6000": Gpu(
        *(154.8e12, 38.7e12, 47.5 * GIB),
        48,
        "NVIDIA RTX A6000 data sheet, half of the figure with sparsity",
        "49140 MiB in nvidia-smi (48.0 GiB), less the driver's part",
    ),
    "RTXA5000": Gpu(
        *(111.1e12, 27.8e12, 23.5 * GIB),
        24,
        "NVIDIA RTX A5000 data sheet, half of the figure with sparsity",
        "24564 MiB in nvidia-smi (24.0 GiB), less the driver's part",
    ),
    "RTX6000ADA": Gpu(
        *(364.2e12, 91.1e12, 44.4 * GIB),
        48,
        "NVIDIA RTX 6000 Ada data sheet, a quarter of the FP8 figure with sparsity",
        f"{REPORTED}, 44.43 GiB, github.com/DINGYANB/MTVCrafter/issues/21",
    ),
    "L4": Gpu(
        *(121e12, 30.3e12, 22.0 * GIB),
        24,
        "NVIDIA L4 data sheet, half of the figure with sparsity",
        "23034 MiB in nvidia-smi, less the driver's part",
        usd_per_hour=0.805,
        price_source=on_demand("g6.xlarge"),
    ),
    "A100": Gpu(
        *(312e12, 19.5e12, 39.50 * GIB),
        40,
        "NVIDIA A100 data sheet",
        f"{REPORTED}, github.com/TianheWu/CoSeR/issues/10",
        usd_per_hour=4.097,
        price_source=on_demand("p4d.24xlarge, an eighth"),
    ),
    "A100-80GB": Gpu(
        *(312e12, 19.5e12, 79.14 * GIB),
        80,
        "NVIDIA A100 data sheet",
        f"{REPORTED}, 79.25 GiB, github.com/levihsu/OOTDiffusion/issues/235; others less",
        usd_per_hour=5.121,
        price_source=on_demand("p4de.24xlarge, an eighth"),
    ),
    "H100": Gpu(
        *(989e12, 66.9e12, 79.1 * GIB),
        80,
        "NVIDIA H100 SXM data sheet, without sparsity",
        "81559 MiB in nvidia-smi (79.6 GiB), less the driver's part",
        usd_per_hour=12.29,
        price_source=on_demand("p5.48xlarge, an eighth"),
    ),
    "H100-PCIE": Gpu(
        *(756e12, 51.2e12, 79.1 * GIB),
        80,
        "NVIDIA H100 PCIe data sheet, without sparsity",
        "81559 MiB in nvidia-smi (79.6 GiB), less the driver's part",
    ),
    "H200": Gpu(
        *(989e12, 66.9e12, 150.1e9),
        141,
        "NVIDIA H200 SXM data sheet, without sparsity",
        "torch.cuda.mem_get_info, benchmarks/results/gpu-check-2026-11-26.md",
    ),
    "B200": Gpu(
        *(2250e12, 75e12, 178.35 * GIB),
        180,
        "NVIDIA HGX B200 data sheet, an eighth, without sparsity",
        REPORTED,
    ),
    "RTX3060": Gpu(
        *(25.5e12, 12.7e12, 11.7 * GIB),
        12,
        "GA102 white paper's rate of a tensor core: 112 cores at 1.777 GHz",
        f"{REPORTED}, 11.75 GiB, github.com/Kunhao-Liu/StyleGaussian/issues/12",
    ),
    "RTX3080": Gpu(
        *(59.5e12, 29.8e12, 9.75 * GIB),
        10,
        "NVIDIA GA102 white paper, FP32 accumulate",
        f"{REPORTED}, 9.78 GiB, github.com/zai-org/CogVideo/issues/34",
    ),
    "RTX3090": Gpu(
        *(71e12, 35.6e12, 23.6 * GIB),
        24,
        "NVIDIA GA102 white paper, FP32 accumulate",
        f"{REPORTED} of the RTX 4090",
    ),
    "RTX4080": Gpu(
        *(97.5e12, 48.7e12, 15.6 * GIB),
        16,
        "NVIDIA Ada white paper, FP32 accumulate",
        "16376 MiB in nvidia-smi (16.0 GiB), less the driver's part",
    ),
    "RTX4090": Gpu(
        *(165.2e12, 82.6e12, 23.64 * GIB),
        24,
        "NVIDIA Ada white paper, FP32 accumulate",
        f"{REPORTED}, github.com/ali-vilab/VGen/issues/104",
    ),
    "RTX5080": Gpu(
        *(112.6e12, 56.3e12, 15.4 * GIB),
        16,
        "NVIDIA RTX Blackwell white paper, FP32 accumulate",
        "16303 MiB in nvidia-smi (15.9 GiB), less the driver's part",
    ),
    "RTX5090": Gpu(
        *(209.5e12, 104.8e12, 31.37 * GIB),
        32,
        "NVIDIA RTX Blackwell white paper, FP32 accumulate",
        f"{REPORTED}, github.com/Wan-Video/Wan2.1/issues/465",
    ),
}

DEFAULT_GPU = "A100"
"""Default GPU: common, and supports bf16, the default format."""

CALLED = {
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "Tesla V100-PCIE-16GB": "V100-PCIE",
    "Tesla V100-PCIE-32GB": "V100-PCIE-32GB",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A40": "A40",
    "NVIDIA L40S": "L40S",
    "NVIDIA RTX A6000": "RTXA6000",
    "NVIDIA RTX A5000": "RTXA5000",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000ADA",
    "NVIDIA L4": "L4",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIE",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3060": "RTX3060",
    "NVIDIA GeForce RTX 3080": "RTX3080",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 4080": "RTX4080",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 5080": "RTX5080",
    "NVIDIA GeForce RTX 5090": "RTX5090",
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
