"""Measured networks: latency and bandwidth between every ordered pair of devices.

Arrays are in SI units and indexed ``[source, destination]``. Other forms are read and written by
`planner.network.formats`, the shipped tables by `planner.network.catalogue`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.network import formats
from planner.network.alike import alike_in_tables
from planner.network.error import NetworkError
from planner.network.html_repr import network_html
from planner.network.pair_table import Ints, PairTable
from planner.utils.text import counted, joined, listed, name_of, quantity_range
from planner.utils.validate import (
    LARGEST,
    SMALLEST,
    count,
    in_safe_range,
    mapping,
    numbers,
    real,
    sequence,
)

Floats = NDArray[np.float64]
MAX_DEVICES = 100_000
"""Largest number of devices made by `Network.replicate`."""
MAX_IN_PAIRS = 16_384
"""Largest number of devices with arrays of all pairs, which then take 2.1 GB each. The hash of a
larger network covers links between classes."""
ROWS = 128
"""Rows of an array of all pairs that are validated at a time, which need little memory."""


@dataclass(frozen=True, eq=False)
class Network:
    """Latency and bandwidth between N devices.

    The diagonals are ignored: they are stored as latency 0 and infinite bandwidth, so that a
    transfer from a device to itself takes no time.

    Parameters
    ----------
    latency_s
        N x N, one-way latency in seconds, ``>= 0``; NaN if not measured.
    bandwidth_bytes_per_s
        N x N, bytes per second, ``> 0`` and finite; NaN if not measured.
    ids
        Unique names; by default the labels of pandas frames, else ``"0"`` ... ``"N-1"``.
    regions
        Region of each device; by default its id.

    Attributes
    ----------
    latency_table, bandwidth_table
        The same values by class of device: tables that are indexed like the arrays, and of networks
        made of classes take little memory.

    Raises
    ------
    NetworkError
        Invalid shapes, names or values.
    """

    latency_s: Floats
    bandwidth_bytes_per_s: Floats
    ids: tuple[str, ...]
    regions: tuple[str, ...]
    latency_table: PairTable = dataclass_field(init=False)
    bandwidth_table: PairTable = dataclass_field(init=False)

    def __init__(
        self,
        latency_s: ArrayLike,
        bandwidth_bytes_per_s: ArrayLike,
        ids: Sequence[str] | None = None,
        regions: Sequence[str] | None = None,
    ) -> None:
        latency = _square("latency_s", latency_s)
        bandwidth = _square("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
        n = len(latency)
        if len(bandwidth) != n:
            raise NetworkError(
                f"latency_s is {n} x {n} but bandwidth_bytes_per_s is {len(bandwidth)} x "
                f"{len(bandwidth)}; give both for the same devices"
            )
        labels = _labels(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        names, places = _device_names((labels or range(n)) if ids is None else ids, regions, n)
        if labels is not None and labels != names:
            raise NetworkError(
                f"ids are {joined(names)}, the frames' labels {joined(labels)}; leave ids out, or "
                "give arrays"
            )
        np.fill_diagonal(latency, 0.0)
        np.fill_diagonal(bandwidth, np.inf)
        for first in range(0, n, ROWS):
            _validate_rows(latency, bandwidth, names, first)
        devices = np.arange(n)
        self._fill(
            PairTable(latency, devices, 0.0), PairTable(bandwidth, devices, np.inf), names, places
        )

    def _fill(
        self,
        latency: PairTable,
        bandwidth: PairTable,
        ids: tuple[str, ...],
        regions: tuple[str, ...],
    ) -> None:
        for field, value in (
            ("latency_table", latency),
            ("bandwidth_table", bandwidth),
            ("ids", ids),
            ("regions", regions),
        ):
            object.__setattr__(self, field, value)

    @classmethod
    def of_valid(
        cls,
        latency: PairTable,
        bandwidth: PairTable,
        ids: tuple[str, ...],
        regions: tuple[str, ...],
    ) -> Network:
        """A network of values known to be valid, such as parts of another network.

        Parameters
        ----------
        latency, bandwidth
            Of N devices in the same classes, seconds and bytes per second.
        ids, regions
            One per device; ids are unique.

        Returns
        -------
        Network
            With these values.
        """
        network = cls.__new__(cls)
        network._fill(latency, bandwidth, ids, regions)
        return network

    @classmethod
    def of_classes(
        cls,
        latency_s: Floats,
        bandwidth_bytes_per_s: Floats,
        class_of: Sequence[int],
        ids: Sequence[str],
        regions: Sequence[str],
    ) -> Network:
        """A network of devices of which many can be exchanged.

        It takes the memory of links between classes, until `latency_s` or `bandwidth_bytes_per_s`
        is asked for.

        Parameters
        ----------
        latency_s, bandwidth_bytes_per_s
            ``float[C, C]``, between devices of two classes; on the diagonal between two of one.
        class_of
            Class of each device.
        ids, regions
            One per device.

        Returns
        -------
        Network
            Of these devices.

        Raises
        ------
        NetworkError
            Invalid names or values.
        """
        names, places = _device_names(ids, regions, len(class_of))
        classes, index = np.unique(class_of, return_inverse=True)
        grid = np.ix_(classes, classes)
        latency = PairTable(latency_s[grid], index, 0.0)
        bandwidth = PairTable(bandwidth_bytes_per_s[grid], index, np.inf)
        some = latency.two_of_each
        cls(latency.between(some), bandwidth.between(some), [names[d] for d in some])
        return cls.of_valid(latency, bandwidth, names, places)

    def __getattr__(self, name: str) -> Floats:
        """Arrays of all pairs, when first asked for, unless they would fill the memory."""
        tables = {"latency_s": "latency_table", "bandwidth_bytes_per_s": "bandwidth_table"}
        if name not in tables:
            raise AttributeError(f"'Network' object has no attribute {name!r}")
        table: PairTable = getattr(self, tables[name])
        if len(self) > MAX_IN_PAIRS and not table.is_full:
            raise NetworkError(
                f"the network has {len(self)} devices, and what was asked for needs the links of "
                f"all pairs, for at most {MAX_IN_PAIRS} devices; give fewer, or plan with the "
                "joint search (without a number of stages or pipelines)"
            )
        array = np.asarray(table)
        object.__setattr__(self, name, array)
        return array

    @classmethod
    def from_networkx(cls, graph: Any) -> Network:
        """From a NetworkX graph whose edges have a latency and a bandwidth, named with their unit.

        Parameters
        ----------
        graph
            A NetworkX graph, directed or not.

        Returns
        -------
        Network
            Devices in the order of the nodes.

        Raises
        ------
        NetworkError
            Attributes are missing, or values are invalid.
        """
        return cls(*formats.from_networkx(graph))

    @classmethod
    def from_pandas(cls, frame: Any) -> Network:
        """From a pandas frame with the columns of CSV files, one row per ordered pair.

        Parameters
        ----------
        frame
            A pandas frame.

        Returns
        -------
        Network
            Devices in order of first appearance.

        Raises
        ------
        NetworkError
            One line with what is wrong.
        """
        return cls(*formats.from_frame(frame))

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> Network:
        """From records with the columns of CSV files; pairs without a record are missing.

        Parameters
        ----------
        rows
            Records by column name.
        columns
            Names of the columns.

        Returns
        -------
        Network
            Devices in order of first appearance.

        Raises
        ------
        NetworkError
            One line with what is wrong.
        """
        return cls(*formats.from_rows(rows, columns))

    @classmethod
    def load(cls, path: str | Path) -> Network:
        """From a ``.csv`` or ``.json`` file.

        Parameters
        ----------
        path
            Of the file.

        Returns
        -------
        Network
            What the file holds, validated.

        Raises
        ------
        NetworkError
            One line with the path and what is wrong.
        """
        try:
            return cls(*formats.read(path))
        except NetworkError as error:
            named = str(error).startswith(f"{path}: ")
            raise error if named else NetworkError(f"{path}: {error}") from None

    def matrices(self) -> formats.Matrices:
        """The fields as they go into files."""
        return formats.Matrices(self.latency_s, self.bandwidth_bytes_per_s, self.ids, self.regions)

    def to_networkx(self) -> Any:
        """A ``networkx.DiGraph`` with an edge per measured pair, SI units."""
        return formats.to_networkx(self.matrices())

    def to_pandas(self) -> Any:
        """A pandas frame with one row per ordered pair, in SI units."""
        return formats.to_frame(self.matrices())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: matrices with null where not measured and on the diagonal."""
        return formats.to_dict(self.matrices())

    def save(self, path: str | Path) -> None:
        """Write a ``.csv`` or ``.json`` file that `planner.load_network` reads.

        Parameters
        ----------
        path
            Of the file.

        Raises
        ------
        NetworkError
            The suffix is neither of the two.
        """
        formats.write(self.matrices(), path)

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Network)
            and self.content_hash == other.content_hash
            and self.regions == other.regions
        )

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __repr__(self) -> str:
        pairs = self.latency_table.joins_two
        latency = quantity_range(self.latency_table.values[pairs], "s")
        bandwidth = quantity_range(self.bandwidth_table.values[pairs] * 8, "b/s")
        missing = self.num_missing
        lacks = f", {counted(missing, 'missing pair')}" if missing else ""
        return f"Network({self.size_words()}, {latency}, {bandwidth}{lacks})"

    def _repr_html_(self) -> str:
        return network_html(repr(self), self.regions, self.latency_table, self.bandwidth_table)

    def size_words(self) -> str:
        """Number of devices, and of regions if there are fewer."""
        regions = len(set(self.regions))
        where = f" in {counted(regions, 'region')}" if regions < len(self) else ""
        return f"{counted(len(self), 'device')}{where}"

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Classes of devices that can be exchanged; see `planner.network.alike`."""
        return tuple(map(tuple, alike_in_tables(self.latency_table, self.bandwidth_table)))

    @cached_property
    def class_of(self) -> Ints:
        """``int[N]``: index of each device's class in `alike`."""
        class_of = np.empty(len(self), dtype=np.int64)
        for c, members in enumerate(self.alike):
            class_of[list(members)] = c
        return class_of

    @cached_property
    def fastest_bytes_per_s(self) -> tuple[Floats, Floats]:
        """``float[N]`` each: fastest measured pair out and in; infinite for a single device."""
        if len(self) == 1:
            return np.full(1, np.inf), np.full(1, np.inf)
        table = self.bandwidth_table
        out, into = np.zeros((2, len(table.values)))
        for c, (row, joins_two) in enumerate(zip(table.values, table.joins_two, strict=True)):
            measured = np.where(joins_two, np.nan_to_num(row, nan=0.0, posinf=np.inf), 0.0)
            out[c] = measured.max()
            np.maximum(into, measured, out=into)
        return out[table.class_of], into[table.class_of]

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of ids and measurements, the same on every machine."""
        digest = hashlib.sha256(b"planner.network\0")
        for name in self.ids:
            digest.update(name.encode() + b"\0")
        tables = [self.latency_table, self.bandwidth_table]
        if len(self) > MAX_IN_PAIRS:
            digest.update(self.class_of.astype("<i8").tobytes())
            some = [d for members in self.alike for d in members[:2]]
            tables = [table.picked(some) for table in tables]
        for table in tables:
            for d in range(len(table)):
                row = table.row(d)
                # one NaN pattern and no negative zero, so that equal values give equal bytes
                canonical = np.where(np.isnan(row), np.nan, row + 0.0).astype("<f8")
                digest.update(canonical.tobytes())
        return digest.hexdigest()

    def missing_pairs(self) -> list[tuple[int, int]]:
        """Ordered pairs whose latency or bandwidth was not measured."""
        return list(self._missing)

    @cached_property
    def _missing(self) -> tuple[tuple[int, int], ...]:
        if self.num_missing == 0:
            return ()
        missing = np.isnan(self.latency_s) | np.isnan(self.bandwidth_bytes_per_s)
        return tuple((int(i), int(j)) for i, j in np.argwhere(missing))

    @cached_property
    def num_missing(self) -> int:
        """Number of ordered pairs whose latency or bandwidth was not measured."""
        latency, bandwidth = self.latency_table, self.bandwidth_table
        missing = np.isnan(latency.values) | np.isnan(bandwidth.values)
        count = np.bincount(latency.class_of)
        pairs = missing * count[:, None] * count
        return int(pairs.sum() - (missing.diagonal() * count).sum())

    def require_complete(self) -> None:
        """Raise `NetworkError` if a pair is missing."""
        if self.num_missing:
            raise NetworkError(
                f"{self.describe_missing()}; {self.missing_remedy()}, or plan without them: "
                "network.complete(), --complete"
            )

    def describe_missing(self) -> str:
        """Number of missing pairs and the devices most affected; empty if none is missing."""
        uncovered = missing = self.missing_pairs()
        if not missing:
            return ""
        devices: list[int] = []
        while uncovered:
            counts = np.bincount(np.ravel(uncovered), minlength=len(self))
            devices.append(int(counts.argmax()))
            uncovered = [pair for pair in uncovered if devices[-1] not in pair]
        names = listed([self.ids[d] for d in devices])
        i, j = missing[0]
        return (
            f"{counted(len(missing), 'ordered pair')} {'is' if len(missing) == 1 else 'are'} not "
            f"measured, the first is {self.ids[i]!r} to {self.ids[j]!r}; without {names} "
            f"({len(devices)} of {len(self)}) none is missing"
        )

    def missing_remedy(self, name: str = "FILE") -> str:
        """What to do about missing pairs, in words.

        Parameters
        ----------
        name
            Of the network's file.

        Returns
        -------
        str
            Says whether the opposite directions were measured and can be used, and how to assume
            what is missing.
        """
        missing = set(self.missing_pairs())
        tables = {"latency": self.latency_table, "bandwidth": self.bandwidth_table}
        assumed = " ".join(
            formats.ASSUMED[quantity]
            for quantity, table in tables.items()
            if (np.isnan(table.values) & table.joins_two).any()
        )
        command = f"planner networks {name}"
        if all((j, i) in missing for i, j in missing):
            return f"measure them, or assume them: {command} {assumed} --out net.csv"
        return (
            "measure them, or take the other direction's figures: "
            f"{command} --both-ways --out net.csv, or assume them: {assumed} in that command"
        )

    def transfer_s(self, message_bytes: float) -> Floats:
        """N x N seconds for one message: ``latency_s + bytes / bandwidth``; 0 on the diagonal.

        Parameters
        ----------
        message_bytes
            Size of the message.

        Returns
        -------
        ndarray
            ``float[N, N]``, row is the source; NaN where a pair was not measured.
        """
        size = real("message_bytes", message_bytes, 0, error=NetworkError)
        seconds: Floats = self.latency_s + size / self.bandwidth_bytes_per_s
        return seconds

    def subset(self, devices: Sequence[int] | Sequence[str]) -> Network:
        """The network of some devices, given by index or id, in that order.

        Parameters
        ----------
        devices
            Indices or ids, each once.

        Returns
        -------
        Network
            The devices named, in the order named.

        Raises
        ------
        NetworkError
            There is no such device.
        """
        index = [self.index_of(d) for d in sequence("devices", devices, error=NetworkError)]
        ids, regions = (tuple(names[i] for i in index) for names in (self.ids, self.regions))
        if not 0 < len(set(index)) == len(index):
            grid = np.ix_(index, index)
            return Network(self.latency_table[grid], self.bandwidth_table[grid], ids, regions)
        tables = self.latency_table, self.bandwidth_table
        if "alike" in self.__dict__ and tables[0].is_full:
            # known classes need not be found again in each part
            tables = tables[0].with_classes(self.class_of), tables[1].with_classes(self.class_of)
        latency, bandwidth = (table.picked(index) for table in tables)
        return Network.of_valid(latency, bandwidth, ids, regions)

    def tables_by(self, *columns: ArrayLike) -> tuple[PairTable, PairTable]:
        """Latency and bandwidth by classes of devices that agree in other properties, too.

        Parameters
        ----------
        columns
            ``float[N]`` each: properties of the devices.

        Returns
        -------
        tuple[PairTable, PairTable]
            The same values, in classes that are equal or smaller.
        """
        rows = np.stack([self.latency_table.class_of, *columns], axis=1)
        class_of = np.unique(rows, axis=0, return_inverse=True)[1].ravel()
        return (
            self.latency_table.with_classes(class_of),
            self.bandwidth_table.with_classes(class_of),
        )

    def index_of(self, device: int | str) -> int:
        """Index of a device given by index or id.

        Parameters
        ----------
        device
            Index (0 to N - 1) or id.

        Returns
        -------
        int
            0 to N - 1.

        Raises
        ------
        NetworkError
            There is no such device.
        """
        if isinstance(device, str):
            if device not in self._index:
                raise NetworkError(
                    f"no device {device!r} in this network; it has {', '.join(self.ids[:8])}"
                    + (", ..." if len(self) > 8 else "")
                )
            return self._index[device]
        index = count("a device's index", device, 0, error=NetworkError)
        if index >= len(self):
            raise NetworkError(f"no device {index}; indices run from 0 to {len(self) - 1}")
        return index

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: d for d, name in enumerate(self.ids)}

    def complete(self) -> Network:
        """The largest sub-network without missing pairs.

        Exact (a minimum vertex cover of the missing pairs). Of several, the one that drops the
        lexicographically smallest set of indices.

        Returns
        -------
        Network
            Devices in their original order.
        """
        dropped = _minimum_cover({(min(p), max(p)) for p in self.missing_pairs()})
        return self.subset([i for i in range(len(self)) if i not in dropped])

    def replicate(
        self,
        counts: Mapping[str, int],
        *,
        intra_latency_s: float | Mapping[str, float],
        intra_bandwidth_bytes_per_s: float | Mapping[str, float],
    ) -> Network:
        """Several devices in each region.

        Parameters
        ----------
        counts
            Devices per region (an id of this network), in the desired order.
        intra_latency_s, intra_bandwidth_bytes_per_s
            Between two devices of one region: one value, or one per region.

        Returns
        -------
        Network
            Devices ``"Oregon/0"``, ``"Oregon/1"``, ... with region ``"Oregon"``.

        Raises
        ------
        NetworkError
            No regions, an unknown one, or an invalid count or value.
        """
        sources: list[int] = []
        ids: list[str] = []
        for region, copies in mapping("counts", counts, error=NetworkError).items():
            size = count(f"counts of region {region!r}", copies, error=NetworkError)
            if len(sources) + size > MAX_DEVICES:
                raise NetworkError(
                    f"counts make {len(sources) + size} devices or more, at most {MAX_DEVICES} "
                    "are possible; give fewer"
                )
            sources += [self.index_of(region)] * size
            ids += [f"{region}/{k}" for k in range(size)]
        if not sources:
            raise NetworkError("replicate() got no regions; name at least one, such as {'a': 8}")
        order = list(dict.fromkeys(sources))
        names = [self.ids[source] for source in order]

        def table(field: str, measured: PairTable, inside: float | Mapping[str, float]) -> Floats:
            """Links between regions, and within each on the diagonal."""
            links = dict(inside) if isinstance(inside, Mapping) else dict.fromkeys(names, inside)
            values = measured.between(order)
            for k, name in enumerate(names):
                rule = f"{field} of region {name!r}"
                values[k, k] = real(rule, links.get(name), 0, error=NetworkError)
            return values

        place = {source: k for k, source in enumerate(order)}
        return Network.of_classes(
            table("intra_latency_s", self.latency_table, intra_latency_s),
            table(
                "intra_bandwidth_bytes_per_s",
                self.bandwidth_table,
                intra_bandwidth_bytes_per_s,
            ),
            [place[source] for source in sources],
            ids,
            [self.ids[source] for source in sources],
        )

    def symmetrised(self) -> Network:
        """Both directions replaced by their mean, as in DT-FM and SkipPipe."""
        return Network(
            (self.latency_s + self.latency_s.T) / 2,
            (self.bandwidth_bytes_per_s + self.bandwidth_bytes_per_s.T) / 2,
            self.ids,
            self.regions,
        )

    def replace(self, **changes: Any) -> Network:
        """A copy with some fields changed."""
        fields = {
            "latency_s": self.latency_s,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "ids": self.ids,
            "regions": self.regions,
        }
        return Network(**{**fields, **changes})


def _device_names(
    ids: Iterable[Any], regions: Iterable[Any] | None, devices: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids, which are unique, and regions, by default the ids."""
    names = _names("ids", ids)
    places = names if regions is None else _names("regions", regions)
    for field, values in (("ids", names), ("regions", places)):
        if len(values) != devices:
            raise NetworkError(
                f"{field} has {len(values)} entries for {devices} devices; give one per device"
            )
    if len(set(names)) != devices:
        twice = next(name for name in names if names.count(name) > 1)
        raise NetworkError(f"id {twice!r} is used twice; ids must be unique, rename one")
    return names, places


