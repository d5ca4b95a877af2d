"""One section of gpu_check: python sections.py NAME --device cuda --out FOLDER."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import (  # noqa: E402
    PLANS,
    ROOT,
    finish,
    flops_of,
    peak_of,
    run_plan,
    steps_alone,
)

LONG_S = 60


def plan_path(device: str, name: str) -> Path:
    return PLANS / device / f"{name}.json"


# ------------------------------------------------------------------------------------- env
def env(device: str, out: Path) -> dict[str, Any]:
    """The machine: versions, memory, bandwidths, the rate of a matrix product, SDPA kernels."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "cores": os.cpu_count()}
    memory = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    for name in ("MemTotal", "MemAvailable"):
        found[name + "_gb"] = round(int(memory[name].split()[0]) / 1e6, 1)
    began = time.perf_counter()
    import numpy
    import torch

    found["import_torch_s"] = round(time.perf_counter() - began, 2)
    found |= {"torch": torch.__version__, "numpy": numpy.__version__, "cuda": torch.version.cuda}
    for name in ("ortools", "pulp", "deap", "numba", "scipy"):
        try:
            found[name] = __import__(name).__version__
        except Exception as error:
            found[name] = type(error).__name__
    if device != "cuda":
        return found
    subprocess.run(["nvidia-smi"], check=False)
    # how long other threads, such as the one that gives signs of life, get nothing to do
    gaps, over = [0.0], threading.Event()

    def ticks() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=ticks, daemon=True)
    ticker.start()
    began = time.perf_counter()
    torch.cuda.is_available()
    found["cuda_is_available_s"] = round(time.perf_counter() - began, 2)
    torch.zeros(1, device="cuda")
    found["cuda_init_s"] = round(time.perf_counter() - began, 2)
    over.set()
    ticker.join()
    found["longest_without_python_s"] = round(max(gaps), 2)
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    found |= {
        "gpu": properties.name,
        "gpu_known": peak_of(properties.name),
        "uuid": str(getattr(properties, "uuid", "none")),
        "context_gb": round((total - free) / 1e9, 2),
        "memory_gb": round(total / 1e9, 1),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }

    def seconds(job, repeats=5):
        job()
        torch.cuda.synchronize()
        took = []
        for _ in range(repeats):
            begin = time.perf_counter()
            job()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["bf16_tflops"] = round(2 * n**3 / seconds(lambda: a @ b) / 1e12, 1)
    size = 1 << 28
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    began = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found["pin_256mb_s"] = round(time.perf_counter() - began, 3)
    pageable = torch.zeros(size, dtype=torch.uint8)
    for name, job in {
        "d2h_pinned": lambda: pinned.copy_(there, non_blocking=True),
        "h2d_pinned": lambda: there.copy_(pinned, non_blocking=True),
        "d2h_pageable": lambda: pageable.copy_(there),
        "h2d_pageable": lambda: there.copy_(pageable),
    }.items():
        found[f"{name}_gb_s"] = round(size / seconds(job) / 1e9, 1)
    other = torch.empty_like(there)
    found["d2d_gb_s"] = round(2 * size / seconds(lambda: other.copy_(there)) / 1e9)
    empty = torch.cuda.Event(enable_timing=True)
    found["event_us"] = round(1e6 * seconds(lambda: [empty.record() for _ in range(100)]) / 100, 2)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def attention():
        o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        o.backward(q.detach())

    found["sdpa_default_ms"] = round(1e3 * seconds(attention), 2)
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                found[f"sdpa_{backend.lower()}_ms"] = round(1e3 * seconds(attention), 2)
        except Exception as error:
            found[f"sdpa_{backend.lower()}_ms"] = str(error)[:60]
    # the shapes of tests and of small models, by whichever kernel is chosen; twice the same bits?
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, size in ((16, 8), (64, 16), (64, 32), (512, 64), (2048, 64)):
            name = f"sdpa_{str(dtype)[6:]}_{tokens}x{size}"
            try:
                made = []
                for _ in range(2):
                    g = torch.Generator("cuda").manual_seed(0)
                    x = torch.randn(2, 4, tokens, size, device="cuda", dtype=dtype, generator=g)
                    x.requires_grad_()
                    o = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
                    o.backward(x.detach())
                    made.append((o.detach().clone(), x.grad.clone()))
                (o1, g1), (o2, g2) = made
                found[name] = f"forward {torch.equal(o1, o2)}, backward {torch.equal(g1, g2)}"
            except Exception as error:
                found[name] = f"FAILED {error}"[:120]
    return found


