"""Rendezvous: processes find each other in the store, compare their settings and connect."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from planner.executor.fault_tolerance.failure_detector import (
    HEARTBEAT_TIMEOUT_S,
    LATENCIES,
    FailureDetector,
)
from planner.executor.fault_tolerance.heartbeat import PERIOD_S, heartbeats
from planner.executor.fault_tolerance.shutdown import Shutdown
from planner.executor.rendezvous.address import (
    publish_store_address,
    reachable_address,
)
from planner.executor.rendezvous.auth import authenticate_all
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_assignment import (
    NODE,
    RankAssignmentError,
    assigned_rank,
    environment_number,
    local_rank,
    use_planned_interface,
)
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.rendezvous.secret import Secret
from planner.executor.transport.connections import ChannelKind
from planner.executor.transport.store import PortTakenError, StoreAddress, StoreMissingError
from planner.training_plan.model import TrainingPlan
from planner.utils.refusal import Refusal
from planner.utils.text import listed

WAIT_S = 60.0
"""Timeout for ranks that have not joined yet."""
PORT_TAKEN_TIMEOUT_S = 3.0
REJOIN_SILENCE_S = 4 * PERIOD_S
"""A device without heartbeats for so long has no live process."""


class RendezvousTimeout(RuntimeError):
    """Not all ranks have joined in time."""


def heartbeat_timeout_s(plan: TrainingPlan, speed: float = 1.0) -> float:
    """Default heartbeat timeout: 10 s, more with long latencies.

    A heartbeat may queue behind the averaging traffic of its pair, in routers.
    """
    latency = plan.cluster.network.latency_s
    queue_s = HEARTBEAT_TIMEOUT_S + plan.predicted.averaging_s / speed
    latency_s = LATENCIES * float(np.nanmax(latency, initial=0.0)) / speed
    return float(round(max(queue_s, latency_s)))


def rendezvous(
    plan: TrainingPlan,
    devices: Sequence[str],
    settings: str = "",
    *,
    detector: FailureDetector | None = None,
    wait_s: float = WAIT_S,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    elastic_key: str = "",
    secret: Secret | None = None,
) -> RankGroup:
    """Join the rank group as the named device."""
    rank = assigned_rank(plan, devices, local_rank(devices))
    use_planned_interface(plan, rank)
    names = plan.cluster.network.ids
    world, name = len(names), names[rank]
    processes = environment_number("WORLD_SIZE", world)
    if processes != world:
        raise RankAssignmentError(
            f"the plan has {world} devices but torchrun starts {processes} processes; start one a "
            "device"
        )
    detector = detector or FailureDetector(name, Shutdown())
    detector.heartbeat_timeout_s = heartbeat_timeout_s
    shared_properties = {"plan": plan.content_hash[:12], "settings": settings}
    shared_properties["secret"] = _secret_mode(secret)
    connection = _connect_to_store(rank, names[0], wait_s)
    if elastic_key and connection.store.check([elastic_key]):
        return _rejoin(connection, rank, names, shared_properties, detector, secret)
    proof_context = f"plan {plan.content_hash} settings {settings}"
    return _register_and_connect(
        connection, rank, names, shared_properties, detector, wait_s, secret, proof_context
    )


def rendezvous_by_name(
    name: str,
    settings: str = "",
    *,
    detector: FailureDetector,
    wait_s: float = WAIT_S,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    secret: Secret | None = None,
) -> RankGroup:
    """Join the rank group where there is no plan yet: ranks are torchrun's."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise Refusal(
            f"RANK and WORLD_SIZE must say who this is, found {error}; start with torchrun"
        ) from None
    detector.heartbeat_timeout_s = heartbeat_timeout_s
    connection = _connect_to_store(rank, "rank 0", wait_s)
    store = connection.store
    store.set(f"name/{rank}", name)
    _wait_for_all(store, rank, [f"rank {r}" for r in range(world)], wait_s)
    names = tuple(store.get(f"name/{r}").decode() for r in range(world))
    duplicate = next((each for each in names if names.count(each) > 1), None)
    if duplicate is not None:
        raise RankAssignmentError(
            f"device {duplicate!r} is claimed by two processes; name each device once"
        )
    shared_properties = {"settings": settings, "secret": _secret_mode(secret)}
    return _register_and_connect(
        connection, rank, names, shared_properties, detector, wait_s, secret, f"settings {settings}"
    )


