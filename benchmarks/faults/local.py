"""Start ranks as ``planner run`` does: ``python -m benchmarks.faults.local -m module ...``.

The arguments after the last ``--devices`` are the devices. All arguments are part of each rank's
command.
"""

from __future__ import annotations

import sys

from planner.executor.launch.local import local_environment, run_local


def main(argv: list[str]) -> int:
    """Run them; returns the exit code."""
    names = argv[argv.index("--devices") + 1 :]
    environment = local_environment()
    code, _ = run_local(
        *([sys.executable, *argv], names, environment),
        lambda line: print(line, flush=True),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
