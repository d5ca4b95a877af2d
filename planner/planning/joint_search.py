"""Joint search over devices, stages, layers, groups, paths and averaging.

Each round anneals layouts on an estimate of their step time, turns the best into candidates with
paths and simulates one step of each, and then simulates consecutive steps of the best candidates.
Rounds start from different layouts and repeat until the limit; the first one already gives a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.planning.aggregators import with_aggregators
from planner.planning.baselines.rank_order import rank_layouts, region_order
from planner.planning.bounds import StepBound
from planner.planning.cost import ObjectiveFunction, with_cost
from planner.planning.device_classes import DeviceClasses, Floats
from planner.planning.device_flow import Spread
from planner.planning.flow_plan import CandidatePlan, LayoutContext
from planner.planning.layout import Layout
from planner.planning.layout_flow import pipeline_s
from planner.planning.layout_kernel import IN_FLIGHT
from planner.planning.layout_search import Constraints, InitialLayout, LayoutSearch, ScoredLayout
from planner.planning.nothing_fits import nothing_fits
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest, RequestedWiring, ShareRule
from planner.planning.shape import layers_of, microbatches_of
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
"""Of the layout search in one round, at most, and after a limit within which nothing was found."""
SEARCHING = 0.3
"""Share of the limit for the layout search of a round, at most."""
MOST_ASKED_AGAIN, LAST_LOOKS = 60_000, 3
"""Operations of a step up to which the best layout is drafted with one decision otherwise, and how
often runners-up that are better take its place."""
IDLE_ROUNDS = 3
"""One after the other without a new layout: there are few."""
OPERATIONS_PER_EFFORT, MAKING = 800_000, 25_000
"""That the simulator serves in a unit of effort, and as many as a draft costs beside them."""
PASSES = 5
"""Of a plan's pricing: one from rest, and steps that chain."""
DRAFTS, CHAINED, PRICED = 6, 8, 2
"""Layouts of a round that are drafted; drafts that are chained with a next step, and those that are
priced, after these and after changes."""
RANKS = 6
"""Layouts of ranks in order, as trainers have them, that get better layers. The best of these is
drafted where its estimate is good, and the best as trainers have it whatever the estimate."""
MAX_DRAFT_RATIO = 1.08
"""A draft no farther above the best is made over other pairs of devices too, and once more by what
its devices took."""
CHANGES, TRIED, IMPROVED = 600, 12, 6
"""Changes of a good draft's layout that are estimated, those that are drafted, and how often in a
round."""
PROPORTIONS, PERTURBATION_SIGMA = 4, 0.04
"""Other parts for a good draft's places that are tried, and by how much they differ."""
CHANGE_TOLERANCE, TOLERANCE_PER_VISIT = 1.04, 0.01
"""Of a change's estimate over that of what it changes; more each time that one was changed."""
VISIT_PENALTY, EXHAUSTED = 0.002, 3
"""By how much worse another draft may be and is changed first, each time one was changed; as often
counts a time that found nothing to try."""
MOST_IN_FLIGHT = (2.0, 3.0)
"""That the best plan is also made with."""
LEAST_IN_FLIGHT = 1.0
"""Multiple of delay over period that keeps every stage busy where nothing is late (Little)."""
LARGER = 0.5
"""Share of the limit for layouts with a baseline's larger microbatches."""
IDLE = (
    "wiring 'stochastic': every plan found leaves devices without microbatches; give more "
    "samples a step, or let wiring be 'flow'"
)


def search_jointly(
    problem: PlanningProblem,
    stop: StoppingCriterion,
    bound: StepBound | None = None,
    baselines: Sequence[TrainingPlan] = (),
) -> Result[TrainingPlan]:
    """The fastest plan found with every decision open that the request leaves open."""
    search = _Search(problem, stop, bound, baselines)
    found = search.result()
    samples = found.plan.workload.microbatch_samples if found.plan is not None else None
    if samples in (None, problem.workload.microbatch_samples) or search.run.reason not in (
        *(None, "effort spent", "iteration limit"),
    ):
        return found
    # a baseline with larger microbatches is the best: layouts with these are searched, too
    workload = problem.workload.replace(microbatch_samples=samples)
    larger = replace(problem, workload=workload)
    more = _Search(larger, stop.portion(LARGER), bound, baselines).result()
    return min(found, more, key=lambda one: one.objective or math.inf)


