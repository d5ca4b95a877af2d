"""Launch scripts of other trainers, run with a Python that prints its arguments."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from planner.exports.error import ExportError
from planner.exports.formats import export_plan
from planner.exports.options import ExportOptions
from planner.exports.trainer_plan import TrainerPlan
from planner.network.cluster import Cluster, Devices
from planner.simulator.simulator import predict
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import make_plan, random_network, tiny_workload

GRID = [[0, 5, 2], [3, 1, 4]]
HOSTS = {"0": "red", "5": "red", "2": "red", "3": "blue", "1": "blue", "4": "blue"}
TARGETS = ("torchtitan", "torchft", "megatron", "nemo")
DILOCO = Sync(5, OuterOptimizer())
PYTHON = """#!/bin/sh
[ "$RANK" = "$FAILS" ] && exit 3
[ -n "$FAILS" ] && exec sleep 60
python3 -c '
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME".split()
print(json.dumps([{name: os.environ.get(name) for name in names}, sys.argv[1:]]))
' "$@" > "seen.$$"
"""


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    """Two pipelines of three stages, each on one host, so ranks of a host are not consecutive."""
    return make_plan(GRID, workload=tiny_workload("llama"))


def plan_for(plan: TrainingPlan, to: str) -> TrainingPlan:
    """Return the plan with the averaging that the target supports."""
    return plan.replace(sync=DILOCO) if to == "torchft" else plan


def start(
    script: str, host: str, folder: Path, *options: str, fails: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script with stand-ins for Python and the lighthouse."""
    (folder / "train.sh").write_text(script)
    for name, text in (("python", PYTHON), ("torchft_lighthouse", "#!/bin/sh\nexec sleep 60\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", "train.sh", host, *options],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAILS": fails},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("to", TARGETS)
def test_every_device_gets_its_planned_rank(plan: TrainingPlan, to: str, tmp_path: Path) -> None:
    """On its host, by stage and pipeline; the user's options come last."""
    script = export_plan(plan_for(plan, to), to, hosts=HOSTS, interface="eth0", port=1234)
    seen = set()
    for host in ("red", "blue"):
        done = start(script, host, tmp_path, "--user", "a b")
        assert done.returncode == 0, done.stderr
        for path in tmp_path.glob("seen.*"):
            env, words = json.loads(path.read_text())
            path.unlink()
            assert words[-2:] == ["--user", "a b"]
            assert env["GLOO_SOCKET_IFNAME"] == "eth0"
            pipeline = ("red", "blue").index(host)
            device = [sorted(row) for row in GRID][pipeline][int(env["LOCAL_RANK"])]
            stage = GRID[pipeline].index(device)
            if to == "torchft":
                wanted = {"RANK": str(stage), "WORLD_SIZE": "3", "MASTER_ADDR": host}
                wanted["MASTER_PORT"] = str(1235 + pipeline)
                assert words[words.index("--fault_tolerance.replica_id") + 1] == str(pipeline)
            else:
                wanted = {"RANK": str(2 * stage + pipeline), "WORLD_SIZE": "6"}
                wanted |= {"MASTER_ADDR": "red", "MASTER_PORT": "1234"}
            assert {name: env[name] for name in wanted} == wanted
            seen.add((stage, pipeline))
    assert len(seen) == 6


@pytest.mark.parametrize("to", TARGETS)
def test_failing_rank_ends_the_script(plan: TrainingPlan, to: str, tmp_path: Path) -> None:
    """With its exit code; an unknown host starts nothing."""
    script = export_plan(plan_for(plan, to), to, hosts=HOSTS)
    done = start(script, "red", tmp_path, fails="0")
    assert done.returncode == 3
    done = start(script, "green", tmp_path)
    assert done.returncode == 2 and "no host green" in done.stderr
    assert not list(tmp_path.glob("seen.*"))


def options_of(script: str) -> dict[str, list[str]]:
    """Return the options shared by all ranks."""
    text = script.partition("\noptions=(\n")[2].partition("\n)\n")[0]
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, *values = shlex.split(line)
        assert name not in found
        found[name.removeprefix("--")] = values
    return found


def written(script: str, name: str) -> str:
    """Return a file that the script writes."""
    return script.partition(f"$run_dir/{name}\" <<'EOF'\n")[2].partition("EOF\n")[0]


def test_torchtitan_gets_stages_order_and_degrees(plan: TrainingPlan) -> None:
    """Every module once; the schedule is that of torch-pipelining."""
    script = export_plan(plan, "torchtitan")
    found = options_of(script)
    parts = [part.split(",") for part in found["parallelism.module_fqns_per_model_part"]]
    wanted = [[f"layers.{k}" for k in range(a, b)] for a, b in plan.stage_layers]
    wanted[0].insert(0, "tok_embeddings")
    wanted[-1] += ["norm", "lm_head"]
    assert parts == wanted
    assert found["parallelism.pipeline_parallel_degree"] == ["3"]
    assert found["parallelism.data_parallel_replicate_degree"] == ["2"]
    assert found["training.local_batch_size"] == ["4"]
    assert found["training.global_batch_size"] == ["8"]
    assert found["training.disable_cuda_graphs"] == []
    assert written(script, "order0.csv") == export_plan(plan, "torch-pipelining")
    model = written(script, "plan_model.py")
    compile(model, "plan_model.py", "exec")
    assert "n_layers=4" in model and "config.activation_checkpoint = None" in model
    again = export_plan(plan.replace(recompute=(True,) * 3), "torchtitan")
    assert "config.activation_checkpoint = FullAC.Config()" in written(again, "plan_model.py")


def test_one_stage_needs_no_pipeline(tmp_path: Path) -> None:
    """Each device accumulates the gradients of its microbatches."""
    alone = make_plan([[0], [1]], workload=tiny_workload("llama", tied=True))
    found = options_of(export_plan(alone, "torchtitan"))
    assert found["training.local_batch_size"] == ["1"]
    assert found["training.global_batch_size"] == ["8"]
    assert "parallelism.module_fqns_per_model_part" not in found
    assert "pipeline-model-parallel-layout" not in options_of(export_plan(alone, "megatron"))
    yaml = written(export_plan(alone, "nemo"), "plan.yaml")
    assert "pp_size: 1\n" in yaml and "pipeline:" not in yaml and "local_batch_size: 1\n" in yaml


def test_each_pipeline_has_its_own_order(plan: TrainingPlan) -> None:
    """Ranks refer to different files if schedules differ."""
    schedule = plan.schedules[0]
    first, second, *rest = schedule.order[0]
    order = ((second, first, *rest), *schedule.order[1:])
    other = plan.replace(schedules=(type(schedule)("x", schedule.head, schedule.paths, order),))
    for to in ("torchtitan", "nemo"):
        script = export_plan(other, to, hosts=HOSTS)
        assert written(script, "order0.csv").startswith("0F1,0F0,")
        assert written(script, "order1.csv") == export_plan(other, "torch-pipelining", pipeline=1)
        assert script.count('"$run_dir/order1.csv"\n') == 3


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        (Sync(), "gradients averaged in every step; use --to torchtitan"),
        (Sync(5, OuterOptimizer(), delayed=True), "a delayed outer step"),
        (Sync(5, OuterOptimizer(learning_rate=1.0)), "step of rate 1 and momentum 0.9"),
    ],
)
def test_torchft_rejects_unsupported_averaging(plan: TrainingPlan, sync: Sync, said: str) -> None:
    """In one line."""
    with pytest.raises(ExportError, match=said) as error:
        export_plan(plan.replace(sync=sync), "torchft")
    assert str(error.value).startswith("torchft cannot express ")
    assert "\n" not in str(error.value)


