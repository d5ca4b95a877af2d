"""How far a command is: one line on stderr, rewritten on a terminal, now and then elsewhere."""

from __future__ import annotations

import sys
import time

TERMINAL_S, ELSEWHERE_S = 0.2, 10.0
"""Between two lines: a log shall not be full of them."""
CLEAR = "\r\x1b[K"


class Progress:
    """The line of the whole command, whatever parts it has."""

    def __init__(self) -> None:
        self._began = self._shown = time.perf_counter()
        self._there = False

    def begin(self, began: float) -> None:
        """Of a new command.

        Parameters
        ----------
        began
            On `time.perf_counter`.
        """
        self._began = self._shown = began
        self._there = False

    def show(self, words: str) -> None:
        """Say what is being done, unless the last line is young.

        Parameters
        ----------
        words
            Of one line.
        """
        now, terminal = time.perf_counter(), sys.stderr.isatty()
        if now - self._shown < (TERMINAL_S if terminal else ELSEWHERE_S):
            return
        self._shown = now
        line = f"{now - self._began:7.1f} s  {words}"
        if terminal:
            print(f"{CLEAR}{line}", end="", file=sys.stderr, flush=True)
            self._there = True
        else:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line from the terminal, before something else is printed."""
        if self._there:
            print(CLEAR, end="", file=sys.stderr, flush=True)
            self._there = False


PROGRESS = Progress()
"""A process runs one command at a time, and has one stderr."""
