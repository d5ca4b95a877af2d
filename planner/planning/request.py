"""The planning request: one field per decision, fixed by the user or left open."""

from __future__ import annotations

import enum
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

from planner.network.prices import Prices
from planner.problems import ProblemError
from planner.problems.assignment_method import AssignmentMethod
from planner.problems.path_method import PathMethod
from planner.problems.quantities import choice, instance_of, whole
from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import Routing
from planner.training_plan.sync import MAX_EVERY, OuterOptimizer, Sync
from planner.utils.validate import real, short_repr
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.calibration import Calibration
from planner.workload.costs import ALL_LAYERS

FULL_EVERY, MAX_FULL_EVERY = 10, 1000
"""Default and largest interval of full iterations (SkipPipe, 3.6)."""

AUTO = "auto"
"""Value of ``stages``, ``tensor_parallel`` and ``optimizer_shards`` that tries several numbers."""
EVEN = "even"
"""Value of ``stage_layers`` that gives every stage the same number of layers."""


class PlanKind(enum.StrEnum):
    """Which plans are searched; the value is how messages call it."""

    JOINT = "the joint search"
    STRAIGHT = "straight pipelines"
    PARTIAL_PATHS = "partial paths"


class OperationOrder(enum.StrEnum):
    """Order of a device's operations in straight pipelines (`planning.straight.schedules`)."""

    EAGER_1F1B = "eager-1f1b"
    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


class RequestedWiring(enum.StrEnum):
    """Which device of the next stage may receive a microbatch."""

    STRAIGHT = "straight"
    FLOW = "flow"
    STOCHASTIC = "stochastic"


class Objective(enum.StrEnum):
    """What a plan minimises: step time or cost."""

    TIME = "time"
    COST = "cost"


class InnerAveraging(enum.StrEnum):
    """Whose gradients are averaged in every step in two-frequency averaging."""

    REGION = "region"


class ShareRule(enum.StrEnum):
    """How the members of a group divide the gradient vector that they reduce."""

    EQUAL = "equal"
    ADAPTIVE = "adaptive"


_Rule = Callable[[str, Any], Any]
"""Validates the value of a field, and returns it in its usual type."""


def _optional(rule: _Rule) -> _Rule:
    return lambda name, value: None if value is None else rule(name, value)


def _one_of(kind: type[enum.StrEnum]) -> _Rule:
    return lambda name, value: choice(kind, name, value)


def _instance(kind: type[Any]) -> _Rule:
    return lambda name, value: instance_of(kind, value, name)


def _whole(least: int, most: float = math.inf) -> _Rule:
    def rule(name: str, value: Any) -> int:
        number = whole(name, value)
        if not least <= number <= most:
            limits = f"at least {least}" + ("" if most == math.inf else f" and at most {most:,}")
            raise ProblemError(f"{name} is {short_repr(value)}; it must be {limits}")
        return number

    return rule


def _real(name: str, value: Any) -> float:
    return real(name, value, 0, error=ProblemError)


def _norm(name: str, value: Any) -> float:
    return real(name, value, 0, above=True, error=ProblemError)


def _full_every(name: str, value: Any) -> int:
    every = whole(name, value)
    if every < 0 or every == 1 or every > MAX_FULL_EVERY:
        raise ProblemError(
            f"{name} is {short_repr(every)}; give 2 to {MAX_FULL_EVERY}, 0 for no full "
            "iteration, or path_stages of all stages for full ones only"
        )
    return every


def _number_or_auto(name: str, value: Any) -> int | str:
    return AUTO if isinstance(value, str) and value == AUTO else int(_whole(1)(name, value))


def _gpus_per_worker(name: str, value: Any) -> int | str | Mapping[str, int]:
    if not isinstance(value, Mapping):
        return _number_or_auto(name, value)
    return {
        str(machine): int(_whole(1)(f"{name} of machine {machine!r}", count))
        for machine, count in value.items()
    }