class _StoreConnection(NamedTuple):
    """The store, and whether this process serves it."""

    address: StoreAddress
    store: Store
    serves: bool


def _connect_to_store(rank: int, serving_device: str, wait_s: float) -> _StoreConnection:
    """Connect to the store given by the environment; ``serving_device`` serves it."""
    address = StoreAddress.from_environment()
    serves = rank == 0 and not address.served_by_launcher
    return _StoreConnection(address, *_connect(address, wait_s, serves, serving_device))


def _server_label(address: StoreAddress, names: Sequence[str]) -> str:
    """Who serves the store, as messages and the failure detector name it."""
    return "the launcher" if address.served_by_launcher else f"device {names[0]!r}"


def _register_and_connect(
    connection: _StoreConnection,
    rank: int,
    names: tuple[str, ...],
    shared_properties: Mapping[str, str],
    detector: FailureDetector,
    wait_s: float,
    secret: Secret | None,
    proof_context: str,
) -> RankGroup:
    """All ranks with names, each watched by another one."""
    address, store, serves = connection
    world, name = len(names), names[rank]
    detector.server = _server_label(address, names)
    detector.start_watching(address, serves=serves)
    if store.add(f"claim/{rank}", 1) > 1:
        raise RankAssignmentError(
            f"device {name!r} is claimed by two processes; name each device once"
        )
    detector.watch_rank(rank, (rank + 1) % world, names[(rank + 1) % world])
    _require_same_settings(store, name, shared_properties)
    publish_store_address(store, rank)
    _wait_for_all(store, rank, names, wait_s)
    if address.served_by_launcher:
        on_first = [n for r, n in enumerate(names) if store.get(f"present/{r}") == b"0"]
        detector.server = f"the node of device {on_first[0]!r}" if on_first else detector.server
    ranks = RankGroup(
        rank, world, store, names, detector, secret=secret, address=reachable_address(store, world)
    )
    if secret is not None:
        authenticate_all(ranks, proof_context)
    connect_ring(ranks)
    return ranks


def _rejoin(
    connection: _StoreConnection,
    rank: int,
    names: tuple[str, ...],
    shared_properties: Mapping[str, str],
    detector: FailureDetector,
    secret: Secret | None,
) -> RankGroup:
    """Send heartbeats, and nothing else yet."""
    detector.server = _server_label(connection.address, names)
    detector.on_rank_lost = lambda *_: None  # whatever happens to this process, the others continue
    detector.start_watching(connection.address, serves=connection.serves)
    _require_same_settings(connection.store, names[rank], shared_properties)
    _claim_rejoin(connection.store, rank, names[rank])
    detector.watch_rank(rank, rank, names[rank])
    address = reachable_address(connection.store, len(names))
    return RankGroup(
        rank,
        len(names),
        connection.store,
        names,
        detector,
        joins_late=True,
        secret=secret,
        address=address,
    )


def _claim_rejoin(store: Store, rank: int, name: str) -> None:
    """Claim a device whose previous process has ended; one process only may rejoin as it."""
    (last,) = heartbeats(store, [rank])
    time.sleep(REJOIN_SILENCE_S)
    # heartbeats of another process start elsewhere, so this key belongs to the previous one
    if heartbeats(store, [rank]) != [last] or store.add(f"rejoin/{rank}/{last.decode()}", 1) > 1:
        raise RankAssignmentError(
            f"device {name!r} is claimed by two processes; name each device once"
        )


