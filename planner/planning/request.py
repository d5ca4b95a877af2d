"""The planning request: one field per decision, fixed by the user or left open."""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from planner.network.cluster import Cluster
from planner.network.dtype import Dtype
from planner.network.prices import Prices
from planner.planning.calibrated import calibrated
from planner.planning.hierarchical_averaging import has_hierarchy
from planner.problems import ProblemError
from planner.problems.assignment_method import Method
from planner.problems.path_method import PathMethod
from planner.problems.quantities import choice, instance_of, seed_of, whole
from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import Routing
from planner.training_plan.sync import MOST_EVERY, OuterOptimizer, Sync
from planner.utils.validate import real, short_repr
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.calibration import Calibration
from planner.workload.workload import Workload

FULL_EVERY, MOST_FULL_EVERY = 10, 1000
"""One iteration in so many is full (SkipPipe, 3.6); more make a cycle that no run gets through."""

EVEN = "even"
"""Instead of layers: as many in every stage."""


class OperationOrder(enum.StrEnum):
    """In which order a device of a straight pipeline works; see `planner.planning.straight`."""

    EAGER_1F1B = "eager-1f1b"
    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


class RequestedWiring(enum.StrEnum):
    """To whom microbatches go after a stage."""

    STRAIGHT = "straight"
    FLOW = "flow"
    STOCHASTIC = "stochastic"


class Objective(enum.StrEnum):
    """What is least in a plan: seconds of a step, or dollars."""

    TIME = "time"
    COST = "cost"


class InnerAveraging(enum.StrEnum):
    """Whose gradients are averaged in every step where all average every H."""

    REGION = "region"


