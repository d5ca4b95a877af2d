"""A command line whose bad input is told in a line."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, NoReturn

BAD_INPUT = 2
"""Exit code."""


class LineParser(ArgumentParser):
    """As argparse has it, without the usage before an error; of the same kind its subcommands."""

    def parse_known_args(self, *args: Any, **named: Any) -> Any:
        """As argparse has it; what a subcommand does not know is refused in its own name."""
        found, unknown = super().parse_known_args(*args, **named)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end.

        Parameters
        ----------
        message
            Of argparse.
        """
        for kind, words in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f"invalid {kind} value:", f"must be {words}, found")
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")
