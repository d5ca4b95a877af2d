"""``planner weights``: write a run's latest checkpoint as Hugging Face weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from planner.training_plan.file import load_plan

ABOUT = "convert the latest checkpoint to Hugging Face weights"
EXAMPLE = "planner weights plan.json --checkpoint checkpoints --out model"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the plan, the checkpoint folder and the output folder."""
    sub.add_argument("plan", type=Path, help="plan file of the run")
    sub.add_argument("--checkpoint", type=Path, required=True, help="folder with checkpoints")
    sub.add_argument("--out", type=Path, required=True, help="new folder for the weights")
    sub.add_argument(
        "--like",
        type=Path,
        help="folder of the initial weights, from which config and tokenizer are copied",
    )
    sub.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, or a folder with one, to copy instead of that of --like",
    )


def run(args: argparse.Namespace) -> int:
    """Write the weights and print how many steps the model was trained for."""
    # imported here: only this needs torch
    from planner.executor.data.tokenizer import TOKENIZER, tokenizer_file
    from planner.huggingface.export import Export, export_checkpoint

    if args.tokenizer is not None and not tokenizer_file(args.tokenizer).is_file():
        raise ValueError(
            f"--tokenizer {args.tokenizer}: is no {TOKENIZER} or folder with one; check the path"
        )
    plan = load_plan(args.plan)
    steps = export_checkpoint(
        Export(args.out, plan, args.like, args.tokenizer), plan, args.checkpoint
    )
    if args.json:
        print(json.dumps({"steps": steps, "folder": str(args.out)}))
    else:
        inner = steps % plan.sync.every_steps
        which = f", the last outer step of {steps}" if inner else ""
        print(f"wrote {args.out}: the model after {steps - inner} steps{which}")
    return 0