class ShareRule(enum.StrEnum):
    """How a gradient is divided among those that sum it."""

    EQUAL = "equal"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class PlanRequest:
    """Every decision that `planner.plan` makes.

    Attributes
    ----------
    wiring
        ``"flow"``: a microbatch may go to any device of the next stage; searched with all that is
        left open: who takes part, how many stages, of which sizes and layers, which recompute.
        ``"stochastic"``: the same plan, whose flow is where devices begin that choose while they
        run (SWARM): paths and orders are then what is predicted, and are not kept.
        ``"straight"``: pipelines of equal stages, part by part; where stages or pipelines are given
        this is what is taken.
    stages, pipelines
        In straight pipelines their product must be the number of devices; pipelines defaults to
        the rest. ``"auto"`` tries all stages and microbatch sizes that divide devices and batch,
        and takes the fastest predicted step.
    stage_sizes
        Devices per stage, the first of which also run head and loss; with ``path_stages`` only.
    stage_layers
        Layers ``(start, stop)`` of every stage, or ``"even"``; by default searched, or in straight
        pipelines cut evenly, or where devices differ in speed or memory, layers among themselves,
        or memory does not hold even ones, so that the slowest stage is fastest and memory holds.
        With ``path_stages`` cut evenly, or so that the slowest stage is fastest, microbatches that
        skip it left out: what takes less time for a visited layer.
    recompute
        Stages whose F keeps their input only and whose B runs F again, or ``"all"`` or ``"none"``;
        by default searched, in straight pipelines none.
    microbatch_samples
        Samples that travel together; by default the workload's, with ``"auto"`` stages what is
        fastest.
    path_stages
        Stages that a microbatch visits, the others are skipped (SkipPipe); the batch is split
        evenly over the devices of stage 0. None: all stages, in straight pipelines.
    full_every
        With ``path_stages``: one iteration in so many visits every stage, without swaps (SkipPipe,
        3.6), by default 10; 0: none does.
    max_swaps
        With ``path_stages``: pairs of neighbouring stages that a path may visit in reverse, by
        default 1.
    schedule
        Order of operations in straight pipelines.
    head
        Whether the ``"last"`` or the ``"first"`` device of a pipeline runs head and loss; by
        default the last, with ``path_stages`` the first.
    in_flight
        For eager 1F1B and paths: microbatches a device may hold between F and B, by default what
        its memory holds.
    averaging
        ``"equal"`` shares within a stage, or ``"adaptive"`` ones after DeDLOC; by default equal
        in straight pipelines.
    group_size
        Average in rounds of groups of at most so many devices; by default all of a stage at once.
    codec
        ``"none"``, or ``"int8"`` for gradients in 8-bit integers on the wire.
    boundary_codec
        ``"none"``, ``"bf16"``, ``"fp16"``, ``"int8"`` or ``"int4"``: activations and their
        gradients between stages. It changes what is computed.
    sync_every
        H: average every so many steps (DiLoCo-SWARM). In between each device takes steps of its
        own, then an outer optimizer takes one with the mean change of the parameters. What is
        learned depends on H, a step only becomes shorter with it, so that H is never chosen.
    within
        ``"region"``, where H > 1: devices of a stage in one region average gradients in every step
        and so stay equal; every H, regions average how far they went. It changes what is learned:
        there are as many that take steps of their own as regions, not as devices.
    outer
        The outer optimizer where H > 1.
    delayed
        Where H > 1, whether averaging goes on beside the next step, and the outer step is taken at
        that one's end. It changes what is learned too.
    objective
        ``"time"``: minimise the step time. ``"cost"``: minimise the cost of devices and messages of
        a step, plus waiting at ``hour_usd`` an hour.
    hour_usd
        Dollars.
    prices
        Of bytes between regions; those of devices are the cluster's.
    clip
        The largest norm of all gradients together, to which they are scaled down: every update
        then waits for the slowest averaging. None: as they are.
    method
        Of `planner.solve_assignment`.
    path_method
        Of `planner.solve_paths`, with ``path_stages``; ``"cbs"`` is the paper's.
    calibration
        Measured compute times, of one of each kind of device at least; by default they follow from
        FLOPs.
    routing
        How devices choose where wiring is stochastic.
    network_name
        What the plan calls its network.

    Raises
    ------
    ProblemError
        Fields that contradict each other, or a value that can be none.
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
    method: str = "auto"
    path_method: str = PathMethod.AUTO
    calibration: Calibration | None = None
    network_name: str = ""
    wiring: str | None = None
    routing: Routing = field(default_factory=Routing)

    def __repr__(self) -> str:
        # what was left alone says nothing
        words = []
        for one in fields(self):
            made = one.default_factory
            plain = one.default if made is MISSING else made()
            if repr(value := getattr(self, one.name)) != repr(plain):
                words.append(f"{one.name}={reprlib.repr(value)}")
        return f"PlanRequest({', '.join(words)})"

    def __post_init__(self) -> None:
        self._normalise()
        if self.in_flight is not None and (
            self.in_flight < 1
            or (not self.partial_paths and self.schedule != OperationOrder.EAGER_1F1B)
        ):
            raise ProblemError(
                f"in_flight is {self.in_flight}; give at least 1, and only with eager-1f1b or "
                "path_stages"
            )
        if instance_of(bool, self.delayed, "delayed") and self.sync_every == 1:
            raise ProblemError(
                "delayed averages changes of parameters a step later, found sync_every 1; give more"
            )
        if self.within is not None:
            self._require_two_clocks()
        if self.objective == Objective.TIME and self.hour_usd > 0:
            raise ProblemError(
                f"hour_usd is {self.hour_usd:g}, what waiting is worth beside dollars; ask for "
                "objective 'cost', or leave it out"
            )
        if self.objective == Objective.COST and not self.is_joint:
            raise ProblemError(
                "objective 'cost' searches the whole; leave out stages and path_stages, or give "
                "wiring 'flow'"
            )
        if self.partial_paths:
            self._require_paths()
        else:
            self._require_straight()
            if self.is_joint:
                self._require_open()

    def _normalise(self) -> None:
        """Enums, tuples and plain integers, whatever was given for them."""
        changes: dict[str, Any] = {
            "schedule": choice(OperationOrder, "schedule", self.schedule),
            "averaging": (
                None if self.averaging is None else choice(ShareRule, "averaging", self.averaging)
            ),
            "codec": choice(Codec, "codec", self.codec),
            "boundary_codec": choice(BoundaryCodec, "boundary_codec", self.boundary_codec),
            "path_method": choice(PathMethod, "path_method", self.path_method),
            "objective": choice(Objective, "objective", self.objective),
            "within": None
            if self.within is None
            else choice(InnerAveraging, "within", self.within),
            "hour_usd": real("hour_usd", self.hour_usd, 0, error=ProblemError),
            "head": None if self.head is None else choice(Head, "head", self.head),
            "wiring": None
            if self.wiring is None
            else choice(RequestedWiring, "wiring", self.wiring),
        }
        for name in ("pipelines", "microbatch_samples", "path_stages", "full_every", "max_swaps"):
            changes[name] = _whole_or_none(name, getattr(self, name))
        for name in ("in_flight", "group_size"):
            changes[name] = _whole_or_none(name, getattr(self, name))
        changes["sync_every"] = whole("sync_every", self.sync_every)
        if not 1 <= changes["sync_every"] <= MOST_EVERY:
            raise ProblemError(
                f"sync_every is {short_repr(self.sync_every)}; it must be at least 1 and at most "
                f"{MOST_EVERY}"
            )
        instance_of(OuterOptimizer, self.outer, "outer")
        instance_of(Prices, self.prices, "prices")
        instance_of(Routing, self.routing, "routing")
        if self.routing != Routing() and changes["wiring"] is not RequestedWiring.STOCHASTIC:
            raise ProblemError(
                f"routing is how devices choose with wiring 'stochastic', found {self.wiring!r}; "
                "leave it out"
            )
        if self.clip is not None:
            changes["clip"] = real("clip", self.clip, 0, error=ProblemError)
            if changes["clip"] == 0:
                raise ProblemError("clip is 0; give the largest norm, above 0, or leave it out")
        if not (isinstance(self.stages, str) and self.stages == "auto"):
            changes["stages"] = _whole_or_none("stages", self.stages)
            if changes["stages"] is not None and changes["stages"] < 1:
                raise ProblemError(f"stages is {changes['stages']}; it must be at least 1")
        if self.stage_sizes is not None:
            changes["stage_sizes"] = _counts(self.stage_sizes)
        if self.stage_layers is not None and not self.even_layers:
            changes["stage_layers"] = _ranges(self.stage_layers)
        if isinstance(self.recompute, str) and self.recompute == "none":
            changes["recompute"] = ()
        elif self.recompute is not None and not isinstance(self.recompute, str):
            changes["recompute"] = _stage_numbers(self.recompute)
        elif self.recompute not in (None, "all"):
            raise ProblemError(
                f"recompute must list numbers of stages, or be 'all' or 'none', found "
                f"{self.recompute!r}"
            )
        for name in ("pipelines", "microbatch_samples", "path_stages", "group_size"):
            if changes[name] is not None and changes[name] < 1:
                raise ProblemError(f"{name} is {changes[name]}; it must be at least 1")
        if not isinstance(self.network_name, str) or not isinstance(self.method, str):
            raise ProblemError(
                f"network_name and method must be text, found {self.network_name!r} and "
                f"{self.method!r}"
            )
        if self.calibration is not None:
            instance_of(Calibration, self.calibration, "calibration")
        for name, value in changes.items():
            object.__setattr__(self, name, value)

        if self.clip is not None and self.sync_every > 1:
            raise ProblemError(
                f"clip bounds the norm of gradients that are averaged in every step, found "
                f"sync_every {self.sync_every}; leave one of them out"
            )

    def _require_two_clocks(self) -> None:
        if self.sync_every == 1:
            raise ProblemError(
                f"within '{self.within}' averages gradients where all average every H steps, found "
                "sync_every 1; give more, or leave it out"
            )
        for name, given in (
            ("delayed", self.delayed),
            ("group_size", self.group_size),
            ("path_stages", self.path_stages),
        ):
            if given:
                raise ProblemError(
                    f"within '{self.within}' goes without {name}; leave one of them out"
                )

    def _require_straight(self) -> None:
        for name in ("full_every", "max_swaps", "stage_sizes"):
            value = getattr(self, name)
            if value is not None:
                raise ProblemError(
                    f"{name} is {value} without path_stages; give path_stages, the number of "
                    "stages for full paths"
                )
        if self.path_method != PathMethod.AUTO:
            raise ProblemError(
                f"path_method '{self.path_method}' finds paths that skip stages; give path_stages, "
                "or leave it out"
            )
        if self.stages == "auto":
            for name in ("pipelines", "stage_layers"):
                if getattr(self, name) is not None:
                    raise ProblemError(f"{name} follow from stages; leave them out with 'auto'")

    def _require_open(self) -> None:
        """What describes straight pipelines presumes that these are asked for."""
        for name, value, free in (
            ("pipelines", self.pipelines, None),
            ("schedule", self.schedule, OperationOrder.EAGER_1F1B),
            ("method", self.method, "auto"),
        ):
            if value != free:
                if name == "method":
                    choice(Method, name, value)
                raise ProblemError(
                    f"{name} goes with straight pipelines; give a number of stages, or leave it out"
                )
        if self.head is Head.FIRST:
            stated = self.fixed_stages is not None and self.wiring is not None
            remedy = f"leave out wiring '{self.wiring}'" if stated else "give a number of stages"
            raise ProblemError(
                f"head 'first' goes with straight pipelines; {remedy}, or leave head out"
            )
        if self.stages == "auto":
            raise ProblemError("stages 'auto' are straight; leave stages out, or wiring 'flow'")
        for name, given in (("stage_layers", self.stage_layers), ("recompute", self.recompute)):
            if name == "recompute" and self.recompute in (None, "all", ()):
                continue
            if given is not None and self.fixed_stages is None:
                raise ProblemError(f"{name} goes with a number of stages; give stages too")
        given = self.given_layers
        if given is not None and len(given) != self.fixed_stages:
            raise ProblemError(
                f"stage_layers lists {len(given)} stages but stages is {self.stages}; leave stages "
                "out"
            )

    def _require_paths(self) -> None:
        assert self.path_stages is not None
        if self.wiring is not None:
            raise ProblemError("wiring goes without path_stages, whose paths skip stages")
        if self.stages == "auto" or self.pipelines is not None:
            raise ProblemError(
                "path_stages goes with a number of stages, or with stage_sizes; leave out pipelines"
            )
        if self.stage_sizes is not None and self.stages not in (None, len(self.stage_sizes)):
            raise ProblemError(
                f"stages is {self.stages} but stage_sizes lists {len(self.stage_sizes)}; leave "
                "stages out"
            )
        stages = self.fixed_stages
        layers = self.given_layers
        if layers is not None and stages is not None and len(layers) != stages:
            raise ProblemError(
                f"stage_layers lists {len(layers)} stages but there are {stages}; list as many"
            )
        if stages is not None and not 1 <= self.path_stages <= stages:
            raise ProblemError(
                f"path_stages is {self.path_stages}; it must be 1 to the {stages} stages"
            )
        if self.path_method == PathMethod.STRAIGHT and self.path_stages != stages:
            raise ProblemError(
                f"path_method 'straight' visits all {stages} stages, found path_stages "
                f"{self.path_stages}; take dtfm-skip"
            )
        every = self.full_every
        if every is not None and (every < 0 or every == 1 or every > MOST_FULL_EVERY):
            raise ProblemError(
                f"full_every is {short_repr(every)}; give 2 to {MOST_FULL_EVERY}, 0 for no full "
                "iteration, or path_stages of all stages for full ones only"
            )
        if self.max_swaps is not None and self.max_swaps < 0:
            raise ProblemError(f"max_swaps is {self.max_swaps}; it must be >= 0")
        if self.schedule != OperationOrder.EAGER_1F1B:
            raise ProblemError(
                f"schedule '{self.schedule}' orders straight pipelines; leave it out with "
                "path_stages, whose paths come with their order"
            )
        if self.head_place is not Head.FIRST:
            raise ProblemError(
                f"head is '{self.head}'; paths end on the device they start from, give 'first'"
            )

    @property
    def sync(self) -> Sync:
        """How often stages average, and what follows."""
        if self.sync_every == 1:
            return Sync()
        return Sync(self.sync_every, self.outer, self.delayed)

    @property
    def is_joint(self) -> bool:
        """Whether the whole is searched, within what is fixed."""
        given = self.stages is not None or self.pipelines is not None
        straight = RequestedWiring.STRAIGHT if given else RequestedWiring.FLOW
        return not self.partial_paths and (self.wiring or straight) != RequestedWiring.STRAIGHT

    @property
    def fixed_stages(self) -> int | None:
        """The number of stages, where it is given."""
        for given in (self.stage_sizes, self.given_layers):
            if self.stages is None and given is not None:
                return len(given)
        return None if self.stages == "auto" else self.stages

    @property
    def given_layers(self) -> tuple[tuple[int, int], ...] | None:
        """``stage_layers``, where ranges are given."""
        if self.stage_layers is None or self.even_layers:
            return None
        return _ranges(self.stage_layers)

    @property
    def even_layers(self) -> bool:
        """Whether even ones are asked for."""
        return isinstance(self.stage_layers, str) and self.stage_layers == EVEN

    @property
    def shares(self) -> ShareRule:
        """``averaging`` with its default."""
        if self.averaging is None:
            return ShareRule.ADAPTIVE if self.is_joint else ShareRule.EQUAL
        return ShareRule(self.averaging)

    @property
    def levels(self) -> bool:
        """Whether stages may average hierarchically where devices share a site's line."""
        if self.group_size is not None or self.within is not None:
            return False
        return self.averaging == ShareRule.ADAPTIVE or (
            self.averaging is None and not self.partial_paths
        )

    @property
    def partial_paths(self) -> bool:
        """Whether paths are searched instead of straight pipelines."""
        return self.path_stages is not None

    @property
    def head_place(self) -> Head:
        """``head`` with its default."""
        if self.head is None:
            return Head.FIRST if self.partial_paths else Head.LAST
        return Head(self.head)

    @property
    def swaps(self) -> int:
        """``max_swaps`` with its default."""
        return 1 if self.max_swaps is None else self.max_swaps

    def recomputing(self, stages: int) -> tuple[bool, ...]:
        """Whether each stage recomputes its activations.

        Parameters
        ----------
        stages
            Number of stages.

        Returns
        -------
        tuple[bool, ...]
            One entry a stage.

        Raises
        ------
        ProblemError
            A stage is named that is not there.
        """
        if self.recompute is None:
            return (False,) * stages
        if self.recompute == "all":
            return (True,) * stages
        beyond = [j for j in self.recompute if j not in range(stages)]
        if beyond:
            raise ProblemError(
                f"recompute names stage {beyond[0]}; stages are 0 to {stages - 1}, or give 'all'"
            )
        return tuple(j in self.recompute for j in range(stages))

    def cycle(self, stages: int) -> tuple[int, ...]:
        """Schedules of successive iterations: 0 is the usual one, 1 the full one that ends them.

        Parameters
        ----------
        stages
            Number of stages.

        Returns
        -------
        tuple[int, ...]
            Indices of schedules.
        """
        if not self.partial_paths:
            return (0,)
        every = FULL_EVERY if self.full_every is None else self.full_every
        always_full = self.path_stages == stages and self.swaps == 0
        return (0,) if every == 0 or always_full else (0,) * (every - 1) + (1,)

    def replace(self, **changes: Any) -> PlanRequest:
        """A copy with some fields changed.

        Raises
        ------
        ProblemError
            There is no such field.
        """
        known = [one.name for one in fields(self)]
        for name in changes:
            if name not in known:
                raise ProblemError(f"a plan has no {name!r} to ask for; it has {', '.join(known)}")
        return replace(self, **changes)


