"""Upgrade of schema 1 files; tests/data has one written by that release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.training_plan.error import PlanError
from planner.training_plan.file import from_dict
from planner.training_plan.model import hash_of
from planner.training_plan.upgrade import HASHED

OLD = Path(__file__).parents[1] / "data" / "plan_schema1.json"


@pytest.fixture
def document() -> dict[str, Any]:
    """Return the file's data."""
    read: dict[str, Any] = json.loads(OLD.read_text())
    return read


def rehashed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the data with a matching hash."""
    content = {name: document[name] for name in HASHED}
    content["network"] = {k: v for k, v in content["network"].items() if k != "name"}
    return {**document, "content_hash": hash_of(content)}


def test_old_plans_are_read_and_pass_the_checker(document: dict[str, Any], tmp_path: Path) -> None:
    """Numbers are the same, and new fields have their defaults."""
    plan = pl.load_plan(OLD)
    assert pl.check(plan) == []
    assert plan.recompute == (False, False) and plan.left_out == ()
    rates = plan.cluster.network.bandwidth_bytes_per_s
    for i, row in enumerate(document["network"]["bandwidth_bytes_per_s"]):
        assert [None if i == j else x for j, x in enumerate(rates[i].tolist())] == row
    assert plan.cluster.flops.tolist() == document["devices"]["flops"]
    assert plan.cluster.devices.sites == tuple(document["devices"]["sites"])
    (was,), (now,) = document["paths"]["schedules"], plan.schedules
    assert [list(path) for path in now.paths] == was["paths"]
    assert [[f"{kind}{b}" for kind, b in ops] for ops in now.order] == was["order"]
    pl.save_plan(plan, tmp_path / "new.json")
    again = pl.load_plan(tmp_path / "new.json")
    assert again.content_hash == plan.content_hash
    assert again.predicted == plan.predicted


def test_modified_old_plans_are_rejected(document: dict[str, Any]) -> None:
    """By their own hash."""
    assert rehashed(document) == document
    document["devices"]["flops"][0] *= 2
    with pytest.raises(PlanError, match=r"content_hash: is 5473c4ff76ff\.\.\. but"):
        from_dict(document)
    assert from_dict(rehashed(document)).cluster.flops[0] == 2e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": None}, "is no plan of schema 1"),
        ({"paths": {"schedules": [{}]}}, "is no plan of schema 1"),
        ({"devices": {"flops": []}}, "is no plan of schema 1"),
        ({"seed": -1}, "seed: must be >= 0"),
        ({"sync": {}}, "sync.every_steps: is missing"),
    ],
)
def test_invalid_old_plans(change: dict[str, Any], message: str, document: dict[str, Any]) -> None:
    """One line for any content."""
    document |= change
    if document["network"] is not None:
        document = rehashed(document)
    with pytest.raises(PlanError, match=message) as caught:
        from_dict(document)
    assert "\n" not in str(caught.value)
