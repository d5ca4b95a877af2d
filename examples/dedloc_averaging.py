"""Decide who averages which share of the gradients (DeDLOC, eq. 1 to 6).

Twelve peers in the Google Cloud regions of SkipPipe's network, with uploads of 50 Mb/s to 1 Gb/s
and downloads of 1 Gb/s. Two of them have no GPU. The example compares exact shares with the paper's
rule, its linear program and equal shares.
"""

from __future__ import annotations

import numpy as np

import planner as pl
from planner.lp.paper_model import build_paper_model

network = pl.load_network("gcp12_skippipe_2025_repaired")
n = len(network)
rng = np.random.default_rng(0)
samples_per_s = np.linspace(4.0, 1.0, n)
samples_per_s[-2:] = 0.0
problem = pl.AveragingProblem(
    samples_per_s,
    upload_bytes_per_s=rng.choice([50e6, 200e6, 1e9], n) / 8,
    download_bytes_per_s=1e9 / 8,
    batch_size=256,
    gradient_bytes=70.7e6,  # ALBERT-large, the model of the paper's section 4.2
    link_bytes_per_s=network.bandwidth_bytes_per_s,
)
print(problem)

exact = pl.solve_averaging(problem)
print("exact:             ", exact)
shares, gives = exact.plan.shares, exact.plan.computes
for peer in exact.plan.reducers:
    print(f"  {network.ids[peer]} sums {shares[peer]:.1%} of the vector")
print(f"  contributors: {', '.join(network.ids[k] for k in np.flatnonzero(gives))}")
print("violations:", pl.check(exact.plan, problem))

relaxed = pl.solve_averaging(problem, method="relaxed")
print("the paper's rule:  ", relaxed)

# LP (5) as printed in the paper, with n^3 rows: an upper bound on the rate of any averaging
paper_model = build_paper_model(problem)
print(f"LP (5) as printed:  at most {paper_model.solve('cbc').xi:.6g} steps/s (CBC)")

# all-reduce: every peer contributes and sums an equal share, as fast as the limits allow
everybody, ones = problem.contributors, np.ones(n)
rate = min(
    (problem.upload_bytes_per_s / problem.upload_of(ones, everybody)).min(),
    (problem.download_bytes_per_s / problem.download_of(ones, everybody)).min(),
    (problem.link_bytes_per_s / problem.link_of(ones, everybody)).min(),
)
equal = problem.steps_per_s(rate * ones, everybody)
faster = exact.objective / equal
print(f"equal shares:       {equal:.6g} steps/s; exact shares are {faster:.2f} times as fast")
