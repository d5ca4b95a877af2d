"""The square-cube law of distributed training (SWARM, 3.1, 4.1, F): compute against network.

A Transformer layer of width d multiplies by 12 d^2 parameters and passes on d values per token.
With larger layers compute grows with the square of d, and messages with d (for n x n matrices of
data, with the cube and the square). A synchronous trainer, as in 4.1, calls one stage after the
other, and a device is busy for the fraction

    u = c / (c + w + 2 * rtt)

of the time: c seconds of compute per stage, w of waiting for bytes, and one request and answer for
each forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TOKENS = 512
PARAMETERS = 12
"""Of a layer over d^2: 4 of attention, 8 of a feed-forward part four times as wide."""
FLOPS = 6
"""Of a parameter and a token, forward and backward."""
MESSAGES = 2
"""Activations forth and gradients back, a stage."""
ROUND_TRIPS = 2
"""A stage: F and B are a request and an answer each."""


@dataclass(frozen=True)
class Layers:
    """What a stage has.

    Attributes
    ----------
    value_bytes
        Of an activation or gradient on the wire.
    """

    name: str
    units: int
    layers: int = 1
    value_bytes: float = 2.0

    @property
    def parameters(self) -> float:
        """Of a layer."""
        return float(PARAMETERS * self.units**2)

    @property
    def flops(self) -> float:
        """Of a stage, forward and backward pass of one sequence."""
        return FLOPS * self.parameters * TOKENS * self.layers

    @property
    def message_bytes(self) -> float:
        """Of a stage, both ways together."""
        return MESSAGES * self.value_bytes * TOKENS * self.units


TABLE_1 = (
    Layers("base", 768),
    Layers("xxlarge", 4096),
    Layers("GPT-3", 12288),
    Layers("Ours", 4096, layers=12, value_bytes=1.0),
)
"""4.1's configurations. Half precision on the wire is not stated. Of "Ours", the text has 3 layers
a stage and Figure 3 has 12; its seconds, and how fast it falls with latency, fit 12 alone."""
TEXT_LAYERS = 3
RTT_S = (0.0, 0.01, 0.05, 0.1, 0.2)
PAPER = np.array(
    [
        [0.180, 0.321, 0.821, 0.895],
        [0.118, 0.289, 0.793, 0.872],
        [0.0488, 0.201, 0.703, 0.795],
        [0.0278, 0.149, 0.602, 0.715],
        [0.0153, 0.101, 0.485, 0.592],
    ]
)
"""``[RTT_S, TABLE_1]``: the paper's Table 1."""
FIGURE_3_S = np.array([0.066, 0.568, 5.317, 7.059])
"""Seconds of computing a batch without latency, all stages together."""
STAGES = 12
BYTES_PER_S = 500e6 / 8


@dataclass(frozen=True)
class Law:
    """Constants of a device and of how much it overlaps.

    Attributes
    ----------
    stage_s
        Seconds a stage whatever its size.
    overlap
        The part of the work that hides messages.
    """

    flops_per_s: float
    stage_s: float
    overlap: float

    def compute_s(self, layers: Layers) -> float:
        """c: seconds of a stage's work."""
        return self.stage_s + layers.flops / self.flops_per_s

    def wait_s(self, layers: Layers, bytes_per_s: float) -> float:
        """w: seconds in which bytes are waited for."""
        sent_s = layers.message_bytes / bytes_per_s
        return max(0.0, sent_s - self.overlap * self.compute_s(layers))

    def utilisation(self, layers: Layers, bytes_per_s: float, rtt_s: float = 0.0) -> float:
        """u."""
        work_s = self.compute_s(layers)
        return work_s / (work_s + self.wait_s(layers, bytes_per_s) + ROUND_TRIPS * rtt_s)


def fit_law(layers: Sequence[Layers], utilisation: Floats, bytes_per_s: float) -> Law:
    """The constants nearest to measured utilisations without latency, in least squares."""
    from scipy.optimize import least_squares

    def law(x: Floats) -> Law:
        return Law(float(np.exp(x[0])), float(np.exp(x[1])), float(x[2]))

    def off(x: Floats) -> Floats:
        return np.array([law(x).utilisation(k, bytes_per_s) for k in layers]) - utilisation

    begin = np.array([np.log(1e13), np.log(3e-3), 0.3])
    return law(least_squares(off, begin).x)


def with_latency(compute_s: Floats, utilisation: Floats, rtt_s: float, stages: int) -> Floats:
    """Utilisation with latency, of a batch whose seconds and utilisation without it are known."""
    return compute_s / (compute_s / utilisation + ROUND_TRIPS * stages * rtt_s)
