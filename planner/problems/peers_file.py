"""Peers of an averaging problem as a CSV file: their compute speeds and links."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.network.error import NetworkError
from planner.network.network import Network
from planner.problems import AveragingProblem, ProblemError
from planner.utils.csv_table import number_in, number_remedy, read_csv
from planner.utils.text import did_you_mean, joined
from planner.utils.validate import real

MBIT = 1e6 / 8
REQUIRED = ("name", "samples_per_s", "upload_mbps", "download_mbps")
OPTIONAL = ("can_compute", "can_aggregate")
BOOLEANS = {"": True, "yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class Peers:
    """Named peers, in the order of their file; SI units.

    Attributes
    ----------
    samples_per_s
        s_i: samples per second that a peer computes.
    can_compute, can_aggregate
        Whether a peer may contribute, and whether it may reduce.
    """

    names: tuple[str, ...]
    samples_per_s: tuple[float, ...]
    upload_bytes_per_s: tuple[float, ...]
    download_bytes_per_s: tuple[float, ...]
    can_compute: tuple[bool, ...]
    can_aggregate: tuple[bool, ...]

    def problem(
        self, batch_samples: float, gradient_bytes: float, links: Network | None, overlap: bool
    ) -> AveragingProblem:
        """The averaging problem; ``links`` gives the pairwise limits by the peers' names.

        Other devices of ``links`` are left out.
        """
        pairs = None
        if links is not None:
            unknown = next((name for name in self.names if name not in links.ids), None)
            if unknown is not None:
                raise NetworkError(
                    f"peer {unknown!r} is no device of the network"
                    f"{did_you_mean(unknown, links.ids)}; name one of {joined(links.ids)}"
                )
            own_links = links.subset(self.names)
            if missing := own_links.describe_missing():
                raise NetworkError(f"{missing}; {own_links.missing_remedy()}")
            pairs = own_links.bandwidth_bytes_per_s
        return AveragingProblem(
            self.samples_per_s,
            self.upload_bytes_per_s,
            self.download_bytes_per_s,
            batch_samples,
            gradient_bytes,
            pairs,
            self.can_compute,
            self.can_aggregate,
            overlap,
        )


def load_peers(path: str | Path) -> Peers:
    """Read ``name,samples_per_s,upload_mbps,download_mbps[,can_compute,can_aggregate]``."""
    table = read_csv(path, error=ProblemError)
    columns, rows = table.columns, table.rows
    unknown = [c for c in columns if c not in (*REQUIRED, *OPTIONAL)]
    if unknown:
        hint = did_you_mean(unknown[0], [c for c in (*REQUIRED, *OPTIONAL) if c not in columns])
        raise ProblemError(
            f"{path}: column {unknown[0]!r} is unknown{hint}; give {','.join(REQUIRED)} and, if "
            f"need be, {','.join(OPTIONAL)}"
        )
    missing = [c for c in REQUIRED if c not in columns]
    if missing or not rows:
        reason = f"column {missing[0]!r} is missing" if missing else "has no rows"
        raise ProblemError(f"{path}: {reason}; give {','.join(REQUIRED)} and one row a peer")

    def number(column: str, least: float) -> tuple[float, ...]:
        values = []
        for line, row in rows:
            value = number_in(row[column])
            if not (np.isfinite(value) and value >= least):
                rule = f"a finite number >= {least:g}" if np.isfinite(value) else "a finite number"
                raise ProblemError(
                    f"{path}: line {line}: {column} is {row[column]!r}; "
                    + number_remedy(row[column], f"give {rule}")
                )
            values.append(real(f"{path}: line {line}: {column}", value, error=ProblemError))
        return tuple(values)

    def boolean(column: str) -> tuple[bool, ...]:
        values = []
        for line, row in rows:
            text = row.get(column, "").lower()
            if text not in BOOLEANS:
                raise ProblemError(f"{path}: line {line}: {column} is {text!r}; write yes or no")
            values.append(BOOLEANS[text])
        return tuple(values)

    names = tuple(row["name"] for _, row in rows)
    for (line, _), name in zip(rows, names, strict=True):
        if not name:
            raise ProblemError(f"{path}: line {line}: name is empty; give each peer a name")
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ProblemError(f"{path}: peer {duplicate!r} is listed twice; rename one")
    rates = {column: number(column, 0) for column in REQUIRED[1:]}
    return Peers(
        names,
        rates["samples_per_s"],
        tuple(rate * MBIT for rate in rates["upload_mbps"]),
        tuple(rate * MBIT for rate in rates["download_mbps"]),
        boolean("can_compute"),
        boolean("can_aggregate"),
    )
