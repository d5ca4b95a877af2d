"""Plan file: round trip, hashes, and one line for every kind of damage."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.training_plan import schema
from planner.training_plan.choices import Phase
from planner.training_plan.error import PlanError
from planner.training_plan.file import from_dict, load_plan, save_plan
from planner.training_plan.model import Routing, TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.training_plan.validation import contradictions
from tests.conftest import make_plan, tiny_workload

GRID = [[0, 3], [2, 1]]
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128}
MIXTURE = {
    "kind": "llama",
    **SIZES,
    "vocabulary": 256,
    "sequence": 128,
    "tied": False,
    "experts": {"count": 4, "active": 9, "ffn": 128},
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Return a valid plan of 2 x 2 devices as JSON data."""
    read: dict[str, Any] = json.loads(json.dumps(make_plan(GRID).to_dict()))
    return read


def test_round_trip_gives_the_same_bytes(tmp_path: Path) -> None:
    """Save, load, save."""
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    save_plan(make_plan(GRID, head="first"), first)
    save_plan(load_plan(first), second)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_outer_steps_round_trip(tmp_path: Path) -> None:
    """The field is omitted unless averaging is delayed."""
    for delayed in (False, True):
        plan = make_plan([[0, 3], [2, 1]]).replace(sync=Sync(50, OuterOptimizer(), delayed))
        save_plan(plan, tmp_path / "plan.json")
        found = load_plan(tmp_path / "plan.json")
        assert found.sync == plan.sync and found.content_hash == plan.content_hash
        assert ("delayed" in found.to_dict()["sync"]) is delayed
    assert found.content_hash != found.replace(sync=Sync(50, OuterOptimizer())).content_hash


