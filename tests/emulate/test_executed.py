"""Steps assembled from the ranks' records and compared with a prediction."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.emulate.comparison import OperationPair, Pair, compare
from planner.emulate.emulation import Emulation
from planner.emulate.execution import (
    Message,
    Operation,
    Parts,
    Step,
    parts_of,
    planned_steps,
    steps_of,
)
from planner.emulate.namespaces import EmulationError
from planner.emulate.prediction import predict
from planner.emulate.ranks import _require_success
from planner.emulate.report import lines_of
from tests.conftest import make_plan

MOMENT = 1000.0


def records(speed: float = 1.0) -> list[dict[str, Any]]:
    """Two ranks, a step from rest; times of the plan, run at a speed."""

    def at(seconds: float) -> float:
        return MOMENT + seconds / speed

    def part(rank: int, begin: float, end: float, **more: Any) -> dict[str, Any]:
        step = {"step": 0, "rest": True, "begin_s": at(begin), "end_s": at(end), **more}
        return {"rank": rank, "steps": [step]}

    first = part(
        0,
        0.0,
        9.0,
        ops=[[0, 0, "F", at(0.0), at(1.0)], [-1, 0, "A", at(5.0), at(8.0)]],
        messages=[[0, "F", 0, 1, 100, at(1.0), None]],
    )
    second = part(
        1,
        0.1,
        8.5,
        ops=[[0, 1, "F", at(3.0), at(4.0)], [-1, 1, "A", at(6.0), at(7.0)]],
        messages=[[0, "F", 0, 1, 100, None, at(3.0)]],
    )
    return [first, second]


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_messages_are_joined_and_times_scaled(speed: float) -> None:
    """Times are independent of the speed; a step starts with its first rank."""
    (step,) = steps_of(records(speed), True, speed)
    assert step.pipeline_s == pytest.approx(4.0)
    (message,) = step.messages
    assert message[:4] == (0, "F", 0, 1)
    assert message[4:] == pytest.approx((1.0, 3.0))
    assert steps_of(records(speed), False, speed) == []


def test_averaging_begins_with_the_last_member_of_a_first_round() -> None:
    """6 s, until the stage's last message arrives at 8 s."""
    (step,) = steps_of(records(), True, 1.0)
    plan = make_plan([[0], [1]])
    assert step.averaging_s(plan) == pytest.approx(2.0)


def chained(ends: list[float]) -> list[Step]:
    """Steps that end then."""
    op = Operation(0, 0, "F", 0.0, 1.0)
    return [Step(k, 0.0, end, (op,), ()) for k, end in enumerate(ends)]


def test_steps_count_after_two_passes() -> None:
    """Mean step time after two warm-up passes, without the last step."""
    plan = make_plan([[0, 1]])
    found = parts_of(plan, [], chained([5.0, 7.0, 10.0, 13.0, 25.0]), 2.0)
    assert (found.pipeline_s, found.averaging_s) == (None, None)
    assert found.step_s == pytest.approx(6.0)


def test_whole_passes_are_run() -> None:
    """With a cycle of two, three steps become four, plus four for warm-up and one at the end."""
    plan = make_plan([[0, 1]]).replace(cycle=(0, 0))
    assert planned_steps(plan, 3, 3) == (6, 9)


def test_a_step_as_predicted_has_ratios_of_one() -> None:
    """Operations and messages moved by a second have that delay."""
    plan = make_plan([[0, 1], [2, 3]])
    prediction = predict(plan)
    timeline = prediction.timelines[0]
    late = 1.0
    operations = tuple(
        Operation(op.microbatch, op.device, op.kind, op.start_s + late, op.end_s + late)
        for op in (*timeline.ops, *timeline.closing)
    )
    messages = tuple(
        Message(t.microbatch, t.kind, t.source, t.destination, t.start_s + late, t.end_s + late)
        for t in sorted(timeline.transfers, key=lambda t: t.end_s)
    )
    steps = [Step(0, 0.0, 1.0, operations, messages)] * 3
    parts = prediction.parts
    executed = Parts(parts.pipeline_s, parts.averaging_s, parts.step_s)
    found = compare(plan, prediction, executed, steps)
    assert [pair.ratio for pair in (found.pipeline, found.averaging, found.step)] == [1, 1, 1]
    assert len(found.operations) == len(operations)
    assert all(op.late_s == pytest.approx(late) for op in found.operations)
    assert found.links
    for link in found.links:
        assert link.late_s == pytest.approx(late)
        assert link.busy.ratio == pytest.approx(1.0)


def test_first_failing_rank_is_reported(tmp_path: Path) -> None:
    """Not ranks that ended because of it; a killed rank has no message of its own."""
    said = {0: "planner.executor: ended: device 'b' is gone", 1: "a warning"}
    for rank, line in said.items():
        (tmp_path / f"errors-{rank}.txt").write_text(f"{line}\n")
    _require_success([None, 0], tmp_path)
    with pytest.raises(EmulationError, match="rank 1 failed: killed by signal 9"):
        _require_success([3, -9], tmp_path)
    with pytest.raises(EmulationError, match="rank 1 failed: a warning"):
        _require_success([3, 2], tmp_path)
    with pytest.raises(EmulationError, match=r"rank 0 failed: .* device 'b' is gone"):
        _require_success([3, None], tmp_path)


def test_late_operations_are_named_in_words() -> None:
    """Also those without a microbatch."""
    settings = SimpleNamespace(speed=1.0, shrink=1.0)
    carried = SimpleNamespace(packets=1, lost=0, late_s=0.0, most_late_s=0.0)
    pair = Pair(1.0, 2.0)
    operations = tuple(
        OperationPair(0, microbatch, "anna2", kind, pair, pair)
        for microbatch, kind in ((19, "B"), (3, "H"), (-1, "U"))
    )
    comparison = SimpleNamespace(
        pipeline=pair, averaging=pair, step=pair, operations=operations, links=()
    )
    emulation = SimpleNamespace(comparison=comparison, carried=carried, settings=settings, busy=0.5)
    lines = lines_of(cast(Emulation, emulation))
    for text in (
        "backward pass of microbatch 19 on anna2 ends",
        "head and loss of microbatch 3 on anna2 ends",
        "optimizer step on anna2 ends",
    ):
        assert text in lines
