"""Joint search over devices, stages, layers, groups, paths and averaging.

A round anneals layouts on an estimate of their step time, builds candidate plans with paths from
the best layouts, simulates one step of each, then two consecutive steps of the best, and evaluates
the best of these in full. Moves of good layouts follow in the same way. Rounds start from other
layouts and repeat until the limit; the first one already yields a plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.planning.aggregators import with_aggregators
from planner.planning.cost import PlanObjective, with_cost
from planner.planning.device_classes import DeviceClasses, Floats
from planner.planning.device_flow import PairSpread
from planner.planning.flow_plan import CandidatePlan, LayoutContext
from planner.planning.layout import Layout
from planner.planning.layout_flow import pipeline_s
from planner.planning.layout_kernel import IN_FLIGHT
from planner.planning.layout_search import Constraints, InitialLayout, LayoutSearch
from planner.planning.nothing_fits import nothing_fits
from planner.planning.problem import PlanningProblem
from planner.planning.promising_ranks import promising_rank_layouts
from planner.planning.request import PlanRequest, RequestedWiring, ShareRule
from planner.planning.shape import layers_of, microbatches_of
from planner.planning.step_bound import StepBound
from planner.problems import ProblemError
from planner.search.incumbent import Incumbent
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
from planner.training_plan.averaging_group import is_hierarchical
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.utils.text import counted

logger = logging.getLogger(__name__)

ROUND_TRIALS = 600_000.0
"""Maximum trials of the layout search in a round."""
LATE_TRIALS = 200_000.0
"""Trials of the layout search after a time limit that passed before any layout fitted."""
LAYOUT_SEARCH_SHARE = 0.3
"""Maximum share of the limit that the layout search of a round uses."""
MAX_CANDIDATES = 6
"""Candidates built in a round from new layouts, besides those from baselines and ranks."""
MAX_CHAINED = 8
"""Candidates that are simulated with a second step, after each batch of new candidates."""
MAX_EVALUATED = 2
"""Candidates that are evaluated in full, after each batch of new candidates."""
EVALUATION_PASSES = 5
"""Simulated steps of a full evaluation: one from an idle system, then consecutive ones."""
IDLE_ROUNDS = 3
"""Consecutive rounds without a new layout that end the search."""

OPERATIONS_PER_EFFORT = 800_000
"""Simulated operations per unit of effort."""
OPERATIONS_PER_CANDIDATE = 25_000
"""Fixed cost of a candidate, in simulated operations."""

PROMISING_RATIO = 1.08
"""Ratio to the best value up to which a candidate is built again over other pairs of devices, and
with the slowdowns measured in its schedule."""
IMPROVEMENTS = 6
"""Improvement steps in a round; each builds moves of one parent."""
NEIGHBOURS = 600
"""Moves of a parent's layout that are estimated in an improvement step."""
MAX_NEIGHBOURS = 12
"""Moves of a parent's layout that are built in an improvement step."""
CHANGE_TOLERANCE = 1.04
"""Maximum ratio of a move's estimate to its parent's."""
TOLERANCE_PER_VISIT = 0.01
"""Growth of that ratio with every visit of the parent."""
VISIT_PENALTY = 0.002
"""Relative handicap of a parent per visit, when the next parent is chosen."""
EXHAUSTED_VISITS = 3
"""Visits that a visit without a new layout counts in addition."""
SLOWDOWN_TRIALS = 4
"""Random slowdowns of classes that are tried on a parent in an improvement step."""
PERTURBATION_SIGMA = 0.04
"""Standard deviation of the logarithm of a random slowdown."""

IN_FLIGHT_FACTORS = (2.0, 3.0)
"""Limits on microbatches in flight that variants of the best plan get, as multiples of what
Little's law requires."""
MIN_IN_FLIGHT = 1.0
"""Delay over period that keeps every stage busy without queueing (Little's law)."""
MAX_RECHECK_OPERATIONS = 60_000
"""Operations of a step up to which variants of the best plan are built after the search."""
MAX_RECHECKS = 3
"""Times that a runner-up may replace the best plan after the search."""
LARGER_MICROBATCHES_SHARE = 0.5
"""Share of the limit for a second search, with the larger microbatches of a baseline."""

IDLE_DEVICES = (
    "wiring 'stochastic': every plan found leaves devices without microbatches; give more "
    "samples a step, or let wiring be 'flow'"
)


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
    larger_result = _Search(larger, portion, bound, baselines).result()
    return min(result, larger_result, key=objective_or_inf)


