"""Make a checked plan from a ping table and a devices file.

The round trips are those of four US regions from DT-FM's Table 1. Bandwidths were not measured: 1
Gb/s is assumed, and the output says so.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import planner as pl
from planner.network.measured.reading import read_measured

folder = Path(tempfile.mkdtemp())
shipped = pl.load_network("aws4_dtfm_regional_2022")

# round-trip times in milliseconds, one row per ordered pair
with (folder / "ping.csv").open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["source", "destination", "rtt_ms"])
    for i, source in enumerate(shipped.ids):
        for j, destination in enumerate(shipped.ids):
            if i != j:
                rows.writerow([source, destination, 2000 * shipped.latency_s[i, j]])

# devices: region, number, GPU, and limits of its line
first, second, *others = shipped.ids
(folder / "devices.csv").write_text(
    "name,count,gpu,upload_mbps,download_mbps\n"
    f"{first},2,A100,2000,2000\n{second},2,A100,,\n"
    + "".join(f"{name},1,L4,,\n" for name in others)
)

measured = read_measured([folder / "ping.csv"], bandwidth_bytes_per_s=1e9 / 8)
for assumed in measured.assumed:
    print("assumed:", assumed)
inside = pl.Link(latency_s=0.0005, bandwidth_bytes_per_s=1.25e9)
cluster = pl.load_devices(folder / "devices.csv", measured.network, inside=inside)
print(cluster)

workload = pl.Workload.preset("gpt2-small", batch_samples=32, microbatch_samples=2)
result = pl.plan(cluster, workload, stop=pl.Effort(0.3))
print(result.plan)
for stage, group in enumerate(result.plan.assignment.groups):
    print(f"stage {stage}: {', '.join(cluster.network.ids[d] for d in group)}")

path = folder / "plan.json"
pl.save_plan(result.plan, path)
same = pl.load_plan(path)
print("violations of the plan as read back:", pl.check(same))
print("the same plan:", same == result.plan)