def _names(field: str, values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(name_of, sequence(field, values, error=NetworkError)))


def _labels(**frames: Any) -> tuple[str, ...] | None:
    """Device names of pandas frames; None for arrays and frames without names."""
    by_region: dict[str, tuple[str, ...]] = {}
    for field, frame in frames.items():
        if not (hasattr(frame, "index") and hasattr(frame, "columns")):
            continue
        rows, columns = _names("rows", frame.index), _names("columns", frame.columns)
        numbered = tuple(map(str, range(len(rows))))
        if columns not in (rows, numbered) and rows != numbered:
            raise NetworkError(
                f"{field} has rows {joined(rows)} and columns {joined(columns)}; name the same "
                "devices in the same order along both sides"
            )
        if (labels := rows if columns == numbered else columns) != numbered:
            by_region[field] = labels
    if len(set(by_region.values())) > 1:
        (a, first), (b, second) = by_region.items()
        raise NetworkError(
            f"{a} is of {joined(first)}, {b} of {joined(second)}; give the same devices in the "
            "same order"
        )
    return next(iter(by_region.values()), None)


def _square(field: str, values: ArrayLike) -> Floats:
    try:
        array = numbers(values)
    except (TypeError, ValueError) as error:
        raise NetworkError(f"{field} must be an N x N array of numbers: {error}") from None
    if array.ndim != 2 or array.shape[0] != array.shape[1] or len(array) < 1:
        raise NetworkError(f"{field} must be N x N with N >= 1, found shape {array.shape}")
    return array