# ------------------------------------------------------------------------------- gpu tests
def tests(device: str, out: Path) -> dict[str, Any]:
    """pytest -m gpu; of this file alone, since others need solvers to be imported."""
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-rA", "-p", "no:cacheprovider"]
    words += ["--timeout", "170", "tests/executor/test_gpu.py"]
    try:
        import xdist  # noqa: F401

        words += ["-n", "4"]
    except ImportError:
        pass
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-20000:], done.stderr[-5000:], flush=True)
    lines = [
        line for line in done.stdout.splitlines() if line[:6] in ("PASSED", "FAILED", "ERROR ")
    ]
    tail = (done.stdout.strip().splitlines() or ["nothing said"])[-1]
    return {"ok": done.returncode == 0, "code": done.returncode, "tail": tail, "tests": lines}


# ----------------------------------------------------------------------------------- equal
def equal(device: str, out: Path) -> dict[str, Any]:
    """Losses, first gradients and last parameters of one device: the GPU's against the CPU's."""
    import torch

    from planner.executor.learner import Learner
    from planner.executor.optimizing import Optimizing
    from planner.training_plan.file import load_plan

    # other sections run beside it, and threads that wait awake for each other take long then
    torch.set_num_threads(2 if device == "cuda" else 1)

    def trained(plan, where, steps=4):
        learner = Learner(plan, 0, torch.device(where), Optimizing())
        kept = []
        learner._seen = lambda k: kept.append(learner.gradients().detach().cpu().clone())
        losses = [loss for _, loss, _ in steps_alone(learner, plan, steps)]
        last = torch.cat([p.detach().cpu().reshape(-1) for p in learner.parameters])
        return losses, kept[0], last

    def off(one, other):
        return float((one - other).norm() / other.norm())

    rows, ok = {}, True
    for path in sorted((PLANS / "both").glob("equal_*.json")):
        plan = load_plan(path)
        want, want_first, want_last = trained(plan, "cpu")
        found, first, last = trained(plan, device + (":0" if device == "cuda" else ""))
        again, *_ = trained(plan, device + (":0" if device == "cuda" else ""))
        low = path.stem.endswith("bf16")
        row = {
            "loss": max(abs(a - b) / abs(b) for a, b in zip(found, want)),
            "gradient": off(first, want_first),
            "parameters": off(last, want_last),
            "again_same_bits": again == found,
        }
        row["ok"] = row["loss"] < (2e-2 if low else 1e-4) and row["gradient"] < (
            5e-2 if low else 1e-4
        )
        ok &= row["ok"]
        rows[path.stem] = row
        print(path.stem, row, flush=True)
    return {"ok": ok, "rows": rows}


