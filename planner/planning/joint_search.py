"""Joint search over devices, stages, layers, groups, paths and averaging.

A round anneals layouts on an estimate of their step time, builds candidate plans with paths from
the best layouts, simulates one step of each, then two consecutive steps of the best, and evaluates
the best of these in full. Moves of good layouts follow in the same way. Rounds start from other
layouts and repeat until the limit; the first one already yields a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.planning.aggregators import with_aggregators
from planner.planning.baselines.rank_order import rank_layouts, region_order
from planner.planning.cost import PlanObjective, with_cost
from planner.planning.device_classes import DeviceClasses, Floats
from planner.planning.device_flow import PairSpread
from planner.planning.flow_plan import CandidatePlan, LayoutContext
from planner.planning.layout import Layout
from planner.planning.layout_flow import pipeline_s
from planner.planning.layout_kernel import IN_FLIGHT
from planner.planning.layout_search import Constraints, InitialLayout, LayoutSearch, ScoredLayout
from planner.planning.nothing_fits import nothing_fits
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest, RequestedWiring, ShareRule
from planner.planning.shape import layers_of, microbatches_of
from planner.planning.step_bound import StepBound
from planner.problems import ProblemError
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import MaxIterations, StoppingCriterion, started
from planner.training_plan.alternative import Alternative
from planner.training_plan.averaging_group import is_hierarchical
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.utils.text import counted

ROUND_TRIALS, LATE_TRIALS = 600_000.0, 200_000.0
"""Most trials of the layout search in a round, and in one after a limit that found nothing."""
LAYOUT_SEARCH_SHARE = 0.3
"""Largest share of the limit for the layout search of a round."""
MAX_RECHECK_OPERATIONS, MAX_RECHECKS = 60_000, 3
"""Operations of a step up to which variants of the best plan are built after the search, and how
often a better runner-up may replace it."""
IDLE_ROUNDS = 3
"""Consecutive rounds without a new layout that end the search."""
OPERATIONS_PER_EFFORT, OPERATIONS_PER_CANDIDATE = 800_000, 25_000
"""Simulated operations per unit of effort; a candidate costs a fixed number on top."""
EVALUATION_PASSES = 5
"""Simulated steps of a full evaluation: one from an idle system, then consecutive ones."""
MAX_CANDIDATES, MAX_CHAINED, MAX_EVALUATED = 6, 8, 2
"""Candidates built in a round; those simulated with a second step, and those evaluated, after the
candidates and after each improvement."""
RANK_LAYOUTS = 6
"""Layouts of consecutive ranks whose layers are improved. The best of them becomes a candidate if
its estimate is promising; the best with the trainers' own layers always does."""
PROMISING_RATIO = 1.08
"""A candidate within this factor of the best is built again over other pairs of devices, and with
slowdowns measured in its schedule."""
NEIGHBOURS, MAX_NEIGHBOURS, IMPROVEMENTS = 600, 12, 6
"""Moves of a layout that are estimated, that are built, and improvements in a round."""
SLOWDOWN_TRIALS, PERTURBATION_SIGMA = 4, 0.04
"""Random slowdowns of classes tried on a good candidate, and their standard deviation."""
CHANGE_TOLERANCE, TOLERANCE_PER_VISIT = 1.04, 0.01
"""Largest estimate of a move relative to its parent; grows with every visit of the parent."""
VISIT_PENALTY, EXHAUSTED_VISITS = 0.002, 3
"""Handicap of a parent for each visit, relative to its value; a visit that finds nothing new counts
several times."""
IN_FLIGHT_FACTORS = (2.0, 3.0)
"""Limits on microbatches in flight, by Little's law, that variants of the best plan get."""
MIN_IN_FLIGHT = 1.0
"""Delay over period that keeps every stage busy without queueing (Little's law)."""
LARGER_SHARE = 0.5
"""Share of the limit for layouts with a baseline's larger microbatches."""
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
    found = search.result()
    samples = found.plan.workload.microbatch_samples if found.plan is not None else None
    if samples in (None, problem.workload.microbatch_samples) or search.run.reason not in (
        *(None, "effort spent", "iteration limit"),
    ):
        return found
    # a baseline with larger microbatches is the best plan: search layouts with these, too
    workload = problem.workload.replace(microbatch_samples=samples)
    larger = replace(problem, workload=workload)
    more = _Search(larger, stop.portion(LARGER_SHARE), bound, baselines).result()
    return min(found, more, key=lambda one: one.objective or math.inf)


