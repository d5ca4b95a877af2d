"""The entry point: from its first moment to its last, Ctrl-C ends with no traceback."""

import atexit
import os
import signal
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from planner.cli.main import main as run  # takes longer to load than all before

        code = run()
        # all is told and written: threads that are left need no goodbye
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
        # later no handler in Python is called any more, and the system's own would hide the code
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr)
        return 130
    return code