# ------------------------------------------------------------------------------------ race
def race(device: str, out: Path) -> dict[str, Any]:
    """Six devices as threads on one GPU, with copies that come late and memory full of garbage.

    Bit by bit what they give when every copy and operation is waited for: a forgotten wait, or
    memory that is given away too early, changes bits.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    from planner.executor.direct import Direct
    from planner.executor.failure import Failure
    from planner.executor.learner import Learner
    from planner.executor.messages import Traffic
    from planner.executor.optimizing import Optimizing
    from planner.executor.pipeline import run_operations
    from planner.executor.records import StepRecord
    from planner.executor.side import HOST, Cuda, GpuSide, HostSide
    from planner.executor.transport import Expected, Inbox, Outbox
    from planner.training_plan.file import load_plan

    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    class Waits(HostSide):
        """Everything is waited for."""

        def enter(self, message):
            here = message.to(where)
            torch.cuda.synchronize()
            return here

        def leave(self, made):
            there = made.detach().contiguous().cpu()
            return lambda: there

        def room(self, shape, dtype):
            return torch.empty(shape, dtype=dtype)

        def mark(self):
            torch.cuda.synchronize()
            return time.monotonic()

    class LateCuda(Cuda):
        """Each copy begins up to a few milliseconds late; new memory is full of garbage."""

        def __init__(self, seed):
            super().__init__(where)
            self._chance = random.Random(seed)

        def _late(self, stream):
            with torch.cuda.device(where), torch.cuda.stream(stream):
                torch.cuda._sleep(int(self._chance.choice((0, 1, 1)) * self._chance.random() * 5e6))

        def pinned(self, shape, dtype):
            made = super().pinned(shape, dtype)
            return made.fill_(float("nan") if dtype.is_floating_point else 99)

        def empty(self, shape, dtype, stream):
            made = super().empty(shape, dtype, stream)
            self.on(stream, lambda: made.fill_(float("nan") if dtype.is_floating_point else 99))
            return made

        def copied_in(self, message, stream):
            self._late(stream)
            return super().copied_in(message, stream)

        def copy_out(self, there, made, stream):
            self._late(stream)
            super().copy_out(there, made, stream)

        def on(self, stream, job):
            self._late(stream)
            super().on(stream, job)

    class Hall:
        """Where both ends of a transfer meet; the second one to come copies on its own stream."""

        def __init__(self):
            self.begun, self.changed = {}, threading.Condition()

        def meet(self, source, destination, rank, tensor):
            with self.changed:
                pair = self.begun.setdefault((source, destination), [None, None])
                pair[rank == destination] = tensor
                if pair[0] is not None and pair[1] is not None:
                    pair[1].copy_(pair[0])
                    if where.type == "cuda":
                        torch.cuda.current_stream(where).synchronize()
                    del self.begun[source, destination]
                    self.changed.notify_all()
                else:
                    assert self.changed.wait_for(
                        lambda: self.begun.get((source, destination)) is not pair, LONG_S
                    ), "nobody came"

    class OfHall:
        def __init__(self, hall, rank):
            self.hall, self.rank = hall, rank

        def _ordered(self):
            # as NCCL, which waits for what its caller's stream was given before
            if where.type == "cuda":
                torch.cuda.current_stream(where).synchronize()

        def send(self, tensors, rank, tag, /):
            self._ordered()
            self.hall.meet(self.rank, rank, self.rank, tensors[0])
            return self

        def recv(self, tensors, rank, tag, /):
            self._ordered()
            self.hall.meet(rank, self.rank, self.rank, tensors[0])
            return self

        def wait(self):
            pass

    def played(plan, sides, steps=3, directs=None):
        n, schedule, directs = len(plan.cluster), plan.schedules[0], directs or {}
        traffic = [Traffic(schedule, d) for d in range(n)]
        to, of = {}, {}
        for d in range(n):
            for other in traffic[d].peers:
                to[d, other], of[other, d] = socket.socketpair()
        learners = [Learner(plan, d, where, Optimizing(), side=sides[d]) for d in range(n)]
        losses = [[] for _ in range(n)]
        failure, vectors = Failure(), {}
        met = {g: threading.Barrier(len(g)) for g in plan.assignment.groups}

        def average(d):
            group = plan.assignment.groups[plan.stage_of[d]]
            vectors[d] = learners[d].gradients(here=None if len(group) == 1 else False)
            met[group].wait(LONG_S)
            total = torch.stack([vectors[e] for e in group]).sum(0)
            met[group].wait(LONG_S)
            if len(group) > 1:
                vectors[d].copy_(total)

        def run(d):
            if where.type == "cuda":
                torch.cuda.set_device(where)
            mine = {o: c for (own, o), c in to.items() if own == d}
            theirs = {o: c for (own, o), c in of.items() if own == d}
            expected = {
                s: [Expected(k, m) for k in range(steps) for m in traffic[d].incoming.get(s, ())]
                for s in mine
            }
            learner, direct = learners[d], directs.get(d)
            inbox = Inbox(theirs, expected, learner.buffer, failure, direct=direct)
            rates = dict.fromkeys(mine, 1e9)
            outbox = Outbox(mine, failure, rates, side=learner.side, direct=direct)
            for k in range(steps):
                record = StepRecord(k, False)
                learner.begin(k, schedule)
                run_operations(schedule.order[d], traffic[d], learner, inbox, outbox, k, d, record)
                average(d)
                learner.update()
                losses[d].append(learner.loss() or 0.0)
            outbox.finish()

        errors = []

        def noted(d):
            try:
                run(d)
            except BaseException as error:
                errors.append(error)
                if isinstance(error, Exception):
                    failure(error)

        threads = [threading.Thread(target=noted, args=(d,), daemon=True) for d in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), f"a device does not end: {errors}"
        if errors:
            raise errors[0]
        for end in (*to.values(), *of.values()):
            end.close()
        parameters = [[p.detach().cpu().clone() for p in one.parameters] for one in learners]
        return [sum(each) for each in zip(*losses)], parameters

    def same(one, other):
        bits = all(torch.equal(a, b) for x, y in zip(one[1], other[1]) for a, b in zip(x, y))
        return one[0] == other[0] and bits

    rows, ok = {}, True
    for name in ("race_fp32", "race_bf16"):
        plan = load_plan(PLANS / "both" / f"{name}.json")
        n = len(plan.cluster)
        for codec in ("none", "int8"):
            if codec == "int8":
                if name == "race_bf16":
                    continue
                plan = plan.replace(workload=plan.workload.with_boundary_codec("int8"))
            waits = [Waits() for _ in range(n)] if device == "cuda" else [HOST] * n
            want = played(plan, waits)
            again = played(plan, waits)
            row = {"losses": want[0], "waiting_twice_same_bits": same(want, again)}
            for seed in range(4):
                if device == "cuda":
                    sides = [GpuSide(LateCuda(100 * seed + d)) for d in range(n)]
                else:  # the tests' stand-in, so that this section itself is tried
                    from tests.executor.test_side import LateGpu

                    sides = [GpuSide(LateGpu(100 * seed + d)) for d in range(n)]
                hall = Hall()
                directs = None
                if seed % 2:
                    groups = [OfHall(hall, d) for d in range(n)]
                    directs = {d: Direct(groups[d], list(range(n)), d, sides[d]) for d in range(n)}
                found = played(plan, sides, directs=directs)
                what = f"late_{seed}{'_direct' if directs else ''}"
                row[what] = same(want, found)
                if not row[what]:
                    row[what + "_losses"] = found[0]
                ok &= row[what] or not row["waiting_twice_same_bits"]
            rows[f"{name}_{codec}"] = row
            print(name, codec, row, flush=True)
    return {"ok": ok, "rows": rows}


# ------------------------------------------------------------------------------ checkpoint
def checkpoint(device: str, out: Path) -> dict[str, Any]:
    """Four ranks: six steps at once, and three, a checkpoint, and three more."""
    path = plan_path(device, "grid")
    folder = out / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    whole = run_plan(path, 6, device)
    again = run_plan(path, 6, device)
    began = run_plan(path, 3, device, "--checkpoint", str(folder), "--every", "3")
    more = run_plan(path, 6, device, "--resume", str(folder))
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    shutil.rmtree(folder, ignore_errors=True)
    codes = [one.code for one in (whole, again, began, more)]
    if any(codes):
        return {"ok": False, "codes": codes, "reasons": [whole.reason, began.reason, more.reason]}
    want, twice = whole.losses, again.losses
    found = began.losses | more.losses
    off = max(abs(found[k] - want[k]) / want[k] for k in want)
    twice_off = max(abs(twice[k] - want[k]) / want[k] for k in want)
    return {
        "ok": off < 1e-3,
        "losses": want,
        "resumed_off": off,
        "the_same_run_twice_off": twice_off,
        "bytes": size,
        "memory": whole.memory(),
    }


# ----------------------------------------------------------------------------------- train
def train(device: str, out: Path) -> dict[str, Any]:
    """A byte-level GPT-2 small on this project's own documents: the loss falls."""
    text = out / "text"
    text.mkdir(exist_ok=True)
    for file in [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "planner").rglob("*.py"))]:
        shutil.copy(file, text / file.relative_to(ROOT).as_posix().replace("/", "_"))
    steps = 150 if device == "cuda" else 30
    ran = run_plan(
        plan_path(device, "train"),
        steps,
        device,
        *("--data", str(text), "--eval-data", str(ROOT / "README.md")),
        *("--eval-every", str(steps // 3), "--eval-batches", "1"),
        *("--learning-rate", "6e-4", "--warmup", "20", "--schedule", "cosine"),
        *("--weight-decay", "0.1", "--beta2", "0.95"),
    )
    shutil.rmtree(text, ignore_errors=True)
    if ran.code:
        return {"ok": False, "reason": ran.reason}
    losses = ran.losses
    order = [losses[k] for k in sorted(losses)]
    first, last = statistics.mean(order[:3]), statistics.mean(order[-5:])
    return {
        "ok": last < first - (1.5 if device == "cuda" else 0.3),
        "first": first,
        "last": last,
        "held_out": [e["loss"] for e in ran.of("evaluated")],
        "tokens_per_s": statistics.median([e["tokens_per_s"] for e in ran.of("step")][3:]),
        "mfu": statistics.median([e.get("mfu", 0.0) for e in ran.of("step")][3:]),
        "memory": ran.memory(),
    }


# --------------------------------------------------------------------------- cli, and node
def cli(device: str, out: Path) -> dict[str, Any]:
    """planner run, and planner.executor.node, where no solver is installed."""
    from planner.executor.store import served

    path = plan_path(device, "grid")
    words = [sys.executable, "-m", "planner.cli", "run", str(path), "--steps", "4"]
    done = subprocess.run(
        [*words, "--device", device, "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
    found: dict[str, Any] = {"planner_run": done.returncode, "said": done.stderr[-300:]}
    if not done.returncode:
        told = json.loads(done.stdout)["steps"]
        found["measured_s"] = [round(s["measured_s"], 4) for s in told]
        found["predicted_s"] = told[0]["predicted_s"]
    store = served("127.0.0.1", 0)
    port = store.port
    del store
    from planner.training_plan.file import load_plan

    ids = load_plan(path).cluster.network.ids
    node = subprocess.run(
        [
            sys.executable,
            "-m",
            "planner.executor.node",
            str(path),
            "--devices",
            *ids,
            "--steps",
            "3",
            "--device",
            device,
        ],
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(node.stdout[-2000:], node.stderr[-3000:], flush=True)
    found["node"] = node.returncode
    found["ok"] = not done.returncode and not node.returncode
    return found


# ------------------------------------------------------------------------------------- mfu
def mfu(device: str, out: Path) -> dict[str, Any]:
    """A plan of one device with a model of 1.3B parameters, as the executor runs it."""
    return _mfu(device, "mfu_gpt13", 8)


def mfu_llama(device: str, out: Path) -> dict[str, Any]:
    """The same with Llama 3.2's 1B: grouped heads, RMSNorm, rotary positions, 128k words."""
    return _mfu(device, "mfu_llama1b", 7)


def mfu_compiled(device: str, out: Path) -> dict[str, Any]:
    """The GPT of `mfu` with compiled layers and head."""
    return _mfu(device, "mfu_gpt13", 10, "--compile")


def mfu_llama_compiled(device: str, out: Path) -> dict[str, Any]:
    """The Llama of `mfu_llama` with compiled layers and head."""
    return _mfu(device, "mfu_llama1b", 10, "--compile")


def _mfu(device: str, name: str, steps: int, *more: str) -> dict[str, Any]:
    from planner.training_plan.file import load_plan

    path = plan_path(device, name)
    ran = run_plan(path, steps, device, *more)
    if ran.code:
        return {"ok": False, "reason": ran.reason}
    flops, took = flops_of(load_plan(path)), ran.took_s(2)
    peak = 989e12 if device == "cuda" else None
    return {
        "ok": True,
        "step_s": took,
        "tokens_per_s": flops["tokens"] / took,
        "mfu_planner": statistics.median([e.get("mfu", 0.0) for e in ran.of("step")][2:]),
        "mfu_6n_causal": None if peak is None else flops["causal"] / took / peak,
        "first_step_after_s": ran.first_step_s,
        "losses": list(ran.losses.values()),
        "memory": ran.memory(),
    }


# -------------------------------------------------------------------------------- overhead
def overhead(device: str, out: Path) -> dict[str, Any]:
    """One rank and a plain loop in turns: what planner bench overhead does, of ready plans."""
    return _overhead(device, out, "overhead")


def overhead_compiled(device: str, out: Path) -> dict[str, Any]:
    """The same, both with compiled layers and head."""
    return _overhead(device, out, "overhead_compiled", "--compile")


def _overhead(device: str, out: Path, section: str, *more: str) -> dict[str, Any]:
    rows, warm, steps = {}, 3, 8
    for name in ("over_gpt2m", "over_llama16"):
        module = "planner.bench._in_turns"
        ran = run_plan(plan_path(device, name), warm + steps, device, *more, module=module)
        if ran.code:
            rows[name] = {"ok": False, "reason": ran.reason}
            continue
        seconds = ran.of("in turns")[-1]["seconds"]
        plain = ran.of("in turns")[-1]["losses"]
        ours, theirs = seconds["executor"][warm:], seconds["plain"][warm:]
        losses = ran.losses
        rows[name] = {
            "ok": True,
            "executor_s": statistics.median(ours),
            "plain_s": statistics.median(theirs),
            "ratio": statistics.median(a / b for a, b in zip(ours, theirs)),
            "losses_off": max(
                abs(losses[k] - plain[k]) / plain[k] for k in losses if k < len(plain)
            ),
        }
        print(name, rows[name], flush=True)
        finish(section, out, {"ok": all(r["ok"] for r in rows.values()), "rows": rows})
    return {"ok": all(row["ok"] for row in rows.values()), "rows": rows}


# ----------------------------------------------------------------------------------- share
def share(device: str, out: Path) -> dict[str, Any]:
    """Four ranks that share the GPU: what the clock says after measuring, and what is done."""
    names = ["share_gpt2m_1", "share_gpt2m_2", "share_gpt2m_4", "share_llama16_4"]
    return _share(device, out, names)


def _share(device: str, out: Path, names: list[str]) -> dict[str, Any]:
    from planner.clock.local_machine import predict
    from planner.training_plan.file import load_plan
    from planner.workload.calibration import Calibration

    rows, warm, steps = {}, 3, 8
    for name in names:
        path, times = plan_path(device, name), out / f"times_{name}.json"
        ran = run_plan(path, warm + steps, device, "--calibrate", str(times), "--force")
        if ran.code:
            rows[name] = {"ok": False, "reason": ran.reason}
            print(name, rows[name], flush=True)
            continue
        plan, calibration = load_plan(path), Calibration.load(times)
        predicted = predict(plan, plan.workload, calibration)[0]
        measured = ran.took_s(warm)
        rows[name] = {
            "ok": True,
            "measured_s": measured,
            "predicted_s": predicted,
            "ratio": measured / predicted,
            "times": {k: dict(v) for k, v in calibration.times.items()},
            "link_gb_s": calibration.link_bandwidth_bytes_per_s / 1e9,
            "message_ms": 1e3 * calibration.message_s,
            "operation_us": 1e6 * calibration.operation_s,
            "memory": ran.memory(),
            "first_step_after_s": ran.first_step_s,
        }
        print(name, rows[name], flush=True)
        # what there is so far, should time run out
        finish("share", out, {"ok": all(r["ok"] for r in rows.values()), "rows": rows})
    return {"ok": all(row["ok"] for row in rows.values()), "rows": rows}


# ------------------------------------------------------------------------------------ kill
def kill(device: str, out: Path) -> dict[str, Any]:
    """SIGKILL of one of four ranks in a backward pass: all end, or with --elastic go on."""
    path, rows = plan_path(device, "grid"), {}
    for how in ("ends", "elastic"):
        folder = out / f"kill_{how}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        given = {"device": "g3", "fault": "kill", "phase": "backward", "step": 5}
        given["folder"] = str(folder)
        more = ("--elastic",) if how == "elastic" else ()
        steps = (160 if device == "cuda" else 600) if how == "elastic" else 3000
        ran = run_plan(
            path,
            steps,
            device,
            *more,
            module="planner.bench._fault_rank",
            first=(json.dumps(given),),
            restarts=1 if more else None,
            echo=False,
        )
        row: dict[str, Any] = {"code": ran.code, "reason": ran.reason, "said": ran.said[-6:]}
        when = folder / "when"
        if when.exists():
            killed = float(when.read_text()) - ran.began_s
            row["killed_after_s"] = killed
            row["ended_s_after_kill"] = ran.wall_s - killed
            later = [(at, e) for at, e in ran.events if at > killed]
            steps_after = [at for at, e in later if e["event"] == "step"]
            row["next_step_s_after_kill"] = steps_after[0] - killed if steps_after else None
            changes = [
                e | {"at": round(at - killed, 2)}
                for at, e in later
                if e["event"] not in ("step", "loss", "devices")
            ]
            row["changes"] = changes
            row["steps"] = len(ran.of("step"))
        row["ok"] = (
            (ran.code == 0)
            if how == "elastic"
            else (ran.code != 0 and row.get("ended_s_after_kill", 99) < 15)
        )
        rows[how] = row
        print(how, row, flush=True)
        finish("kill", out, {"ok": False, "rows": rows})
    return {"ok": all(row["ok"] for row in rows.values()), "rows": rows}


# ------------------------------------------------------------------------------------ host
def _learner(plan, where, fast=True):
    """Of a plan of one device; made where it computes, since its weights do not matter here."""
    import torch

    from planner.executor.learner import Learner
    from planner.executor.optimizing import Optimizing

    if where.type == "cuda" and fast:
        with torch.device(where):
            return Learner(plan, 0, where, Optimizing())
    return Learner(plan, 0, where, Optimizing())


def _variants(learner, plan, device: str, peak, told):
    """Seconds of a step as it is, and with what others do; each on top of those before."""
    import torch

    import planner.executor.model as model
    from planner.executor.clipping import squares

    flops = flops_of(plan)
    cuda = device == "cuda"
    rows: dict[str, Any] = {}
    number = 0

    def measured(name: str, warm: int = 2, count: int = 4) -> None:
        nonlocal number
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        took, loss = [], None
        for seconds, loss, _ in steps_alone(learner, plan, warm + count, number):
            took.append(seconds)
        number += warm + count
        step = statistics.median(took[warm:])
        rows[name] = {
            "step_s": step,
            "tokens_per_s": flops["tokens"] / step,
            "mfu_6n_causal": None if peak is None else flops["causal"] / step / peak,
            "mfu_planner": None if peak is None else flops["planner"] / step / peak,
            "loss": loss,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "with_warming_s": time.perf_counter() - began,
        }
        print(name, rows[name], flush=True)

    def hosted(name: str) -> None:
        """What the host takes to begin each kind of operation, and until it has ended."""
        schedule = plan.schedules[0]
        learner.begin(number, schedule)
        begun: dict[str, list[float]] = {}
        ended: dict[str, list[float]] = {}
        for kind, b in schedule.order[0]:
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            learner.operate(kind, b, None)
            middle = time.perf_counter()
            if cuda:
                torch.cuda.synchronize()
            begun.setdefault(kind, []).append(middle - start)
            ended.setdefault(kind, []).append(time.perf_counter() - start)
        start = time.perf_counter()
        learner.optimizer.step()
        middle = time.perf_counter()
        learner._updated()
        rows[name]["host_ms"] = {k: 1e3 * statistics.median(v) for k, v in begun.items()}
        rows[name]["until_ended_ms"] = {k: 1e3 * statistics.median(v) for k, v in ended.items()}
        rows[name]["update_ms"] = 1e3 * (time.perf_counter() - start)
        rows[name]["update_host_ms"] = 1e3 * (middle - start)
        print(name, {k: v for k, v in rows[name].items() if "ms" in k}, flush=True)
        told(rows)

    measured("as it is")
    hosted("as it is")
    for name, job in (
        ("clipping_norm_ms", squares),
        ("norm_at_once_ms", lambda v: float(torch.linalg.vector_norm(v, dtype=torch.float64))),
    ):
        for _ in range(2):
            start = time.perf_counter()
            job(learner.gradients())
            rows["as it is"][name] = 1e3 * (time.perf_counter() - start)
    if cuda:
        import contextlib

        with contextlib.suppress(Exception):
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                for seconds, *_ in steps_alone(learner, plan, 1, number):
                    rows["as it is"]["profiled_step_s"] = seconds
            number += 1
            from torch.autograd import DeviceType

            # operations have their kernels' times too
            kernels = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA]
            total = sum(e.self_device_time_total for e in kernels) / 1e6
            rows["as it is"]["gpu_busy_s"] = total
            rows["as it is"]["kernels"] = sum(e.count for e in kernels)
            top = sorted(kernels, key=lambda e: -e.self_device_time_total)[:14]
            rows["as it is"]["top"] = [
                [e.key[:70], e.count, round(e.self_device_time_total / 1e3, 2)] for e in top
            ]
            print(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=30))
    # what updates the parameters: one kernel instead of a dozen for each of them
    before = learner.optimizer
    try:
        settings = {k: before.param_groups[0][k] for k in ("lr", "betas", "eps")}
        groups = [
            {"params": g["params"], "weight_decay": g["weight_decay"]} for g in before.param_groups
        ]
        learner.optimizer = torch.optim.AdamW(groups, **settings, fused=True)
        before.state.clear()
        measured("fused AdamW")
        hosted("fused AdamW")
    except Exception as error:
        rows["fused AdamW"] = {"failed": repr(error)[:300]}
        learner.optimizer = before
    # norms and gates by the compiler, which also chooses what is made again
    model.made_again = lambda function, *inputs: function(*inputs)
    try:
        import torch._dynamo as dynamo

        dynamo.config.recompile_limit = 64
    except Exception as error:
        print("no recompile_limit:", error)
    computed = learner.computed_stage
    stage = getattr(computed, "_module", computed)
    try:
        for layer in stage.layers:
            layer.compile(dynamic=False)
        measured("+ compiled layers", warm=3)
        hosted("+ compiled layers")
    except Exception as error:
        rows["+ compiled layers"] = {"failed": repr(error)[:600]}
        return rows
    try:
        learner.computed_head._module.compile(dynamic=False)
        measured("+ compiled head", warm=3)
        hosted("+ compiled head")
    except Exception as error:
        rows["+ compiled head"] = {"failed": repr(error)[:600]}
    return rows


def _speed(device: str, out: Path, section: str, name: str) -> dict[str, Any]:
    import torch

    from planner.training_plan.file import load_plan

    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    plan = load_plan(plan_path(device, name))
    peak = (peak_of(torch.cuda.get_device_name()) or 989e12) if device == "cuda" else None

    def told(rows: dict[str, Any]) -> None:
        finish(section, out, {"ok": True, "rows": rows})

    return {"ok": True, "rows": _variants(_learner(plan, where), plan, device, peak, told)}


def speed(device: str, out: Path) -> dict[str, Any]:
    """GPT of 1.3B on one device, in this process: as it is, and with what others do."""
    return _speed(device, out, "speed", "speed_gpt13")


def speed_llama(device: str, out: Path) -> dict[str, Any]:
    """Llama 3.2's 1B likewise."""
    return _speed(device, out, "speed_llama", "speed_llama1b")


# ---------------------------------------------------------------------------------- memory
def memory(device: str, out: Path) -> dict[str, Any]:
    """Peaks of stages of seven architectures, by operation, beside what is expected of each."""
    return _memory(device, out, "memory", ("*",), compiled=False)


def memory_compiled(device: str, out: Path) -> dict[str, Any]:
    """The same of some of them, with compiled layers and head."""
    return _memory(device, out, "memory_compiled", COMPILED, compiled=True)


COMPILED = ("*_bf16_none", "llama_gqa_bf16_all", "gpt2_bf16_all")


def _memory(
    device: str, out: Path, section: str, names: tuple[str, ...], *, compiled: bool
) -> dict[str, Any]:
    import gc

    import torch

    from planner.executor.learner import Learner
    from planner.executor.memory import need_of
    from planner.executor.optimizing import Optimizing
    from planner.executor.wiring import averaging_of, tied_of
    from planner.training_plan.file import load_plan

    cuda = device == "cuda"
    where = torch.device("cuda", 0) if cuda else torch.device("cpu")
    rows: dict[str, Any] = {}

    def peak_since(base: int) -> float:
        found = torch.cuda.max_memory_allocated() - base if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        return found / 1e6

    def measured(plan, rank: int) -> dict[str, Any]:
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() if cuda else 0
        with torch.device(where):
            learner = Learner(plan, rank, where, Optimizing(), compiled=compiled)
        schedule = plan.schedules[0]
        peaks = {"built": peak_since(base)}
        shape, dtype = learner.boundary.message
        for step in range(2):
            learner.begin(step, schedule)
            for kind, b in schedule.order[rank]:
                # activations for F but on the first stage, and for H but on its own stage;
                # gradients for B but where H was
                stage, head = plan.stage_of[rank], plan.head_stage
                last = stage == len(plan.stage_layers) - 1
                given = {
                    "F": stage > 0,
                    "H": not last,
                    "B": not (last and learner.head is not None),
                }[kind]
                message = torch.randn(shape).to(dtype) if given else None
                made = learner.operate(kind, b, message)
                # two messages at a time are on their way in and out
                del made
                peaks[kind] = max(peaks.get(kind, 0.0), peak_since(base))
            learner.update()
            peaks["update"] = max(peaks.get("update", 0.0), peak_since(base))
        tied = tied_of(plan, rank) if plan.averages_tied else None
        need = need_of(plan, rank, averaging_of(plan, rank), other=tied, on_gpu=cuda)
        parts = {k: v / 1e6 for k, v in need.beyond.items()}
        expected = need.total / 1e6 - parts.get("messages", 0.0) - parts.get("averaging", 0.0)
        return {
            "peaks_mb": {k: round(v, 1) for k, v in peaks.items()},
            "kept_mb": round(learner.kept_bytes / 1e6, 1),
            "planned_mb": round(need.planned / 1e6, 1),
            "beyond_mb": {k: round(v, 1) for k, v in parts.items()},
            "expected_mb": round(expected, 1),
            "reserved_mb": round(torch.cuda.max_memory_reserved() / 1e6, 1) if cuda else None,
            "ratio": round(max(peaks.values()) / expected, 4),
        }

    for path in [p for name in names for p in sorted((PLANS / device).glob(f"mem_{name}.json"))]:
        if compiled:  # other shapes are no recompilations of the last model's
            torch._dynamo.reset()
        plan = load_plan(path)
        for rank in range(len(plan.cluster)):
            name = f"{path.stem[4:]}_{rank}"
            try:
                rows[name] = measured(plan, rank)
            except Exception as error:
                rows[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(name, rows[name], flush=True)
            finish(section, out, {"ok": True, "rows": rows})
    most = max((row.get("ratio", 9.0) for row in rows.values()), default=9.0)
    least = min((row.get("ratio", 0.0) for row in rows.values()), default=0.0)
    return {"ok": most <= 1.0, "most": most, "least": least, "rows": rows}


SECTIONS = {
    one.__name__: one
    for one in (
        env,
        tests,
        equal,
        race,
        checkpoint,
        train,
        cli,
        mfu,
        mfu_llama,
        overhead,
        share,
        kill,
        speed,
        speed_llama,
        memory,
        mfu_compiled,
        mfu_llama_compiled,
        overhead_compiled,
        memory_compiled,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.monotonic()
    try:
        found = SECTIONS[args.name](args.device, args.out)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        known = args.out / f"{args.name}.json"
        partial = json.loads(known.read_text()) if known.exists() else {}
        found = partial | {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
    found["section_s"] = round(time.monotonic() - began, 1)
    found.setdefault("ok", True)
    finish(args.name, args.out, found)
    sys.stdout.flush()
    # what was begun and does not end is not waited for
    os._exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
