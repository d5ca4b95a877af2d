"""``planner weights``: the newest checkpoint of a run as a folder that Hugging Face loads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from planner.training_plan.file import load_plan

ABOUT = "write a checkpoint's model as Hugging Face weights"
EXAMPLE = "planner weights plan.json --checkpoint kept --out model"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Plan, checkpoints, where to."""
    sub.add_argument("plan", type=Path, help="that was run")
    sub.add_argument("--checkpoint", type=Path, required=True, help="folder with checkpoints")
    sub.add_argument("--out", type=Path, required=True, help="new folder for the weights")
    sub.add_argument(
        "--like",
        type=Path,
        help="folder of the weights that training began with: its config and tokenizer are kept",
    )


def run(args: argparse.Namespace) -> int:
    """Write them."""
    # torch is loaded for this only
    from planner.executor.huggingface.export import Export, export_checkpoint

    plan = load_plan(args.plan)
    steps = export_checkpoint(Export(args.out, plan, args.like), plan, args.checkpoint)
    if args.json:
        print(json.dumps({"steps": steps, "folder": str(args.out)}))
    else:
        print(f"wrote {args.out}: the model after {steps} steps")
    return 0