def test_torchft_synchronizes_as_planned(plan: TrainingPlan) -> None:
    """DiLoCo with its built-in outer optimizer, local SGD without one."""
    found = options_of(export_plan(plan.replace(sync=DILOCO), "torchft"))
    assert found["fault_tolerance.semi_sync_method"] == ["diloco"]
    assert found["fault_tolerance.sync_steps"] == ["5"]
    assert found["fault_tolerance.num_fragments"] == ["1"]
    assert found["fault_tolerance.group_size"] == ["2"]
    assert found["debug.seed"] == ["0"]
    found = options_of(export_plan(plan.replace(sync=Sync(5)), "torchft"))
    assert found["fault_tolerance.semi_sync_method"] == ["local_sgd"]


def test_nemo_gets_stages_and_order(plan: TrainingPlan) -> None:
    """Every stage has the rotary embedding."""
    script = export_plan(plan, "nemo")
    yaml = written(script, "plan.yaml")
    rows = [line for line in yaml.splitlines() if line.startswith("      - [")]
    parts = [json.loads(row.strip().removeprefix("- ")) for row in rows]
    wanted = [[f"model.layers.{k}" for k in range(a, b)] for a, b in plan.stage_layers]
    wanted[0].insert(0, "model.embed_tokens")
    wanted[-1] += ["model.norm", "lm_head"]
    assert parts == [[*part, "model.rotary_emb"] for part in wanted]
    assert "  pp_size: 3\n  dp_size: 2\n" in yaml and "local_batch_size: 4\n" in yaml
    assert written(script, "order0.csv") == export_plan(plan, "torch-pipelining")
    few = make_plan(GRID, workload=tiny_workload("llama", batch_samples=4))
    with pytest.raises(ExportError, match="2 microbatches in a pipeline of 3 stages"):
        export_plan(few, "nemo")


