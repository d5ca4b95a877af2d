"""The command line: ``planner networks | plan | assign | paths | average | check | ...``.

Results go to stdout, progress to stderr. Bad input ends with one line and exit code 2, a run that
fails with 3, an error of the package itself with 4, Ctrl-C in a search with the best so far.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from planner.cli import (
    assign_command,
    average_command,
    bench_command,
    check_command,
    compare_command,
    emulate_command,
    export_command,
    networks_command,
    pareto_command,
    paths_command,
    plan_command,
    probe_command,
    report_command,
    run_command,
    simulate_command,
    weights_command,
)
from planner.cli.output import BAD_INPUT, INTERNAL_ERROR, INTERRUPTED
from planner.search.incumbent import WrongBoundError

COMMANDS = (
    networks_command,
    probe_command,
    plan_command,
    assign_command,
    paths_command,
    average_command,
    pareto_command,
    check_command,
    compare_command,
    simulate_command,
    emulate_command,
    report_command,
    run_command,
    weights_command,
    export_command,
    bench_command,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(
        prog="planner",
        description="Plans for training large models over slow, uneven, unreliable networks.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in COMMANDS:
        sub = commands.add_parser(module.NAME, help=module.ABOUT, description=module.ABOUT)
        sub.set_defaults(run=module.run)
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        module.add_arguments(sub)
    args = parser.parse_args(argv)
    args.began = began
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"planner {args.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except WrongBoundError as error:
        print(f"planner {args.command}: {error}", file=sys.stderr)
        return INTERNAL_ERROR
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(
            f"planner {args.command}: {error.filename or 'a file'}: {error.strerror}; check path "
            "and permissions",
            file=sys.stderr,
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"planner {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
