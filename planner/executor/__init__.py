"""Runs a plan: stages placed as planned, operations in the planned order.

Needs numpy and torch only. ``python -m planner.executor plan.json --devices ...`` starts
one rank under torchrun; ``planner run`` starts it for all devices on one machine.
"""

import importlib.util
import os
import sys

# the line with the reason replaces the store's own log
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

# Python runs this file before the module of -m, whose imports would fail with a traceback
if sys.argv[0] == "-m" and importlib.util.find_spec("torch") is None:
    sys.stderr.write("planner.executor: needs torch, which is not installed; pip install torch\n")
    sys.exit(2)
