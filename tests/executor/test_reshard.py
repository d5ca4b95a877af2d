"""Training goes on from a checkpoint of another plan of the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import remove_devices
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan

torch = pytest.importorskip("torch")

from planner.executor.checkpoint.reshard import description, source_shards  # noqa: E402
from tests.executor.forks import losses_by_step  # noqa: E402
from tests.executor.test_two_frequency import straight  # noqa: E402

HALF, ALL = 4, 8
"""Steps before the checkpoint that is gone on from, and with those after it."""


def planned(grid: list[list[int]], *, head: str = "last", **arch: Any) -> TrainingPlan:
    """A plan of a GPT-2 with four layers."""
    made = Architecture(
        Family.GPT2,
        **(
            {
                "layers": 4,
                "hidden": 32,
                "heads": 4,
                "kv_heads": 4,
                "ffn": 64,
                "vocabulary": 61,
                "sequence": 16,
            }
            | arch
        ),
    )
    workload = Workload.transformer("tiny", made, batch_samples=8, precision="fp32")
    return make_plan(grid, workload=workload, head=head)


def train(plan: TrainingPlan, path: Path, *more: str) -> tuple[int, dict[int, float], list[str]]:
    """All ranks of a plan; exit code, losses by step, and what was said on stderr."""
    save_plan(plan, path)
    return losses_by_step(path, plan.cluster.network.ids, *more)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param({}, id="untied"),
        pytest.param({"head": "first", "tied": True}, id="tied", marks=pytest.mark.slow),
        pytest.param({"tied": True}, id="tied over two stages"),
    ],
)
def test_losses_are_those_of_the_plan_before(tmp_path: Path, head: dict[str, Any]) -> None:
    """Two stages of two devices; then four devices with all of it, and three stages of one."""
    old, folder = planned([[0, 1], [2, 3]], **head), tmp_path / "kept"
    every = ("--checkpoint", str(folder), "--every", str(HALF))
    code, first, said = train(old, tmp_path / "old.json", "--steps", str(HALF), *every)
    assert code == 0, said
    resume = ("--steps", str(ALL), "--resume", str(folder))
    code, rest, said = train(old, tmp_path / "old.json", *resume)
    assert code == 0 and not said and sorted(first | rest) == list(range(ALL))
    for grid in ([[0], [1], [2], [3]], [[0, 1, 2]]):
        new = planned(grid, **head)
        code, found, said = train(new, tmp_path / "new.json", *resume)
        assert code == 0 and f"resuming at step {HALF} from plan" in said[0], said
        assert sorted(found) == sorted(rest)
        np.testing.assert_allclose([found[t] for t in rest], list(rest.values()), rtol=1e-5)


def test_devices_that_are_as_one_go_on_from_the_same() -> None:
    """A region's devices, whoever wrote the checkpoint: all of its plan, or those who were left."""
    plan = straight()
    for wrote in (plan, remove_devices(plan, [plan.cluster.network.ids[3]])):
        holds = description(wrote)["holds"]
        for rounds in plan.averaging:
            for group in rounds[0]:
                one, other = (
                    source_shards(holds, plan, d, ["stage.layers.0.attention.weight"])
                    for d in group.members
                )
                assert one == other
        # regions go on from different ones
        first = [
            source_shards(holds, plan, d, ["stage.layers.0.x"]) for d in plan.assignment.groups[0]
        ]
        assert len({next(iter(found)) for found in first}) == 2


@pytest.mark.slow
def test_between_outer_steps_it_is_refused_and_after_one_it_goes_on(tmp_path: Path) -> None:
    """H = 2: a checkpoint after 3 steps, then one after 4, with averaging every step from there."""
    grid = [[0, 1], [2, 3]]
    rare = planned(grid).replace(sync=Sync(2, OuterOptimizer()))
    rare = rare.replace(
        workload=replace(
            rare.workload,
            state_bytes_per_parameter=rare.workload.state_bytes_per_parameter
            + rare.workload.outer_state_bytes,
        )
    )
    for steps, expected in ((3, 2), (4, 0)):
        folder = tmp_path / str(steps)
        more = ("--steps", str(steps), "--checkpoint", str(folder), "--every", str(steps))
        code, _, said = train(rare, tmp_path / "rare.json", *more)
        assert code == 0, said
        resume = ("--steps", "6", "--resume", str(folder))
        code, losses, said = train(planned([[0, 1]]), tmp_path / "new.json", *resume)
        assert code == expected, said
        if expected:
            assert "3 steps were done, its plan averages every 2 steps" in said[0]
        else:
            assert "sync was" in said[0] and sorted(losses) == [4, 5]


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"layers": 5}, "layers 4"),
        pytest.param({"hidden": 64}, "hidden 32", marks=pytest.mark.slow),
        pytest.param({"vocabulary": 67}, "vocab", marks=pytest.mark.slow),
    ],
)
def test_another_model_is_one_line(tmp_path: Path, other: dict[str, Any], field: str) -> None:
    """The first field that differs, with both values."""
    folder = tmp_path / "kept"
    more = ("--steps", "1", "--checkpoint", str(folder), "--every", "1")
    code, _, said = train(planned([[0, 1]]), tmp_path / "old.json", *more)
    assert code == 0, said
    resume = ("--steps", "2", "--resume", str(folder))
    code, _, said = train(planned([[0], [1]], **other), tmp_path / "new.json", *resume)
    assert code == 2 and len(said) == 1
    assert f"whose model has {field}" in said[0] and "plan the same model" in said[0]


def test_each_part_is_found_where_it_was() -> None:
    """Layers are renumbered; peers take turns among the holders of a part."""
    holds = description(planned([[0, 1], [2, 3]]))["holds"]
    names = ["stage.stem.tokens.weight", "stage.layers.2.out", "stage.layers.1.out", "head.norm"]
    whole = planned([[0], [1]])
    assert source_shards(holds, whole, 1, names) == {
        2: {names[0]: names[0], "stage.layers.1.out": names[2]},
        3: {"stage.layers.0.out": names[1], "head.norm": "head.norm"},
    }
    with pytest.raises(ValueError, match=r"no device that held 'head\.norm'"):
        source_shards({"0": [0, 4, False]}, whole, 0, names)
