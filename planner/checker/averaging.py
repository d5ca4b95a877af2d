"""Independent check of an averaging plan against the definitions (DeDLOC, eq. 1 and 6).

Works from the printed formulas, and shares no code with the solvers.
"""

from __future__ import annotations

import math

import numpy as np

from planner.checker.violation import Violation
from planner.problems import AveragingProblem
from planner.problems.answers import AveragingPlan

TOLERANCE = 1e-9
"""Relative excess over a limit that counts as rounding."""


def check_averaging(plan: AveragingPlan, problem: AveragingProblem) -> list[Violation]:
    """Report every violation; empty if the plan is valid and attains its stated rate.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 1 and
    6.
    """
    n = len(problem.samples_per_s)
    shapes = {
        "computes": (plan.computes, (n,)),
        "rates": (plan.rates, (n,)),
        "samples_per_step": (plan.samples_per_step, (n,)),
        "shares": (plan.shares, (n,)),
        "a": (plan.a, (n, n)),
        "g": (plan.g, (n, n)),
    }
    wrong = [
        Violation("shape", field, f"expected {shape} for {n} peers, found {np.shape(array)}")
        for field, (array, shape) in shapes.items()
        if np.shape(array) != shape
    ]
    if wrong:
        return wrong
    for field in ("rates", "samples_per_step", "shares", "a", "g"):
        values = np.asarray(getattr(plan, field), dtype=float)
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            wrong.append(
                Violation("range", field, f"expected numbers >= 0, found {values[bad].flat[0]}")
            )
    if wrong:
        return wrong
    return [
        *_roles(plan, problem, n),
        *_flows(plan, n),
        *_limits(plan, problem, n),
        *_totals(plan, problem, n),
    ]


def _roles(plan: AveragingPlan, problem: AveragingProblem, n: int) -> list[Violation]:
    """Check c_i = 0 and r_i = 0 for peers that cannot compute or aggregate."""
    wrong = []
    for i in range(n):
        if plan.computes[i] and not (problem.can_compute[i] and problem.samples_per_s[i] > 0):
            wrong.append(Violation("c_i", f"peer {i}", "contributes, but it cannot compute"))
        if plan.rates[i] > 0 and not problem.can_aggregate[i]:
            message = f"reduces at {plan.rates[i]:g} B/s, but it cannot aggregate"
            wrong.append(Violation("client mode", f"peer {i}", message))
    return wrong


def _flows(plan: AveragingPlan, n: int) -> list[Violation]:
    """Check a_ki = c_k r_i, g_ij = r_i, and eq. 6: shares in proportion to the rates."""
    wrong = []
    rates = np.array(plan.rates, dtype=float)
    total = math.fsum(rates)
    tolerance = TOLERANCE * max(total, 1e-300)
    a, g, shares = np.array(plan.a), np.array(plan.g), np.array(plan.shares)
    for i in range(n):
        sent = np.where(plan.computes, rates[i], 0.0)
        for k in np.flatnonzero(np.abs(a[:, i] - sent) > tolerance):
            message = f"a[{k}, {i}] is {a[k, i]:g}, expected c_k r_i = {sent[k]:g}"
            wrong.append(Violation("a = c r", f"peer {k} to {i}", message))
        for j in np.flatnonzero(np.abs(g[i] - rates[i]) > tolerance):
            message = f"g[{i}, {j}] is {g[i, j]:g}, expected r_i = {rates[i]:g}"
            wrong.append(Violation("g = r", f"peer {i} to {j}", message))
        share = rates[i] / total if total > 0 else 0.0
        if abs(shares[i] - share) > TOLERANCE:
            message = f"share {shares[i]:g}, expected r_i / R = {share:g}"
            wrong.append(Violation("eq. 6", f"peer {i}", message))
    return wrong


def _limits(plan: AveragingPlan, problem: AveragingProblem, n: int) -> list[Violation]:
    """Check the limits of eq. 1; a peer's traffic with itself is free."""
    wrong = []
    a, g = np.array(plan.a, dtype=float), np.array(plan.g, dtype=float)
    links = problem.link_bytes_per_s
    used = a + g
    np.fill_diagonal(used, 0.0)
    for i in range(n):
        for name, total, limit in (
            ("upload u_i", math.fsum(used[i]), float(problem.upload_bytes_per_s[i])),
            ("download d_i", math.fsum(used[:, i]), float(problem.download_bytes_per_s[i])),
        ):
            if total > limit * (1 + TOLERANCE):
                message = f"uses {total:g} B/s of {limit:g}"
                wrong.append(Violation(name, f"peer {i}", message))
    if links is not None:
        for i, j in np.argwhere(used > np.array(links) * (1 + TOLERANCE)):
            message = f"uses {used[i, j]:g} B/s of {links[i, j]:g}"
            wrong.append(Violation("link t_ij", f"peer {i} to {j}", message))
    return wrong


def _totals(plan: AveragingPlan, problem: AveragingProblem, n: int) -> list[Violation]:
    """Check the objective of eq. 1 and the samples that each peer is expected to compute."""
    wrong = []
    speed = math.fsum(float(problem.samples_per_s[i]) for i in range(n) if plan.computes[i])
    rate = math.inf if n == 1 else math.fsum(float(r) for r in plan.rates)
    compute = speed / problem.batch_size
    average = rate / problem.gradient_bytes
    if min(compute, average) <= 0:
        steps = 0.0
    elif problem.overlap:
        steps = min(compute, average)
    else:
        steps = 1 / (1 / compute + 1 / average)
    if not abs(plan.steps_per_s - steps) <= TOLERANCE * steps:
        message = f"says {plan.steps_per_s:.12g} per second, attains {steps:.12g}"
        wrong.append(Violation("steps_per_s", "plan", message))
    for i in range(n):
        mine = float(problem.samples_per_s[i]) if plan.computes[i] else 0.0
        expected = problem.batch_size * mine / speed if speed > 0 else 0.0
        if abs(float(plan.samples_per_step[i]) - expected) > TOLERANCE * problem.batch_size:
            message = (
                f"gives {plan.samples_per_step[i]:g} samples, expected B s_i / S = {expected:g}"
            )
            wrong.append(Violation("samples_per_step", f"peer {i}", message))
    return wrong
