"""Which machine a process is on, and which of its GPUs it computes on."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Of Linux: the same in all of a machine's containers and network namespaces."""
NETWORK = Path("/proc/self/ns/net")
"""Of Linux: names the network namespace."""


def machine() -> str:
    """A text that is the same on all ranks of this machine, and on no other."""
    with suppress(OSError):
        return BOOT.read_text().strip()
    return platform.node()


def network() -> str:
    """A text that is the same on all ranks that share this one's network interfaces."""
    with suppress(OSError):
        return str(NETWORK.readlink())
    return ""


def gpu_of(device: torch.device) -> tuple[str, str]:
    """The name of a GPU's kind, and a text that no other GPU has.

    Returns
    -------
    tuple[str, str]
        The same for all ranks on it.
    """
    on = torch.cuda.get_device_properties(device)
    return on.name, f"{machine()} {getattr(on, 'uuid', device.index)}"
