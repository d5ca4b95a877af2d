"""Joint search over devices, stages, layers, groups, paths and averaging.

A search round is a restart: simulated annealing finds layouts with a low estimate, with any number
of stages in the first round and with some fixed numbers in further ones, and candidates are built
from the best of them. One step of each is simulated, then two consecutive steps of the
most promising, and the best of these are evaluated in full. Improvement steps follow: a parent is
chosen from the elite pool (the best candidates so far), and candidates are built from neighbours of
its layout and from perturbations of its flow. Search rounds repeat until the limit; the first one
already yields an incumbent.

Runs of annealing and candidates that do not depend on each other are made in parallel by a
`WorkerPool`; decisions are taken between such batches, in the order of the tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.planning.cost import PlanObjective
from planner.planning.joint.alternatives import alternatives
from planner.planning.joint.candidate import CandidatePlan
from planner.planning.joint.candidate_builder import CandidateBuilder
from planner.planning.joint.candidate_pool import PROMISING_RATIO, CandidatePool, slowed
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.infeasibility_message import infeasibility_message
from planner.planning.joint.initial_layouts import InitialLayout
from planner.planning.joint.layout import Layout, Outline
from planner.planning.joint.layout_flow import IN_FLIGHT, pipeline_s
from planner.planning.joint.layout_problem import Constraints
from planner.planning.joint.layout_search import (
    MOVES_PER_EFFORT,
    SEEDS,
    LayoutSearch,
    ScoredLayout,
)
from planner.planning.joint.promising_ranks import promising_rank_layouts
from planner.planning.problem import PlanningProblem
from planner.planning.request import ShareRule
from planner.planning.shape import at_most, layers_of, microbatches_of
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
from planner.search.worker_pool import WorkerPool, Workers
from planner.training_plan.alternative import Alternative
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan

SEARCH_ROUND_MOVES = 1_200_000.0
"""Maximum moves of the layout search in a search round: longer limits give more rounds."""
FALLBACK_MOVES = 200_000.0
"""Moves of the layout search after a time limit that passed before any layout fitted."""
LAYOUT_SEARCH_SHARE = 0.3
"""Maximum share of the limit for the layout search of a round; the rest goes to simulation, which
decides between layouts of similar estimates."""
MIN_NEW_CANDIDATES, MAX_NEW_CANDIDATES = 15, 50
"""Candidates built in a search round from new layouts, besides those from baselines and ranks: more
with a longer limit, since estimates rank layouts badly."""
MOVES_PER_NEW_CANDIDATE = 80_000.0
"""Moves of the layout search that the whole limit allows, for each of these candidates."""
MAX_TWO_STEP_SIMULATIONS = 8
"""Candidates that are simulated with a second step, after each batch of new candidates."""
SIMULATED_TOGETHER = 2
"""Candidates that are simulated with a second step at the same time."""
MAX_EVALUATED = 2
"""Candidates that are evaluated in full, after each batch of new candidates."""
MAX_IDLE_ROUNDS = 3
"""Consecutive search rounds without a new layout that end the search: the layout search is random,
so that one such round may be chance."""

SECOND_ROUND_COUNTS, FURTHER_ROUND_COUNTS = 8, 5
"""Numbers of stages of the second search round and of each further one: those with the lowest
estimates."""
FIRST_IMPROVEMENT_STEPS, IMPROVEMENT_STEPS = 2, 6
"""Improvement steps in a search round; each explores the neighbourhood of one parent. The first
number is that of the first round, if the limit allows further ones, which find better layouts."""
NEIGHBOURS_ESTIMATED = 600
"""Random neighbours of a parent's layout that are estimated in an improvement step."""
NEIGHBOUR_TASKS = 4
"""Tasks among which these are divided."""
MAX_NEIGHBOURS_BUILT = 30
"""Neighbours that are built and simulated in an improvement step, the lowest estimates first."""
ACCEPTANCE_RATIO = 1.04
"""Maximum ratio of a neighbour's estimate to its parent's. Above 1, since estimates leave queueing
out: a neighbour with a slightly worse estimate may have a shorter step."""
ACCEPTANCE_PER_VISIT = 0.01
"""Increase of that ratio with every visit of the parent, whose best neighbours are then known."""
VISIT_PENALTY = 0.002
"""Relative penalty on a parent's value per visit, so that the search moves on to other parents."""
EXHAUSTED_VISITS = 3
"""Extra visits charged to a parent whose neighbourhood gave no new candidate."""
PERTURBATIONS = 4
"""Random perturbations of a parent's slowdowns in an improvement step."""
PERTURBATION_SIGMA = 0.04
"""Standard deviation of the logarithm of a perturbation's factor."""

