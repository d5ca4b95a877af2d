"""Find paths that skip stages (SkipPipe, Algorithm 1: continuous-time conflict-based search).

Twelve devices in four stages of three. Every microbatch visits three of the four stages and may
swap one pair of neighbouring stages. The example compares straight paths, the paper's search and
planner's own.
"""

from __future__ import annotations

import planner as pl

cluster = pl.Cluster(pl.load_network("gcp12_skippipe_2025_repaired"), pl.Devices.of_gpu("T4"))
workload = pl.Workload.preset("llama-500m", batch_samples=12)
groups = pl.AssignmentPlan.of_groups([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])
problem = pl.PathProblem.from_assignment(
    cluster, workload, groups, path_stages=3, microbatches_per_start=4, max_swaps=1
)
print(problem)

for method, stop in (("dtfm-skip", pl.Effort(1)), ("cbs", pl.Effort(1)), ("auto", pl.Effort(1))):
    result = pl.solve_paths(problem, stop, seed=0, method=method)
    print(f"{method:<10}", result)

names = cluster.network.ids
for b, path in enumerate(result.plan.paths[:4]):
    stages = "".join(str(problem.stage_of[d]) for d in path)
    print(f"microbatch {b}: stages {stages}, {' > '.join(names[d] for d in path)}")
print("violations:", pl.check(result.plan, problem))