def _validate_rows(latency: Floats, bandwidth: Floats, ids: Sequence[str], first: int) -> None:
    """Reject values of some rows that are no latency or bandwidth."""
    rows = slice(first, first + ROWS)
    off = np.arange(first, min(first + ROWS, len(ids)))[:, None] != np.arange(len(ids))
    for array, field in ((latency[rows], "latency_s"), (bandwidth[rows], "bandwidth_bytes_per_s")):
        is_bandwidth = field == "bandwidth_bytes_per_s"
        rules = [
            (~in_safe_range(array) & np.isfinite(array), f"0 or {SMALLEST:g} to {LARGEST:g}"),
        ]
        if is_bandwidth:
            rules.append((~((array > 0) & np.isfinite(array)), "> 0 and finite"))
        else:
            rules = [(array < 0, ">= 0"), (np.isinf(array), "finite"), *rules]
        for bad, rule in rules:
            _reject(array, ids, off & bad & ~np.isnan(array), field, rule, first)


def _reject(
    array: Floats,
    ids: Sequence[str],
    bad: NDArray[np.bool_],
    field: str,
    rule: str,
    first: int,
) -> None:
    if bad.any():
        i, j = (int(k) for k in np.argwhere(bad)[0])
        raise NetworkError(
            f"{field} from {ids[first + i]!r} to {ids[j]!r} is {array[i, j]:g}; it must be {rule} "
            "(NaN where it was not measured)"
        )


