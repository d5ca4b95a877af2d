"""A run that memory cannot hold does not begin."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.network.cluster import Cluster, Devices
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import shape_of
from planner.problems.answers import AssignmentPlan
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan, random_network, tiny_workload
from tests.executor.faults import Started, saved

torch = pytest.importorskip("torch")

from planner.executor.comm.chunking import Chunking  # noqa: E402
from planner.executor.comm.codec import WireFormat  # noqa: E402
from planner.executor.comm.comm_plan import stage_averager  # noqa: E402
from planner.executor.comm.stage_averager import StageAverager  # noqa: E402
from planner.executor.fault_tolerance.shutdown import FAILED, REFUSED  # noqa: E402
from planner.executor.rendezvous.rank_group import RankGroup  # noqa: E402
from planner.executor.runtime.memory import (  # noqa: E402
    MemoryClaim,
    MemoryNeed,
    TooLittleMemoryError,
    buffer_bytes,
    memory_claims,
    memory_need,
    require_memory,
)
from planner.training_plan.averaging_group import AveragingGroup  # noqa: E402
from planner.workload.costs import stage_costs  # noqa: E402


def huge_plan() -> TrainingPlan:
    """Two stages of 2 TB each, which their devices are said to have."""
    arch = Architecture(Family.GPT2, 2, 1 << 17, 8, 8, 1 << 17, 1000, 16)
    workload = Workload.transformer("huge", arch, batch_samples=2, precision="bf16")
    cluster = Cluster(random_network(2), Devices(1e12, 1e14))
    problem = PlanningProblem(cluster, workload, PlanRequest(stages=2, network_name="random"), 0)
    return straight_plan(problem, shape_of(problem), AssignmentPlan.of_grid([[0, 1]]))


def test_too_little_memory_ends_all_in_one_line(tmp_path: Path) -> None:
    """With the numbers, before anything of the model is built; both ranks share the machine."""
    plan = huge_plan()
    path = saved(plan, tmp_path / "plan.json")
    with Started(tmp_path) as run:
        for d in ("0", "1"):
            run.start(d, d, ["-m", "planner.executor", str(path)])
        assert run.codes(["0", "1"]) == {"0": REFUSED, "1": FAILED}
        said = {run.reason(d) for d in ("0", "1")}
        assert len(said) == 1
        (line,) = said
    need = memory_need(plan, 0, stage_averager(plan, 0))
    assert need.planned_bytes > 1.5e12
    assert line.startswith(f"device '0' needs {need.total_bytes / 1e9:.3g} GB (weights, grad")
    assert "activations of 2 microbatches" in line and "and with 1 more that share it" in line
    assert "of this machine's memory, which has" in line
    assert line.endswith("or start fewer ranks here")


def ranks_that(me: int, told: list[list[MemoryClaim]]) -> Any:
    """One rank, and what all tell."""
    met: list[str] = []
    return SimpleNamespace(
        rank=me,
        joins_late=False,
        met=met,
        name=lambda r: f"d{r}",
        barrier=met.append,
        all_gather=lambda name, text: [json.dumps([asdict(c) for c in claims]) for claims in told],
    )


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    """Each alone would fit; another GPU and the machine are counted by themselves."""

    def claim(memory: str, need: float) -> MemoryClaim:
        return MemoryClaim(memory, f"GPU {memory}", need, 10e9, 0.9, {"planned": need})

    told = [[claim("a", 8e9)], [claim("b", 5e9)], [claim("b", 3.9e9), claim("host", 9e9)]]
    for me in range(3):
        ranks = ranks_that(me, told)
        require_memory(ranks, told[me])
        assert not ranks.met
    told[2][0] = claim("b", 4.1e9)
    said = []
    for me in range(3):
        ranks = ranks_that(me, told)
        if me == 1:
            with pytest.raises(TooLittleMemoryError) as found:
                require_memory(ranks, told[me])
            said.append(str(found.value))
        else:
            require_memory(ranks, told[me])
            assert ranks.met == ["memory/refused"]
    assert said[0].startswith(
        "device 'd1' needs 5 GB (planned 5) and with 1 more that share it 9.1 GB of GPU b, which "
        "has 10 GB free, 90% of it to be used; plan for less"
    )


def test_who_comes_late_asks_for_itself() -> None:
    """Nobody else is there to be asked: what they hold is not free any more."""
    ranks = RankGroup(1, 3, torch.distributed.HashStore(), ("d0", "d1", "d2"), joins_late=True)
    need = MemoryNeed({"stage": 5e9}, {})
    (claim,) = memory_claims(ranks, need, torch.device("cpu"))
    require_memory(ranks, [claim])
    with pytest.raises(TooLittleMemoryError, match=r"device 'd1' needs 5 GB .* of this machine's"):
        require_memory(ranks, [replace(claim, available_bytes=5e9)])


def test_a_gpus_rank_asks_two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's own, and the machine's for what goes to the network."""
    found = SimpleNamespace(name="NVIDIA H100", uuid="GPU-7")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70e9, 80e9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    ranks = ranks_that(0, [])
    need = MemoryNeed({"stage": 3e9}, {"more": 1e9}, {"copies": 1.5e9, "a checkpoint": 0.5e9})
    gpu, host = memory_claims(ranks, need, torch.device("cuda", 0))
    assert (gpu.need_bytes, gpu.available_bytes, gpu.name) == (4e9, 70e9, "NVIDIA H100")
    assert gpu.memory.endswith(" GPU-7") and gpu.memory.startswith(host.memory)
    assert host.need_bytes == 2e9 and host.parts == need.host_bytes and host.available_bytes > 0
    (alone,) = memory_claims(ranks, MemoryNeed({"stage": 3e9}, {"more": 1e9}), torch.device("cpu"))
    assert alone.need_bytes == 4e9 and alone.memory == host.memory
    assert ranks.met == ["memory/begun"] * 2


