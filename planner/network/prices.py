"""Prices of traffic between regions; those of devices are in `planner.network.cluster`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.network.error import NetworkError
from planner.utils.csv_table import number_in, number_remedy, read_csv
from planner.utils.text import counted, did_you_mean, joined, printable
from planner.utils.validate import mapping, real, sequence

Floats = NDArray[np.float64]

BETWEEN_REGIONS, BETWEEN_PROVIDERS = 0.02, 0.09
"""Dollars per gigabyte of outgoing traffic, AWS EC2's list of 2024: to another region, from most in
the United States and Europe (from others up to 0.147), and to the internet, first 10 TB a month."""
ANY = "*"
COLUMNS = ("from", "to", "usd_per_gb")
GIGA = 1e9


@dataclass(frozen=True)
class Prices:
    """Dollars per gigabyte (10^9 bytes) from one region to another; nothing within one.

    Attributes
    ----------
    between_regions, between_providers
        Where no rule applies. The provider is the part of a region's name before a colon, as in
        ``aws:us-east-1``; regions without one belong to the same provider.
    rules
        ``(from, to, dollars)`` by name of region, ``"*"`` for any other one. The first rule that
        matches applies; within a region, one that names it twice.

    Raises
    ------
    ValueError
        An invalid price.
    """

    between_regions: float = BETWEEN_REGIONS
    between_providers: float = BETWEEN_PROVIDERS
    rules: tuple[tuple[str, str, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("between_regions", "between_providers"):
            object.__setattr__(self, name, real(f"prices.{name}", getattr(self, name), 0))
        rules = []
        for k, rule in enumerate(sequence("prices.rules", self.rules)):
            entries = sequence(f"prices.rules[{k}]", rule)
            if len(entries) != 3 or not all(isinstance(region, str) for region in entries[:2]):
                raise ValueError(
                    f"prices.rules[{k}] must be two regions and a price, found {rule!r}; correct it"
                )
            rules.append((entries[0], entries[1], real(f"prices.rules[{k}] price", entries[2], 0)))
        object.__setattr__(self, "rules", tuple(rules))

    def __repr__(self) -> str:
        return (
            f"Prices({self.between_regions:g} $/GB between regions, {self.between_providers:g} "
            f"between providers, {counted(len(self.rules), 'rule')})"
        )

    @classmethod
    def load(
        cls, path: str | Path, *, regions: Iterable[str] | None = None, **fields: float
    ) -> Prices:
        """Load prices from a CSV file with columns ``from,to,usd_per_gb``.

        Parameters
        ----------
        path
            The file.
        regions
            Regions of the network, which rows must name; None for any.
        fields
            Fields of `Prices` for other regions.

        Returns
        -------
        Prices
            The rows as rules, in their order.

        Raises
        ------
        NetworkError
            One line with file, line, value and rule.
        """
        table = read_csv(path, error=NetworkError)
        header = table.columns
        if sorted(header) != sorted(COLUMNS):
            raise NetworkError(
                f"{path}: must have the columns {', '.join(COLUMNS)}, found "
                f"{', '.join(map(printable, header)) or 'none'}; correct the header"
            )
        allowed = None if regions is None else {*regions, ANY}
        rules = []
        lines: dict[tuple[str, str], int] = {}
        for line, row in table.rows:
            source, target, price = (row[column] for column in COLUMNS)
            try:
                value = real("usd_per_gb", number_in(price), 0)
            except ValueError:
                raise NetworkError(
                    f"{path}, line {line}: usd_per_gb must be a number >= 0, found {price!r}; "
                    + number_remedy(price, "correct it")
                ) from None
            if not source or not target:
                raise NetworkError(
                    f"{path}, line {line}: from and to must name regions, or be {ANY!r}; correct it"
                )
            for region in (source, target):
                if allowed is not None and region not in allowed:
                    raise NetworkError(
                        f"{path}, line {line}: {region!r} is no region of the network"
                        f"{did_you_mean(region, allowed)}; name one of "
                        f"{joined(sorted(allowed))}, or take the row out"
                    )
            if lines.setdefault((source, target), line) != line:
                raise NetworkError(
                    f"{path}, line {line}: {source!r} to {target!r} has a price in line "
                    f"{lines[source, target]} already; keep one"
                )
            rules.append((source, target, value))
        return cls(rules=tuple(rules), **fields)

    def usd_per_byte(self, regions: Sequence[str]) -> Floats:
        """Dollars per byte from one region to another.

        Parameters
        ----------
        regions
            Names of R regions; one may occur several times.

        Returns
        -------
        ndarray
            ``float[R, R]``.
        """
        return np.array([[self._between(a, b) for b in regions] for a in regions]) / GIGA

    def _between(self, source: str, target: str) -> float:
        anywhere = ANY if source != target else source
        for a, b, price in self.rules:
            if a in (source, anywhere) and b in (target, anywhere):
                return price
        if source == target:
            return 0.0
        same = provider_of(source) == provider_of(target)
        return self.between_regions if same else self.between_providers

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "between_regions": self.between_regions,
            "between_providers": self.between_providers,
            "rules": [dict(zip(COLUMNS, rule, strict=True)) for rule in self.rules],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prices:
        """Inverse of `to_dict`."""
        entries = mapping("prices", data)
        return cls(
            entries["between_regions"],
            entries["between_providers"],
            tuple(tuple(rule[column] for column in COLUMNS) for rule in entries["rules"]),
        )


def provider_of(region: str) -> str:
    """The part of a region's name before a colon; empty without one."""
    name, colon, _ = region.partition(":")
    return name if colon else ""
