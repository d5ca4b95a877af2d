"""Who takes part in an elastic run, generation by generation, as all agree in the store.

A generation begins with a list of devices and ends when one of them is lost, or when one that has
come is let in. Whoever goes on into the next one says so there, with the number of steps that it
has done; the first list that is made of them counts. A device that comes says so beforehand.

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
"""In the place of what was waited for when a device was lost."""
NEW = -1
"""Steps of a device that has no parameters yet."""
LOOK_S = 0.05
CAUSE_S = 3.0
"""A connection that closes only follows from something: so long may it take to be told."""
MOST_TORN = 3
"""Generations that begin a step again for connections that ended; then somebody is missed."""
DOUBT_S = 2.0
"""Between two looks at signs of life, of which two a second are given."""
MOST_CREDIT_S = 1.0
"""Of silence between two looks: who was stopped itself must not take that for others' silence."""


class DeviceLost(RuntimeError):
    """A device of this generation is lost, and the others go on in the next one."""


class Evicted(RuntimeError):
    """The others go on without this device."""


@dataclass(frozen=True)
class Generation:
    """Who takes part.

    Attributes
    ----------
    members
        Names of devices, in the plan's order.
    step
        With which it begins.
    new
        Those who have no parameters yet.
    lost
        By name, why devices of the generation before are not in it.
    torn
        Why it begins, where nobody is lost.
    tears
        Generations one after the other that began so with this step.
    owes
        Whether the update of that step was taken, but not the outer step after it.
    evaluated
        Steps after which the last evaluation was told, or with which the run began.
    agreed
        The step after which the last outer step was taken; none was: less than any.
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
        """What `to_text` gave."""
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
    """One device's view of it.

    Parameters
    ----------
    ranks
        This process among all of the plan.
    wait_s
        For the others to miss the process that had this one's name, if it comes late.

    Attributes
    ----------
    loss
        Fails when a device of it is lost.
    comers
        Names of those who wait to come in.
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
        """All ranks of the plan are there, and begin."""
        first = Generation(0, self._ids, step, evaluated=step)
        self._store.compare_set(BEGUN, "", first.to_text())
        self._begin(first)

    def come(self) -> bool:
        """Wait until the others have let this device in, at the end of a step."""
        self._detector.missed = self.accuse
        number, asked, silence = 0, -1, _Silence(self._store)
        until = time.monotonic() + self._wait_s
        while not self._store.check([OVER]):
            while self._store.check([f"membership/{number + 1}"]):
                number += 1
            found = Generation.of_text(self._store.get(f"membership/{number}").decode())
            if self.name in found.members and asked == number:
                self._begin(found)
                return True
            # a process of this name that has ended is still to be missed
            if self.name in found.members and time.monotonic() > until:
                raise Evicted(
                    f"device {self.name!r} was not missed within {self._wait_s:g} s; see whether "
                    "another process has its name; --wait allows for longer"
                )
            if self.name not in found.members and asked <= number:
                asked = number + 1
                self._say(f"came/{asked}", {"name": self.name, "step": NEW, "owes": False})
            others = [self._ids.index(name) for name in found.members if name != self.name]
            if min(silence.of(others), default=0.0) > self._detector.heartbeat_timeout_s:
                raise Evicted(f"device {self.name!r} came, and nobody is left to go on with")
            time.sleep(LOOK_S)
        return False

    def next(self, step: int, owes: bool = False) -> None:
        """Go on into the next generation."""
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
                made = self._made(number, steps, owing, gone, _torn(lost))
                self._store.compare_set(key, "", made.to_text())
                break
            # who computes comes when that is done; a device that was missed before may be no more
            silent_s = silence.of([self._ids.index(name) for name in late])
            for name, seconds in zip(late, silent_s, strict=True):
                if seconds > self._detector.heartbeat_timeout_s:
                    self.accuse([name], f"device {name!r} did not go on with the others")
            # its own word does not count any more: it would wait for ever for those who vanished
            if self.name in gone and min(silent_s) > self._detector.heartbeat_timeout_s:
                raise Evicted(f"{gone[self.name]}; and nobody is left to go on with")
            time.sleep(LOOK_S)
        found = Generation.of_text(self._store.get(key).decode())
        if self.name not in found.members:
            why = (found.lost or {}).get(self.name, "it was not there")
            raise Evicted(f"the others go on without device {self.name!r}: {why}")
        self._begin(found)

    def ranks(self, rank: int) -> ProcessGroup:
        """This process among those of the generation."""
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

    def accuse(self, names: Sequence[str], why: str, alone: bool = False) -> None:
        """Say that devices are missed."""
        if alone:
            self._doubt(names, why)
            return
        with self._lock:
            found = [n for n in names if n in self.now.members and n not in self._accused]
            self._accused |= set(found)
            key = f"lost/{self.now.number}"
        if found:
            text = json.dumps({"by": self.name, "lost": found, "why": why}) + "\n"
            self._detector.heartbeat.later(lambda store: _append(store, key, text))

    def _doubt(self, names: Sequence[str], why: str) -> None:
        """Look twice whether devices live, and then accuse them or this one."""
        with self._lock:
            number = self.now.number
            if self._doubted == number:
                return
            self._doubted = number
        ranks = [self._ids.index(name) for name in names]
        seen: list[bytes] = []

        def first(store: Store) -> None:
            seen.extend(heartbeats(store, ranks))
            again = threading.Timer(DOUBT_S, self._detector.heartbeat.later, (second,))
            again.daemon = True
            again.start()

        def second(store: Store) -> None:
            if number != self.now.number:
                return
            if heartbeats(store, ranks) == seen:
                self.accuse(names, why)
            else:
                self.accuse([self.name], f"device {self.name!r} hears nobody any more")

        self._detector.heartbeat.later(first)

    def tear(self, name: str, why: str) -> None:
        """Begin again with all who are there: a connection has ended, and both its ends may live."""
        key = f"lost/{self.now.number}"
        text = json.dumps({"by": self.name, "lost": [], "torn": name, "why": why}) + "\n"
        self._detector.heartbeat.later(lambda store: _append(store, key, text))

    def report(self, error: ConnectionLost) -> bool:
        """Say what a connection's end means for all, when no cause of it has been told."""
        if isinstance(error, ConnectionReset) and (error.device or self.now.tears < MOST_TORN):
            # neither end need be gone, whatever the system says of it here
            where = f"its connection to {error.device!r}" if error.device else "a connection"
            self.tear(error.device, f"device {self.name!r} lost {where}")
        elif error.device:
            self.accuse([error.device], str(error))
        else:
            return False
        return True

    @contextmanager
    def waiting(self, keys: Sequence[str]) -> Iterator[None]:
        """While the generation's store is waited for, which a loss ends."""
        self._awaited = tuple(keys)
        self.loss.check()
        yield
        self._awaited = ()
        self.loss.check()
        # another rank may have seen the loss, and ended this wait with its own
        found = self._store.multi_get([f"{self._prefix()}/{key}" for key in keys])
        if AGAIN.encode() in found:
            raise DeviceLost("a device is lost")

    def answer(self, key: str) -> str:
        """What the generation's store has at a key, once it has something: `AGAIN` after a loss."""
        self._awaited = (key,)
        whole = f"{self._prefix()}/{key}"
        if self.loss.error is not None:
            self._store.compare_set(whole, "", AGAIN)
        self._store.wait([whole], WATCHED)
        self._awaited = ()
        return self._store.get(whole).decode()

    def forget(self, keys: Sequence[str]) -> None:
        """Remove keys of the generation that nobody reads any more."""
        names = [f"{self._prefix()}/{key}" for key in keys]

        def delete(store: Store) -> None:
            for name in names:
                store.delete_key(name)

        self._detector.heartbeat.later(delete)

    def tell(self, step: int) -> None:
        """Note that a step's loss was told."""
        self._store.set(TOLD, str(step))

    def tell_evaluated(self, steps: int) -> None:
        """Note that what is learnt after so many steps was told."""
        self._store.set(EVALUATED, str(steps))

    def tell_agreed(self, step: int) -> None:
        """Note that the outer step after a step is taken by all."""
        self._store.set(AGREED, str(step))

    def told(self) -> int:
        """The last step whose loss was told; -1: none was."""
        return self._number(TOLD, -1)

    def close(self) -> None:
        """All steps are done: who comes now has come too late."""
        self._store.set(OVER, "")

    def _begin(self, generation: Generation) -> None:
        number, me = generation.number, self._ids.index(self.name)
        heeded = {f"lost/{number}": self._hear_lost, f"came/{number + 1}": self._hear_came}
        for key in heeded:
            self._store.compare_set(key, "", "\n")
        with self._lock:
            self.now, self.loss, self.lost, self.comers = generation, ErrorLatch(), {}, ()
            self._accused = set()
        others = [self._ids.index(name) for name in generation.members]
        beside = others[(others.index(me) + 1) % len(others)]
        self._detector.missed = self.accuse
        self._detector.look_after(me, beside, self._ids[beside])
        self._detector.heartbeat.heed({key: partial(hear, number) for key, hear in heeded.items()})

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
        made = Generation(
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
            return made
        tears = 1 + (self.now.tears if step == self.now.step else 0)
        return replace(made, torn=torn["why"], tears=tears)

    def _number(self, key: str, otherwise: int) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else otherwise

    def _hear_lost(self, number: int, text: str) -> None:
        """In the thread of signs of life, as `_hear_came`."""
        lines = _read(text)
        gone, torn = self._counted(lines), _torn(lines)
        with self._lock:
            if not (gone or torn) or number != self.now.number or self.loss.error is not None:
                return
            self.lost, loss = gone, self.loss
        loss(DeviceLost(next(iter(gone.values()), torn["why"] if torn else "")))
        for key in self._awaited:
            whole = f"generation/{number}/{key}"
            self._detector.heartbeat.later(partial(_set_again, whole))

    def _hear_came(self, number: int, text: str) -> None:
        names = (line["name"] for line in _read(text))
        with self._lock:
            if number == self.now.number:
                self.comers = tuple(name for name in names if name not in self.now.members)

    def _counted(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Who is lost: what those say who are themselves does not count.

        A step that tore too often costs one device its place: at the other end of the connection
        that was told of first. What all others see follows from that.
        """
        found: dict[str, str] = {}
        torn = _torn(lines) if self.now.tears >= MOST_TORN else None
        if torn is not None and torn["torn"] in self.now.members:
            found[torn["torn"]] = torn["why"]
        for line in lines:
            if line["by"] not in found:
                found |= {name: line["why"] for name in line["lost"] if name not in found}
        return found

    def _lines(self, key: str) -> list[dict[str, Any]]:
        return _read(self._store.get(key).decode())

    def _say(self, key: str, line: Mapping[str, Any]) -> None:
        _append(self._store, key, json.dumps(line) + "\n")


def _read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line]


def _torn(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of the connection that was told of first; None: none tore."""
    return next((line for line in lines if not line["lost"]), None)


def _append(store: Store, key: str, text: str) -> None:
    store.append(key, text)  # type: ignore[attr-defined]


def _set_again(key: str, store: Store) -> None:
    store.compare_set(key, "", AGAIN)


class _Silence:
    """For how long devices have given no sign of life, by what one sees itself.

    Parameters
    ----------
    store
        Where the signs are.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._looked = store, time.monotonic()
        self._seen: dict[int, bytes] = {}
        self._silent_s: dict[int, float] = {}

    def of(self, ranks: Sequence[int]) -> list[float]:
        """Seconds of each, at this look."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, MOST_CREDIT_S), now
        for rank, beat in zip(ranks, heartbeats(self._store, ranks), strict=True):
            same = self._seen.get(rank) == beat
            self._silent_s[rank] = self._silent_s.get(rank, 0.0) + passed if same else 0.0
            self._seen[rank] = beat
        return [self._silent_s[rank] for rank in ranks]
