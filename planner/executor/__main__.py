"""One rank under torchrun: ``python -m planner.executor plan.json --devices a b ...``.

Prints one line a step on the rank of device 0; with ``--events`` JSON lines, which ``planner run``
reads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.clock.timeline import from_records
from planner.executor.binding import join
from planner.executor.calibrate import calibrate
from planner.executor.train import Optimizer, Worker
from planner.network.atomic import write_text
from planner.training_plan.file import load_plan


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    args = _arguments(argv)
    try:
        return _run(args)
    except ValueError as error:
        print(f"planner.executor: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m planner.executor", description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--devices", nargs="+", required=True, help="this node's device ids")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=[o.value for o in Optimizer], default="adamw")
    parser.add_argument("--data", type=Path, help="text file; default: synthetic")
    parser.add_argument("--calibrate", type=Path, help="measure first and store it here")
    parser.add_argument("--trace", type=Path, help="Perfetto trace of the last step")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--own-pace", action="store_true", help="one stage: take microbatches as fast as possible"
    )
    parser.add_argument("--events", action="store_true", help="JSON lines instead of text")
    return parser.parse_args(argv)


def _torch_device(choice: str) -> torch.device:
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no usable GPU; use cpu")
    # several ranks may share a GPU: messages go through host memory anyway
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _run(args: argparse.Namespace) -> int:
    plan = load_plan(args.plan)
    device = _torch_device(args.device)
    rank = join(plan, args.devices)
    store = dist.distributed_c10d._get_default_store()
    worker = Worker(
        plan,
        rank,
        device,
        learning_rate=args.learning_rate,
        data=args.data,
        optimizer=args.optimizer,
        tickets=store if args.own_pace else None,
    )

    def say(text: str, **event: Any) -> None:
        if rank == 0:
            print(json.dumps(event) if args.events else text, flush=True)

    if args.calibrate is not None:
        measured = calibrate(worker, store)
        if measured is not None:
            write_text(args.calibrate, measured.to_json_text())
        say(f"calibration written to {args.calibrate}", event="calibrated")
    records: list[Any] = []
    for report in worker.steps(args.steps):
        records = list(report.records)
        say(
            f"step {report.step:4d}  loss {report.loss:.4f}  measured {report.measured_s:.3f} s  "
            f"planned {plan.predicted.step_s:.3f} s",
            event="step",
            step=report.step,
            loss=report.loss,
            measured_s=report.measured_s,
        )
    if args.trace is not None and args.steps > 0:
        store.set(f"records/{rank}", json.dumps(records))
        dist.barrier()
        if rank == 0:
            gathered = [
                record
                for r in range(dist.get_world_size())
                for record in json.loads(store.get(f"records/{r}"))
            ]
            ids = plan.cluster.network.ids
            from_records(ids, gathered).to_chrome_trace(args.trace)
        dist.barrier()
    # nobody leaves while others still talk to it
    dist.barrier()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 1e9
        print(f"rank {rank}: {peak:.2f} GB of GPU memory at most", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads are sometimes still alive here, and interpreter exit would abort on them
    os._exit(code)
