"""Hugging Face weights: what is loaded, trained and written is what ``transformers`` computes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from planner.cli.main import main
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import Sync
from planner.workload.workload import Workload
from tests.conftest import make_plan
from tests.executor.faults import Started, whole
from tests.executor.forks import losses_by_step

if TYPE_CHECKING:
    from torch import Tensor

    from planner.executor.runtime.model_stage import ModelStage

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from planner.executor.rendezvous import file_digest  # noqa: E402
from planner.huggingface.weights import load_weights, weight_digests  # noqa: E402

SEQUENCE, STEPS = 16, 4
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2 | NO_DROPOUT),
    "gpt2 untied": (
        "GPT2",
        GPT2 | NO_DROPOUT | {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
    "llama": ("Llama", LLAMA),
    "llama tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "llama wide heads": ("Llama", LLAMA | {"head_dim": 12}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5}),
    "mistral long window": ("Mistral", LLAMA | {"sliding_window": 64}),
    "qwen2": ("Qwen2", LLAMA | {"rms_norm_eps": 1e-4}),
    "qwen2 sliding": (
        "Qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8}),
    "qwen3 wide heads, tied": (
        "Qwen3",
        LLAMA | {"head_dim": 20, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
}


def theirs(name: str) -> Any:
    """A model of ``transformers`` whose every weight is random, norms and biases too."""
    kind, fields = MODELS[name]
    rope = (
        {} if kind == "GPT2" else {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    )
    config = getattr(transformers, f"{kind}Config")(**fields, **rope)
    torch.manual_seed(1)
    head = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def saved(name: str, folder: Path, **options: Any) -> Path:
    """Its folder."""
    theirs(name).save_pretrained(folder, **options)
    return folder


def plan_for(folder: Path, grid: list[list[int]], head: str = "last") -> TrainingPlan:
    """Of the folder's model."""
    workload = Workload.from_hf_config(
        folder / "config.json",
        sequence=SEQUENCE,
        batch_samples=8,
        precision="fp32",
    )
    return make_plan(grid, workload=workload, head=head)


def make_model_stage(plan: TrainingPlan, rank: int, folder: Path | None) -> ModelStage:
    """A stage with the folder's weights."""
    from planner.executor.runtime.model_stage import ModelStage
    from planner.executor.runtime.optimizer import OptimizerConfig

    return ModelStage(
        plan,
        rank,
        torch.device("cpu"),
        OptimizerConfig(1e-3),
        load_weights=None if folder is None else partial(load_weights, folder),
    )


def our_logits(stage_modules: list[ModelStage], tokens: Tensor) -> Any:
    """Of stages one after the other."""
    x = tokens
    with torch.no_grad():
        for model_stage in stage_modules:
            x = model_stage.module.stage(x)
        head = next(
            model_stage.module.head
            for model_stage in stage_modules
            if model_stage.module.head is not None
        )
        return head.project(head.norm(x))


