"""Held-out loss is that of one process with the same parameters, along the same paths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.cli.main import main
from planner.executor.launch.arguments import parse_arguments
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan, random_network
from tests.executor.forks import run_plan

torch = pytest.importorskip("torch")

from planner.executor.runtime.evaluate import forward_only  # noqa: E402
from planner.executor.runtime.model_stage import ModelStage  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from tests.executor.checkpoints import read_shard  # noqa: E402

STEPS, EVERY, BATCHES, SEQUENCE = 6, 4, 3, 16
TEXT = "a line that nobody has seen before; " * 40


def bytes_workload(precision: str = "fp32") -> Workload:
    """Four layers that know bytes."""
    arch = Architecture(Family.LLAMA, 4, 32, 4, 2, 64, 256, SEQUENCE)
    return Workload.transformer("bytes", arch, batch_samples=6, precision=precision)


def skipping() -> TrainingPlan:
    """Two iterations skip a stage, one visits both."""
    cluster = pl.Cluster(random_network(3, 5), pl.Devices(1e9, 16e9))
    wanted: dict[str, Any] = {"stage_sizes": (2, 1), "path_stages": 1, "full_every": 3}
    made = pl.plan(cluster, bytes_workload(), stop=pl.MaxIterations(2), **wanted).plan
    assert made.cycle == (0, 0, 1)
    return made


PLANS = {
    "2 x 2": lambda: make_plan([[0, 3], [2, 1]], workload=bytes_workload()),
    "2 x 2 in bf16": lambda: make_plan([[0, 3], [2, 1]], workload=bytes_workload("bf16")),
    "head first": lambda: make_plan([[0, 2, 1]], workload=bytes_workload(), head="first"),
    "skipping": skipping,
}


def train(plan: TrainingPlan, folder: Path, *more: str) -> list[dict[str, Any]]:
    """What rank 0 tells."""
    path = folder / "plan.json"
    save_plan(plan, path)
    code, events, said = run_plan(path, plan.cluster.network.ids, "--steps", str(STEPS), *more)
    assert code == 0, said
    return events


def losses_of(events: list[dict[str, Any]]) -> dict[int, float]:
    """By step."""
    found = {
        e["loss_step" if e["event"] == "step" else "step"]: e["loss"]
        for e in events
        if e["event"] in ("step", "loss")
    }
    found.pop(None, None)
    return found


def by_hand(plan: TrainingPlan, kept: Path, paths: Sequence[tuple[int, ...]]) -> float:
    """Mean loss of the text's first tokens with the checkpoint's parameters, in one process."""
    stage_modules = []
    for rank in range(len(plan.cluster)):
        model_stage = ModelStage(plan, rank, torch.device("cpu"), OptimizerConfig())
        model_stage.load_state_dict(read_shard(kept, STEPS, rank, plan))
        stage_modules.append(model_stage)
    modules = [one.module for one in stage_modules]
    head = next(one.head.to(one.dtype) for one in modules if one.head is not None)
    tokens = torch.tensor(list(TEXT.encode() * 2))
    total, samples = 0.0, plan.workload.batch_samples
    with torch.no_grad():
        for batch in range(BATCHES):
            for b, path in enumerate(paths):
                start = (batch * samples + b) * SEQUENCE
                x = tokens[start : start + SEQUENCE][None]
                for rank in path:
                    x = stage_modules[rank].module.run_stage(x)
                logits = head.project(head.norm(x))[0].float()
                want = tokens[start + 1 : start + SEQUENCE + 1]
                total -= float(logits.log_softmax(-1)[range(SEQUENCE), want].sum())
    return total / (BATCHES * samples * SEQUENCE)


QUICK = {"skipping", "2 x 2 in bf16"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANS],
)
def test_held_out_loss_equals_one_process(name: str, tmp_path: Path) -> None:
    """Every four steps and after the last, of all schedules; training goes on as without."""
    plan = PLANS[name]()
    held, kept = tmp_path / "held.txt", tmp_path / "kept"
    held.write_text(TEXT)
    options = [
        *("--eval-data", str(held), "--eval-every", str(EVERY)),
        *("--eval-batches", str(BATCHES), "--learning-rate", "1e-2"),
    ]
    events = train(plan, tmp_path, *options, "--checkpoint", str(kept), "--every", str(STEPS))
    found = [e for e in events if e["event"] == "evaluated"]
    used = [plan.schedules[k] for k in dict.fromkeys(plan.cycle)]
    assert [e["steps"] for e in found] == [t for t in (EVERY, STEPS) for _ in used]
    for event, schedule in zip(found[-len(used) :], used, strict=True):
        assert event["loss"] == pytest.approx(by_hand(plan, kept, schedule.paths), rel=1e-5)
        assert event["perplexity"] == pytest.approx(math.exp(event["loss"]))
    several = ["all stages"] if len(used) == 1 else ["1 of 2 stages", "all stages"]
    assert [e["paths"] for e in found[: len(used)]] == several
    # it has learned something meanwhile, and evaluating has changed nothing
    assert found[0]["loss"] != found[-len(used)]["loss"]
    plain = train(plan, tmp_path, "--learning-rate", "1e-2")
    assert losses_of(plain) == losses_of(events)
    if name == "skipping":
        # what was trained is evaluated along any plan's paths, without another step
        # or the options of the optimizer
        alone = [word for word in options if word not in ("--learning-rate", "1e-2")]
        assert evaluated_alone([[0], [1], [2]], tmp_path, kept, alone) == pytest.approx(
            [found[-1]["loss"]], rel=1e-5
        )


def evaluated_alone(
    groups: list[list[int]], folder: Path, kept: Path, options: Sequence[str]
) -> list[float]:
    """Held-out losses of a checkpoint, along the paths of another plan."""
    other = make_plan(groups, workload=bytes_workload())
    events = train(other, folder, *options, "--resume", str(kept))
    assert not [e for e in events if e["event"] in ("step", "loss")]
    assert {e["steps"] for e in events if e["event"] == "evaluated"} == {STEPS}
    return [e["loss"] for e in events if e["event"] == "evaluated"]


def test_the_beginning_is_evaluated_too(tmp_path: Path) -> None:
    """No step at all: parameters that the seed has made, or weights from a file."""
    (tmp_path / "held.txt").write_text(TEXT)
    path = tmp_path / "plan.json"
    save_plan(make_plan([[0, 1]], workload=bytes_workload()), path)
    more = ["--eval-data", str(tmp_path / "held.txt"), "--eval-batches", "2"]
    code, events, said = run_plan(path, ("0", "1"), "--steps", "0", *more)
    assert code == 0, said
    (event,) = (e for e in events if e["event"] == "evaluated")
    assert event["steps"] == 0
    assert event["loss"] == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize("name", PLANS)
def test_forward_passes_have_an_order_without_waiting_for_ever(name: str) -> None:
    """All F and H once; devices that each do their next ready operation reach the end."""
    plan = PLANS[name]()
    for schedule in plan.schedules:
        made = forward_only(schedule)
        for before, after in zip(schedule.order, made.order, strict=True):
            assert sorted(op for op in before if op[0] != "B") == sorted(after)
        done: set[tuple[str, int, int]] = set()
        queues = [list(ops) for ops in made.order]
        chains = [[op for op in made.chain(b) if op[0] != "B"] for b in range(len(made.paths))]
        progress = True
        while progress:
            progress = False
            for device, queue in enumerate(queues):
                while queue:
                    kind, b = queue[0]
                    chain = chains[b]
                    place = chain.index((kind, device))
                    if place and (*chain[place - 1], b) not in done:
                        break
                    done.add((kind, device, b))
                    queue.pop(0)
                    progress = True
        assert not any(queues)


def test_what_cannot_be_evaluated_is_one_line(tmp_path: Path) -> None:
    """No such text; one too short, which is said before the first step."""
    from planner.executor.data.consistency import require_same_data
    from planner.executor.data.data_config import DataConfig
    from planner.executor.data.microbatches import make_microbatches
    from planner.executor.rendezvous.rank_group import RankGroup

    plan = make_plan([[0]], workload=bytes_workload())
    ranks = RankGroup(0, 1, torch.distributed.HashStore())
    (tmp_path / "short").write_text("x" * SEQUENCE)
    for name, message in (
        ("none", "none: is no text file"),
        (
            "short",
            "--eval-data: there are 16 tokens, fewer than a sample of 17; give a longer text",
        ),
    ):
        data = DataConfig(tmp_path / name, buffer=1)
        with pytest.raises(ValueError, match=message):
            require_same_data(ranks, "--eval-data", make_microbatches(plan, data))
    short = make_microbatches(plan, DataConfig(tmp_path / "short"))
    with pytest.raises(ValueError, match="--data: there are 16 tokens"):
        require_same_data(ranks, "--data", short)


@pytest.mark.parametrize("option", ["--eval-every", "--eval-batches"])
def test_evaluating_never_or_nothing_is_refused_before_anything_starts(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the command, and by a rank before it waits for others."""
    path = tmp_path / "plan.json"
    save_plan(make_plan([[0, 1]], workload=bytes_workload()), path)
    assert main(["run", str(path), option, "0"]) == 2
    assert f"{option} is 0; give at least 1" in capsys.readouterr().err
    config = parse_arguments([str(path), "--devices", "0", option, "0"], None)
    with pytest.raises(ValueError, match=f"{option} is 0; give at least 1"):
        config.validate()
