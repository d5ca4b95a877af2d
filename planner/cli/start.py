"""Console entry point; Ctrl-C ends the process without a traceback at any time."""

import atexit
import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line and return the exit code."""
    code, line = 130, b"planner: interrupted\n"

    def end(*_: object) -> None:
        # outside a command there is nothing to save, so exit at once
        with suppress(Exception):
            sys.stdout.flush()
        os.write(2, line)
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
        # during exit, Python handlers no longer run and the default one would change the exit code
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from planner.cli.main import main as run  # slow import, so it comes after the handler

    code, line = run(), b""
    return code
