"""A rank as of ``python -m planner.executor`` whose device has memory of its own, as a GPU has.

Each stage is on a machine of its own, so that with ``--direct`` stages average by collectives, and
tied parameters by way of the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.executor import __main__
from planner.executor.comm import device_collectives
from planner.executor.runtime import model_stage
from planner.training_plan.file import load_plan
from tests.executor.test_device_backend import late_backend


def main(words: Sequence[str]) -> int:
    """Run the rank."""
    stage_of = load_plan(words[0]).stage_of
    vars(device_collectives)["gpu_location"] = lambda _, rank, __: (str(stage_of[rank]), str(rank))
    vars(model_stage)["make_backend"] = lambda device: late_backend()
    return __main__.main(list(words))
