"""Membership of an elastic run by generations, agreed in the store.

A generation begins with a list of devices and ends when one of them is lost, or when a waiting
device is admitted. Every device that continues registers for the next one, with the number of steps
it has done; the first list made of these counts. A joining device registers beforehand.

Keys of generation G: ``membership/G`` is its list of devices; ``registered/G`` has one line for
each device that registers for it; ``lost/G`` has one line for each report of a lost device, or of a
connection that closed between two live ones, after which all of them continue. Other keys that the
ranks of a generation use begin with ``generation/G/``. The states of a run are listed in
docs/explanation/elastic-runs.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from planner.executor.fault_tolerance.error_latch import ErrorLatch
from planner.executor.fault_tolerance.heartbeat import heartbeats
from planner.executor.rendezvous.rank_group import LONG_TIMEOUT, RankGroup
from planner.executor.transport.connections import ConnectionLost, ConnectionReset
from planner.executor.transport.store import FINISHED_KEY, STARTED_KEY

REPORTED_STEP, EVALUATED_STEPS, OUTER_STEP = (
    "membership/reported_step",
    "membership/evaluated_steps",
    "membership/outer_step",
)
REPEAT = "repeat"
"""Value of an awaited key if a device was lost meanwhile: the step is repeated."""
NO_STEP = -1
"""Step of a device without parameters."""
POLL_S = 0.05
RESET_CAUSE_S = 3.0
"""A closed connection has a cause elsewhere, which may take this long to arrive."""
MAX_RESETS = 3
"""Generations that repeat a step because of closed connections, before a device is evicted."""
RECHECK_S = 2.0
"""Interval between two reads of heartbeats, which are sent twice a second."""
MAX_COUNTED_REGISTRATION_S = 1.0
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
    joined
        Members that need parameters from others.
    lost
        Reason for each device of the previous generation that was lost, by name.
    reset
        The closed connection that ended the previous generation; empty if a device was lost.
    resets
        Number of consecutive generations at this step that a closed connection ended.
    outer_step_due
        Whether the update of the first step is committed, but not the outer step after it.
    evaluated_steps
        Steps after which the last evaluation was reported, or the run began.
    committed_outer_step
        The step after which the last outer step was committed; smaller than any step if none was.
    """

    number: int
    members: tuple[str, ...]
    step: int
    joined: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    reset: str = ""
    resets: int = 0
    outer_step_due: bool = False
    evaluated_steps: int = 0
    committed_outer_step: int = NO_STEP

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Generation:
        """Inverse of `to_json`."""
        fields = json.loads(text)
        for name in ("members", "joined"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


class Membership:
    """Membership of an elastic run, from the view of one device.

    Parameters
    ----------
    ranks
        The rank group of the whole plan.
    wait_s
        Time in which the others must notice that the previous process of this device is lost, if
        this one joins late.

    Attributes
    ----------
    rank_lost
        Latch that fails when a device is lost.
    joiners
        Names of devices waiting to join.
    """

    def __init__(self, ranks: RankGroup, wait_s: float) -> None:
        assert ranks.detector is not None
        self._ranks, self._detector, self._wait_s = ranks, ranks.detector, wait_s
        self._names, self.name = ranks.names, ranks.name(ranks.rank)
        self._store = ranks.store
        self._lock = threading.Lock()
        self._reported_lost: set[str] = set()
        self._checked_generation = NO_STEP
        self._awaited_keys: tuple[str, ...] = ()
        self.generation = Generation(0, (), 0)
        self.rank_lost = ErrorLatch()
        self.lost: dict[str, str] = {}
        self.joiners: tuple[str, ...] = ()

    def start(self, step: int) -> None:
        """Start the first generation, with all ranks of the plan."""
        first = Generation(0, self._names, step, evaluated_steps=step)
        self._store.compare_set(STARTED_KEY, "", first.to_json())
        self._begin(first)

    def join(self) -> bool:
        """Join a run that has started.

        Returns
        -------
        bool
            True once the others have admitted this device; False if all steps are done.
        """
        self._detector.on_rank_lost = self.report_lost
        number, requested, silence_timer = 0, -1, _SilenceTimer(self._store)
        until = time.monotonic() + self._wait_s
        while not self._store.check([FINISHED_KEY]):
            while self._store.check([f"membership/{number + 1}"]):
                number += 1
            generation = Generation.from_json(self._store.get(f"membership/{number}").decode())
            if self.name in generation.members and requested == number:
                self._begin(generation)
                return True
            # the others have not noticed yet that the previous process of this device is lost
            if self.name in generation.members and time.monotonic() > until:
                raise Evicted(
                    f"device {self.name!r} is still a member after {self._wait_s:g} s; check "
                    "whether another process runs as this device, or raise --wait"
                )
            if self.name not in generation.members and requested <= number:
                requested = number + 1
                self._append_line(
                    f"registered/{requested}",
                    {"name": self.name, "step": NO_STEP, "outer_step_due": False},
                )
            others = [self._names.index(name) for name in generation.members if name != self.name]
            if min(silence_timer.seconds(others), default=0.0) > self._detector.heartbeat_timeout_s:
                raise Evicted(f"device {self.name!r} cannot join: no member is alive")
            time.sleep(POLL_S)
        return False

    def next_generation(self, step: int, outer_step_due: bool = False) -> None:
        """Register for the next generation with the number of committed steps, and wait for it.

        Raises
        ------
        Evicted
            This device is not a member.
        """
        number, silence_timer = self.generation.number + 1, _SilenceTimer(self._store)
        key, registered_key = f"membership/{number}", f"registered/{number}"
        lost_key = f"lost/{self.generation.number}"
        self._append_line(
            registered_key, {"name": self.name, "step": step, "outer_step_due": outer_step_due}
        )
        while not self._store.check([key]):
            registered, lost = (self._read_lines(name) for name in (registered_key, lost_key))
            steps = {line["name"]: line["step"] for line in registered}
            evicted = self._evicted(lost)
            missing = [m for m in self.generation.members if m not in steps and m not in evicted]
            if not missing:
                outer_step_due_on = {line["name"] for line in registered if line["outer_step_due"]}
                reset = _first_reset(lost)
                proposal = self._propose(number, steps, outer_step_due_on, evicted, reset)
                self._store.compare_set(key, "", proposal.to_json())
                break
            # a rank that still computes registers later; one that is silent too long is lost
            silent_s = silence_timer.seconds([self._names.index(name) for name in missing])
            for name, seconds in zip(missing, silent_s, strict=True):
                if seconds > self._detector.heartbeat_timeout_s:
                    self.report_lost([name], f"device {name!r} did not continue with the others")
            # this device is evicted and its reports do not count: alone it would wait forever
            if self.name in evicted and min(silent_s) > self._detector.heartbeat_timeout_s:
                raise Evicted(f"{evicted[self.name]}; no other member is alive")
            time.sleep(POLL_S)
        generation = Generation.from_json(self._store.get(key).decode())
        if self.name not in generation.members:
            reason = generation.lost.get(self.name, "it was not present")
            raise Evicted(f"the others continue without device {self.name!r}: {reason}")
        self._begin(generation)

    def ranks(self, rank: int) -> RankGroup:
        """The rank group of the generation."""
        return RankGroup(
            rank,
            len(self.generation.members),
            PrefixStore(self._prefix(), self._store),
            self.generation.members,
            self._detector,
            rank_lost=self.rank_lost,
            interruptible_get=self.get_values,
            key_prefix=f"{self._prefix()}/",
            secret=self._ranks.secret,
            address=self._ranks.address,
        )

    def report_lost(self, names: Sequence[str], reason: str, all_silent: bool = False) -> None:
        """Report devices as lost; if this one may be isolated, check their heartbeats first."""
        if all_silent:
            self._recheck(names, reason)
            return
        with self._lock:
            lost = [
                n for n in names if n in self.generation.members and n not in self._reported_lost
            ]
            self._reported_lost |= set(lost)
            key = f"lost/{self.generation.number}"
        if lost:
            text = json.dumps({"by": self.name, "lost": lost, "why": reason}) + "\n"
            self._detector.heartbeat.run_later(lambda store: _append(store, key, text))

    def _recheck(self, names: Sequence[str], reason: str) -> None:
        """Compare heartbeats in the store after a while; report these devices or this one lost."""
        with self._lock:
            number = self.generation.number
            if self._checked_generation == number:
                return
            self._checked_generation = number
        ranks = [self._names.index(name) for name in names]
        seen: list[bytes] = []

        def first(store: Store) -> None:
            seen.extend(heartbeats(store, ranks))
            recheck = threading.Timer(RECHECK_S, self._detector.heartbeat.run_later, (second,))
            recheck.daemon = True
            recheck.start()

        def second(store: Store) -> None:
            if number != self.generation.number:
                return
            if heartbeats(store, ranks) == seen:
                self.report_lost(names, reason)
            else:
                self.report_lost([self.name], f"device {self.name!r} receives no heartbeats")

        self._detector.heartbeat.run_later(first)

    def report_reset(self, name: str, reason: str) -> None:
        """Repeat the step with all devices: a connection has closed, both ends may be alive."""
        key = f"lost/{self.generation.number}"
        text = json.dumps({"by": self.name, "lost": [], "reset": name, "why": reason}) + "\n"
        self._detector.heartbeat.run_later(lambda store: _append(store, key, text))

    def report_connection_lost(self, error: ConnectionLost) -> bool:
        """Report a closed connection; returns False if it is not known whose."""
        if isinstance(error, ConnectionReset) and (
            error.device or self.generation.resets < MAX_RESETS
        ):
            # both ends may be alive, whatever the system reports
            where = f"its connection to {error.device!r}" if error.device else "a connection"
            self.report_reset(error.device, f"device {self.name!r} lost {where}")
        elif error.device:
            self.report_lost([error.device], str(error))
        else:
            return False
        return True

    def get_values(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys; raises `DeviceLost` if a device is lost meanwhile."""
        full_keys = [f"{self._prefix()}/{key}" for key in keys]
        self._awaited_keys = tuple(keys)
        self.rank_lost.check()
        self._store.wait(full_keys, LONG_TIMEOUT)
        self._awaited_keys = ()
        self.rank_lost.check()
        # another rank may have reported the loss and ended this wait
        values: list[bytes] = self._store.multi_get(full_keys)
        if REPEAT.encode() in values:
            raise DeviceLost("a device is lost")
        return values

    def wait_for_decision(self, key: str) -> str:
        """Wait for a key of the generation; `REPEAT` after a loss."""
        self._awaited_keys = (key,)
        full_key = f"{self._prefix()}/{key}"
        if self.rank_lost.error is not None:
            self._store.compare_set(full_key, "", REPEAT)
        self._store.wait([full_key], LONG_TIMEOUT)
        self._awaited_keys = ()
        return self._store.get(full_key).decode()

    def set_reported_step(self, step: int) -> None:
        """Record that the loss of a step was reported."""
        self._store.set(REPORTED_STEP, str(step))

    def set_evaluated_steps(self, steps: int) -> None:
        """Record that an evaluation was reported."""
        self._store.set(EVALUATED_STEPS, str(steps))

    def set_outer_step(self, step: int) -> None:
        """Record that the outer step after a step was committed."""
        self._store.set(OUTER_STEP, str(step))

    def reported_step(self) -> int:
        """The last step whose loss was reported; -1 for none."""
        return self._read_int(REPORTED_STEP, -1)

    def finish(self) -> None:
        """Record that all steps are done: no device can join any more."""
        self._store.set(FINISHED_KEY, "")

    def _begin(self, generation: Generation) -> None:
        number, me = generation.number, self._names.index(self.name)
        callbacks = {
            f"lost/{number}": self._on_lost,
            f"registered/{number + 1}": self._on_registered,
        }
        for key in callbacks:
            self._store.compare_set(key, "", "\n")
        with self._lock:
            self.generation, self.rank_lost = generation, ErrorLatch()
            self.lost, self.joiners = {}, ()
            self._reported_lost = set()
        others = [self._names.index(name) for name in generation.members]
        next_rank = others[(others.index(me) + 1) % len(others)]
        self._detector.on_rank_lost = self.report_lost
        self._detector.set_watched_rank(me, next_rank, self._names[next_rank])
        self._detector.heartbeat.poll(
            {key: partial(callback, number) for key, callback in callbacks.items()}
        )

    def _prefix(self) -> str:
        return f"generation/{self.generation.number}"

    def _propose(
        self,
        number: int,
        steps: Mapping[str, int],
        outer_step_due_on: Collection[str],
        evicted: Mapping[str, str],
        reset: Mapping[str, Any] | None,
    ) -> Generation:
        members = tuple(name for name in self._names if name in steps and name not in evicted)
        step = max((steps[name] for name in members), default=NO_STEP)
        joined = tuple(name for name in members if steps[name] < step)
        outer_step_due = any(name in outer_step_due_on and steps[name] == step for name in members)
        generation = Generation(
            number,
            members,
            step,
            joined,
            dict(evicted),
            outer_step_due=outer_step_due,
            evaluated_steps=self._read_int(EVALUATED_STEPS, self.generation.evaluated_steps),
            committed_outer_step=self._read_int(OUTER_STEP, self.generation.committed_outer_step),
        )
        if evicted or reset is None:
            return generation
        resets = 1 + (self.generation.resets if step == self.generation.step else 0)
        return replace(generation, reset=reset["why"], resets=resets)

    def _read_int(self, key: str, otherwise: int) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else otherwise

    def _on_lost(self, number: int, text: str) -> None:
        """Called in the heartbeat thread, like `_on_registered`."""
        lines = _parse_lines(text)
        evicted, reset = self._evicted(lines), _first_reset(lines)
        with self._lock:
            if (
                not (evicted or reset)
                or number != self.generation.number
                or self.rank_lost.error is not None
            ):
                return
            self.lost, rank_lost = evicted, self.rank_lost
        rank_lost.fail(DeviceLost(next(iter(evicted.values()), reset["why"] if reset else "")))
        for key in self._awaited_keys:
            full_key = f"generation/{number}/{key}"
            self._detector.heartbeat.run_later(partial(_set_repeat, full_key))

    def _on_registered(self, number: int, text: str) -> None:
        names = (line["name"] for line in _parse_lines(text))
        with self._lock:
            if number == self.generation.number:
                self.joiners = tuple(name for name in names if name not in self.generation.members)

    def _evicted(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Devices to evict: reports by devices that are reported themselves do not count.

        A step repeated too often evicts one device: the other end of the connection reported first.
        All ranks derive the same.
        """
        evicted: dict[str, str] = {}
        reset = _first_reset(lines) if self.generation.resets >= MAX_RESETS else None
        if reset is not None and reset["reset"] in self.generation.members:
            evicted[reset["reset"]] = reset["why"]
        for line in lines:
            if line["by"] not in evicted:
                evicted |= {name: line["why"] for name in line["lost"] if name not in evicted}
        return evicted

    def _read_lines(self, key: str) -> list[dict[str, Any]]:
        return _parse_lines(self._store.get(key).decode())

    def _append_line(self, key: str, line: Mapping[str, Any]) -> None:
        _append(self._store, key, json.dumps(line) + "\n")


def _parse_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line]


def _first_reset(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The connection reported first; None if none closed."""
    return next((line for line in lines if not line["lost"]), None)


def _append(store: Store, key: str, text: str) -> None:
    store.append(key, text)  # type: ignore[attr-defined]


def _set_repeat(key: str, store: Store) -> None:
    store.compare_set(key, "", REPEAT)


class _SilenceTimer:
    """Observed silence of devices.

    Parameters
    ----------
    store
        Store with the heartbeats.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._polled_s = store, time.monotonic()
        self._seen: dict[int, bytes] = {}
        self._silent_s: dict[int, float] = {}

    def seconds(self, ranks: Sequence[int]) -> list[float]:
        """Seconds of silence of each rank."""
        now_s = time.monotonic()
        passed, self._polled_s = min(now_s - self._polled_s, MAX_COUNTED_REGISTRATION_S), now_s
        for rank, beat in zip(ranks, heartbeats(self._store, ranks), strict=True):
            same = self._seen.get(rank) == beat
            self._silent_s[rank] = self._silent_s.get(rank, 0.0) + passed if same else 0.0
            self._seen[rank] = beat
        return [self._silent_s[rank] for rank in ranks]