def their_logits(folder: Path, tokens: Tensor, **options: Any) -> Any:
    """Of what a folder holds, loaded by ``transformers`` with nothing missing or left over."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert next(model.parameters()).dtype == torch.float32
    with torch.no_grad():
        return model.eval()(tokens).logits


def some_tokens() -> Any:
    """Three samples."""
    return torch.randint(61, (3, SEQUENCE), generator=torch.Generator().manual_seed(5))


def export_of(
    plan: TrainingPlan, stage_modules: list[ModelStage], out: Path, like: Path | None
) -> None:
    """What a run does at its end, of all ranks."""
    from planner.huggingface.export import Export

    export = Export(out, plan, like)
    written: dict[str, list[int]] = {}
    for rank, model_stage in enumerate(stage_modules):
        written |= export.write(rank, dict(model_stage.module.named_parameters()))
    export.finish(written)


@pytest.mark.parametrize("name", MODELS)
def test_loaded_and_written_models_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Parameters counted, logits after load in one and in two stages, and after export."""
    model = theirs(name)
    folder = saved(name, tmp_path / "given")
    tokens = some_tokens()
    with torch.no_grad():
        want = model(tokens).logits
    copied = model.get_input_embeddings().weight.numel() * model.config.tie_word_embeddings
    for plan in (plan_for(folder, [[0]]), plan_for(folder, [[0, 1]])):
        assert plan.workload.parameters == model.num_parameters()
        ranks = range(len(plan.cluster))
        stage_modules = [make_model_stage(plan, rank, folder) for rank in ranks]
        held = sum(p.numel() for model_stage in stage_modules for p in model_stage.parameters)
        # what embedding and head share is on both stages
        assert held == model.num_parameters() + copied * plan.must_average_tied
        torch.testing.assert_close(our_logits(stage_modules, tokens), want, atol=1e-5, rtol=1e-5)
        other = our_logits([make_model_stage(plan, rank, None) for rank in ranks], tokens)
        assert (other - want).abs().max() > 0.1
        for like in (None, folder):
            out = tmp_path / f"out-{len(ranks)}-{like is None}"
            export_of(plan, stage_modules, out, like)
            torch.testing.assert_close(their_logits(out, tokens), want, atol=1e-5, rtol=1e-5)
            # what was written can be planned with, and loaded again
            again = plan_for(out, [[0]])
            found = our_logits([make_model_stage(again, 0, out)], tokens)
            torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2 untied", "qwen2"])
def test_shards_and_half_precision(name: str, tmp_path: Path) -> None:
    """Several files with an index, in bfloat16; exported, the config says float32."""
    model = theirs(name).to(torch.bfloat16)
    folder = tmp_path / "given"
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    plan = plan_for(folder, [[0, 1, 2]])
    stage_modules = [make_model_stage(plan, rank, folder) for rank in range(3)]
    tokens = some_tokens()
    want = their_logits(folder, tokens, dtype=torch.float32)
    torch.testing.assert_close(our_logits(stage_modules, tokens), want, atol=1e-5, rtol=1e-5)
    export_of(plan, stage_modules, tmp_path / "out", folder)
    torch.testing.assert_close(their_logits(tmp_path / "out", tokens), want, atol=1e-5, rtol=1e-5)


def test_a_rank_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two stages reads its layers and the head."""
    from planner.huggingface import weights

    folder = saved("llama", tmp_path)
    read: list[str] = []
    original = weights._Files.read

    def noting(self: Any, part: Any, shape: Any) -> Tensor:
        read.append(part.name)
        found: Tensor = original(self, part, shape)
        return found

    monkeypatch.setattr(weights._Files, "read", noting)
    plan = plan_for(folder, [[0, 1]])
    make_model_stage(plan, 1, folder)
    layers = {name.split(".")[2] for name in read if ".layers." in name}
    assert layers == {"2", "3"}
    rest = {name for name in read if ".layers." not in name}
    assert rest == {"model.norm.weight", "lm_head.weight"}


def run_ranks(plan: TrainingPlan, folder: Path, *more: str) -> tuple[int, list[float], str]:
    """All ranks on this machine; exit code, losses, what was said on stderr."""
    save_plan(plan, folder / "plan.json")
    words = ("--steps", str(STEPS), *more)
    code, found, said = losses_by_step(folder / "plan.json", plan.cluster.network.ids, *words)
    return code, [found[step] for step in sorted(found)], "\n".join(said)


def trained_by_transformers(name: str, plan: TrainingPlan) -> tuple[Any, list[float]]:
    """The same steps by another program: its model, a plain loop, PyTorch's AdamW."""
    from planner.executor.data.synthetic import Synthetic

    model = theirs(name)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    w = plan.workload
    batches = Synthetic(61, SEQUENCE, w.microbatch_samples, plan.seed)
    losses = []
    for step in range(STEPS):
        rows = torch.cat([batches.tokens(step, b) for b in range(w.batch_samples)])
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        # two steps of warm-up, then a cosine that ends with the fourth step
        ended = max(0.0, (step - 2) / 2)
        rate = 2e-3 * (step + 1) / 2 if step < 2 else 1e-3 * (1 + np.cos(np.pi * ended))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


