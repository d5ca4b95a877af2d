"""Runs a plan with torch.distributed: stages placed as planned, operations in the planned order.

Needs numpy and torch only. ``python -m planner.executor plan.json --devices ...`` is one node's
process group under torchrun; ``planner run`` starts it for all devices on one machine.
"""

import os

# what the store's own log says of a run that ends, its one line says too
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
