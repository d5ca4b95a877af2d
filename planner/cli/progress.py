"""Progress line on stderr: rewritten on a terminal, printed every 10 s otherwise."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time

TERMINAL_S, ELSEWHERE_S = 0.2, 10.0
"""Least time between two updates, in seconds: on a terminal, and in a log."""
CLEAR = "\r\x1b[K"


class Progress:
    """Progress line of the current command."""

    def __init__(self) -> None:
        self._began = self._shown = time.perf_counter()
        self._words = ""
        self._there = False
        self._ended: threading.Event | None = None
        self._lock = threading.Lock()
        self._quiet = False

    def begin(self, began: float, *, quiet: bool = False) -> None:
        """Start a new command; with ``quiet`` nothing is shown."""
        self._began = self._shown = began
        self._there, self._quiet = False, quiet

    def start(self, text: str) -> None:
        """Show a message and keep its clock running on a terminal until `clear`."""
        self._words = text
        if self._ended is None and sys.stderr.isatty():
            self._ended = threading.Event()
            threading.Thread(target=self._tick, args=(self._ended,), daemon=True).start()

    def phase(self, text: str) -> None:
        """Start a long phase; in a log, its line is printed at once."""
        if sys.stderr.isatty():
            self.start(text)
            return
        with self._lock:
            self._words, self._shown = text, -math.inf
            self._write()

    def show(self, text: str) -> None:
        """Update the message, unless the last update is too recent."""
        with self._lock:
            self._words = text
            self._write()

    def clear_line(self) -> None:
        """Erase the line until the next update."""
        with self._lock:
            self._wipe()

    def clear(self) -> None:
        """Erase the line and stop the clock, before other output is printed."""
        with self._lock:
            if self._ended is not None:
                self._ended.set()
                self._ended = None
            self._wipe()

    def _wipe(self) -> None:
        if self._there:
            print(CLEAR, end="", file=sys.stderr, flush=True)
            self._there = False

    def _tick(self, stopped: threading.Event) -> None:
        while not stopped.wait(TERMINAL_S):
            with self._lock:
                if not stopped.is_set():
                    self._write()

    def _write(self) -> None:
        now, terminal = time.perf_counter(), sys.stderr.isatty()
        if self._quiet or now - self._shown < (TERMINAL_S if terminal else ELSEWHERE_S):
            return
        self._shown = now
        line = f"{now - self._began:7.1f} s  {self._words}"
        if terminal:
            # a wrapped line could not be erased
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"{CLEAR}{line}", end="", file=sys.stderr, flush=True)
            self._there = True
        else:
            print(line, file=sys.stderr, flush=True)


PROGRESS = Progress()
"""Shared instance: a process runs one command at a time and has one stderr."""
