"""The command line: ``planner networks | plan | assign | paths | average | check | ...``.

Results go to stdout, progress to stderr. Bad input ends with one line and exit code 2, a run that
fails with 3, an error of the package itself with 4; after Ctrl-C, which gives the best so far, the
code is 130.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from traceback import walk_tb
from typing import Any, cast

from planner.cli.output import BAD_INPUT, INTERNAL_ERROR, INTERRUPTED, say
from planner.cli.progress import PROGRESS
from planner.search.incumbent import WrongBoundError
from planner.search.interrupts import INTERRUPTS
from planner.utils.argument_parser import OneLineParser
from planner.utils.fonts import MissingGlyphs
from planner.utils.output_files import NO_ROOM

COMMANDS = (
    *("networks", "probe", "plan", "assign", "paths", "average", "pareto", "check", "compare"),
    *("simulate", "emulate", "report", "run", "weights", "export", "bench", "completion"),
)
"""Each has a module of its own, ``planner.cli.<name>_command``."""

EXAMPLE = "example: "
OPTIONAL = {
    "torch": "pip install torch",
    "pandas": "pip install pandas",
    "tokenizers": "pip install tokenizers",
    "transformers": "pip install transformers",
    "shtab": "pip install shtab",
}
"""Packages that some commands need beside the required ones, and the remedy."""
ENDING = "ends with the best so far, which takes a moment; a third interrupt ends it without"


class _Help(argparse.HelpFormatter):
    """Examples stay on one line, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLE):
            return text
        return super()._fill_text(text, width, indent)


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Some commands, with an example each; only their modules are loaded."""
    root = OneLineParser(
        prog="planner",
        description="Plans for training large models over slow, uneven, unreliable networks.",
        formatter_class=_Help,
    )
    root.add_argument("--version", action="version", version=f"planner {_version()}")
    commands = root.add_subparsers(dest="command", required=True, metavar="command")
    for name in names:
        module = importlib.import_module(f"planner.cli.{name}_command")
        sub = commands.add_parser(
            name,
            help=module.ABOUT,
            description=module.ABOUT,
            epilog=f"{EXAMPLE}{module.EXAMPLE}",
            formatter_class=_Help,
            conflict_handler="resolve",  # --json of bench names a file
        )
        sub.set_defaults(run=module.run)
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        sub.add_argument(
            "-v", "--verbose", action="store_true", help="log what the solvers find to stderr"
        )
        sub.add_argument("-q", "--quiet", action="store_true", help="show no progress on stderr")
        module.add_arguments(sub)
        if name == "plan":
            root.epilog = f"{EXAMPLE}{module.EXAMPLE}"
    return root


class _LogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    def emit(self, record: logging.LogRecord) -> None:
        PROGRESS.clear_line()
        super().emit(record)


def _configure_logging(*, verbose: bool) -> None:
    """Log warnings to stderr, with ``verbose`` also what solvers find, above the progress line."""
    handler = _LogHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)8.0f ms  %(name)s: %(message)s"))
    package = logging.getLogger("planner")
    package.handlers = [handler]
    package.setLevel(logging.INFO if verbose else logging.WARNING)


def _version() -> str:
    """The installed version; a checkout on PYTHONPATH alone has none."""
    try:
        return metadata.version("planner")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    began = time.perf_counter()
    words = list(sys.argv[1:] if argv is None else argv)
    asked = [word for word in words[:1] if word in COMMANDS]
    args = parser(asked or COMMANDS).parse_args(words)
    args.began = began
    PROGRESS.begin(began, quiet=args.quiet)
    _configure_logging(verbose=args.verbose)
    try:
        with warnings.catch_warnings():
            usual: Any = warnings.showwarning

            def told(message: Any, category: type[Warning], *where: Any) -> None:
                if issubclass(category, MissingGlyphs):
                    say(f"planner {args.command}: {message}")
                else:
                    usual(message, category, *where)

            warnings.showwarning = cast(Any, told)
            with INTERRUPTS.handling(f"planner {args.command}: {ENDING}"):
                return _run(args)
    finally:
        PROGRESS.clear()


def _run(args: argparse.Namespace) -> int:
    """The command; what stops it is told in a line."""
    try:
        with _optional_packages():
            code = int(args.run(args))
        sys.stdout.flush()
        # what was found is told and written, but it is not all that was asked for
        ended = INTERRUPTS.requested and code in (0, INTERRUPTED)
        return 128 + INTERRUPTS.number if ended else code
    except ValueError as error:
        say(f"planner {args.command}: {error}")
        return BAD_INPUT
    except WrongBoundError as error:
        say(f"planner {args.command}: {error}")
        return INTERNAL_ERROR
    except BrokenPipeError:
        _close_output()
        return 0
    except OSError as error:
        where = error.filename or "standard output"
        remedy = "free some room" if error.errno in NO_ROOM else "check path and permissions"
        say(f"planner {args.command}: {where}: {error.strerror}; {remedy}")
        _close_output()
        return BAD_INPUT
    except KeyboardInterrupt:
        say(f"planner {args.command}: interrupted")
        return 128 + INTERRUPTS.number if INTERRUPTS.requested else INTERRUPTED
    except Exception as error:
        # libraries make other errors of an interrupt that comes while they load or compile
        if not INTERRUPTS.requested:
            raise
        say(f"planner {args.command}: interrupted ({type(error).__name__})")
        return 128 + INTERRUPTS.number


@contextmanager
def _optional_packages() -> Iterator[None]:
    """Say in a line which package is not installed, or is and cannot be loaded."""
    try:
        yield
    except Exception as error:
        loaded = [
            str(frame.f_globals.get("__name__"))
            for frame, _ in walk_tb(error.__traceback__)
            if frame.f_code.co_name == "<module>"
        ]
        if broken := next((one for one in map(_package, loaded) if one in OPTIONAL), None):
            if INTERRUPTS.requested:
                raise
            said = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"needs {broken}, which cannot be loaded ({said[:200]}); install it again: "
                f"{OPTIONAL[broken]}"
            ) from None
        missing = _package(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing not in OPTIONAL:
            raise
        raise ValueError(f"needs {missing}, which is not installed; {OPTIONAL[missing]}") from None


def _package(module: str) -> str:
    return module.partition(".")[0]


def _close_output() -> None:
    """What cannot be printed is not tried again when the process ends."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    sys.exit(main())
