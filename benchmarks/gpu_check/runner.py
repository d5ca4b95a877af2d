"""Run the sections of gpu_check, each in a process with a time limit, and write a summary.

Sections that only check results run side by side; sections that measure time run alone, the most
useful first. A section that has less than its minimum of the time budget left is not started.
``summary.txt``, ``results.json`` and ``log.txt`` are written after every section,
``details.tar.gz`` at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Limits(NamedTuple):
    """Time limit of a section, and the least time that must be left to start it, in seconds."""

    most_s: float
    least_s: float


FIRST = {"env": Limits(90, 5)}
CONCURRENT = {
    "tests": Limits(300, 60),
    "equal": Limits(80, 25),
    "race": Limits(110, 30),
    "checkpoint": Limits(140, 50),
    "shards": Limits(180, 45),
    "train": Limits(110, 40),
    "memory": Limits(140, 40),
    "memory_compiled": Limits(150, 40),
}
EXCLUSIVE = {
    "mfu": Limits(110, 45),
    "mfu_llama_compiled": Limits(120, 45),
    "mfu_compiled": Limits(110, 45),
    "overhead_compiled": Limits(150, 45),
    "speed_llama": Limits(130, 50),
    "share": Limits(200, 45),
    "kill": Limits(120, 40),
    "overhead": Limits(130, 45),
    "speed": Limits(130, 50),
    "cli": Limits(150, 25),
    "mfu_llama": Limits(100, 45),
}
SECTIONS = FIRST | CONCURRENT | EXCLUSIVE
LOG_LINES = 240
LARGEST_DETAIL_BYTES = 2_000_000
POLL_S = 0.2
UNSUMMARIZED = ("ok", "section_s", "rows", "top", "times")
"""Fields that the lines of the summary leave out or show elsewhere."""


class Section:
    """A section that runs in its own process group."""

    def __init__(self, name: str, device: str, work: Path, limit_s: float) -> None:
        self.name, self._limit_s, self._work = name, limit_s, work
        self._began = time.monotonic()
        command = [sys.executable, str(HERE / "sections.py"), name]
        # caches of their own, so that compilation is measured and not left out
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(work / f"{name}_inductor"),
            "TRITON_CACHE_DIR": str(work / f"{name}_triton"),
        }
        with (work / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--device", device, "--out", str(work)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | caches,
            )

    def finished(self) -> bool:
        """Return whether the section has ended; kill it once its time limit has passed."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() - self._began < self._limit_s:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """Kill what is left of the section's process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> dict[str, Any]:
        """Return the section's result, which may be partial."""
        self.kill()  # also what a section that has ended left running
        path = self._work / f"{self.name}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if "section_s" not in found:
            took_s = time.monotonic() - self._began
            timed_out = took_s >= self._limit_s
            found |= {
                "ok": False,
                "section_s": round(took_s, 1),
                "error": "ended by the time limit"
                if timed_out
                else f"exit code {self._process.returncode}",
            }
        return found


