"""Joint search over devices, stages, layers, groups, paths and averaging.

A search round anneals layouts on an estimate of their step time, builds candidate plans with paths
from the best layouts, simulates one step of each, then two consecutive steps of the best, and
evaluates the best of these in full. Moves of good layouts follow in the same way. Search rounds
start from other layouts and repeat until the limit; the first one already yields a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.planning.cost import PlanObjective
from planner.planning.joint.alternatives import alternatives
from planner.planning.joint.candidate_pool import PROMISING_RATIO, CandidatePool
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.flow_plan import CandidatePlan
from planner.planning.joint.layout import Layout
from planner.planning.joint.layout_flow import pipeline_s
from planner.planning.joint.layout_kernel import IN_FLIGHT
from planner.planning.joint.layout_search import Constraints, InitialLayout, LayoutSearch
from planner.planning.joint.nothing_fits import nothing_fits
from planner.planning.joint.promising_ranks import promising_rank_layouts
from planner.planning.problem import PlanningProblem
from planner.planning.request import ShareRule
from planner.planning.shape import layers_of, microbatches_of
from planner.planning.step_bound import StepBound
from planner.problems import ProblemError
from planner.search.result import Result, objective_or_inf
from planner.search.stop import (
    EFFORT_LIMIT,
    INTERRUPTED,
    ITERATION_LIMIT,
    TIME_LIMIT,
    MaxIterations,
    StoppingCriterion,
    started,
)
from planner.training_plan.alternative import Alternative
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan

SEARCH_ROUND_TRIALS = 600_000.0
"""Maximum trials of the layout search in a search round."""
LATE_TRIALS = 200_000.0
"""Trials of the layout search after a time limit that passed before any layout fitted."""
LAYOUT_SEARCH_SHARE = 0.3
"""Maximum share of the limit that the layout search of a search round uses."""
MAX_CANDIDATES = 6
"""Candidates built in a search round from new layouts, besides those from baselines and ranks."""
MAX_CHAINED = 8
"""Candidates that are simulated with a second step, after each batch of new candidates."""
MAX_EVALUATED = 2
"""Candidates that are evaluated in full, after each batch of new candidates."""
IDLE_SEARCH_ROUNDS = 3
"""Consecutive search rounds without a new layout that end the search."""

IMPROVEMENT_STEPS = 6
"""Improvement steps in a search round; each builds moves of one parent."""
MOVES_ESTIMATED = 600
"""Moves of a parent's layout that are estimated in an improvement step."""
MOVES_BUILT = 12
"""Moves of a parent's layout that are built in an improvement step."""
CHANGE_TOLERANCE = 1.04
"""Maximum ratio of a move's estimate to its parent's."""
TOLERANCE_PER_VISIT = 0.01
"""Growth of that ratio with every visit of the parent."""
VISIT_PENALTY = 0.002
"""Relative penalty of a parent per visit, when the next parent is chosen."""
EXHAUSTED_VISITS = 3
"""Extra visits charged to a parent whose moves gave no new candidate."""
SLOWDOWN_TRIALS = 4
"""Random slowdowns of classes that are tried on a parent in an improvement step."""
PERTURBATION_SIGMA = 0.04
"""Standard deviation of the logarithm of a random slowdown."""

IN_FLIGHT_FACTORS = (2.0, 3.0)
"""Limits on microbatches in flight that variants of the best plan get, as multiples of what
Little's law requires."""
MIN_IN_FLIGHT = 1.0
"""Delay over period that keeps every stage busy without queueing (Little's law)."""
LARGER_MICROBATCHES_SHARE = 0.5
"""Share of the limit for a second search, with the larger microbatches of a baseline."""


def search_jointly(
    problem: PlanningProblem,
    stop: StoppingCriterion,
    bound: StepBound | None = None,
    baselines: Sequence[TrainingPlan] = (),
) -> Result[TrainingPlan]:
    """The best plan found; every decision that the request leaves open is searched."""
    search = _Search(problem, stop, bound, baselines)
    result = search.result()
    if result.plan is None or search.run.reason not in (None, EFFORT_LIMIT, ITERATION_LIMIT):
        return result
    samples = result.plan.workload.microbatch_samples
    if samples == problem.workload.microbatch_samples:
        return result
    # a baseline with larger microbatches is the best plan: search layouts with these, too
    workload = problem.workload.replace(microbatch_samples=samples)
    larger = replace(problem, workload=workload)
    portion = stop.portion(LARGER_MICROBATCHES_SHARE)
    with search.run.interruptible():
        larger_result = _Search(larger, portion, bound, baselines).result()
        return min(result, larger_result, key=objective_or_inf)
    # interrupted before the second search had a result
    return replace(result, stop_reason=search.run.reason or INTERRUPTED)