def test_predicted_step_uses_the_trainers_schedule(plan: TrainingPlan) -> None:
    """Megatron uses 1F1B for any plan; others use the plan's schedule."""
    trainer = TrainerPlan.for_target(plan, "megatron", ExportOptions())
    own = make_plan(GRID, workload=tiny_workload("llama"), schedule="1f1b")
    assert trainer.one_f_one_b() == own.schedules[0]
    theirs = predict(own).step_s
    assert theirs != pytest.approx(plan.predicted.step_s, rel=1e-3)
    assert f"Predicted step time: {theirs:.4g} s with Megatron's 1F1B schedule" in export_plan(
        plan, "megatron"
    )
    assert trainer.planned_order() == plan.schedules[0]
    norm = predict(plan.replace(clip=1.0)).step_s
    assert f"Predicted step time: {norm:.4g} s with this schedule" in export_plan(
        plan, "torchtitan"
    )


def test_schedules_that_exceed_memory(plan: TrainingPlan) -> None:
    """Megatron holds as many microbatches as a pipeline has stages."""
    small = plan.replace(cluster=Cluster(random_network(6), Devices(1e12, 1e4)))
    with pytest.raises(ExportError, match="its schedule holds 3 microbatches"):
        export_plan(small, "megatron")


@pytest.mark.parametrize("to", TARGETS)
def test_scripts_are_safe_against_injection(plan: TrainingPlan, to: str, tmp_path: Path) -> None:
    """IPv6 hosts; texts from the plan file stay in comments; an unknown host starts nothing."""
    hosts = {name: "fd00::1" if host == "red" else "FD00::2" for name, host in HOSTS.items()}
    evil = plan_for(plan, to).replace(package_version="1\ntouch broken")
    script = export_plan(evil, to, hosts=hosts)
    done = start(script, "fd00::2", tmp_path)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(one.read_text())[0] for one in tmp_path.glob("seen.*")]
    ranks = {int(one["RANK"]) for one in seen}
    # a replica group of torchft counts its own
    assert ranks == ({0, 1, 2} if to == "torchft" else {1, 3, 5})
    assert {one["MASTER_ADDR"] for one in seen} == {"fd00::2" if to == "torchft" else "fd00::1"}
    if to == "torchft":
        assert "TORCHFT_LIGHTHOUSE='http://[fd00::1]:29500'" in script
    assert not (tmp_path / "broken").exists()
    before = sorted(tmp_path.iterdir())
    assert start(script, "--training.steps", tmp_path).returncode == 2
    assert sorted(tmp_path.iterdir()) == before


def test_valid_ports_and_yaml_floats(plan: TrainingPlan) -> None:
    """Ports of all pipelines exist; YAML 1.1 reads small numbers as numbers."""
    with pytest.raises(
        ExportError, match=r"port must be at most 65533 for 2 pipelines.*found 65534"
    ):
        export_plan(plan_for(plan, "torchft"), "torchft", hosts=HOSTS, port=65534)
    assert export_plan(plan_for(plan, "torchft"), "torchft", hosts=HOSTS, port=65533)
    text = written(export_plan(plan.replace(clip=1e-5), "nemo", hosts=HOSTS), "plan.yaml")
    assert "max_norm: 1.0e-05\n" in text and "rms_norm_eps: 1.0e-05\n" in text


@pytest.mark.parametrize("to", ["torchtitan", "megatron", "nemo"])
def test_workers_have_a_process_per_gpu(to: str, tmp_path: Path) -> None:
    """Consecutive ranks on consecutive GPUs of a host, the innermost dimension of the mesh."""
    workload = tiny_workload("llama").replace(tensor_parallel=2)
    plan = make_plan(GRID, workload=workload)
    script = export_plan(plan, to, hosts=HOSTS)
    places: dict[int, tuple[str, int]] = {}
    for host in ("red", "blue"):
        assert start(script, host, tmp_path).returncode == 0
        for path in tmp_path.glob("seen.*"):
            env, _ = json.loads(path.read_text())
            path.unlink()
            assert env["WORLD_SIZE"] == "12"
            places[int(env["RANK"])] = host, int(env["LOCAL_RANK"])
    local = {d: k for row in GRID for k, d in enumerate(sorted(row))}
    for stage in range(3):
        for pipeline, host in enumerate(("red", "blue")):
            first = 2 * (2 * stage + pipeline)
            gpu = 2 * local[GRID[pipeline][stage]]
            assert [places[first], places[first + 1]] == [(host, gpu), (host, gpu + 1)]
    assert len(places) == 12


def test_degrees_of_tensor_parallelism() -> None:
    workload = tiny_workload("llama").replace(tensor_parallel=2)
    plan = make_plan(GRID, workload=workload)
    titan = options_of(export_plan(plan, "torchtitan"))
    assert titan["parallelism.tensor_parallel_degree"] == ["2"]
    megatron = options_of(export_plan(plan, "megatron"))
    assert megatron["tensor-model-parallel-size"] == ["2"] and "sequence-parallel" in megatron
    yaml = written(export_plan(plan, "nemo"), "plan.yaml")
    assert "  tp_size: 2\n  sequence_parallel: true\n" in yaml
    with pytest.raises(ExportError, match="devices of 2 GPUs; plan with --tensor-parallel 1"):
        export_plan(plan.replace(sync=DILOCO), "torchft")
