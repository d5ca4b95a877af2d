"""Membership of an elastic run by generations, agreed in the store.

A generation begins with a list of devices and ends when one of them is lost, or when a waiting
device is admitted. Every device that continues registers for the next one, with the number of steps
it has done; the first list made of these counts. A joining device registers beforehand.

Keys, by number of the generation: ``membership/G`` is its list of devices; ``came/G`` has one line
for each device that wants to join; ``lost/G`` one line for each lost device, or for a connection
that closed between two live ones: then all of them continue. What ranks of a generation share among
themselves begins with ``generation/G/``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.executor.comm.connections import ConnectionLost, ConnectionReset
from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.fault_tolerance.heartbeat import heartbeats
from planner.executor.rendezvous.process_group import WATCHED, ProcessGroup
from planner.executor.rendezvous.store import BEGUN, OVER

TOLD, EVALUATED, AGREED = "membership/told", "membership/evaluated", "membership/agreed"
AGAIN = "again"
"""Result of waiting for a key, if a device was lost meanwhile."""
NEW = -1
"""Steps of a device without parameters."""
LOOK_S = 0.05
CAUSE_S = 3.0
"""A closed connection has a cause elsewhere, which may take this long to arrive."""
MAX_TORN = 3
"""Generations that repeat a step because of closed connections, before a device is evicted."""
DOUBT_S = 2.0
"""Interval between two reads of heartbeats, which are sent twice a second."""
MAX_CREDIT_S = 1.0
"""Largest silence counted between two polls, so that a process that was stopped itself is not
misled."""


class DeviceLost(RuntimeError):
    """A device of this generation is lost, and the others continue in the next one."""


class Evicted(RuntimeError):
    """The others continue without this device."""


@dataclass(frozen=True)
class Generation:
    """Members of a generation.

    Attributes
    ----------
    members
        Device names, in the plan's order.
    step
        First step.
    new
        Devices without parameters.
    lost
        By name, why devices of the previous generation are missing.
    torn
        Why it began, if no device was lost.
    tears
        Consecutive generations that began so at this step.
    owes
        Whether the update of that step was committed, but not the outer step after it.
    evaluated
        Steps after which the last evaluation was reported, or the run began.
    agreed
        The step after which the last outer step was committed; smaller than any step if none was.
    """

    number: int
    members: tuple[str, ...]
    step: int
    new: tuple[str, ...] = ()
    lost: Mapping[str, str] | None = None
    torn: str = ""
    tears: int = 0
    owes: bool = False
    evaluated: int = 0
    agreed: int = NEW

    def to_text(self) -> str:
        """JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Generation:
        """Inverse of `to_text`."""
        data = json.loads(text)
        return cls(
            data["number"],
            tuple(data["members"]),
            data["step"],
            tuple(data["new"]),
            dict(data["lost"] or {}),
            data["torn"],
            data["tears"],
            data["owes"],
            data["evaluated"],
            data["agreed"],
        )


