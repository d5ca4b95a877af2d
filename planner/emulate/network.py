"""Emulated network on this machine: one namespace per device, and the switch between them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from planner.emulate.links import EmulatedLinks
from planner.emulate.namespaces import (
    INTERFACE,
    EmulationError,
    Namespace,
    enter,
    namespaces,
)

QUEUE_BYTES = 1e6
"""Queue per connection beyond twice the largest bandwidth-delay product, in bytes."""
POOL_BYTES = 1.5e9
"""Address space for packets inside the network; only used pages take memory."""
MAX_SLOTS = 200_000
NICE = 5
"""Nice value of ranks, so that the switch has priority."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SwitchStats:
    """Statistics of the switch.

    Attributes
    ----------
    busy
        ``float[k, 4]``: pair, start and end in seconds of the monotonic clock, bytes.
    packets, lost
        Received and dropped packets.
    late_s, most_late_s
        Mean and largest delay of delivery, in seconds.
    """

    busy: NDArray[np.float64]
    packets: int
    lost: int
    late_s: float
    most_late_s: float
    cpu_s: float


class EmulatedNetwork:
    """A running emulated network, created by `emulated`."""

    def __init__(self, spaces: Sequence[Namespace], switch: subprocess.Popen[str], folder: Path):
        self._spaces, self._switch, self._folder = spaces, switch, folder

    @property
    def addresses(self) -> list[str]:
        """IPv4 address of each device."""
        return [space.address for space in self._spaces]

    def start(
        self,
        device: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a process in a device's namespace; it ends with this process."""
        handle = self._spaces[device].handle
        prctl = ctypes.CDLL(None).prctl

        def prepare() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            enter(handle)
            os.nice(NICE)

        return subprocess.Popen(
            command,
            env={**environment, "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            preexec_fn=prepare,
            start_new_session=True,
        )

    def stop(self) -> SwitchStats:
        """Stop the switch and return its statistics."""
        output, error = self._switch.communicate(timeout=30)
        if self._switch.returncode != 0:
            raise EmulationError(f"the switch of the emulated network failed: {error[-500:]}")
        report = json.loads(output)
        return SwitchStats(np.load(self._folder / "busy.npy"), **report)


@contextmanager
def emulated(links: EmulatedLinks) -> Iterator[EmulatedNetwork]:
    """Run the emulated network while the block runs."""
    mtu_bytes = links.mtu_bytes()
    window = int(2 * links.flight_bytes() + QUEUE_BYTES)
    with (
        namespaces(mtu_bytes, window) as spaces,
        tempfile.TemporaryDirectory() as name,
        _switch(links, [space.tun for space in spaces], max(map(max, mtu_bytes)), name) as switch,
    ):
        yield EmulatedNetwork(spaces, switch, Path(name))


@contextmanager
def _switch(
    links: EmulatedLinks, tuns: list[int], longest: int, folder: str
) -> Iterator[subprocess.Popen[str]]:
    """Start the switch's process for packets of at most ``longest`` bytes."""
    np.savez(Path(folder) / "links.npz", **links._asdict())
    slots = int(min(MAX_SLOTS, POOL_BYTES / longest))
    settings = {"tuns": tuns, "slots": slots, "packet_bytes": longest}
    (Path(folder) / "switch.json").write_text(json.dumps(settings))
    switch = subprocess.Popen(
        [sys.executable, "-m", "planner.emulate.serve_switch", folder],
        pass_fds=tuns,
        env=os.environ | {"PYTHONPATH": package_path(), "NUMBA_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # the parent handles Ctrl-C and then stops the switch
        start_new_session=True,
    )
    try:
        assert switch.stdout is not None
        if switch.stdout.readline() != "ready\n":
            error = switch.communicate()[1]
            raise EmulationError(f"the switch of the emulated network failed: {error[-500:]}")
        yield switch
    finally:
        switch.kill()
        switch.communicate()


def package_path() -> str:
    """Return a PYTHONPATH with this package first."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
