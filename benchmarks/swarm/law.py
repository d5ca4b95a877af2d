"""SWARM's Table 1 against the square-cube law. Part of ``python -m benchmarks.swarm``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.swarm.square_cube import (
    BYTES_PER_S,
    FIGURE_3_S,
    PAPER,
    RTT_S,
    STAGES,
    TABLE_1,
    TEXT_LAYERS,
    Floats,
    Law,
    Layers,
    fit_law,
    with_latency,
)


def table_1() -> list[str]:
    """The section of the report."""
    law, ours = _law(TABLE_1)
    text = replace(TABLE_1[3], layers=TEXT_LAYERS)
    text_law, text_ours = _law((*TABLE_1[:3], text))
    known = np.array([with_latency(FIGURE_3_S, PAPER[0], rtt, STAGES) for rtt in RTT_S])
    lines = [
        "## Table 1: utilisation at 500 Mb/s",
        "",
        "Per cent; the paper's, the law's, and (in brackets) Figure 3's seconds with the same "
        "round trips. Both know the first row of Table 1 alone: the law has three constants fitted "
        f"to its four figures (attained {law.flops_per_s / 1e12:.1f} TFLOP/s, "
        f"{law.stage_s * 1e3:.1f} ms a stage beside them, {law.overlap:.0%} of the work hides "
        "messages), the other takes seconds of computing from Figure 3, which is the same "
        "measurement. Latency enters with two round trips a stage and twelve stages, which nothing "
        "was fitted to.",
        "",
        "| RTT | " + " | ".join(f"{k.name}: paper | ours" for k in TABLE_1) + " |",
        "|---|" + "---|---|" * len(TABLE_1),
    ]
    for row, rtt in enumerate(RTT_S):
        cells = [
            f"{100 * PAPER[row, k]:.3g} | {100 * ours[row, k]:.3g} ({100 * known[row, k]:.3g})"
            for k in range(len(TABLE_1))
        ]
        lines.append(f"| {f'{rtt * 1e3:.0f} ms' if rtt else 'none'} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| mean absolute error, percentage points | all twenty | the sixteen with latency |",
        "|---|---|---|",
        _errors("law, 12 layers a stage in “Ours” (Figure 3)", ours),
        _errors("law, 3 layers a stage in “Ours” (text, Appendix F)", text_ours),
        _errors("Figure 3's seconds, two round trips a stage", known),
        "",
        "Not stated in the paper: how activations are written on the wire in the first three "
        "(half precision here), and the layers of “Ours”: text and Appendix F say 3 on each of 4 "
        "servers, Figure 3 says 12 and has 7.06 s of computing, 12.4 times xxlarge's 0.57 s. With "
        f"12 the law attains {law.flops_per_s / 1e12:.1f} TFLOP/s, with 3 "
        f"{text_law.flops_per_s / 1e12:.1f}; Figure 3's seconds by themselves are 13 for xxlarge.",
        "",
    ]
    return lines


def _law(layers: tuple[Layers, ...]) -> tuple[Law, Floats]:
    law = fit_law(layers, PAPER[0], BYTES_PER_S)
    rows = [[law.utilisation(k, BYTES_PER_S, rtt) for k in layers] for rtt in RTT_S]
    return law, np.array(rows)


def _errors(name: str, found: Floats) -> str:
    off = 100 * np.abs(found - PAPER)
    return f"| {name} | {off.mean():.2f} | {off[1:].mean():.2f} |"
