"""Devices on a network: what each can compute, hold and send."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.network.gpus import GPUS
from planner.network.network import Network

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Devices:
    """What the devices can do: scalars for all, or arrays of N.

    Parameters
    ----------
    flops
        FLOP/s that training attains (not the data sheet's peak).
    memory_bytes
        Memory for weights, optimizer state and activations.
    upload_bytes_per_s, download_bytes_per_s
        Limits on the sum over all peers; None: only the pairs limit.
    """

    flops: ArrayLike
    memory_bytes: ArrayLike
    upload_bytes_per_s: ArrayLike | None = None
    download_bytes_per_s: ArrayLike | None = None

    @classmethod
    def of_gpu(cls, name: str, utilization: float = 0.4) -> Devices:
        """Devices of one type from the table of GPUs, at a fraction of their peak."""
        if name not in GPUS:
            raise ValueError(f"no GPU {name!r} in the table; it has {', '.join(GPUS)}")
        if not 0 < utilization <= 1:
            raise ValueError(f"utilization is {utilization}; give a fraction in (0, 1]")
        return cls(GPUS[name].peak_flops * utilization, GPUS[name].memory_bytes)

    def broadcast(self, n: int) -> Devices:
        """The same with every field an array of ``n``, validated."""

        def array(field: str) -> Floats | None:
            value = getattr(self, field)
            if value is None:
                return None
            try:
                full = np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (n,)))
            except (TypeError, ValueError):
                raise ValueError(
                    f"devices.{field} must be one number or {n} of them, found shape "
                    f"{np.shape(value)}"
                ) from None
            bad = np.flatnonzero(~(np.isfinite(full) & (full > 0)))
            if len(bad):
                raise ValueError(
                    f"devices.{field} of device {bad[0]} is {full[bad[0]]:g}; it must be > 0 and "
                    "finite"
                )
            full.setflags(write=False)
            return full

        flops, memory = array("flops"), array("memory_bytes")
        if flops is None or memory is None:
            raise ValueError("devices.flops and devices.memory_bytes must both be given")
        return Devices(flops, memory, array("upload_bytes_per_s"), array("download_bytes_per_s"))


@dataclass(frozen=True)
class Cluster:
    """A network and its devices; every field of ``devices`` becomes an array of N."""

    network: Network
    devices: Devices

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", self.devices.broadcast(len(self.network)))

    def __len__(self) -> int:
        return len(self.network)

    @property
    def flops(self) -> Floats:
        """FLOP/s of each device."""
        return np.asarray(self.devices.flops, dtype=np.float64)

    @property
    def memory_bytes(self) -> Floats:
        """Memory of each device."""
        return np.asarray(self.devices.memory_bytes, dtype=np.float64)

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

    def limited_network(self) -> Network:
        """The network in which no pair gets more than its devices' limits allow."""
        network, rate = self.network, self.network.bandwidth_bytes_per_s
        if self.upload_bytes_per_s is not None:
            rate = np.minimum(rate, self.upload_bytes_per_s[:, None])
        if self.download_bytes_per_s is not None:
            rate = np.minimum(rate, self.download_bytes_per_s[None, :])
        return network.replace(bandwidth_bytes_per_s=rate)

    def replace(self, *, network: Network | None = None, devices: Devices | None = None) -> Cluster:
        """A copy with the network or the devices changed."""
        return replace(self, network=network or self.network, devices=devices or self.devices)