def test_what_a_rank_needs() -> None:
    """Planned bytes by the plan's rules; buffers, messages and copies by what is sent."""
    plan = make_plan([[0, 3], [2, 1]], workload=tiny_workload(batch_samples=8))
    averaging = stage_averager(plan, 3)
    found = memory_need(plan, 3, averaging)
    costs = stage_costs(plan.workload, *plan.stage_layers[1], with_head=True)
    live = plan.schedules[0].most_live()[3]
    assert found.planned_bytes == costs.need_bytes(live)
    # four messages are planned for
    assert live < 3 and found.extra_bytes["messages"] == 0 and not found.host_bytes
    measuring = memory_need(plan, 3, averaging, calibrate=True)
    assert measuring.total_bytes > found.total_bytes
    gpu = memory_need(plan, 3, averaging, on_gpu=True)
    # pinned by powers of two
    assert 1 << 16 < costs.gradient_bytes < 1 << 17 and costs.output_bytes == 2048
    messages = 2 * live * costs.output_bytes
    copies = (1 << 17) + found.extra_bytes["averaging"] + messages
    assert gpu.host_bytes == {"copies for the network": copies}
    keeps = memory_need(plan, 3, averaging, on_gpu=True, writes_checkpoints=True)
    assert keeps.host_bytes["a copy for checkpoints"] == 3 * costs.gradient_bytes
    assert memory_need(plan, 3, averaging, writes_checkpoints=True) == found
    assert not gpu.extra_bytes["averaging"]
    uses_collectives = memory_need(plan, 3, averaging, on_gpu=True, uses_collectives=True)
    assert not uses_collectives.extra_bytes["averaging"]
    # a copy in 16 bits, in which a library adds
    rounded = replace(averaging, wires=[WireFormat.BF16])
    uses_collectives = memory_need(plan, 3, rounded, on_gpu=True, uses_collectives=True)
    assert uses_collectives.extra_bytes["averaging"] == costs.gradient_bytes / 2


def test_buffers_hold_a_window_of_each_giver() -> None:
    """Counted by hand: 2 givers, 3 chunks of 25 values and one more that arrives."""
    group = AveragingGroup((0, 1, 2), (0.5, 0.25, 0.25), (True, True, True))
    own = StageAverager(0, [group], [Chunking(4, 2)], [WireFormat.FP32], 3, 1e9)
    assert buffer_bytes(own, 200) == 2 * 3 * 4 * (25 + 1)
    assert buffer_bytes(replace(own, wires=[WireFormat.BF16]), 200) == 2 * 3 * 2 * (25 + 1)
    assert buffer_bytes(replace(own, rank=1), 200) == 2 * 3 * 4 * (12 + 1)
