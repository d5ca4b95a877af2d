"""The address at which other ranks reach this process."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from planner.executor.transport.store import ANY_ADDRESS, BIND, is_loopback
from planner.utils.refusal import Refusal

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface to listen on, as for torch.distributed."""
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""The same for NCCL, in its own syntax."""
REACHED_KEY = "reached"
"""Keys of the store, one per rank: the address under which it reaches the store over a network."""
INTERFACE_BYTES = 16
"""Linux's IFNAMSIZ: a name and a zero byte."""
GET_ADDRESS = 0x8915
"""ioctl SIOCGIFADDR of Linux."""


def interface_address(interface: str) -> str | None:
    """The IPv4 address of a network interface."""
    if 0 < len(interface.encode()) < INTERFACE_BYTES and sys.platform == "linux":
        import fcntl

        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode())
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), GET_ADDRESS, request)[20:24])
    return None


def own_address() -> str:
    """The named address, or that of the interface; else the one that reaches the store."""
    return configured_address() or _route_to_store()[0]


def publish_store_address(store: Store, rank: int) -> None:
    """Publish the address under which the store is reached from here over a network."""
    store_address = ""
    with suppress(OSError):  # not needed if an address is configured
        own, stores = _route_to_store()
        store_address = "" if is_loopback(own) else stores
    store.set(f"{REACHED_KEY}/{rank}", store_address)


def reachable_address(store: Store, world: int) -> str:
    """`own_address`, corrected by the addresses that ranks on other machines have published.

    On its own node the store's name is often a loopback address (Debian's 127.0.1.1), useless to
    other machines: ranks there listen where others reach the store.
    """
    if (configured := configured_address()) is not None:
        return configured
    own, _ = _route_to_store()
    if not is_loopback(own):
        return own
    values = store.multi_get([f"{REACHED_KEY}/{rank}" for rank in range(world)])
    published_addresses = [value.decode() for value in values]
    return next((a for a in published_addresses if a and _is_own(a)), own)


def configured_address() -> str | None:
    """The address of ``--bind`` or of the interface in `INTERFACE`; None if neither is given.

    Of several interfaces, which Gloo uses in turn, the first counts.
    """
    bind = os.environ.get(BIND, "")
    if bind and bind not in ANY_ADDRESS:
        return bind
    value = os.environ.get(INTERFACE, "")
    names = [name.strip() for name in value.split(",")] if value.strip() else []
    addresses = [interface_address(name) for name in names]
    if sys.platform == "linux" and None in addresses:
        unknown = names[addresses.index(None)]
        interfaces = ", ".join(name for _, name in socket.if_nameindex() if interface_address(name))
        problem = (
            "which is the syntax of NCCL_SOCKET_IFNAME"
            if unknown.startswith(("^", "="))
            else "which this machine does not have, or which has no IPv4 address"
        )
        raise Refusal(
            f"{INTERFACE} names {unknown!r}, {problem}; name one of {interfaces or 'none'}"
        )
    return addresses[0] if addresses else None


def require_nccl_interface() -> None:
    """Raise `Refusal` if `NCCL_INTERFACE` matches no interface with an address.

    NCCL reads a list of prefixes, names to exclude after ``^``, and exact names after ``=``.
    """
    value = os.environ.get(NCCL_INTERFACE, "")
    if not value or sys.platform != "linux":
        return
    interfaces = [name for _, name in socket.if_nameindex() if interface_address(name)]
    excludes, patterns = value.startswith("^"), value.removeprefix("^")
    is_exact, names = patterns.startswith("="), patterns.removeprefix("=").split(",")

    def matches(interface: str) -> bool:
        return (
            interface in names if is_exact else any(map(interface.startswith, filter(None, names)))
        )

    if not any(matches(interface) is not excludes for interface in interfaces):
        raise Refusal(
            f"{NCCL_INTERFACE} is {value!r}, which leaves no interface of "
            f"{', '.join(interfaces)}; name one, such as ={interfaces[0] if interfaces else 'lo'}"
        )


def _route_to_store() -> tuple[str, str]:
    """Addresses of this process and of the store, on the route between them."""
    target = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    for family, kind, _, _, address in socket.getaddrinfo(*target, type=socket.SOCK_DGRAM):
        # connecting a datagram socket sends nothing, but selects the route
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(address[0])
    return "127.0.0.1", "127.0.0.1"


def _is_own(address: str) -> bool:
    """Whether this machine has an address; published ones may be wrong."""
    with suppress(OSError, ValueError):
        parsed = ipaddress.ip_address(address)
        family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return not parsed.is_unspecified
    return False
