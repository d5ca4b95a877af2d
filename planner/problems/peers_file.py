"""Peers of an averaging as a file: who computes how fast, over which links."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.network.files import read_text
from planner.network.network import Network
from planner.problems import AveragingProblem, ProblemError

MBIT = 1e6 / 8
REQUIRED = ("name", "samples_per_s", "upload_mbps", "download_mbps")
OPTIONAL = ("can_compute", "can_aggregate")
TRUTH = {"": True, "yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class Peers:
    """Named peers, in the order of their file; SI units.

    Attributes
    ----------
    names
        Unique names.
    samples_per_s
        s_i: samples per second that a peer computes.
    upload_bytes_per_s, download_bytes_per_s
        u_i and d_i.
    can_compute, can_aggregate
        Whether a peer may contribute, and whether it may sum.
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

        Parameters
        ----------
        batch_samples
            Samples per optimiser step.
        gradient_bytes
            Bytes of the vector that is averaged.
        links
            A network that has the peers' names; None: no pairwise limits.
        overlap
            Whether computing and averaging run at the same time.

        Returns
        -------
        AveragingProblem
            In the order of the peers.

        Raises
        ------
        NetworkError
            The network lacks a peer or a pair.
        """
        pairs = None
        if links is not None:
            mine = links.subset(self.names)
            mine.require_complete()
            pairs = mine.bandwidth_bytes_per_s
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
    """Read ``name,samples_per_s,upload_mbps,download_mbps[,can_compute,can_aggregate]``.

    Parameters
    ----------
    path
        Of the CSV file.

    Returns
    -------
    Peers
        In SI units.

    Raises
    ------
    ProblemError
        One line with the path, the row and what is wrong.
    """
    text = read_text(path, error=ProblemError)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        columns = reader.fieldnames or []
        rows = list(reader)
    except csv.Error as error:
        raise ProblemError(f"{path}: is no CSV ({error}); correct the file") from None
    missing = [c for c in REQUIRED if c not in columns]
    if missing or not rows:
        what = f"column {missing[0]!r} is missing" if missing else "has no rows"
        raise ProblemError(f"{path}: {what}; give {','.join(REQUIRED)} and one row a peer")

    unknown = [c for c in columns if c not in (*REQUIRED, *OPTIONAL)]
    if unknown:
        raise ProblemError(
            f"{path}: column {unknown[0]!r} is unknown; give {','.join(REQUIRED)} and, if need be, "
            f"{','.join(OPTIONAL)}"
        )
    for line, row in enumerate(rows, start=2):
        if None in row:
            raise ProblemError(
                f"{path}: line {line}: more fields than the {len(columns)} columns; remove the rest"
            )

    def number(line: int, row: dict[str, str], column: str) -> float:
        try:
            value = float(row[column])
        except (TypeError, ValueError):
            value = float("nan")
        if not np.isfinite(value):
            raise ProblemError(
                f"{path}: line {line}: {column} is {row[column]!r}; give a finite number"
            )
        return value

    def truth(line: int, row: dict[str, str], column: str) -> bool:
        text = (row.get(column) or "").strip().lower()
        if text not in TRUTH:
            raise ProblemError(f"{path}: line {line}: {column} is {text!r}; write yes or no")
        return TRUTH[text]

    lines = list(enumerate(rows, start=2))
    names = tuple(row["name"] for row in rows)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ProblemError(f"{path}: peer {twice!r} is listed twice; rename one")
    return Peers(
        names,
        tuple(number(k, row, "samples_per_s") for k, row in lines),
        tuple(number(k, row, "upload_mbps") * MBIT for k, row in lines),
        tuple(number(k, row, "download_mbps") * MBIT for k, row in lines),
        tuple(truth(k, row, "can_compute") for k, row in lines),
        tuple(truth(k, row, "can_aggregate") for k, row in lines),
    )
