"""GPUs are found by the names that clouds, drivers and people use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import planner as pl
from planner.cli.main import main
from planner.network.gpus import CALLED, GPUS, find_gpu


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, name) for name in GPUS),
        *CALLED.items(),
        ("a100", "A100"),
        ("RTX 4090", "RTX4090"),
        ("geforce rtx-4090", "RTX4090"),
        ("H100-80GB", "H100"),
        ("H100 SXM5 80GB", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("a100 80gb", "A100-80GB"),
        ("V100 16GB", "V100"),
        ("T4-16GiB", "T4"),
        ("h200 141gb", "H200"),
        ("H100 SXM", "H100"),
        ("H100 PCIe 80GB", "H100-PCIE"),
        ("V100-PCIE-16GB", "V100-PCIE"),
        ("RTX A6000", "RTXA6000"),
        ("a6000", "RTXA6000"),
        ("4090", "RTX4090"),
        ("RTX 6000 Ada", "RTX6000ADA"),
        # of two in the table, or of another peak or memory than the table's
        ("A100 SXM4", None),
        ("Quadro RTX 6000", None),
        ("RTX 4080 SUPER", None),
        ("RTX 3080 12GB", None),
        ("H100-96GB", None),
        ("H100 NVL", None),
        ("Tesla V100S-PCIE-32GB", None),
        ("RTX 4090 Ti", None),
        ("NVIDIA", None),
        ("", None),
    ],
)
def test_names_of_gpus(name: str, found: str | None) -> None:
    """Case, blanks, dashes and vendor are ignored; ambiguous names are rejected."""
    assert find_gpu(name) == found


def test_unknown_gpus_get_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python, in a devices file and on the command line."""
    assert pl.Devices.of_gpu("rtx 4090") == pl.Devices.of_gpu("RTX4090")
    with pytest.raises(ValueError, match=r"'A1000' is no GPU in the table \(did you mean 'A100'"):
        pl.Devices.of_gpu("A1000")
    network = pl.Network([[0, 1], [1, 0]], [[0, 1], [1, 0]], ["a", "b"])
    path = tmp_path / "devices.csv"
    path.write_text("name,gpu\na,NVIDIA A100-SXM4-80GB\nb,h100-80gb\n")
    devices = pl.load_devices(path, network).devices
    assert np.asarray(devices.memory_bytes).tolist() == [
        GPUS[name].memory_bytes for name in ("A100-80GB", "H100")
    ]
    path.write_text("name,gpu\na,Tesla V100S-PCIE-32GB\n")
    with pytest.raises(
        pl.NetworkError,
        match=r"line 2: gpu 'Tesla V100S-PCIE-32GB' is no GPU in the table \(did you mean "
        r"'V100-PCIE-32GB'\?\); choose one of T4, .*, or leave gpu empty and give tflops "
        r"and memory_gb in a devices",
    ):
        pl.load_devices(path, network)
    words = ["plan", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny", "--gpu"]
    with pytest.raises(SystemExit):
        main([*words, "A1000"])
    assert "--gpu: 'A1000' is no GPU in the table (did you mean 'A100'?); choose one of T4," in (
        said := capsys.readouterr().err
    )
    assert "and give tflops and memory_gb in a devices file; see planner plan --help\n" in said
