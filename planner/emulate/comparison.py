"""Comparison of predicted and executed steps, operations and links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from planner.emulate.execution import Operation, Parts, Step, warm
from planner.emulate.prediction import Prediction
from planner.simulator.timeline import Timeline
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan


class Pair(NamedTuple):
    """Predicted and executed value of one quantity, in seconds; None if it was not measured."""

    predicted_s: float
    executed_s: float | None

    @property
    def ratio(self) -> float | None:
        """Executed divided by predicted value."""
        if self.executed_s is None or self.predicted_s <= 0.0:
            return None
        return self.executed_s / self.predicted_s


@dataclass(frozen=True)
class OperationPair:
    """One operation of a step that starts on an idle system; executed times are medians.

    Attributes
    ----------
    start, end
        Seconds since the start of the step.
    """

    schedule: int
    microbatch: int
    device: str
    kind: str
    start: Pair
    end: Pair

    @property
    def late_s(self) -> float:
        """Seconds by which it ended later than predicted."""
        assert self.end.executed_s is not None
        return self.end.executed_s - self.end.predicted_s


@dataclass(frozen=True)
class LinkPair:
    """Messages of an ordered pair of devices in a step that starts on an idle system.

    Attributes
    ----------
    busy
        Seconds in which the link carried them.
    late_s
        Median delay of their arrival relative to the prediction.
    """

    schedule: int
    source: str
    destination: str
    messages: int
    busy: Pair
    late_s: float


@dataclass(frozen=True)
class Comparison:
    """Predicted and executed times of a plan.

    Attributes
    ----------
    operations, links
        Sorted by delay and by busy time, largest first; empty if no step started on an idle system,
        or if devices chose other paths than the predicted ones.
    """

    pipeline: Pair
    averaging: Pair
    step: Pair
    operations: tuple[OperationPair, ...]
    links: tuple[LinkPair, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison with ratios, JSON-ready."""

        def pair(value: Pair) -> dict[str, float | None]:
            return {**value._asdict(), "executed_over_predicted": value.ratio}

        return {
            **{name: pair(getattr(self, name)) for name in ("pipeline", "averaging", "step")},
            "operations": [
                asdict(op) | {"start": pair(op.start), "end": pair(op.end)}
                for op in self.operations
            ],
            "links": [asdict(link) | {"busy": pair(link.busy)} for link in self.links],
        }


def compare(
    plan: TrainingPlan, prediction: Prediction, executed: Parts, idle_steps: Sequence[Step]
) -> Comparison:
    """Compare a prediction with executed steps."""
    parts = prediction.parts
    operations: list[OperationPair] = []
    links: list[LinkPair] = []
    by_schedule: dict[int, list[Step]] = {}
    for step in warm(plan, idle_steps) if plan.wiring is Wiring.FIXED else ():
        by_schedule.setdefault(plan.cycle[step.number % len(plan.cycle)], []).append(step)
    for k, steps in sorted(by_schedule.items()):
        operations += _operations(plan, prediction, k, steps)
        links += _links(plan, prediction, k, steps)
    return Comparison(
        Pair(parts.pipeline_s, executed.pipeline_s),
        Pair(parts.averaging_s, executed.averaging_s),
        Pair(parts.step_s, executed.step_s),
        tuple(sorted(operations, key=lambda op: -op.late_s)),
        tuple(sorted(links, key=lambda link: -link.busy.predicted_s)),
    )


def _operations(
    plan: TrainingPlan, prediction: Prediction, k: int, steps: Sequence[Step]
) -> Iterable[OperationPair]:
    ids = plan.cluster.network.ids
    done: dict[tuple[int, int, str], list[Operation]] = {}
    for step in steps:
        of_step: dict[tuple[int, int, str], Operation] = {}
        for op in step.operations:
            # with two-frequency averaging, steps have different rounds; their times are in `Parts`
            if op.kind != "A" or not plan.two_frequency:
                operation = of_step.get(op[:3], op)
                start_s, end_s = min(operation.start_s, op.start_s), max(operation.end_s, op.end_s)
                of_step[op[:3]] = op._replace(start_s=start_s, end_s=end_s)
        for key, op in of_step.items():
            done.setdefault(key, []).append(op)
    for (b, device, kind), (start_s, end_s) in _expected(prediction.timelines[k]).items():
        if ops := done.get((b, device, kind)):
            yield OperationPair(
                k,
                b,
                ids[device],
                kind,
                Pair(start_s, median(op.start_s for op in ops)),
                Pair(end_s, median(op.end_s for op in ops)),
            )


def _expected(timeline: Timeline) -> dict[tuple[int, int, str], tuple[float, float]]:
    """Return start and end of each operation; a device's averaging rounds count as one."""
    expected: dict[tuple[int, int, str], tuple[float, float]] = {}
    for b, device, kind, start_s, end_s in (*timeline.ops, *timeline.closing):
        times = expected.get((b, device, kind), (start_s, end_s))
        expected[b, device, kind] = min(times[0], start_s), max(times[1], end_s)
    return expected


def _links(
    plan: TrainingPlan, prediction: Prediction, k: int, steps: Sequence[Step]
) -> Iterable[LinkPair]:
    network = plan.cluster.network
    expected: dict[tuple[int, int], dict[tuple[int, str], tuple[float, float]]] = {}
    for t in prediction.timelines[k].transfers:
        messages = expected.setdefault((t.source, t.destination), {})
        messages[t.microbatch, t.kind] = t.end_s, t.left_s - t.leaves_s
    links = [_busy_and_arrivals(step, network.latency_s) for step in steps]
    for (i, j), messages in expected.items():
        busy = median(f[i, j][0] for f in links)
        late = [
            median(f[i, j][1][key] for f in links) - arrival
            for key, (arrival, _) in messages.items()
        ]
        yield LinkPair(
            k,
            network.ids[i],
            network.ids[j],
            len(messages),
            Pair(sum(seconds for _, seconds in messages.values()), busy),
            median(late),
        )


def _busy_and_arrivals(
    step: Step, latency_s: Any
) -> dict[tuple[int, int], tuple[float, dict[tuple[int, str], float]]]:
    """Return busy seconds and arrival times of messages, by pair of devices."""
    busy: dict[tuple[int, int], float] = {}
    free: dict[tuple[int, int], float] = {}
    arrived: dict[tuple[int, int], dict[tuple[int, str], float]] = {}
    for m in step.messages:
        pair = m.source, m.destination
        departed_s = m.arrived_s - float(latency_s[pair])
        leaves = max(m.handed_over_s, free.get(pair, 0.0))
        busy[pair] = busy.get(pair, 0.0) + max(departed_s - leaves, 0.0)
        free[pair] = departed_s
        arrived.setdefault(pair, {})[m.microbatch, m.kind] = m.arrived_s
    return {pair: (busy[pair], arrived[pair]) for pair in busy}
