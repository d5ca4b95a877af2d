"""Run a plan with two local processes; compare predicted and measured step times.

A tiny GPT in two stages, planned for two regions of DT-FM's Table 1. `planner run` first measures
compute times. The processes communicate on this machine, not over the regions' links, and the
prediction accounts for that. `planner emulate` also emulates the links (Linux, root).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import planner as pl
from planner.workload.layers import Architecture, Family

network = pl.load_network("aws4_dtfm_regional_2022")
pair = network.subset(network.ids[:2])
model = Architecture(
    Family.GPT2,
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=4,
    ffn=256,
    vocabulary=256,
    sequence=32,
    tied=False,
)
workload = pl.Workload.transformer("small", model, batch_samples=8, precision="fp32")
plan = pl.plan(
    pl.Cluster(pair, pl.Devices.of_gpu("T4")), workload, stages=2, stop=pl.Effort(0.1)
).plan
print(plan)

path = Path(tempfile.mkdtemp()) / "plan.json"
pl.save_plan(plan, path)
command = [sys.executable, "-m", "planner.cli", "run", str(path), "--steps", "4", "--json"]
done = subprocess.run(command, capture_output=True, text=True, check=True)
run = json.loads(done.stdout)
for step in run["steps"]:
    print(
        f"step {step['step']}: loss {step['loss']:.4f}, predicted {step['predicted_s']:.3f} s, "
        f"measured {step['measured_s']:.3f} s"
    )
for device in run["devices"]:
    print(f"{device['device']}: {device['peak_bytes'] / 1e6:.2f} MB, sent {device['sent_bytes']}")