def connect_ring(ranks: RankGroup) -> dict[socket.socket, str]:
    """Heartbeat connections to both neighbours of this rank, while held.

    Returns
    -------
    dict
        Connections, and the names of their devices.
    """
    neighbours = {(ranks.rank + step) % ranks.world_size for step in (1, -1)} - {ranks.rank}
    channels = {(ChannelKind.HEARTBEAT, other) for other in neighbours}
    opened = ranks.resources.enter_context(connections_to(ranks, channels, "ring"))
    heartbeats: dict[socket.socket, str] = {c: ranks.name(r) for (_, r), c in opened.items()}
    assert ranks.detector is not None
    ranks.resources.enter_context(ranks.detector.watching(heartbeats))
    return heartbeats


def _connect(
    address: StoreAddress, wait_s: float, serves: bool, serving_device: str
) -> tuple[Store, bool]:
    """The store, and whether this process serves it."""
    if serves:
        try:
            return address.connect(wait_s, serve=True), True
        except PortTakenError as error:
            # another process may have claimed the first device
            with suppress(StoreMissingError):
                return address.connect(min(wait_s, PORT_TAKEN_TIMEOUT_S)), False
            raise PortTakenError(f"{error}; name another MASTER_PORT on all nodes") from None
    try:
        return address.connect(wait_s), False
    except StoreMissingError as error:
        if address.served_by_launcher:
            raise
        raise StoreMissingError(
            f"{error}; device {serving_device!r} serves it: start that one too, and name its node "
            "in MASTER_ADDR"
        ) from None


def _require_same_settings(store: Store, name: str, settings: Mapping[str, str]) -> None:
    """All ranks must have the same settings as the first one."""
    text = store.compare_set("settings", "", json.dumps({**settings, "device": name}))
    first_settings = json.loads(text.decode())
    for what, remedy in (
        ("plan", "give every node the same plan file"),
        ("secret", "give every node the same --secret-file"),
    ):
        if what in settings and first_settings[what] != settings[what]:
            raise RankAssignmentError(
                f"device {name!r} has {what} {settings[what]} but device "
                f"{first_settings['device']!r} has {first_settings[what]}; {remedy}"
            )
    ours, theirs = (
        json.loads(settings["settings"] or "{}"),
        json.loads(first_settings["settings"] or "{}"),
    )
    for option in [*ours, *(theirs.keys() - ours.keys())]:
        # as text, since nan != nan
        if json.dumps(ours.get(option)) != json.dumps(theirs.get(option)):
            flag = f"--{option.replace('_', '-')}"
            raise RankAssignmentError(
                f"device {name!r} was given {_format_option(flag, ours.get(option))} but device "
                f"{first_settings['device']!r} {_format_option(flag, theirs.get(option))}; start "
                "every node with the same options"
            )


def _format_option(flag: str, value: Any) -> str:
    """An option and its value, as on the command line."""
    if value is None or value is False or value == []:
        return f"no {flag}"
    if value is True:
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join(map(str, [flag, *values]))


def _secret_mode(secret: Secret | None) -> str:
    """Whether a rank has a secret, which ranks compare before they prove it."""
    return "none" if secret is None else "file"


def _wait_for_all(store: Store, rank: int, names: Sequence[str], wait_s: float) -> None:
    store.set(f"present/{rank}", os.environ.get(NODE, "0"))
    keys = [f"present/{r}" for r in range(len(names))]
    try:
        store.wait(keys, timedelta(seconds=wait_s))
    except DistNetworkError:
        raise
    except DistStoreError:
        missing = [name for name, key in zip(names, keys, strict=True) if not store.check([key])]
        if missing:
            what = "device" if len(missing) == 1 else "devices"
            raise RendezvousTimeout(
                f"{what} {listed(missing)} did not join within {wait_s:g} s "
                f"({len(missing)} of {len(names)} missing); start all, see what they print, or "
                "raise --wait"
            ) from None