IN_FLIGHT_FACTORS = (2.0, 3.0)
"""Limits on microbatches in flight for variants of the incumbent, as multiples of what Little's law
requires: fewer in flight queue less."""
MIN_IN_FLIGHT = 1.0
"""Delay over period that keeps every stage busy without queueing (Little's law)."""
LARGER_MICROBATCHES_SHARE = 0.5
"""Share of the limit for a second search, with the larger microbatches of a baseline."""


def search_jointly(
    problem: PlanningProblem,
    stop: StoppingCriterion,
    bound: StepBound | None = None,
    baselines: Sequence[TrainingPlan] = (),
    workers: Workers = 1,
) -> Result[TrainingPlan]:
    """The best plan found; every decision that the request leaves open is searched."""
    search = JointSearch(problem, stop, bound, baselines, workers)
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
        larger_result = JointSearch(larger, portion, bound, baselines, workers).result()
        return min(result, larger_result, key=objective_or_inf)
    # interrupted before the second search had a result
    return replace(result, stop_reason=search.run.reason or INTERRUPTED)


def constraints_of(problem: PlanningProblem) -> Constraints:
    """Constraints on layouts that follow from the request."""
    request, stages = problem.request, problem.request.fixed_stages
    devices = int(np.asarray(problem.cluster.devices.can_compute).sum())
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
        optimizer_copies=request.optimizer_copies,
        heads=problem.heads,
    )


