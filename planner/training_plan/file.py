"""Reads, validates and writes plan files.

Their structure is defined by ``plan.schema.json`` (checked by `planner.training_plan.schema`),
rules between fields by `planner.training_plan.validation`. Costs and bounds are verified by
`planner.checker`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate, Status
from planner.training_plan import schema, upgrade
from planner.training_plan.alternative import Alternative
from planner.training_plan.averaging_group import WHOLE, AveragingGroup, StageAveraging
from planner.training_plan.choices import Codec, Phase, Wiring
from planner.training_plan.cost import Cost
from planner.training_plan.encoding import devices_of, network_of
from planner.training_plan.error import PlanError, require_hash
from planner.training_plan.model import (
    FORMAT,
    SCHEMA_VERSION,
    Predicted,
    Routing,
    TrainingPlan,
    hash_of,
    json_text,
)
from planner.training_plan.schedule import Schedule
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.training_plan.validation import contradictions
from planner.utils.atomic_write import write_text
from planner.utils.input_files import parse_json, read_text
from planner.utils.validate import instance_of
from planner.workload.compute_times import ComputeTimes
from planner.workload.workload import Workload


def from_dict(data: Any) -> TrainingPlan:
    """Validate and build a plan; raises `PlanError` at the first broken rule."""
    _require_version(data)
    old = data["schema_version"] == upgrade.SCHEMA_VERSION
    if old:
        data = upgrade.upgraded(data)
    for error in schema.errors(data, schema.load_schema("plan")):
        raise PlanError(str(error))
    try:
        network = network_of(data["network"])
        cluster = Cluster(network, devices_of(data["devices"], len(network)))
        plan = _build(data, cluster)
    except PlanError:
        raise
    except ValueError as error:
        # rules beyond the schema, such as more active experts than there are
        raise PlanError(str(error)) from None
    for problem in contradictions(plan):
        raise PlanError(problem)
    require_hash("network.hash", data["network"]["hash"], cluster.network.content_hash)
    if not old:
        require_hash("content_hash", data["content_hash"], _hash_as_written(plan, data))
    return plan


def save_plan(plan: TrainingPlan, path: str | Path) -> None:
    """Write a plan file atomically.

    Parameters
    ----------
    plan
        The plan.
    path
        Path of the file.

    Raises
    ------
    ValueError
        Not a plan, or not a path.
    OSError
        The file cannot be written.
    """
    text = plan_text(instance_of(TrainingPlan, plan, "plan"))
    write_text(path if isinstance(path, Path) else instance_of(str, path, "path"), text)


def plan_text(plan: TrainingPlan) -> str:
    """Content of the file that `save_plan` writes."""
    lines = (f"{json_text(name)}:{json_text(value)}" for name, value in plan.to_dict().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load_plan(path: str | Path) -> TrainingPlan:
    """Read and validate a plan file.

    Parameters
    ----------
    path
        Path of the file.

    Returns
    -------
    TrainingPlan
        Validated.

    Raises
    ------
    PlanError
        One line with field, value and remedy.
    """
    text = read_text(path, error=PlanError)
    try:
        data = parse_json(text, path, error=PlanError)
    except PlanError:
        if text.lstrip().startswith("{"):
            raise
        raise PlanError(f"{path}: is no plan file; give the .json of planner plan") from None
    try:
        return from_dict(data)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except OverflowError:
        raise PlanError(f"{path}: holds a number beyond 1e308; make the plan again") from None


def _hash_as_written(plan: TrainingPlan, data: dict[str, Any]) -> str:
    """The hash of older files, which does not cover precision."""
    content = plan.hashed()
    if "precision" not in data["workload"]:
        del content["workload"]["precision"]
    return hash_of(content)


def _require_version(data: Any) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        shown = schema.show(data.get("format") if isinstance(data, dict) else data)
        raise PlanError(f"format: must be {FORMAT!r}, found {shown}; give a file of planner plan")
    version = data.get("schema_version")
    if version not in (upgrade.SCHEMA_VERSION, SCHEMA_VERSION):
        raise PlanError(
            f"schema_version: this release reads {upgrade.SCHEMA_VERSION} and {SCHEMA_VERSION}, "
            f"found {schema.show(version)}; install the release that wrote the plan, or make it "
            "again"
        )


def _routing(wiring: dict[str, Any]) -> Routing:
    """Parameters of stochastic wiring; defaults for a fixed one."""
    fields = {name: value for name, value in wiring.items() if name != "kind"}
    if fields and wiring["kind"] == Wiring.FIXED:
        name = next(iter(fields))
        raise PlanError(
            f"wiring.{name}: goes with kind 'stochastic', found {wiring['kind']!r}; remove it"
        )
    return Routing(**fields)


def _averaging(data: dict[str, Any]) -> tuple[StageAveraging, ...]:
    """Averaging of every stage, and of a tied matrix."""
    stages, count = data["averaging"]["stages"], len(data["assignment"]["layers"])
    if len(stages) != count:
        raise PlanError(
            f"averaging.stages: must have {count} entries, found {len(stages)}; give one per stage"
        )
    tied = [data["averaging"]["tied"]] if "tied" in data["averaging"] else []
    return tuple(_rounds(entry["rounds"]) for entry in (*stages, *tied))


def _rounds(rounds: list[list[dict[str, Any]]]) -> StageAveraging:
    return tuple(
        tuple(
            AveragingGroup(
                tuple(int(d) for d in g["members"]),
                tuple(float(x) for x in g["shares"]),
                tuple(g["contributes"]),
                tuple(g.get("receives", ())),
                tuple(g.get("slice", WHOLE)),
                Phase(g.get("phase", Phase.ALL)),
                g.get("dtype"),
            )
            for g in groups
        )
        for groups in rounds
    )


def _build(data: dict[str, Any], cluster: Cluster) -> TrainingPlan:
    assignment, paths, sync = data["assignment"], data["paths"], data["sync"]
    grid = assignment["grid"]
    if grid is not None:
        if len({len(row) for row in grid}) != 1:
            raise PlanError("assignment.grid: rows differ in length; give pipelines x stages")
        grid = np.array(grid, dtype=np.int64)
        grid.setflags(write=False)
    outer = None if sync["outer"] is None else OuterOptimizer(**sync["outer"])
    return TrainingPlan(
        cluster=cluster,
        network_name=data["network"]["name"],
        workload=Workload.from_dict(data["workload"]),
        seed=int(data["seed"]),
        compute_times=ComputeTimes.from_dict(data["compute_times"]),
        assignment=AssignmentPlan(
            tuple(tuple(int(d) for d in group) for group in assignment["groups"]), grid
        ),
        stage_layers=tuple((int(a), int(b)) for a, b in assignment["layers"]),
        schedules=tuple(
            Schedule.from_dict(s, f"paths.schedules[{k}]") for k, s in enumerate(paths["schedules"])
        ),
        averaging=_averaging(data),
        predicted=Predicted(**{key: float(x) for key, x in data["predicted"].items()}),
        certificates={
            part: Certificate(**{**c, "status": Status(c["status"])})
            for part, c in data["certificates"].items()
        },
        recompute=tuple(assignment["recompute"]),
        left_out=tuple(assignment["left_out"]),
        cycle=tuple(int(k) for k in paths["cycle"]),
        codec=Codec(data["averaging"]["codec"]),
        wiring=Wiring(data["wiring"]["kind"]),
        routing=_routing(data["wiring"]),
        sync=Sync(int(sync["every_steps"]), outer, sync.get("delayed", False)),
        clip=data["averaging"].get("clip"),
        cost=Cost.from_dict(data["cost"]) if data.get("cost") is not None else None,
        package_version=data["package_version"],
        alternatives=tuple(map(Alternative.from_dict, data.get("alternatives", ()))),
        baselines=tuple(map(Alternative.from_dict, data.get("baselines", ()))),
    )