def _stage_sizes(name: str, value: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(whole("a stage size", size) for size in value)
    except TypeError:
        raise ProblemError(
            f"{name} must list the devices of every stage, found {value!r}"
        ) from None
    if any(size < 1 for size in sizes):
        raise ProblemError(f"a stage size must be at least 1, found {list(sizes)}")
    return sizes


def _stage_layers(name: str, value: Any) -> tuple[tuple[int, int], ...] | str:
    if isinstance(value, str) and value == EVEN:
        return EVEN
    try:
        return tuple((whole("a layer", a), whole("a layer", b)) for a, b in value)
    except (TypeError, ValueError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(
            f"{name} must list a range (start, stop) for every stage, or be '{EVEN}', found "
            f"{value!r}"
        ) from None


def _recompute(name: str, value: Any) -> tuple[int, ...] | str:
    if isinstance(value, str) and value in ("all", "none"):
        return "all" if value == "all" else ()
    try:
        if isinstance(value, str):
            raise TypeError
        return tuple(sorted({whole("a stage to recompute", j) for j in value}))
    except TypeError:
        raise ProblemError(
            f"{name} must list numbers of stages, or be 'all' or 'none', found {value!r}"
        ) from None


_RULES: dict[str, _Rule] = {
    "stages": _optional(_number_or_auto),
    "pipelines": _optional(_whole(1)),
    "stage_sizes": _optional(_stage_sizes),
    "stage_layers": _optional(_stage_layers),
    "recompute": _optional(_recompute),
    "microbatch_samples": _optional(_whole(1)),
    "path_stages": _optional(_whole(1)),
    "full_every": _optional(_full_every),
    "max_swaps": _optional(_whole(0)),
    "schedule": _one_of(OperationOrder),
    "head": _optional(_one_of(Head)),
    "in_flight": _optional(_whole(1)),
    "averaging": _optional(_one_of(ShareRule)),
    "group_size": _optional(_whole(2)),
    "codec": _one_of(Codec),
    "boundary_codec": _one_of(BoundaryCodec),
    "sync_every": _whole(1, MAX_EVERY),
    "within": _optional(_one_of(InnerAveraging)),
    "outer": _instance(OuterOptimizer),
    "delayed": _instance(bool),
    "objective": _one_of(Objective),
    "hour_usd": _real,
    "prices": _instance(Prices),
    "clip": _optional(_norm),
    "method": _one_of(AssignmentMethod),
    "path_method": _one_of(PathMethod),
    "calibration": _optional(_instance(Calibration)),
    "network_name": _instance(str),
    "wiring": _optional(_one_of(RequestedWiring)),
    "routing": _instance(Routing),
    "tensor_parallel": _gpus_per_worker,
    "optimizer_shards": _number_or_auto,
    "optimizer_copies": _whole(1),
}

_KINDS: dict[str, tuple[PlanKind, ...]] = {
    "pipelines": (PlanKind.STRAIGHT,),
    "schedule": (PlanKind.STRAIGHT,),
    "method": (PlanKind.STRAIGHT, PlanKind.PARTIAL_PATHS),
    "stage_sizes": (PlanKind.PARTIAL_PATHS,),
    "full_every": (PlanKind.PARTIAL_PATHS,),
    "max_swaps": (PlanKind.PARTIAL_PATHS,),
    "path_method": (PlanKind.PARTIAL_PATHS,),
    "wiring": (PlanKind.JOINT, PlanKind.STRAIGHT),
    "within": (PlanKind.JOINT, PlanKind.STRAIGHT),
    "objective": (PlanKind.JOINT,),
}
"""Fields that only some kinds of plan have; the others have their default value."""


@dataclass(frozen=True)
class PlanRequest:
    """Every decision that `planner.plan` makes: fixed to a value, or left open.

    The fields decide which plans are searched:

    - **Joint search** (default): any device of a stage may send a microbatch to any device of the
      next one. Devices, number and sizes of stages, layers, recomputation and paths are searched
      together, as far as they are open.
    - **Straight pipelines**, where ``stages`` or ``pipelines`` is given without ``wiring``, or
      ``wiring`` is ``"straight"``: equal stages; a microbatch visits one device per stage, in a
      row of the grid.
    - **Partial paths** (SkipPipe), where ``path_stages`` is given: microbatches skip stages.

    Attributes
    ----------
    stages
        Number of stages. In straight pipelines ``"auto"`` tries all numbers of stages that divide
        the devices, with all microbatch sizes, and returns the plan with the shortest step.
    pipelines
        Straight pipelines: their number; ``stages * pipelines`` must be the number of devices.
    stage_sizes
        Partial paths: devices per stage. Those of the first stage run head and loss.
    stage_layers
        Range of layers ``(start, stop)`` of every stage, or ``"even"``. By default searched; in
        straight pipelines and partial paths, even if devices are equal and memory suffices, else
        such that the slowest stage is as fast as possible.
    recompute
        Stages that keep only their input and repeat the forward pass before the backward pass, or
        ``"all"`` or ``"none"``. By default searched; in straight pipelines none, if that fits.
    microbatch_samples
        Samples per microbatch; by default the workload's or, where a plan with more is faster, a
        power of two times as many.
    path_stages
        Partial paths: stages that each microbatch visits. The batch is divided evenly among the
        devices of stage 0.
    full_every
        Partial paths: one iteration in this many visits every stage (SkipPipe, 3.6); default 10,
        0 for none.
    max_swaps
        Partial paths: pairs of neighbouring stages that a path may visit in reverse; default 1.
    schedule
        Straight pipelines: order of operations.
    head
        Stage that runs head and loss: ``"last"`` or ``"first"``. Default ``"last"``; partial paths
        always ``"first"``. On the first stage a head that shares the embedding's matrix needs no
        copy of it: then both are tried and, with ``sync_every`` above 1, where copies would
        diverge, the default is ``"first"``.
    in_flight
        Most microbatches between forward and backward on a device, in eager 1F1B and partial
        paths; by default what its memory holds.
    averaging
        ``"equal"`` shares of the gradient vector within a stage, or ``"adaptive"`` ones that
        follow bandwidth (DeDLOC). Default ``"adaptive"``; outside the joint search ``"equal"``.
    group_size
        Average in rounds of groups of at most this many devices; by default one group per stage.
    codec
        Encoding of gradients: ``"none"`` or ``"int8"``.
    boundary_codec
        Encoding of activations and their gradients between stages: ``"none"``, ``"bf16"``,
        ``"fp16"``, ``"int8"`` or ``"int4"``. Changes the computation.
    sync_every
        H: average every H steps (DiLoCo). Between, every device takes optimizer steps of its own;
        an outer optimizer then applies the mean change of parameters. Changes the computation, so
        it is never chosen by the planner.
    within
        Two-frequency averaging, with H > 1: ``"region"`` averages gradients within regions in every
        step, and changes of parameters between regions every H. Changes the computation.
    outer
        Outer optimizer, with H > 1.
    delayed
        With H > 1: average during the next step, and apply the outer step at its end. Changes the
        computation.
    objective
        ``"time"`` minimises step time. ``"cost"`` minimises dollars a step for devices and
        messages, plus step time at ``hour_usd`` dollars per hour; joint search only.
    hour_usd
        Value of an hour's wait, in dollars.
    prices
        Of traffic between regions; devices have theirs in the cluster.
    clip
        Largest global norm of gradients. Every update then waits for the slowest stage's averaging.
    method
        Of `planner.solve_assignment`, outside the joint search.
    path_method
        Of `planner.solve_paths`, for partial paths; ``"cbs"`` is that of the SkipPipe paper.
    calibration
        Measured compute times, of at least one device of each kind; by default compute times follow
        from FLOPs.
    network_name
        Name of the network in the plan file.
    wiring
        ``"straight"``, ``"flow"``, or ``"stochastic"``: devices choose the next device while they
        run, by weights that start from the planned flow (SWARM). The plan then stores no paths.
    routing
        Parameters of stochastic wiring.
    tensor_parallel
        GPUs of a machine that hold a stage together (`planner.tensor_parallel_workers`): 1 by
        default, a number for all machines, numbers by machine (1 in others), or ``"auto"`` to
        search what machines and model allow, also by kind of machine. The devices of the plan are
        then such workers.
    optimizer_shards
        Each device of a stage holds at most one part in so many of the stage's fp32 parameters and
        moments, updates it, and sends the parameters to the others (ZeRO, stage 1): 1 by default,
        all of them on every device, or ``"auto"`` to search. Every stage has as many devices at
        least. Changes no result; replaces the workload's number.
    optimizer_copies
        Devices of a stage that have each part of its optimizer state, at least, so that the
        executor can go on without a lost one (``--elastic``): 1 by default. With shards the devices
        of a stage form as many groups, of which each has all parts.

    Raises
    ------
    ProblemError
        A value out of range, or fields that contradict each other.
    """

    stages: int | Literal["auto"] | None = None
    pipelines: int | None = None
    stage_sizes: Sequence[int] | None = None
    stage_layers: Sequence[tuple[int, int]] | Literal["even"] | None = None
    recompute: Sequence[int] | Literal["all", "none"] | None = None
    microbatch_samples: int | None = None
    path_stages: int | None = None
    full_every: int | None = None
    max_swaps: int | None = None
    schedule: str = OperationOrder.EAGER_1F1B
    head: str | None = None
    in_flight: int | None = None
    averaging: str | None = None
    group_size: int | None = None
    codec: str = Codec.NONE
    boundary_codec: str = BoundaryCodec.NONE
    sync_every: int = 1
    within: str | None = None
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    delayed: bool = False
    objective: str = Objective.TIME
    hour_usd: float = 0.0
    prices: Prices = field(default_factory=Prices)
    clip: float | None = None
    method: str = AssignmentMethod.AUTO
    path_method: str = PathMethod.AUTO
    calibration: Calibration | None = None
    network_name: str = ""
    wiring: str | None = None
    routing: Routing = field(default_factory=Routing)
    tensor_parallel: int | Mapping[str, int] | Literal["auto"] = 1
    optimizer_shards: int | Literal["auto"] = 1
    optimizer_copies: int = 1

    def __repr__(self) -> str:
        changed = [f"{name}={reprlib.repr(value)}" for name, value in self._changed().items()]
        return f"PlanRequest({', '.join(changed)})"

    def _changed(self) -> dict[str, Any]:
        """Fields that differ from their default."""
        changed = {}
        for spec in fields(self):
            factory = spec.default_factory
            default = spec.default if factory is MISSING else factory()
            if (value := getattr(self, spec.name)) != default:
                changed[spec.name] = value
        return changed

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        changed = self._changed()
        for name, kinds in _KINDS.items():
            if name in changed and self.kind not in kinds:
                raise ProblemError(self._misplaced(name, kinds))
        self._validate_stages()
        self._validate_shards()
        self._validate_operations()
        self._validate_averaging()
        if self.objective == Objective.TIME and self.hour_usd > 0:
            raise ProblemError(
                f"hour_usd is {self.hour_usd:g}, the value of waiting beside other costs; give "
                "objective 'cost', or leave it out"
            )

    def _misplaced(self, name: str, kinds: tuple[PlanKind, ...]) -> str:
        """The message for a field that this kind of plan does not have."""
        value = getattr(self, name)
        shown = repr(str(value)) if isinstance(value, str) else short_repr(value)
        if PlanKind.PARTIAL_PATHS in kinds and PlanKind.STRAIGHT not in kinds:
            remedy = "give path_stages (all stages for full paths)"
        elif self.kind is PlanKind.PARTIAL_PATHS:
            remedy = "leave path_stages out"
        elif self.kind is PlanKind.STRAIGHT:
            remedy = "leave stages and pipelines out, or give wiring 'flow'"
        elif self.stages is None:
            remedy = "give a number of stages"
        else:
            remedy = f"leave out wiring '{self.wiring}'"
        words = " and ".join(kinds)
        return f"{name} is {shown}, which only {words} can have; {remedy}, or leave {name} out"

    def _validate_stages(self) -> None:
        kind, layers = self.kind, self.given_layers
        if self.stages == AUTO:
            if kind is not PlanKind.STRAIGHT:
                other = "path_stages" if self.path_stages else f"wiring '{self.wiring}'"
                raise ProblemError(
                    f"stages 'auto' goes with straight pipelines, found {other}; give a number of "
                    f"stages, or leave {other} out"
                )
            for name in ("pipelines", "stage_layers"):
                if getattr(self, name) is not None:
                    raise ProblemError(
                        f"{name} follows from stages 'auto'; leave {name} out, or give a number of "
                        "stages"
                    )
        if self.stage_sizes is not None and self.stages not in (None, len(self.stage_sizes)):
            raise ProblemError(
                f"stages is {self.stages} but stage_sizes lists {len(self.stage_sizes)}; leave "
                "stages out"
            )
        stages = self.fixed_stages
        if kind is not PlanKind.STRAIGHT and layers is not None and len(layers) != stages:
            remedy = "leave stages out" if self.stage_sizes is None else "list as many"
            raise ProblemError(
                f"stage_layers lists {len(layers)} stages but there are {stages}; {remedy}"
            )
        if kind is PlanKind.JOINT and stages is None:
            fixed = self.recompute not in (None, "all", ())
            for name, is_given in (("stage_layers", self.even_layers), ("recompute", fixed)):
                if is_given:
                    raise ProblemError(f"{name} goes with a number of stages; give stages too")
        if self.path_stages is not None and stages is not None and self.path_stages > stages:
            raise ProblemError(
                f"path_stages is {self.path_stages}; it must be 1 to the {stages} stages"
            )
        if self.path_method == PathMethod.STRAIGHT and self.path_stages != stages:
            raise ProblemError(
                f"path_method 'straight' visits all {stages} stages, found path_stages "
                f"{self.path_stages}; take dtfm-skip"
            )

    def _validate_shards(self) -> None:
        """Refuse what optimizer state in shards does not go with."""
        if self.optimizer_shards == 1:
            return
        reasons = {
            "sync_every": "devices update on their own between outer steps, so that each needs all "
            "of its optimizer state",
            "codec": "parameters are returned, for which int8 is too coarse",
            "group_size": "only one group of a stage reduces to owners of all parameters",
            "path_stages": "stages of partial paths hold all of their optimizer state so far",
            "calibration": "its updates were measured with all optimizer state on each device",
        }
        changed = self._changed()
        for name, reason in reasons.items():
            if name in changed:
                raise ProblemError(
                    f"optimizer_shards is {self.optimizer_shards} with {name}: {reason}; leave one "
                    "of them out"
                )

    def _validate_operations(self) -> None:
        """Head, order of operations, and wiring."""
        if self.kind is PlanKind.PARTIAL_PATHS and self.head == Head.LAST:
            raise ProblemError("head is 'last'; partial paths end where they start, give 'first'")
        if self.in_flight is not None and self.schedule != OperationOrder.EAGER_1F1B:
            raise ProblemError(
                f"in_flight is {self.in_flight}; give it only with eager-1f1b or path_stages"
            )
        degree = self.tensor_parallel
        numbers = degree.values() if isinstance(degree, Mapping) else (degree,)
        if self.wiring == RequestedWiring.STOCHASTIC and set(numbers) != {1}:
            raise ProblemError(
                f"tensor_parallel is {self.tensor_parallel} with wiring 'stochastic': devices of "
                "several GPUs do not choose paths; leave one of them out"
            )
        changed = [
            f"{name} is {value}"
            for name, value in (("smoothing", self.routing.smoothing), ("told", self.routing.told))
            if value != getattr(Routing(), name)
        ]
        if changed and self.wiring != RequestedWiring.STOCHASTIC:
            raise ProblemError(
                f"{' and '.join(changed)}, for wiring 'stochastic', where devices choose the next "
                "one; give that, or leave it out"
            )

    def _validate_averaging(self) -> None:
        if self.clip is not None and self.sync_every > 1:
            raise ProblemError(
                "clip limits the norm of gradients that are averaged in every step, found "
                f"sync_every {self.sync_every}; leave one of them out"
            )
        for name in ("delayed", "within"):
            if getattr(self, name) and self.sync_every == 1:
                raise ProblemError(
                    f"{name} goes with sync_every above 1, found sync_every 1; give more, or leave "
                    f"{name} out"
                )
        if self.codec != Codec.NONE and self.group_size is not None:
            raise ProblemError(
                f"codec '{self.codec}' conflicts with group_size: each group of the second round "
                "would encode for itself, so that the devices of a stage would differ; leave one "
                "of them out"
            )
        for name in ("delayed", "group_size"):
            if self.within is not None and getattr(self, name):
                raise ProblemError(
                    f"within '{self.within}' conflicts with {name}; leave one of them out"
                )

    @property
    def kind(self) -> PlanKind:
        """Which plans are searched."""
        if self.path_stages is not None:
            return PlanKind.PARTIAL_PATHS
        straight = self.stages is not None or self.pipelines is not None
        if self.wiring is not None:
            straight = self.wiring == RequestedWiring.STRAIGHT
        return PlanKind.STRAIGHT if straight else PlanKind.JOINT

    @property
    def sync(self) -> Sync:
        """Averaging interval and outer optimizer."""
        if self.sync_every == 1:
            return Sync()
        return Sync(self.sync_every, self.outer, self.delayed)

    @property
    def fixed_stages(self) -> int | None:
        """The number of stages, if it is given or follows from what is given."""
        for per_stage in (self.stage_sizes, self.given_layers):
            if self.stages is None and per_stage is not None:
                return len(per_stage)
        return None if isinstance(self.stages, str) else self.stages

    @property
    def given_layers(self) -> tuple[tuple[int, int], ...] | None:
        """``stage_layers``, if it lists ranges."""
        if self.stage_layers is None or self.even_layers:
            return None
        return tuple(self.stage_layers)  # type: ignore[arg-type]

    @property
    def even_layers(self) -> bool:
        """Whether every stage is to have the same number of layers."""
        return self.stage_layers == EVEN

    @property
    def shares(self) -> ShareRule:
        """``averaging`` with its default."""
        if self.averaging is None:
            return ShareRule.ADAPTIVE if self.kind is PlanKind.JOINT else ShareRule.EQUAL
        return ShareRule(self.averaging)

    @property
    def may_be_hierarchical(self) -> bool:
        """Whether stages may average hierarchically where devices share a site's line."""
        if self.group_size is not None or self.within is not None:
            return False
        return self.averaging == ShareRule.ADAPTIVE or (
            self.averaging is None and self.kind is not PlanKind.PARTIAL_PATHS
        )

    @property
    def in_copies(self) -> bool:
        """Whether groups of each stage hold all of its optimizer state."""
        return self.optimizer_shards != 1 and self.optimizer_copies > 1

    @property
    def head_place(self) -> Head:
        """``head`` with its default."""
        if self.head is None:
            return Head.FIRST if self.kind is PlanKind.PARTIAL_PATHS else Head.LAST
        return Head(self.head)

    @property
    def swaps(self) -> int:
        """``max_swaps`` with its default."""
        return 1 if self.max_swaps is None else self.max_swaps

    def recomputing(self, stages: int) -> tuple[int, ...]:
        """How many layers each of ``stages`` stages recomputes: by default none, or all."""
        if self.recompute is None or self.recompute == "all":
            return (ALL_LAYERS if self.recompute == "all" else 0,) * stages
        unknown = [j for j in self.recompute if j not in range(stages)]
        if unknown:
            raise ProblemError(
                f"recompute names stage {unknown[0]}; stages are 0 to {stages - 1}, or give 'all'"
            )
        return tuple(ALL_LAYERS if j in self.recompute else 0 for j in range(stages))

    def cycle(self, stages: int) -> tuple[int, ...]:
        """Schedules of successive iterations: 0 is the usual one, 1 visits all ``stages``."""
        if self.kind is not PlanKind.PARTIAL_PATHS:
            return (0,)
        every = FULL_EVERY if self.full_every is None else self.full_every
        always_full = self.path_stages == stages and self.swaps == 0
        return (0,) if every == 0 or always_full else (0,) * (every - 1) + (1,)

    def replace(self, **changes: Any) -> PlanRequest:
        """A copy with some fields changed.

        Raises
        ------
        ProblemError
            An unknown field, or a value that `PlanRequest` refuses.
        """
        for name in changes:
            if name not in _RULES:
                raise ProblemError(f"a plan has no {name!r} to ask for; it has {', '.join(_RULES)}")
        return replace(self, **changes)