def abbreviate(value: Any) -> Any:
    """Round floats and cut long lists and strings, for the summary."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: abbreviate(v) for k, v in value.items()}
    if isinstance(value, list):
        return [abbreviate(v) for v in value[:16]]
    return value[:300] if isinstance(value, str) else value


def summarize(results: dict[str, Any], left: list[str], took_s: float, width: int = 1100) -> str:
    """Return one line per section and row, each cut to ``width`` characters of results."""

    def line(fields: dict[str, Any]) -> str:
        shown = {k: v for k, v in fields.items() if k not in UNSUMMARIZED}
        return json.dumps(abbreviate(shown), default=str)[:width]

    lines = [f"gpu_check, {took_s:.0f} s", "", f"{'section':<12} {'ok':<5} {'seconds':>8}  results"]
    for name, found in results.items():
        ok = "yes" if found.get("ok") else "NO"
        lines.append(f"{name:<12} {ok:<5} {found.get('section_s', 0):>8}  {line(found)}")
        for row, fields in (found.get("rows") or {}).items():
            ok = {"ok": fields["ok"]} if "ok" in fields else {}
            lines.append(f"{'':<12}   {row}: {line(fields | ok)}")
    if left:
        lines.append(f"not started: {', '.join(left)}")
    return "\n".join(lines) + "\n"


class Runner:
    """Runs sections within a time budget and keeps their results on disk."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args, self._work = args, work
        self._began = time.monotonic()
        self.results: dict[str, Any] = {}
        only, skip = (set(names.split(",")) - {""} for names in (args.only, args.skip))
        self.left = [name for name in SECTIONS if (not only or name in only) and name not in skip]

    @property
    def took_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def run(self, names: list[str], at_once: int) -> None:
        """Run sections, at most ``at_once`` at a time."""
        waiting = [name for name in names if name in self.left]
        running: list[Section] = []
        try:
            self._run(waiting, running, at_once)
        finally:
            for section in running:
                section.kill()

    def _run(self, waiting: list[str], running: list[Section], at_once: int) -> None:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                limits, left_s = SECTIONS[name], self._args.budget - self.took_s
                limit_s = min(self._args.stretch * limits.most_s, left_s)
                if limit_s < limits.least_s:
                    self._print(f"{name}: not started, {left_s:.0f} s are left")
                    continue
                running.append(Section(name, self._args.device, self._work, limit_s))
            for section in [s for s in running if s.finished()]:
                running.remove(section)
                self._finish(section)
            time.sleep(POLL_S)

    def _finish(self, section: Section) -> None:
        found = self.results[section.name] = section.result()
        self.left.remove(section.name)
        ok = "ok" if found.get("ok") else "NOT OK"
        self._print(
            f"{section.name}: {ok} in {found.get('section_s')} s {found.get('error', '')}".rstrip()
        )
        self.write()

    def _print(self, line: str) -> None:
        print(f"[{self.took_s:6.1f} s] {line}", flush=True)

    def write(self) -> None:
        """Write the results so far."""
        out = self._args.out
        (out / "results.json").write_text(json.dumps(self.results, indent=1, default=str))
        (out / "summary.txt").write_text(summarize(self.results, self.left, self.took_s))
        with (out / "log.txt").open("w") as log:
            for path in sorted(self._work.glob("*.log")):
                lines = path.read_text(errors="replace").splitlines()
                log.write(f"===== {path.stem} ({len(lines)} lines)\n")
                log.write("\n".join(line[:400] for line in lines[-LOG_LINES:]) + "\n")

    def write_details(self) -> None:
        """Write complete logs and results of all sections into one archive."""
        with tarfile.open(self._args.out / "details.tar.gz", "w:gz") as tar:
            for path in [*sorted(self._work.glob("*.log")), *sorted(self._work.glob("*.json"))]:
                if path.stat().st_size < LARGEST_DETAIL_BYTES:
                    tar.add(path, arcname=path.name)


def main() -> int:
    """Run the sections; return 0 if all of them ran and are ok."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Check and measure the executor on one GPU.",
        epilog=f"sections: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("/tmp/gpu_check_out"), help="folder for the results"
    )
    parser.add_argument("--only", default="", metavar="A,B", help="run these sections only")
    parser.add_argument("--skip", default="", metavar="A,B", help="leave these sections out")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds in all; default: 530")
    parser.add_argument(
        "--at-once", type=int, default=6, help="sections side by side where times do not count"
    )
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="factor on time limits, for slow machines"
    )
    args = parser.parse_args()
    unknown = set(f"{args.only},{args.skip}".split(",")) - {"", *SECTIONS}
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    try:
        runner = Runner(args, work)
        runner.write()
        runner.run(list(FIRST), 1)
        runner.run(list(CONCURRENT), args.at_once)
        runner.run(list(EXCLUSIVE), 1)
        runner.write_details()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n" + summarize(runner.results, runner.left, runner.took_s, 240), flush=True)
    complete = runner.results and not runner.left
    return 0 if complete and all(r.get("ok") for r in runner.results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
