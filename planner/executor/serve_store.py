"""``python -m planner.executor.serve_store --port 29500``: the store, on a node that stays.

Ranks with ``TORCHELASTIC_USE_AGENT_STORE=True`` meet there, and none of them has to outlive the
others. Ends when it is told to.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from contextlib import suppress

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from planner.executor.store import SERVED


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m planner.executor.serve_store", description=__doc__
    )
    parser.add_argument("--port", type=int, required=True, help="MASTER_PORT of the ranks")
    args = parser.parse_args(argv)
    # else PyTorch takes a store that is there already for its own
    os.environ.pop(SERVED, None)
    try:  # it listens on all interfaces
        store = TCPStore("127.0.0.1", args.port, is_master=True, wait_for_workers=False)
    except (DistError, ValueError) as error:
        said = (str(error).splitlines() or [""])[0]
        print(
            f"the store cannot be served on port {args.port}: {said}; name another --port",
            file=sys.stderr,
        )
        return 2
    print(f"the store is served on port {store.port}", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
