"""A training plan as frozen data: five parts, what they were made from, how good each is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.network.values import choice, count, of_kind, real, several
from planner.network.words import listed, some, stage_words
from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate
from planner.training_plan import plain
from planner.training_plan.alternative import Alternative
from planner.training_plan.choices import Codec, Head, OuterStep, Phase, Told, Wiring
from planner.training_plan.compact import (
    device_fields,
    network_fields,
    order_of,
    order_text,
    paths_of,
    route_fields,
)
from planner.training_plan.cost import Cost
from planner.training_plan.error import PlanError
from planner.training_plan.notebook import plan_html
from planner.workload.compute_times import ComputeTimes
from planner.workload.workload import Workload

FORMAT = "planner.plan"
SCHEMA_VERSION = 2
Operation = tuple[str, int]
"""``("F" | "H" | "B", microbatch)``."""
MOST_EVERY = 1_000_000
"""Steps between two averagings."""
WHOLE = (0.0, 1.0)
"""The slice that is all of a vector."""


@dataclass(frozen=True)
class Schedule:
    """Which devices each microbatch visits, and the order in which each device works.

    Attributes
    ----------
    name
        What made it, for people.
    head
        The device of each path that runs head and loss.
    paths
        Per microbatch, the devices in the order visited.
    order
        Per device, its operations in the order it does them.
    """

    name: str
    head: Head
    paths: tuple[tuple[int, ...], ...]
    order: tuple[tuple[Operation, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", choice(Head, "head", self.head, error=PlanError))
        for name, plain_row in (("paths", plain.numbers), ("order", plain.operations)):
            rows = several(name, getattr(self, name), error=PlanError)
            object.__setattr__(self, name, tuple(plain_row(name, row) for row in rows))
        of_kind(str, self.name, "name", error=PlanError)
        if () in self.paths:
            raise PlanError(
                f"paths[{self.paths.index(())}] visits no device; let it visit stage 0 at least"
            )

    def head_device(self, microbatch: int) -> int:
        """The device that runs H of a microbatch."""
        return self.paths[microbatch][-1 if self.head is Head.LAST else 0]

    def __repr__(self) -> str:
        count = sum(map(len, self.order))
        words = some(len(self.paths), "microbatch"), some(count, "operation")
        return f"Schedule({self.name!r}, {', '.join(words)})"

    def most_live(self) -> list[int]:
        """Per device, the most microbatches it holds between their F and B."""
        held = []
        for ops in self.order:
            live = most = 0
            for kind, _ in ops:
                live += {"F": 1, "H": 0, "B": -1}[kind]
                most = max(most, live)
            held.append(most)
        return held

    def visits(self, devices: int) -> list[dict[str, list[int]]]:
        """Per device, by kind of operation, its microbatches as the paths have them, ascending.

        Parameters
        ----------
        devices
            N; what paths name beyond them is left out.

        Returns
        -------
        list[dict[str, list[int]]]
            Keys F, H and B.
        """
        found: list[dict[str, list[int]]] = [{"F": [], "H": [], "B": []} for _ in range(devices)]
        for b in range(len(self.paths)):
            for kind, d in self.chain(b):
                if d < devices:
                    found[d][kind].append(b)
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` reads it again."""
        every = self.visits(len(self.order))
        return {
            "name": self.name,
            "head": self.head,
            **route_fields(self.paths),
            "order": [order_text(*device) for device in zip(self.order, every, strict=True)],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Schedule:
        """From the form that `to_dict` makes (and that a plan file holds).

        Parameters
        ----------
        data
            As in a plan file, validated by its schema.
        where
            Its place, for messages.

        Returns
        -------
        Schedule
            The same.

        Raises
        ------
        PlanError
            A route or an operation that is not there.
        """
        bare = cls(data["name"], Head(data["head"]), paths_of(data, where), ())
        every = bare.visits(len(data["order"]))
        texts = enumerate(zip(data["order"], every, strict=True))
        order = (order_of(*device, f"{where}.order[{d}]") for d, device in texts)
        return replace(bare, order=tuple(order))

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
    """Devices that average together (DeDLOC, 3.2).

    Attributes
    ----------
    members
        Devices.
    shares
        Per member, the fraction of the vector that it sums; they sum to 1 (eq. 6).
    contributes
        Per member, c_k: whether it gives its gradients.
    receives
        Per member, whether it gets the sums of others: all who hold the stage do, a helper that
        only sums does not. Empty: all do.
    slice
        ``(start, stop)``, fractions: the part of the vector that the group works on, and that its
        shares are shares of.
    phase
        What its round does. Averaging in two levels is a round of groups that reduce, one of groups
        that exchange, one of groups that spread. On two clocks groups average gradients `within` in
        every step, and what is exchanged and spread are changes of parameters.

    Raises
    ------
    PlanError
        No lists of devices, numbers and truth values.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), 3.2.
    """

    members: tuple[int, ...]
    shares: tuple[float, ...]
    contributes: tuple[bool, ...]
    receives: tuple[bool, ...] = ()
    slice: tuple[float, float] = WHOLE
    phase: Phase = Phase.ALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", plain.numbers("members", self.members))
        if not self.members:
            raise PlanError("members must hold a device at least, found none; leave the group out")
        shares = several("shares", self.shares, error=PlanError)
        shares = tuple(real("a share of an averaging group", x, 0, error=PlanError) for x in shares)
        object.__setattr__(self, "shares", shares)
        for name in ("contributes", "receives"):
            object.__setattr__(self, name, plain.flags(name, getattr(self, name)))
        if not self.receives:
            object.__setattr__(self, "receives", (True,) * len(self.members))
        cut = several("slice", self.slice, error=PlanError)
        ends = tuple(real("an end of a slice", end, 0, error=PlanError) for end in cut)
        if len(ends) != 2 or not ends[0] < ends[1] <= 1:
            raise PlanError(
                f"slice: must be start < stop, fractions of the vector, found {list(ends)}; give "
                "two numbers from 0 to 1"
            )
        object.__setattr__(self, "slice", ends)
        object.__setattr__(self, "phase", choice(Phase, "phase", self.phase, error=PlanError))

    def __repr__(self) -> str:
        return f"AveragingGroup({some(len(self.members), 'member')}, {self.phase})"

    @property
    def helpers(self) -> tuple[int, ...]:
        """Members that get nothing back: they sum for those who hold the stage."""
        flags = zip(self.members, self.receives, strict=False)
        return tuple(d for d, gets in flags if not gets)

    @property
    def gives(self) -> tuple[bool, ...]:
        """Per member, whether it sends others the shares that they sum."""
        return self.contributes if self.phase is not Phase.SPREAD else (False,) * len(self.members)

    @property
    def gets(self) -> tuple[bool, ...]:
        """Per member, whether others send it the shares that they hold."""
        return self.receives if self.phase is not Phase.REDUCE else (False,) * len(self.members)

    @property
    def width(self) -> float:
        """The part of the vector that the group works on."""
        return self.slice[1] - self.slice[0]

    def codec(self, codec: Codec) -> Codec:
        """How it writes on the wire where gradients are written so.

        Sums within a site stay as they are, and what all of a site get is bit for bit what others
        do.
        """
        return codec if self.phase in (Phase.ALL, Phase.EXCHANGE) else Codec.NONE

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; what says nothing is left out: all receive, the whole slice, phase."""
        data: dict[str, Any] = {
            name: list(getattr(self, name)) for name in ("members", "shares", "contributes")
        }
        if not all(self.receives):
            data["receives"] = list(self.receives)
        if self.slice != WHOLE:
            data["slice"] = list(self.slice)
        if self.phase is not Phase.ALL:
            data["phase"] = self.phase
        return data

    @classmethod
    def equal(cls, members: tuple[int, ...]) -> AveragingGroup:
        """Everybody contributes and everybody sums the same share.

        Parameters
        ----------
        members
            Devices, at least one.

        Returns
        -------
        AveragingGroup
            Shares of 1 / n.

        Raises
        ------
        PlanError
            There are no members.
        """
        if not members:
            raise PlanError("an averaging group has no members; give at least one")
        n = len(members)
        return cls(members, (1.0 / n,) * n, (True,) * n)


StageAveraging = tuple[tuple[AveragingGroup, ...], ...]
"""Rounds of groups of one stage, one round after the other."""


def in_levels(rounds: Sequence[Sequence[AveragingGroup]]) -> bool:
    """Whether a stage averages in two levels.

    Parameters
    ----------
    rounds
        Of a stage.
    """
    return any(group.phase is not Phase.ALL for groups in rounds for group in groups)


def within(rounds: Sequence[Sequence[AveragingGroup]]) -> StageAveraging:
    """Rounds of a stage in which gradients are averaged in every step of H.

    Parameters
    ----------
    rounds
        Of the stage.

    Returns
    -------
    StageAveraging
        Empty where it averages on one clock.
    """
    return tuple(tuple(groups) for groups in rounds if groups and groups[0].phase is Phase.WITHIN)


@dataclass(frozen=True)
class OuterOptimizer:
    """DiLoCo's outer step; the defaults are those of DiLoCo-SWARM's Table 3.

    Attributes
    ----------
    optimizer
        What takes the step; a string is turned into an `OuterStep`.
    learning_rate
        Of the outer step, on the mean change of the parameters.
    momentum
        Of the outer step, ``>= 0``.

    Raises
    ------
    PlanError
        An unknown optimizer, or no numbers.

    References
    ----------
    M. Senghaas et al., "DiLoCo-SWARM" (2025), after A. Douillard et al., "DiLoCo" (2023).
    """

    optimizer: OuterStep = OuterStep.NESTEROV
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        # one form of every number, so that equal plans have equal hashes
        kind = choice(OuterStep, "outer optimizer", self.optimizer, error=PlanError)
        object.__setattr__(self, "optimizer", kind)
        for name in ("learning_rate", "momentum"):
            number = real(f"outer {name}", getattr(self, name), 0, error=PlanError)
            object.__setattr__(self, name, number)
        if self.learning_rate == 0:
            raise PlanError("outer learning_rate is 0; give a number above 0")
        if self.momentum >= 1:
            raise PlanError(
                f"outer momentum is {self.momentum:g}; it must be below 1, or steps grow for ever"
            )


@dataclass(frozen=True)
class Sync:
    """Average every ``every_steps`` steps: gradients, or where that is above 1 devices' changes.

    Where H > 1 each device updates by itself in every step, with the mean gradient of the samples
    that went through it; it takes no step where none did, and keeps the state of its optimizer for
    itself. Devices of a group that averages `within` do so as one: with the mean gradient of the
    samples that went through any of them, so that they stay equal. After every H steps the changes
    of the parameters, old minus new, are averaged in the plan's rounds. A device's weight is its
    part of the samples that went through its stage in these H steps (equal parts: the paper's
    mean). The outer optimizer goes on from the old parameters with that mean for a gradient, alike
    on all devices of the stage.

    Attributes
    ----------
    every_steps
        H, at least 1.
    outer
        What takes the outer step. None: H > 1 goes on from the mean of the parameters (a rate of 1,
        no momentum). With H = 1 every step is an inner and an outer one.
    delayed
        Whether changes are averaged while the step after the H-th computes, and the outer step is
        taken at that one's end. With y a device's parameters when averaging began, z those after
        the next inner step and x the outer step's: it goes on from x + (z - y), what all agree on
        and its own step since then, which counts as a change of the next H steps.

    Raises
    ------
    PlanError
        H is no whole number of at least 1, or gradients are to be delayed.

    References
    ----------
    M. Senghaas et al., "DiLoCo-SWARM" (2025), Algorithm 3.
    """

    every_steps: int = 1
    outer: OuterOptimizer | None = None
    delayed: bool = False

    def __post_init__(self) -> None:
        every = count("every_steps", self.every_steps, most=MOST_EVERY, error=PlanError)
        object.__setattr__(self, "every_steps", every)
        if self.outer is not None:
            of_kind(OuterOptimizer, self.outer, "outer", error=PlanError)
        object.__setattr__(self, "delayed", plain.flag("delayed", self.delayed))
        if self.delayed and not self.local_steps:
            raise PlanError(
                "sync.delayed: averages changes of parameters a step later, found gradients "
                "averaged every step; give every_steps above 1, or outer"
            )

    @property
    def local_steps(self) -> bool:
        """Whether devices update by themselves, and average their changes."""
        return self.every_steps > 1 or self.outer is not None

    def due(self, step: int) -> bool:
        """Whether devices average after a step.

        Parameters
        ----------
        step
            Its number, from 0.

        Returns
        -------
        bool
            After the H-th, the 2 H-th and so on.
        """
        return (step + 1) % self.every_steps == 0

    def begun(self, steps: int) -> bool:
        """Whether the last of so many steps has begun an outer step that the next one ends.

        Parameters
        ----------
        steps
            That were done.
        """
        return self.delayed and steps > 0 and self.due(steps - 1)

    def mean_s(self, alone_s: float, averages_s: float, averaging: int = 1) -> float:
        """Seconds of a step in the mean over H steps.

        Parameters
        ----------
        alone_s
            Of a step without this averaging; any where there is none.
        averages_s
            Of each of the others.
        averaging
            How many of H these are.

        Returns
        -------
        float
            Seconds.
        """
        h = self.every_steps
        return ((h - averaging) * alone_s + averaging * averages_s) / h

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; what says nothing is left out: not delayed."""
        data = asdict(self)
        if not self.delayed:
            del data["delayed"]
        return data


@dataclass(frozen=True)
class Routing:
    """How routers choose, where wiring is stochastic (SWARM, Algorithm 1).

    Attributes
    ----------
    smoothing
        Weight of the newest response time in their estimates, from 0 to 1. 0: they keep the parts
        of the plan's paths, a weighted round robin.
    told
        What they hear of a request; a string is turned into a `Told`.

    Raises
    ------
    PlanError
        No number from 0 to 1, or an unknown word.

    References
    ----------
    M. Ryabinin et al., "SWARM Parallelism" (2023), 3.2 and 4.3.
    """

    smoothing: float = 0.1
    told: Told = Told.ANSWER

    def __post_init__(self) -> None:
        weight = real("smoothing", self.smoothing, 0, error=PlanError)
        if weight > 1:
            raise PlanError(f"smoothing is {weight:g}; give a weight from 0 to 1, SWARM's is 0.1")
        object.__setattr__(self, "smoothing", weight)
        object.__setattr__(self, "told", choice(Told, "told", self.told, error=PlanError))


@dataclass(frozen=True)
class Predicted:
    """Simulated seconds of one step, on average over the cycle of schedules.

    Attributes
    ----------
    pipeline_s
        From the step's begin to the end of its last operation.
    averaging_s
        The longest averaging of a stage.
    step_s
        The whole step.
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
    """Everything an executor needs, and the proof of how good it is.

    Attributes
    ----------
    cluster, network_name, workload, seed, compute_times
        What the plan was made from.
    assignment, stage_layers
        Which device holds which stage, and which layers each stage has.
    recompute
        Per stage, whether F keeps the stage's input only and B runs F again; empty: none does.
    left_out
        Names of devices that take no part.
    schedules, cycle
        Iteration t runs ``schedules[cycle[t % len(cycle)]]``.
    averaging
        Per stage, rounds of disjoint groups. One entry more, where embedding and head share a
        matrix, are on two stages and average their gradients of it in every step: its rounds, over
        the devices of both stages, after those of the stages.
    predicted
        Simulated seconds.
    cost
        Dollars of a step; None: the devices' prices are not known.
    codec
        How gradients are written on the wire.
    wiring
        Whether microbatches take the paths of the schedule. Where it is stochastic, paths and
        orders are the steady state that is predicted, and no more: devices choose where each
        microbatch goes next, beginning with the paths' parts, and hold no more at a time than
        the orders have them hold.
    routing
        How they choose, where wiring is stochastic.
    sync
        How often gradients are averaged.
    clip
        The largest norm of all gradients together, to which they are scaled down; None: as they
        are.
    package_version
        Release that made the plan.
    certificates
        Per part. ``paths``: mean makespan over the cycle with both directions of every link
        averaged, as the path solver counts, and a bound for this arrangement.
    alternatives
        What else decisions could have been; empty: all were given, or nothing else was looked at.
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
    recompute: tuple[bool, ...] = ()
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
            of_kind(kind, getattr(self, name), name, error=PlanError)
        if self.cost is not None:
            of_kind(Cost, self.cost, "cost", error=PlanError)
        for words, name in ((Codec, "codec"), (Wiring, "wiring")):
            word = choice(words, name, getattr(self, name), error=PlanError)
            object.__setattr__(self, name, word)
        if self.clip is not None:
            norm = real("clip", self.clip, 0, error=PlanError)
            if norm == 0:
                raise PlanError("clip is 0; give the largest norm, above 0, or leave it out")
            object.__setattr__(self, "clip", norm)
        layers = plain.pairs("stage_layers", self.stage_layers)
        for name, value in (
            ("seed", count("seed", self.seed, 0, error=PlanError)),
            ("assignment", plain.assignment(self.assignment)),
            ("stage_layers", layers),
            ("schedules", plain.all_of(Schedule, "schedules", self.schedules)),
            ("averaging", _averaging(self.averaging)),
            ("certificates", plain.certificates(self.certificates)),
            ("recompute", plain.flags("recompute", self.recompute) or (False,) * len(layers)),
            ("left_out", plain.all_of(str, "left_out", self.left_out)),
            ("cycle", plain.numbers("cycle", self.cycle)),
            ("alternatives", plain.all_of(Alternative, "alternatives", self.alternatives)),
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

    def __repr__(self) -> str:
        step = self.certificates.get("step")
        bound = "" if step is None or step.bound is None else f", bound {step.bound:.4g} s"
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
                any(self.recompute[j : j + 1]),
                [ids[d] if d < len(ids) else f"device {d}" for d in group],
            )
            for j, ((start, stop), group) in enumerate(
                zip(self.stage_layers, self.assignment.groups, strict=False)
            )
        ]
        return plan_html(repr(self), stages, self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """For people, the figures first."""
        step, predicted = self.certificates.get("step"), self.predicted
        lines = [
            ("step", f"{predicted.step_s:.4g} s"),
            ("pipeline, averaging", f"{predicted.pipeline_s:.4g} s, {predicted.averaging_s:.4g} s"),
        ]
        if step is not None and step.bound is not None and step.gap is not None:
            lines.append(("bound", f"{step.bound:.4g} s, gap {step.gap:.1%}"))
        if self.cost is not None:
            lines.append(("cost of a step", f"{self.cost.step_usd:.4g} $"))
        lines += [
            ("schedules", ", ".join(one.name for one in self.schedules)),
            ("wiring", self.wiring),
            (
                "averages every",
                some(self.sync.every_steps, "step") + " delayed" * self.sync.delayed,
            ),
            ("gradients, activations as", f"{self.codec}, {self.workload.boundary_codec}"),
        ]
        if self.left_out:
            lines.append(("left out", listed(self.left_out)))
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
    def two_clocks(self) -> bool:
        """Whether groups average gradients in every step, and one another's changes every H."""
        return any(map(within, self.averaging))

    @property
    def averages_tied(self) -> bool:
        """Whether the stages of embedding and head average the matrix that these share."""
        return len(self.averaging) > len(self.stage_layers)

    @property
    def must_average_tied(self) -> bool:
        """Whether embedding and head share a matrix, of which two stages have gradients."""
        return self.workload.tied_parameters > 0 and self.head_stage > 0

    def averaged_by(self, entry: int) -> tuple[int, ...]:
        """Devices that have gradients of one of the vectors that are averaged.

        Parameters
        ----------
        entry
            Of `averaging`.
        """
        groups = self.assignment.groups
        if entry < len(groups):
            return groups[entry]
        return tuple(sorted((*groups[0], *groups[self.head_stage])))

    def longest_averaging_s(self, seconds: Mapping[int, float]) -> float:
        """The longest that a stage averages, which where two share a matrix is followed by that.

        Parameters
        ----------
        seconds
            By entry of `averaging`, its own.

        Returns
        -------
        float
            Seconds; 0 where nobody averages.
        """
        stages = len(self.stage_layers)
        both = seconds.get(stages, 0.0)
        ends = (0, self.head_stage) if self.averages_tied else ()
        return max((seconds.get(j, 0.0) + both * (j in ends) for j in range(stages)), default=0.0)

    def vector_bytes(self, workload: Workload | None = None) -> tuple[float, ...]:
        """Bytes of every vector that is averaged, before any codec.

        Parameters
        ----------
        workload
            What is trained; None: the plan's.

        Returns
        -------
        tuple[float, ...]
            One for each entry of `averaging`.
        """
        of = self.workload if workload is None else workload
        return of.averaged_bytes(self.stage_layers, self.head_stage, apart=self.averages_tied)

    def averaged_stage(self, device: int) -> int:
        """The stage whose gradients a device averages: the one it holds, or helps.

        Parameters
        ----------
        device
            Of the cluster.
        """
        held = self.stage_of
        return held[device] if device in held else self.averages_for[device]

    @property
    def averages_for(self) -> dict[int, int]:
        """Of each device that holds no stage, the stage whose gradients it helps to sum."""
        return {
            d: j
            for j, rounds in enumerate(self.averaging)
            for groups in rounds
            for group in groups
            for d in group.helpers
        }

    @property
    def awaits_norm(self) -> tuple[int, ...]:
        """Devices whose updates wait for the norm, first the one that adds it up.

        Those with a stage, where several stages clip; the one that adds is nearest to the farthest.
        """
        if self.clip is None or len(self.stage_layers) == 1:
            return ()
        every = sorted(self.stage_of)
        way = self.cluster.network.latency_s[np.ix_(every, every)]
        np.fill_diagonal(way, 0.0)
        adds = every.pop(int((way + way.T).max(axis=1).argmin()))
        return (adds, *every)

    @property
    def tells_norm(self) -> tuple[int, ...]:
        """The first device of each stage, whose sum of squares is the stage's, if any are added."""
        return tuple(group[0] for group in self.assignment.groups) if self.awaits_norm else ()

    @property
    def content_hash(self) -> str:
        """SHA-256 of inputs and decisions: not of times, versions, certificates or names."""
        return hash_of(self.hashed())

    def replace(self, **changes: Any) -> TrainingPlan:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def hashed(self) -> dict[str, Any]:
        """Inputs and decisions, JSON-ready: what `content_hash` covers."""
        return self._inputs() | self._decisions()

    def _inputs(self) -> dict[str, Any]:
        network = self.cluster.network
        return {
            "seed": self.seed,
            # its hash says all of ids and measurements; what its file is called says nothing
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
                "recompute": list(self.recompute),
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
        """JSON-ready form, as ``plan.schema.json`` describes it; `from_dict` reads it again."""
        content = self.hashed()
        own_hash = hash_of(content)
        content["network"] |= {"name": self.network_name, **network_fields(self.cluster.network)}
        if (peaks := self.cluster.devices.peak_flops) is not None:
            content["devices"]["peak_flops"] = np.asarray(peaks).tolist()
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "package_version": self.package_version,
            "content_hash": own_hash,
            **content,
            "predicted": asdict(self.predicted),
            **({} if self.cost is None else {"cost": self.cost.to_dict()}),
            "certificates": {part: asdict(c) for part, c in self.certificates.items()},
            **(
                {"alternatives": [one.to_dict() for one in self.alternatives]}
                if self.alternatives
                else {}
            ),
        }


def as_one(plan: TrainingPlan, device: int) -> tuple[int, ...]:
    """Devices that average gradients in every step where others do not, and so stay equal.

    Parameters
    ----------
    plan
        The plan.
    device
        With a stage.

    Returns
    -------
    tuple[int, ...]
        The device alone, unless the plan averages on two clocks.
    """
    groups = (group for groups in within(plan.averaging[plan.stage_of[device]]) for group in groups)
    return next((group.members for group in groups if device in group.members), (device,))


def hash_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON-ready content, the same for the same values in any order of fields.

    Parameters
    ----------
    content
        Without NaN.

    Returns
    -------
    str
        64 hex digits.
    """
    text = json_text(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def json_text(value: Any, *, sort_keys: bool = False) -> str:
    """JSON without spaces.

    Parameters
    ----------
    value
        Without NaN.
    sort_keys
        Whether equal mappings give equal text.

    Returns
    -------
    str
        One line.

    Raises
    ------
    PlanError
        NaN or infinity.
    """
    try:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise PlanError(f"a plan holds what JSON has not ({error}); make it again") from None


def _averaging(stages: Any) -> tuple[StageAveraging, ...]:
    """Of every stage, its rounds of groups."""
    found = []
    for j, rounds in enumerate(several("averaging", stages, error=PlanError)):
        each = several(f"averaging[{j}]", rounds, error=PlanError)
        found.append(tuple(plain.all_of(AveragingGroup, f"averaging[{j}]", one) for one in each))
    return tuple(found)


def _rounds(rounds: StageAveraging) -> dict[str, Any]:
    return {"rounds": [[g.to_dict() for g in groups] for groups in rounds]}


def _package_version() -> str:
    try:
        return metadata.version("planner")
    except metadata.PackageNotFoundError:  # run from a checkout, as on a bare GPU node
        return "unknown"


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
