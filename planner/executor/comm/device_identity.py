"""Identity of the machine and GPU of a process."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""On Linux, the same in all containers and network namespaces of a machine."""
NETWORK = Path("/proc/self/ns/net")
"""On Linux, identifies the network namespace."""


def machine_id() -> str:
    """An identifier shared by exactly the ranks of this machine."""
    with suppress(OSError):
        return BOOT.read_text().strip()
    return platform.node()


def network_namespace_id() -> str:
    """An identifier shared by the ranks that have this one's network interfaces."""
    with suppress(OSError):
        return str(NETWORK.readlink())
    return ""


def gpu_identity(device: torch.device) -> tuple[str, str]:
    """Model name of a GPU, and a unique identifier.

    Returns
    -------
    tuple[str, str]
        The same for all ranks on the GPU.
    """
    properties = torch.cuda.get_device_properties(device)
    return properties.name, f"{machine_id()} {getattr(properties, 'uuid', device.index)}"