def _constraints(problem: PlanningProblem, devices: int) -> Constraints:
    """Constraints on layouts that follow from the request."""
    request, stages = problem.request, problem.request.fixed_stages
    most = min(devices, len(problem.workload.layers))
    if stages is not None and not 1 <= stages <= most:
        raise ProblemError(
            f"stages must be 1 to {most}, the devices that can compute or the layers, found "
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
        every=request.sync_every,
        delayed=request.delayed,
        two_frequency=request.within is not None,
        objective=PlanObjective.of(request),
    )


class _Search:
    """State of the search: layouts, candidates, and the best plan so far."""

    def __init__(
        self,
        problem: PlanningProblem,
        stop: StoppingCriterion,
        bound: StepBound | None,
        baselines: Sequence[TrainingPlan] = (),
    ) -> None:
        self.problem, self.stop = problem, stop
        self.objective = PlanObjective.of(problem.request)
        prices = problem.request.prices if self.objective.by_cost else None
        by_region = problem.request.within is not None
        self.classes = DeviceClasses.of(problem.cluster, prices, by_region=by_region)
        wire = Codec(problem.request.codec).wire_ratio
        constraints = _constraints(problem, int(self.classes.size.sum()))
        self.random = np.random.default_rng((problem.seed, 1))
        self.layouts = LayoutSearch(self.classes, problem.workload, wire, problem.seed, constraints)
        # compile kernels before the clock of the search starts
        self.trials_per_s = self.layouts.trials_in(1.0)
        self.run = started(stop, self.layouts.trials_per_effort)
        # trials of layouts are estimates: that they improve no plan is no reason to stop
        self.run.evaluates_plans = False
        self.incumbent: Incumbent[TrainingPlan] = Incumbent(
            self.run, problem.cluster, method="layouts, flow", seed=problem.seed
        )
        if bound is not None:
            self.incumbent.raise_bound(*bound)
        # the value is a mean over many steps, extrapolated from a few simulated ones
        calibration = problem.request.calibration
        self.is_mean = problem.request.sync_every > 1 or self.objective.by_cost
        self.is_mean |= calibration is not None and calibration.updates
        self.is_stochastic = problem.request.wiring == RequestedWiring.STOCHASTIC
        self.below_bound: list[tuple[float, TrainingPlan]] = []
        self.best_candidate: CandidatePlan | None = None
        self.best_on_all: CandidatePlan | None = None
        self.pending: list[CandidatePlan] = []
        self.best_by_stages: dict[int, CandidatePlan] = {}
        self.visits: dict[int, int] = {}
        self.tried: set[Layout] = set()
        self.first_error: ProblemError | None = None
        self.baselines = [plan for plan in baselines if self._is_allowed(plan)]

    def result(self) -> Result[TrainingPlan]:
        """Run rounds until the limit."""
        trials = min(ROUND_TRIALS, self._trials())
        idle = 0
        with self.run.interruptible():
            self._offer_baselines()
            while idle < IDLE_ROUNDS:
                known = len(self.tried)
                self._round(trials)
                idle = 0 if len(self.tried) > known else idle + 1
                if self.run.check() is not None:
                    break
        alternatives: tuple[Alternative, ...] = ()
        with self.run.interruptible():
            if self.incumbent.plan is None and not self.below_bound:
                self._evaluate_any()
            elif not self.run.paced_by_time and self.run.reason != INTERRUPTED:
                self._evaluate_last()
            self._drop_idle_devices()
            alternatives = tuple(self._alternatives())
        if self.incumbent.plan is None:
            if not self.below_bound:
                raise KeyboardInterrupt  # before anything that fits was found
            self._accept_below_bound()
        result = self.incumbent.result(exhausted="all layouts that were found")
        assert result.plan is not None
        return replace(result, plan=result.plan.replace(alternatives=alternatives))

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

    def _offer_baselines(self) -> None:
        """Offer the baselines as incumbents."""
        for baseline in self.baselines:
            plan = with_cost(with_aggregators(self.problem, baseline), self.problem.request)
            value = self.objective.of_plan(plan)
            if not self._is_below_bound(value):
                self.incumbent.offer(value, plan)

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

    def _is_below_bound(self, value: float) -> bool:
        """Whether the value of a plan is below a bound on the mean over many steps.

        The value comes from a few simulated steps, which may be shorter than the steps that follow:
        in steps without averaging, devices that are ahead leave their links to those behind until
        the distance between them has settled. Such a value is no sign of a wrong bound.
        """
        bound = self.incumbent.bound
        return self.is_mean and bound is not None and value < bound

    def _accept_below_bound(self) -> None:
        """If nothing else was found, take the best plan below the bound, and drop the bound.

        The plan is valid, but its simulated steps are shorter than its mean step can be (see
        `_is_below_bound`). A result must not state an objective below its bound, so it has none.
        """
        cluster, seed = self.problem.cluster, self.problem.seed
        logger.warning(
            "no bound is stated: all %d plans that were evaluated are below the bound of %.6g on "
            "the mean over many steps, since only a few steps are simulated",
            len(self.below_bound),
            self.incumbent.bound,
        )
        self.incumbent = Incumbent(self.run, cluster, method="layouts, flow", seed=seed)
        for value, plan in self.below_bound:
            self.incumbent.offer(value, plan)

    def _alternatives(self) -> Iterator[Alternative]:
        """Runners-up, and variants of the best plan with one decision changed."""
        runners_up = self._runners_up()
        best, request = self.best_candidate, self.problem.request
        for decision, candidate in runners_up:
            yield self._alternative(decision, candidate.value)
        if best is None or not self._may_recheck(best):
            return
        if request.recompute is None:
            yield self._other_recomputation(best)
            best = self.best_candidate or best
        if request.averaging is None:
            yield from self._equal_shares(best)

    def _other_recomputation(self, best: CandidatePlan) -> Alternative:
        """The best plan with or without recomputation, which replaces it if that is better."""
        recomputes, best_value = any(best.layout.recompute), self.incumbent.objective
        decisions = {
            True: ("recomputation", "none"),
            False: ("no recomputation", "on all stages"),
        }
        decision = decisions[recomputes]
        other = replace(best.layout, recompute=(not recomputes,) * len(best.layout.layers))
        variant = self._rebuilt(best, other, self.problem.request)
        if variant is None:
            return self._alternative(decision, None)
        value = variant.value
        if value < best_value * (1 - 1e-9):
            value = self._evaluate(variant)
            if value < best_value * (1 - 1e-9):
                decision, value = decisions[not recomputes], best_value
        return self._alternative(decision, value)

    def _alternative(self, decision: tuple[str, str], value: float | None) -> Alternative:
        why = "memory does not hold it" if value is None else ""
        taken, instead = decision
        unit = "$" if self.objective.by_cost else "s"
        return Alternative(taken, instead, value, unit, why)

    def _equal_shares(self, best: CandidatePlan) -> Iterator[Alternative]:
        """The best plan with one round of equal shares, which replaces it if that is better.

        Shares are optimised for averaging alone; other shares may suit concurrent messages better.
        """
        plan, best_value = self.incumbent.plan, self.incumbent.objective
        hierarchical = (
            plan is not None
            and any(map(is_hierarchical, plan.averaging))
            and not plan.two_frequency
        )
        decision = (
            ("two levels", "one round of equal shares")
            if hierarchical
            else ("adaptive shares", "equal")
        )
        equal = self.problem.request.replace(averaging=ShareRule.EQUAL)
        candidate = self._rebuilt(best, best.layout, equal)
        if candidate is None:
            return
        value = candidate.value
        if value < best_value * (1 - 1e-9):
            value = self._evaluate(candidate)
            if value < best_value * (1 - 1e-9):
                decision, value = ("equal shares", decision[0]), best_value
        yield self._alternative(decision, value)

    def _runners_up(self) -> list[tuple[tuple[str, str], CandidatePlan]]:
        """The best candidate with another number of stages, and the best one that uses all devices.

        One that is better than the best plan replaces it.
        """
        runners_up: list[tuple[tuple[str, str], CandidatePlan]] = []
        for _ in range(MAX_RECHECKS):
            best = self.best_candidate
            if best is None:
                return []
            stages = len(best.layout.layers)
            others = [candidate for k, candidate in self.best_by_stages.items() if k != stages]
            runners_up = []
            if others:
                runner_up = min(others, key=lambda candidate: candidate.value)
                decision = (counted(stages, "stage"), str(len(runner_up.layout.layers)))
                runners_up.append((decision, runner_up))
            if self._idle(best) > 0 and self.best_on_all is not None:
                decision = (f"{self._idle(best)} without a stage", "none")
                runners_up.append((decision, self.best_on_all))
            if not self._may_recheck(best):
                return runners_up
            runners_up = [
                (decision, candidate.with_next_step()) for decision, candidate in runners_up
            ]
            for _, candidate in runners_up:
                self._update_parent(candidate, candidate.seconds)
            better = [
                candidate
                for _, candidate in runners_up
                if candidate.value < self.incumbent.objective * (1 - 1e-9)
            ]
            for candidate in better:
                self._evaluate(candidate)
            if self.best_candidate is best:
                break
        return runners_up

    def _rebuilt(
        self, best: CandidatePlan, layout: Layout, request: PlanRequest
    ) -> CandidatePlan | None:
        """The best candidate with one decision changed; None if memory is too small."""
        try:
            variant = replace(self.problem, request=request)
            context = LayoutContext.of(variant, self.classes, layout, IN_FLIGHT)
            return context.candidate(slowdown=best.slowdown, spread=best.spread).with_next_step()
        except ProblemError:
            return None

    def _may_recheck(self, candidate: CandidatePlan) -> bool:
        """Whether variants of this candidate are small enough to be built after the search."""
        most = MAX_RECHECK_OPERATIONS // (10 if self.run.paced_by_time else 1)
        return candidate.operations <= most and self.run.reason != INTERRUPTED

    def _idle(self, candidate: CandidatePlan) -> int:
        """Devices that can compute but hold no stage."""
        return int(self.classes.size.sum()) - len(candidate.context.problem.cluster)

    def _trials(self) -> float:
        """Trials of the layout search that the limit allows."""
        if self.run.paced_by_time:
            return LAYOUT_SEARCH_SHARE * self.trials_per_s * self.stop.seconds()
        return LAYOUT_SEARCH_SHARE * self.run.most_iterations

    def _round(self, trials: float) -> None:
        """Build and evaluate the best of new layouts, then improve good ones."""
        self.layouts.found.clear()
        self.layouts.run(self.run, trials)
        ranked = self.layouts.ranked(first=InitialLayout.SPREAD_COLD)
        initial: list[Layout] = []
        if not self.tried:
            rank_based = promising_rank_layouts(self.problem, self.layouts, PROMISING_RATIO)
            initial = list(dict.fromkeys([*self._baseline_layouts(), *rank_based]))
        promising = [scored.layout for scored in ranked if scored.layout not in initial]
        candidates: list[CandidatePlan] = []
        first = [*promising[:1], *initial]
        if self.run.check() is not None:
            # there is time for one candidate only
            first.sort(key=lambda layout: self.layouts.scored(layout).value)
        for layout in [*first, *promising[1:]]:
            if len(candidates) == MAX_CANDIDATES + len(initial) or self._out_of_budget(candidates):
                break
            candidate = self._candidate(layout, always=layout in initial)
            if candidate is not None:
                candidates.append(candidate)
        candidates += self._best_unbuilt(candidates, initial)
        self._evaluate_best(candidates)
        for _ in range(IMPROVEMENTS):
            if not self.best_by_stages or self.run.check() is not None:
                break
            parent = self._next_parent()
            self._evaluate_best([*self._neighbours(parent), *self._perturbed(parent)])

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
        candidate = self._candidate(best.layout)
        return [] if candidate is None else [candidate]

    def _next_parent(self) -> CandidatePlan:
        """The best candidate over numbers of stages, with a handicap for visits."""
        stages = min(
            self.best_by_stages,
            key=lambda k: self.best_by_stages[k].value * (1 + VISIT_PENALTY * self.visits[k]),
        )
        self.visits[stages] += 1
        return self.best_by_stages[stages]

    def _neighbours(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """Candidates from moves of a layout whose estimates are not much worse."""
        candidates: list[CandidatePlan] = []
        slack = CHANGE_TOLERANCE + TOLERANCE_PER_VISIT * self.visits[len(parent.layout.layers)]
        most = slack * self.layouts.scored(parent.layout).value
        near = self.layouts.neighbours(parent.layout, NEIGHBOURS)
        promising = [scored.layout for scored in near if scored.value <= most]
        for layout in [*self._less_recomputation(parent.layout), *promising]:
            if len(candidates) == MAX_NEIGHBOURS or self.run.check() is not None:
                break
            candidate = self._candidate(layout)
            if candidate is not None:
                candidates.append(candidate)
        if not candidates:
            self.visits[len(parent.layout.layers)] += EXHAUSTED_VISITS
        return candidates

    def _perturbed(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """Candidates of the same layout with other slowdowns of its classes; a descent."""
        best, better = parent, []
        for k in range(SLOWDOWN_TRIALS):
            if self.run.check() is not None:
                break
            factors = np.exp(self.random.normal(0.0, PERTURBATION_SIGMA, len(best.slowdown)))
            slowdown = best.slowdown * factors * (best.lateness if k == 0 else 1.0)
            most = IN_FLIGHT_FACTORS[-1] if k % 2 else math.inf
            candidate = self._build(best.context, most, slowdown, best.spread)
            if candidate.value < best.value and best.chained:
                candidate = candidate.with_next_step()
                self._spend(candidate, 2)
            if candidate.value < best.value:
                best = candidate
                better.append(candidate)
        if better:
            self.best_by_stages[len(best.layout.layers)] = best
        return better

    def _less_recomputation(self, layout: Layout) -> list[Layout]:
        """The layout with recomputation on fewer stages, where that slows the flow down little."""
        on = [j for j, recomputes in enumerate(layout.recompute) if recomputes]
        if self.problem.request.recompute is not None or not on:
            return []
        stages = range(len(layout.recompute))
        fewer = [tuple(k in on and k != j for k in stages) for j in on]
        choices = dict.fromkeys([(False,) * len(stages), *fewer, (True,) * len(stages)])
        others = [replace(layout, recompute=flags) for flags in choices]
        others = [other for other in others if other not in self.tried]
        if not others:
            return []
        most = CHANGE_TOLERANCE * self._pipeline_s(layout, IN_FLIGHT)
        # where memory is short, fewer microbatches in flight may suffice
        return [other for other in others if self._pipeline_s(other, MIN_IN_FLIGHT) <= most]

    def _pipeline_s(self, layout: Layout, in_flight: float) -> float:
        return pipeline_s(self.problem, self.classes, layout, in_flight)

    def _candidate(self, layout: Layout, *, always: bool = False) -> CandidatePlan | None:
        """The best candidate of a layout; None if it was tried before or memory is too small.

        Other pairs of devices are tried if the first candidate is promising, or ``always``.
        """
        if layout in self.tried:
            return None
        self.tried.add(layout)
        try:
            context = LayoutContext.of(self.problem, self.classes, layout, IN_FLIGHT)
            first, *others = context.spreads
            best = self._build(context, spread=first)
        except ProblemError as error:
            self.first_error = self.first_error or error
            return None
        for spread in others:
            if self._is_promising(best, math.inf if always else PROMISING_RATIO):
                other = self._build(context, spread=spread)
                best = min(best, other, key=lambda candidate: candidate.value)
        if self._is_promising(best, PROMISING_RATIO):
            other = self._build(context, slowdown=best.slowdown * best.lateness, spread=best.spread)
            best = min(best, other, key=lambda candidate: candidate.value)
        known = self.best_on_all
        if self._idle(best) == 0 and (known is None or best.value < known.value):
            self.best_on_all = best
        stages = len(layout.layers)
        if stages not in self.best_by_stages or best.value < self.best_by_stages[stages].value:
            self.best_by_stages[stages], self.visits[stages] = best, 0
        return best

    def _is_promising(self, candidate: CandidatePlan, most: float) -> bool:
        """Whether the value is within a factor of the best one."""
        values = [known.value for known in self.best_by_stages.values()]
        best = min([self.incumbent.objective, *values])
        return candidate.value <= most * best and self.run.check() is None

    def _build(
        self,
        context: LayoutContext,
        most: float = math.inf,
        slowdown: Floats | None = None,
        spread: PairSpread = PairSpread.EVEN,
    ) -> CandidatePlan:
        candidate = context.candidate(most, slowdown, spread)
        self._spend(candidate, 1)
        return candidate

    def _evaluate_best(self, candidates: list[CandidatePlan]) -> None:
        """Evaluate the most promising candidates so far."""
        promising = [*self.pending, *candidates]
        incumbent = self.incumbent.objective
        self.pending = [candidate for candidate in promising if candidate.value < incumbent]
        evaluations_left, chains_left = MAX_EVALUATED, MAX_CHAINED
        while evaluations_left > 0 and chains_left > 0:
            self.pending.sort(key=lambda candidate: candidate.value)
            better = self.pending and self.pending[0].value < self.incumbent.objective
            if not better or (self.incumbent.plan is not None and self.run.check() is not None):
                break
            candidate = self.pending.pop(0)
            if candidate.chained:
                evaluations_left -= 1
                self._evaluate(candidate)
                if self.best_candidate is candidate:
                    self.pending += self._variants(candidate)
            else:
                chains_left -= 1
                candidate = candidate.with_next_step()
                self._spend(candidate, 2)
                self.pending.append(candidate)
                self._update_parent(candidate, candidate.seconds)

    def _evaluate_last(self) -> None:
        """Evaluate the best candidate that was built before the limit was reached."""
        incumbent = self.incumbent.objective
        waiting = [candidate for candidate in self.pending if candidate.value < incumbent]
        if waiting:
            candidate = min(waiting, key=lambda candidate: candidate.value).with_next_step()
            if candidate.value < self.incumbent.objective:
                self._evaluate(candidate)

    def _drop_idle_devices(self) -> None:
        """Remove devices without microbatches from the best plan, if that is better.

        Devices with a stage take part in its averaging even when idle.
        """
        best = self.best_candidate
        if best is None or not self._may_recheck(best):
            return
        layout = best.without_idle()
        if layout == best.layout:
            return
        candidate = self._candidate(layout, always=True)
        if candidate is not None and candidate.layout == layout:
            candidate = candidate.with_next_step()
            if candidate.value < self.incumbent.objective:
                self._evaluate(candidate)

    def _variants(self, candidate: CandidatePlan) -> Iterator[CandidatePlan]:
        """The same layout with fewer microbatches in flight, and with measured slowdowns."""
        for most in (*IN_FLIGHT_FACTORS, math.inf):
            if self.run.check() is not None:
                break
            slowdown = (
                candidate.slowdown * candidate.lateness if most == math.inf else candidate.slowdown
            )
            yield self._build(candidate.context, most, slowdown, candidate.spread)

    def _out_of_budget(self, candidates: list[CandidatePlan]) -> bool:
        return bool(candidates) and self.run.check() is not None

    def _evaluate(self, candidate: CandidatePlan) -> float:
        """Simulate a candidate in full and offer it as incumbent; returns its value."""
        busy = candidate.without_idle() if self.is_stochastic else candidate.layout
        if busy != candidate.layout:
            # with stochastic wiring every device needs an initial share of the microbatches
            self.first_error = self.first_error or ProblemError(IDLE_DEVICES)
            smaller = self._candidate(busy, always=True)
            return math.inf if smaller is None else self._evaluate(smaller.with_next_step())
        plan = with_cost(with_aggregators(self.problem, candidate.plan()), self.problem.request)
        self.run.evaluates_plans = True
        value = self.objective.of_plan(plan)
        if self._is_below_bound(value):
            self.below_bound.append((value, plan))
        elif self.incumbent.offer(value, plan):
            self.best_candidate = candidate
        self._update_parent(candidate, plan.predicted.step_s)
        # with aggregators it is simulated twice
        self._spend(candidate, EVALUATION_PASSES * (2 if self.problem.aggregators else 1))
        return value

    def _update_parent(self, candidate: CandidatePlan, seconds: float) -> None:
        """Record a more accurate value: averaging and pipelines slow each other down."""
        known = self.best_by_stages[len(candidate.layout.layers)]
        later = replace(candidate, seconds=max(seconds, candidate.seconds), chained=True)
        if known.layout == candidate.layout and (not known.chained or later.value < known.value):
            self.best_by_stages[len(candidate.layout.layers)] = later

    def _spend(self, candidate: CandidatePlan, passes: int) -> None:
        self.run.spend(
            (passes * candidate.operations + OPERATIONS_PER_CANDIDATE) / OPERATIONS_PER_EFFORT
        )

    def _evaluate_any(self) -> None:
        """After an interruption, or if nothing fits yet: evaluate the best layout there is."""
        if self._evaluate_first():
            return
        if self.run.reason == TIME_LIMIT:
            # no layout that fits was found in time
            self.layouts.run(MaxIterations(int(LATE_TRIALS)).start(), LATE_TRIALS)
            if self._evaluate_first():
                return
        if self.first_error is None and self.run.reason == INTERRUPTED:
            raise KeyboardInterrupt  # interrupted before it is known what fits
        raise self.first_error or ProblemError(nothing_fits(self.layouts))

    def _evaluate_first(self) -> bool:
        """Evaluate the best layout that fits; returns whether there is one."""
        for scored in self.layouts.ranked():
            candidate = self._candidate(scored.layout)
            if candidate is not None:
                self._evaluate(candidate)
                if self.incumbent.plan is not None or self.below_bound:
                    return True
        return False
