"""Exported schedules, layouts, graphs and traces, read by the tools that use them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import pytest
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
)

from planner.exports.error import ExportError
from planner.exports.formats import FORMATS, export_plan
from planner.network.cluster import Cluster, Devices
from planner.simulator.simulator import simulate
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.training_plan.sync import Sync
from planner.workload.compute_times import FIELDS, ComputeTimes
from planner.workload.workload import Workload
from tests.conftest import levels, make_plan, random_network, tiny_workload

GRID = [[0, 5, 2], [3, 1, 4]]
TRAINERS = ("torch-pipelining", "torchtitan", "megatron", "nemo")


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    """Two pipelines of three stages with 4 layers of a LLaMA."""
    return make_plan(GRID, workload=tiny_workload("llama"))


@pytest.mark.parametrize("schedule", ["eager-1f1b", "1f1b", "gpipe"])
@pytest.mark.parametrize("pipeline", [0, 1])
def test_torch_loads_the_csv(tmp_path: Path, schedule: str, pipeline: int) -> None:
    """The schedule is the plan's, and torch finds no deadlock with messages added."""
    plan = make_plan(GRID, schedule=schedule)
    path = tmp_path / "order.csv"
    export_plan(plan, "torch-pipelining", path, pipeline=pipeline)
    runtime: Any = object.__new__(_PipelineScheduleRuntime)
    runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
    runtime.pp_group_size = runtime._num_stages = 3
    runtime._n_microbatches = 4
    runtime._load_csv(str(path))
    sharding = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    lowered = {
        rank: [a for a in actions if a.computation_type.value not in sharding]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    _simulate_comms_compute(lowered, runtime.stage_index_to_group_rank.get, 3)
    own = [b for b, p in enumerate(plan.schedules[0].paths) if p == tuple(GRID[pipeline])]
    for stage, d in enumerate(GRID[pipeline]):
        ops = [(kind, own.index(b)) for kind, b in plan.schedules[0].order[d] if kind != "H"]
        wanted = [_Action.from_str(f"{stage}{kind}{k}") for kind, k in ops]
        assert runtime.pipeline_order[stage] == wanted
        assert len(wanted) == 8


def test_pipelines_with_different_schedules(plan: TrainingPlan) -> None:
    """They need one file each."""
    both = export_plan(plan, "torch-pipelining")
    assert both == export_plan(plan, "torch-pipelining", pipeline=1)
    order = list(plan.schedules[0].order)
    first, second, *rest = order[0]
    assert first[0] == second[0] == "F"
    order[0] = (second, first, *rest)
    old = plan.schedules[0]
    other = plan.replace(schedules=(Schedule(old.name, old.head, old.paths, tuple(order)),))
    with pytest.raises(ExportError, match="different schedules; select one with --pipeline"):
        export_plan(other, "torch-pipelining")
    assert export_plan(other, "torch-pipelining", pipeline=1) == both
    assert export_plan(other, "torch-pipelining", pipeline=0).startswith("0F1,0F0,")
    with pytest.raises(ExportError, match="must be 0 to 1 for this plan"):
        export_plan(plan, "torch-pipelining", pipeline=2)


def test_schedule_of_the_cycle_is_written(plan: TrainingPlan) -> None:
    """Not one that the cycle leaves out."""
    crooked = REFUSED["skip stages"](plan).schedules[0]
    both = plan.replace(schedules=(crooked, plan.schedules[0]), cycle=(1,))
    for to in TRAINERS:
        texts = [export_plan(one, to).splitlines() for one in (both, plan)]
        # comments name the plan
        alike = [[line for line in text if not line.startswith("# ")] for text in texts]
        assert alike[0] == alike[1]
    assert json.loads(export_plan(both, "ranks"))["ranks"][0]["pipeline"] == 0
    with pytest.raises(ExportError, match="skip stages"):
        export_plan(both.replace(cycle=(1, 0)), "megatron")


def layout_of(text: str) -> list[str]:
    """Parse Megatron's layout notation into layer kinds per stage."""
    words = shlex.split(text.partition("options=(")[2].partition("\n)")[0])
    layout = words[words.index("--pipeline-model-parallel-layout") + 1]
    stages = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), layout).split("|")
    assert len(stages) == int(words[words.index("--pipeline-model-parallel-size") + 1])
    return stages


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_megatron_gets_every_layer_once(kind: str) -> None:
    """Also with uneven stages."""
    plan = make_plan(GRID, workload=tiny_workload(kind))
    a, b, c = ["t" * (stop - start) for start, stop in plan.stage_layers]
    assert layout_of(export_plan(plan, "megatron")) == [f"E{a}", b, f"{c}L"]


