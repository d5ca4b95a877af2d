"""Training goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from planner.training_plan.file import save_plan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan, tiny_workload

torch = pytest.importorskip("torch")

from planner.executor.checkpoint.checkpoint import (  # noqa: E402
    CheckpointManager,
    lock_folder,
    require_fresh_folder,
    resume,
)
from planner.executor.checkpoint.checkpoint_files import INDEX, CheckpointError  # noqa: E402
from planner.executor.checkpoint.safetensors_io import (  # noqa: E402
    TensorFileError,
    read_tensors,
    write_tensors,
)
from planner.executor.rendezvous.file_digest import file_digest  # noqa: E402
from planner.executor.rendezvous.rank_group import RankGroup  # noqa: E402
from planner.executor.runtime.model_stage import ModelStage  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig, OptimizerKind  # noqa: E402
from tests.executor.forks import losses_by_step  # noqa: E402

ADAMW = OptimizerConfig().to_dict()
PLAN = make_plan([[0, 1], [2, 3]], workload=tiny_workload())
IDS = PLAN.cluster.network.ids


def test_a_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    """Until the first run ends."""
    lock = lock_folder(tmp_path)
    with pytest.raises(CheckpointError, match="another run writes to it; name another folder"):
        lock_folder(tmp_path)
    os.close(lock)
    os.close(lock_folder(tmp_path))


def test_resumed_losses_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """20 steps at once; 10 and, from the checkpoint, 10 more, with AdamW and two replicas."""
    path, folder = tmp_path / "plan.json", tmp_path / "checkpoints"
    save_plan(PLAN, path)
    rates = ("--warmup", "4", "--schedule", "cosine", "--schedule-steps", "18")
    code, whole, _ = losses_by_step(path, IDS, "--steps", "20", *rates)
    assert code == 0 and sorted(whole) == list(range(20))
    kept = ("--checkpoint", str(folder), "--every", "5")
    code, first, _ = losses_by_step(path, IDS, "--steps", "10", *kept, *rates)
    assert code == 0
    assert sorted(p.name for p in folder.iterdir()) == ["step-000005", "step-000010"]
    code, _, said = losses_by_step(path, IDS, "--steps", "20", "--resume", str(folder))
    asked = "give --schedule cosine --warmup 4 --schedule-steps 18"
    assert code == 2 and "this run has --schedule constant --warmup 0" in said[0]
    assert said[0].endswith(asked)
    code, second, said = losses_by_step(path, IDS, "--steps", "20", "--resume", str(folder), *rates)
    assert code == 0, said
    assert sorted(second) == list(range(10, 20))
    assert first | second == whole


def test_checkpoints_of_another_run_are_not_taken_away(tmp_path: Path) -> None:
    """A folder that holds some is gone on from, or another one is named."""
    require_fresh_folder(tmp_path / "new", None)
    (tmp_path / "step-000070").mkdir()
    require_fresh_folder(tmp_path, None)
    (tmp_path / "step-000070" / "index.json").write_text("{}")
    require_fresh_folder(tmp_path, tmp_path / ".." / tmp_path.name)
    for resumed in (None, tmp_path / "other"):
        with pytest.raises(CheckpointError, match=r"the last after 70 steps; continue .* --resume"):
            require_fresh_folder(tmp_path, resumed)
    (tmp_path / "link").symlink_to(tmp_path)
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    code, _, said = losses_by_step(
        path, IDS, "--steps", "1", "--checkpoint", str(tmp_path / "link")
    )
    assert code == 2 and "holds checkpoints, the last after 70 steps" in said[0]


def test_a_folder_that_cannot_be_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before hours of training; a full disk may have room by then."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"--checkpoint .* cannot be written to .* name"):
            require_fresh_folder(folder, None)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    require_fresh_folder(tmp_path / "new", None)


@pytest.mark.slow
def test_resumed_on_a_text(tmp_path: Path) -> None:
    """A folder of shards goes on within a shuffled block, as one process reads it; another is said.

    Steps of 8 samples, blocks of 12, an epoch of 60.
    """
    from itertools import islice

    from planner.executor.data.data_config import DataConfig
    from tests.executor.reference import train_single

    arch = Architecture(Family.GPT2, 4, 32, 4, 4, 64, 256, 16)
    workload = Workload.transformer("bytes", arch, batch_samples=8, precision="fp32")
    plan = make_plan([[0, 1], [2, 3]], workload=workload)
    path, folder, text = tmp_path / "plan.json", tmp_path / "checkpoints", tmp_path / "text"
    save_plan(plan, path)
    text.mkdir()
    for name, words in (("a", "one line\n"), ("b", "another, and longer\n")):
        (text / name).write_text(words * 33)
    data = ("--data", str(text), "--shuffle", "12")
    code, whole, said = losses_by_step(path, IDS, "--steps", "12", *data)
    assert code == 0, said
    single = train_single(plan, 12, OptimizerConfig(), DataConfig(text, buffer=12))
    torch.set_num_threads(1)
    expected = [loss for loss, _ in islice(single, 12)]
    assert [whole[step] for step in range(12)] == pytest.approx(expected, rel=1e-5)
    kept = ("--checkpoint", str(folder), "--every", "7")
    code, first, _ = losses_by_step(path, IDS, "--steps", "7", *kept, *data)
    assert code == 0
    code, second, said = losses_by_step(path, IDS, "--steps", "12", "--resume", str(folder), *data)
    assert code == 0, said
    assert first | second == whole
    (text / "c").write_text("more")
    code, _, said = losses_by_step(path, IDS, "--steps", "12", "--resume", str(folder), *data)
    assert code == 2
    assert "was trained on 2 files, 957 bytes, bytes, 12 shuffled, this run has 3 files" in said[0]


def rank(make_model_stage: int = 0, count: int = 1) -> tuple[RankGroup, ModelStage]:
    """One rank alone, with a stage of the plan."""
    store = torch.distributed.HashStore()
    return RankGroup(0, count, store, ("0", "1", "2", "3")[:count]), model_stage(make_model_stage)


def model_stage(device: int, optimizer: str = "adamw") -> ModelStage:
    """A stage that has taken a step."""
    optimizer_config = OptimizerConfig(1e-3, OptimizerKind(optimizer))
    found = ModelStage(PLAN, device, torch.device("cpu"), optimizer_config)
    for parameter in found.parameters:
        parameter.grad.fill_(0.5)
    found.optimizer.step()
    return found


STEPS = 10
"""Of a run that resumes."""


def write(folder: Path, steps: list[int], every: int = 1) -> list[int]:
    """Checkpoints of one rank; returns those that were written."""
    written: list[int] = []
    for step in steps:
        ranks, made = rank()
        settings = OptimizerConfig().to_dict()
        checkpoints = CheckpointManager(folder, every, PLAN, ranks, made, settings, written.append)
        checkpoints.after_step(step - 1)
    return written


def test_two_are_kept(tmp_path: Path) -> None:
    """And only every so many steps."""
    assert write(tmp_path, [2, 3, 4, 6, 8], every=2) == [2, 4, 6, 8]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000008"]
    # what was not finished goes with the next one that is; other things and later ones stay
    (tmp_path / "step-000008" / INDEX).unlink()
    for name in ("mine", "step-by-step", "step-000007", "step-000020"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000007" / "thesis.pt").write_text("mine")
    (tmp_path / "step-000009").write_text("a file")
    assert write(tmp_path, [10], every=2) == [10]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "mine") == [
        *("step-000006", "step-000007", "step-000009", "step-000010"),
        *("step-000020", "step-by-step"),
    ]


def test_the_newest_complete_one_is_taken(tmp_path: Path) -> None:
    """One without an index was not finished; parameters and moments come back."""
    write(tmp_path, [2, 4])
    (tmp_path / "step-000004" / INDEX).unlink()
    ranks, made = rank()
    expected = {name: value.clone() for name, value in made.state_dict().items()}
    for parameter in made.parameters:
        parameter.data.zero_()
    made.optimizer.state.clear()
    assert resume(tmp_path, PLAN, ranks, made, ADAMW, STEPS) == 2
    found = made.state_dict()
    assert found.keys() == expected.keys() and any("exp_avg" in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("content", ["", '{"version": 3, "pl'])
def test_a_power_failure_costs_the_checkpoint(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index that is empty or cut off is none: the one before is taken, which is said."""
    write(tmp_path, [2, 4])
    index = tmp_path / "step-000004" / INDEX
    index.write_text(content)
    assert resume(tmp_path, PLAN, *rank(), ADAMW, STEPS) == 2
    said = capsys.readouterr().err
    assert f"{index}: is empty or not JSON" in said and "checkpoint after 2 steps" in said
    write(tmp_path, [6, 8])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000008"]


