"""Devices on a network: compute, memory, and limits on traffic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.network.dtype import Dtype
from planner.network.gpus import GPUS, find_gpu, unknown_gpu
from planner.network.html_repr import cluster_html
from planner.network.network import Network
from planner.network.pair_table import PairTable
from planner.utils.text import counted, quantity, quantity_range
from planner.utils.validate import (
    LARGEST,
    SMALLEST,
    choice,
    in_safe_range,
    instance_of,
    mapping,
    numbers,
    real,
    sequence,
    short_repr,
)

Floats = NDArray[np.float64]
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,14}")
"""Names of network interfaces on Linux."""
POSITIVE = (
    *("flops", "peak_flops", "memory_bytes", "upload_bytes_per_s", "download_bytes_per_s"),
    "gpu_link_bytes_per_s",
)
NONNEGATIVE = ("usd_per_hour", "gpu_link_latency_s")


@dataclass(frozen=True, eq=False)
class Devices:
    """Properties of the devices: scalars for all, or arrays of N.

    Parameters
    ----------
    flops
        FLOP/s attained in training in the workload's format (not the data sheet's peak).
    memory_bytes
        Memory for weights, optimizer state and activations.
    upload_bytes_per_s, download_bytes_per_s
        Limits on the sum over all peers; None if only pairs are limited.
    sites
        Site of each device; devices of a site share its line.
    site_upload_bytes_per_s, site_download_bytes_per_s
        By site, limits on the sum of what leaves or enters it.
    site_within
        By site, the site in which it lies: what leaves both takes both lines, such as those of a
        machine and its building. Sites may lie in sites that have no device of their own.
    can_compute, can_aggregate
        Whether a device can hold a stage, and whether it can reduce gradients; by default all can.
    usd_per_hour
        Price of each device.
    interfaces
        Network interface on which the rank of each device listens, such as ``eth1``; if empty, the
        one with the route to its peers.
    peak_flops
        The data sheet's FLOP/s in the workload's format, the basis of MFU; None if unknown.
    gpus
        Name in `planner.GPUS` of each device's GPU, or one for all; empty or None if unknown. Plans
        in formats that a named GPU does not support are refused.
    machines
        Machine of each device, empty for one of its own: the devices of a machine may share tensors
        of a stage (`planner.tensor_parallel_workers`).
    gpu_link_bytes_per_s, gpu_link_latency_s
        Of each device to the others of its machine: bandwidth in one direction that collectives
        attain, and latency of a collective.
    gpu_counts
        GPUs of each worker with tensor parallelism, if they differ; None if all that compute have
        the workload's ``tensor_parallel``.
    """

    flops: ArrayLike
    memory_bytes: ArrayLike
    upload_bytes_per_s: ArrayLike | None = None
    download_bytes_per_s: ArrayLike | None = None
    sites: Sequence[str] | None = None
    site_upload_bytes_per_s: Mapping[str, float] | None = None
    site_download_bytes_per_s: Mapping[str, float] | None = None
    can_compute: ArrayLike = True
    can_aggregate: ArrayLike = True
    usd_per_hour: ArrayLike | None = None
    interfaces: Sequence[str] | None = None
    peak_flops: ArrayLike | None = None
    gpus: str | Sequence[str] | None = None
    machines: Sequence[str] | None = None
    gpu_link_bytes_per_s: ArrayLike | None = None
    gpu_link_latency_s: ArrayLike | None = None
    site_within: Mapping[str, str] | None = None
    gpu_counts: ArrayLike | None = None

    def __post_init__(self) -> None:
        # arrays are validated once the number of devices is known
        for field in ("flops", "memory_bytes"):
            value = getattr(self, field)
            if value is not None and np.ndim(value) == 0:
                real(f"devices.{field}", value)
                self._positive(field, 1)

    @classmethod
    def of_gpu(cls, name: str, utilization: float = 0.4, dtype: str = Dtype.BF16) -> Devices:
        """Devices with one type of GPU, at a fraction of its peak.

        Parameters
        ----------
        name
            One of `planner.GPUS`; names of clouds and of the driver are recognised.
        utilization
            Fraction of the peak attained in training, in (0, 1].
        dtype
            Format of compute, whose peak counts: a `Dtype` or its name.

        Returns
        -------
        Devices
            FLOP/s, peak, memory and price, the same for all.

        Raises
        ------
        ValueError
            Unknown GPU or format, or a fraction out of range.
        """
        known_gpu = find_gpu(name) if isinstance(name, str) else None
        if known_gpu is None:
            raise ValueError(unknown_gpu(name))
        if not 0 < real("utilization", utilization) <= 1:
            raise ValueError(f"utilization is {utilization}; give a fraction in (0, 1]")
        gpu = GPUS[known_gpu]
        peak = gpu.peak(choice(Dtype, "dtype", dtype))
        return cls(
            peak * utilization,
            gpu.memory_bytes,
            usd_per_hour=gpu.usd_per_hour,
            peak_flops=peak,
            gpus=known_gpu,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Devices):
            return NotImplemented
        return all(
            _equal_values(getattr(self, field.name), getattr(other, field.name))
            for field in fields_of(self)
        )

    def __hash__(self) -> int:
        return hash(tuple(np.shape(getattr(self, field.name)) for field in fields_of(self)))

    def __repr__(self) -> str:
        try:
            return f"Devices({', '.join(self._description())})"
        except (TypeError, ValueError):
            # `broadcast` validates
            return "Devices(not valid yet)"

    def _description(self) -> list[str]:
        parts = [quantity_range(self.flops, "FLOP/s"), quantity_range(self.memory_bytes, "B")]
        for name in ("upload", "download"):
            rates = getattr(self, f"{name}_bytes_per_s")
            if rates is not None:
                parts.append(f"{name} {quantity_range(np.asarray(rates, dtype=float) * 8, 'b/s')}")
        if self.sites is not None:
            parts.append(counted(len(set(self.sites)), "site"))
        for name in ("compute", "aggregate"):
            can = np.asarray(getattr(self, f"can_{name}"), dtype=bool)
            if not can.all():
                parts.append(f"{int((~can).sum())} cannot {name}")
        if self.usd_per_hour is not None:
            parts.append(quantity_range(self.usd_per_hour, "$/h"))
        return parts

    def broadcast(self, n: int) -> Devices:
        """A validated copy with every field as an array of ``n``.

        Parameters
        ----------
        n
            Number of devices.

        Returns
        -------
        Devices
            Read-only arrays of ``n``.

        Raises
        ------
        ValueError
            One line with field, value and rule.
        """
        for field in ("flops", "memory_bytes"):
            if getattr(self, field) is None:
                raise ValueError("devices.flops and devices.memory_bytes must both be given")
        changes: dict[str, Any] = {
            **self._site_fields(n),
            "interfaces": self._interfaces(n),
            "gpus": self._gpu_names(n),
            "machines": self._machine_names(n),
        }
        for field in POSITIVE:
            changes[field] = self._positive(field, n)
        for field in ("can_compute", "can_aggregate"):
            changes[field] = self._flags(field, n)
        for field in NONNEGATIVE:
            array = changes[field] = self._array(field, n, np.float64)
            if array is not None and not (np.isfinite(array) & (array >= 0)).all():
                raise ValueError(f"devices.{field} must be >= 0 and finite; correct it")
        if self.gpu_counts is not None:
            counts = np.asarray(self._array("gpu_counts", n, np.float64))
            if not ((counts >= 1) & (counts % 1 == 0)).all():
                raise ValueError(
                    f"devices.gpu_counts must be whole numbers >= 1, found {counts.tolist()}"
                )
            changes["gpu_counts"] = counts.astype(np.int64)
            changes["gpu_counts"].setflags(write=False)
        return replace(self, **changes)

    def sites_around(self, device: int) -> tuple[str, ...]:
        """Sites of a device from the inside out.

        Parameters
        ----------
        device
            Its index.

        Returns
        -------
        tuple of str
            Its site, and those in which that lies; empty without sites.
        """
        if self.sites is None:
            return ()
        return _around(self.sites[device], self.site_within or {})

    def with_sites_of(self, devices: Sequence[int]) -> dict[str, Any]:
        """Fields of sites for some of the devices.

        Parameters
        ----------
        devices
            Their indices.

        Returns
        -------
        dict
            Sites in that order, and lines of these and of those around them.
        """
        if self.sites is None:
            return dict.fromkeys(f.name for f in fields_of(self) if "site" in f.name)
        used = {site for d in devices for site in self.sites_around(d)}

        def of_used(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
            return None if values is None else {s: v for s, v in values.items() if s in used}

        return {
            "sites": [self.sites[d] for d in devices],
            "site_upload_bytes_per_s": of_used(self.site_upload_bytes_per_s),
            "site_download_bytes_per_s": of_used(self.site_download_bytes_per_s),
            "site_within": of_used(self.site_within),
        }

    def _array(self, field: str, n: int, kind: Any) -> NDArray[Any] | None:
        value = getattr(self, field)
        if value is None:
            return None
        try:
            array = numbers(value) if kind is np.float64 else np.asarray(value, dtype=kind)
            full = np.array(np.broadcast_to(array, (n,)))
        except (TypeError, ValueError):
            raise ValueError(
                f"devices.{field} must be one value or {n} of them, found shape {np.shape(value)}"
            ) from None
        full.setflags(write=False)
        return full

    def _positive(self, field: str, n: int) -> Floats | None:
        full = self._array(field, n, np.float64)
        if full is None:
            return None
        bad = np.flatnonzero(~(np.isfinite(full) & (full > 0) & in_safe_range(full)))
        if len(bad):
            raise ValueError(
                f"devices.{field} of device {bad[0]} is {full[bad[0]]:g}; it must be > 0 and "
                f"finite, {SMALLEST:g} to {LARGEST:g}"
            )
        return full

    def _flags(self, field: str, n: int) -> NDArray[np.bool_]:
        value = np.asarray(getattr(self, field))
        # files have 0 and 1
        if value.dtype != np.bool_ and not np.isin(value, (0, 1)).all():
            raise ValueError(f"devices.{field} must hold true and false, found {value.tolist()!r}")
        return np.asarray(self._array(field, n, np.bool_))

    def _interfaces(self, n: int) -> tuple[str, ...] | None:
        if self.interfaces is None:
            return None
        names = tuple(str(name) for name in sequence("devices.interfaces", self.interfaces))
        if len(names) != n:
            raise ValueError(
                f"devices.interfaces must name {n} interfaces, found {len(names)}; one a device"
            )
        for name in names:
            if name and not INTERFACE.fullmatch(name):
                raise ValueError(
                    f"devices.interfaces has {short_repr(name)}; give at most 15 letters, "
                    "digits and . _ : -, such as eth1"
                )
        return names if any(names) else None

    def _gpu_names(self, n: int) -> tuple[str, ...] | None:
        if self.gpus is None:
            return None
        names = (self.gpus,) * n if isinstance(self.gpus, str) else tuple(map(str, self.gpus))
        if len(names) != n:
            raise ValueError(f"devices.gpus must name {n} GPUs, found {len(names)}; one a device")
        for name in names:
            if name and name not in GPUS:
                raise ValueError(
                    f"devices.gpus has {short_repr(name)}; it must be one of {', '.join(GPUS)}, "
                    "or empty"
                )
        return names if any(names) else None

    def _machine_names(self, n: int) -> tuple[str, ...] | None:
        if self.machines is None:
            return None
        names = tuple(str(name) for name in sequence("devices.machines", self.machines))
        if len(names) != n:
            raise ValueError(
                f"devices.machines must name {n} machines, found {len(names)}; one a device"
            )
        return names if any(names) else None

    def _site_fields(self, n: int) -> dict[str, Any]:
        sites = (
            None
            if self.sites is None
            else tuple(str(site) for site in sequence("devices.sites", self.sites))
        )
        if sites is not None and len(sites) != n:
            raise ValueError(f"devices.sites must name {n} sites, found {len(sites)}; one a device")
        within = mapping(
            "devices.site_within", {} if self.site_within is None else self.site_within
        )
        for site, outer in within.items():
            if not isinstance(outer, str):
                raise ValueError(
                    f"devices.site_within of {site!r} is {short_repr(outer)}; name the site around "
                    "it"
                )
        named = set(sites or ())
        for site in sorted(named):
            named.update(_around(site, within))
        for site in within:
            if site not in named:
                raise ValueError(f"devices.site_within names {site!r}, where no device stands")
        fields: dict[str, Any] = {"sites": sites, "site_within": within or None}
        for field in ("site_upload_bytes_per_s", "site_download_bytes_per_s"):
            rates = getattr(self, field)
            limits = mapping(f"devices.{field}", {} if rates is None else rates)
            for site, rate in limits.items():
                if site not in named:
                    raise ValueError(f"devices.{field} names {site!r}, where no device stands")
                real(f"devices.{field} of {site!r}", rate, 0, above=True)
            fields[field] = limits or None
        return fields


def _around(site: str, within: Mapping[str, str]) -> tuple[str, ...]:
    """A site, and those around it from the inside out."""
    chain = [site]
    while (outer := within.get(chain[-1])) is not None:
        if outer in chain:
            raise ValueError(
                f"devices.site_within: {outer!r} lies in itself, by way of {chain[-1]!r}; correct "
                "one of them"
            )
        chain.append(outer)
    return tuple(chain)


def _equal_values(a: Any, b: Any) -> bool:
    """Whether two values of a field are equal: mappings, names, numbers or arrays."""
    if a is None or b is None or isinstance(a, dict) or isinstance(b, dict):
        return bool(a is b or (a is not None and b is not None and a == b))
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


@dataclass(frozen=True)
class Cluster:
    """A network and its devices; every field of ``devices`` is an array of N.

    Attributes
    ----------
    network
        N devices.
    devices
        Their properties; scalars apply to all devices.

    Raises
    ------
    ValueError
        A field of ``devices`` does not fit the network.
    """

    network: Network
    devices: Devices

    def __post_init__(self) -> None:
        n = len(instance_of(Network, self.network, "network"))
        object.__setattr__(
            self, "devices", instance_of(Devices, self.devices, "devices").broadcast(n)
        )

    def __len__(self) -> int:
        return len(self.network)

    def __repr__(self) -> str:
        total = quantity(float(self.flops.sum()), "FLOP/s")
        memory = quantity(float(self.memory_bytes.sum()), "B")
        return f"Cluster({self.network.size_words()}, {total} and {memory} together)"

    def _repr_html_(self) -> str:
        figures = {"FLOP/s": self.flops.tolist(), "B": self.memory_bytes.tolist()}
        return cluster_html(repr(self), self.network.regions, figures, self.network._repr_html_())

    @property
    def flops(self) -> Floats:
        """FLOP/s of each device."""
        return np.asarray(self.devices.flops, dtype=np.float64)

    @property
    def memory_bytes(self) -> Floats:
        """Memory of each device."""
        return np.asarray(self.devices.memory_bytes, dtype=np.float64)

    def lacks(self, dtype: Dtype) -> list[int]:
        """Devices that compute, but whose GPU is known not to support a format."""
        gpus = self.devices.gpus
        if dtype is not Dtype.BF16 or gpus is None:
            return []
        computes = np.flatnonzero(np.asarray(self.devices.can_compute))
        return [d for d in computes.tolist() if gpus[d] and not GPUS[gpus[d]].has_bf16]

    def describe_lacking(self, devices: Sequence[int]) -> str:
        """Names the first of some devices and its GPU."""
        first, more_count = devices[0], len(devices) - 1
        assert self.devices.gpus is not None
        more = f" (and {more_count} more)" if more_count else ""
        return f"device {self.network.ids[first]!r}{more} has a {self.devices.gpus[first]}"

    @property
    def upload_bytes_per_s(self) -> Floats | None:
        """Upload limit of each device, if any."""
        value = self.devices.upload_bytes_per_s
        return None if value is None else np.asarray(value, dtype=np.float64)

    @property
    def download_bytes_per_s(self) -> Floats | None:
        """Download limit of each device, if any."""
        value = self.devices.download_bytes_per_s
        return None if value is None else np.asarray(value, dtype=np.float64)

    def subset(self, devices: Sequence[int] | Sequence[str]) -> Cluster:
        """The cluster of some devices, given by index or id, in that order.

        A device keeps its limits. Where none are stated, they remain unstated only if the fastest
        measured pair of every device is within the subset; otherwise the rates of `device_limits`
        are stored.

        Parameters
        ----------
        devices
            Indices or ids, each once.

        Returns
        -------
        Cluster
            The devices in the given order.

        Raises
        ------
        NetworkError
            Unknown device.
        """
        index = [self.network.index_of(d) for d in devices]
        mine = self.devices
        fields: dict[str, Any] = {
            name: None if (value := getattr(mine, name)) is None else np.asarray(value)[index]
            for name in (f.name for f in fields_of(mine) if "site" not in f.name)
        }
        fields |= mine.with_sites_of(index)
        cluster = Cluster(self.network.subset(index), Devices(**fields))
        names = ("upload_bytes_per_s", "download_bytes_per_s")
        for name, limits, default_limits in zip(
            names, device_limits(self), device_limits(cluster), strict=True
        ):
            if not np.array_equal(limits[index], default_limits):
                fields[name] = limits[index]
        return Cluster(cluster.network, Devices(**fields))

    def limited_network(self) -> Network:
        """The network in which no pair gets more than its devices' limits allow.

        Returns
        -------
        Network
            The same devices; bandwidths at most the limits of devices and sites.
        """
        return self._limited

    @cached_property
    def _limited(self) -> Network:
        network, n = self.network, len(self)
        site_pairs = list(self._site_pairs())
        if self.upload_bytes_per_s is None and self.download_bytes_per_s is None and not site_pairs:
            return network
        unlimited = np.full(n, np.inf)
        up = unlimited if self.upload_bytes_per_s is None else self.upload_bytes_per_s
        down = unlimited if self.download_bytes_per_s is None else self.download_bytes_per_s
        latency, table = network.tables_by(up, down, *self.inside.values())
        first = table.first
        rate = np.minimum(np.minimum(table.values, up[first, None]), down[None, first])
        for i, j, limit in site_pairs:
            rate = np.where(np.outer(i[first], j[first]), np.minimum(rate, limit), rate)
        limited = PairTable(rate, table.class_of, np.inf)
        return Network.of_valid(latency, limited, network.ids, network.regions)

    def _site_pairs(self) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_], float]]:
        """Limits of sites' lines on pairs: sources, destinations, bytes per second."""
        for site, rate in (self.devices.site_upload_bytes_per_s or {}).items():
            yield self.inside[site], ~self.inside[site], rate
        for site, rate in (self.devices.site_download_bytes_per_s or {}).items():
            yield ~self.inside[site], self.inside[site], rate

    @cached_property
    def inside(self) -> Mapping[str, NDArray[np.bool_]]:
        """``bool[N]`` by site: whether each device is in it, or in a site within it."""
        if self.devices.sites is None:
            return {}
        around = [set(self.devices.sites_around(d)) for d in range(len(self))]
        names = sorted(set().union(*around))
        return {name: np.array([name in sites for sites in around]) for name in names}

    def replace(self, *, network: Network | None = None, devices: Devices | None = None) -> Cluster:
        """A copy with the network or the devices changed.

        Parameters
        ----------
        network
            The new network; None keeps it.
        devices
            The new devices; None keeps them.

        Returns
        -------
        Cluster
            Validated again.
        """
        return replace(self, network=network or self.network, devices=devices or self.devices)


def member_limits(cluster: Cluster, members: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Uploads, downloads and pairs of some devices; limits of sites apply to pairs.

    Returns
    -------
    tuple[ndarray, ndarray, ndarray]
        ``float[m]`` twice and ``float[m, m]``, bytes per second.
    """
    index = list(members)
    network = cluster.network if cluster.devices.sites is None else cluster.limited_network()
    up, down = device_limits(cluster)
    return up[index], down[index], network.bandwidth_table.between(index)


def device_limits(cluster: Cluster) -> tuple[Floats, Floats]:
    """Upload and download of every device: as stated, else the rate of its fastest measured pair.

    Returns
    -------
    tuple[ndarray, ndarray]
        ``float[N]`` each, bytes per second; infinite for a single device.
    """
    out, into = cluster.network.fastest_bytes_per_s
    up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
    return out if up is None else up, into if down is None else down
