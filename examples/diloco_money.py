"""Average every H steps, and compute time and cost of a step (DiLoCo-SWARM).

Eight A100s, one in each region of DT-FM's Table 2. The larger H is, the more devices the fastest
plan can use, but the fastest plan is not always the cheapest. The Pareto front has the plans in
between.
"""

from __future__ import annotations

import planner as pl

cluster = pl.Cluster(pl.load_network("aws8_dtfm_worldwide_2022"), pl.Devices.of_gpu("A100"))
workload = pl.Workload.preset("gpt3-1.3b", batch_samples=64)

for every in (1, 10, 50):
    plan = pl.plan(cluster, workload, sync_every=every, stop=pl.Effort(0.2)).plan
    cost = plan.cost
    print(
        f"H = {every:<3} step {plan.predicted.step_s:7.3f} s, {cost.step_usd:.4f} $: "
        f"{len(plan.cluster)} devices "
        f"{cost.devices_usd:.4f} $, {cost.paid_bytes / 1e9:.3f} GB between regions "
        f"{cost.messages_usd:.4f} $"
    )

front = pl.pareto(cluster, workload, worth=(float("inf"), 0.1, 0.0), stop=pl.Effort(0.3))
print(front)
for point in front.points:
    print(f"  {point}, {len(point.plan.cluster)} devices")