def test_networkx_reads_the_graph(plan: TrainingPlan) -> None:
    """Edges carry activations forward and gradients back."""
    data = json.loads(export_plan(plan, "networkx"))
    graph = networkx.node_link_graph(data, edges="edges")
    ids = plan.cluster.network.ids
    neighbours = {(row[j], row[j + 1]) for row in GRID for j in range(2)}
    wanted = {(ids[a], ids[b]) for a, b in neighbours | {(b, a) for a, b in neighbours}}
    assert set(graph.edges) == wanted
    message = plan.workload.layers[0].output_bytes * plan.workload.microbatch_samples
    for a, b, edge in graph.edges(data=True):
        i, j = ids.index(a), ids.index(b)
        assert edge["microbatches"] == 4
        assert edge["bytes_per_step"] == pytest.approx(4 * message)
        assert edge["latency_s"] == plan.cluster.network.latency_s[i, j]
    for d, name in enumerate(ids):
        node = graph.nodes[name]
        assert node["stage"] == plan.stage_of[d]
        assert tuple(node["layers"]) == plan.stage_layers[node["stage"]]


def test_trace_equals_the_timelines_trace(plan: TrainingPlan, tmp_path: Path) -> None:
    """Byte for byte."""
    export_plan(plan, "chrome-trace", tmp_path / "a.json")
    simulate(plan).to_chrome_trace(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    with pytest.raises(ExportError, match="schedule must be 0 to 0 for this plan"):
        export_plan(plan, "chrome-trace", schedule=1)


def plan_with_paths(*rows: tuple[int, ...]) -> Callable[[TrainingPlan], TrainingPlan]:
    """Return a plan with these paths in turn; all forward passes come first."""

    def change(plan: TrainingPlan) -> TrainingPlan:
        old = plan.schedules[0]
        turns = tuple(rows[b % len(rows)] for b in range(len(old.paths)))
        bare = Schedule(old.name, old.head, turns, ())
        order = tuple(
            tuple((kind, b) for kind in "FHB" for b in own[kind])
            for own in bare.visits(len(plan.cluster))
        )
        return plan.replace(schedules=(Schedule(old.name, old.head, turns, order),))

    return change


def plan_with_averaging(group: AveragingGroup) -> Callable[[TrainingPlan], TrainingPlan]:
    """Return a plan with this averaging in its first stage."""
    return lambda plan: plan.replace(averaging=(((group,),), *plan.averaging[1:]))


def plan_with_aggregator(plan: TrainingPlan) -> TrainingPlan:
    """Return a plan with a seventh device that aggregates half of the first stage."""
    old, times, sums = plan.schedules[0], plan.compute_times, (True, True, False)
    wider = plan.replace(
        cluster=Cluster(random_network(7), Devices(1e12, 16e9)),
        compute_times=ComputeTimes.from_dict(
            {"source": "six and one"} | {name: (*getattr(times, name), 0.0) for name in FIELDS}
        ),
        schedules=(replace(old, order=(*old.order, ())),),
    )
    return plan_with_averaging(AveragingGroup((0, 3, 6), (0.25, 0.25, 0.5), sums, sums))(wider)


REFUSED: dict[str, Callable[[TrainingPlan], TrainingPlan]] = {
    "skip stages": plan_with_paths((0, 2), (3, 1, 4)),
    "swap stages": plan_with_paths((0, 2, 5), (3, 1, 4)),
    "flow between pipelines": plan_with_paths((0, 1, 2), (3, 1, 4), (0, 5, 4)),
    "unequal numbers of microbatches": plan_with_paths((0, 5, 2), (0, 5, 2), (3, 1, 4)),
    "that are routed at run time": lambda plan: plan.replace(wiring="stochastic"),
    "recomputation": lambda plan: plan.replace(recompute=(True, False, False)),
    "gradients encoded as int8": lambda plan: plan.replace(codec=Codec.INT8),
    "every 5 steps": lambda plan: plan.replace(sync=Sync(5)),
    "hierarchical averaging": lambda plan: plan.replace(
        averaging=(levels([(0,), (3,)], (0.5, 0.5)), *plan.averaging[1:])
    ),
    "unequal shares": plan_with_averaging(AveragingGroup((0, 3), (0.25, 0.75), (True, True))),
    "only aggregate gradients": plan_with_aggregator,
    "activations encoded as": lambda plan: plan.replace(
        workload=plan.workload.with_boundary_codec("int8")
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("to", TRAINERS)
def test_unsupported_plans_are_rejected(
    plan: TrainingPlan, tmp_path: Path, what: str, to: str
) -> None:
    """In one line with a remedy; nothing is written."""
    out = tmp_path / "out"
    with pytest.raises(ExportError, match=what) as error:
        export_plan(REFUSED[what](plan), to, out)
    assert str(error.value).startswith(f"{to} cannot express ")
    assert "; plan " in str(error.value)
    assert "\n" not in str(error.value)
    assert not out.exists()


def test_unsupported_models(plan: TrainingPlan) -> None:
    """And a head on the first stage."""
    for workload, said in (
        (tiny_workload(), "a gpt2 model"),
        (tiny_workload("llama", tied=True), "tied to the embedding"),
    ):
        with pytest.raises(ExportError, match=said):
            export_plan(make_plan(GRID, workload=workload), "torchtitan")
    bare = plan.replace(workload=plan.workload.replace(architecture=None))
    for to in ("torchtitan", "megatron", "nemo"):
        with pytest.raises(ExportError, match="not a known transformer"):
            export_plan(bare, to)
    with pytest.raises(ExportError, match="head on the first stage"):
        export_plan(make_plan(GRID, head="first"), "megatron")


def test_loss_scaling() -> None:
    """In fp16 Megatron scales the loss; the others cannot, and are refused."""
    like = tiny_workload("llama")
    workload = Workload.transformer(
        like.name, like.architecture, precision="fp16", batch_samples=like.batch_samples
    )
    plan = make_plan(GRID, workload=workload)
    script = export_plan(plan, "megatron")
    assert "--fp16" in script and "--accumulate-allreduce-grads-in-fp32" in script
    assert "--bf16" not in script
    for to in ("torchtitan", "nemo"):
        with pytest.raises(ExportError, match=r"fp16, which needs loss scaling; plan .* bf16"):
            export_plan(plan, to)


def test_ranks_of_plans_without_straight_pipelines(plan: TrainingPlan) -> None:
    """Rank maps, commands and graphs work for every plan."""
    flow = REFUSED["flow between pipelines"](plan)
    for entry in json.loads(export_plan(flow, "ranks"))["ranks"]:
        assert entry["pipeline"] is entry["mesh_rank"] is None
        assert entry["stage"] == plan.stage_of[entry["rank"]]


def test_every_format_has_a_description() -> None:
    """For the help text."""
    assert set(TRAINERS) < set(FORMATS)
    assert all(one.about for one in FORMATS.values())