def test_content_hash_covers_inputs_and_decisions_only() -> None:
    """Versions, predictions and certificates do not matter; seeds and schedules do."""
    plan = make_plan(GRID)
    assert plan.replace(package_version="9").content_hash == plan.content_hash
    assert plan.replace(certificates={}).content_hash == plan.content_hash
    assert plan.replace(seed=7).content_hash != plan.content_hash
    assert make_plan(GRID, schedule="gpipe").content_hash != plan.content_hash
    assert make_plan([[0, 1], [2, 3]]).content_hash != plan.content_hash


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change one field, given by its path in error messages."""

    def change(document: dict[str, Any]) -> None:
        *steps, last = path.replace("[", ".[").split(".")
        here: Any = document
        for step in steps:
            here = here[int(step[1:-1])] if step[0] == "[" else here[step]
        if value is ...:
            del here[last]
        else:
            here[int(last[1:-1]) if last[0] == "[" else last] = value

    return change


def rerouted(route: list[int]) -> Callable[[dict[str, Any]], None]:
    """Change the first route and clear the order, which depends on it."""

    def change(document: dict[str, Any]) -> None:
        schedule = document["paths"]["schedules"][0]
        schedule["routes"][0] = route
        schedule["order"] = ["" for _ in schedule["order"]]

    return change


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another format": (set_at("format", "x"), "format: must be 'planner.plan'"),
    "unknown version": (
        set_at("schema_version", 3),
        "schema_version: this release reads 1 and 2, found 3",
    ),
    "the version before": (
        set_at("schema_version", 1),
        "content_hash: is .* the file was changed after it was written",
    ),
    "missing field": (set_at("averaging", ...), "averaging: is missing"),
    "missing inner field": (set_at("sync.every_steps", ...), "sync.every_steps: is missing"),
    "unknown field": (set_at("extra", 1), "extra: is not a known field"),
    "wrong network hash": (set_at("network.hash", "0" * 64), "network.hash: is 000000000000"),
    "wrong content hash": (set_at("content_hash", "0" * 64), "content_hash: is 000000000000"),
    "hash that is none": (set_at("content_hash", "abc"), "content_hash: must match"),
    "NaN": (set_at("network.latency_s[0][1]", math.nan), r"latency_s\[0\]\[1\]: must be a finite"),
    "negative bandwidth": (
        set_at("network.bandwidth_bytes_per_s[0][1]", -1.0),
        r"bandwidth_bytes_per_s\[0\]\[1\]: must be > 0, found -1",
    ),
    "unreachable pair": (set_at("network.latency_s[0][1]", None), "'0' cannot reach '1'"),
    "device listed twice": (set_at("assignment.groups[0]", [0, 1]), "is listed twice"),
    "no such device": (set_at("assignment.groups[0]", [0, 9]), "there is no device 9"),
    "id listed twice": (set_at("network.ids[1]", "0"), "network.ids: must not list an entry twice"),
    "class that is not there": (
        set_at("network.class_of[1]", 4),
        r"network.class_of\[1\]: there are 4, found 4; name one of them",
    ),
    "class left out": (set_at("network.class_of", [0]), "class_of: must have 4 entries, found 1"),
    "ragged matrix": (set_at("network.latency_s[0]", [0.1]), "network.latency_s: must be 4 x 4"),
    "link inside a class": (set_at("network.class_of[1]", 0), r"\[0\]\[0\]: '0' cannot reach '1'"),
    "kind that is not there": (
        set_at("devices.kind_of[2]", 1),
        r"kind_of\[2\]: there are 1, found 1",
    ),
    "figures of too few kinds": (
        set_at("devices.memory_bytes", [1.0, 2.0]),
        "devices.memory_bytes: must have 1 entries, found 2; give one per kind",
    ),
    "path through a missing device": (
        rerouted([0, 9]),
        r"paths\[0\]: device 9 holds no stage",
    ),
    "path that turns back": (
        rerouted([0, 0]),
        "visits a device twice",
    ),
    "order against its route": (
        set_at("paths.schedules[0].routes[0]", [0, 1]),
        r"order\[3\]: after 0 operations F has no next microbatch, 0 visit the device",
    ),
    "route that is not there": (
        set_at("paths.schedules[0].route_of[1]", 2),
        r"paths.schedules\[0\].route_of\[1\]: there are 2 routes, found 2",
    ),
    "operation missing": (set_at("paths.schedules[0].order[0]", "F"), "is missing"),
    "operation too many": (
        set_at("paths.schedules[0].order[0]", "FFFFFB"),
        r"order\[0\]: after 4 operations F has no next microbatch, 4 visit the device",
    ),
    "operation of another device": (
        set_at("paths.schedules[0].order[0]", "FFFFBBBBF1"),
        "F1 does not belong to this device",
    ),
    "operation that is none": (set_at("paths.schedules[0].order[0]", "X0"), "must match"),
    "recomputation of too few stages": (
        set_at("assignment.recompute", [True]),
        "assignment.recompute: must have 2 entries, found 1; give one per stage",
    ),
    "left out and there": (
        set_at("assignment.left_out", ["x", "2"]),
        r"assignment.left_out\[1\]: '2' takes part in the plan",
    ),
    "left out twice": (set_at("assignment.left_out", ["x", "x"]), "must not list an entry twice"),
    "grid against groups": (set_at("assignment.grid", [[0, 1], [3, 2]]), "columns are not"),
    "ragged grid": (set_at("assignment.grid", [[0, 1], [2]]), "rows differ in length"),
    "gap between stages": (set_at("assignment.layers", [[0, 1], [2, 4]]), "must start at layer 1"),
    "layers left over": (set_at("assignment.layers", [[0, 1], [1, 3]]), "must cover all 4 layers"),
    "shares above one": (
        set_at("averaging.stages[0].rounds[0][0].shares", [0.9, 0.9]),
        "shares must sum to 1",
    ),
    "no member contributes": (
        set_at("averaging.stages[0].rounds[0][0].contributes", [False, False]),
        "no member contributes",
    ),
    "averaging with strangers": (
        set_at("averaging.stages[0].rounds[0][0].members", [0, 1]),
        "must hold each device of stage 0 once",
    ),
    "schedule that is not there": (set_at("paths.cycle", [1]), "there are 1 schedules, found 1"),
    "times for too few devices": (
        set_at("compute_times.forward_s", [0.1]),
        "must have 4 entries, found 1",
    ),
    "zero flops": (set_at("devices.flops[0]", 0), r"devices.flops\[0\]: must be > 0"),
    "path from the last stage": (
        rerouted([3, 0]),
        "must start in stage 0 and ascend",
    ),
    "two devices of one stage": (
        rerouted([0, 2]),
        "must start in stage 0 and ascend",
    ),
    "more samples than paths": (
        set_at("workload.batch_samples", 16),
        r"paths: must be 16, 16 samples in microbatches of 1, found 8",
    ),
    "a gradient that gets lost": (
        set_at("averaging.stages[0].rounds[0][0].contributes", [True, False]),
        "gets the gradient of device 2 with weight 0 instead of 1",
    ),
    "device without a stage": (
        set_at("assignment.groups[0]", [0]),
        "device 2 .* has no stage",
    ),
    "another model than was priced": (
        set_at("workload.architecture.layers", 5),
        "must be the 4 layers that were priced, found 5",
    ),
    "unknown certificate": (
        set_at("certificates.luck", {}),
        "certificates.luck: is not a known field",
    ),
    "more active experts than there are": (
        set_at("workload.architecture", MIXTURE),
        "experts active is 9, more than the 4",
    ),
    "negative seed": (set_at("seed", -1), "seed: must be >= 0"),
    "text for a number": (set_at("seed", "one"), "seed: must be of type integer"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_reported(case: str, document: dict[str, Any], tmp_path: Path) -> None:
    """One line with file, field, value and remedy."""
    damaged = copy.deepcopy(document)
    change, message = DAMAGE[case]
    change(damaged)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(damaged))
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert ";" in text


def test_files_that_are_not_plans(tmp_path: Path) -> None:
    """Missing, not JSON, not an object."""
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path / "none.json")
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        load_plan(path)
    path.write_text("<!doctype html>\n")
    with pytest.raises(PlanError, match=r"plan.json: is no plan file; give the .json of planner"):
        load_plan(path)
    path.write_text("[]")
    with pytest.raises(PlanError, match="format: must be"):
        load_plan(path)


def paths_of(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every entry of a document."""
    found = [here]
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths_of(item, (*here, key))
    return found


