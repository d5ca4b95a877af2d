"""Fields of a ``config.json``, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.utils.validate import real, short_repr


class ConfigFields:
    """Fields of a config, refused where they are of the wrong kind."""

    def __init__(self, config: dict[str, Any], path: str | Path) -> None:
        self._config, self._path = config, path

    def has(self, name: str) -> bool:
        """Whether it is said, and not null."""
        return self._config.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """As it stands there."""
        return self._config.get(name, default)

    def _said(self, name: str, usual: Any) -> Any:
        """As it stands there, or what it is where the file is silent or says null."""
        value = self._config.get(name)
        return usual if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._said(name, default)
        if not isinstance(value, bool):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be true or false"
            )
        return value

    def word(self, name: str, default: str) -> str:
        """A name."""
        value = self._said(name, default)
        if not isinstance(value, str):
            raise ValueError(f"{self._path}: {name} is {short_repr(value)}; it must be a name")
        return value

    def words(self, name: str) -> list[str]:
        """A list of names; none where the file is silent."""
        value = self._said(name, [])
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be a list of names"
            )
        return list(value)

    def numbers(self, name: str, most: int) -> list[int]:
        """A list of whole numbers from 0 to below ``most``; none where the file is silent."""
        value = self._said(name, [])
        if not isinstance(value, list) or not all(type(k) is int and 0 <= k < most for k in value):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be a list of whole numbers "
                f"from 0 to {most - 1}"
            )
        return list(value)

    def under(self, name: str) -> ConfigFields:
        """An object inside; an empty one where the file is silent."""
        value = self._said(name, {})
        if not isinstance(value, dict):
            raise ValueError(
                f"{self._path}: {name} is {short_repr(value)}; it must be an object or null"
            )
        return ConfigFields(value, f"{self._path}: {name}")

    def names(self) -> set[str]:
        """What is said."""
        return set(self._config)

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first that is said, at least 1."""
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

    def whole_or_none(self, name: str) -> int | None:
        """None where the file is silent."""
        return self.whole(name) if self.has(name) else None

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
