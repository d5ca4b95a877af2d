"""Typed access to the fields of a ``config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.utils.validate import real, short_repr


class ConfigFields:
    """Fields of a config; values of a wrong type are refused."""

    def __init__(self, config: dict[str, Any], path: str | Path) -> None:
        self._config, self._path = config, path

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._config.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it is."""
        return self._config.get(name, default)

    def _value(self, name: str, default: Any) -> Any:
        """The value, or the default if it is missing or null."""
        value = self._config.get(name)
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be true or false"
            )
        return value

    def string(self, name: str, default: str) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ValueError(f"{self._path}: {name} is {short_repr(value)}; it must be a name")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of strings; empty if missing."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be a list of names"
            )
        return list(value)

    def indices(self, name: str, end: int) -> list[int]:
        """A list of whole numbers from 0 to below ``end``; empty if missing."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(type(k) is int and 0 <= k < end for k in value):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be a list of whole numbers "
                f"from 0 to {end - 1}"
            )
        return list(value)

    def under(self, name: str) -> ConfigFields:
        """A nested object; empty if missing."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be an object or null"
            )
        return ConfigFields(value, f"{self._path}: {name}")

    def names(self) -> set[str]:
        """Names of the fields present."""
        return set(self._config)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of several fields that is present, at least 1."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{self._path}: {name} is {short_repr(value)}; it must be a whole number >= 1"
                )
            return int(value)
        if default is not None:
            return default
        raise ValueError(f"{self._path}: field {names[0]!r} is missing; it is needed for its size")

    def integer_or_none(self, name: str) -> int | None:
        """A whole number; None if missing."""
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be a number above 0"
            )
        return real(f"{self._path}: {name}", value)