SMALL = json.loads(
    json.dumps(make_plan([[0, 1]], workload=tiny_workload(batch_samples=2)).to_dict())
)
JUNK = st.sampled_from(
    [None, True, False, 0, -1, 1.5, 2.0, 1e300, "", "F0", "FB7", "F01", [], [0], ["x"], {}, [[]]]
)


@given(st.sampled_from(paths_of(SMALL)), JUNK, st.sampled_from(["replace", "delete", "add"]))
def test_own_validator_agrees_with_jsonschema(
    place: tuple[Any, ...], junk: Any, action: str
) -> None:
    """For documents with one random change."""
    shape = schema.load_schema("plan")
    changed = copy.deepcopy(SMALL)
    if not place:
        changed = junk
    else:
        *steps, last = place
        here = changed
        for step in steps:
            here = here[step]
        if action == "delete":
            del here[last]
        elif action == "add" and isinstance(here[last], dict):
            here[last]["stranger"] = junk
        elif action == "add" and isinstance(here[last], list):
            here[last].append(junk)
        else:
            here[last] = junk
    judge = jsonschema.Draft202012Validator(shape)
    assert (next(schema.errors(changed, shape), None) is None) == judge.is_valid(changed)


def test_the_schema_itself_is_valid() -> None:
    """The plan matches it."""
    jsonschema.Draft202012Validator.check_schema(schema.load_schema("plan"))
    jsonschema.Draft202012Validator(schema.load_schema("plan")).validate(SMALL)


