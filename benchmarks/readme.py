"""``python -m benchmarks.readme``: run the README's commands and record their output."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmarks.command_line import report_path, run
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text

FIRST = (
    "plan --network aws8_dtfm_worldwide_2022 --devices-per-region 8 --workload gpt3-1.3b "
    "--out plan.json"
)
EIGHT = FIRST.replace("--out plan.json", "--stages 8 --out eight.json")
DEGREES = FIRST.replace("--out plan.json", "--stages auto --effort 20 --out auto.json")
PICTURE = (
    "plan --network aws4_dtfm_regional_2022 --devices-per-region 2 --workload gpt3-1.3b --stages 4 "
    "--batch-samples 48 --gpu L4 --out picture.json"
)
LOCAL = (
    "plan --network aws8_dtfm_worldwide_2022 --workload gpt2-tiny --stages 4 --sequence 128 "
    "--batch-samples 16 --out local.json"
)
COMMANDS = (
    FIRST,
    "check plan.json",
    "simulate plan.json --network aws10_dtfm_code_2022",
    EIGHT,
    DEGREES,
    PICTURE,
    LOCAL,
    "run local.json --steps 10 --calibrate times.json",
    LOCAL.replace("--out", "--calibration times.json --out"),
)
ON_24 = (
    "plan --network gcp12_skippipe_2025_repaired --devices-per-region 2 --gpu L4 "
    "--workload llama-1.5b --batch-samples 192"
)
SKIP = f"{ON_24} --stage-sizes 6,4,4,4,3,3 --path-stages 4 --effort 100 --out skip.json"
PATHS = (
    "paths --network gcp12_skippipe_2025_repaired --devices-per-region 2 --gpu L4 "
    "--workload llama-1.5b --batch-samples 12 --stage-sizes 6,4,4,4,3,3 --path-stages 4 "
    "--effort 30"
)
LOCAL_SKIP = (
    LOCAL.replace("--stages 4", "--stage-sizes 3,2,2,1 --path-stages 3 --full-every 3")
    .replace("--batch-samples 16", "--batch-samples 12")
    .replace("local.json", "local-skip.json")
)
SKIPPING = (
    SKIP,
    "check skip.json",
    "simulate skip.json --schedule 1 --gantt full.png",
    f"{ON_24} --stages 6 --path-stages 4 --effort 100 --out skip-equal.json",
    f"{ON_24} --stages 6 --effort 100 --out straight.json",
    PATHS,
    f"{PATHS} --arrange",
    LOCAL_SKIP,
    "run local-skip.json --steps 10",
)
PARTS = {"runs": COMMANDS, "runs-skipping": SKIPPING}
PACKAGES = ("planner", "numpy", "scipy", "ortools", "numba", "torch")


def main(argv: Sequence[str]) -> int:
    """Run all commands in a temporary folder; return the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.readme", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--part", default="runs", choices=PARTS, help="default %(default)s")
    parser.add_argument("--out", type=Path, help="default docs/PART-DATE.md")
    args = parser.parse_args(argv)
    out = (args.out or report_path(args.part)).resolve()
    lines = [
        f"# What the README's commands print, {today}",
        "",
        "Made by `python -m "
        f"benchmarks.readme{'' if args.part == 'runs' else f' --part {args.part}'}`. "
        "Seed 0 throughout; times vary with the machine.",
        "",
        f"- {platform.system()} on {platform.machine()}, {_cores()} cores, "
        f"Python {platform.python_version()}",
        f"- {', '.join(f'{name} {_version(name)}' for name in PACKAGES)}",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for command in PARTS[args.part]:
            print(f"planner {command}", file=sys.stderr)
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "planner.cli.main", *command.split()],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - started
            if done.returncode != 0:
                print(done.stderr, file=sys.stderr)
                return 1
            lines += [f"`planner {command}` ({seconds:.1f} s):", "", "```"]
            lines += [done.stdout.rstrip(), "```", ""]
    write_text(out, "\n".join(lines))
    print(f"wrote {out.name}", file=sys.stderr)
    return 0


def _cores() -> int:
    from planner.utils.processors import cores

    return cores()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    run(main)