def _constraints(problem: PlanningProblem, devices: int) -> Constraints:
    """Constraints on layouts that follow from the request."""
    request, stages = problem.request, problem.request.fixed_stages
    max_stages = min(devices, len(problem.workload.layers))
    if stages is not None and not 1 <= stages <= max_stages:
        raise ProblemError(
            f"stages must be 1 to {max_stages}, the devices that can compute or the layers, found "
            f"{stages}; ask for another number"
        )
    microbatches_of(problem.workload, 1)
    if stages is not None:
        request.recomputing(stages)
    layers = None if request.stage_layers is None else layers_of(problem, stages or 0)
    return Constraints(
        stages=stages,
        layers=layers,
        recompute=request.recompute,
        in_flight=request.in_flight,
        equal=request.shares == ShareRule.EQUAL,
        every_steps=request.sync_every,
        delayed=request.delayed,
        two_frequency=request.within is not None,
        objective=PlanObjective.of(request),
    )


class _Search:
    """Search rounds of a joint search: which layouts become candidates, and which are evaluated."""

    def __init__(
        self,
        problem: PlanningProblem,
        stop: StoppingCriterion,
        bound: StepBound | None,
        baselines: Sequence[TrainingPlan] = (),
    ) -> None:
        self.problem, self.stop = problem, stop
        request = problem.request
        by_cost = PlanObjective.of(request).by_cost
        self.classes = DeviceClasses.of(
            problem.cluster,
            request.prices if by_cost else None,
            by_region=request.within is not None,
        )
        wire_ratio = Codec(request.codec).wire_ratio
        constraints = _constraints(problem, int(self.classes.size.sum()))
        self.random = np.random.default_rng((problem.seed, 1))
        self.layouts = LayoutSearch(
            self.classes, problem.workload, wire_ratio, problem.seed, constraints
        )
        # compile kernels before the clock of the search starts
        self.trials_per_s = self.layouts.trials_in(1.0)
        self.run = started(stop, self.layouts.trials_per_effort)
        self.pool = CandidatePool(problem, self.classes, self.run, bound)
        self.pending: list[CandidatePlan] = []
        self.baselines = [plan for plan in baselines if self._is_allowed(plan)]

    def result(self) -> Result[TrainingPlan]:
        """Run search rounds until the limit."""
        trials = min(SEARCH_ROUND_TRIALS, self._trials())
        idle = 0
        with self.run.interruptible():
            for baseline in self.baselines:
                self.pool.offer_baseline(baseline)
            while idle < IDLE_SEARCH_ROUNDS:
                known = len(self.pool.tried)
                self._search_round(trials)
                idle = 0 if len(self.pool.tried) > known else idle + 1
                if self.run.check() is not None:
                    break
        found: tuple[Alternative, ...] = ()
        with self.run.interruptible():
            if self.pool.incumbent.plan is None and not self.pool.below_bound:
                self._evaluate_fallback()
            elif not self.run.paced_by_time and self.run.reason != INTERRUPTED:
                self._evaluate_pending()
            self._drop_idle_devices()
            found = tuple(alternatives(self.pool))
        if self.pool.incumbent.plan is None:
            if not self.pool.below_bound:
                raise KeyboardInterrupt  # before anything that fits was found
            self.pool.accept_below_bound()
        result = self.pool.incumbent.result(exhausted="all layouts that were found")
        assert result.plan is not None
        return replace(result, plan=result.plan.replace(alternatives=found))

    def _is_allowed(self, plan: TrainingPlan) -> bool:
        """Whether a baseline satisfies the request."""
        request, stages = self.problem.request, len(plan.stage_layers)
        layers, flight = self.layouts.constraints.layers, request.in_flight
        return (
            (request.fixed_stages is None or request.fixed_stages == stages)
            and (layers is None or tuple(layers) == tuple(plan.stage_layers))
            and (flight is None or max(plan.schedules[0].most_live()) <= flight)
            and (request.recompute is None or request.recomputing(stages) == plan.recompute)
        )

    def _baseline_layouts(self) -> list[Layout]:
        """Layouts of the baselines, which the search tries to improve."""
        class_of = {d: c for c, members in enumerate(self.classes.members) for d in members}
        index_of = self.problem.cluster.network.index_of
        layouts = []
        for plan in self.baselines:
            names = plan.cluster.network.ids
            counts: list[list[int]] = []
            for group in plan.assignment.groups:
                row = [0] * len(self.classes)
                for d in group:
                    row[class_of[index_of(names[d])]] += 1
                counts.append(row)
            cuts = [0, *(stop for _, stop in plan.stage_layers)]
            layouts.append(Layout.of(counts, cuts, list(plan.recompute)))
        return list(dict.fromkeys(layouts))

    def _trials(self) -> float:
        """Trials of the layout search that the limit allows."""
        if self.run.paced_by_time:
            return LAYOUT_SEARCH_SHARE * self.trials_per_s * self.stop.seconds()
        return LAYOUT_SEARCH_SHARE * self.run.max_iterations

    def _search_round(self, trials: float) -> None:
        """Build and evaluate the best of new layouts, then improve good ones."""
        self.layouts.found.clear()
        self.layouts.run(self.run, trials)
        ranked = self.layouts.ranked(first=InitialLayout.SPREAD_COLD)
        initial: list[Layout] = []
        if not self.pool.tried:
            rank_based = promising_rank_layouts(self.problem, self.layouts, PROMISING_RATIO)
            initial = list(dict.fromkeys([*self._baseline_layouts(), *rank_based]))
        promising = [scored.layout for scored in ranked if scored.layout not in initial]
        candidates: list[CandidatePlan] = []
        first = [*promising[:1], *initial]
        if self.run.check() is not None:
            # there is time for one candidate only
            first.sort(key=lambda layout: self.layouts.scored(layout).value)
        for layout in [*first, *promising[1:]]:
            out_of_budget = bool(candidates) and self.run.check() is not None
            if len(candidates) == MAX_CANDIDATES + len(initial) or out_of_budget:
                break
            candidate = self.pool.try_layout(layout, always=layout in initial)
            if candidate is not None:
                candidates.append(candidate)
        candidates += self._best_unbuilt(candidates, initial)
        self._evaluate_promising(candidates)
        for _ in range(IMPROVEMENT_STEPS):
            if not self.pool.best_by_stages or self.run.check() is not None:
                break
            parent = self._next_parent()
            self._evaluate_promising([*self._neighbours(parent), *self._perturbed(parent)])

    def _best_unbuilt(
        self, candidates: Sequence[CandidatePlan], initial: Sequence[Layout]
    ) -> list[CandidatePlan]:
        """The layout with by far the best estimate, if the limit came before it was built."""
        scored = [*self.layouts.ranked()[:1], *map(self.layouts.scored, initial)]
        built = [self.layouts.scored(candidate.layout).value for candidate in candidates]
        if not scored or self.run.reason == INTERRUPTED:
            return []
        best = min(scored, key=lambda layout: layout.value)
        if best.value * PROMISING_RATIO >= min(built, default=math.inf):
            return []
        candidate = self.pool.try_layout(best.layout)
        return [] if candidate is None else [candidate]

    def _next_parent(self) -> CandidatePlan:
        """The best candidate over numbers of stages, with a penalty for visits."""
        best, visits = self.pool.best_by_stages, self.pool.visits
        stages = min(best, key=lambda k: best[k].value * (1 + VISIT_PENALTY * visits[k]))
        visits[stages] += 1
        return best[stages]

    def _neighbours(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """Candidates from moves of a layout whose estimates are not much worse."""
        candidates: list[CandidatePlan] = []
        stages = len(parent.layout.layers)
        max_ratio = CHANGE_TOLERANCE + TOLERANCE_PER_VISIT * self.pool.visits[stages]
        max_value = max_ratio * self.layouts.scored(parent.layout).value
        neighbours = self.layouts.neighbours(parent.layout, MOVES_ESTIMATED)
        promising = [scored.layout for scored in neighbours if scored.value <= max_value]
        for layout in [*self._less_recomputation(parent.layout), *promising]:
            if len(candidates) == MOVES_BUILT or self.run.check() is not None:
                break
            candidate = self.pool.try_layout(layout)
            if candidate is not None:
                candidates.append(candidate)
        if not candidates:
            self.pool.visits[stages] += EXHAUSTED_VISITS
        return candidates

    def _perturbed(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """Candidates of the same layout with other slowdowns of its classes, by random descent."""
        best, better = parent, []
        for k in range(SLOWDOWN_TRIALS):
            if self.run.check() is not None:
                break
            factors = np.exp(self.random.normal(0.0, PERTURBATION_SIGMA, len(best.slowdown)))
            slowdown = best.slowdown * factors * (best.lateness if k == 0 else 1.0)
            max_in_flight = IN_FLIGHT_FACTORS[-1] if k % 2 else math.inf
            candidate = self.pool.build_once(best.context, max_in_flight, slowdown, best.spread)
            if candidate.value < best.value and best.chained:
                candidate = candidate.with_next_step()
                self.pool.spend(candidate, 2)
            if candidate.value < best.value:
                best = candidate
                better.append(candidate)
        if better:
            self.pool.best_by_stages[len(best.layout.layers)] = best
        return better

    def _less_recomputation(self, layout: Layout) -> list[Layout]:
        """The layout with recomputation on fewer stages, where that slows the flow down little."""
        recomputing = [j for j, recomputes in enumerate(layout.recompute) if recomputes]
        if self.problem.request.recompute is not None or not recomputing:
            return []
        stages = range(len(layout.recompute))
        fewer = [tuple(k in recomputing and k != j for k in stages) for j in recomputing]
        choices = dict.fromkeys([(False,) * len(stages), *fewer, (True,) * len(stages)])
        others = [replace(layout, recompute=flags) for flags in choices]
        others = [other for other in others if other not in self.pool.tried]
        if not others:
            return []
        max_s = CHANGE_TOLERANCE * pipeline_s(self.problem, self.classes, layout, IN_FLIGHT)
        # where memory is short, fewer microbatches in flight may suffice
        return [
            other
            for other in others
            if pipeline_s(self.problem, self.classes, other, MIN_IN_FLIGHT) <= max_s
        ]

    def _evaluate_promising(self, candidates: list[CandidatePlan]) -> None:
        """Evaluate the most promising candidates so far."""
        promising = [*self.pending, *candidates]
        best_value = self.pool.incumbent.objective
        self.pending = [candidate for candidate in promising if candidate.value < best_value]
        evaluations_left, chains_left = MAX_EVALUATED, MAX_CHAINED
        while evaluations_left > 0 and chains_left > 0:
            self.pending.sort(key=lambda candidate: candidate.value)
            better = self.pending and self.pending[0].value < self.pool.incumbent.objective
            has_plan = self.pool.incumbent.plan is not None
            if not better or (has_plan and self.run.check() is not None):
                break
            candidate = self.pending.pop(0)
            if candidate.chained:
                evaluations_left -= 1
                self.pool.evaluate(candidate)
                if self.pool.best_candidate is candidate:
                    self.pending += self._variants(candidate)
            else:
                chains_left -= 1
                candidate = candidate.with_next_step()
                self.pool.spend(candidate, 2)
                self.pending.append(candidate)
                self.pool.update(candidate, candidate.seconds)

    def _evaluate_pending(self) -> None:
        """Evaluate the best candidate that was built before the limit was reached."""
        candidate = min(self.pending, key=lambda candidate: candidate.value, default=None)
        if candidate is not None and candidate.value < self.pool.incumbent.objective:
            candidate = candidate.with_next_step()
            if candidate.value < self.pool.incumbent.objective:
                self.pool.evaluate(candidate)

    def _drop_idle_devices(self) -> None:
        """Remove devices without microbatches from the best plan, if that is better.

        Devices with a stage take part in its averaging even when idle.
        """
        best = self.pool.best_candidate
        if best is None or not self.pool.may_recheck(best):
            return
        layout = best.without_idle()
        if layout == best.layout:
            return
        candidate = self.pool.try_layout(layout, always=True)
        if candidate is not None and candidate.layout == layout:
            candidate = candidate.with_next_step()
            if candidate.value < self.pool.incumbent.objective:
                self.pool.evaluate(candidate)

    def _variants(self, candidate: CandidatePlan) -> Iterator[CandidatePlan]:
        """The same layout with fewer microbatches in flight, and with measured slowdowns."""
        slower = candidate.slowdown * candidate.lateness
        for max_in_flight in (*IN_FLIGHT_FACTORS, math.inf):
            if self.run.check() is not None:
                break
            slowdown = slower if max_in_flight == math.inf else candidate.slowdown
            yield self.pool.build_once(candidate.context, max_in_flight, slowdown, candidate.spread)

    def _evaluate_fallback(self) -> None:
        """After an interruption, or if nothing fits yet: evaluate the best layout there is."""
        if self._evaluate_first_feasible():
            return
        if self.run.reason == TIME_LIMIT:
            # no layout that fits was found in time
            self.layouts.run(MaxIterations(int(LATE_TRIALS)).start(), LATE_TRIALS)
            if self._evaluate_first_feasible():
                return
        if self.pool.first_error is None and self.run.reason == INTERRUPTED:
            raise KeyboardInterrupt  # interrupted before it is known what fits
        raise self.pool.first_error or ProblemError(nothing_fits(self.layouts))

    def _evaluate_first_feasible(self) -> bool:
        """Evaluate the best layout that fits; returns whether there is one."""
        for scored in self.layouts.ranked():
            candidate = self.pool.try_layout(scored.layout)
            if candidate is not None:
                self.pool.evaluate(candidate)
                if self.pool.incumbent.plan is not None or self.pool.below_bound:
                    return True
        return False
