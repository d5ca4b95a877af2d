"""A probe over emulated links finds what was imposed (root only)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.probe_accuracy import compared, probed
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from tests.emulate.test_network import needs_root


@needs_root
@pytest.mark.slow
def test_what_is_imposed_is_found() -> None:
    """Both directions of pairs, and lines that pairs share; a loaded machine may be slower."""
    latency = np.array([[0, 0.02, 0.03], [0.02, 0, 0.04], [0.03, 0.04, 0]])
    rate = np.array([[1, 2e6, 3e6], [1e6, 1, 2e6], [3e6, 4e6, 1]])
    cluster = Cluster(
        Network(latency, rate),
        Devices(1.0, 1.0, upload_bytes_per_s=4e6, download_bytes_per_s=5e6),
    )
    log = probed(cluster, ["--seconds", "1", "--warm", "1", "--messages", "0.5"])
    for off in compared("imposed", cluster, log):
        low, high = (-0.01, 1.0) if off.what == "latency" else (-0.3, 0.05)
        assert (low < off.values).all() and (off.values < high).all(), off