CASES = {
    "gpt2": ([[0, 1], [2, 3]], "first"),
    "llama": ([[0, 3], [2, 1]], "last"),
    "mistral": ([[0, 1]], "first"),
    "qwen2": ([[0], [1]], "last"),
    "qwen3": ([[0, 1]], "last"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("gpt2", "qwen2") else pytest.mark.slow)
        for name in CASES
    ],
)
def test_trained_and_exported_as_transformers_trains(name: str, tmp_path: Path) -> None:
    """From the same weights: losses, and logits of the exported model; also from a checkpoint."""
    folder = saved(name, tmp_path / "given")
    plan = plan_for(folder, *CASES[name])
    out, kept = tmp_path / "out", tmp_path / "kept"
    code, losses, said = run_ranks(
        plan,
        tmp_path,
        *("--weights", str(folder), "--export", str(out)),
        *("--checkpoint", str(kept), "--every", str(STEPS)),
        *("--learning-rate", "2e-3", "--warmup", "2", "--schedule", "cosine"),
        *("--min-lr-ratio", "0", "--weight-decay", "0.1", "--beta2", "0.95"),
    )
    assert code == 0, said
    model, want = trained_by_transformers(name, plan)
    assert losses == pytest.approx(want, rel=1e-5)
    tokens = some_tokens()
    with torch.no_grad():
        logits = model(tokens).logits
    torch.testing.assert_close(their_logits(out, tokens), logits, atol=1e-4, rtol=0)
    again = tmp_path / "again"
    words = ["weights", str(tmp_path / "plan.json"), "--checkpoint", str(kept)]
    assert main([*words, "--out", str(again), "--like", str(folder)]) == 0
    assert sorted(p.name for p in again.iterdir()) == sorted(p.name for p in out.iterdir())
    for path in out.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_a_checkpoint_is_exported_by_another_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same model, as after a loss; a missing folder or file is one line."""
    folder, kept = saved("qwen2", tmp_path / "given"), tmp_path / "kept"
    plan, other = plan_for(folder, [[0, 1]]), plan_for(folder, [[0]])
    done = run_ranks(plan, tmp_path, "--checkpoint", str(kept), "--every", str(STEPS))
    assert done[0] == 0, done[2]
    found = []
    for made, name in ((plan, "own"), (other, "other")):
        save_plan(made, tmp_path / f"{name}.json")
        words = ["weights", str(tmp_path / f"{name}.json"), "--out", str(tmp_path / name)]
        assert main([*words, "--checkpoint", str(kept)]) == 0
        found.append(their_logits(tmp_path / name, some_tokens()))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    shutil.rmtree(tmp_path / "other")
    assert main([*words, "--checkpoint", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no complete checkpoint; name the folder" in capsys.readouterr().err
    (lost,) = kept.glob("step-*/device-0001*")
    lost.unlink()
    assert main([*words, "--checkpoint", str(kept)]) == 2
    assert f"{lost}: is not here; bring the nodes' folders together" in capsys.readouterr().err


def test_the_tokenizer_of_the_training_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the weights, or the one that was named: a file, or a folder and what it has."""
    from planner.huggingface.export import Export

    folder = saved("llama", tmp_path / "given")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(f"the weights' {name}")
    (tmp_path / "named").mkdir()
    named = tmp_path / "named" / "tokenizer.json"
    named.write_text("the named one")
    plan = plan_for(folder, [[0]])
    for number, (like, tokenizer, expected) in enumerate(
        [
            (folder, None, "the weights' tokenizer.json"),
            (folder, named, "the named one"),
            (folder, folder / "tokenizer.json", "the weights' tokenizer.json"),
            (None, named.parent, "the named one"),
        ]
    ):
        out = tmp_path / str(number)
        Export(out, plan, like, tokenizer).finish({})
        assert (out / "tokenizer.json").read_text() == expected
        # never the settings of another tokenizer
        assert (out / "tokenizer_config.json").exists() == ("weights'" in expected)
        assert (out / "generation_config.json").exists() == (like is not None)
    save_plan(plan, tmp_path / "plan.json")
    words = ["weights", str(tmp_path / "plan.json"), "--checkpoint", "kept", "--out", "new"]
    assert main([*words, "--tokenizer", str(tmp_path)]) == 2
    assert f"--tokenizer {tmp_path}: is no tokenizer.json" in capsys.readouterr().err


