"""Options of export formats."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from planner.exports.error import ExportError
from planner.training_plan.model import TrainingPlan
from planner.utils.csv_table import read_csv
from planner.utils.validate import count, instance_of, mapping

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Pattern of hosts, interfaces and run ids that are safe in a shell."""
PORTS = 65535


@dataclass(frozen=True)
class ExportOptions:
    """Options of all formats; each format states which ones it uses.

    Attributes
    ----------
    hosts
        Host of each device, by device name; empty: every device is its own host.
    interface
        Network interface of the ranks; None: the host's default.
    port
        Port on the first host for rendezvous.
    run_id
        Name of the run.
    plan_path
        Path of the plan file on the nodes.
    executor_options
        Further arguments of ``python -m planner.executor``, quoted as for a shell.
    pipeline
        Index of the pipeline to write; None: all pipelines must have the same schedule.
    schedule
        Index of the plan's schedule to write.
    stage
        Index of the stage whose averaging is written.
    """

    hosts: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None
    port: int = 29500
    run_id: str = "run1"
    plan_path: str = "plan.json"
    executor_options: str = ""
    pipeline: int | None = None
    schedule: int = 0
    stage: int = 0

    def __post_init__(self) -> None:
        mapping("hosts", self.hosts, error=ExportError)
        for name in ("run_id", "plan_path", "executor_options"):
            instance_of(str, getattr(self, name), name, error=ExportError)
        require_name("run_id", self.run_id)
        if self.interface is not None:
            require_name(
                "interface", instance_of(str, self.interface, "interface", error=ExportError)
            )
        if count("port", self.port, error=ExportError) > PORTS:
            raise ExportError(f"port must be 1 to {PORTS}, found {self.port}; give another one")
        if not self.plan_path or self.plan_path.startswith("-") or _breaks(self.plan_path):
            raise ExportError(
                f"plan_path must be the path of a file, found {self.plan_path!r}; give one"
            )
        for device, host in self.hosts.items():
            instance_of(str, host, f"host of device {device!r}", error=ExportError)
        try:
            options = shlex.split(self.executor_options)
        except ValueError as error:
            raise ExportError(
                f"executor_options: {self.executor_options!r} cannot be parsed ({error}); quote it "
                "as for a shell"
            ) from None
        if options and not options[0].startswith("-"):
            # it would be read as another device name
            raise ExportError(
                f"executor_options must start with an option such as --steps, found "
                f"{options[0]!r}; reorder them"
            )
        if self.pipeline is not None:
            count("pipeline", self.pipeline, 0, error=ExportError)
        count("schedule", self.schedule, 0, error=ExportError)
        count("stage", self.stage, 0, error=ExportError)

    def host_of(self, plan: TrainingPlan) -> tuple[str, ...]:
        """Return the host of every device, in the plan's order: by default its machine, or itself.

        Raises
        ------
        ExportError
            A device has no host, or a host is given for an unknown device.
        """
        ids = plan.cluster.network.ids
        if not self.hosts:
            machines = plan.cluster.devices.machines or ids
            return tuple(machine or name for machine, name in zip(machines, ids, strict=True))
        hosts = {device: _normalized(host) for device, host in self.hosts.items()}
        unknown = [name for name in self.hosts if name not in {*ids, *plan.left_out}]
        if unknown:
            raise ExportError(
                f"hosts: the plan has no device {unknown[0]!r}; it has {', '.join(ids[:8])}"
                + (", ..." if len(ids) > 8 else "")
            )
        missing = [name for name in ids if name not in self.hosts]
        if missing:
            raise ExportError(f"hosts: device {missing[0]!r} has no host; add a row for it")
        return tuple(hosts[name] for name in ids)


def is_ipv6(host: str) -> bool:
    """Whether a host is an IPv6 address without brackets and zone."""
    with suppress(ValueError):
        return "%" not in host and ipaddress.ip_address(host).version == 6
    return False


def _normalized(host: str) -> str:
    """Normalize an IPv6 address; return other hosts unchanged."""
    bare = host.removeprefix("[").removesuffix("]")
    return str(ipaddress.ip_address(bare)) if is_ipv6(bare) else host


def require_host(host: str) -> None:
    """Reject anything but a host name or an address."""
    if not is_ipv6(host):
        require_name("host", host)


def endpoint(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def require_name(label: str, name: str) -> None:
    """Reject a name that a shell or a host file would misread."""
    if label == "host" and is_ipv6(name):
        raise ExportError(
            f"host is {name!r}; this format does not allow IPv6 addresses, give a name"
        )
    if not NAME.fullmatch(name) and label == "host":
        raise ExportError(
            f"host is {name!r}, not a name of letters, digits, '.', '_' and '-'; machines, "
            "and devices without one, are hosts unless --hosts gives a CSV with columns "
            "device,host and a row per device"
        )
    if not NAME.fullmatch(name):
        raise ExportError(f"{label} is {name!r}; give letters, digits, '.', '_' and '-'")


def load_hosts(path: str | Path) -> dict[str, str]:
    """Read a CSV file with the columns ``device`` and ``host``."""
    table = read_csv(path, error=ExportError)
    hosts: dict[str, str] = {}
    if sorted(table.columns) != ["device", "host"]:
        raise ExportError(f"{path}: columns are {list(table.columns)}; give device,host")
    for line, cells in table.rows:
        if not all(cells.values()):
            raise ExportError(
                f"{path}: line {line} is {list(cells.values())}; give a device and a host"
            )
        if cells["device"] in hosts:
            raise ExportError(
                f"{path}: line {line}: device {cells['device']!r} is listed twice; keep one row"
            )
        hosts[cells["device"]] = _normalized(cells["host"])
    return hosts


def _breaks(text: str) -> bool:
    return any(ord(c) < 32 for c in text)
