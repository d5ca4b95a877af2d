"""Candidates of the joint search: builds and evaluates them, and keeps the best.

A candidate is built from a layout, and its value is estimated by simulating one step, then two. In
a full evaluation several steps are simulated, and the plan is offered to the incumbent.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from planner.planning.averaging.aggregators import with_aggregators
from planner.planning.cost import PlanObjective, with_cost
from planner.planning.joint.candidate import CandidatePlan, CandidateSpec
from planner.planning.joint.candidate_builder import CandidateBuilder
from planner.planning.joint.device_flow import PairSpread
from planner.planning.joint.layout import Layout, Outline
from planner.planning.problem import PlanningProblem
from planner.planning.request import RequestedWiring
from planner.planning.step_bound import StepBound
from planner.problems import ProblemError
from planner.search.incumbent import Incumbent
from planner.search.stop import INTERRUPTED, SearchRun
from planner.search.worker_pool import WorkerPool
from planner.training_plan.model import TrainingPlan

logger = logging.getLogger(__name__)

EVALUATION_PASSES = 5
"""Simulated steps of a full evaluation: one from an idle system, then consecutive ones."""
OPERATIONS_PER_EFFORT = 800_000
"""Simulated operations per unit of effort."""
OPERATIONS_PER_CANDIDATE = 25_000
"""Fixed cost of a candidate, in simulated operations."""
SPREAD_RATIO, PROMISING_RATIO, REPEAT_RATIO = 1.15, 1.08, 1.03
"""Ratios to the best value up to which a candidate is built again over other pairs of devices, with
the slowdowns measured in its schedule, and with those measured in the schedule that follows."""
SPREAD_SHARE, LATENESS_SHARE = 0.3, 0.15
"""Shares of a batch of candidates that are built again so at most: the first candidate of a layout
takes a fraction of the time of all, and ranks layouts nearly as well."""
MAX_LATENESS_STEPS = 5
"""How often a candidate is built with measured slowdowns."""
MAX_RECHECK_OPERATIONS = 60_000
"""Operations of a step up to which variants of the best plan are built after the search."""
MAX_ELITE = 8
"""Candidates whose neighbourhoods are explored."""

IDLE_DEVICES = (
    "wiring 'stochastic': every plan found leaves devices without microbatches; give more "
    "samples a step, or let wiring be 'flow'"
)


class CandidatePool:
    """Candidates so far, and the best plan.

    Parameters
    ----------
    problem, builder, run, workers
        What is planned, what builds candidates, the run that counts the work, and what builds
        several at a time.
    bound
        A lower bound on every plan, or None.

    Attributes
    ----------
    incumbent
        The best evaluated plan, with the bound.
    best_candidate
        The candidate that the incumbent was made of; None if the incumbent is a baseline.
    best_by_outline
        The best candidate with each number of stages and place of the head.
    elite
        The best candidates by layout: the elite pool of the search.
    best_on_all
        The best candidate that uses all devices.
    visits
        By layout, how often its neighbourhood was explored.
    tried
        Layouts of which candidates were built.
    below_bound
        Evaluated plans below a bound on the mean; see `_is_below_bound`.
    first_error
        Why the first refused layout does not fit: the message of the error.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        builder: CandidateBuilder,
        run: SearchRun,
        workers: WorkerPool,
        bound: StepBound | None,
    ) -> None:
        self.problem, self.builder, self.run, self.workers = problem, builder, run, workers
        # until `evaluate`, moves are estimates: that they improve no plan is no reason to stop
        run.evaluates_plans = False
        request = problem.request
        self.objective = PlanObjective.of(request)
        self.incumbent: Incumbent[TrainingPlan] = Incumbent(
            run, problem.cluster, method="layouts, flow", seed=problem.seed
        )
        if bound is not None:
            self.incumbent.offer_bound(*bound)
        # the bound is then one on the mean over many steps
        self.bounds_mean = (
            request.sync_every > 1
            or self.objective.by_cost
            or (request.calibration is not None and request.calibration.updates)
        )
        self.is_stochastic = request.wiring == RequestedWiring.STOCHASTIC
        self.below_bound: list[tuple[float, TrainingPlan]] = []
        self.best_candidate: CandidatePlan | None = None
        self.best_on_all: CandidatePlan | None = None
        self.best_by_outline: dict[Outline, CandidatePlan] = {}
        self.elite: dict[Layout, CandidatePlan] = {}
        self.visits: Counter[Layout] = Counter()
        self.tried: set[Layout] = set()
        self.first_error: ProblemError | None = None

    def offer_baseline(self, baseline: TrainingPlan) -> None:
        """Offer a baseline as incumbent."""
        plan = with_cost(with_aggregators(self.problem, baseline), self.problem.request)
        value = self.objective.of_plan(plan)
        if not self._is_below_bound(value):
            self.incumbent.offer(value, plan)

    def try_layouts(
        self,
        layouts: Iterable[Layout],
        most: int,
        always: Collection[Layout] = (),
        spread: PairSpread | None = None,
    ) -> list[CandidatePlan]:
        """The best candidates of up to ``most`` layouts that fit and were not tried before.

        Other pairs of devices than those of ``spread`` are tried for the best of the first
        candidates, if promising, and for layouts of ``always``; measured slowdowns for the best of
        these. At the limit, the first layout is still tried.
        """
        untried = iter([x for x in dict.fromkeys(layouts) if x not in self.tried])
        firsts: list[CandidatePlan] = []
        while len(firsts) < most:
            batch = list(islice(untried, 1 if self.run.check() else most - len(firsts)))
            built = self._built([CandidateSpec(layout, spread) for layout in batch])
            self.tried.update(batch[: len(built)])
            firsts += [candidate for candidate in built if candidate is not None]
            if not batch or self.run.check() is not None:
                break
        best = {candidate.layout: candidate for candidate in firsts}
        self._improve(
            best,
            [
                replace(first.spec, spread=spread)
                for first in self._promising(firsts, SPREAD_RATIO, SPREAD_SHARE, always)
                for spread in first.other_spreads
            ],
        )
        self._follow_lateness(best)
        for candidate in best.values():
            self.keep(candidate)
        return list(best.values())

    def _built(self, specs: Sequence[CandidateSpec]) -> list[CandidatePlan | None]:
        """Candidates up to the limit, at least one; None where memory is too small."""
        built: list[CandidatePlan | None] = []
        for result in self.workers.map(self.builder.build, [(spec,) for spec in specs]):
            if isinstance(result, ProblemError):
                self.first_error = self.first_error or result
                built.append(None)
            else:
                self.spend(result, 1)
                built.append(result)
            if self.run.check() is not None:
                break
        return built

    def _improve(
        self, best: dict[Layout, CandidatePlan], specs: Sequence[CandidateSpec]
    ) -> list[CandidatePlan]:
        """Replace candidates by better ones with the same layout; returns all that were built."""
        built = self.build_all(specs)
        for candidate in built:
            if candidate.value < best[candidate.layout].value:
                best[candidate.layout] = candidate
        return built

    def _follow_lateness(self, best: dict[Layout, CandidatePlan]) -> None:
        """Build promising candidates repeatedly, with the slowdowns measured in the last schedule.

        A schedule may be worse than the one before it and the next one better than both.
        """
        last = dict(best)
        for k in range(MAX_LATENESS_STEPS):
            ratio = REPEAT_RATIO if k > 0 else PROMISING_RATIO
            promising = self._promising(list(best.values()), ratio, LATENESS_SHARE)
            built = self._improve(best, [slowed(last[one.layout]) for one in promising])
            last.update((candidate.layout, candidate) for candidate in built)

    def build_all(self, specs: Sequence[CandidateSpec]) -> list[CandidatePlan]:
        """Candidates, those that fit, up to the limit."""
        if self.run.check() is not None:
            return []
        return [candidate for candidate in self._built(specs) if candidate is not None]

    def _promising(
        self,
        candidates: Sequence[CandidatePlan],
        ratio: float,
        share: float,
        always: Collection[Layout] = (),
    ) -> list[CandidatePlan]:
        """The best share of the candidates, within a factor of the best one; none at the limit."""
        if self.run.check() is not None:
            return []
        known = [*self.best_by_outline.values(), *candidates]
        best_value = min([self.incumbent.objective, *(candidate.value for candidate in known)])
        values = sorted(candidate.value for candidate in candidates)
        last = values[math.ceil(share * len(values)) - 1] if values else 0.0
        return [
            candidate
            for candidate in candidates
            if candidate.value <= min(ratio * best_value, last) or candidate.layout in always
        ]

    def keep(self, candidate: CandidatePlan) -> None:
        """Take a candidate into the elite pool, if it is among the best."""
        outline, on_all = candidate.layout.outline, self.best_on_all
        if self.num_without_stage(candidate) == 0 and (
            on_all is None or candidate.value < on_all.value
        ):
            self.best_on_all = candidate
        best = self.best_by_outline.get(outline)
        if best is None or candidate.value < best.value:
            self.best_by_outline[outline] = candidate
        known = self.elite.get(candidate.layout)
        if known is None or candidate.value < known.value:
            self.elite[candidate.layout] = candidate
        if len(self.elite) > MAX_ELITE:
            del self.elite[max(self.elite, key=lambda layout: self.elite[layout].value)]

    def evaluate(self, candidate: CandidatePlan) -> float:
        """Simulate a candidate in full and offer it as incumbent; returns its value."""
        used_layout = candidate.used_layout
        if self.is_stochastic and used_layout != candidate.layout:
            # with stochastic wiring every device needs an initial share of the microbatches
            self.first_error = self.first_error or ProblemError(IDLE_DEVICES)
            smaller = self.try_layouts([used_layout], 1, {used_layout})
            return self.evaluate(self.builder.with_next_step(smaller[0])) if smaller else math.inf
        plan = self.builder.plan(candidate)
        plan = with_cost(with_aggregators(self.problem, plan), self.problem.request)
        self.run.evaluates_plans = True
        value = self.objective.of_plan(plan)
        if self._is_below_bound(value):
            self.below_bound.append((value, plan))
        elif self.incumbent.offer(value, plan):
            self.best_candidate = candidate
        self.update(candidate, plan.predicted.step_s)
        # with aggregators it is simulated twice
        self.spend(candidate, EVALUATION_PASSES * (2 if self.problem.aggregators else 1))
        return value

    def update(self, candidate: CandidatePlan, seconds: float) -> None:
        """Record a more accurate value: averaging and pipelines slow each other down."""
        outline = candidate.layout.outline
        updated = replace(candidate, seconds=max(seconds, candidate.seconds), two_steps=True)
        if _is_more_accurate(updated, self.best_by_outline.get(outline)):
            self.best_by_outline[outline] = updated
        if _is_more_accurate(updated, self.elite.get(candidate.layout)):
            self.elite[candidate.layout] = updated

    def spend(self, candidate: CandidatePlan, passes: int) -> None:
        """Count the work of simulating ``passes`` steps of a candidate."""
        self.run.spend(
            (passes * candidate.operations + OPERATIONS_PER_CANDIDATE) / OPERATIONS_PER_EFFORT
        )

    def rebuilt(self, spec: CandidateSpec) -> CandidatePlan | None:
        """A variant of the best candidate; None if memory is too small."""
        variant = self.builder.build(spec)
        return None if isinstance(variant, ProblemError) else self.builder.with_next_step(variant)

    def may_recheck(self, candidate: CandidatePlan) -> bool:
        """Whether variants of this candidate are small enough to be built after the search."""
        max_operations = MAX_RECHECK_OPERATIONS // (10 if self.run.paced_by_time else 1)
        return candidate.operations <= max_operations and self.run.reason != INTERRUPTED

    def num_without_stage(self, candidate: CandidatePlan) -> int:
        """Devices that can compute but hold no stage."""
        return int(self.builder.classes.size.sum()) - candidate.devices

    def _is_below_bound(self, value: float) -> bool:
        """Whether the value of a plan is below a bound on the mean over many steps.

        The value comes from a few simulated steps, which may be shorter than the steps that follow:
        in steps without averaging, devices that are ahead leave their links to later ones until
        the distance between them has settled. Such a value is no sign of a wrong bound.
        """
        bound = self.incumbent.bound
        return self.bounds_mean and bound is not None and value < bound

    def accept_below_bound(self) -> None:
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


def slowed(candidate: CandidatePlan) -> CandidateSpec:
    """A variant with the slowdowns that were measured in the candidate's schedule."""
    factors = np.array(candidate.spec.slowdown) * candidate.lateness
    slowdown = tuple(factors.tolist())
    return replace(candidate.spec, slowdown=slowdown, max_in_flight_ratio=math.inf)


def _is_more_accurate(updated: CandidatePlan, known: CandidatePlan | None) -> bool:
    """Whether a simulated candidate replaces a known one of its layout."""
    if known is None or known.layout != updated.layout:
        return False
    return not known.two_steps or updated.value < known.value