def test_a_folder_with_weights_is_not_written_over(tmp_path: Path) -> None:
    """Neither by a run nor by the command."""
    from planner.huggingface.export import Export
    from planner.huggingface.weights import WeightsError

    folder = saved("llama", tmp_path / "given")
    plan = plan_for(folder, [[0]])
    code, _, said = run_ranks(plan, tmp_path, "--export", str(folder))
    assert code == 2 and "holds model.safetensors already; name a new folder" in said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    with pytest.raises(WeightsError, match=r"holds config\.json already"):
        Export(tmp_path / "mine", plan)


def damaged(folder: Path, to: Path) -> None:
    """The same model but for a bit of its last tensor."""
    shutil.copytree(folder, to)
    data = bytearray((to / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (to / "model.safetensors").write_bytes(data)


@pytest.mark.slow
def test_ranks_with_other_weights_end(tmp_path: Path) -> None:
    """Of the same stage or of another, before the first step."""
    folder = saved("llama", tmp_path / "one")
    damaged(folder, tmp_path / "two")
    for grid in ([[0, 1]], [[0], [1]]):
        path = tmp_path / "plan.json"
        save_plan(plan_for(folder, grid), path)
        with Started(tmp_path) as run:
            for device, given in (("0", folder), ("1", tmp_path / "two")):
                run.start(device, device, whole(path), "--weights", str(given))
            assert all(run.codes(["0", "1"]).values())
            assert "--weights: model.safetensors here is another than" in run.reason("0")


def test_other_weights_of_the_same_names_are_told(tmp_path: Path) -> None:
    """Each node may have a folder of its own, and reads some of the files only."""

    class Two:
        """Ranks, the other of which has told this."""

        def __init__(self, other: dict[str, str]) -> None:
            self.other = other

        def all_gather(self, name: str, text: str) -> list[str]:
            return [json.dumps(self.other), text]

        def name(self, rank: int) -> str:
            return "ab"[rank]

    folder = saved("llama", tmp_path / "one")
    arch = plan_for(folder, [[0]]).workload.architecture
    assert arch is not None
    given = weight_digests(folder, arch, 0, 2, head=False)
    assert given.keys() == {"model.safetensors"}
    damaged(folder, tmp_path / "two")
    other = weight_digests(tmp_path / "two", arch, 0, 2, head=False)
    for told in ({}, dict(given), {"model-00001-of-00002.safetensors": "0"}):
        file_digest.require_same_files(Two(told), "--weights", given)  # type: ignore[arg-type]
    with pytest.raises(
        file_digest.FileMismatchError, match=r"--weights: model.safetensors here .* device 'a'"
    ):
        file_digest.require_same_files(Two(other), "--weights", given)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 3, 16, 17, 100, 1000])
