"""Command line of benchmarks that run as modules: ``python -m benchmarks.NAME``."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from planner.cli.progress import PROGRESS
from planner.search.interrupts import INTERRUPTS

RESULTS = Path(__file__).parent / "results"


def report_path(name: str) -> Path:
    """Return the default path of today's report."""
    return RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d}.md"


def versions(*packages: str) -> str:
    """Return the versions of Python and of packages, for a report."""
    named = [f"{package} {metadata.version(package)}" for package in packages]
    return ", ".join([f"Python {platform.python_version()}", *named])


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run ``main`` on the command line's arguments and exit with its code.

    Bad input ends with one line and exit code 2. Ctrl-C keeps the results so far if ``main``
    supports it, and exits with 130.
    """
    try:
        with INTERRUPTS.handling("writes what is measured so far; a third interrupt does not wait"):
            code = main(sys.argv[1:])
    except ValueError as error:
        code = 2
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
        print("interrupted", file=sys.stderr)
    finally:
        PROGRESS.clear()
    sys.exit(128 + INTERRUPTS.number if INTERRUPTS.requested else code)