def test_the_index_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes before it gets its name, then its folder, then the folder of all."""
    synced: list[str] = []
    usual = os.fsync

    def fsync(descriptor: int) -> None:
        usual(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path, [2])
    assert synced[0].startswith(".device-0000") and synced[1] == "step-000002"
    assert synced[2].startswith(f".{INDEX}.")
    assert synced[3:] == ["step-000002", tmp_path.name]


def test_the_newest_that_is_the_same_for_all_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each node may have a folder of its own, with checkpoints of its own past."""
    write(tmp_path, [2, 4])
    same, other = file_digest(tmp_path / "step-000002" / INDEX), "another's"

    def beside(found: list[tuple[int, str]]) -> RankGroup:
        store = torch.distributed.HashStore()
        store.set("checkpoints/1", json.dumps(found))
        return RankGroup(0, 2, store, ("0", "1"))

    for found in ([(2, same), (4, other)], [(2, same)]):
        assert resume(tmp_path, PLAN, beside(found), rank()[1], ADAMW, STEPS) == 2
        passed_over = f"{tmp_path / 'step-000004' / INDEX}: device '1' does not have its file of it"
        assert f"{passed_over}; resuming from the checkpoint after 2" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="after 4 steps is another one than on other devices"):
        resume(tmp_path, PLAN, beside([(2, other), (4, other)]), rank()[1], ADAMW, STEPS)
    with pytest.raises(CheckpointError, match="no complete checkpoint that all devices have"):
        resume(tmp_path, PLAN, beside([(6, same)]), rank()[1], ADAMW, STEPS)


