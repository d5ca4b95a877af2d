"""Candidates of the joint search: builds and evaluates them, and keeps the best.

A candidate is built from a layout, and its value is estimated by simulating one step, then two. In
a full evaluation several steps are simulated, and the plan is offered to the incumbent.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from planner.planning.averaging.aggregators import with_aggregators
from planner.planning.cost import PlanObjective, with_cost
from planner.planning.joint.device_classes import DeviceClasses, Floats
from planner.planning.joint.device_flow import PairSpread
from planner.planning.joint.flow_plan import CandidatePlan, LayoutContext
from planner.planning.joint.layout import Layout
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest, RequestedWiring
from planner.planning.step_bound import StepBound
from planner.problems import ProblemError
from planner.search.incumbent import Incumbent
from planner.search.stop import INTERRUPTED, SearchRun
from planner.training_plan.model import TrainingPlan

logger = logging.getLogger(__name__)

EVALUATION_PASSES = 5
"""Simulated steps of a full evaluation: one from an idle system, then consecutive ones."""
OPERATIONS_PER_EFFORT = 800_000
"""Simulated operations per unit of effort."""
OPERATIONS_PER_CANDIDATE = 25_000
"""Fixed cost of a candidate, in simulated operations."""
PROMISING_RATIO = 1.08
"""Ratio to the best value up to which a candidate is built again over other pairs of devices, and
with the slowdowns measured in its schedule."""
MAX_RECHECK_OPERATIONS = 60_000
"""Operations of a step up to which variants of the best plan are built after the search."""

IDLE_DEVICES = (
    "wiring 'stochastic': every plan found leaves devices without microbatches; give more "
    "samples a step, or let wiring be 'flow'"
)


class CandidatePool:
    """Candidates so far, and the best plan.

    Parameters
    ----------
    problem, classes, run
        What is planned, its device classes, and the run that counts the work.
    bound
        A lower bound on every plan, or None.

    Attributes
    ----------
    incumbent
        The best evaluated plan, with the bound.
    best_candidate
        The candidate that the incumbent was made of; None if the incumbent is a baseline.
    best_by_stages
        The best candidate with each number of stages: the elite pool of the search.
    best_on_all
        The best candidate that uses all devices.
    visits
        By number of stages, how often the neighbourhood of the best candidate was explored.
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
        classes: DeviceClasses,
        run: SearchRun,
        bound: StepBound | None,
    ) -> None:
        self.problem, self.classes, self.run = problem, classes, run
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
        self.best_by_stages: dict[int, CandidatePlan] = {}
        self.visits: dict[int, int] = {}
        self.tried: set[Layout] = set()
        self.first_error: ProblemError | None = None

    def offer_baseline(self, baseline: TrainingPlan) -> None:
        """Offer a baseline as incumbent."""
        plan = with_cost(with_aggregators(self.problem, baseline), self.problem.request)
        value = self.objective.of_plan(plan)
        if not self._is_below_bound(value):
            self.incumbent.offer(value, plan)

    def try_layout(self, layout: Layout, *, always: bool = False) -> CandidatePlan | None:
        """The best candidate of a layout; None if it was tried before or memory is too small.

        Other pairs of devices are tried if the first candidate is promising, or ``always``.
        """
        if layout in self.tried:
            return None
        self.tried.add(layout)
        try:
            context = LayoutContext.of(self.problem, self.classes, layout)
            first, *others = context.spreads
            best = self.build_once(context, spread=first)
        except ProblemError as error:
            self.first_error = self.first_error or error
            return None
        for spread in others:
            if self._is_promising(best, math.inf if always else PROMISING_RATIO):
                other = self.build_once(context, spread=spread)
                best = min(best, other, key=lambda candidate: candidate.value)
        if self._is_promising(best, PROMISING_RATIO):
            other = self.build_once(
                context, slowdown=best.slowdown * best.lateness, spread=best.spread
            )
            best = min(best, other, key=lambda candidate: candidate.value)
        on_all = self.best_on_all
        if self.num_without_stage(best) == 0 and (on_all is None or best.value < on_all.value):
            self.best_on_all = best
        stages = len(layout.layers)
        if stages not in self.best_by_stages or best.value < self.best_by_stages[stages].value:
            self.best_by_stages[stages], self.visits[stages] = best, 0
        return best

    def _is_promising(self, candidate: CandidatePlan, max_ratio: float) -> bool:
        """Whether the value is within a factor of the best one, and the limit not reached."""
        values = [known.value for known in self.best_by_stages.values()]
        best_value = min([self.incumbent.objective, *values])
        return candidate.value <= max_ratio * best_value and self.run.check() is None

    def build_once(
        self,
        context: LayoutContext,
        max_in_flight_ratio: float = math.inf,
        slowdown: Floats | None = None,
        spread: PairSpread = PairSpread.EVEN,
    ) -> CandidatePlan:
        """`LayoutContext.build`, counted as work."""
        candidate = context.build(max_in_flight_ratio, slowdown, spread)
        self.spend(candidate, 1)
        return candidate

    def evaluate(self, candidate: CandidatePlan) -> float:
        """Simulate a candidate in full and offer it as incumbent; returns its value."""
        used_layout = candidate.without_idle() if self.is_stochastic else candidate.layout
        if used_layout != candidate.layout:
            # with stochastic wiring every device needs an initial share of the microbatches
            self.first_error = self.first_error or ProblemError(IDLE_DEVICES)
            smaller = self.try_layout(used_layout, always=True)
            return math.inf if smaller is None else self.evaluate(smaller.with_next_step())
        plan = with_cost(with_aggregators(self.problem, candidate.plan()), self.problem.request)
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
        stages = len(candidate.layout.layers)
        known = self.best_by_stages[stages]
        updated = replace(candidate, seconds=max(seconds, candidate.seconds), two_steps=True)
        if known.layout == candidate.layout and (
            not known.two_steps or updated.value < known.value
        ):
            self.best_by_stages[stages] = updated

    def spend(self, candidate: CandidatePlan, passes: int) -> None:
        """Count the work of simulating ``passes`` steps of a candidate."""
        self.run.spend(
            (passes * candidate.operations + OPERATIONS_PER_CANDIDATE) / OPERATIONS_PER_EFFORT
        )

    def rebuilt(
        self, best: CandidatePlan, layout: Layout, request: PlanRequest
    ) -> CandidatePlan | None:
        """The best candidate with one decision changed; None if memory is too small."""
        try:
            variant = replace(self.problem, request=request)
            context = LayoutContext.of(variant, self.classes, layout)
            return context.build(slowdown=best.slowdown, spread=best.spread).with_next_step()
        except ProblemError:
            return None

    def may_recheck(self, candidate: CandidatePlan) -> bool:
        """Whether variants of this candidate are small enough to be built after the search."""
        max_operations = MAX_RECHECK_OPERATIONS // (10 if self.run.paced_by_time else 1)
        return candidate.operations <= max_operations and self.run.reason != INTERRUPTED

    def num_without_stage(self, candidate: CandidatePlan) -> int:
        """Devices that can compute but hold no stage."""
        return int(self.classes.size.sum()) - len(candidate.context.problem.cluster)

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
