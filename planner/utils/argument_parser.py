"""An argument parser that reports bad input in one line."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, NoReturn

from planner.utils.text import closest_match, did_you_mean

BAD_INPUT = 2
"""Exit code."""
CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")
MISSING = "the following arguments are required"


class OneLineParser(ArgumentParser):
    """`argparse.ArgumentParser` without the usage text before an error; subcommands are of this
    type."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but a subcommand reports its unknown options itself."""
        self._words = () if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error with the closest known name, and exit."""
        for kind, description in (("int", "a whole number"), ("float", "a number")):
            message = message.replace(f"invalid {kind} value:", f"must be {description}, found")
        misspelt = self._misspelt()
        if misspelt and message.startswith(MISSING):
            # the missing option is present, misspelt
            message = f"unrecognized arguments: {' '.join(misspelt)}"
        if misspelt and message.startswith("unrecognized arguments"):
            closest = closest_match(misspelt[0], self._option_string_actions)
            message += "" if closest is None else f" (did you mean {closest}?)"
        elif choice := CHOICE.search(message):
            choices = re.findall(r"[^\s',]+", choice["known"])
            message = f"{message[: choice.end()]}{did_you_mean(choice['given'], choices)}"
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _misspelt(self) -> list[str]:
        """Options among the words that match no option of this parser."""
        if self._subparsers is not None:
            return []
        given_options = [
            argument.partition("=")[0] for argument in self._words if argument.startswith("--")
        ]
        if "--" in given_options:
            given_options = given_options[: given_options.index("--")]
        options = list(self._option_string_actions)
        return [
            argument
            for argument in given_options
            if not any(option.startswith(argument) for option in options)
        ]
