"""CPU utilisation of this machine."""

from __future__ import annotations

from pathlib import Path


class ProcessorUsage:
    """CPU utilisation between the first and the last call of `look`."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)

    def look(self) -> None:
        """Read the CPU counters."""
        numbers = [float(field) for field in Path("/proc/stat").read_text().split()[1:9]]
        # user, nice, system, idle, iowait, irq, softirq, steal
        idle = numbers[3] + numbers[4]
        self._last = sum(numbers) - idle, sum(numbers)
        self._first = self._first or self._last

    @property
    def busy(self) -> float:
        """CPU utilisation in [0, 1]; 0 before the second call of `look`."""
        if self._first is None or self._last[1] <= self._first[1]:
            return 0.0
        return (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])
