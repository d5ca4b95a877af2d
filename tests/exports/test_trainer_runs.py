"""Other trainers read exported scripts and train with them."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.exports.formats import export_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import make_plan, tiny_workload

PYTHON = os.environ.get("PLANNER_TRAINERS_PYTHON", "")
HERE = Path(__file__).parent
GRID = [[0, 2], [3, 1]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Run = Callable[..., str]


def needs(*modules: str) -> None:
    """Skip unless the trainers' Python has these packages."""
    if not PYTHON:
        pytest.skip("PLANNER_TRAINERS_PYTHON is not set")
    code = f"import importlib.util as u; assert all(map(u.find_spec, {modules!r}))"
    if subprocess.run([PYTHON, "-c", code], capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON} has no {', '.join(modules)}")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run an export on this host with the trainer's command replaced by one for CPUs."""

    def start(plan: TrainingPlan, to: str, command: str, main: str, *options: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        hosts = dict.fromkeys(plan.cluster.network.ids, "node")
        text = export_plan(plan, to, hosts=hosts, port=port)
        assert command in text
        text = text.replace(command, f"{PYTHON} {HERE / main}")
        text = text.replace("MASTER_ADDR=node", "MASTER_ADDR=127.0.0.1")
        text = text.replace("http://node", "http://127.0.0.1")
        (tmp_path / "train.sh").write_text(text)
        path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "train.sh", "node", *options],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout + done.stderr

    return start


def text_data(folder: Path) -> list[str]:
    """Write a tokenizer of 29 tokens and a text; return torchtitan's options for them."""
    tokens = {chr(97 + k): k for k in range(26)} | {"<unk>": 26, "<s>": 27, "</s>": 28}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": ""},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "<unk>"},
    }
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", special)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "text").mkdir()
    line = json.dumps({"text": "thequickbrownfoxjumpsoverthelazydog" * 20})
    (folder / "text" / "data.json").write_text(f"{line}\n" * 200)
    # the default needs a later torch than 2.13
    return [
        *("--parallelism.spmd_backend", "partial_dtensor"),
        *("--hf_assets_path", ".", "--dataloader.dataset_path", "text"),
    ]


def losses(output: str) -> dict[int, list[float]]:
    """Return losses by step; ranks outside the last stage print negative numbers."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"step: +(\d+) .*?loss: +(-?[\d.]+|nan|inf)", output):
        if not loss.startswith("-"):
            found.setdefault(int(step), []).append(float(loss))
    return found


@pytest.mark.parametrize("grid", [GRID, [[0], [1]]])
def test_torchtitan_trains(run: Run, tmp_path: Path, grid: list[list[int]]) -> None:
    """Two steps with finite losses near those of a uniform guess, equal in both replicas."""
    needs("torchtitan")
    plan = make_plan(grid, workload=tiny_workload("llama"))
    options = ["--training.steps", "2", *text_data(tmp_path)]
    output = run(plan, "torchtitan", "python -m torchtitan.train", "torchtitan_main.py", *options)
    found = losses(output)
    assert sorted(found) == [1, 2]
    for each in found.values():
        assert len(each) == 2 and each[0] == each[1]
        assert abs(each[0] - math.log(61)) < 2
    if len(grid[0]) > 1:
        built = re.findall(r"PP rank (\d) is building stage_idx (\d) with modules (.*)", output)
        wanted = {
            ("0", "0", "['tok_embeddings', 'layers.0', 'layers.1']"),
            ("1", "1", "['layers.2', 'layers.3', 'norm', 'lm_head']"),
        }
        assert len(built) == 4 and set(built) == wanted


def test_torchft_trains(run: Run, tmp_path: Path) -> None:
    """Three steps with finite losses; all ranks run the outer step after the second."""
    needs("torchtitan", "torchft")
    plan = make_plan(GRID, workload=tiny_workload("llama"))
    plan = plan.replace(sync=Sync(2, OuterOptimizer()))
    options = ["--training.steps", "3", *text_data(tmp_path)]
    options += ["--fault_tolerance.process_group", "gloo"]
    output = run(plan, "torchft", "python -m torchtitan.train", "torchtitan_main.py", *options)
    found = losses(output)
    assert sorted(found) == [1, 2, 3]
    assert all(len(each) == 2 for each in found.values())
    assert all(abs(loss - math.log(61)) < 2 for each in found.values() for loss in each)
    assert output.count("Syncing fragment=0 step=2") == 4


def test_nemo_trains(run: Run) -> None:
    """Two steps with finite losses near those of a uniform guess."""
    needs("nemo_automodel")
    plan = make_plan(GRID, workload=tiny_workload("llama"))
    options = ["--step_scheduler.max_steps", "2", "--checkpoint.enabled", "false"]
    options += ["--dist_env.backend", "gloo"]
    output = run(plan, "nemo", "python -m nemo_automodel.cli.app", "nemo_main.py", *options)
    found = [float(loss) for loss in re.findall(r"\| loss ([\d.]+|nan) \|", output)]
    assert len(found) == 2
    assert all(abs(loss - math.log(61)) < 2 for loss in found)


@pytest.mark.parametrize(("kind", "recompute"), [("gpt2", False), ("llama", True)])
def test_megatron_reads_the_options(run: Run, kind: str, recompute: bool) -> None:
    """Megatron's parser accepts them and assigns layers and pipelines as planned."""
    needs("megatron.training", "megatron.core")
    plan = make_plan([[0, 5, 2], [3, 1, 4]], workload=tiny_workload(kind))
    plan = plan.replace(recompute=(recompute,) * 3)
    # the fused kernel is of Transformer Engine, which needs a GPU
    options = ["--no-rope-fusion"]
    output = run(plan, "megatron", "python pretrain_gpt.py", "megatron_main.py", *options)
    found = [json.loads(line) for line in re.findall(r"found (\{.*\})", output)]
    assert sorted(one["rank"] for one in found) == list(range(6))
    layers = [["decoder"] * (stop - start) for start, stop in plan.stage_layers]
    layers = [["embedding", *layers[0]], layers[1], [*layers[2], "loss"]]
    for one in found:
        assert one["layers"] == layers
        assert one["pipelines"] == [[0, 2, 4], [1, 3, 5]]
        assert one["hidden"] == 32 and not one["bf16"] and not one["tied"]
        assert one["recompute"] == (["full", 1] if recompute else [None, None])
