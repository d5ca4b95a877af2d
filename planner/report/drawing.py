"""Placement as SVG: regions laid out by latency, devices coloured by stage."""

from __future__ import annotations

import math
from html import escape

import numpy as np
from numpy.typing import NDArray

from planner.simulator.timeline import LinkLoad, Timeline
from planner.training_plan.model import TrainingPlan

Floats = NDArray[np.float64]
WIDTH, HEIGHT, LINKS, LABELS = 900.0, 520.0, 12, 30
GOLDEN = math.pi * (3 - math.sqrt(5))
DOT = 6.0
SCALE = ((72, 36, 117), (65, 94, 155), (42, 145, 150), (84, 190, 110), (235, 210, 70))
"""RGB colours of the stages, from dark to light as in viridis."""


def stage_colour(stage: int, stages: int) -> str:
    """Return a stage's colour on a sequential scale."""
    place = stage / max(stages - 1, 1) * (len(SCALE) - 1)
    k = min(int(place), len(SCALE) - 2)
    mixed = (round(a + (b - a) * (place - k)) for a, b in zip(SCALE[k], SCALE[k + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def by_latency(latency_s: Floats) -> Floats:
    """Lay out points in the plane by classical multidimensional scaling.

    B = -1/2 J D^2 J with J = I - 1/n; the axes are the eigenvectors of the two largest eigenvalues.

    Parameters
    ----------
    latency_s
        ``float[n, n]``, seconds; the diagonal is ignored, and NaN counts as the longest latency.

    Returns
    -------
    ndarray
        ``float[n, 2]``, coordinates in seconds.
    """
    n = len(latency_s)
    d = (latency_s + latency_s.T) / 2
    np.fill_diagonal(d, 0.0)
    d = np.where(np.isfinite(d), d, np.nanmax(d, initial=0.0))
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centre @ d**2 @ centre)
    top = np.argsort(values)[::-1][:2]
    places = np.zeros((n, 2))
    places[:, : len(top)] = vectors[:, top] * np.sqrt(np.maximum(values[top], 0))
    return places


def placement_svg(plan: TrainingPlan, timeline: Timeline) -> str:
    """Draw regions, devices and the links that are busy longest."""
    network, stage_of = plan.cluster.network, plan.stage_of
    names = list(dict.fromkeys(network.regions))
    members = [[d for d, r in enumerate(network.regions) if r == name] for name in names]
    latency = network.latency_s
    between = np.array([[np.nanmean(latency[np.ix_(a, b)]) for b in members] for a in members])
    radii = np.array([DOT * 1.9 * math.sqrt(len(m)) + 6 for m in members])
    places = _separate(_scale_to_picture(by_latency(between)), radii)
    dots = {
        d: places[r]
        + DOT * 1.9 * math.sqrt(k) * np.array([math.cos(k * GOLDEN), math.sin(k * GOLDEN)])
        for r, m in enumerate(members)
        for k, d in enumerate(sorted(m, key=lambda d: (stage_of.get(d, -1), d)))
    }
    low = (places - radii[:, None]).min(axis=0) - (60, 24)
    high = (places + radii[:, None]).max(axis=0)
    size = high - low + (60, 24)
    elements = [
        f'<svg viewBox="{low[0]:.0f} {low[1]:.0f} {size[0]:.0f} {size[1]:.0f}" role="img" '
        'aria-label="placement on the network">'
    ]
    for r, name in enumerate(names):
        x, y = places[r]
        elements.append(
            f'<circle class="region" cx="{x:.1f}" cy="{y:.1f}" r="{radii[r]:.1f}"><title>'
            f"{escape(name)}: {len(members[r])} devices</title></circle>"
        )
        if len(names) <= LABELS:
            elements.append(
                f'<text x="{x:.1f}" y="{y - radii[r] - 5:.1f}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
    pairs, lines = _fullest(timeline)
    for load in pairs:
        (x, y), (u, v) = (dots[d] for d in load.ends)
        full = load.busy_s / plan.predicted.step_s
        elements.append(
            f'<line class="link" x1="{x:.1f}" y1="{y:.1f}" x2="{u:.1f}" y2="{v:.1f}" '
            f'stroke-width="{1 + 5 * min(full, 1):.1f}"><title>{escape(load.name)}: '
            f"{load.busy_s:.3g} s of messages, {full:.0%} of a step</title></line>"
        )
    for d, load in lines.items():
        x, y = dots[d]
        elements.append(
            f'<circle class="link" fill="none" cx="{x:.1f}" cy="{y:.1f}" r="{DOT + 3}" '
            f'stroke-width="3"><title>{escape(load.name)}: {load.busy_s:.3g} s of '
            f"messages, {load.busy_s / plan.predicted.step_s:.0%} of a step</title></circle>"
        )
    for d, (x, y) in dots.items():
        has_stage = d in stage_of
        colour = stage_colour(stage_of[d], len(plan.stage_layers)) if has_stage else "#888"
        role = f"stage {stage_of[d]}" if has_stage else "averages only"
        elements.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{DOT}" fill="{colour}"><title>'
            f"{escape(network.ids[d])}: {role}</title></circle>"
        )
    return "".join([*elements, "</svg>"])


def _fullest(timeline: Timeline) -> tuple[list[LinkLoad], dict[int, LinkLoad]]:
    """Return the busiest pairs, and the busiest uplink or downlink of each device."""
    pairs = [load for load in timeline.loads if len(load.ends) == 2][:LINKS]
    lines: dict[int, LinkLoad] = {}
    for load in timeline.loads:  # the fullest first
        if len(load.ends) == 1 and len(lines) < LINKS:
            lines.setdefault(load.ends[0], load)
    return pairs, lines


def _scale_to_picture(places: Floats) -> Floats:
    """Scale coordinates to the picture, with the same factor for both axes."""
    low, high = places.min(axis=0), places.max(axis=0)
    span = np.maximum(high - low, 1e-12)
    scale = min(WIDTH / span[0], HEIGHT / span[1]) if (high > low).any() else 1.0
    return np.asarray((places - low) * scale)


def _separate(places: Floats, radii: Floats) -> Floats:
    """Move circles apart until none overlap, in at most 200 rounds."""
    places = places.copy()
    for _ in range(200):
        moved = False
        for i in range(len(places)):
            for j in range(i):
                offset = places[i] - places[j]
                distance = float(np.hypot(*offset))
                overlap = radii[i] + radii[j] + 18 - distance
                if overlap > 0.5:
                    angle = i * GOLDEN
                    unit = (
                        offset / distance
                        if distance > 1e-9
                        else np.array([math.cos(angle), math.sin(angle)])
                    )
                    places[i] += unit * overlap / 2
                    places[j] -= unit * overlap / 2
                    moved = True
        if not moved:
            break
    return places
