"""Activities that share resources max-min fairly (progressive filling), in continuous time.

A message uses its sender's uplink and its receiver's downlink, an operation a processor. When an
activity comes or goes, only those connected with it through shared resources get new rates.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

Resource = Hashable
Key = tuple[int, int]
"""An activity: what it is about is its owner's business."""
ROUNDING = 1e-9


@dataclass
class _Activity:
    left: float
    limit: float
    resources: tuple[Resource, ...]
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass(frozen=True)
class Forecast:
    """When an activity ends, unless its ``version`` has changed by then.

    Attributes
    ----------
    time
        When the activity ends, in seconds.
    key
        Which one.
    version
        Outdated when the activity has a newer one.
    """

    time: float
    key: Key
    version: int


class Fluid:
    """A set of activities under way.

    Parameters
    ----------
    capacity
        Work per second of each resource; resources that are not named are unlimited.
    """

    def __init__(self, capacity: Mapping[Resource, float]) -> None:
        self._capacity = capacity
        self._active: dict[Key, _Activity] = {}
        self._users: dict[Resource, dict[Key, None]] = {}

    def add(
        self, key: Key, work: float, limit: float, resources: tuple[Resource, ...], now: float
    ) -> list[Forecast]:
        """Start an activity that runs at most at ``limit``; returns all forecasts that changed.

        Parameters
        ----------
        key
            The activity's name.
        work
            What is left to do, in bytes.
        limit
            Its largest rate in bytes per second.
        resources
            Those it shares with others.
        now
            Seconds.

        Returns
        -------
        list[Forecast]
            One for each activity whose rate changed.
        """
        limited = tuple(r for r in resources if r in self._capacity)
        self._active[key] = _Activity(work, limit, limited, since=now)
        for resource in limited:
            self._users.setdefault(resource, {})[key] = None
        return self._refresh({key: None}, now)

    def is_due(self, forecast: Forecast) -> bool:
        """Whether a forecast still holds."""
        activity = self._active.get(forecast.key)
        return activity is not None and activity.version == forecast.version

    def remove(self, key: Key, now: float) -> list[Forecast]:
        """End an activity; returns the new forecasts of those that shared with it.

        Parameters
        ----------
        key
            The activity's name.
        now
            Seconds.

        Returns
        -------
        list[Forecast]
            One for each activity whose rate changed.
        """
        gone = self._active.pop(key)
        neighbours: dict[Key, None] = {}
        for resource in gone.resources:
            del self._users[resource][key]
            neighbours |= self._users[resource]
        return self._refresh(neighbours, now)

    def _refresh(self, start: dict[Key, None], now: float) -> list[Forecast]:
        component = self._component(start)
        rates = self._fair_rates(component)
        forecasts = []
        for key, rate in rates.items():
            activity = self._active[key]
            if activity.rate == rate:
                continue
            activity.left -= activity.rate * (now - activity.since)
            activity.since, activity.rate = now, rate
            activity.version += 1
            time = now + max(activity.left, 0.0) / rate
            forecasts.append(Forecast(time, key, activity.version))
        return forecasts

    def _component(self, start: dict[Key, None]) -> list[Key]:
        found = dict(start)
        frontier = list(start)
        seen: set[Resource] = set()
        while frontier:
            for resource in self._active[frontier.pop()].resources:
                if resource not in seen:
                    seen.add(resource)
                    fresh = [k for k in self._users[resource] if k not in found]
                    found.update(dict.fromkeys(fresh))
                    frontier += fresh
        return list(found)

    def _fair_rates(self, keys: list[Key]) -> dict[Key, float]:
        room: dict[Resource, float] = {}
        load: dict[Resource, int] = {}
        for key in keys:
            for resource in self._active[key].resources:
                room[resource] = self._capacity[resource]
                load[resource] = load.get(resource, 0) + 1
        rates: dict[Key, float] = {}
        # all unfrozen activities rise together to ``level``
        level = 0.0
        waiting = sorted(keys, key=lambda key: self._active[key].limit)
        open_keys = dict.fromkeys(waiting)
        while open_keys:
            shares = {r: room[r] / count for r, count in load.items() if count}
            lowest_limit = self._active[next(iter(open_keys))].limit
            level = max(level, min([lowest_limit, *shares.values()]))
            full = {r for r, share in shares.items() if share <= level * (1 + ROUNDING)}
            frozen = [
                key
                for key in open_keys
                if self._active[key].limit <= level * (1 + ROUNDING)
                or not full.isdisjoint(self._active[key].resources)
            ]
            for key in frozen:
                rates[key] = min(level, self._active[key].limit)
                del open_keys[key]
                for resource in self._active[key].resources:
                    room[resource] -= rates[key]
                    load[resource] -= 1
        return rates
