"""How devices are placed, by name."""

from __future__ import annotations

import enum


class AssignmentMethod(enum.StrEnum):
    """Ways to solve an assignment problem.

    ``auto`` is ``classes`` where devices repeat, then ``search`` and bounds; ``search`` simulated
    annealing (parallel tempering), ``classes`` a model of equal devices by CP-SAT. ``genetic`` is
    DT-FM's evolution with its local search, ``kl`` the same with Kernighan and Lin's, ``random``
    without one; ``region-greedy`` assigns whole regions greedily.
    """

    AUTO = "auto"
    SEARCH = "search"
    CLASSES = "classes"
    GENETIC = "genetic"
    KERNIGHAN_LIN = "kl"
    RANDOM = "random"
    REGION_GREEDY = "region-greedy"
