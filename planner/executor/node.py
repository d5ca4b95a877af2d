"""``python -m planner.executor.node plan.json --devices a b ...``: all ranks of one node.

Like torchrun, except that the other ranks of the node continue when one is lost: with ``--elastic``
it is restarted and rejoins. The options are those of the executor, and those below. ``MASTER_ADDR``
and ``MASTER_PORT`` name the store: on the node of the plan's first device, whose command serves it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from types import FrameType
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

from planner.executor.elastic.store_monitor import MONITOR_POLL_S, StoreMonitor
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT, REFUSED
from planner.executor.launch.arguments import parse_arguments
from planner.executor.launch.local import run_local
from planner.executor.launch.process import allow_descriptors, exit_now
from planner.executor.launch.run_config import RunConfig
from planner.executor.rendezvous.rank_assignment import NODE, assigned_rank
from planner.executor.rendezvous.rendezvous import heartbeat_timeout_s
from planner.executor.transport.store import (
    STORE_BY_LAUNCHER,
    PortTakenError,
    StoreAddress,
    serve_store,
)
from planner.training_plan.file import load_plan
from planner.utils.argument_parser import OneLineParser
from planner.utils.refusal import Refusal

PROGRAM = "planner.executor.node"
RESTARTS = 3
"""Restarts of each device in elastic runs."""
FAILED_SILENCE_S, LEFT_SILENCE_S = 3.0, 15.0
"""The store is served until ranks of other nodes have been silent for so long: after a failure they
read the reason from it, after a loss they coordinate through it."""


def main(argv: list[str] | None = None) -> int:
    """Run the node's ranks; returns the exit code."""
    try:
        node = _prepare(*parse_node_options(argv))
    except PortTakenError as error:
        print(f"{PROGRAM}: {error}; name another MASTER_PORT on all nodes", file=sys.stderr)
        return REFUSED
    except (Refusal, OSError) as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        return node.run()
    except OSError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def parse_node_options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Separate the options of this command from those of the ranks.

    Returns
    -------
    tuple[argparse.Namespace, list[str]]
        Its own options, and words for `parse_arguments`.
    """
    parser = OneLineParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        usage=f"python -m {PROGRAM} plan.json --devices A B ... [options]",
        allow_abbrev=False,
        epilog="python -m planner.executor --help has all others",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        help=f"of each device, with --elastic; default {RESTARTS}",
    )
    parser.add_argument(
        "--no-store",
        action="store_true",
        help="planner.executor.serve_store serves it, on a node that stays",
    )
    # unknown options may be those of the executor
    return argparse.ArgumentParser.parse_known_args(parser, argv)


def validate_node_options(options: argparse.Namespace, config: RunConfig) -> None:
    """Refuse options that do not go with those of the ranks."""
    if options.restarts is not None and options.restarts < 0:
        raise Refusal(f"--restarts is {options.restarts}; give 0 or more")
    if options.restarts is not None and not config.elastic:
        raise Refusal("--restarts is for --elastic, where the others continue; add that")


@dataclass(frozen=True)
class _Node:
    """Ranks of a node before they are started."""

    rank_arguments: list[str]
    devices: tuple[str, ...]
    restarts: int | None
    address: StoreAddress
    world_size: int
    heartbeat_timeout_s: float
    store: Store | None

    def run(self) -> int:
        """Run them, and serve the store as long as others need it; returns the exit code."""
        monitor = StoreMonitor(self.address, self.world_size)
        environment = os.environ | {NODE: "1" if self.store is None else "0"}
        environment.pop("WORLD_SIZE", None)
        silence_s = FAILED_SILENCE_S
        try:
            code, _ = run_local(
                [sys.executable, "-m", "planner.executor", *self.rank_arguments],
                self.devices,
                environment,
                lambda line: print(line, flush=True),
                lambda line: print(line, file=sys.stderr, flush=True),
                restarts=self.restarts,
                monitor=monitor,
                address=self.address,
                program=PROGRAM,
            )
            if code == LEFT:
                print(
                    f"{PROGRAM}: the others continue without this node", file=sys.stderr, flush=True
                )
                silence_s = max(LEFT_SILENCE_S, 1.5 * self.heartbeat_timeout_s)
        finally:
            if self.store is not None:
                _serve_on(monitor, silence_s)
        return 0 if code == LEFT and monitor.finished else code


def _serve_on(monitor: StoreMonitor, silence_s: float) -> None:
    """Serve until all is done, or heartbeats have stopped for some time."""
    since_s = time.monotonic()
    while time.monotonic() - max(since_s, monitor.heartbeat_change_s) < silence_s:
        if (
            monitor.finished
            and monitor.polled_since(since_s)
            and time.monotonic() - monitor.heartbeat_change_s > MONITOR_POLL_S
        ):
            return
        time.sleep(MONITOR_POLL_S / 2)


def _prepare(options: argparse.Namespace, rank_arguments: list[str]) -> _Node:
    config = parse_arguments(rank_arguments, None, prog=f"python -m {PROGRAM}")
    # report once what every rank would refuse
    config.validate()
    plan = load_plan(config.plan)
    config.validate_for_plan(plan)
    for local in range(len(config.devices)):
        assigned_rank(plan, config.devices, local)
    validate_node_options(options, config)
    # otherwise PyTorch would use an existing store
    os.environ.pop(STORE_BY_LAUNCHER, None)
    address = replace(StoreAddress.from_environment(), served_by_launcher=True)
    allow_descriptors()
    serves_store = plan.cluster.network.ids[0] in config.devices and not options.no_store
    return _Node(
        rank_arguments,
        config.devices,
        None if not config.elastic else RESTARTS if options.restarts is None else options.restarts,
        address,
        len(plan.cluster),
        config.patience or heartbeat_timeout_s(plan),
        serve_store(config.bind or address.bind or address.host, address.port)
        if serves_store
        else None,
    )


def _on_sigterm(number: int, frame: FrameType | None) -> NoReturn:
    """Let ranks end before this process; further signals are ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    # a thread may be blocked in the store
    exit_now(main())
