"""Averaging problems: DeDLOC's set-ups, and a random generator."""

from __future__ import annotations

import numpy as np

from planner.problems import AveragingProblem

GBIT = 125e6
"""Bytes per second of 1 Gb/s."""

RESNET50_BYTES = 25_557_032 * 4.0

ALBERT_LARGE_BYTES = 17_683_968 * 4.0

ALBERT_BATCH = 4096.0

UPLOADS_GBIT = (0.05, 0.1, 0.2, 1.0, 2.5)

RATIOS = (0.3, 0.8, 1.0, 2.0)


def instance(
    peers: int, seed: int, ratio: float = 0.8, links: bool = True, link_factor: float = 1.0
) -> AveragingProblem:
    """One instance of the stated generator.

    Samples per second are uniform in [0, 2), and peers // 5 random peers have 0; uploads are drawn
    from `UPLOADS_GBIT` with a factor uniform in [0.9, 1.1); downloads are the upload times a factor
    uniform in [1, 4); links are uniform in [0.05, 2) Gb/s. The vector has 100 MB. The random
    generator is NumPy's ``default_rng([peers, seed])``, drawn from in this order.
    """
    rng = np.random.default_rng([peers, seed])
    samples = rng.uniform(0, 2, peers)
    samples[rng.permutation(peers)[: peers // 5]] = 0.0
    upload = rng.choice(UPLOADS_GBIT, peers) * rng.uniform(0.9, 1.1, peers) * GBIT
    download = upload * rng.uniform(1, 4, peers)
    pairs = rng.uniform(0.05, 2, (peers, peers)) * GBIT * link_factor
    gradient = 100e6
    batch = ratio * samples.sum() * gradient / download.min()
    return AveragingProblem(samples, upload, download, batch, gradient, pairs if links else None)


def table_1_setups() -> dict[str, AveragingProblem]:
    """Return set-ups A to D of section 4.1; all GPUs contribute, and D's server has no GPU."""
    bandwidths = {
        "A: 8x1Gb/s": [1.0] * 8,
        "B: 16x0.2Gb/s": [0.2] * 16,
        "C: A + B": [1.0] * 8 + [0.2] * 16,
        "D: B + 1x2.5Gb/s": [0.2] * 16 + [2.5],
    }
    return {
        name: AveragingProblem(
            [0.0 if speed == 2.5 else 1.0 for speed in speeds],
            np.array(speeds) * GBIT,
            np.array(speeds) * GBIT,
            batch_size=32_768,
            gradient_bytes=RESNET50_BYTES,
        )
        for name, speeds in bandwidths.items()
    }
