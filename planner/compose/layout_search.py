"""Search over layouts by their estimated step: annealing, first for every number of stages."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from planner.compose.layout import Layout
from planner.compose.layout_kernel import (
    Links,
    Model,
    Scratch,
    State,
    anneal,
    estimate_s,
)
from planner.compose.places import Floats, Places
from planner.search.stop import StopRun
from planner.workload.costs import stage_costs
from planner.workload.workload import Workload

MOST_STAGES = 24
"""That are tried one number after the other."""
CHUNK = 2000
"""Trials between two looks at the stopping rule."""
TRIALS_PER_EFFORT = 25_000.0
"""Trials with eight places in a unit of effort; more places cost more."""
WARM, COLD = 0.05, 0.002
"""Temperatures, relative to the estimate, of the search at a fixed number of stages."""
WARM_AGAIN, COLD_AGAIN = 0.02, 0.0005
FIRST = 0.4
"""Share of the trials with fixed numbers of stages; the best of them get the rest."""
AGAIN = 4
"""How many of them."""


@dataclass(frozen=True)
class Estimated:
    """A layout and its estimated step in seconds."""

    seconds: float
    layout: Layout


def model_of(workload: Workload) -> Model:
    """A workload as the compiled search reads it.

    Parameters
    ----------
    workload
        What is trained.
    """
    count = len(workload.layers)
    upto = [stage_costs(workload, 0, stop) for stop in range(1, count + 1)]
    whole = stage_costs(workload, 0, count, with_head=True)
    samples = workload.microbatch_samples
    parameters = np.cumsum(
        [workload.stem.parameters, *(layer.parameters for layer in workload.layers)]
    ).astype(float)
    parameters[0] = 0.0
    return Model(
        np.array([0.0, *(costs.forward_flops for costs in upto)]),
        parameters,
        np.array([0.0, *(costs.saved_bytes for costs in upto)]),
        np.array([layer.output_bytes * samples for layer in workload.layers]),
        np.array([workload.held_bytes(k) * samples for k in range(count)]),
        whole.head_flops,
        float(workload.head.parameters),
        whole.scratch_bytes,
        workload.gradient_bytes_per_parameter,
        workload.state_bytes_per_parameter,
        workload.batch_samples / samples,
    )


class LayoutSearch:
    """Annealing of layouts; keeps the best of every number of stages.

    Parameters
    ----------
    places, workload
        Where and what to train.
    wire_ratio
        Bytes of gradients on the wire over those of the workload.
    seed
        Of every random choice.

    Attributes
    ----------
    found
        By number of stages, the best layout so far.
    """

    def __init__(
        self, places: Places, workload: Workload, wire_ratio: float = 1.0, seed: int = 0
    ) -> None:
        model = model_of(workload)
        self.places = places
        self.model = model._replace(gradient_bytes=model.gradient_bytes * wire_ratio)
        order = np.argsort(places.there_and_back_s.ravel(), kind="stable").astype(np.int64)
        self.links = Links(
            places.size,
            places.there_and_back_s,
            places.bandwidth,
            places.slower,
            places.capacity,
            places.flops,
            places.memory_bytes,
            order,
        )
        self.layers = len(workload.layers)
        self.most = min(self.layers, int(places.size.sum()))
        self.found: dict[int, Estimated] = {}
        self._numpy = np.random.default_rng(seed)
        self._random = self._numpy.integers(0, 1 << 63, 1).astype(np.uint64)
        self._tried, self._best = self._empty(), self._empty()
        width = (self.most, len(places))
        self._scratch = Scratch(
            np.zeros(width),
            np.zeros((2, len(places))),
            *(np.zeros(self.most) for _ in range(3)),
        )

    @property
    def trials_per_effort(self) -> float:
        """How many trials make a unit of effort."""
        return TRIALS_PER_EFFORT * min(1.0, 64 / len(self.places) ** 2)

    def ranked(self) -> list[Estimated]:
        """The best of every number of stages, fastest first."""
        return sorted(self.found.values(), key=lambda one: one.seconds)

    def run(self, run: StopRun, trials: float) -> None:
        """Search until so many trials are spent, or the rule says stop.

        Parameters
        ----------
        run
            The stopping rule at work; a step is a trial.
        trials
            As far as seconds alone decide, what they may be is measured.
        """
        with run.interruptible():
            numbers = range(1, min(self.most, MOST_STAGES) + 1)
            # few stages are searched quickly; all get the same number of trials
            each = max(1, int(FIRST * trials / len(numbers)))
            for stages in numbers:
                if run.check() is not None and self.found:
                    return
                self._anneal(run, self._start(stages), each, WARM, COLD, fixed=True)
            best = self.ranked()[:AGAIN]
            for one in best:
                if run.check() is not None:
                    return
                more = max(1, int((1 - FIRST) * trials / len(best)))
                state = self._state(one.layout)
                self._anneal(run, state, more, WARM_AGAIN, COLD_AGAIN, fixed=False)

    def trials_in(self, seconds: float) -> float:
        """About how many trials take so long on this machine, compiling left aside."""
        state = self._start(min(4, self.most))
        self._round(state, self._value(state), 1, WARM, COLD, True)
        began = time.perf_counter()
        self._round(state, self._value(state), CHUNK, WARM, COLD, True)
        return CHUNK * seconds / max(time.perf_counter() - began, 1e-9)

    def estimated_s(self, layout: Layout) -> float:
        """The estimate of a layout; infinite where memory does not hold it."""
        return float(estimate_s(self.model, self.links, self._state(layout), self._scratch))

    def _anneal(
        self, run: StopRun, state: State, trials: int, warm: float, cold: float, *, fixed: bool
    ) -> None:
        """From warm to cold in chunks, so that the stopping rule is heard in between."""
        value = self._value(state)
        chunks = max(1, math.ceil(trials / CHUNK))
        for k in range(chunks):
            begin, end = (warm * (cold / warm) ** (part / chunks) for part in (k, k + 1))
            count = min(CHUNK, trials - k * CHUNK)
            self._round(state, value, count, begin, end, fixed)
            if run.update(count) is not None:
                break
        self._keep(self._best, float(value[1]))

    def _round(
        self, state: State, value: Floats, count: int, warm: float, cold: float, fixed: bool
    ) -> None:
        anneal(
            self.model,
            self.links,
            state,
            self._tried,
            self._best,
            self._scratch,
            self._random,
            value,
            count,
            warm,
            cold,
            fixed,
        )

    def _value(self, state: State) -> Floats:
        """The estimate of a state, which is the best so far."""
        seconds = estimate_s(self.model, self.links, state, self._scratch)
        for name in State._fields:
            getattr(self._best, name)[:] = getattr(state, name)
        # where memory does not hold the start, anything that it holds is better
        return np.full(2, seconds if seconds < math.inf else 1e300)

    def _keep(self, state: State, seconds: float) -> None:
        stages = int(state.stages[0])
        if seconds >= 1e300 or seconds >= self._seconds_of(stages):
            return
        # which stages recompute is what the estimate chose last; ask again
        again = float(estimate_s(self.model, self.links, state, self._scratch))
        layout = Layout.of(
            state.counts[:stages].tolist(),
            state.cuts[: stages + 1].tolist(),
            state.recompute[:stages].tolist(),
        )
        self.found[stages] = Estimated(again, layout)

    def _seconds_of(self, stages: int) -> float:
        return self.found[stages].seconds if stages in self.found else math.inf

    def _empty(self) -> State:
        most = self.most
        return State(
            np.zeros(1, dtype=np.int64),
            np.zeros((most, len(self.places)), dtype=np.int64),
            np.zeros(most + 1, dtype=np.int64),
            np.zeros(most, dtype=np.bool_),
        )

    def _start(self, stages: int) -> State:
        """All devices, place by place in random order, cut into stages of equal size."""
        state = self._empty()
        state.stages[0] = stages
        places = self._numpy.permutation(len(self.places))
        devices = np.repeat(places, self.places.size[places])
        for k, c in enumerate(devices.tolist()):
            state.counts[k * stages // len(devices), c] += 1
        state.cuts[: stages + 1] = [round(self.layers * j / stages) for j in range(stages + 1)]
        return state

    def _state(self, layout: Layout) -> State:
        state = self._empty()
        stages = len(layout.layers)
        state.stages[0] = stages
        state.counts[:stages] = layout.counts
        state.cuts[: stages + 1] = [0, *(stop for _, stop in layout.layers)]
        state.recompute[:stages] = layout.recompute
        return state