def test_a_node_needs_numpy_only_to_read_a_plan(tmp_path: Path) -> None:
    """Loading, checking and simulating work without other packages, with the same times."""
    import subprocess
    import sys

    path = tmp_path / "plan.json"
    save_plan(make_plan(GRID), path)
    code = (
        "import sys\n"
        "heavy = {'scipy', 'ortools', 'pulp', 'deap', 'networkx', 'numba', 'matplotlib', 'torch'}\n"
        "sys.modules |= dict.fromkeys(heavy)\n"
        "import planner as pl\n"
        f"plan = pl.load_plan({str(path)!r})\n"
        "assert not pl.check(plan)\n"
        "assert pl.simulate(plan).step_s == plan.predicted.step_s\n"
        "assert callable(pl.plan) and callable(pl.check) and callable(pl.simulate)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dictionary_round_trip() -> None:
    """``from_dict(to_dict())`` is equal in content."""
    plan = make_plan(GRID)
    assert from_dict(json.loads(json.dumps(plan.to_dict()))).to_dict() == plan.to_dict()


def test_every_schedule_must_run_and_keep_the_head() -> None:
    """A second schedule that deadlocks or moves the head is rejected."""
    from planner.training_plan.schedule import Schedule
    from planner.training_plan.validation import contradictions

    plan = make_plan([[0, 1]], workload=tiny_workload(batch_samples=2), schedule="1f1b")
    good = plan.schedules[0]
    a = (("F", 0), ("B", 0), ("F", 1), ("B", 1))
    b = (("F", 0), ("F", 1), ("H", 0), ("H", 1), ("B", 0), ("B", 1))
    stuck = Schedule("stuck", good.head, good.paths, (a, b))
    found = list(contradictions(plan.replace(schedules=(good, stuck), cycle=(0, 1))))
    assert found and "paths.schedules[1].order" in found[0] and "deadlock" in found[0]
    first = make_plan([[0, 1]], workload=tiny_workload(batch_samples=2), head="first").schedules[0]
    found = list(contradictions(plan.replace(schedules=(good, first), cycle=(0, 1))))
    assert found and "keep the head on one stage" in found[0]


def test_hash_does_not_depend_on_spelling() -> None:
    """File names, and whole numbers written as floats, do not matter."""
    plan = make_plan(GRID)
    assert plan.replace(network_name="/x/a.csv").content_hash == plan.content_hash
    whole = plan.workload.replace(state_bytes_per_parameter=16)
    assert plan.replace(workload=whole).content_hash == plan.content_hash
    assert from_dict(plan.replace(workload=whole).to_dict())


def test_readme_is_complete() -> None:
    """It has no placeholders, and its links exist."""
    import re

    root = Path(__file__).parents[2]
    text = (root / "README.md").read_text()
    assert "{{" not in text
    links = [t for t in re.findall(r"\]\(([^)]+)\)", text) if not t.startswith("http")]
    assert links
    assert all((root / target.split("#")[0]).exists() for target in links)


def test_stochastic_wiring_is_written_and_read(tmp_path: Path) -> None:
    """Routing parameters are stored; fixed wiring has none."""
    fixed = make_plan([[0, 3], [2, 1]])
    routed = fixed.replace(wiring="stochastic", routing=Routing(0.25, "work"))  # type: ignore[arg-type]
    save_plan(routed, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.routing == routed.routing and again.content_hash == routed.content_hash
    hashes = {p.content_hash for p in (fixed, routed, routed.replace(routing=Routing()))}
    assert len(hashes) == 3
    data = routed.to_dict()
    assert data["wiring"] == {"kind": "stochastic", "smoothing": 0.25, "told": "work"}
    assert fixed.to_dict()["wiring"] == {"kind": "fixed"}
    data["wiring"]["kind"] = "fixed"
    with pytest.raises(PlanError, match=r"wiring\.smoothing: goes with kind 'stochastic'"):
        from_dict(data)


def test_invalid_stochastic_wiring() -> None:
    """Skipped stages, several schedules, and a device without a path."""
    plan = make_plan([[0, 3], [2, 1]]).replace(wiring="stochastic")
    assert list(contradictions(plan)) == []
    two = plan.replace(schedules=plan.schedules * 2)
    assert "one where wiring is stochastic, found 2" in next(contradictions(two))
    paths = plan.schedules[0].paths
    lone = with_paths(plan, tuple((0, path[1]) for path in paths))
    assert "device 2 (2) is on none" in next(contradictions(lone))
    short = with_paths(plan, tuple((path[0],) for path in paths))
    assert "must visit all stages in order" in next(contradictions(short))
    (group,) = plan.averaging[0][0]
    every_step = ((replace(group, phase=Phase.WITHIN),), (replace(group, phase=Phase.EXCHANGE),))
    two_frequency = plan.replace(averaging=(every_step, plan.averaging[1]), sync=Sync(4))
    assert any("every step of H" in said for said in contradictions(two_frequency))


def with_paths(plan: TrainingPlan, paths: tuple[tuple[int, ...], ...]) -> TrainingPlan:
    """Return the plan with other paths, one microbatch after another."""
    (schedule,) = plan.schedules
    bare = Schedule("paths", schedule.head, paths, ())
    order: list[list[tuple[str, int]]] = [[] for _ in schedule.order]
    for b in range(len(paths)):
        for kind, d in bare.chain(b):
            order[d].append((kind, b))
    return plan.replace(schedules=(replace(bare, order=tuple(map(tuple, order))),))


def test_a_plan_is_equal_to_its_copy(tmp_path: Path) -> None:
    """After loading or copying; other plans differ."""
    plan = make_plan([[0, 1], [2, 3]])
    save_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert plan == again == copy.deepcopy(plan) and hash(plan) == hash(again)
    assert plan != make_plan([[0, 2], [1, 3]]) and plan != 3