def _constraints(problem: PlanningProblem, devices: int) -> Constraints:
    """What the request fixes of layouts."""
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
    equal = request.shares == ShareRule.EQUAL
    parts = (stages, layers, request.recompute, request.in_flight, equal)
    two_frequency = request.within is not None
    return Constraints(
        *parts, request.sync_every, request.delayed, two_frequency, PlanObjective.of(request)
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
        given = _constraints(problem, int(self.classes.size.sum()))
        self.random = np.random.default_rng((problem.seed, 1))
        self.layouts = LayoutSearch(self.classes, problem.workload, wire, problem.seed, given)
        # compile kernels before the clock of the search starts
        self.trials_per_s = self.layouts.trials_in(1.0)
        self.run = started(stop, self.layouts.trials_per_effort)
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
        self.baselines = [one for one in baselines if self._is_allowed(one)]

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
            elif not self.run.paced_by_time and self.run.reason != "interrupted":
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
        for one in self.baselines:
            plan = with_cost(with_aggregators(self.problem, one), self.problem.request)
            value = self.objective.of_plan(plan)
            if not self._is_below_bound(value):
                self.incumbent.offer(value, plan)

    def _baseline_layouts(self) -> list[Layout]:
        """Layouts of the baselines, which the search tries to improve."""
        class_of = {d: c for c, members in enumerate(self.classes.members) for d in members}
        ids = self.problem.cluster.network.index_of
        layouts = []
        for plan in self.baselines:
            names, counts = plan.cluster.network.ids, []
            for group in plan.assignment.groups:
                row = [0] * len(self.classes)
                for d in group:
                    row[class_of[ids(names[d])]] += 1
                counts.append(row)
            cuts = [0, *(stop for _, stop in plan.stage_layers)]
            layouts.append(Layout.of(counts, cuts, list(plan.recompute)))
        return list(dict.fromkeys(layouts))

    def _is_below_bound(self, value: float) -> bool:
        """Whether the value of a plan cannot hold in the long run.

        The simulator looks at a few steps; without averaging, devices that are ahead leave their
        links to those behind for a while.
        """
        bound = self.incumbent.bound
        return self.is_mean and bound is not None and value < bound

    def _accept_below_bound(self) -> None:
        """If nothing else was found, take the best plan below the bound, and drop the bound."""
        cluster, seed = self.problem.cluster, self.problem.seed
        self.incumbent = Incumbent(self.run, cluster, method="layouts, flow", seed=seed)
        for value, plan in self.below_bound:
            self.incumbent.offer(value, plan)

    def _alternatives(self) -> Iterator[Alternative]:
        """Runners-up, and variants of the best plan with one decision changed."""
        runners_up = self._runners_up()
        best, request = self.best_candidate, self.problem.request
        for words, candidate in runners_up:
            yield self._alternative(words, candidate.value)
        if best is None or not self._may_recheck(best):
            return
        on = any(best.layout.recompute)
        if request.recompute is None:
            other = replace(best.layout, recompute=(not on,) * len(best.layout.layers))
            words = ("recomputation", "none") if on else ("no recomputation", "on all stages")
            found = self._rebuilt(best, other, request)
            value = None if found is None else found.value
            taken = self.incumbent.objective
            if found is not None and found.value < taken * (1 - 1e-9):
                value = self._evaluate(found)
                if value < taken * (1 - 1e-9):
                    words, value = (
                        (
                            ("recomputation" if not on else "no recomputation"),
                            "on all stages" if on else "none",
                        ),
                        taken,
                    )
                    best = self.best_candidate or best
            yield self._alternative(words, value)
        if request.averaging is None:
            yield from self._equal_shares(best)

    def _alternative(self, words: tuple[str, str], value: float | None) -> Alternative:
        why = "memory does not hold it" if value is None else ""
        return Alternative(*words, value, "$" if self.objective.by_cost else "s", why)

    def _equal_shares(self, best: CandidatePlan) -> Iterator[Alternative]:
        """The best plan with one round of equal shares, which replaces it if that is better.

        Shares are optimised for averaging alone; beside other messages, others may be faster.
        """
        plan, taken = self.incumbent.plan, self.incumbent.objective
        hierarchical = (
            plan is not None
            and any(map(is_hierarchical, plan.averaging))
            and not plan.two_frequency
        )
        words = (
            ("two levels", "one round of equal shares")
            if hierarchical
            else ("adaptive shares", "equal")
        )
        equal = self.problem.request.replace(averaging=ShareRule.EQUAL)
        candidate = self._rebuilt(best, best.layout, equal)
        if candidate is None:
            return
        value = candidate.value
        if value < taken * (1 - 1e-9):
            value = self._evaluate(candidate)
            if value < taken * (1 - 1e-9):
                words, value = ("equal shares", words[0]), taken
        yield self._alternative(words, value)

    def _runners_up(self) -> list[tuple[tuple[str, str], CandidatePlan]]:
        """The best candidate with another number of stages, and the best one that uses all devices.

        One that is better than the best plan replaces it.
        """
        runners_up: list[tuple[tuple[str, str], CandidatePlan]] = []
        for _ in range(MAX_RECHECKS):
            best = self.best_candidate
            if best is None:
                return []
            mine = len(best.layout.layers)
            others = [candidate for k, candidate in self.best_by_stages.items() if k != mine]
            runners_up = []
            if others:
                one = min(others, key=lambda candidate: candidate.value)
                runners_up.append(((counted(mine, "stage"), str(len(one.layout.layers))), one))
            if self._idle(best) > 0 and self.best_on_all is not None:
                runners_up.append(
                    ((f"{self._idle(best)} without a stage", "none"), self.best_on_all)
                )
            if not self._may_recheck(best):
                return runners_up
            runners_up = [(words, candidate.with_next_step()) for words, candidate in runners_up]
            for _, candidate in runners_up:
                self._update_parent(candidate, candidate.seconds)
            better = [
                one for _, one in runners_up if one.value < self.incumbent.objective * (1 - 1e-9)
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
        return candidate.operations <= most and self.run.reason != "interrupted"

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
        promising = [one.layout for one in self.layouts.ranked(first=InitialLayout.SPREAD_COLD)]
        ranks = []
        if not self.tried:
            ranks = list(dict.fromkeys([*self._baseline_layouts(), *self._rank_layouts()]))
        promising = [one for one in promising if one not in ranks]
        candidates: list[CandidatePlan] = []
        first = [*promising[:1], *ranks]
        if self.run.check() is not None:
            # there is time for one candidate only
            first.sort(key=lambda layout: self.layouts.scored(layout).value)
        for layout in [*first, *promising[1:]]:
            if len(candidates) == MAX_CANDIDATES + len(ranks) or self._out_of_budget(candidates):
                break
            candidate = self._candidate(layout, always=layout in ranks)
            if candidate is not None:
                candidates.append(candidate)
        candidates += self._best_unbuilt(candidates, ranks)
        self._evaluate_best(candidates)
        for _ in range(IMPROVEMENTS):
            if not self.best_by_stages or self.run.check() is not None:
                break
            parent = self._next_parent()
            self._evaluate_best([*self._neighbours(parent), *self._perturbed(parent)])

    def _best_unbuilt(
        self, candidates: Sequence[CandidatePlan], ranks: Sequence[Layout]
    ) -> list[CandidatePlan]:
        """The layout with by far the best estimate, if the limit came before it was built."""
        every = [*self.layouts.ranked()[:1], *map(self.layouts.scored, ranks)]
        known = [self.layouts.scored(one.layout).value for one in candidates]
        if not every or self.run.reason == "interrupted":
            return []
        best = min(every, key=lambda one: one.value)
        if best.value * PROMISING_RATIO >= min(known, default=math.inf):
            return []
        candidate = self._candidate(best.layout)
        return [] if candidate is None else [candidate]

    def _rank_layouts(self) -> list[Layout]:
        """The best layouts of consecutive ranks by estimate; none if nothing fits."""
        numbers, given = self.layouts.stage_counts, self.layouts.constraints.layers
        layers = {s: given or self.problem.workload.even_split(s) for s in numbers}
        network = self.problem.cluster.network
        order = region_order(network)
        first = self._best_ranks(order, layers)
        better = [self.layouts.with_better_layers(one.layout) for one in first]
        better.sort(key=lambda one: one.value)
        least = min((one.value for one in self.layouts.ranked()), default=math.inf)
        better = [one for one in better[:1] if one.value <= PROMISING_RATIO * least]
        least = min([least, *(one.value for one in (*better, *first[:1]))])
        alone = self._in_one_region(order, layers, least)
        return list(dict.fromkeys(one.layout for one in (*alone, *better, *first[:1])))

    def _best_ranks(
        self, ranks: Sequence[int], layers: Mapping[int, Sequence[tuple[int, int]]]
    ) -> list[ScoredLayout]:
        """The best layouts of ranks in this order, by estimate."""
        found = map(self.layouts.scored, rank_layouts(ranks, self.classes, layers))
        fits = [one for one in found if one.value < math.inf]
        return sorted(fits, key=lambda one: one.value)[:RANK_LAYOUTS]

    def _in_one_region(
        self,
        order: Sequence[int],
        layers: Mapping[int, Sequence[tuple[int, int]]],
        least: float,
    ) -> list[ScoredLayout]:
        """The best layout on one region or device, if all others have a larger estimate."""
        regions = self.problem.cluster.network.regions
        names = dict.fromkeys(regions) if len(set(regions)) > 1 else {}
        parts = [[d for d in order if regions[d] == name] for name in names]
        parts += [[members[0]] for members in self.classes.members]
        first = [
            one
            for ranks in parts
            for one in self._best_ranks(ranks, layers)[:1]
            if one.value <= PROMISING_RATIO * least
        ]
        better = [self.layouts.with_better_layers(one.layout) for one in first]
        better.sort(key=lambda one: one.value)
        return [one for one in better[:1] if one.value < least]

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
        promising = [one.layout for one in near if one.value <= most]
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
            by_chance = np.exp(self.random.normal(0.0, PERTURBATION_SIGMA, len(best.slowdown)))
            slowdown = best.slowdown * by_chance * (best.lateness if k == 0 else 1.0)
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
        on = [j for j, does in enumerate(layout.recompute) if does]
        if self.problem.request.recompute is not None or not on:
            return []
        stages = range(len(layout.recompute))
        fewer = [tuple(k in on and k != j for k in stages) for j in on]
        kinds = dict.fromkeys([(False,) * len(stages), *fewer, (True,) * len(stages)])
        other = [replace(layout, recompute=flags) for flags in kinds]
        other = [one for one in other if one not in self.tried]
        if not other:
            return []
        most = CHANGE_TOLERANCE * self._pipeline_s(layout, IN_FLIGHT)
        # where memory is short, fewer microbatches in flight may suffice
        return [one for one in other if self._pipeline_s(one, MIN_IN_FLIGHT) <= most]

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
        best_s = min(
            [self.incumbent.objective, *(one.value for one in self.best_by_stages.values())]
        )
        return candidate.value <= most * best_s and self.run.check() is None

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
        self.pending = [one for one in promising if one.value < self.incumbent.objective]
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
        """Evaluate the best candidate that was built before the effort was spent."""
        waiting = [one for one in self.pending if one.value < self.incumbent.objective]
        if waiting:
            candidate = min(waiting, key=lambda one: one.value).with_next_step()
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
            again = self._candidate(busy, always=True)
            return math.inf if again is None else self._evaluate(again.with_next_step())
        plan = with_cost(with_aggregators(self.problem, candidate.plan()), self.problem.request)
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
        if self.run.reason == "time limit":
            # no layout that fits was found in time
            self.layouts.run(MaxIterations(int(LATE_TRIALS)).start(), LATE_TRIALS)
            if self._evaluate_first():
                return
        if self.first_error is None and self.run.reason == "interrupted":
            raise KeyboardInterrupt  # nobody knows yet what fits
        raise self.first_error or ProblemError(nothing_fits(self.layouts))

    def _evaluate_first(self) -> bool:
        """Evaluate the best layout that fits; returns whether there is one."""
        for one in self.layouts.ranked():
            candidate = self._candidate(one.layout)
            if candidate is not None:
                self._evaluate(candidate)
                if self.incumbent.plan is not None or self.below_bound:
                    return True
        return False
