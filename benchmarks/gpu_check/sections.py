"""Run one section of gpu_check: ``python sections.py NAME --device cuda --out FOLDER``.

Each section is a function of the device and of the folder for its files. It returns a dictionary
with ``ok`` and, where it measures several cases, ``rows``. Executor and PyTorch are imported inside
the sections, so that importing them is part of the section's time and of its log.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    PEAK_FLOPS,
    PLANS,
    ROOT,
    local_steps,
    peak_flops,
    plan_path,
    run_plan,
    step_flops,
    write_result,
)


# ------------------------------------------------------------------------------------- env
def env(device: str, out: Path) -> dict[str, Any]:
    """Record versions, memory, bandwidths, the rate of a matrix product and SDPA kernels."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "cores": os.cpu_count()}
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = dict(line.split(":", 1) for line in lines if ":" in line)
    for name in ("MemTotal", "MemAvailable"):
        found[name + "_gb"] = round(int(meminfo[name].split()[0]) / 1e6, 1)
    began = time.perf_counter()
    import numpy
    import torch

    found["import_torch_s"] = round(time.perf_counter() - began, 2)
    found |= {"torch": torch.__version__, "numpy": numpy.__version__, "cuda": torch.version.cuda}
    for name in ("ortools", "pulp", "deap", "numba", "scipy"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError as error:
            found[name] = type(error).__name__
    if device == "cuda":
        subprocess.run(["nvidia-smi"], check=False)
        found |= _cuda_start()
        found |= _bandwidths()
        found |= _sdpa()
    return found


def _cuda_start() -> dict[str, Any]:
    """Create the CUDA context, and measure how long other Python threads get no turn."""
    import torch

    gaps, stop = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    began = time.perf_counter()
    torch.cuda.is_available()
    available_s = time.perf_counter() - began
    torch.zeros(1, device="cuda")
    init_s = time.perf_counter() - began
    stop.set()
    ticker.join()
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    return {
        "cuda_is_available_s": round(available_s, 2),
        "cuda_init_s": round(init_s, 2),
        "longest_without_python_s": round(max(gaps), 2),
        "gpu": properties.name,
        "gpu_known": peak_flops(properties.name),
        "context_gb": round((total - free) / 1e9, 2),
        "memory_gb": round(total / 1e9, 1),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _seconds(job: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a job on the GPU."""
    import torch

    job()
    torch.cuda.synchronize()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        job()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _bandwidths() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["bf16_tflops"] = round(2 * n**3 / _seconds(lambda: a @ b) / 1e12, 1)
    size = 1 << 28
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    began = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found["pin_256mb_s"] = round(time.perf_counter() - began, 3)
    pageable = torch.zeros(size, dtype=torch.uint8)
    copies: dict[str, Callable[[], object]] = {
        "d2h_pinned": lambda: pinned.copy_(there, non_blocking=True),
        "h2d_pinned": lambda: there.copy_(pinned, non_blocking=True),
        "d2h_pageable": lambda: pageable.copy_(there),
        "h2d_pageable": lambda: there.copy_(pageable),
    }
    for name, copy in copies.items():
        found[f"{name}_gb_s"] = round(size / _seconds(copy) / 1e9, 1)
    other = torch.empty_like(there)
    found["d2d_gb_s"] = round(2 * size / _seconds(lambda: other.copy_(there)) / 1e9)
    event = torch.cuda.Event(enable_timing=True)
    records = 100
    record_s = _seconds(lambda: [event.record() for _ in range(records)]) / records
    return found | {"event_us": round(1e6 * record_s, 2)}


def _sdpa() -> dict[str, Any]:
    """Time the SDPA kernels, and see whether repeated calls give the same bits."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    found: dict[str, Any] = {}
    q = torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def attention() -> None:
        scaled_dot_product_attention(q, q, q, is_causal=True).backward(q.detach())

    found["sdpa_default_ms"] = round(1e3 * _seconds(attention), 2)
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        key = f"sdpa_{backend.lower()}_ms"
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                found[key] = round(1e3 * _seconds(attention), 2)
        except RuntimeError as error:  # not available for this GPU or build
            found[key] = str(error)[:60]
    # shapes of tests and of small models, with the kernel that PyTorch chooses
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, size in ((16, 8), (64, 16), (64, 32), (512, 64), (2048, 64)):
            results = []
            key = f"sdpa_{str(dtype).removeprefix('torch.')}_{tokens}x{size}"
            try:
                for _ in range(2):
                    generator = torch.Generator("cuda").manual_seed(0)
                    x = torch.randn(
                        2, 4, tokens, size, device="cuda", dtype=dtype, generator=generator
                    ).requires_grad_()
                    y = scaled_dot_product_attention(x, x, x, is_causal=True)
                    y.backward(x.detach())
                    results.append((y.detach(), x.grad))
            except RuntimeError as error:
                found[key] = f"FAILED {error}"[:120]
                continue
            forward, backward = (torch.equal(a, b) for a, b in zip(*results, strict=True))
            found[key] = f"forward {forward}, backward {backward}"
    return found


# ----------------------------------------------------------------------------------- tests
def tests(device: str, out: Path) -> dict[str, Any]:
    """Run the tests that need a GPU; only their file, since others import solvers."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    with contextlib.suppress(ImportError):
        importlib.import_module("pytest_timeout")
        command += ["--timeout", "170"]
    with contextlib.suppress(ImportError):
        importlib.import_module("xdist")
        command += ["-n", "4"]
    command.append("tests/executor/test_gpu.py")
    environment = dict(os.environ)
    if device == "cuda" and _nccl_version() >= (2, 30):
        # the tests that need several GPUs then run on one
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    outcomes, tail = [], ""
    for line in process.stdout:
        print(line, end="", flush=True)
        tail = line.strip() or tail
        if any(outcome in line for outcome in ("PASSED", "FAILED", "ERROR ", "SKIPPED")):
            outcomes.append(tail[:200])
            # kept if the time limit ends this section
            write_result("tests", out, {"ok": False, "tests": outcomes})
    code = process.wait()
    return {"ok": code == 0, "code": code, "tail": tail, "tests": outcomes}


def _nccl_version() -> tuple[int, int]:
    """Major and minor version of the NCCL that PyTorch uses, not of the one it was built with."""
    import torch  # loads it

    assert torch.cuda.is_available()
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value // 10000, version.value // 100 % 100


# ----------------------------------------------------------------------------------- equal
def equal(device: str, out: Path) -> dict[str, Any]:
    """Compare losses, first gradients and final parameters of the device to those of the CPU."""
    import torch

    from planner.executor.runtime.model_stage import ModelStage
    from planner.executor.runtime.optimizer import OptimizerConfig
    from planner.training_plan.file import load_plan

    # other sections run at the same time
    torch.set_num_threads(2 if device == "cuda" else 1)

    def train(plan: Any, where: torch.device, steps: int = 4) -> tuple[list[float], Any, Any]:
        model_stage = ModelStage(plan, 0, where, OptimizerConfig())
        gradients: list[torch.Tensor] = []
        losses = [
            loss
            for _, loss in local_steps(
                model_stage,
                plan,
                steps,
                before_update=lambda _: gradients.append(
                    model_stage.gradients.current.cpu().clone()
                ),
            )
        ]
        parameters = torch.cat([p.detach().cpu().reshape(-1) for p in model_stage.parameters])
        return losses, gradients[0], parameters

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).norm() / other.norm())

    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    rows: dict[str, Any] = {}
    for path in sorted((PLANS / "both").glob("equal_*.json")):
        plan = load_plan(path)
        expected, expected_gradient, expected_parameters = train(plan, torch.device("cpu"))
        losses, gradient, parameters = train(plan, where)
        repeated, *_ = train(plan, where)
        row: dict[str, Any] = {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
            "gradient": distance(gradient, expected_gradient),
            "parameters": distance(parameters, expected_parameters),
            "again_same_bits": repeated == losses,
        }
        bf16 = path.stem.endswith("bf16")
        row["ok"] = row["loss"] < (2e-2 if bf16 else 1e-4) and row["gradient"] < (
            5e-2 if bf16 else 1e-4
        )
        rows[path.stem] = row
        print(path.stem, row, flush=True)
    return {"ok": all(row["ok"] for row in rows.values()), "rows": rows}


# ------------------------------------------------------------------------------ checkpoint
def checkpoint(device: str, out: Path) -> dict[str, Any]:
    """Train six steps with four ranks, without a stop and resumed from a checkpoint after three."""
    path, folder = plan_path(device, "grid"), out / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    uninterrupted = run_plan(path, 6, device)
    repeated = run_plan(path, 6, device)
    first = run_plan(path, 3, device, "--checkpoint", str(folder), "--every", "3")
    second = run_plan(path, 6, device, "--resume", str(folder))
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    runs = (uninterrupted, repeated, first, second)
    if any(run.code for run in runs):
        return {
            "ok": False,
            "codes": [run.code for run in runs],
            "reasons": [run.reason for run in runs],
        }
    expected = uninterrupted.losses

    def largest_difference(losses: dict[int, float]) -> float:
        return max(abs(losses[k] - expected[k]) / expected[k] for k in expected)

    resumed_off = largest_difference(first.losses | second.losses)
    return {
        "ok": resumed_off < 1e-3,
        "losses": expected,
        "resumed_off": resumed_off,
        "the_same_run_twice_off": largest_difference(repeated.losses),
        "bytes": size,
        "memory": uninterrupted.memory(),
    }


# ---------------------------------------------------------------------------------- shards
def shards(device: str, out: Path) -> dict[str, Any]:
    """Train with two ranks that hold all optimizer state each, and with half of it each.

    Backward passes on a GPU may not repeat their bits, so the first run is repeated.
    """
    steps, warmup = 8, 3
    rows: dict[str, Any] = {}
    losses: dict[str, dict[int, float]] = {}
    for name, number in (("shards_1", 1), ("shards_1_again", 1), ("shards_2", 2)):
        run = run_plan(plan_path(device, f"shards_{number}"), steps, device)
        if run.code:
            return {"ok": False, "reason": run.reason, "rows": rows}
        losses[name] = run.losses
        rows[name] = {
            "ok": True,
            "step_s": run.step_median("took_s", warmup),
            "memory": run.memory(),
        }
        print(name, rows[name], flush=True)
        write_result("shards", out, {"ok": False, "rows": rows})

    def off(name: str) -> float:
        return max(abs(losses[name][k] - v) / v for k, v in losses["shards_1"].items())

    peaks = {name: max(m["peak_gb"] for m in row["memory"]) for name, row in rows.items()}
    return {
        "ok": off("shards_2") < max(1e-3, 3 * off("shards_1_again")),
        "off": off("shards_2"),
        "the_same_run_twice_off": off("shards_1_again"),
        "peak_ratio": peaks["shards_2"] / max(peaks["shards_1"], 1e-3),
        "rows": rows,
    }


# ----------------------------------------------------------------------------------- train
def train(device: str, out: Path) -> dict[str, Any]:
    """Train a byte-level GPT-2 small on this repository's text; the loss must fall."""
    text = out / "text"
    text.mkdir(exist_ok=True)
    for file in [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "planner").rglob("*.py"))]:
        shutil.copy(file, text / file.relative_to(ROOT).as_posix().replace("/", "_"))
    steps = 150 if device == "cuda" else 30
    run = run_plan(
        plan_path(device, "train"),
        steps,
        device,
        *("--data", str(text), "--eval-data", str(ROOT / "README.md")),
        *("--eval-every", str(steps // 3), "--eval-batches", "1"),
        *("--learning-rate", "6e-4", "--warmup", "20", "--schedule", "cosine"),
        *("--weight-decay", "0.1", "--beta2", "0.95"),
    )
    shutil.rmtree(text, ignore_errors=True)
    if run.code:
        return {"ok": False, "reason": run.reason}
    losses = list(run.losses.values())
    first, last = statistics.mean(losses[:3]), statistics.mean(losses[-5:])
    return {
        "ok": last < first - (1.5 if device == "cuda" else 0.3),
        "first": first,
        "last": last,
        "held_out": [e["loss"] for e in run.events_of("evaluated")],
        "tokens_per_s": run.step_median("tokens_per_s", 3),
        "mfu": run.step_median("mfu", 3),
        "memory": run.memory(),
    }


# ------------------------------------------------------------------------------------- cli
def cli(device: str, out: Path) -> dict[str, Any]:
    """Run ``planner run`` and ``planner.executor.node``."""
    from planner.executor.transport.store import serve_store
    from planner.training_plan.file import load_plan

    path = plan_path(device, "grid")
    common = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    command = [sys.executable, "-m", "planner.cli", "run", str(path)]
    command += ["--steps", "4", "--device", device, "--json"]
    done = subprocess.run(command, **common)
    print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
    found: dict[str, Any] = {"planner_run": done.returncode, "stderr": done.stderr[-300:]}
    if done.returncode == 0:
        steps = json.loads(done.stdout)["steps"]
        found["measured_s"] = [round(step["measured_s"], 4) for step in steps]
        found["predicted_s"] = steps[0]["predicted_s"]
    store = serve_store("127.0.0.1", 0)
    port = store.port
    del store  # the node serves its own store at this free port
    ids = load_plan(path).cluster.network.ids
    command = [sys.executable, "-m", "planner.executor.node", str(path), "--devices", *ids]
    command += ["--steps", "3", "--device", device]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    node = subprocess.run(command, env=environment, **common)
    print(node.stdout[-2000:], node.stderr[-3000:], flush=True)
    found["node"] = node.returncode
    return found | {"ok": done.returncode == 0 and node.returncode == 0}


# ------------------------------------------------------------------------------------- mfu
def mfu(device: str, out: Path) -> dict[str, Any]:
    """Measure the executor on a GPT of 1.4B parameters on one device."""
    return _mfu(device, "mfu_gpt13", 8)


def mfu_llama(device: str, out: Path) -> dict[str, Any]:
    """Measure a model of the size of Llama 3.2 1B likewise."""
    return _mfu(device, "mfu_llama1b", 7)


def mfu_compiled(device: str, out: Path) -> dict[str, Any]:
    """Measure the GPT with --compile."""
    return _mfu(device, "mfu_gpt13", 10, "--compile")


def mfu_llama_compiled(device: str, out: Path) -> dict[str, Any]:
    """Measure the Llama with --compile."""
    return _mfu(device, "mfu_llama1b", 10, "--compile")


def _mfu(device: str, name: str, steps: int, *options: str) -> dict[str, Any]:
    from planner.training_plan.file import load_plan

    path = plan_path(device, name)
    run = run_plan(path, steps, device, *options)
    if run.code:
        return {"ok": False, "reason": run.reason}
    flops, step_s = step_flops(load_plan(path)), run.step_median("took_s", 2)
    return {
        "ok": True,
        "step_s": step_s,
        "tokens_per_s": flops["tokens"] / step_s,
        "mfu_planner": run.step_median("mfu", 2),
        "mfu_6n_causal": flops["causal"] / step_s / PEAK_FLOPS if device == "cuda" else None,
        "first_step_after_s": run.first_step_s,
        "losses": list(run.losses.values()),
        "memory": run.memory(),
    }


# -------------------------------------------------------------------------------- overhead
def overhead(device: str, out: Path) -> dict[str, Any]:
    """Compare one rank to a plain PyTorch loop, step by step in the same process."""
    return _overhead(device, out, "overhead")


def overhead_compiled(device: str, out: Path) -> dict[str, Any]:
    """Compare both with compiled layers and head."""
    return _overhead(device, out, "overhead_compiled", "--compile")


def _overhead(device: str, out: Path, section: str, *options: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    warmup, steps = 3, 8
    for name in ("over_gpt2m", "over_llama16"):
        run = run_plan(
            plan_path(device, name),
            warmup + steps,
            device,
            *options,
            module="benchmarks.overhead.in_turns",
        )
        if run.code:
            rows[name] = {"ok": False, "reason": run.reason}
            continue
        event = run.events_of("in turns")[-1]
        executor, plain = (event["seconds"][key][warmup:] for key in ("executor", "plain"))
        losses = [
            (loss, event["losses"][step])
            for step, loss in run.losses.items()
            if step < len(event["losses"])
        ]
        rows[name] = {
            "ok": True,
            "executor_s": statistics.median(executor),
            "plain_s": statistics.median(plain),
            "ratio": statistics.median(a / b for a, b in zip(executor, plain, strict=True)),
            "losses_off": max(abs(a - b) / b for a, b in losses),
        }
        print(name, rows[name], flush=True)
        write_result(section, out, _all_ok(rows))
    return _all_ok(rows)


# ----------------------------------------------------------------------------------- share
def share(device: str, out: Path) -> dict[str, Any]:
    """Calibrate, predict and execute plans of four ranks that share one GPU."""
    from planner.simulator.host_prediction import predict_on_host
    from planner.training_plan.file import load_plan
    from planner.workload.calibration import Calibration

    rows: dict[str, Any] = {}
    warmup, steps = 3, 8
    for name in ("share_gpt2m_1", "share_gpt2m_2", "share_gpt2m_4", "share_llama16_4"):
        path, times = plan_path(device, name), out / f"times_{name}.json"
        run = run_plan(path, warmup + steps, device, "--calibrate", str(times), "--force")
        if run.code:
            rows[name] = {"ok": False, "reason": run.reason}
            print(name, rows[name], flush=True)
            continue
        plan, calibration = load_plan(path), Calibration.load(times)
        predicted_s = predict_on_host(plan, plan.workload, calibration)[0]
        measured_s = run.step_median("took_s", warmup)
        rows[name] = {
            "ok": True,
            "measured_s": measured_s,
            "predicted_s": predicted_s,
            "ratio": measured_s / predicted_s,
            "times": {name: dict(times) for name, times in calibration.times.items()},
            "link_gb_s": calibration.link_bandwidth_bytes_per_s / 1e9,
            "message_ms": 1e3 * calibration.message_s,
            "operation_us": 1e6 * calibration.operation_s,
            "memory": run.memory(),
            "first_step_after_s": run.first_step_s,
        }
        print(name, rows[name], flush=True)
        # keeps the finished plans if the time limit ends this section
        write_result("share", out, _all_ok(rows))
    return _all_ok(rows)


# ------------------------------------------------------------------------------------ kill
def kill(device: str, out: Path) -> dict[str, Any]:
    """Kill one of four ranks in a backward pass: all end, or with --elastic the others continue."""
    rows: dict[str, Any] = {}
    for name in ("ends", "elastic"):
        rows[name] = _kill(device, out / f"kill_{name}", elastic=name == "elastic")
        print(name, rows[name], flush=True)
        write_result("kill", out, {"ok": False, "rows": rows})
    return _all_ok(rows)


def _kill(device: str, folder: Path, *, elastic: bool) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fault = {"device": "g3", "fault": "kill", "phase": "backward", "step": 5}
    steps = (160 if device == "cuda" else 600) if elastic else 3000
    run = run_plan(
        plan_path(device, "grid"),
        steps,
        device,
        *(("--elastic",) if elastic else ()),
        module="benchmarks.faults.rank",
        module_args=(json.dumps(fault | {"folder": str(folder)}),),
        restarts=1 if elastic else None,
        echo=False,
    )
    row: dict[str, Any] = {"code": run.code, "reason": run.reason, "stderr": run.stderr[-6:]}
    when = folder / "when"  # monotonic time of the kill, written by the rank
    if not when.exists():
        return row | {"ok": False}
    killed_s = float(when.read_text()) - run.started_s
    later = [(at - killed_s, event) for at, event in run.events if at > killed_s]
    row |= {
        "killed_after_s": killed_s,
        "ended_s_after_kill": run.wall_s - killed_s,
        "next_step_s_after_kill": next((at for at, e in later if e["event"] == "step"), None),
        "changes": [
            event | {"at": round(at, 2)}
            for at, event in later
            if event["event"] not in ("step", "loss", "devices")
        ],
        "steps": len(run.events_of("step")),
    }
    row["ok"] = run.code == 0 if elastic else run.code != 0 and row["ended_s_after_kill"] < 15
    return row


def _all_ok(rows: dict[str, Any]) -> dict[str, Any]:
    return {"ok": all(row["ok"] for row in rows.values()), "rows": rows}


SECTIONS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    section.__name__: section
    for section in (
        *(env, tests, equal, checkpoint, shards, train, cli, share, kill),
        *(mfu, mfu_llama, mfu_compiled, mfu_llama_compiled, overhead, overhead_compiled),
    )
}
IN_MODULES = {
    "race": "race",
    "speed": "speed",
    "speed_llama": "speed",
    "memory": "memory",
    "memory_compiled": "memory",
}
"""Sections in files of their own, which import PyTorch at once."""


def main() -> int:
    """Run one section and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*SECTIONS, *IN_MODULES])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.monotonic()
    try:
        if args.name in IN_MODULES:
            section = getattr(importlib.import_module(IN_MODULES[args.name]), args.name)
        else:
            section = SECTIONS[args.name]
        result = section(args.device, args.out)
    except Exception as error:
        traceback.print_exc()
        partial = args.out / f"{args.name}.json"
        result = json.loads(partial.read_text()) if partial.exists() else {}
        result |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
    result["section_s"] = round(time.monotonic() - began, 1)
    result.setdefault("ok", True)
    write_result(args.name, args.out, result)
    sys.stdout.flush()
    # leaves without waiting for threads that a failed section left behind
    os._exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
