"""Assigns a device of the plan to this process, as stated by its launcher, never guessed.

torchrun numbers processes arbitrarily; here the rank is the index of the device in the plan. The
node's command line names its devices, and ``LOCAL_RANK`` selects one of them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from planner.executor.comm.connections import ChannelKind
from planner.executor.fault_tolerance.failure_detector import (
    HEARTBEAT_TIMEOUT_S,
    LATENCIES,
    FailureDetector,
)
from planner.executor.fault_tolerance.shutdown import Shutdown
from planner.executor.rendezvous.address import (
    INTERFACE,
    address_among,
    address_of,
    tell_address_of_store,
)
from planner.executor.rendezvous.auth import authenticate_all
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.rendezvous.secret import Secret
from planner.executor.rendezvous.store import PortTakenError, StoreAddress, StoreMissingError
from planner.training_plan.model import TrainingPlan

WAIT_S = 60.0
"""Timeout for ranks that have not joined yet."""
NODE = "GROUP_RANK"
"""Environment variable of torchrun: number of the node; the store is on the first."""
MAX_NAMES = 8
TAKEN_S = 3.0


class RankAssignmentError(ValueError):
    """Processes and plan do not fit together."""


class RendezvousTimeout(RuntimeError):
    """Not all ranks have joined in time."""


def local_rank(devices: Sequence[str]) -> int:
    """Number of this process on its node."""
    value = os.environ.get("LOCAL_RANK")
    if value is None and len(devices) > 1:
        raise RankAssignmentError(
            f"--devices names {len(devices)} devices and this is one process; name its own, or "
            "start all of the node with torchrun"
        )
    return int(value or "0")


def own_name(devices: Sequence[str]) -> str:
    """Name of this process before the plan is known."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return devices[local] if local < len(devices) else f"local process {local}"


def rank_of(plan: TrainingPlan, devices: Sequence[str], local_rank: int) -> int:
    """The rank of this process: the index of its device in the plan."""
    ids = plan.cluster.network.ids
    unknown = [name for name in devices if name not in ids]
    if unknown:
        raise RankAssignmentError(
            f"--devices: the plan has no device {unknown[0]!r}; it has {', '.join(ids[:8])}"
            + (", ..." if len(ids) > 8 else "")
        )
    if len(set(devices)) < len(devices):
        raise RankAssignmentError(
            f"--devices: a device is named twice in {list(devices)}; name each once"
        )
    if local_rank >= len(devices):
        raise RankAssignmentError(
            f"--devices names {len(devices)} devices but this is local process {local_rank}; set "
            "torchrun's --nproc-per-node to the number of devices"
        )
    return ids.index(devices[local_rank])


def _listen_as_planned(plan: TrainingPlan, rank: int) -> None:
    """Listen on the plan's interface, unless the environment names one."""
    interface = (plan.cluster.devices.interfaces or ("",) * (rank + 1))[rank]
    if not interface or os.environ.get(INTERFACE):
        return
    if address_of(interface) is None:
        raise RankAssignmentError(
            f"device {plan.cluster.network.ids[rank]!r}: the plan has it listen on {interface}, "
            f"which this machine does not have, or without an address; name another in {INTERFACE}"
        )
    os.environ[INTERFACE] = interface


def heartbeat_timeout_s(plan: TrainingPlan, speed: float = 1.0) -> float:
    """Default heartbeat timeout: 10 s, more with long latencies.

    A heartbeat may queue behind the averaging traffic of its pair, in routers.
    """
    latency = plan.cluster.network.latency_s
    queue_s = HEARTBEAT_TIMEOUT_S + plan.predicted.averaging_s / speed
    away_s = LATENCIES * float(np.nanmax(latency, initial=0.0)) / speed
    return float(round(max(queue_s, away_s)))


