"""The training plan: its inputs, decisions, predicted times and certificates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from itertools import chain, repeat
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate
from planner.training_plan import coercion
from planner.training_plan.alternative import Alternative
from planner.training_plan.averaging_group import AveragingGroup, StageAveraging, within
from planner.training_plan.choices import Codec, RouterFeedback, Wiring
from planner.training_plan.cost import Cost
from planner.training_plan.encoding import (
    device_fields,
    gpu_fields,
    network_fields,
)
from planner.training_plan.error import PlanError
from planner.training_plan.html_repr import plan_html
from planner.training_plan.schedule import Schedule
from planner.training_plan.sync import Sync
from planner.utils.text import counted, joined, stage_words
from planner.utils.validate import choice, count, instance_of, real, sequence
from planner.workload.compute_times import ComputeTimes
from planner.workload.workload import Workload

FORMAT = "planner.plan"
SCHEMA_VERSION = 2
MEAN_STEP = "mean_step"
"""Key of the certificate with a bound on the mean over many steps, where it is higher than that of
any single step."""


@dataclass(frozen=True)
class Routing:
    """Parameters of stochastic wiring (SWARM, Algorithm 1).

    Attributes
    ----------
    smoothing
        Weight of the newest response time in a router's estimates, from 0 to 1. With 0 the weights
        stay those of the plan's paths: a weighted round robin.
    told
        What routers measure of a request: a `RouterFeedback` or its value.

    References
    ----------
    M. Ryabinin et al., "SWARM Parallelism" (2023), 3.2 and 4.3.
    """

    smoothing: float = 0.1
    told: RouterFeedback = RouterFeedback.ANSWER

    def __post_init__(self) -> None:
        weight = real("smoothing", self.smoothing, 0, error=PlanError)
        if weight > 1:
            raise PlanError(f"smoothing is {weight:g}; give a weight from 0 to 1, SWARM's is 0.1")
        object.__setattr__(self, "smoothing", weight)
        object.__setattr__(self, "told", choice(RouterFeedback, "told", self.told, error=PlanError))


@dataclass(frozen=True)
class Predicted:
    """Simulated seconds of one step, in the mean over the cycle of schedules.

    Attributes
    ----------
    pipeline_s
        From the start of the step to the end of its last operation.
    averaging_s
        The longest averaging of a stage.
    step_s
        Step time.
    """

    pipeline_s: float
    averaging_s: float
    step_s: float

    def __post_init__(self) -> None:
        for name in ("pipeline_s", "averaging_s", "step_s"):
            seconds = real(f"predicted.{name}", getattr(self, name), error=PlanError)
            object.__setattr__(self, name, seconds)


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Everything an executor needs, with certificates of its quality.

    Attributes
    ----------
    cluster, network_name, workload, seed, compute_times
        Inputs of the plan.
    assignment, stage_layers
        Devices and layers of each stage.
    recompute
        Per stage, of how many of its first layers only the input is kept and F is repeated in B;
        empty if of none. True stands for all layers.
    left_out
        Names of devices that are not used.
    schedules, cycle
        Iteration t runs ``schedules[cycle[t % len(cycle)]]``.
    averaging
        Per stage, rounds of disjoint groups. If embedding and head share a matrix, are on two
        stages and average its gradients in every step, one more entry: its rounds over the devices
        of both stages, after those of the stages.
    predicted
        Simulated seconds.
    cost
        Dollars of a step; None if devices have no prices.
    codec
        Encoding of gradients.
    wiring
        Whether microbatches take the schedule's paths. If stochastic, paths and orders are only the
        predicted steady state: devices choose where each microbatch goes next, starting with the
        paths' proportions, and hold no more microbatches in flight than in the orders.
    routing
        Parameters of stochastic wiring.
    sync
        Averaging interval and outer optimizer.
    clip
        Largest global norm of gradients; None for no clipping.
    package_version
        Release that made the plan.
    certificates
        By part. ``paths``: mean makespan over the cycle with both directions of every link
        averaged, as in the path solver, and a bound for this placement.
    alternatives
        Runners-up of the decisions; empty if all were fixed, or none was examined.
    baselines
        Plans of simple rules that ``planner plan`` compared this one with, and their step times.
    """

    cluster: Cluster
    network_name: str
    workload: Workload
    seed: int
    compute_times: ComputeTimes
    assignment: AssignmentPlan
    stage_layers: tuple[tuple[int, int], ...]
    schedules: tuple[Schedule, ...]
    averaging: tuple[StageAveraging, ...]
    predicted: Predicted
    certificates: Mapping[str, Certificate]
    recompute: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    cycle: tuple[int, ...] = (0,)
    codec: Codec = Codec.NONE
    wiring: Wiring = Wiring.FIXED
    routing: Routing = field(default_factory=Routing)
    sync: Sync = field(default_factory=Sync)
    clip: float | None = None
    cost: Cost | None = None
    package_version: str = ""
    alternatives: tuple[Alternative, ...] = ()
    baselines: tuple[Alternative, ...] = ()

    def __post_init__(self) -> None:
        for kind, name in (
            (Cluster, "cluster"),
            (Workload, "workload"),
            (ComputeTimes, "compute_times"),
            (Predicted, "predicted"),
            (Sync, "sync"),
            (Routing, "routing"),
            (str, "network_name"),
            (str, "package_version"),
        ):
            instance_of(kind, getattr(self, name), name, error=PlanError)
        if self.cost is not None:
            instance_of(Cost, self.cost, "cost", error=PlanError)
        for kinds, name in ((Codec, "codec"), (Wiring, "wiring")):
            chosen = choice(kinds, name, getattr(self, name), error=PlanError)
            object.__setattr__(self, name, chosen)
        if self.clip is not None:
            norm = real("clip", self.clip, 0, above=True, error=PlanError)
            object.__setattr__(self, "clip", norm)
        layers = coercion.pairs("stage_layers", self.stage_layers)
        for name, value in (
            ("seed", count("seed", self.seed, 0, error=PlanError)),
            ("assignment", coercion.assignment(self.assignment)),
            ("stage_layers", layers),
            ("schedules", coercion.all_of(Schedule, "schedules", self.schedules)),
            ("averaging", _averaging(self.averaging)),
            ("certificates", coercion.certificates(self.certificates)),
            ("recompute", coercion.recomputed(self.recompute, layers)),
            ("left_out", coercion.all_of(str, "left_out", self.left_out)),
            ("cycle", coercion.numbers("cycle", self.cycle)),
            ("alternatives", coercion.all_of(Alternative, "alternatives", self.alternatives)),
            ("baselines", coercion.all_of(Alternative, "baselines", self.baselines)),
        ):
            object.__setattr__(self, name, value)
        if not self.schedules:
            raise PlanError("schedules must hold at least one, found none; make the plan again")
        if not self.package_version:
            object.__setattr__(self, "package_version", _package_version())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainingPlan):
            return NotImplemented
        return self is other or self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.content_hash)

    @property
    def step_certificate(self) -> Certificate | None:
        """The certificate with the highest bound on its step: on the mean over many, if it has one.

        None without a bound.
        """
        stated = [self.certificates.get(part) for part in (MEAN_STEP, "step")]
        return next((c for c in stated if c is not None and c.bound is not None), None)

    def __repr__(self) -> str:
        certificate = self.step_certificate
        bound = "" if certificate is None else f", bound {certificate.bound:.4g} s"
        sizes = stage_words([len(group) for group in self.assignment.groups])
        return (
            f"TrainingPlan({self.workload.name!r}, {self.cluster.network.size_words()}, {sizes}, "
            f"step {self.predicted.step_s:.4g} s{bound})"
        )

    def _repr_html_(self) -> str:
        ids, head = self.cluster.network.ids, self.head_stage
        stages = [
            (
                f"{start} to {stop - 1}{' and head' if j == head else ''}",
                self.recomputed_layers[j],
                [ids[d] if d < len(ids) else f"device {d}" for d in group],
            )
            for j, ((start, stop), group) in enumerate(
                zip(self.stage_layers, self.assignment.groups, strict=False)
            )
        ]
        return plan_html(repr(self), stages, self._facts())

    @property
    def recomputed_layers(self) -> list[str]:
        """For people, per stage: which of its layers the backward pass recomputes."""
        return [
            "all" if count == stop - start else f"first {count}" if count else "none"
            for count, (start, stop) in zip(
                # an invalid plan may have fewer
                chain(self.recompute, repeat(0)),
                self.stage_layers,
                strict=False,
            )
        ]

    def _facts(self) -> list[tuple[str, str]]:
        """Figures and decisions in words, the figures first."""
        step, predicted = self.step_certificate, self.predicted
        lines = [
            ("step", f"{predicted.step_s:.4g} s"),
            ("pipeline, averaging", f"{predicted.pipeline_s:.4g} s, {predicted.averaging_s:.4g} s"),
        ]
        if step is not None:
            lines.append(("bound", f"{step.bound:.4g} s, gap {step.gap:.1%}"))
        if self.cost is not None:
            lines.append(("cost of a step", f"{self.cost.step_usd:.4g} $"))
        lines += [
            ("schedules", ", ".join(schedule.name for schedule in self.schedules)),
            ("wiring", self.wiring),
            (
                "averages every",
                counted(self.sync.every_steps, "step") + " delayed" * self.sync.delayed,
            ),
            ("gradients, activations as", f"{self.codec}, {self.workload.boundary_codec}"),
        ]
        if self.left_out:
            lines.append(("left out", joined(self.left_out)))
        return lines

    @property
    def head_stage(self) -> int:
        """The stage whose devices run head and loss."""
        return self.schedules[0].head.stage(len(self.stage_layers))

    @property
    def stage_of(self) -> dict[int, int]:
        """Stage of each device."""
        return {d: j for j, group in enumerate(self.assignment.groups) for d in group}

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        """GPUs of each device; one where it has no stage."""
        counts = self.cluster.devices.gpu_counts
        if counts is None:
            counts = np.full(len(self.cluster), self.workload.tensor_parallel)
        stage_of = self.stage_of
        return tuple(c if d in stage_of else 1 for d, c in enumerate(np.asarray(counts).tolist()))

    @property
    def two_frequency(self) -> bool:
        """Whether groups average gradients in every step, and changes of parameters every H."""
        return any(map(within, self.averaging))

    @property
    def averages_tied(self) -> bool:
        """Whether the stages of embedding and head average their shared matrix."""
        return len(self.averaging) > len(self.stage_layers)

    @property
    def must_average_tied(self) -> bool:
        """Whether two stages have gradients of a matrix that embedding and head share."""
        return self.workload.tied_parameters > 0 and self.head_stage > 0

    def averaged_by(self, entry: int) -> tuple[int, ...]:
        """Devices that have gradients of an averaged vector.

        Parameters
        ----------
        entry
            Index in `averaging`.
        """
        groups = self.assignment.groups
        if entry < len(groups):
            return groups[entry]
        return tuple(sorted((*groups[0], *groups[self.head_stage])))

    def last_averaged(self, stage: int) -> tuple[int, ...]:
        """Entries of `averaging` with whose last rounds the averaging of a stage ends.

        Parameters
        ----------
        stage
            Index of the stage.
        """
        tied = self.averages_tied and stage in (0, self.head_stage)
        return (stage, len(self.stage_layers)) if tied and self.shards_optimizer else (stage,)

    def longest_averaging_s(self, seconds: Mapping[int, float]) -> float:
        """The longest averaging of a stage, followed by that of a tied matrix where there is one.

        Parameters
        ----------
        seconds
            By entry of `averaging`.

        Returns
        -------
        float
            Seconds; 0 if no device averages.
        """
        stages = len(self.stage_layers)
        # with optimizer state in shards, stages end with what they share
        both = 0.0 if self.shards_optimizer else seconds.get(stages, 0.0)
        ends = (0, self.head_stage) if self.averages_tied else ()
        return max((seconds.get(j, 0.0) + both * (j in ends) for j in range(stages)), default=0.0)

    def vector_bytes(self, workload: Workload | None = None) -> tuple[float, ...]:
        """Bytes of every averaged vector before encoding.

        Parameters
        ----------
        workload
            None for the plan's.

        Returns
        -------
        tuple[float, ...]
            One per entry of `averaging`.
        """
        averaged = self.workload if workload is None else workload
        return averaged.averaged_bytes(self.stage_layers, self.head_stage, apart=self.averages_tied)

    def averaged_stage(self, device: int) -> int:
        """The stage whose gradients a device averages: the one it holds or aggregates for.

        Parameters
        ----------
        device
            Index in the cluster.
        """
        stages = self.stage_of
        return stages[device] if device in stages else self.averages_for[device]

    @property
    def averages_for(self) -> dict[int, int]:
        """By aggregator, the stage whose gradients it reduces."""
        return {
            d: j
            for j, rounds in enumerate(self.averaging)
            for groups in rounds
            for group in groups
            for d in group.aggregators
        }

    @property
    def needs_norm(self) -> bool:
        """Whether updates need the global norm: to clip, or in fp16 to detect overflow."""
        return self.clip is not None or self.workload.precision.scales_loss

    @property
    def shards_optimizer(self) -> bool:
        """Whether devices hold and update only the parameters that they spread in averaging."""
        return self.workload.optimizer_shards > 1

    @property
    def optimizer_copies(self) -> int:
        """Devices of a stage, or groups of them, that have all of its optimizer state, at least."""
        if not self.shards_optimizer:
            return min(map(len, self.assignment.groups))
        return min(len(rounds[-1]) for rounds in self.averaging)

    @property
    def stage_updated_by(self) -> dict[int, int]:
        """Stage of each device that updates parameters: with shards, also of aggregators."""
        return self.stage_of | (self.averages_for if self.shards_optimizer else {})

    @property
    def norm_devices(self) -> tuple[int, ...]:
        """Devices whose updates wait for the global norm, first the one that sums it.

        All devices with a stage, if none has all sums. The summing device minimises the largest
        distance to the others.
        """
        if not self.needs_norm or (len(self.stage_layers) == 1 and not self.shards_optimizer):
            return ()
        holders = sorted(self.stage_updated_by)
        latency = self.cluster.network.latency_table.picked(holders)
        round_trip_s = np.where(latency.joins_two, latency.values + latency.values.T, 0.0)
        adds = holders.pop(int(round_trip_s.max(axis=1)[latency.class_of].argmin()))
        return (adds, *holders)

    @property
    def norm_reporters(self) -> tuple[int, ...]:
        """Devices that report sums of squares, if needed: of each stage the first one.

        With optimizer state in shards, those of each stage's first group that spreads.
        """
        if not self.norm_devices:
            return ()
        if not self.shards_optimizer:
            return tuple(group[0] for group in self.assignment.groups)
        spreading = [rounds[-1][0] for rounds in self.averaging]
        owners = (zip(g.members, g.shares, strict=True) for g in spreading)
        return tuple(sorted({d for pairs in owners for d, share in pairs if share > 0}))

    @property
    def content_hash(self) -> str:
        """SHA-256 of inputs and decisions, not of times, versions, certificates or names."""
        return hash_of(self.hashed())

    def replace(self, **changes: Any) -> TrainingPlan:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def hashed(self) -> dict[str, Any]:
        """Inputs and decisions, JSON-ready: the content of `content_hash`."""
        return self._inputs() | self._decisions()

    def _inputs(self) -> dict[str, Any]:
        network = self.cluster.network
        return {
            "seed": self.seed,
            # the hash covers ids and measurements; the file name is irrelevant
            "network": {"hash": network.content_hash, "regions": list(network.regions)},
            "devices": device_fields(self.cluster.devices),
            "workload": self.workload.to_dict(),
            "compute_times": self.compute_times.to_dict(),
        }

    def _decisions(self) -> dict[str, Any]:
        grid = self.assignment.grid
        return {
            "assignment": {
                "groups": _lists(self.assignment.groups),
                "grid": None if grid is None else grid.tolist(),
                "layers": _lists(self.stage_layers),
                "recompute": [
                    bool(count) if count in (0, stop - start) else count
                    for count, (start, stop) in zip(self.recompute, self.stage_layers, strict=False)
                ],
                "left_out": list(self.left_out),
            },
            "paths": {
                "schedules": [s.to_dict() for s in self.schedules],
                "cycle": list(self.cycle),
            },
            "averaging": {
                "codec": self.codec,
                **({} if self.clip is None else {"clip": self.clip}),
                "stages": [_rounds(rounds) for rounds in self.averaging[: len(self.stage_layers)]],
                **({"tied": _rounds(self.averaging[-1])} if self.averages_tied else {}),
            },
            "wiring": {
                "kind": self.wiring,
                **(asdict(self.routing) if self.wiring is Wiring.STOCHASTIC else {}),
            },
            "sync": self.sync.to_dict(),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form as described by ``plan.schema.json``."""
        content = self.hashed()
        own_hash = hash_of(content)
        content["network"] |= {"name": self.network_name, **network_fields(self.cluster.network)}
        content["devices"] |= gpu_fields(self.cluster.devices)
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "package_version": self.package_version,
            "content_hash": own_hash,
            **content,
            "predicted": asdict(self.predicted),
            **({} if self.cost is None else {"cost": self.cost.to_dict()}),
            "certificates": {certified: asdict(c) for certified, c in self.certificates.items()},
            **{
                name: [item.to_dict() for item in values]
                for name, values in (
                    ("alternatives", self.alternatives),
                    ("baselines", self.baselines),
                )
                if values
            },
        }


def lockstep_devices(plan: TrainingPlan, device: int) -> tuple[int, ...]:
    """Devices that stay equal to a device between outer steps, because they average gradients.

    Returns
    -------
    tuple[int, ...]
        The device alone, unless the plan uses two-frequency averaging.
    """
    groups = (group for groups in within(plan.averaging[plan.stage_of[device]]) for group in groups)
    return next((group.members for group in groups if device in group.members), (device,))


def hash_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON-ready content, independent of the order of fields."""
    text = json_text(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def json_text(value: Any, *, sort_keys: bool = False) -> str:
    """JSON without spaces."""
    try:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise PlanError(f"a plan holds what JSON has not ({error}); make it again") from None


def _averaging(stages: Any) -> tuple[StageAveraging, ...]:
    """Rounds of groups of every stage."""
    averaging = []
    for j, rounds in enumerate(sequence("averaging", stages, error=PlanError)):
        stage_rounds = sequence(f"averaging[{j}]", rounds, error=PlanError)
        averaging.append(
            tuple(
                coercion.all_of(AveragingGroup, f"averaging[{j}]", groups)
                for groups in stage_rounds
            )
        )
    return tuple(averaging)


def _rounds(rounds: StageAveraging) -> dict[str, Any]:
    return {"rounds": [[g.to_dict() for g in groups] for groups in rounds]}


@cache
def _package_version() -> str:
    try:
        return metadata.version("planner")
    except metadata.PackageNotFoundError:  # run from a checkout, as on a bare GPU node
        return "unknown"


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
