"""Anonymous network namespaces, each with one TUN device whose packets this process forwards.

A namespace exists while a process runs in it or a descriptor of it is open, so nothing is left
behind however this process ends. Only system calls are used; the ``ip`` command is not needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "emu0"
"""Name of the TUN device in every namespace."""
HEADER_BYTES = 10
"""Size of the virtio header of every packet, which marks its checksum as omitted."""
SETTINGS = {
    # available in every kernel; grows its window while no packet is lost
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}
QUEUE = 10_000
"""Most packets that may wait for the switch."""
FIRST_BUFFER_BYTES = 2_000_000
MENDED_MTU = 1400
"""MTU of a route that was cut and restored; every link carries such packets."""

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM = 0x01
SIOCDELRT = 0x890C
SIOCADDRT, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFMTU = 0x890B, 0x8914, 0x8916, 0x8922
SIOCSIFTXQLEN = 0x8943
IFF_UP = 0x1
RTF_UP, RTF_HOST, RTF_MSS = 0x1, 0x4, 0x40


class EmulationError(ValueError):
    """This machine cannot emulate the network."""


@dataclass(frozen=True)
class Namespace:
    """Network namespace of one device.

    Attributes
    ----------
    address
        IPv4 address of its TUN device.
    handle
        Descriptor of the namespace, for `enter`.
    tun
        Descriptor of its TUN device: reads return what the namespace sends, writes deliver to it.
    """

    address: str
    handle: int
    tun: int


def address(device: int) -> str:
    """Return the IPv4 address of a device on the emulated network."""
    return f"10.77.{(device + 1) >> 8}.{(device + 1) & 255}"


def require_linux_root() -> None:
    """Raise `EmulationError` without Linux, root, TUN devices or network namespaces."""
    if sys.platform != "linux":
        raise EmulationError(
            f"an emulated network needs Linux, found {sys.platform}; run it on a Linux machine"
        )
    if os.geteuid() != 0:
        raise EmulationError(
            "an emulated network needs root for network namespaces; run as root (sudo)"
        )
    if not Path("/dev/net/tun").exists():
        raise EmulationError("/dev/net/tun is missing; load its kernel module with modprobe tun")


@contextmanager
def namespaces(mtu_bytes: Sequence[Sequence[int]], buffer_bytes: int) -> Iterator[list[Namespace]]:
    """Create one namespace per device; they exist until the block and their processes end."""
    require_linux_root()
    with ExitStack() as stack:
        created = []
        for device, row in enumerate(mtu_bytes):
            space = _in_thread(lambda d=device, r=row: _make(d, r, buffer_bytes))  # type: ignore[misc]
            stack.callback(os.close, space.handle)
            stack.callback(os.close, space.tun)
            created.append(space)
        yield created


def enter(handle: int) -> None:
    """Move the calling thread into a namespace."""
    _call("setns", handle, CLONE_NEWNET)


def cut(peers: Sequence[int]) -> None:
    """Remove the routes from this process's namespace to other devices, like a cut cable.

    Connections stay open; data sent over them is lost.
    """
    through = ctypes.create_string_buffer(INTERFACE.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for other in peers:
            fcntl.ioctl(control, SIOCDELRT, _route(other, 0, through))


def mend(peers: Sequence[int]) -> None:
    """Restore the routes that `cut` removed."""
    through = ctypes.create_string_buffer(INTERFACE.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for other in peers:
            fcntl.ioctl(control, SIOCADDRT, _route(other, MENDED_MTU, through))


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _in_thread(work: Callable[[], Namespace]) -> Namespace:
    """Run ``work`` in a new thread, so that the caller's namespace does not change."""
    done: list[Namespace] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise EmulationError(
            f"a network namespace with a TUN device cannot be created ({failed[0]}); use a machine "
            "or container that allows both"
        ) from failed[0]
    return done[0]


def _make(device: int, mtu_bytes: Sequence[int], buffer_bytes: int) -> Namespace:
    """Create and configure a namespace for the calling thread."""
    _call("unshare", CLONE_NEWNET)
    handle = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = INTERFACE.encode()
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name, IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM)
    for key, value in (SETTINGS | _buffers(buffer_bytes)).items():
        with suppress(FileNotFoundError):  # this kernel has no IPv6 to disable
            Path("/proc/sys", key).write_text(value)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
        fcntl.ioctl(control, SIOCSIFADDR, struct.pack("16s16s8x", name, _socket_address(device)))
        fcntl.ioctl(control, SIOCSIFMTU, struct.pack("16si20x", name, max(mtu_bytes)))
        fcntl.ioctl(control, SIOCSIFTXQLEN, struct.pack("16si20x", name, QUEUE))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name, IFF_UP))
        through = ctypes.create_string_buffer(name)
        for other, mtu in enumerate(mtu_bytes):
            if other != device:
                fcntl.ioctl(control, SIOCADDRT, _route(other, mtu, through))
    return Namespace(address(device), handle, tun)


def _buffers(size: int) -> dict[str, str]:
    """Return TCP buffer settings: least, initial and largest size.

    Half of the receive buffer is the window; the kernel's initial one would hold a single packet
    here.
    """
    return {
        "net/ipv4/tcp_rmem": f"4096 {min(FIRST_BUFFER_BYTES, 2 * size)} {2 * size}",
        "net/ipv4/tcp_wmem": f"4096 131072 {2 * size}",
    }


def _socket_address(device: int) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address(device)))


def _route(other: int, mtu: int, device: ctypes.Array[ctypes.c_char]) -> bytes:
    """Return a ``struct rtentry``: a direct route to a device with an MTU."""
    return struct.pack(
        "@L16s16s16sHhLPhPLLH",
        *(0, _socket_address(other), bytes(16), bytes(16)),
        *(RTF_UP | RTF_HOST | RTF_MSS, 0, 0, 0, 0),
        *(ctypes.addressof(device), mtu, 0, 0),
    )
