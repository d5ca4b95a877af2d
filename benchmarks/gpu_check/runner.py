"""All sections of gpu_check, each a process with a limit of its own; a table at the end.

    python runner.py --device cuda --out FOLDER [--only a,b] [--skip a,b] [--budget SECONDS]

What is not timed runs side by side; what is timed runs alone, in the order of what it is worth. A
section that would not end before the budget does is not begun. Results are in FOLDER after each
section: summary.txt, results.json, log.txt, details.tar.gz (four files, since few come back).
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# name: limit in seconds, and least that must be left
TOGETHER = {
    "tests": (170, 60),
    "equal": (80, 25),
    "race": (110, 30),
    "checkpoint": (140, 50),
    "train": (110, 40),
    "memory": (140, 40),
    "memory_compiled": (150, 40),
}
ALONE = {
    "mfu": (110, 45),
    "mfu_llama_compiled": (120, 45),
    "mfu_compiled": (110, 45),
    "overhead_compiled": (150, 45),
    "speed_llama": (130, 50),
    "share": (150, 45),
    "kill": (120, 40),
    "overhead": (130, 45),
    "speed": (130, 50),
    "cli": (70, 25),
    "mfu_llama": (100, 45),
}
LINES = 240


class Section:
    def __init__(self, name: str, device: str, work: Path, limit_s: float) -> None:
        self.name, self.limit_s, self.began = name, limit_s, time.monotonic()
        self.log = work / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "sections.py"),
                    name,
                    "--device",
                    device,
                    "--out",
                    str(work),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def over(self) -> bool:
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.began < self.limit_s:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Its own processes, and no others."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def result(self, work: Path) -> dict[str, Any]:
        # what a section leaves behind
        self.end()
        path = work / f"{self.name}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        if "section_s" not in found:
            took = time.monotonic() - self.began
            found |= {
                "ok": False,
                "section_s": round(took, 1),
                "error": "ended by its limit"
                if took >= self.limit_s
                else f"ended with {self.process.returncode}",
            }
        return found


def short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [short(v) for v in value[:16]]
    return value[:300] if isinstance(value, str) else value


def summary(results: dict[str, Any], left: list[str], began: float, width: int = 1100) -> str:
    """A line a section and a row; narrow ones where only the end of all that is said comes back."""
    lines = [f"gpu_check, {time.monotonic() - began:.0f} s", ""]
    lines += [f"{'section':<12} {'ok':<5} {'seconds':>8}  what"]
    for name, found in results.items():
        rest = {k: v for k, v in found.items() if k not in ("ok", "section_s", "rows")}
        rest.pop("top", None)
        ok = "yes" if found.get("ok") else "NO"
        lines.append(
            f"{name:<12} {ok:<5} {found.get('section_s', 0):>8}  {json.dumps(short(rest))[:width]}"
        )
        for row, told in (found.get("rows") or {}).items():
            said = {k: v for k, v in told.items() if k not in ("top", "times")}
            lines.append(f"{'':<12}   {row}: {json.dumps(short(said))[:width]}")
    if left:
        lines.append(f"not begun: {', '.join(left)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "/tmp/gpu_check_out"))
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--skip", default="")
    parser.add_argument("--budget", type=float, default=530.0)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="limits times that: slow machines"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu_check_"))
    began = time.monotonic()
    until = began + args.budget
    only = [n for n in args.only.split(",") if n]
    skip = [n for n in args.skip.split(",") if n]
    results: dict[str, Any] = {}
    wanted = [n for n in ("env", *TOGETHER, *ALONE) if (not only or n in only) and n not in skip]
    left = list(wanted)

    def store() -> None:
        (args.out / "results.json").write_text(json.dumps(results, indent=1, default=str))
        (args.out / "summary.txt").write_text(summary(results, left, began))
        with (args.out / "log.txt").open("w") as log:
            for path in sorted(work.glob("*.log")):
                lines = path.read_text(errors="replace").splitlines()
                log.write(f"===== {path.stem} ({len(lines)} lines)\n")
                log.write("\n".join(line[:400] for line in lines[-LINES:]) + "\n")

    def done(section: Section) -> None:
        results[section.name] = section.result(work)
        left.remove(section.name)
        found = results[section.name]
        print(
            f"[{time.monotonic() - began:6.1f} s] {section.name}: "
            f"{'ok' if found.get('ok') else 'NOT OK'} in {found.get('section_s')} s "
            f"{found.get('error', '')}",
            flush=True,
        )
        store()

    def limit(most: float) -> float:
        return min(args.stretch * most, until - time.monotonic())

    def run(names: list[str], limits: dict[str, tuple[float, float]], at_once: int) -> None:
        waiting, running = list(names), []
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                most, least = limits[name]
                if limit(most) < least:
                    print(
                        f"[{time.monotonic() - began:6.1f} s] {name}: not begun, "
                        f"{until - time.monotonic():.0f} s are left",
                        flush=True,
                    )
                    continue
                running.append(Section(name, args.device, work, limit(most)))
            for section in [s for s in running if s.over()]:
                running.remove(section)
                done(section)
            time.sleep(0.2)

    store()
    if "env" in wanted:
        run(["env"], {"env": (90, 5)}, 1)
    run([n for n in TOGETHER if n in wanted], TOGETHER, args.at_once)
    run([n for n in ALONE if n in wanted], ALONE, 1)
    with tarfile.open(args.out / "details.tar.gz", "w:gz") as tar:
        for path in [*sorted(work.glob("*.log")), *sorted(work.glob("*.json"))]:
            if path.stat().st_size < 2_000_000:
                tar.add(path, arcname=path.name)
    store()
    shutil.rmtree(work, ignore_errors=True)
    print("\n" + summary(results, left, began, 240), flush=True)
    return 0 if results and all(r.get("ok") for r in results.values()) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