def test_digests_tell_files_apart(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their sizes, first and last bytes always, and by every byte of a small one."""
    monkeypatch.setattr(file_digest, "BLOCK_BYTES", 4)
    monkeypatch.setattr(file_digest, "BLOCKS", 4)
    path = tmp_path / "file"

    def digest(data: bytes) -> str:
        path.write_bytes(data)
        return file_digest.file_digest(path)

    whole = bytes(size)
    assert digest(whole) == digest(whole) != digest(bytes(size + 1))
    for at in range(size) if size <= 16 else (0, size - 1):
        assert digest(whole[:at] + b"x" + whole[at + 1 :]) != digest(whole)


def test_what_was_trained_goes_elsewhere_where_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the line says where; any other error is one."""
    from planner.huggingface import export as hf_export

    export = hf_export.Export(tmp_path / "out", plan_for(saved("llama", tmp_path / "given"), [[0]]))
    number = errno.ENOSPC
    capsys.readouterr()

    def write(place: hf_export.Export) -> str:
        if place.folder == export.folder:
            raise OSError(number, os.strerror(number), str(place.folder / "model"))
        (place.folder / "model").write_text("trained")
        return "written"

    place, made = hf_export._where_room(export, write)
    assert made == "written" and (place.folder / "model").read_text() == "trained"
    said = capsys.readouterr().err
    assert str(tmp_path / "out" / "model") in said and str(place.folder) in said
    assert said.count("\n") == 1
    shutil.rmtree(place.folder)
    number = errno.EACCES
    with pytest.raises(PermissionError):
        hf_export._where_room(export, write)


def test_where_nothing_can_be_written_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is trained; trying leaves an empty folder."""
    from planner.huggingface.export import Export
    from planner.huggingface.weights import WeightsError

    plan = plan_for(saved("llama", tmp_path / "given"), [[0]])
    Export(tmp_path / "new" / "out", plan)
    assert list((tmp_path / "new" / "out").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(WeightsError, match=r"cannot be written to .*; name another folder"):
            Export(folder, plan)

    def full(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(WeightsError, match=r"cannot be written to \(Read-only file system\)"):
        Export(tmp_path / "new" / "out", plan)


def test_other_models_are_refused_in_one_line(tmp_path: Path) -> None:
    """Another config, tensors that are missing, left over, misshapen, or no safetensors."""
    from planner.executor.checkpoint.safetensors_io import (
        TensorFileError,
        read_entries,
        read_tensor,
    )
    from planner.executor.checkpoint.safetensors_io import write_tensors as write
    from planner.huggingface.weights import WeightsError

    folder = saved("llama", tmp_path / "given")
    plan = plan_for(folder, [[0]])

    def refused(match: str, error: type[ValueError] = WeightsError) -> None:
        with pytest.raises(error, match=match) as caught:
            make_model_stage(plan, 0, folder)
        assert "\n" not in str(caught.value)

    path, config = folder / "model.safetensors", folder / "config.json"
    told = json.loads(config.read_text())
    for field, value, match in (
        ("rms_norm_eps", 1e-5, r"norm_eps 1e-05, the plan's has 1e-06; plan with --workload"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 2.0},
            "does not do this: rope_scaling of rope_type",
        ),
        ("hidden_act", "gelu", "does not do this: hidden_act gelu; take a model without"),
        ("attention_bias", True, "biases of attention's output"),
        ("logit_scale", 0.5, r"field 'logit_scale' \(0.5\) is not known here"),
    ):
        config.write_text(json.dumps(told | {field: value}))
        refused(match)
    config.write_text(json.dumps(told))
    tensors = {name: read_tensor(path, place) for name, place in read_entries(path).items()}
    write(path, {n: t for n, t in tensors.items() if n != "model.norm.weight"})
    refused("has no 'model.norm.weight'")
    write(path, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    refused("holds 'model.layers.0.self_attn.q_proj.bias'")
    write(path, tensors | {"model.norm.weight": torch.zeros(31)})
    refused(r"'model.norm.weight' is \[31\], the plan's model needs \[32\]")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    refused("where its bytes are not", TensorFileError)
    path.write_bytes(b"\x80\x02" + whole)
    refused("not a safetensors file, or truncated", TensorFileError)
    path.unlink()
    refused("holds neither model.safetensors nor")
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("no file beside it")


def test_a_tied_matrix_on_two_stages_is_averaged_or_refused(tmp_path: Path) -> None:
    """Both have it, in one stage it is the same; a plan that averages but stages is refused."""
    folder = saved("llama tied", tmp_path)
    plan = plan_for(folder, [[0, 1]])
    first, last = (make_model_stage(plan, rank, folder) for rank in range(2))
    assert first.module.stage.stem is not None and last.module.head is not None
    assert torch.equal(last.module.head.project.weight, first.module.stage.stem.tokens.weight)
    assert first.tied_numel == last.tied_numel == plan.workload.tied_parameters > 0
    bare = plan.replace(averaging=plan.averaging[:2])
    with pytest.raises(ValueError, match=r"averaging.tied: .* plan again with this release"):
        make_model_stage(bare, 0, folder)
    rare = bare.replace(sync=Sync(5))
    with pytest.raises(ValueError, match=r"averaging.tied: .* plan again with --head first"):
        make_model_stage(rare, 0, folder)
    model_stage = make_model_stage(plan_for(folder, [[0, 1]], "first"), 0, folder)
    assert model_stage.module.head is not None and model_stage.module.stage.stem is not None
    assert model_stage.module.head.project.weight is model_stage.module.stage.stem.tokens.weight


def test_files_of_the_bare_model(tmp_path: Path) -> None:
    """Names without the model's own prefix, and masks among the tensors, as GPT-2's first files."""
    from planner.executor.checkpoint.safetensors_io import read_entries, read_tensor, write_tensors

    folder = saved("gpt2", tmp_path)
    path = folder / "model.safetensors"
    tensors = {name: read_tensor(path, place) for name, place in read_entries(path).items()}
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    with torch.no_grad():
        want = theirs("gpt2")(some_tokens()).logits
    mask = {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8)}
    write_tensors(path, bare | mask | {"h.3.attn.masked_bias": torch.tensor(-1e4)})
    for kind in ("U8", "BOOL", "F8_E4M3"):  # all of one byte
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        header["h.0.attn.bias"]["dtype"] = kind
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
        found = our_logits([make_model_stage(plan_for(folder, [[0]]), 0, folder)], some_tokens())
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tied_model_with_a_head_in_its_file(
    stages: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding once more is fine; another matrix is refused before anything starts."""
    from planner.executor.checkpoint.safetensors_io import read_entries, read_tensor, write_tensors
    from planner.huggingface.weights import WeightsError

    folder = saved("llama tied", tmp_path / "model")
    plan = plan_for(folder, [list(range(stages))])
    path = folder / "model.safetensors"
    tensors = {name: read_tensor(path, place) for name, place in read_entries(path).items()}
    tokens = tensors["model.embed_tokens.weight"]
    want = make_model_stage(plan, stages - 1, folder).module.head.project.weight
    write_tensors(path, tensors | {"lm_head.weight": tokens.clone()})
    assert torch.equal(make_model_stage(plan, stages - 1, folder).module.head.project.weight, want)
    write_tensors(path, tensors | {"lm_head.weight": -50 * tokens})
    said = "'lm_head.weight' is not the embedding, although config.json says tie_word_embeddings"
    with pytest.raises(WeightsError, match=said):
        make_model_stage(plan, stages - 1, folder)
    save_plan(plan, tmp_path / "plan.json")
    capsys.readouterr()
    assert main(["run", str(tmp_path / "plan.json"), "--weights", str(folder), "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_model_without_a_head_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved by the class without one, untied: the folder is complete, and is another model's."""
    from planner.executor.checkpoint.safetensors_io import read_entries, read_tensor, write_tensors

    folder = saved("llama", tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = {name: read_tensor(path, place) for name, place in read_entries(path).items()}
    bare = {k.removeprefix("model."): v for k, v in tensors.items() if k != "lm_head.weight"}
    write_tensors(path, bare)
    save_plan(plan_for(folder, [[0, 1]]), tmp_path / "plan.json")
    capsys.readouterr()
    assert main(["run", str(tmp_path / "plan.json"), "--weights", str(folder), "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert "it is of a model without a language-model head" in error and error.count("\n") == 1
