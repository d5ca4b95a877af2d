"""Rendezvous: processes find each other in the store, compare their settings and connect."""

from __future__ import annotations

import json
import os
import socket
import sys
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
    TIMEOUT_IN_LATENCIES,
    FailureDetector,
)
from planner.executor.fault_tolerance.heartbeat import PERIOD_S, heartbeat_key, heartbeats
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
    latency_s = TIMEOUT_IN_LATENCIES * float(np.nanmax(latency, initial=0.0)) / speed
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
    process = _JoiningProcess.connect(
        rank, names, shared_properties, detector, secret, wait_s, names[0]
    )
    if elastic_key and process.store.check([elastic_key]):
        return process.rejoin()
    return process.join(wait_s, f"plan {plan.content_hash} settings {settings}")


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
    process = _JoiningProcess.connect(
        rank, (), {"settings": settings}, detector, secret, wait_s, "rank 0"
    )
    store = process.store
    store.set(f"name/{rank}", name)
    _wait_for_all(store, rank, [f"rank {r}" for r in range(world)], wait_s)
    names = tuple(store.get(f"name/{r}").decode() for r in range(world))
    duplicate = next((each for each in names if names.count(each) > 1), None)
    if duplicate is not None:
        raise _claimed_twice(duplicate)
    return process._replace(names=names).join(wait_s, f"settings {settings}")


class _JoiningProcess(NamedTuple):
    """This process, and its connection to the store, before it is one of the ranks.

    Attributes
    ----------
    serves
        Whether it serves the store.
    shared_properties
        Properties that all ranks must have in common.
    """

    rank: int
    names: tuple[str, ...]
    shared_properties: Mapping[str, str]
    detector: FailureDetector
    secret: Secret | None
    address: StoreAddress
    store: Store
    serves: bool

    @classmethod
    def connect(
        cls,
        rank: int,
        names: tuple[str, ...],
        shared_properties: Mapping[str, str],
        detector: FailureDetector,
        secret: Secret | None,
        wait_s: float,
        serving_device: str,
    ) -> _JoiningProcess:
        """Connect to the store given by the environment, which ``serving_device`` serves."""
        address = StoreAddress.from_environment()
        # whether a rank has a secret is compared before it is proved
        shared = {**shared_properties, "secret": "no secret" if secret is None else "a secret"}
        serves = rank == 0 and not address.served_by_launcher
        connection = _connect(address, wait_s, serves, serving_device)
        return cls(rank, names, shared, detector, secret, address, *connection)

    def join(self, wait_s: float, proof_context: str) -> RankGroup:
        """Join all ranks, each watched by another one; a collective call."""
        store, rank, names, detector = self.store, self.rank, self.names, self.detector
        self._start_watching()
        if store.add(f"claim/{rank}", 1) > 1:
            raise _claimed_twice(names[rank])
        next_rank = (rank + 1) % len(names)
        detector.set_watched_rank(rank, next_rank, names[next_rank])
        _require_same_settings(store, names[rank], self.shared_properties)
        publish_store_address(store, rank)
        _wait_for_all(store, rank, names, wait_s)
        if self.address.served_by_launcher:
            on_first = [n for r, n in enumerate(names) if store.get(f"present/{r}") == b"0"]
            if on_first:
                detector.server = f"the node of device {on_first[0]!r}"
        ranks = self._rank_group(joins_late=False)
        if self.secret is not None:
            authenticate_all(ranks, proof_context)
        connect_ring(ranks)
        return ranks

    def rejoin(self) -> RankGroup:
        """Join ranks that have started: send heartbeats, and nothing else yet."""
        detector = self.detector
        detector.on_rank_lost = lambda *_: None  # whatever happens here, the others continue
        self._start_watching()
        _require_same_settings(self.store, self.names[self.rank], self.shared_properties)
        _claim_rejoin(self.store, self.rank, self.names[self.rank])
        detector.set_watched_rank(self.rank, self.rank, self.names[self.rank])
        return self._rank_group(joins_late=True)

    def _start_watching(self) -> None:
        by_launcher = self.address.served_by_launcher
        self.detector.server = "the launcher" if by_launcher else f"device {self.names[0]!r}"
        self.detector.start_watching(self.address, serves=self.serves)

    def _rank_group(self, *, joins_late: bool) -> RankGroup:
        return RankGroup(
            self.rank,
            len(self.names),
            self.store,
            self.names,
            self.detector,
            joins_late=joins_late,
            secret=self.secret,
            address=reachable_address(self.store, len(self.names)),
        )


def _claimed_twice(name: str) -> RankAssignmentError:
    return RankAssignmentError(
        f"device {name!r} is claimed by two processes; name each device once"
    )


def _claim_rejoin(store: Store, rank: int, name: str) -> None:
    """Claim a device whose previous process has ended; one process only may rejoin as it."""
    (last,) = heartbeats(store, [rank])
    time.sleep(REJOIN_SILENCE_S)
    # the claim is a heartbeat: one that ends before its first own leaves nothing behind
    claim = f"{os.getpid()}.{time.monotonic_ns()}"
    key = heartbeat_key(rank)
    if store.compare_set(key, last.decode(), claim) != claim.encode():
        raise _claimed_twice(name)


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
    ranks.resources.enter_context(ranks.detector.watching_connections(heartbeats))
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
    for what, label, remedy in (
        ("plan", "plan ", "give every node the same plan file"),
        ("secret", "", "give every node the same --secret-file"),
    ):
        if what in settings and first_settings[what] != settings[what]:
            raise RankAssignmentError(
                f"device {name!r} has {label}{settings[what]} but device "
                f"{first_settings['device']!r} has {label}{first_settings[what]}; {remedy}"
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


def _wait_for_all(store: Store, rank: int, names: Sequence[str], wait_s: float) -> None:
    store.set(f"present/{rank}", os.environ.get(NODE, "0"))
    missing = _missing_after(store, names, wait_s / 2)
    if missing:
        if environment_number("LOCAL_RANK", 0) == 0:
            print(
                f"planner.executor: waiting for {missing}, {wait_s / 2:g} s more",
                file=sys.stderr,
                flush=True,
            )
        missing = _missing_after(store, names, wait_s / 2)
    if missing:
        raise RendezvousTimeout(
            f"{missing} did not join within {wait_s:g} s; start all, see what they print, or raise "
            "--wait"
        )


def _missing_after(store: Store, names: Sequence[str], wait_s: float) -> str:
    """The devices that have not joined after so many seconds, in words; empty if all have."""
    keys = [f"present/{r}" for r in range(len(names))]
    try:
        store.wait(keys, timedelta(seconds=wait_s))
    except DistNetworkError:
        raise
    except DistStoreError:
        missing = [name for name, key in zip(names, keys, strict=True) if not store.check([key])]
        if missing:
            what = "device" if len(missing) == 1 else "devices"
            return f"{what} {listed(missing)} ({len(missing)} of {len(names)})"
    return ""
