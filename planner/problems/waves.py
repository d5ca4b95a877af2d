"""Number of waves of a batch: skipped stages free memory for more microbatches (SkipPipe, 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from planner.problems.error import ProblemError
from planner.problems.paths import PathProblem
from planner.problems.quantities import instance_of


@dataclass(frozen=True)
class Waves:
    """The waves of one batch.

    Attributes
    ----------
    path_stages
        k, stages on every path.
    per_start
        Most microbatches from every start device in one wave.
    count
        Waves until every start device has sent its part of the batch.
    visits_per_device
        Microbatches of the batch through a device, on average over all devices.
    """

    path_stages: int
    per_start: int
    count: int
    visits_per_device: float


def count_waves(problem: PathProblem, path_stages: int | None = None) -> Waves:
    """Fewest waves in which paths of ``path_stages`` stages complete the problem's batch.

    A wave is a set of paths, equally many from every start device, that are all live at once: at
    most ``memory`` of them through a device (TC1), stages after the first visited evenly (CC3).
    Of n microbatches each of those S - 1 stages sees n (k - 1) / (S - 1), rounded down or up, so
    the largest wave grows as k shrinks, until the start devices are full.
    """
    instance_of(PathProblem, problem)
    k = problem.path_stages if path_stages is None else path_stages
    variant = problem.replace(path_stages=k)
    per_wave = problem.microbatches_per_start
    # smaller waves also fit, so the last wave may be smaller
    max_size = min(int(problem.memory[d]) for d in problem.stage_devices[0])
    for size in range(min(max_size, per_wave), 0, -1):
        if _fits_in_memory(variant, size):
            visits = len(problem.starts) * k / len(problem)
            return Waves(k, size, -(-per_wave // size), visits)
    raise ProblemError(
        f"memory does not hold one microbatch from every start device on paths of {k} stages; give "
        "stages more devices, or devices more memory"
    )


def _fits_in_memory(problem: PathProblem, size: int) -> bool:
    """Whether a wave of ``size`` microbatches per start device fits into memory (TC1, CC3)."""
    wave = problem.replace(microbatches_per_start=size)
    min_visits, max_visits = wave.visits
    capacity = [int(problem.memory[list(group)].sum()) for group in problem.stage_devices[1:]]
    visits = len(wave.starts) * (problem.path_stages - 1)
    return (
        all(r >= min_visits for r in capacity)
        and sum(min(r, max_visits) for r in capacity) >= visits
    )