class Membership:
    """One device's view of the membership.

    Parameters
    ----------
    ranks
        The process group of the whole plan.
    wait_s
        Time for the others to miss the previous process of this device, if it joins late.

    Attributes
    ----------
    loss
        Latch that fails when a device is lost.
    comers
        Names of devices waiting to join.
    """

    def __init__(self, ranks: ProcessGroup, wait_s: float) -> None:
        assert ranks.detector is not None
        self._ranks, self._detector, self._wait_s = ranks, ranks.detector, wait_s
        self._ids, self.name = ranks.names, ranks.name(ranks.rank)
        self._store = ranks.store
        self._lock = threading.Lock()
        self._accused: set[str] = set()
        self._doubted = NEW
        self._awaited: tuple[str, ...] = ()
        self.now = Generation(0, (), 0)
        self.loss = ErrorLatch()
        self.lost: dict[str, str] = {}
        self.comers: tuple[str, ...] = ()

    def open(self, step: int) -> None:
        """Start the first generation, with all ranks of the plan."""
        first = Generation(0, self._ids, step, evaluated=step)
        self._store.compare_set(BEGUN, "", first.to_text())
        self._begin(first)

    def join(self) -> bool:
        """Wait until the others admit this device at the end of a step."""
        self._detector.on_loss = self.report_lost
        number, requested, silence = 0, -1, _Silence(self._store)
        until = time.monotonic() + self._wait_s
        while not self._store.check([OVER]):
            while self._store.check([f"membership/{number + 1}"]):
                number += 1
            generation = Generation.of_text(self._store.get(f"membership/{number}").decode())
            if self.name in generation.members and requested == number:
                self._begin(generation)
                return True
            # a previous process of this device has not been missed yet
            if self.name in generation.members and time.monotonic() > until:
                raise Evicted(
                    f"device {self.name!r} was not missed within {self._wait_s:g} s; see whether "
                    "another process has its name; --wait allows for longer"
                )
            if self.name not in generation.members and requested <= number:
                requested = number + 1
                self._say(f"came/{requested}", {"name": self.name, "step": NEW, "owes": False})
            others = [self._ids.index(name) for name in generation.members if name != self.name]
            if min(silence.of(others), default=0.0) > self._detector.heartbeat_timeout_s:
                raise Evicted(f"device {self.name!r} came, and nobody is left to continue with")
            time.sleep(LOOK_S)
        return False

    def next(self, step: int, owes: bool = False) -> None:
        """Continue into the next generation."""
        number, silence = self.now.number + 1, _Silence(self._store)
        key, came_key, lost_key = (
            f"membership/{number}",
            f"came/{number}",
            f"lost/{self.now.number}",
        )
        self._say(came_key, {"name": self.name, "step": step, "owes": owes})
        while not self._store.check([key]):
            came, lost = (self._lines(name) for name in (came_key, lost_key))
            steps = {line["name"]: line["step"] for line in came}
            gone = self._counted(lost)
            late = [m for m in self.now.members if m not in steps and m not in gone]
            if not late:
                owing = {line["name"] for line in came if line["owes"]}
                proposal = self._made(number, steps, owing, gone, _torn(lost))
                self._store.compare_set(key, "", proposal.to_text())
                break
            # a computing rank joins when it is done; one that was missed may be gone
            silent_s = silence.of([self._ids.index(name) for name in late])
            for name, seconds in zip(late, silent_s, strict=True):
                if seconds > self._detector.heartbeat_timeout_s:
                    self.report_lost([name], f"device {name!r} did not continue with the others")
            # its reports no longer count: it would wait for lost devices forever
            if self.name in gone and min(silent_s) > self._detector.heartbeat_timeout_s:
                raise Evicted(f"{gone[self.name]}; and nobody is left to continue with")
            time.sleep(LOOK_S)
        generation = Generation.of_text(self._store.get(key).decode())
        if self.name not in generation.members:
            why = (generation.lost or {}).get(self.name, "it was not there")
            raise Evicted(f"the others continue without device {self.name!r}: {why}")
        self._begin(generation)

    def ranks(self, rank: int) -> ProcessGroup:
        """The process group of the generation."""
        return ProcessGroup(
            rank,
            len(self.now.members),
            PrefixStore(self._prefix(), self._store),
            self.now.members,
            self._detector,
            loss=self.loss,
            waiting=self.waiting,
            secret=self._ranks.secret,
            address=self._ranks.address,
        )

    def report_lost(self, names: Sequence[str], why: str, alone: bool = False) -> None:
        """Report devices as lost."""
        if alone:
            self._doubt(names, why)
            return
        with self._lock:
            lost = [n for n in names if n in self.now.members and n not in self._accused]
            self._accused |= set(lost)
            key = f"lost/{self.now.number}"
        if lost:
            text = json.dumps({"by": self.name, "lost": lost, "why": why}) + "\n"
            self._detector.heartbeat.run_later(lambda store: _append(store, key, text))

    def _doubt(self, names: Sequence[str], why: str) -> None:
        """Check heartbeats twice, then report these devices or this one as lost."""
        with self._lock:
            number = self.now.number
            if self._doubted == number:
                return
            self._doubted = number
        ranks = [self._ids.index(name) for name in names]
        seen: list[bytes] = []

        def first(store: Store) -> None:
            seen.extend(heartbeats(store, ranks))
            again = threading.Timer(DOUBT_S, self._detector.heartbeat.run_later, (second,))
            again.daemon = True
            again.start()

        def second(store: Store) -> None:
            if number != self.now.number:
                return
            if heartbeats(store, ranks) == seen:
                self.report_lost(names, why)
            else:
                self.report_lost([self.name], f"device {self.name!r} hears nobody any more")

        self._detector.heartbeat.run_later(first)

    def repeat_step(self, name: str, why: str) -> None:
        """Repeat the step with all devices: a connection has closed, both ends may be alive."""
        key = f"lost/{self.now.number}"
        text = json.dumps({"by": self.name, "lost": [], "torn": name, "why": why}) + "\n"
        self._detector.heartbeat.run_later(lambda store: _append(store, key, text))

    def report(self, error: ConnectionLost) -> bool:
        """Report a closed connection, if no cause has arrived."""
        if isinstance(error, ConnectionReset) and (error.device or self.now.tears < MAX_TORN):
            # both ends may be alive, whatever the system reports
            where = f"its connection to {error.device!r}" if error.device else "a connection"
            self.repeat_step(error.device, f"device {self.name!r} lost {where}")
        elif error.device:
            self.report_lost([error.device], str(error))
        else:
            return False
        return True

    @contextmanager
    def waiting(self, keys: Sequence[str]) -> Iterator[None]:
        """Context of waiting for keys, which a loss interrupts."""
        self._awaited = tuple(keys)
        self.loss.check()
        yield
        self._awaited = ()
        self.loss.check()
        # another rank may have reported the loss and ended this wait
        values = self._store.multi_get([f"{self._prefix()}/{key}" for key in keys])
        if AGAIN.encode() in values:
            raise DeviceLost("a device is lost")

    def answer(self, key: str) -> str:
        """Wait for a key of the generation; `AGAIN` after a loss."""
        self._awaited = (key,)
        full_key = f"{self._prefix()}/{key}"
        if self.loss.error is not None:
            self._store.compare_set(full_key, "", AGAIN)
        self._store.wait([full_key], WATCHED)
        self._awaited = ()
        return self._store.get(full_key).decode()

    def forget(self, keys: Sequence[str]) -> None:
        """Delete keys of the generation that no rank will read."""
        names = [f"{self._prefix()}/{key}" for key in keys]

        def delete(store: Store) -> None:
            for name in names:
                store.delete_key(name)

        self._detector.heartbeat.run_later(delete)

    def tell(self, step: int) -> None:
        """Record that the loss of a step was reported."""
        self._store.set(TOLD, str(step))

    def tell_evaluated(self, steps: int) -> None:
        """Record that an evaluation was reported."""
        self._store.set(EVALUATED, str(steps))

    def tell_agreed(self, step: int) -> None:
        """Record that the outer step after a step was committed."""
        self._store.set(AGREED, str(step))

    def told(self) -> int:
        """The last step whose loss was reported; -1 for none."""
        return self._number(TOLD, -1)

    def close(self) -> None:
        """All steps are done: no device can join any more."""
        self._store.set(OVER, "")

    def _begin(self, generation: Generation) -> None:
        number, me = generation.number, self._ids.index(self.name)
        callbacks = {f"lost/{number}": self._hear_lost, f"came/{number + 1}": self._hear_came}
        for key in callbacks:
            self._store.compare_set(key, "", "\n")
        with self._lock:
            self.now, self.loss, self.lost, self.comers = generation, ErrorLatch(), {}, ()
            self._accused = set()
        others = [self._ids.index(name) for name in generation.members]
        next_rank = others[(others.index(me) + 1) % len(others)]
        self._detector.on_loss = self.report_lost
        self._detector.watch_rank(me, next_rank, self._ids[next_rank])
        self._detector.heartbeat.poll(
            {key: partial(hear, number) for key, hear in callbacks.items()}
        )

    def _prefix(self) -> str:
        return f"generation/{self.now.number}"

    def _made(
        self,
        number: int,
        steps: Mapping[str, int],
        owing: Collection[str],
        gone: Mapping[str, str],
        torn: Mapping[str, Any] | None,
    ) -> Generation:
        members = tuple(name for name in self._ids if name in steps and name not in gone)
        step = max((steps[name] for name in members), default=NEW)
        new = tuple(name for name in members if steps[name] < step)
        owes = any(name in owing and steps[name] == step for name in members)
        generation = Generation(
            number,
            members,
            step,
            new,
            dict(gone),
            owes=owes,
            evaluated=self._number(EVALUATED, self.now.evaluated),
            agreed=self._number(AGREED, self.now.agreed),
        )
        if gone or torn is None:
            return generation
        tears = 1 + (self.now.tears if step == self.now.step else 0)
        return replace(generation, torn=torn["why"], tears=tears)

    def _number(self, key: str, otherwise: int) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else otherwise

    def _hear_lost(self, number: int, text: str) -> None:
        """Called in the heartbeat thread, like `_hear_came`."""
        lines = _read(text)
        gone, torn = self._counted(lines), _torn(lines)
        with self._lock:
            if not (gone or torn) or number != self.now.number or self.loss.error is not None:
                return
            self.lost, loss = gone, self.loss
        loss(DeviceLost(next(iter(gone.values()), torn["why"] if torn else "")))
        for key in self._awaited:
            full_key = f"generation/{number}/{key}"
            self._detector.heartbeat.run_later(partial(_set_again, full_key))

    def _hear_came(self, number: int, text: str) -> None:
        names = (line["name"] for line in _read(text))
        with self._lock:
            if number == self.now.number:
                self.comers = tuple(name for name in names if name not in self.now.members)

    def _counted(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Devices to evict: reports by devices that are reported themselves do not count.

        A step repeated too often evicts one device: the other end of the connection reported first.
        All ranks derive the same.
        """
        evicted: dict[str, str] = {}
        torn = _torn(lines) if self.now.tears >= MAX_TORN else None
        if torn is not None and torn["torn"] in self.now.members:
            evicted[torn["torn"]] = torn["why"]
        for line in lines:
            if line["by"] not in evicted:
                evicted |= {name: line["why"] for name in line["lost"] if name not in evicted}
        return evicted

    def _lines(self, key: str) -> list[dict[str, Any]]:
        return _read(self._store.get(key).decode())

    def _say(self, key: str, line: Mapping[str, Any]) -> None:
        _append(self._store, key, json.dumps(line) + "\n")


def _read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line]


def _torn(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The connection reported first; None if none closed."""
    return next((line for line in lines if not line["lost"]), None)


def _append(store: Store, key: str, text: str) -> None:
    store.append(key, text)  # type: ignore[attr-defined]


def _set_again(key: str, store: Store) -> None:
    store.compare_set(key, "", AGAIN)


class _Silence:
    """Observed silence of devices.

    Parameters
    ----------
    store
        Store with the heartbeats.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._looked = store, time.monotonic()
        self._seen: dict[int, bytes] = {}
        self._silent_s: dict[int, float] = {}

    def of(self, ranks: Sequence[int]) -> list[float]:
        """Seconds of silence of each rank."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, MAX_CREDIT_S), now
        for rank, beat in zip(ranks, heartbeats(self._store, ranks), strict=True):
            same = self._seen.get(rank) == beat
            self._silent_s[rank] = self._silent_s.get(rank, 0.0) + passed if same else 0.0
            self._seen[rank] = beat
        return [self._silent_s[rank] for rank in ranks]