def _minimum_cover(pairs: set[tuple[int, int]]) -> set[int]:
    """The lexicographically smallest of the smallest sets that touch every pair."""
    if not pairs:
        return set()
    from scipy.optimize import Bounds, LinearConstraint, milp

    nodes = sorted({i for pair in pairs for i in pair})
    place = {node: k for k, node in enumerate(nodes)}
    rows = np.zeros((len(pairs), len(nodes)))
    for row, (i, j) in zip(rows, sorted(pairs), strict=True):
        row[place[i]] = row[place[j]] = 1
    lower, upper = np.zeros(len(nodes)), np.ones(len(nodes))

    def solve() -> tuple[int, Floats]:
        solution = milp(
            np.ones(len(nodes)),
            integrality=np.ones(len(nodes)),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(rows, lb=1.0),
        )
        return (round(solution.fun), solution.x) if solution.success else (len(nodes) + 1, lower)

    smallest, cover = solve()
    for k in range(len(nodes)):
        if lower[:k].sum() == smallest:
            upper[k:] = 0
            break
        lower[k] = 1.0
        if cover[k] < 0.5:
            size, candidate = solve()
            if size > smallest:
                lower[k] = upper[k] = 0.0
            else:
                cover = candidate
    return {node for node, is_covered in zip(nodes, lower, strict=True) if is_covered}
