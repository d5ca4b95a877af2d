"""Layouts of consecutive ranks by region, with improved layers: initial layouts of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.planning.baselines.rank_order import rank_layouts, region_order
from planner.planning.joint.layout import Layout
from planner.planning.joint.layout_search import LayoutSearch, ScoredLayout
from planner.planning.problem import PlanningProblem

MAX_IMPROVED = 6
"""Layouts of consecutive ranks whose layers are improved."""

StageLayers = Sequence[tuple[int, int]]


def promising_rank_layouts(
    problem: PlanningProblem, layouts: LayoutSearch, ratio: float
) -> list[Layout]:
    """The best layouts of consecutive ranks by estimate; none if nothing fits.

    The best with an equal number of layers per stage is always included; one with improved layers,
    and one on a single region or device, if their estimates are within ``ratio`` of the best.
    """
    layers_by_stages = {
        stages: layouts.problem.constraints.layers or problem.workload.even_split(stages)
        for stages in layouts.stage_counts
    }
    order = region_order(problem.cluster.network)
    even = _best_of_ranks(layouts, order, layers_by_stages)
    improved = _improved(layouts, even)
    least = min((scored.value for scored in layouts.ranked()), default=math.inf)
    improved = [scored for scored in improved[:1] if scored.value <= ratio * least]
    least = min([least, *(scored.value for scored in (*improved, *even[:1]))])
    single = _on_one_region(problem, layouts, order, layers_by_stages, least, ratio)
    return list(dict.fromkeys(scored.layout for scored in (*single, *improved, *even[:1])))


def _best_of_ranks(
    layouts: LayoutSearch, ranks: Sequence[int], layers_by_stages: Mapping[int, StageLayers]
) -> list[ScoredLayout]:
    """The best layouts of ranks in this order, by estimate."""
    best: dict[Layout, ScoredLayout] = {}
    for head in layouts.problem.constraints.heads:
        every = [
            layouts.scored(layout if len(layout.layers) == 1 else replace(layout, head=head))
            for layout in rank_layouts(ranks, layouts.problem.classes, layers_by_stages)
        ]
        feasible = [scored for scored in every if scored.value < math.inf]
        # as many with each head: estimates of even layers say little about the heads
        feasible = sorted(feasible, key=lambda scored: scored.value)[:MAX_IMPROVED]
        best |= {scored.layout: scored for scored in feasible}
    return sorted(best.values(), key=lambda scored: scored.value)


def _on_one_region(
    problem: PlanningProblem,
    layouts: LayoutSearch,
    order: Sequence[int],
    layers_by_stages: Mapping[int, StageLayers],
    least: float,
    ratio: float,
) -> list[ScoredLayout]:
    """The best layout on one region or device, if its estimate is below ``least``."""
    region_of = problem.cluster.network.regions
    regions = dict.fromkeys(region_of) if len(set(region_of)) > 1 else {}
    subsets = [[d for d in order if region_of[d] == region] for region in regions]
    subsets += [[members[0]] for members in layouts.problem.classes.members]
    best = [
        scored
        for ranks in subsets
        for scored in _best_of_ranks(layouts, ranks, layers_by_stages)[:1]
        if scored.value <= ratio * least
    ]
    return [scored for scored in _improved(layouts, best)[:1] if scored.value < least]


def _improved(layouts: LayoutSearch, initial_layouts: Sequence[ScoredLayout]) -> list[ScoredLayout]:
    """The layouts with better layers, best first."""
    better = [layouts.with_better_layers(initial.layout) for initial in initial_layouts]
    return sorted(better, key=lambda layout: layout.value)
