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

from planner.executor.elastic.store_monitor import LOOK_S, StoreMonitor
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT, REFUSED
from planner.executor.launch.arguments import parse_arguments
from planner.executor.launch.local import run_local, threads
from planner.executor.launch.process import allow_descriptors, exit_now
from planner.executor.launch.run_config import RunConfig
from planner.executor.rendezvous.rank_assignment import NODE, heartbeat_timeout_s, rank_of
from planner.executor.rendezvous.store import SERVED, PortTakenError, StoreAddress, served
from planner.training_plan.file import load_plan
from planner.utils.argument_parser import OneLineParser
from planner.utils.processors import cores

WHO = "planner.executor.node"
RESTARTS = 3
"""Restarts of each device in elastic runs."""
FAILED_STILL_S, LEFT_STILL_S = 3.0, 15.0
"""The store is served until ranks of other nodes have been silent for so long: after a failure they
read the reason from it, after a loss they coordinate through it."""


def main(argv: list[str] | None = None) -> int:
    """Run the node's ranks; returns the exit code."""
    try:
        node = _prepared(*own_options(argv))
    except PortTakenError as error:
        print(f"{WHO}: {error}; name another MASTER_PORT on all nodes", file=sys.stderr)
        return REFUSED
    except (ValueError, OSError) as error:
        print(f"{WHO}: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    signal.signal(signal.SIGTERM, _told_to_end)
    try:
        return node.run()
    except OSError as error:
        print(f"{WHO}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{WHO}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def own_options(words: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Separate the options of this command from those of the ranks.

    Returns
    -------
    tuple[argparse.Namespace, list[str]]
        Its own options, and words for `parse_arguments`.
    """
    parser = OneLineParser(
        prog=f"python -m {WHO}",
        description=__doc__,
        usage=f"python -m {WHO} plan.json --devices A B ... [options]",
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
    return argparse.ArgumentParser.parse_known_args(parser, words)


def require_own(asked: argparse.Namespace, config: RunConfig) -> None:
    """Refuse options that do not go with those of the ranks."""
    if asked.restarts is not None and asked.restarts < 0:
        raise ValueError(f"--restarts is {asked.restarts}; give 0 or more")
    if asked.restarts is not None and not config.elastic:
        raise ValueError("--restarts is for --elastic, where the others continue; add that")


@dataclass(frozen=True)
class _Node:
    """Ranks of a node before they are started."""

    words: list[str]
    devices: tuple[str, ...]
    restarts: int | None
    address: StoreAddress
    world: int
    heartbeat_timeout_s: float
    store: Store | None

    def run(self) -> int:
        """Run them, and serve the store as long as others need it; returns the exit code."""
        view = StoreMonitor(self.address, self.world)
        environment = threads(len(self.devices), cores(), alone=False)
        environment[NODE] = "1" if self.store is None else "0"
        environment.pop("WORLD_SIZE", None)
        still_s = FAILED_STILL_S
        try:
            code, _ = run_local(
                [sys.executable, "-m", "planner.executor", *self.words],
                self.devices,
                environment,
                lambda line: print(line, flush=True),
                lambda line: print(line, file=sys.stderr, flush=True),
                restarts=self.restarts,
                view=view,
                address=self.address,
                who=WHO,
            )
            if code == LEFT:
                print(f"{WHO}: the others continue without this node", file=sys.stderr, flush=True)
                still_s = max(LEFT_STILL_S, 1.5 * self.heartbeat_timeout_s)
        finally:
            if self.store is not None:
                _serve_on(view, still_s)
        return 0 if code == LEFT and view.over else code


def _serve_on(view: StoreMonitor, still_s: float) -> None:
    """Serve until all is done, or heartbeats have stopped for some time."""
    since = time.monotonic()
    while time.monotonic() - max(since, view.stirred_s) < still_s:
        if view.over and view.knows(since) and time.monotonic() - view.stirred_s > LOOK_S:
            return
        time.sleep(LOOK_S / 2)


def _prepared(asked: argparse.Namespace, words: list[str]) -> _Node:
    config = parse_arguments(words, None, prog=f"python -m {WHO}")
    # report once what every rank would refuse
    config.validate()
    plan = load_plan(config.plan)
    config.validate_for_plan(plan)
    for local in range(len(config.devices)):
        rank_of(plan, config.devices, local)
    require_own(asked, config)
    # otherwise PyTorch would use an existing store
    os.environ.pop(SERVED, None)
    address = replace(StoreAddress.of_environment(), by_starter=True)
    allow_descriptors()
    serves = plan.cluster.network.ids[0] in config.devices and not asked.no_store
    return _Node(
        words,
        config.devices,
        None if not config.elastic else RESTARTS if asked.restarts is None else asked.restarts,
        address,
        len(plan.cluster),
        config.patience or heartbeat_timeout_s(plan),
        served(config.bind or address.bind or address.host, address.port) if serves else None,
    )


def _told_to_end(number: int, frame: FrameType | None) -> NoReturn:
    """Let ranks end before this process; further signals are ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    # a thread may be blocked in the store
    exit_now(main())