def _given(problem: PlanningProblem, devices: int) -> Constraints:
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
        *parts, request.sync_every, request.delayed, two_frequency, ObjectiveFunction.of(request)
    )


class _Search:
    """Rounds of layouts, drafts and prices, and the best plan so far."""

    def __init__(
        self,
        problem: PlanningProblem,
        stop: StoppingCriterion,
        bound: StepBound | None,
        baselines: Sequence[TrainingPlan] = (),
    ) -> None:
        self.problem, self.stop = problem, stop
        self.merit = ObjectiveFunction.of(problem.request)
        prices = problem.request.prices if self.merit.by_cost else None
        by_region = problem.request.within is not None
        self.places = DeviceClasses.of(problem.cluster, prices, by_region=by_region)
        wire = Codec(problem.request.codec).wire_ratio
        given = _given(problem, int(self.places.size.sum()))
        self.random = np.random.default_rng((problem.seed, 1))
        self.layouts = LayoutSearch(self.places, problem.workload, wire, problem.seed, given)
        # compiled before the simulator starts
        self.trials_per_s = self.layouts.trials_in(1.0)
        self.run = started(stop, self.layouts.trials_per_effort)
        self.best: Incumbent[TrainingPlan] = Incumbent(
            self.run, problem.cluster, method="layouts, flow", seed=problem.seed
        )
        if bound is not None:
            self.best.raise_bound(*bound)
        # a mean over many steps, which the simulator puts together from some
        calibration = problem.request.calibration
        self.lasting = problem.request.sync_every > 1 or self.merit.by_cost
        self.lasting |= calibration is not None and calibration.updates
        self.routed = problem.request.wiring == RequestedWiring.STOCHASTIC
        self.refuted: list[tuple[float, TrainingPlan]] = []
        self.leader: CandidatePlan | None = None
        self.everybody: CandidatePlan | None = None
        self.unpriced: list[CandidatePlan] = []
        self.parents: dict[int, CandidatePlan] = {}
        self.visits: dict[int, int] = {}
        self.drafted: set[Layout] = set()
        self.refused: ProblemError | None = None
        self.baselines = [one for one in baselines if self._allowed(one)]

    def result(self) -> Result[TrainingPlan]:
        """Rounds until the limit."""
        trials = min(ROUND_TRIALS, self._trials())
        idle = 0
        with self.run.interruptible():
            self._offer_baselines()
            while idle < IDLE_ROUNDS:
                known = len(self.drafted)
                self._round(trials)
                idle = 0 if len(self.drafted) > known else idle + 1
                if self.run.check() is not None:
                    break
        alternatives: tuple[Alternative, ...] = ()
        with self.run.interruptible():
            if self.best.plan is None and not self.refuted:
                self._price_anything()
            elif not self.run.paced_by_time and self.run.reason != "interrupted":
                self._price_last()
            self._leave_out_idle()
            alternatives = tuple(self._alternatives())
        if self.best.plan is None:
            if not self.refuted:
                raise KeyboardInterrupt  # before anything that fits was found
            self._take_refuted()
        result = self.best.result(exhausted="all layouts that were found")
        assert result.plan is not None
        return replace(result, plan=result.plan.replace(alternatives=alternatives))

    def _allowed(self, plan: TrainingPlan) -> bool:
        """Whether a baseline has what the request fixes."""
        request, stages = self.problem.request, len(plan.stage_layers)
        layers, flight = self.layouts.given.layers, request.in_flight
        return (
            (request.fixed_stages is None or request.fixed_stages == stages)
            and (layers is None or tuple(layers) == tuple(plan.stage_layers))
            and (flight is None or max(plan.schedules[0].most_live()) <= flight)
            and (request.recompute is None or request.recomputing(stages) == plan.recompute)
        )

    def _offer_baselines(self) -> None:
        """Baselines are candidates like all others, priced on the same clock."""
        for one in self.baselines:
            plan = with_cost(with_aggregators(self.problem, one), self.problem.request)
            value = self.merit.of_plan(plan)
            if not self._refutes(value):
                self.best.offer(value, plan)

    def _baseline_layouts(self) -> list[Layout]:
        """Who holds what in the baselines, so that the search goes on from them."""
        place_of = {d: c for c, members in enumerate(self.places.members) for d in members}
        ids = self.problem.cluster.network.index_of
        layouts = []
        for plan in self.baselines:
            names, counts = plan.cluster.network.ids, []
            for group in plan.assignment.groups:
                row = [0] * len(self.places)
                for d in group:
                    row[place_of[ids(names[d])]] += 1
                counts.append(row)
            cuts = [0, *(stop for _, stop in plan.stage_layers)]
            layouts.append(Layout.of(counts, cuts, list(plan.recompute)))
        return list(dict.fromkeys(layouts))

    def _refutes(self, value: float) -> bool:
        """Whether many steps cannot be what the simulator says of the few it looks at.

        Without averaging, devices that are ahead leave their links to those behind; not for long.
        """
        bound = self.best.bound
        return self.lasting and bound is not None and value < bound

    def _take_refuted(self) -> None:
        """Where nothing else was found, the best of what the bound speaks against, without it."""
        cluster, seed = self.problem.cluster, self.problem.seed
        self.best = Incumbent(self.run, cluster, method="layouts, flow", seed=seed)
        for value, plan in self.refuted:
            self.best.offer(value, plan)

    def _alternatives(self) -> Iterator[Alternative]:
        """Runners-up among the drafts, and drafts of the best layout with one thing otherwise."""
        rivals = self._rivals()
        best, request = self.leader, self.problem.request
        for words, draft in rivals:
            yield self._alternative(words, draft.value)
        if best is None or not self._asks_again(best):
            return
        on = any(best.layout.recompute)
        if request.recompute is None:
            other = replace(best.layout, recompute=(not on,) * len(best.layout.layers))
            words = ("recomputation", "none") if on else ("no recomputation", "on all stages")
            found = self._drafted_again(best, other, request)
            value = None if found is None else found.value
            taken = self.best.objective
            if found is not None and found.value < taken * (1 - 1e-9):
                value = self._price(found)
                if value < taken * (1 - 1e-9):
                    words, value = (
                        (
                            ("recomputation" if not on else "no recomputation"),
                            "on all stages" if on else "none",
                        ),
                        taken,
                    )
                    best = self.leader or best
            yield self._alternative(words, value)
        if request.averaging is None:
            yield from self._averaging_otherwise(best)

    def _alternative(self, words: tuple[str, str], value: float | None) -> Alternative:
        why = "memory does not hold it" if value is None else ""
        return Alternative(*words, value, "$" if self.merit.by_cost else "s", why)

    def _averaging_otherwise(self, best: CandidatePlan) -> Iterator[Alternative]:
        """One round with equal shares instead, which is taken if it turns out to be better.

        Shares are chosen for averaging by itself; beside messages others may be faster.
        """
        plan, taken = self.best.plan, self.best.objective
        levels = (
            plan is not None
            and any(map(is_hierarchical, plan.averaging))
            and not plan.two_frequency
        )
        words = (
            ("two levels", "one round of equal shares") if levels else ("adaptive shares", "equal")
        )
        equal = self.problem.request.replace(averaging=ShareRule.EQUAL)
        draft = self._drafted_again(best, best.layout, equal)
        if draft is None:
            return
        value = draft.value
        if value < taken * (1 - 1e-9):
            value = self._price(draft)
            if value < taken * (1 - 1e-9):
                words, value = ("equal shares", words[0]), taken
        yield self._alternative(words, value)

    def _rivals(self) -> list[tuple[tuple[str, str], CandidatePlan]]:
        """The best draft with another number of stages, and with a stage for everybody.

        One that turns out to be better than the best plan takes its place.
        """
        rivals: list[tuple[tuple[str, str], CandidatePlan]] = []
        for _ in range(LAST_LOOKS):
            best = self.leader
            if best is None:
                return []
            mine = len(best.layout.layers)
            others = [draft for k, draft in self.parents.items() if k != mine]
            rivals = []
            if others:
                one = min(others, key=lambda draft: draft.value)
                rivals.append(((counted(mine, "stage"), str(len(one.layout.layers))), one))
            if self._idle(best) > 0 and self.everybody is not None:
                rivals.append(((f"{self._idle(best)} without a stage", "none"), self.everybody))
            if not self._asks_again(best):
                return rivals
            rivals = [(words, draft.with_next_step()) for words, draft in rivals]
            for _, draft in rivals:
                self._update_parent(draft, draft.seconds)
            better = [d for _, d in rivals if d.value < self.best.objective * (1 - 1e-9)]
            for draft in better:
                self._price(draft)
            if self.leader is best:
                break
        return rivals

    def _drafted_again(
        self, best: CandidatePlan, layout: Layout, request: PlanRequest
    ) -> CandidatePlan | None:
        """The best with one thing otherwise, spread like it; None where memory does not hold it."""
        try:
            asked = replace(self.problem, request=request)
            prepared = LayoutContext.of(asked, self.places, layout, IN_FLIGHT)
            return prepared.draft(slower=best.slower, spread=best.spread).with_next_step()
        except ProblemError:
            return None

    def _asks_again(self, draft: CandidatePlan) -> bool:
        """Whether drafts like this one may be made after the search."""
        most = MOST_ASKED_AGAIN // (10 if self.run.paced_by_time else 1)
        return draft.operations <= most and self.run.reason != "interrupted"

    def _idle(self, draft: CandidatePlan) -> int:
        """Devices that could compute and hold no stage."""
        return int(self.places.size.sum()) - len(draft.prepared.problem.cluster)

    def _trials(self) -> float:
        """That the limit allows the layout search."""
        if self.run.paced_by_time:
            return SEARCHING * self.trials_per_s * self.stop.seconds()
        return SEARCHING * self.run.most_iterations

    def _round(self, trials: float) -> None:
        """The best layouts from new starts, drafted and priced; then changes of good ones."""
        self.layouts.found.clear()
        self.layouts.run(self.run, trials)
        hopeful = [one.layout for one in self.layouts.ranked(first=InitialLayout.KEPT)]
        ranks = []
        if not self.drafted:
            ranks = list(dict.fromkeys([*self._baseline_layouts(), *self._by_rank()]))
        hopeful = [one for one in hopeful if one not in ranks]
        drafts: list[CandidatePlan] = []
        first = [*hopeful[:1], *ranks]
        if self.run.check() is not None:
            # one draft is all that there is time for
            first.sort(key=lambda layout: self.layouts.estimated(layout).value)
        for layout in [*first, *hopeful[1:]]:
            if len(drafts) == DRAFTS + len(ranks) or self._out_of_budget(drafts):
                break
            draft = self._draft(layout, always=layout in ranks)
            if draft is not None:
                drafts.append(draft)
        drafts += self._undrafted_best(drafts, ranks)
        self._price_best(drafts)
        for _ in range(IMPROVED):
            if not self.parents or self.run.check() is not None:
                break
            parent = self._parent()
            self._price_best([*self._changed(parent), *self._reproportioned(parent)])

    def _undrafted_best(
        self, drafts: Sequence[CandidatePlan], ranks: Sequence[Layout]
    ) -> list[CandidatePlan]:
        """What is estimated by far the best, where the limit came before it was drafted."""
        every = [*self.layouts.ranked()[:1], *map(self.layouts.estimated, ranks)]
        known = [self.layouts.estimated(one.layout).value for one in drafts]
        if not every or self.run.reason == "interrupted":
            return []
        best = min(every, key=lambda one: one.value)
        if best.value * MAX_DRAFT_RATIO >= min(known, default=math.inf):
            return []
        draft = self._draft(best.layout)
        return [] if draft is None else [draft]

    def _by_rank(self) -> list[Layout]:
        """Of what ranks in order would do, the best as estimated; none where nothing fits."""
        numbers, given = self.layouts.numbers, self.layouts.given.layers
        layers = {s: given or self.problem.workload.even_split(s) for s in numbers}
        network = self.problem.cluster.network
        order = region_order(network)
        first = self._ranked(order, layers)
        better = [self.layouts.with_better_layers(one.layout) for one in first]
        better.sort(key=lambda one: one.value)
        least = min((one.value for one in self.layouts.ranked()), default=math.inf)
        better = [one for one in better[:1] if one.value <= MAX_DRAFT_RATIO * least]
        least = min([least, *(one.value for one in (*better, *first[:1]))])
        alone = self._in_one_region(order, layers, least)
        return list(dict.fromkeys(one.layout for one in (*alone, *better, *first[:1])))

    def _ranked(
        self, ranks: Sequence[int], layers: Mapping[int, Sequence[tuple[int, int]]]
    ) -> list[ScoredLayout]:
        """The best of ranks in this order, as estimated."""
        found = map(self.layouts.estimated, rank_layouts(ranks, self.places, layers))
        fits = [one for one in found if one.value < math.inf]
        return sorted(fits, key=lambda one: one.value)[:RANKS]

    def _in_one_region(
        self,
        order: Sequence[int],
        layers: Mapping[int, Sequence[tuple[int, int]]],
        least: float,
    ) -> list[ScoredLayout]:
        """The best where one region or device works alone, if all others are estimated slower."""
        regions = self.problem.cluster.network.regions
        names = dict.fromkeys(regions) if len(set(regions)) > 1 else {}
        parts = [[d for d in order if regions[d] == name] for name in names]
        parts += [[members[0]] for members in self.places.members]
        first = [
            one
            for ranks in parts
            for one in self._ranked(ranks, layers)[:1]
            if one.value <= MAX_DRAFT_RATIO * least
        ]
        better = [self.layouts.with_better_layers(one.layout) for one in first]
        better.sort(key=lambda one: one.value)
        return [one for one in better[:1] if one.value < least]

    def _parent(self) -> CandidatePlan:
        """Of the best draft for each number of stages, the best that was not changed too often."""
        stages = min(
            self.parents,
            key=lambda k: self.parents[k].value * (1 + VISIT_PENALTY * self.visits[k]),
        )
        self.visits[stages] += 1
        return self.parents[stages]

    def _changed(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """Drafts of layouts that are changes of another's, and no worse by much as estimated."""
        drafts: list[CandidatePlan] = []
        slack = CHANGE_TOLERANCE + TOLERANCE_PER_VISIT * self.visits[len(parent.layout.layers)]
        most = slack * self.layouts.estimated(parent.layout).value
        near = self.layouts.near(parent.layout, CHANGES)
        hopeful = [one.layout for one in near if one.value <= most]
        for layout in [*self._other_recomputation(parent.layout), *hopeful]:
            if len(drafts) == TRIED or self.run.check() is not None:
                break
            draft = self._draft(layout)
            if draft is not None:
                drafts.append(draft)
        if not drafts:
            self.visits[len(parent.layout.layers)] += EXHAUSTED
        return drafts

    def _reproportioned(self, parent: CandidatePlan) -> list[CandidatePlan]:
        """The same layout with other parts for its places, from one that is better to the next."""
        best, better = parent, []
        for k in range(PROPORTIONS):
            if self.run.check() is not None:
                break
            by_chance = np.exp(self.random.normal(0.0, PERTURBATION_SIGMA, len(best.slower)))
            slower = best.slower * by_chance * (best.late if k == 0 else 1.0)
            most = MOST_IN_FLIGHT[-1] if k % 2 else math.inf
            draft = self._make_draft(best.prepared, most, slower, best.spread)
            if draft.value < best.value and best.chained:
                draft = draft.with_next_step()
                self._spend(draft, 2)
            if draft.value < best.value:
                best = draft
                better.append(draft)
        if better:
            self.parents[len(best.layout.layers)] = best
        return better

    def _other_recomputation(self, layout: Layout) -> list[Layout]:
        """On no stage, on one less or on all, where memory makes the flow no slower by much."""
        on = [j for j, does in enumerate(layout.recompute) if does]
        if self.problem.request.recompute is not None or not on:
            return []
        stages = range(len(layout.recompute))
        fewer = [tuple(k in on and k != j for k in stages) for j in on]
        kinds = dict.fromkeys([(False,) * len(stages), *fewer, (True,) * len(stages)])
        other = [replace(layout, recompute=flags) for flags in kinds]
        other = [one for one in other if one not in self.drafted]
        if not other:
            return []
        most = CHANGE_TOLERANCE * self._pipeline_s(layout, IN_FLIGHT)
        # where memory is short, fewer microbatches in flight than usual may do
        return [one for one in other if self._pipeline_s(one, LEAST_IN_FLIGHT) <= most]

    def _pipeline_s(self, layout: Layout, in_flight: float) -> float:
        return pipeline_s(self.problem, self.places, layout, in_flight)

    def _draft(self, layout: Layout, *, always: bool = False) -> CandidatePlan | None:
        """The best of some; None where there was one before or memory does not hold it.

        Over other pairs only where the first is promising, or ``always``.
        """
        if layout in self.drafted:
            return None
        self.drafted.add(layout)
        try:
            prepared = LayoutContext.of(self.problem, self.places, layout, IN_FLIGHT)
            first, *others = prepared.spreads
            best = self._make_draft(prepared, spread=first)
        except ProblemError as error:
            self.refused = self.refused or error
            return None
        for spread in others:
            if self._is_promising(best, math.inf if always else MAX_DRAFT_RATIO):
                made = self._make_draft(prepared, spread=spread)
                best = min(best, made, key=lambda draft: draft.value)
        if self._is_promising(best, MAX_DRAFT_RATIO):
            made = self._make_draft(prepared, slower=best.slower * best.late, spread=best.spread)
            best = min(best, made, key=lambda draft: draft.value)
        known = self.everybody
        if self._idle(best) == 0 and (known is None or best.value < known.value):
            self.everybody = best
        stages = len(layout.layers)
        if stages not in self.parents or best.value < self.parents[stages].value:
            self.parents[stages], self.visits[stages] = best, 0
        return best

    def _is_promising(self, draft: CandidatePlan, most: float) -> bool:
        """Whether to make it another way too: it is at most so many times as long as the best."""
        best_s = min([self.best.objective, *(one.value for one in self.parents.values())])
        return draft.value <= most * best_s and self.run.check() is None

    def _make_draft(
        self,
        prepared: LayoutContext,
        most: float = math.inf,
        slower: Floats | None = None,
        spread: Spread = Spread.EVEN,
    ) -> CandidatePlan:
        draft = prepared.draft(most, slower, spread)
        self._spend(draft, 1)
        return draft

    def _price_best(self, drafts: list[CandidatePlan]) -> None:
        """The best of all drafts so far that may be better than the best plan."""
        hopeful = [*self.unpriced, *drafts]
        self.unpriced = [one for one in hopeful if one.value < self.best.objective]
        prices, looks = PRICED, CHAINED
        while prices > 0 and looks > 0:
            self.unpriced.sort(key=lambda draft: draft.value)
            better = self.unpriced and self.unpriced[0].value < self.best.objective
            if not better or (self.best.plan is not None and self.run.check() is not None):
                break
            draft = self.unpriced.pop(0)
            if draft.chained:
                prices -= 1
                self._price(draft)
                if self.leader is draft:
                    self.unpriced += self._variants(draft)
            else:
                looks -= 1
                draft = draft.with_next_step()
                self._spend(draft, 2)
                self.unpriced.append(draft)
                self._update_parent(draft, draft.seconds)

    def _price_last(self) -> None:
        """The best that was drafted before the effort was spent."""
        waiting = [one for one in self.unpriced if one.value < self.best.objective]
        if waiting:
            draft = min(waiting, key=lambda one: one.value).with_next_step()
            if draft.value < self.best.objective:
                self._price(draft)

    def _leave_out_idle(self) -> None:
        """Devices of the best plan that got no microbatches hold no stage, if that is better.

        They average with their stage all the same.
        """
        best = self.leader
        if best is None or not self._asks_again(best):
            return
        layout = best.without_idle()
        if layout == best.layout:
            return
        draft = self._draft(layout, always=True)
        if draft is not None and draft.layout == layout:
            draft = draft.with_next_step()
            if draft.value < self.best.objective:
                self._price(draft)

    def _variants(self, draft: CandidatePlan) -> Iterator[CandidatePlan]:
        """The same layout with less in flight, and spread anew by what its devices took."""
        for most in (*MOST_IN_FLIGHT, math.inf):
            if self.run.check() is not None:
                break
            slower = draft.slower * draft.late if most == math.inf else draft.slower
            yield self._make_draft(draft.prepared, most, slower, draft.spread)

    def _out_of_budget(self, drafts: list[CandidatePlan]) -> bool:
        return bool(drafts) and self.run.check() is not None

    def _price(self, draft: CandidatePlan) -> float:
        """Seconds of its step in the simulator, or dollars; the best plan so far is kept."""
        busy = draft.without_idle() if self.routed else draft.layout
        if busy != draft.layout:
            # who chooses paths begins with a part for each device
            self.refused = self.refused or ProblemError(IDLE)
            again = self._draft(busy, always=True)
            return math.inf if again is None else self._price(again.with_next_step())
        plan = with_cost(with_aggregators(self.problem, draft.plan()), self.problem.request)
        value = self.merit.of_plan(plan)
        if self._refutes(value):
            self.refuted.append((value, plan))
        elif self.best.offer(value, plan):
            self.leader = draft
        self._update_parent(draft, plan.predicted.step_s)
        # with aggregators it is priced twice
        self._spend(draft, PASSES * (2 if self.problem.aggregators else 1))
        return value

    def _update_parent(self, draft: CandidatePlan, seconds: float) -> None:
        """Averaging and pipelines slow each other down."""
        known = self.parents[len(draft.layout.layers)]
        later = replace(draft, seconds=max(seconds, draft.seconds), chained=True)
        if known.layout == draft.layout and (not known.chained or later.value < known.value):
            self.parents[len(draft.layout.layers)] = later

    def _spend(self, draft: CandidatePlan, passes: int) -> None:
        self.run.spend((passes * draft.operations + MAKING) / OPERATIONS_PER_EFFORT)

    def _price_anything(self) -> None:
        """After an interruption, or if nothing fits: the best layout that there is."""
        if self._price_first():
            return
        if self.run.reason == "time limit":
            # there was no time to find a layout that fits
            self.layouts.run(MaxIterations(int(LATE_TRIALS)).start(), LATE_TRIALS)
            if self._price_first():
                return
        if self.refused is None and self.run.reason == "interrupted":
            raise KeyboardInterrupt  # nobody knows yet what fits
        raise self.refused or ProblemError(nothing_fits(self.layouts))

    def _price_first(self) -> bool:
        """Price the best layout that fits; whether there is one."""
        for one in self.layouts.ranked():
            draft = self._draft(one.layout)
            if draft is not None:
                self._price(draft)
                if self.best.plan is not None or self.refuted:
                    return True
        return False
