"""How far a command is: one line on stderr, rewritten on a terminal, now and then elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
import threading
import time

TERMINAL_S, ELSEWHERE_S = 0.2, 10.0
"""Between two lines: a log shall not be full of them."""
CLEAR = "\r\x1b[K"


class Progress:
    """The line of the whole command, whatever parts it has."""

    def __init__(self) -> None:
        self._began = self._shown = time.perf_counter()
        self._words = ""
        self._there = False
        self._ended: threading.Event | None = None
        self._lock = threading.Lock()
        self._quiet = False

    def begin(self, began: float, *, quiet: bool = False) -> None:
        """Start a new command; ``quiet`` shows nothing."""
        self._began = self._shown = began
        self._there, self._quiet = False, quiet

    def start(self, words: str) -> None:
        """From now on a terminal's clock goes on, also where nothing is told for a while."""
        self._words = words
        if self._ended is None and sys.stderr.isatty():
            self._ended = threading.Event()
            threading.Thread(target=self._tick, args=(self._ended,), daemon=True).start()

    def phase(self, words: str) -> None:
        """Begin something long: elsewhere than on a terminal a line says so at once."""
        if sys.stderr.isatty():
            self.start(words)
            return
        with self._lock:
            self._words, self._shown = words, -math.inf
            self._write()

    def show(self, words: str) -> None:
        """Say what is being done, unless the last line is young."""
        with self._lock:
            self._words = words
            self._write()

    def clear_line(self) -> None:
        """Take the line from the terminal for now; the next one comes by itself."""
        with self._lock:
            self._wipe()

    def clear(self) -> None:
        """Take the line from the terminal, before something else is printed."""
        with self._lock:
            if self._ended is not None:
                self._ended.set()
                self._ended = None
            self._wipe()

    def _wipe(self) -> None:
        if self._there:
            print(CLEAR, end="", file=sys.stderr, flush=True)
            self._there = False

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(TERMINAL_S):
            with self._lock:
                if not ended.is_set():
                    self._write()

    def _write(self) -> None:
        now, terminal = time.perf_counter(), sys.stderr.isatty()
        if self._quiet or now - self._shown < (TERMINAL_S if terminal else ELSEWHERE_S):
            return
        self._shown = now
        line = f"{now - self._began:7.1f} s  {self._words}"
        if terminal:
            # what wraps cannot be rewritten
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"{CLEAR}{line}", end="", file=sys.stderr, flush=True)
            self._there = True
        else:
            print(line, file=sys.stderr, flush=True)


PROGRESS = Progress()
"""A process runs one command at a time, and has one stderr."""
