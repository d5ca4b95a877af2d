"""``python -m planner.executor.node plan.json --devices a b ...``: all ranks of one node.

As torchrun starts them, but that the others of the node stay when one is lost: with ``--elastic``
that one is started again, and comes back. The options are the executor's, and those below.
``MASTER_ADDR`` and ``MASTER_PORT`` say where ranks meet: on the node of the plan's first device,
whose command serves their store.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from torch.distributed import DistError

from planner.executor.arguments import arguments, require_planned, require_sensible
from planner.executor.binding import NODE, rank_of
from planner.executor.calibrate import cores
from planner.executor.ending import LEFT, REFUSED
from planner.executor.local import run_local, threads
from planner.executor.pulse import PERIOD_S, beats
from planner.executor.store import SERVED, StoreAddress, StoreMissingError, served
from planner.network.line_parser import LineParser
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.without import require_elastic

WHO = "planner.executor.node"
RESTARTS = 3
"""Of each device, where the others go on without it."""
FAILED_STILL_S, LEFT_STILL_S = 3.0, 15.0
"""The store is served until other nodes' ranks give no sign of life for so long: who has failed
tells them why, and who is lost leaves them what they meet by."""


def main(argv: list[str] | None = None) -> int:
    """Run the node's ranks; returns the exit code."""
    parser = LineParser(
        prog=f"python -m {WHO}",
        description=__doc__,
        usage=f"python -m {WHO} plan.json --devices A B ... [options]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=RESTARTS,
        help="of each device, with --elastic; default %(default)s",
    )
    parser.add_argument(
        "--no-store",
        action="store_true",
        help="planner.executor.serve_store serves it, on a node that stays",
    )
    # what this does not know the executor may
    asked, words = argparse.ArgumentParser.parse_known_args(parser, argv)
    try:
        return _run(asked, words)
    except (ValueError, StoreMissingError, OSError) as error:
        print(f"{WHO}: {' '.join(str(error).split())}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"{WHO}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(asked: argparse.Namespace, words: list[str]) -> int:
    args = arguments(words, None)
    # what ranks would refuse, each by itself, is said once
    require_sensible(args)
    plan = load_plan(args.plan)
    require_planned(args, plan)
    if args.elastic:
        require_elastic(plan, None if args.checkpoint is None else args.every)
    for local in range(len(args.devices)):
        rank_of(plan, args.devices, local)
    if asked.restarts < 0:
        raise ValueError(f"--restarts is {asked.restarts}; give 0 or more")
    # else PyTorch takes a store that is there already for its own
    os.environ.pop(SERVED, None)
    address = replace(StoreAddress.of_environment(), by_starter=True)
    serves = plan.cluster.network.ids[0] in args.devices and not asked.no_store
    store = served(args.bind or address.bind or address.host, address.port) if serves else None
    signal.signal(signal.SIGTERM, _told_to_end)
    environment = threads(len(args.devices), cores(), alone=False)
    environment[NODE] = "0" if serves else "1"
    environment.pop("WORLD_SIZE", None)
    code, _ = run_local(
        [sys.executable, "-m", "planner.executor", *words],
        args.devices,
        environment,
        lambda line: print(line, flush=True),
        lambda line: print(line, file=sys.stderr, flush=True),
        restarts=asked.restarts if args.elastic else None,
        address=address,
        who=WHO,
    )
    if store is not None and code:
        _serve_on(address, plan, LEFT_STILL_S if code == LEFT else FAILED_STILL_S)
    return code


def _serve_on(address: StoreAddress, plan: TrainingPlan, still_s: float) -> None:
    """Until nobody has given a sign of life for some time."""
    with suppress(DistError, StoreMissingError):
        store = address.connect(still_s)
        seen: list[bytes] = []
        until = time.monotonic() + still_s
        while time.monotonic() < until:
            found = beats(store, range(len(plan.cluster)))
            if found != seen:
                seen, until = found, time.monotonic() + still_s
            time.sleep(PERIOD_S)


def _told_to_end(number: int, frame: FrameType | None) -> NoReturn:
    """Ranks are told before this process ends."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
