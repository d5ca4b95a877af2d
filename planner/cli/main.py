"""The ``planner`` command line.

Results are printed to stdout, progress to stderr. Exit codes: 0 success, 1 an invalid plan, 2
invalid input (with an error message of one line), 3 a training run failed, 4 internal error, 129,
130 or 143 after SIGHUP, Ctrl-C or SIGTERM, which make a search return the best plan so far.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
"""Command names; each has a module ``planner.cli.<name>_command``."""

EXAMPLE = "example: "
OPTIONAL = {
    "torch": "pip install torch",
    "pandas": "pip install pandas",
    "tokenizers": "pip install tokenizers",
    "transformers": "pip install transformers",
    "shtab": "pip install shtab",
}
"""Optional packages that some commands need, with the command that installs each."""
ENDING = "stopping with the best plan so far, please wait; a third interrupt exits without it"


class _Help(argparse.HelpFormatter):
    """Help formatter that keeps examples on one line, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLE):
            return text
        return super()._fill_text(text, width, indent)


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Build the parser of some commands; only their modules are imported."""
    root = OneLineParser(
        prog="planner",
        description="Plan the training of large models over slow, uneven, unreliable networks.",
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
            "-v", "--verbose", action="store_true", help="log the solvers' progress to stderr"
        )
        sub.add_argument(
            "-q", "--quiet", action="store_true", help="do not show progress on stderr"
        )
        module.add_arguments(sub)
        if name == "plan":
            root.epilog = f"{EXAMPLE}{module.EXAMPLE}"
    return root


class _LogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    def emit(self, record: logging.LogRecord) -> None:
        PROGRESS.clear_line()
        super().emit(record)


def _configure_logging(*, verbose: bool) -> None:
    """Log warnings to stderr; with ``verbose`` also the solvers' messages."""
    handler = _LogHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)8.0f ms  %(name)s: %(message)s"))
    package = logging.getLogger("planner")
    package.handlers = [handler]
    package.setLevel(logging.INFO if verbose else logging.WARNING)


def _version() -> str:
    """Return the installed version; a checkout on PYTHONPATH has none."""
    try:
        return metadata.version("planner")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    began = time.perf_counter()
    arguments = list(sys.argv[1:] if argv is None else argv)
    selected = [argument for argument in arguments[:1] if argument in COMMANDS]
    args = parser(selected or COMMANDS).parse_args(arguments)
    args.began = began
    PROGRESS.begin(began, quiet=args.quiet)
    _configure_logging(verbose=args.verbose)
    try:
        with warnings.catch_warnings():
            default: Any = warnings.showwarning

            def show_warning(message: Any, category: type[Warning], *where: Any) -> None:
                if issubclass(category, MissingGlyphs):
                    say(f"planner {args.command}: {message}")
                else:
                    default(message, category, *where)

            warnings.showwarning = cast(Any, show_warning)
            with INTERRUPTS.handling(f"planner {args.command}: {ENDING}"):
                return _run(args)
    finally:
        PROGRESS.clear()


def _run(args: argparse.Namespace) -> int:
    """Run a command and turn its exceptions into one line on stderr and an exit code."""
    try:
        with _optional_packages():
            code = int(args.run(args))
        sys.stdout.flush()
        # the best result so far was written, but the command did not complete
        interrupted = INTERRUPTS.requested and code in (0, INTERRUPTED)
        return 128 + INTERRUPTS.number if interrupted else code
    except ValueError as error:
        say(f"planner {args.command}: {_with_options(str(error), vars(args))}")
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
        # libraries may turn an interrupt during import or compilation into another error
        if not INTERRUPTS.requested:
            raise
        say(f"planner {args.command}: interrupted ({type(error).__name__})")
        return 128 + INTERRUPTS.number


def _with_options(message: str, parameters: Iterable[str]) -> str:
    """Write parameters in a message as options: ``sync_every`` as ``--sync-every``.

    Parameters of one word are only replaced where they cannot be an English word, and fields of
    files keep their names.
    """
    if re.search(r"\.(csv|json)\b", message):
        return message
    for name in parameters:
        word = rf"\b{name}\b"
        if "_" not in name:
            after = r"(?= (is|goes|follows|out|too)\b| '|,|$)"
            word = rf"(^|(?<=\bgive )|(?<=\bleave )){name}{after}"
        message = re.sub(word, f"--{name.replace('_', '-')}", message)
    return message


@contextmanager
def _optional_packages() -> Iterator[None]:
    """Report a missing or broken optional package in one line."""
    try:
        yield
    except Exception as error:
        loaded = [
            str(frame.f_globals.get("__name__"))
            for frame, _ in walk_tb(error.__traceback__)
            if frame.f_code.co_name == "<module>"
        ]
        if broken := next(
            (package for package in map(_package, loaded) if package in OPTIONAL), None
        ):
            if INTERRUPTS.requested:
                raise
            message_text = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"needs {broken}, which cannot be loaded ({message_text[:200]}); install it again: "
                f"{OPTIONAL[broken]}"
            ) from None
        missing = _package(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing not in OPTIONAL:
            raise
        raise ValueError(f"needs {missing}, which is not installed; {OPTIONAL[missing]}") from None


def _package(module: str) -> str:
    return module.partition(".")[0]


def _close_output() -> None:
    """Redirect a broken stdout to the null device, so that exit does not write to it again."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    sys.exit(main())
