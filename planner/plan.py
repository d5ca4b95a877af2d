"""The plan file: five parts, what they were made from, and how good each is.

`TrainingPlan` is a frozen value; `load_plan` and `save_plan` move it in and out of JSON. Its
structure is stated by ``schemas/plan.schema.json`` (checked by `planner.schema`), the rules between
fields here.
What a plan costs and whether its bounds hold is `planner.check`'s business.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from planner import network_io, schema
from planner.cluster import Cluster, Devices
from planner.compute_times import FIELDS, ComputeTimes
from planner.files import write_text
from planner.network import Network, NetworkError
from planner.parts import AssignmentPlan
from planner.plan_rules import contradictions
from planner.result import Certificate, Status
from planner.workload import Workload

FORMAT = "planner.plan"
SCHEMA_VERSION = 1
CODECS = {"none": 1.0, "int8": (1 + 4 / 1024) / 4}
"""Bytes on the wire over bytes of 32-bit gradients: 8-bit levels and a 4-byte scale per 1024."""

Operation = tuple[str, int]
"""``("F" | "H" | "B", microbatch)``."""


class PlanError(ValueError):
    """A plan that cannot be used; one line with field, value and remedy."""


@dataclass(frozen=True)
class Schedule:
    """Which devices each microbatch visits, and the order in which each device works.

    Attributes
    ----------
    head
        ``"last"`` or ``"first"``: the device of each path that runs head and loss.
    paths
        Per microbatch, the devices in the order visited.
    order
        Per device, its operations in the order it does them.
    """

    name: str
    head: str
    paths: tuple[tuple[int, ...], ...]
    order: tuple[tuple[Operation, ...], ...]

    def head_device(self, microbatch: int) -> int:
        """The device that runs H of a microbatch."""
        return self.paths[microbatch][-1 if self.head == "last" else 0]

    def chain(self, microbatch: int) -> list[tuple[str, int]]:
        """``(kind, device)`` in dependency order: F along the path, H, B back."""
        path = self.paths[microbatch]
        return [
            *(("F", d) for d in path),
            ("H", self.head_device(microbatch)),
            *(("B", d) for d in reversed(path)),
        ]


@dataclass(frozen=True)
class AveragingGroup:
    """Devices that average together: member k sums ``shares[k]`` of the vector."""

    members: tuple[int, ...]
    shares: tuple[float, ...]
    contributes: tuple[bool, ...]

    @classmethod
    def equal(cls, members: tuple[int, ...]) -> AveragingGroup:
        """Everybody contributes and everybody sums the same share."""
        n = len(members)
        return cls(members, (1.0 / n,) * n, (True,) * n)


@dataclass(frozen=True)
class OuterOptimizer:
    """DiLoCo's outer step."""

    optimizer: str
    learning_rate: float
    momentum: float

    def __post_init__(self) -> None:
        # one form of every number, so that equal plans have equal hashes
        object.__setattr__(self, "learning_rate", float(self.learning_rate))
        object.__setattr__(self, "momentum", float(self.momentum))


@dataclass(frozen=True)
class Sync:
    """Average every ``every_steps`` steps, with an outer optimizer if more than one."""

    every_steps: int = 1
    outer: OuterOptimizer | None = None


