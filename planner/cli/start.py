"""The entry point: from its first moment to its last, Ctrl-C ends with no traceback."""

import atexit
import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line; returns the exit code."""
    code, line = 130, b"planner: interrupted\n"

    def end(*_: object) -> None:
        # before and after a command there is nothing to lose, and threads need no goodbye
        with suppress(Exception):
            sys.stdout.flush()
        os.write(2, line)
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
        # in the end no handler in Python is called any more, and the system's would hide the code
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from planner.cli.main import main as run  # takes longer to load than all before

    code, line = run(), b""
    return code
