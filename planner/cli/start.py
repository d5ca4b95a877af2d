"""The entry point: from its first moment on, Ctrl-C ends with a line and no traceback."""

import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        from planner.cli.main import main as run  # takes longer to load than all before
    except KeyboardInterrupt:
        print("planner: interrupted", file=sys.stderr)
        return 130
    code = run()
    # all is told and written: what threads are left need no goodbye
    try:
        import signal

        for name in ("SIGINT", "SIGTERM"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    except KeyboardInterrupt:
        pass
    return code