@dataclass(frozen=True)
class PlanningProblem:
    """A request and what it is asked about.

    Attributes
    ----------
    cluster, workload
        Where and what to train, with the request's microbatches and room for its outer optimizer;
        all devices can compute. Where everything is open and times were measured, devices have the
        FLOP/s that they were measured to have.
    seed
        Of every random choice.
    given
        The cluster with the devices that cannot compute; None: there are none.
    """

    cluster: Cluster
    workload: Workload
    request: PlanRequest
    seed: int = 0
    given: Cluster | None = None

    @property
    def aggregators(self) -> tuple[int, ...]:
        """Devices of ``given`` that may sum gradients without a stage, to save time."""
        asked = self.request
        uses = (
            asked.shares == ShareRule.ADAPTIVE
            and asked.group_size is None
            and not asked.partial_paths
        )
        uses = uses and asked.objective == Objective.TIME and asked.within is None
        if self.given is None or not uses:
            return ()
        devices = self.given.devices
        able = np.asarray(devices.can_aggregate) & ~np.asarray(devices.can_compute)
        return tuple(np.flatnonzero(able).tolist())

    @property
    def ends_together(self) -> bool:
        """Whether all devices of a stage end their averaging at the same time, whatever is chosen.

        Not in several rounds, not hierarchically, and not on two frequencies.
        """
        levels = self.request.levels and has_hierarchy(self.cluster)
        return self.request.group_size is None and self.request.within is None and not levels

    @property
    def aggregators_in(self) -> Cluster | None:
        """``given``, if there are `aggregators`."""
        return self.given if self.aggregators else None

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        workload: Workload,
        request: PlanRequest | None,
        seed: int,
        changes: dict[str, Any],
    ) -> PlanningProblem:
        """From the arguments of `planner.plan`, refused if they are something else."""
        instance_of(Cluster, cluster, "cluster")
        instance_of(Workload, workload, "workload")
        asked = PlanRequest() if request is None else instance_of(PlanRequest, request, "request")
        asked = asked.replace(**changes) if changes else asked
        if asked.microbatch_samples is not None:
            workload = workload.replace(microbatch_samples=asked.microbatch_samples)
        if asked.sync_every > 1:
            workload = workload.with_outer_state(delayed=asked.delayed)
        else:
            workload = workload.without_outer_state()
        if asked.boundary_codec != BoundaryCodec.NONE:
            workload = workload.with_boundary_codec(asked.boundary_codec)
        if asked.within is not None:
            _require_regions(cluster)
        _require_format(cluster, workload)
        gradients = workload.precision.gradients
        if asked.codec != Codec.NONE and gradients is not Dtype.FP32:
            raise ProblemError(
                f"codec {asked.codec} is made from fp32, the workload averages gradients in "
                f"{gradients}; choose one of the two"
            )
        if asked.objective == Objective.COST and cluster.devices.usd_per_hour is None:
            raise ProblemError(
                "objective 'cost' needs what devices cost; give usd_per_hour to Devices or in the "
                "devices file"
            )
        if asked.calibration is not None:
            try:
                calibration = asked.calibration.completed(cluster, workload)
                if asked.is_joint:
                    cluster = calibrated(cluster, workload, calibration)
            except ProblemError:
                raise
            except ValueError as error:
                raise ProblemError(str(error)) from None
            asked = asked.replace(calibration=calibration)
        seed = seed_of(seed)
        able = np.flatnonzero(np.asarray(cluster.devices.can_compute))
        if len(able) == len(cluster):
            return cls(cluster, workload, asked, seed)
        if not len(able):
            raise ProblemError("no device can compute; give one that can")
        return cls(cluster.subset(able.tolist()), workload, asked, seed, cluster)