class JointSearch:
    """Search rounds: which layouts become candidates, and which candidates are evaluated."""

    def __init__(
        self,
        problem: PlanningProblem,
        stop: StoppingCriterion,
        bound: StepBound | None,
        baselines: Sequence[TrainingPlan] = (),
        workers: Workers = 1,
    ) -> None:
        self.problem, self.stop = problem, stop
        request = problem.request
        by_cost = PlanObjective.of(request).by_cost
        self.classes = DeviceClasses.of(
            problem.cluster,
            request.prices if by_cost else None,
            by_region=request.within is not None,
        )
        wire_ratio = Codec(request.codec).wire_ratio * (1 + problem.workload.spread_ratio) / 2
        constraints = constraints_of(problem)
        self.rng = np.random.default_rng((problem.seed, 1))
        self.layouts = LayoutSearch(
            self.classes, problem.workload, wire_ratio, problem.seed, constraints
        )
        # compile kernels before the time limit starts
        self.moves_per_s = self.layouts.moves_in(1.0)
        self.run = started(stop, MOVES_PER_EFFORT)
        self.builder = CandidateBuilder(problem, self.classes)
        self.workers = WorkerPool(workers, self.layouts, self.builder)
        self.pool = CandidatePool(problem, self.builder, self.run, self.workers, bound)
        self.pending: list[CandidatePlan] = []
        self.rounds = 0
        self.best_estimates: dict[Outline, float] = {}
        self.baselines = [plan for plan in baselines if self._is_allowed(plan)]

    def result(self) -> Result[TrainingPlan]:
        """Run search rounds until the limit."""
        with self.workers:
            return self._result()

    def _result(self) -> Result[TrainingPlan]:
        moves = min(SEARCH_ROUND_MOVES, self._num_moves())
        idle_rounds = 0
        with self.run.interruptible():
            for baseline in self.baselines:
                self.pool.offer_baseline(baseline)
            while idle_rounds < MAX_IDLE_ROUNDS:
                num_tried = len(self.pool.tried)
                self._search_round(moves)
                idle_rounds = 0 if len(self.pool.tried) > num_tried else idle_rounds + 1
                if self.run.check() is not None:
                    break
        runners_up: tuple[Alternative, ...] = ()
        with self.run.interruptible():
            if self.pool.incumbent.plan is None and not self.pool.below_bound:
                self._evaluate_fallback()
            elif not self.run.paced_by_time and self.run.reason != INTERRUPTED:
                self._evaluate_pending()
            self._drop_idle_devices()
            runners_up = tuple(alternatives(self.pool))
        if self.pool.incumbent.plan is None:
            if not self.pool.below_bound:
                raise KeyboardInterrupt  # before anything that fits was found
            self.pool.accept_below_bound()
        result = self.pool.incumbent.result(exhausted="all layouts that were found")
        assert result.plan is not None
        return replace(result, plan=result.plan.replace(alternatives=runners_up))

    def _is_allowed(self, plan: TrainingPlan) -> bool:
        """Whether a baseline satisfies the request."""
        request, stages = self.problem.request, len(plan.stage_layers)
        layers, flight = self.layouts.problem.constraints.layers, request.in_flight
        return (
            (request.fixed_stages is None or request.fixed_stages == stages)
            and (layers is None or tuple(layers) == tuple(plan.stage_layers))
            and (flight is None or max(plan.schedules[0].most_live()) <= flight)
            and (stages == 1 or plan.schedules[0].head in self.problem.heads)
            and (
                request.recompute is None
                or plan.recompute == at_most(request.recomputing(stages), plan.stage_layers)
            )
        )

    def _baseline_layouts(self) -> list[Layout]:
        """Layouts of the baselines, which the search tries to improve."""
        class_of = self.classes.class_of
        index_of = self.problem.cluster.network.index_of
        layouts = []
        for plan in self.baselines:
            names = plan.cluster.network.ids
            counts: list[list[int]] = []
            for group in plan.assignment.groups:
                stage_counts = [0] * len(self.classes)
                for d in group:
                    stage_counts[class_of[index_of(names[d])]] += 1
                counts.append(stage_counts)
            cuts = [0, *(stop for _, stop in plan.stage_layers)]
            head = plan.schedules[0].head
            layouts.append(Layout.of(counts, cuts, list(plan.recompute), head))
        return list(dict.fromkeys(layouts))

    def _num_moves(self) -> float:
        """Moves of the layout search that the limit allows."""
        if self.run.paced_by_time:
            return LAYOUT_SEARCH_SHARE * self.moves_per_s * self.stop.seconds()
        return LAYOUT_SEARCH_SHARE * self.run.max_iterations

    def _num_new_candidates(self) -> int:
        """Candidates to build from new layouts in a search round."""
        affordable = min(self._num_moves() / MOVES_PER_NEW_CANDIDATE, MAX_NEW_CANDIDATES)
        return max(MIN_NEW_CANDIDATES, int(affordable))

    def _search_round(self, moves: float) -> None:
        """Build and evaluate the best of new layouts, then improve candidates of the elite pool."""
        ranked = self._new_layouts(moves)
        initial: list[Layout] = []
        if not self.pool.tried:
            rank_based = promising_rank_layouts(self.problem, self.layouts, PROMISING_RATIO)
            initial = list(dict.fromkeys([*self._baseline_layouts(), *rank_based]))
        promising = [scored.layout for scored in ranked if scored.layout not in initial]
        first = [*promising[:1], *initial]
        if self.run.check() is not None:
            # there is time for one candidate only
            first.sort(key=lambda layout: self.layouts.scored(layout).value)
        most = self._num_new_candidates() + len(initial)
        batches = [[*first, *promising[1:]]]
        if self.run.paced_by_time:
            # time may end before the others are built: evaluate the best first
            batches = [first, promising[1:]]
        candidates: list[CandidatePlan] = []
        for batch in batches:
            if candidates and self.run.check() is not None:
                break
            built = self.pool.try_layouts(batch, most - len(candidates), initial)
            candidates += built
            self._evaluate_promising(built)
        if best_unbuilt := self._best_unbuilt(candidates, initial):
            self._evaluate_promising(best_unbuilt)
        is_first_of_several = self.rounds == 1 and moves == SEARCH_ROUND_MOVES
        for _ in range(FIRST_IMPROVEMENT_STEPS if is_first_of_several else IMPROVEMENT_STEPS):
            if not self.pool.elite or self.run.check() is not None:
                break
            parent = self._next_parent()
            self._evaluate_promising([*self._neighbours(parent), *self._perturbed(parent)])

    def _new_layouts(self, moves: float) -> list[ScoredLayout]:
        """Layouts of a search round, the most promising first.

        The first round leaves the number of stages open. Further ones divide the moves among the
        outlines with the lowest estimates. The best layouts of promising outlines come first, since
        the other layouts of low estimates mostly resemble each other.
        """
        layouts, estimates = self.layouts, self.best_estimates
        layouts.optima.clear()
        self.rounds += 1
        if not estimates:
            layouts.search(self.run, moves, self.workers)
            ranked = layouts.ranked(first=InitialLayout.SPREAD_COLD)
            best_of_each = list(layouts.best_by_outline().values())
            promising = [
                scored
                for scored in best_of_each
                if scored.value <= PROMISING_RATIO * best_of_each[0].value
            ]
            ranked = list(dict.fromkeys([*ranked[:1], *promising, *ranked]))
        else:
            most = SECOND_ROUND_COUNTS if self.rounds == 2 else FURTHER_ROUND_COUNTS
            outlines = sorted(estimates, key=lambda outline: estimates[outline])[:most]
            layouts.search_fixed(self.run, outlines, moves, self.workers)
            best = layouts.best_by_outline(), layouts.best_by_outline(partial=False)
            ranked = list(dict.fromkeys([*best[0].values(), *best[1].values(), *layouts.ranked()]))
        for outline, scored in layouts.best_by_outline().items():
            estimates[outline] = min(scored.value, estimates.get(outline, math.inf))
        return ranked

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
        return self.pool.try_layouts([best.layout], 1)

    def _next_parent(self) -> CandidatePlan:
        """The best candidate of the elite pool, with a penalty for visits."""
        elite, visits = self.pool.elite, self.pool.visits
        layout = min(elite, key=lambda x: elite[x].value * (1 + VISIT_PENALTY * visits[x]))
        visits[layout] += 1
        return elite[layout]

    def _neighbours(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """Candidates from neighbours of a layout whose estimates are not much worse."""
        visits = self.pool.visits
        max_ratio = ACCEPTANCE_RATIO + ACCEPTANCE_PER_VISIT * visits[parent.layout]
        max_value = max_ratio * self.layouts.scored(parent.layout).value
        samples = NEIGHBOURS_ESTIMATED // NEIGHBOUR_TASKS
        seeds = self.rng.integers(0, SEEDS, NEIGHBOUR_TASKS)
        tasks = [(parent.layout, samples, max_value, seed) for seed in seeds.tolist()]
        neighbours = {
            scored.layout: scored.value
            for found in self.workers.map(self.layouts.neighbours, tasks)
            for scored in found
        }
        promising = sorted(neighbours, key=lambda layout: neighbours[layout])
        layouts = [*self._with_less_recomputation(parent.layout), *promising]
        candidates = []
        if self.run.check() is None:
            spread = parent.spec.spread
            candidates = self.pool.try_layouts(layouts, MAX_NEIGHBOURS_BUILT, spread=spread)
        if not candidates:
            visits[parent.layout] += EXHAUSTED_VISITS
        return candidates

    def _perturbed(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """Better candidates of the same layout, with random changes of the slowdowns."""
        specs = []
        for k in range(PERTURBATIONS):
            factors = np.exp(self.rng.normal(0.0, PERTURBATION_SIGMA, len(parent.lateness)))
            slowdown = np.array(parent.spec.slowdown) * factors
            if k == 0:
                slowdown *= parent.lateness
            max_in_flight_ratio = IN_FLIGHT_FACTORS[-1] if k % 2 else math.inf
            specs.append(
                replace(
                    parent.spec,
                    slowdown=tuple(slowdown.tolist()),
                    max_in_flight_ratio=max_in_flight_ratio,
                )
            )
        candidates = self._better(parent, self.pool.build_all(specs))
        if parent.two_steps:
            candidates = self._better(parent, self._with_next_step(candidates))
        for candidate in candidates:
            self.pool.keep(candidate)
        return candidates

    @staticmethod
    def _better(parent: CandidatePlan, candidates: list[CandidatePlan]) -> list[CandidatePlan]:
        return [candidate for candidate in candidates if candidate.value < parent.value]

    def _with_next_step(self, candidates: list[CandidatePlan]) -> list[CandidatePlan]:
        """The candidates, simulated with a next step."""
        tasks = [(candidate,) for candidate in candidates]
        simulated = list(self.workers.map(self.builder.with_next_step, tasks))
        for candidate in simulated:
            self.pool.spend(candidate, 2)
        return simulated

    def _with_less_recomputation(self, layout: Layout) -> list[Layout]:
        """The layout with recomputation on fewer stages, where that slows the flow down little."""
        recomputed = layout.recompute
        if self.problem.request.recompute is not None or not any(recomputed):
            return []
        fewer = [
            (*recomputed[:j], 0, *recomputed[j + 1 :])
            for j, count in enumerate(recomputed)
            if count
        ]
        choices = dict.fromkeys([(0,) * len(recomputed), *fewer, layout.layer_counts])
        others = [replace(layout, recompute=choice) for choice in choices]
        others = [other for other in others if other not in self.pool.tried]
        if not others:
            return []
        max_s = ACCEPTANCE_RATIO * pipeline_s(self.problem, self.classes, layout, IN_FLIGHT)
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
        evaluations_left, simulations_left = MAX_EVALUATED, MAX_TWO_STEP_SIMULATIONS
        while evaluations_left > 0 and simulations_left > 0:
            self.pending.sort(key=lambda candidate: candidate.value)
            best_value = self.pool.incumbent.objective
            better = self.pending and self.pending[0].value < best_value
            has_plan = self.pool.incumbent.plan is not None
            if not better or (has_plan and self.run.check() is not None):
                break
            candidate = self.pending[0]
            if candidate.two_steps:
                self.pending.remove(candidate)
                evaluations_left -= 1
                self.pool.evaluate(candidate)
                if self.pool.best_candidate is candidate:
                    self.pending += self._variants(candidate)
                continue
            batch = [
                candidate
                for candidate in self.pending
                if not candidate.two_steps and candidate.value < best_value
            ][: min(SIMULATED_TOGETHER, simulations_left)]
            simulations_left -= len(batch)
            self.pending = [candidate for candidate in self.pending if candidate not in batch]
            for candidate in self._with_next_step(batch):
                self.pending.append(candidate)
                self.pool.update(candidate, candidate.seconds)

    def _evaluate_pending(self) -> None:
        """Evaluate the best candidate that was built before the limit was reached."""
        candidate = min(self.pending, key=lambda candidate: candidate.value, default=None)
        if candidate is not None and candidate.value < self.pool.incumbent.objective:
            candidate = self.builder.with_next_step(candidate)
            if candidate.value < self.pool.incumbent.objective:
                self.pool.evaluate(candidate)

    def _drop_idle_devices(self) -> None:
        """Remove devices without microbatches from the best plan, if that is better.

        Devices with a stage take part in its averaging even when idle.
        """
        best = self.pool.best_candidate
        if best is None or not self.pool.may_recheck(best):
            return
        layout = best.used_layout
        if layout == best.layout:
            return
        for candidate in self.pool.try_layouts([layout], 1, {layout}):
            candidate = self.builder.with_next_step(candidate)
            if candidate.value < self.pool.incumbent.objective:
                self.pool.evaluate(candidate)

    def _variants(self, candidate: CandidatePlan) -> list[CandidatePlan]:
        """The same layout with fewer microbatches in flight, and with measured slowdowns."""
        fewer = [replace(candidate.spec, max_in_flight_ratio=ratio) for ratio in IN_FLIGHT_FACTORS]
        return self.pool.build_all([*fewer, slowed(candidate)])

    def _evaluate_fallback(self) -> None:
        """After an interruption, or if nothing fits yet: evaluate the best layout there is."""
        if self._evaluate_first_feasible():
            return
        if self.run.reason == TIME_LIMIT:
            # no layout that fits was found in time
            self.layouts.search(MaxIterations(int(FALLBACK_MOVES)).start(), FALLBACK_MOVES)
            if self._evaluate_first_feasible():
                return
        if self.pool.first_error is None and self.run.reason == INTERRUPTED:
            raise KeyboardInterrupt  # interrupted before it is known what fits
        raise self.pool.first_error or ProblemError(
            infeasibility_message(self.layouts, self.problem)
        )

    def _evaluate_first_feasible(self) -> bool:
        """Evaluate the best layout that fits; returns whether there is one."""
        for scored in self.layouts.ranked():
            for candidate in self.pool.try_layouts([scored.layout], 1):
                self.pool.evaluate(candidate)
                if self.pool.incumbent.plan is not None or self.pool.below_bound:
                    return True
        return False
