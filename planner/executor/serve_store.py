"""``python -m planner.executor.serve_store --bind 10.0.0.5 --port 29500``: serve the store of a
run.

For ranks with ``TORCHELASTIC_USE_AGENT_STORE=True``, none of which then has to outlive the others.
Ends on a signal.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from planner.executor.launch.process import allow_descriptors
from planner.executor.transport.store import STORE_BY_LAUNCHER, PortTakenError, serve_store
from planner.utils.argument_parser import OneLineParser
from planner.utils.refusal import Refusal


def main(argv: list[str] | None = None) -> int:
    """Serve until this process is interrupted; returns the exit code."""
    parser = OneLineParser(prog="python -m planner.executor.serve_store", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="MASTER_PORT of the ranks")
    parser.add_argument(
        "--bind",
        required=True,
        metavar="ADDRESS",
        help="of this node, which the ranks have as MASTER_ADDR; 0.0.0.0: all that it has",
    )
    args = parser.parse_args(argv)
    # otherwise PyTorch would use an existing store
    os.environ.pop(STORE_BY_LAUNCHER, None)
    allow_descriptors()
    try:
        store = serve_store(args.bind, args.port)
    except PortTakenError as error:
        print(f"{error}; name another --port", file=sys.stderr)
        return 2
    except (Refusal, OverflowError, OSError) as error:
        print(f"the store cannot be served on port {args.port}: {error}", file=sys.stderr)
        return 2
    print(f"the store is served on port {store.port} of {args.bind}", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