def join(
    plan: TrainingPlan,
    devices: Sequence[str],
    settings: str = "",
    *,
    detector: FailureDetector | None = None,
    wait_s: float = WAIT_S,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    begun: str = "",
    secret: Secret | None = None,
) -> ProcessGroup:
    """Join the process group as the named device."""
    rank = rank_of(plan, devices, local_rank(devices))
    _listen_as_planned(plan, rank)
    names = plan.cluster.network.ids
    world, name = len(names), names[rank]
    started = int(os.environ.get("WORLD_SIZE", world))
    if started != world:
        raise RankAssignmentError(
            f"the plan has {world} devices but torchrun starts {started} processes; start one a "
            "device"
        )
    detector = detector or FailureDetector(name, Shutdown())
    detector.heartbeat_timeout_s = heartbeat_timeout_s
    properties = {"plan": plan.content_hash[:12], "settings": settings}
    properties["secret"] = _whether(secret)
    entered = _enter(rank, names[0], wait_s)
    if begun and entered.store.check([begun]):
        return _rejoin(entered, rank, names, properties, detector, secret)
    about = f"plan {plan.content_hash} settings {settings}"
    return _rendezvous(entered, rank, names, properties, detector, wait_s, secret, about)


def join_by_name(
    name: str,
    settings: str = "",
    *,
    detector: FailureDetector,
    wait_s: float = WAIT_S,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    secret: Secret | None = None,
) -> ProcessGroup:
    """Join the process group where there is no plan yet: ranks are torchrun's."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"RANK and WORLD_SIZE must say who this is, found {error}; start with torchrun"
        ) from None
    detector.heartbeat_timeout_s = heartbeat_timeout_s
    entered = _enter(rank, "rank 0", wait_s)
    store = entered.store
    store.set(f"name/{rank}", name)
    _wait_for_all(store, rank, [f"rank {r}" for r in range(world)], wait_s)
    names = tuple(store.get(f"name/{r}").decode() for r in range(world))
    twice = next((each for each in names if names.count(each) > 1), None)
    if twice is not None:
        raise RankAssignmentError(
            f"device {twice!r} is claimed by two processes; name each device once"
        )
    properties = {"settings": settings, "secret": _whether(secret)}
    return _rendezvous(
        entered, rank, names, properties, detector, wait_s, secret, f"settings {settings}"
    )


class _Entered(NamedTuple):
    """The store, and whether this process serves it."""

    address: StoreAddress
    store: Store
    serves: bool


def _enter(rank: int, first: str, wait_s: float) -> _Entered:
    """Connect to the store given by the environment; ``first`` is the rank that serves it."""
    address = StoreAddress.of_environment()
    serves = rank == 0 and not address.by_starter
    return _Entered(address, *_connect(address, wait_s, serves, first))


def _rendezvous(
    entered: _Entered,
    rank: int,
    names: tuple[str, ...],
    properties: Mapping[str, str],
    detector: FailureDetector,
    wait_s: float,
    secret: Secret | None,
    about: str,
) -> ProcessGroup:
    """All ranks with names, each watched by another one."""
    address, store, serves = entered
    world, name = len(names), names[rank]
    detector.server = "the launcher" if address.by_starter else f"device {names[0]!r}"
    detector.start_watching(address, serves=serves)
    if store.add(f"claim/{rank}", 1) > 1:
        raise RankAssignmentError(
            f"device {name!r} is claimed by two processes; name each device once"
        )
    detector.watch_rank(rank, (rank + 1) % world, names[(rank + 1) % world])
    _require_alike(store, name, properties)
    tell_address_of_store(store, rank)
    _wait_for_all(store, rank, names, wait_s)
    if address.by_starter:
        on_first = [n for r, n in enumerate(names) if store.get(f"here/{r}") == b"0"]
        detector.server = f"the node of device {on_first[0]!r}" if on_first else detector.server
    ranks = ProcessGroup(
        rank, world, store, names, detector, secret=secret, address=address_among(store, world)
    )
    if secret is not None:
        authenticate_all(ranks, about)
    ring(ranks)
    return ranks


def _rejoin(
    entered: _Entered,
    rank: int,
    names: tuple[str, ...],
    properties: Mapping[str, str],
    detector: FailureDetector,
    secret: Secret | None,
) -> ProcessGroup:
    """Send heartbeats, and nothing else yet."""
    detector.server = "the launcher" if entered.address.by_starter else repr(names[0])
    detector.start_watching(entered.address, serves=entered.serves)
    detector.on_loss = lambda *_: None  # whatever happens to this process, the others continue
    _require_alike(entered.store, names[rank], properties)
    detector.watch_rank(rank, rank, names[rank])
    at = address_among(entered.store, len(names))
    return ProcessGroup(
        rank, len(names), entered.store, names, detector, late=True, secret=secret, address=at
    )


def ring(ranks: ProcessGroup) -> dict[socket.socket, str]:
    """Heartbeat connections to both neighbours of this rank, while held.

    Returns
    -------
    dict
        Connections, and the names of their devices.
    """
    neighbours = {(ranks.rank + step) % ranks.world for step in (1, -1)} - {ranks.rank}
    channels = {(ChannelKind.HEARTBEAT, other) for other in neighbours}
    opened = ranks.held.enter_context(connections_to(ranks, channels, "ring"))
    heartbeats: dict[socket.socket, str] = {c: ranks.name(r) for (_, r), c in opened.items()}
    assert ranks.detector is not None
    ranks.held.enter_context(ranks.detector.watching(heartbeats))
    return heartbeats


def _connect(address: StoreAddress, wait_s: float, serves: bool, first: str) -> tuple[Store, bool]:
    """The store, and whether this process serves it."""
    if serves:
        try:
            return address.connect(wait_s, serve=True), True
        except PortTakenError as error:
            # another process may have claimed the first device
            with suppress(StoreMissingError):
                return address.connect(min(wait_s, TAKEN_S)), False
            raise PortTakenError(f"{error}; name another MASTER_PORT on all nodes") from None
    try:
        return address.connect(wait_s), False
    except StoreMissingError as error:
        if address.by_starter:
            raise
        raise StoreMissingError(
            f"{error}; device {first!r} serves it: start that one too, and name its node in "
            "MASTER_ADDR"
        ) from None


def _require_alike(store: Store, name: str, own: Mapping[str, str]) -> None:
    """All ranks must have the same settings as the first one."""
    text = store.compare_set("told", "", json.dumps({**own, "device": name}))
    first = json.loads(text.decode())
    for what, remedy in (
        ("plan", "give every node the same plan file"),
        ("secret", "give every node the same --secret-file"),
    ):
        if what in own and first[what] != own[what]:
            raise RankAssignmentError(
                f"device {name!r} has {what} {own[what]} but device {first['device']!r} has "
                f"{first[what]}; {remedy}"
            )
    ours, theirs = json.loads(own["settings"] or "{}"), json.loads(first["settings"] or "{}")
    for option in [*ours, *(theirs.keys() - ours.keys())]:
        # as text, since nan != nan
        if json.dumps(ours.get(option)) != json.dumps(theirs.get(option)):
            word = f"--{option.replace('_', '-')}"
            raise RankAssignmentError(
                f"device {name!r} was given {_as_given(word, ours.get(option))} but device "
                f"{first['device']!r} {_as_given(word, theirs.get(option))}; start every node with "
                "the same options"
            )


def _as_given(word: str, value: Any) -> str:
    """An option and its value, as on the command line."""
    if value is None or value is False or value == []:
        return f"no {word}"
    if value is True:
        return word
    several = value if isinstance(value, list) else [value]
    return " ".join(map(str, [word, *several]))


def _whether(secret: Secret | None) -> str:
    """What ranks state about the secret before they prove it."""
    return "none" if secret is None else "file"


def _wait_for_all(store: Store, rank: int, names: Sequence[str], wait_s: float) -> None:
    store.set(f"here/{rank}", os.environ.get(NODE, "0"))
    keys = [f"here/{r}" for r in range(len(names))]
    try:
        store.wait(keys, timedelta(seconds=wait_s))
    except DistNetworkError:
        raise
    except DistStoreError:
        missing = [
            repr(name) for name, key in zip(names, keys, strict=True) if not store.check([key])
        ]
        if missing:
            ellipsis = ", ..." if len(missing) > MAX_NAMES else ""
            raise RendezvousTimeout(
                f"device {', '.join(missing[:MAX_NAMES])}{ellipsis} did not come within "
                f"{wait_s:g} s ({len(missing)} of {len(names)} missing); start all, "
                "and see what they print; --wait allows for longer"
            ) from None