def test_settings_without_effect_do_not_count(tmp_path: Path) -> None:
    """Whatever a checkpoint says of them; those that count are compared."""
    write(tmp_path, [2])
    index = tmp_path / "step-000002" / INDEX
    data = json.loads(index.read_text())
    data["settings"]["min_lr_ratio"] = 0.0  # for a cosine alone
    index.write_text(json.dumps(data))
    assert resume(tmp_path, PLAN, *rank(), ADAMW, STEPS) == 2
    data["settings"]["eps"] = 1e-3
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"was trained with --eps 0\.001, this"):
        resume(tmp_path, PLAN, *rank(), ADAMW, STEPS)


def test_what_cannot_be_gone_on_from_is_one_line(tmp_path: Path) -> None:
    """Nothing there, another plan or optimizer, a damaged shard, an index that is none."""
    ranks, made = rank()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        resume(tmp_path / "nowhere", PLAN, ranks, made, ADAMW, STEPS)
    write(tmp_path, [2])
    place = tmp_path / "step-000002"
    sgd = OptimizerConfig(optimizer=OptimizerKind.SGD).to_dict()
    faster = sgd | {"learning_rate": 0.5}
    with pytest.raises(CheckpointError) as error:
        resume(tmp_path, PLAN, rank()[0], made, faster, STEPS)
    was, has = str(error.value).split("was trained with ")[1].split(", this run has ")
    assert was == "--learning-rate 0.001 --optimizer adamw"
    assert has == f"--learning-rate 0.5 --optimizer sgd; give {was}"
    # to evaluate alone, no optimizer is needed
    sgd = OptimizerConfig(optimizer=OptimizerKind.SGD).to_dict()
    assert resume(tmp_path, PLAN, rank()[0], made, sgd, 2) == 2
    other = make_plan([[0, 1], [2, 3]], workload=tiny_workload(), seed=1)
    with pytest.raises(CheckpointError, match=r"whose model has seed 0, this plan's has 1; plan"):
        resume(tmp_path, other, rank()[0], made, ADAMW, STEPS)
    index = json.loads((place / INDEX).read_text())
    for wrong in ({}, {"says": "synthetic"}, {"says": "synthetic", "position": 1}):
        (place / INDEX).write_text(json.dumps(index | {"data": wrong}))
        with pytest.raises(CheckpointError, match=r"cannot be read \(no position in the data\)"):
            resume(tmp_path, PLAN, rank()[0], made, ADAMW, STEPS)
    (place / INDEX).write_text(json.dumps(index))
    shard = next(place.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(TensorFileError, match="not those that were written"):
        resume(tmp_path, PLAN, rank()[0], made, ADAMW, STEPS)
    (place / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="cannot be read"):
        resume(tmp_path, PLAN, rank()[0], made, ADAMW, STEPS)


def test_a_full_disk_costs_the_checkpoint_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said; the one before stays, and nothing half written."""
    assert write(tmp_path, [1]) == [1]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planner.utils.atomic_write.os.fsync", full)
    assert write(tmp_path, [2]) == []
    assert "no checkpoint after 2 steps: device '0': No space left" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert resume(tmp_path, PLAN, *rank(), ADAMW, STEPS) == 1


def test_an_index_that_one_rank_cannot_write_costs_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all ranks, also where they share a folder."""
    _, made = rank()
    ranks = RankGroup(0, 1, torch.distributed.HashStore(), ("0", "1"))
    manager = CheckpointManager(tmp_path, 1, PLAN, ranks, made, ADAMW, lambda steps: None)
    monkeypatch.setattr(
        RankGroup,
        "all_gather",
        lambda self, name, text: (
            [text, "No space left on device"] if name.endswith("index") else [text]
        ),
    )
    manager.after_step(0)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_beside_training_holds_the_state_after_its_step(tmp_path: Path) -> None:
    """Though training goes on while it is written; it is complete a quarter of the steps later."""
    ranks, made = rank()
    written: list[int] = []
    manager = CheckpointManager(tmp_path, 8, PLAN, ranks, made, ADAMW, written.append, beside=True)
    expected = {name: value.clone() for name, value in made.state_dict().items()}
    complete_after = {}
    for step in range(7, 12):
        manager.after_step(step)
        complete_after[step + 1] = list(written)
        for parameter in made.parameters:
            parameter.grad.fill_(0.25)
        made.optimizer.step()
    assert complete_after == {8: [], 9: [], 10: [8], 11: [8], 12: [8]}
    _, resumed = rank()
    assert resume(tmp_path, PLAN, *rank()[:1], resumed, ADAMW, STEPS) == 8
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_checkpoint_beside_training_is_complete_at_the_end(tmp_path: Path) -> None:
    ranks, made = rank()
    written: list[int] = []
    manager = CheckpointManager(tmp_path, 8, PLAN, ranks, made, ADAMW, written.append, beside=True)
    manager.after_step(7)
    manager.finish()
    manager.finish()
    assert written == [8]


def test_a_checkpoint_that_is_given_up_is_not_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new generation does not wait for it, and writes its own later."""
    ranks, made = rank()
    written: list[int] = []
    begun = threading.Event()

    def write_slowly(*args: Any, cancelled: threading.Event) -> str:
        begun.set()
        assert cancelled.wait(60)
        return write_tensors(*args, cancelled=cancelled)

    manager = CheckpointManager(tmp_path, 8, PLAN, ranks, made, ADAMW, written.append, beside=True)
    monkeypatch.setattr("planner.executor.checkpoint.checkpoint.write_tensors", write_slowly)
    manager.after_step(7)
    assert begun.wait(60)
    manager.set_plan(PLAN, made)
    assert list((tmp_path / "step-000008").iterdir()) == []
    monkeypatch.undo()
    manager.after_step(7)
    manager.finish()
    assert written == [8]


def test_a_last_checkpoint_that_was_interrupted_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where one is due after the last step, and not complete."""
    write(tmp_path, [2, 4])
    ranks, made = rank()
    manager = CheckpointManager(tmp_path, 2, PLAN, ranks, made, ADAMW, lambda steps: None)
    for steps in (3, 4):
        manager.warn_if_missing(steps)
    assert capsys.readouterr().err == ""
    (tmp_path / "step-000004" / INDEX).unlink()
    manager.warn_if_missing(4)
    said = capsys.readouterr().err
    assert said == (
        "planner.executor: no checkpoint after 4 steps: a device was lost while it was written\n"
    )


def test_tensors_in_a_file(tmp_path: Path) -> None:
    """Every type and shape comes back, and the header is what safetensors has."""
    tensors = {
        "a": torch.randn(3, 5),
        "count": torch.tensor(7.0),
        "half": torch.randn(7).to(torch.bfloat16),
        "none": torch.zeros(0, 4),
        "whole": torch.arange(6).view(2, 3),
    }
    path = tmp_path / "t.safetensors"
    found = read_tensors(path, write_tensors(path, tensors))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["a"] == {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}
    assert len(data) == 8 + length + header["whole"]["data_offsets"][1]