def _require_format(cluster: Cluster, workload: Workload) -> None:
    """Refuse devices that would emulate the format of compute, as their executor would."""
    compute = workload.precision.compute
    computes = np.asarray(cluster.devices.can_compute)
    lacking = [d for d in cluster.lacks(compute) if computes[d]]
    if lacking:
        first = lacking[0]
        assert cluster.devices.gpus is not None
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise ProblemError(
            f"device {cluster.network.ids[first]!r}{more} has a {cluster.devices.gpus[first]}, "
            f"which has no {compute}, the format of compute; plan with --precision fp32, other "
            "GPUs, or can_compute no for these devices"
        )


def _require_regions(cluster: Cluster) -> None:
    """Several, of which one has several devices: else there is nothing to do within, or between."""
    able = np.asarray(cluster.devices.can_compute)
    regions = [region for region, can in zip(cluster.network.regions, able, strict=True) if can]
    if not 1 < len(set(regions)) < len(regions):
        found = "one region" if len(set(regions)) == 1 else "a region for each device"
        raise ProblemError(
            f"within 'region' goes with several regions, of which one has several devices, found "
            f"{found}; leave it out"
        )


def _counts(sizes: Any) -> tuple[int, ...]:
    try:
        found = tuple(whole("a stage size", s) for s in sizes)
    except TypeError:
        raise ProblemError(
            f"stage_sizes must list the devices of every stage, found {sizes!r}"
        ) from None
    if any(size < 1 for size in found):
        raise ProblemError(f"a stage size must be at least 1, found {list(found)}")
    return found


def _stage_numbers(stages: Any) -> tuple[int, ...]:
    try:
        return tuple(sorted({whole("a stage to recompute", j) for j in stages}))
    except TypeError:
        raise ProblemError(
            f"recompute must list numbers of stages or be 'all', found {stages!r}"
        ) from None


def _ranges(layers: Any) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((whole("a layer", a), whole("a layer", b)) for a, b in layers)
    except (TypeError, ValueError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(
            "stage_layers must list a range (start, stop) for every stage, or be 'even', found "
            f"{layers!r}"
        ) from None


def _whole_or_none(name: str, value: Any) -> int | None:
    return None if value is None else whole(name, value)