@dataclass(frozen=True)
class Predicted:
    """Simulated seconds of one step, on average over the cycle of schedules."""

    pipeline_s: float
    averaging_s: float
    step_s: float


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Everything an executor needs, and the proof of how good it is.

    Attributes
    ----------
    cluster, network_name, workload, seed, compute_times
        What the plan was made from.
    assignment, stage_layers
        Which device holds which stage, and which layers each stage has.
    schedules, cycle
        Iteration t runs ``schedules[cycle[t % len(cycle)]]``.
    averaging
        Per stage, rounds of disjoint groups.
    wiring, sync
        ``"fixed"`` paths; how often gradients are averaged.
    certificates
        Per part. ``paths``: mean makespan over the cycle with both directions of every link
        averaged, as the path solver counts, and a bound for this arrangement.
    """

    cluster: Cluster
    network_name: str
    workload: Workload
    seed: int
    compute_times: ComputeTimes
    assignment: AssignmentPlan
    stage_layers: tuple[tuple[int, int], ...]
    schedules: tuple[Schedule, ...]
    averaging: tuple[tuple[tuple[AveragingGroup, ...], ...], ...]
    predicted: Predicted
    certificates: Mapping[str, Certificate]
    cycle: tuple[int, ...] = (0,)
    codec: str = "none"
    wiring: str = "fixed"
    sync: Sync = field(default_factory=Sync)
    package_version: str = ""

    def __post_init__(self) -> None:
        if not self.package_version:
            object.__setattr__(self, "package_version", _package_version())

    @property
    def stage_of(self) -> dict[int, int]:
        """Stage of each device."""
        return {d: j for j, group in enumerate(self.assignment.groups) for d in group}

    @property
    def content_hash(self) -> str:
        """SHA-256 of inputs and decisions: not of times, versions, certificates or names."""
        data = self._inputs() | self._decisions()
        # what a node calls its file of the same measurement says nothing
        data["network"] = {k: v for k, v in data["network"].items() if k != "name"}
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def replace(self, **changes: Any) -> TrainingPlan:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def _inputs(self) -> dict[str, Any]:
        network = network_io.to_dict(self.cluster.network)
        devices = self.cluster.devices
        limits = {
            name: None if (value := getattr(devices, name)) is None else np.asarray(value).tolist()
            for name in ("flops", "memory_bytes", "upload_bytes_per_s", "download_bytes_per_s")
        }
        return {
            "seed": self.seed,
            "network": {
                "name": self.network_name,
                "hash": self.cluster.network.content_hash,
                **{key: network[key] for key in ("ids", "regions")},
                **{key: network[key] for key in ("latency_s", "bandwidth_bytes_per_s")},
            },
            "devices": limits,
            "workload": self.workload.to_dict(),
            "compute_times": _lists(asdict(self.compute_times)),
        }

    def _decisions(self) -> dict[str, Any]:
        grid = self.assignment.grid
        return {
            "assignment": {
                "groups": _lists(self.assignment.groups),
                "grid": None if grid is None else grid.tolist(),
                "layers": _lists(self.stage_layers),
            },
            "paths": {
                "schedules": [
                    {
                        "name": s.name,
                        "head": s.head,
                        "paths": _lists(s.paths),
                        "order": [[f"{kind}{b}" for kind, b in ops] for ops in s.order],
                    }
                    for s in self.schedules
                ],
                "cycle": list(self.cycle),
            },
            "averaging": {
                "codec": self.codec,
                "stages": [
                    {"rounds": [[_lists(asdict(g)) for g in groups] for groups in rounds]}
                    for rounds in self.averaging
                ],
            },
            "wiring": {"kind": self.wiring},
            "sync": asdict(self.sync),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, as ``schemas/plan.schema.json`` describes it."""
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "package_version": self.package_version,
            "content_hash": self.content_hash,
            **self._inputs(),
            **self._decisions(),
            "predicted": asdict(self.predicted),
            "certificates": {part: asdict(c) for part, c in self.certificates.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> TrainingPlan:
        """Validate and build; raises `PlanError` at the first rule broken."""
        _require_version(data)
        for error in schema.errors(data, schema.load_schema("plan")):
            raise PlanError(str(error))
        cluster = _cluster(data)
        plan = _build(cls, data, cluster)
        for problem in contradictions(plan):
            raise PlanError(problem)
        for name, stored, actual in (
            ("network.hash", data["network"]["hash"], cluster.network.content_hash),
            ("content_hash", data["content_hash"], plan.content_hash),
        ):
            if stored != actual:
                raise PlanError(
                    f"{name}: is {stored[:12]}... but the content gives {actual[:12]}...; the file "
                    "was changed after it was written, make the plan again"
                )
        return plan


def save_plan(plan: TrainingPlan, path: str | Path) -> None:
    """Write the plan file; nothing half written."""
    # a line per top-level field, so that plans can be read and compared
    lines = (
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for name, value in plan.to_dict().items()
    )
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load_plan(path: str | Path) -> TrainingPlan:
    """Read and validate a plan file.

    Raises
    ------
    PlanError
        One line with field, value and remedy.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: is not JSON ({error}); make the plan again") from None
    try:
        return TrainingPlan.from_dict(data)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except OverflowError:
        raise PlanError(f"{path}: holds a number beyond 1e308; make the plan again") from None


def _package_version() -> str:
    try:
        return metadata.version("planner")
    except metadata.PackageNotFoundError:  # run from a checkout, as on a bare GPU node
        return "unknown"


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _require_version(data: Any) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = schema.show(data.get("format") if isinstance(data, dict) else data)
        raise PlanError(f"format: must be {FORMAT!r}, found {found}; give a file of planner plan")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"schema_version: this release reads {SCHEMA_VERSION}, found {schema.show(version)}; "
            "install the release that wrote the plan, or make it again"
        )


def _cluster(data: dict[str, Any]) -> Cluster:
    raw = data["network"]
    n = len(raw["ids"])
    for name in ("latency_s", "bandwidth_bytes_per_s"):
        if len(raw[name]) != n or any(len(row) != n for row in raw[name]):
            raise PlanError(f"network.{name}: must be {n} x {n} for {n} ids; correct it")
        for i, row in enumerate(raw[name]):
            for j, value in enumerate(row):
                if value is None and i != j:
                    raise PlanError(
                        f"network.{name}[{i}][{j}]: {raw['ids'][i]!r} cannot reach "
                        f"{raw['ids'][j]!r}, found null; measure the pair, or plan on "
                        "network.complete()"
                    )
    try:
        latency, bandwidth = (
            [[math.nan if x is None else float(x) for x in row] for row in raw[name]]
            for name in ("latency_s", "bandwidth_bytes_per_s")
        )
        network = Network(latency, bandwidth, raw["ids"], raw["regions"])
        for name, values in data["devices"].items():
            if values is not None and len(values) != n:
                raise PlanError(
                    f"devices.{name}: must have {n} entries, found {len(values)}; give one per "
                    "device"
                )
        return Cluster(network, Devices(**data["devices"]))
    except NetworkError as error:
        raise PlanError(f"network: {error}") from None


def _build(cls: type[TrainingPlan], data: dict[str, Any], cluster: Cluster) -> TrainingPlan:
    assignment, paths, sync = data["assignment"], data["paths"], data["sync"]
    grid = assignment["grid"]
    if grid is not None:
        if len({len(row) for row in grid}) != 1:
            raise PlanError("assignment.grid: rows differ in length; give pipelines x stages")
        grid = np.array(grid, dtype=np.int64)
        grid.setflags(write=False)
    outer = None if sync["outer"] is None else OuterOptimizer(**sync["outer"])
    return cls(
        cluster=cluster,
        network_name=data["network"]["name"],
        workload=Workload.from_dict(data["workload"]),
        seed=int(data["seed"]),
        compute_times=ComputeTimes(
            data["compute_times"]["source"],
            *(tuple(float(x) for x in data["compute_times"][name]) for name in FIELDS),
        ),
        assignment=AssignmentPlan(
            tuple(tuple(int(d) for d in group) for group in assignment["groups"]), grid
        ),
        stage_layers=tuple((int(a), int(b)) for a, b in assignment["layers"]),
        schedules=tuple(
            Schedule(
                s["name"],
                s["head"],
                tuple(tuple(int(d) for d in path) for path in s["paths"]),
                tuple(tuple((op[0], int(op[1:])) for op in ops) for ops in s["order"]),
            )
            for s in paths["schedules"]
        ),
        averaging=tuple(
            tuple(
                tuple(
                    AveragingGroup(
                        tuple(int(d) for d in g["members"]),
                        tuple(float(x) for x in g["shares"]),
                        tuple(g["contributes"]),
                    )
                    for g in groups
                )
                for groups in stage["rounds"]
            )
            for stage in data["averaging"]["stages"]
        ),
        predicted=Predicted(**{key: float(x) for key, x in data["predicted"].items()}),
        certificates={
            part: Certificate(**{**c, "status": Status(c["status"])})
            for part, c in data["certificates"].items()
        },
        cycle=tuple(int(k) for k in paths["cycle"]),
        codec=data["averaging"]["codec"],
        wiring=data["wiring"]["kind"],
        sync=Sync(int(sync["every_steps"]), outer),
        package_version=data["package_version"],
    )
