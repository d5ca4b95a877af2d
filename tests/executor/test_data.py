"""Texts as microbatches: every token once an epoch, shuffled alike everywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from planner.executor.data.data_config import DataConfig
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan

torch = pytest.importorskip("torch")

from planner.executor.data import sources  # noqa: E402
from planner.executor.data.microbatches import make_microbatches  # noqa: E402
from planner.executor.data.sources import DataError, IterableSource, TextFiles  # noqa: E402
from planner.executor.data.stream import Samples  # noqa: E402
from planner.executor.data.synthetic import Synthetic  # noqa: E402
from planner.executor.data.tokenizer import ByteTokenizer  # noqa: E402
from planner.executor.runtime.model_stage import ModelStage  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402

SEQUENCE, BATCH, BUFFER = 8, 6, 10


def plan_of(vocabulary: int = 256, **changes: int) -> TrainingPlan:
    """Two stages; a step takes six samples in three microbatches."""
    arch = Architecture(Family.LLAMA, 2, 16, 2, 2, 16, vocabulary, SEQUENCE)
    fields = {"batch_samples": BATCH, "microbatch_samples": 2} | changes
    return make_plan([[0, 1]], workload=Workload.transformer("bytes", arch, **fields))


def folder_of(path: Path) -> tuple[Path, bytes]:
    """Shards of different lengths, one of them empty, one without line ends; and all their text."""
    rng = np.random.default_rng(3)
    letters = np.frombuffer(b"abcdefgh\n", np.uint8)
    texts = {name: rng.choice(letters, size).tobytes() for name, size in (("b", 501), ("a", 333))}
    texts |= {"c/d": "äö€".encode() * 40, "empty": b""}
    for name, text in texts.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(text)
    (path / ".hidden").write_text("not this")
    return path, b"".join(texts[name] for name in ("a", "b", "c/d", "empty"))


def rows_of(data: DataConfig, steps: int, plan: TrainingPlan | None = None) -> np.ndarray:
    """Samples ``[steps * BATCH, SEQUENCE + 1]``."""
    made = make_microbatches(plan or plan_of(), data)
    return np.concatenate(
        [made.tokens(step, b).numpy() for step in range(steps) for b in range(BATCH // 2)]
    )


def by_hand(text: bytes, samples: int, buffer: int, seed: int = 0) -> np.ndarray:
    """Cut and shuffled in one go."""
    tokens = np.frombuffer(text * (2 + (samples + buffer) * SEQUENCE // len(text)), np.uint8)
    rows = [tokens[k * SEQUENCE :][: SEQUENCE + 1] for k in range(samples + buffer)]
    found = []
    for block in range(-(-samples // buffer)):
        order = np.random.default_rng((seed, block)).permutation(buffer)
        found += [rows[block * buffer + k] for k in order]
    return np.stack(found[:samples])


@pytest.mark.parametrize("piece", [7, 64, 1 << 16])
@pytest.mark.parametrize("buffer", [1, 4, BUFFER, 1000])
def test_samples_are_the_shuffled_text(
    piece: int, buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pieces it is read in; over several epochs; shards in order of their names."""
    monkeypatch.setattr(sources, "PIECE_BYTES", piece)
    path, text = folder_of(tmp_path)
    steps = 3 * len(text) // (SEQUENCE * BATCH)
    found = rows_of(DataConfig(path, buffer=buffer), steps)
    np.testing.assert_array_equal(found, by_hand(text, steps * BATCH, buffer))


def test_a_file_is_a_folder_of_one(tmp_path: Path) -> None:
    """The same samples."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 2)
    np.testing.assert_array_equal(
        rows_of(DataConfig(path, buffer=3), 20), by_hand(path.read_bytes(), 20 * BATCH, 3)
    )


@pytest.mark.parametrize("buffer", [1, 4, 6, BUFFER, 50])
def test_every_place_can_be_gone_on_from(buffer: int, tmp_path: Path) -> None:
    """A rank that reads one microbatch of a step knows where all can go on."""
    path, text = folder_of(tmp_path)
    data, plan = DataConfig(path, buffer=buffer), plan_of()
    whole = by_hand(text, 40 * BATCH, buffer).reshape(40, BATCH // 2, 2, SEQUENCE + 1)
    for mine in range(BATCH // 2):
        one = make_microbatches(plan, data)
        for step in range(40):
            position = one.position(step)
            # a position is what JSON keeps, and few numbers
            assert len(position) == 5 and all(type(n) is int for n in position)
            for b in range(BATCH // 2):
                other = make_microbatches(plan, data)
                other.seek(position)
                np.testing.assert_array_equal(other.tokens(step, b), whole[step, b])
            np.testing.assert_array_equal(one.tokens(step, mine), whole[step, mine])
    # from the middle to the beginning, as who has measured first does
    np.testing.assert_array_equal(one.tokens(0, 0), whole[0, 0])


def test_reading_on_reads_no_more_than_needed(tmp_path: Path) -> None:
    """From a position, only pieces of what follows; memory holds the step's blocks only."""
    path = tmp_path / "text"
    path.write_bytes(np.random.default_rng(0).integers(0, 128, 1 << 20).astype(np.uint8).tobytes())
    source = TextFiles(path, ByteTokenizer(), 256)
    read: list[int] = []
    pieces = source.pieces

    def noting(begin: tuple[int, int]) -> Iterator[Any]:
        for place, tokens in pieces(begin):
            read.append(place[1])
            yield place, tokens

    source.pieces = noting  # type: ignore[method-assign]
    samples = Samples(source, SEQUENCE, 100, 0)
    for number in range(100_000):
        samples.forget(number)
        row = samples.sample(number)
        assert len(samples._blocks) == 1
    position = samples.position_for(99_999)
    read.clear()
    again = Samples(source, SEQUENCE, 100, 0)
    again.seek(position)
    np.testing.assert_array_equal(again.sample(99_999), row)
    assert len(read) <= 2 and min(read) > 600_000


@pytest.mark.parametrize("buffer", [1, 3, 16])
def test_samples_of_a_step_in_any_order_are_read_once(buffer: int) -> None:
    """Whichever comes first, each piece is read once an epoch, and memory holds a step."""
    count, order = 16, (15, *range(15))
    items = [[k % 256] * SEQUENCE for k in range(10 * count)]
    source = IterableSource(items, ByteTokenizer(), 256)
    read: list[int] = []
    pieces = source.pieces

    def noting(begin: tuple[int, int]) -> Iterator[Any]:
        for place, tokens in pieces(begin):
            read.append(place[0])
            yield place, tokens

    source.pieces = noting  # type: ignore[method-assign]
    samples = Samples(source, SEQUENCE, buffer, 0)
    want = by_hand(bytes(t for item in items for t in item), 8 * count, buffer)
    for step in range(8):
        for k in order:
            samples.forget(step * count)
            np.testing.assert_array_equal(samples.sample(step * count + k), want[step * count + k])
        assert len(samples._blocks) <= -(-count // buffer) + 1
    assert read == list(range(len(read)))


@pytest.mark.parametrize("schedule", ["eager-1f1b", "gpipe"])
def test_a_stage_and_its_head_read_once(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes between the two; in the next step, and of the same step again, anew."""
    plan = make_plan([[0]], schedule=schedule)
    model_stage = ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig())
    assert model_stage.data is not None
    read, usual = [], model_stage.data.tokens

    def tokens(step: int, microbatch: int) -> Any:
        read.append((step, microbatch))
        return usual(step, microbatch)

    monkeypatch.setattr(model_stage.data, "tokens", tokens)
    (each,) = plan.schedules
    for step in (0, 1, 1):
        model_stage.begin(step, each)
        for kind, b in each.order[0]:
            model_stage.run_op(kind, b, None)
    assert sorted(read) == sorted((t, b) for t in (0, 1, 1) for b in range(len(each.paths)))


def test_python_iterables(tmp_path: Path) -> None:
    """Texts, bytes and lists of tokens, one after the other."""
    items = ["abc", b"defg", [104, 105], np.array([106]), "", "klmnopqrs" * 3]
    flat = b"abcdefghij" + b"klmnopqrs" * 3
    np.testing.assert_array_equal(
        rows_of(DataConfig(items, buffer=5), 9), by_hand(flat, 9 * BATCH, 5)
    )
    # a model that knows fewer tokens than there are bytes can be given tokens
    few = rows_of(DataConfig([[1, 2, 3] * 9], buffer=1), 1, plan_of(vocabulary=4))
    assert few.max() == 3
    for wrong, message in (
        (iter(items), "can be gone through once only"),
        ([[1, 999] * 9], r"item 0 has tokens from 1 to 999, the model knows 0 to 255"),
        ([[1.5] * 20], "item 0 is neither text nor a list of whole numbers"),
        ([], "there are 0 tokens, fewer than a sample of 9"),
    ):
        with pytest.raises(DataError, match=message):
            rows_of(DataConfig(wrong), 1)


def test_hidden_folders_are_left_out(tmp_path: Path) -> None:
    """A git checkout's objects and a notebook's copies are no training text."""
    for name in (".git/objects/pack", ".ipynb_checkpoints/a.txt", "a/.cache/b.txt", ".hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="is no text file or folder of them"):
        TextFiles(tmp_path, ByteTokenizer(), 256)
    (tmp_path / "a.txt").write_text("one")
    assert TextFiles(tmp_path, ByteTokenizer(), 256).description.startswith("1 files, 3 bytes")
    # a hidden folder that is named is read
    (tmp_path / "a/.cache/b.txt").write_text("two")
    assert TextFiles(tmp_path / "a/.cache", ByteTokenizer(), 256).description.startswith(
        "1 files, 3 bytes"
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("naïve".encode("latin-1"), "is not UTF-8 text (byte 2)"),
        ("text".encode("utf-16"), "is not UTF-8 text but UTF-16 (byte 0)"),
        ("text".encode("utf-16-le"), "is not UTF-8 text but UTF-16 (byte 0)"),
        (b"text\0text", "has a byte of 0 and is no text (byte 4)"),
        (b"a\n" * 50_000 + b"\xff", "is not UTF-8 text (byte 100000)"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, data: bytes, said: str) -> None:
    """One line that names the file and the byte, at the latest when the piece is read."""
    (tmp_path / "b.txt").write_bytes(data)
    (tmp_path / "a.txt").write_text("good text\n" * 10)
    with pytest.raises(DataError) as caught:
        list(TextFiles(tmp_path, ByteTokenizer(), 256).pieces((0, 0)))
    assert f"b.txt: {said}; save it as UTF-8" in str(caught.value)
    named = TextFiles(tmp_path / "b.txt", ByteTokenizer(), 256)
    assert b"".join(bytes(tokens.tolist()) for _, tokens in named.pieces((0, 0))) == data


def test_wrong_data_are_one_line(tmp_path: Path) -> None:
    """Nothing there, too short, tokens that the model does not know."""
    (tmp_path / "short").write_text("12345678")
    for data, plan, message in (
        (DataConfig(tmp_path / "none"), plan_of(), "none: is no text file or folder of them"),
        (DataConfig(tmp_path / "short"), plan_of(), "there are 8 tokens, fewer than a sample of 9"),
        (
            DataConfig(tmp_path),
            plan_of(50),
            "short has tokens from 49 to 56, the model knows 0 to 49",
        ),
    ):
        with pytest.raises(DataError, match=message):
            rows_of(data, 1, plan)
    with pytest.raises(ValueError, match="--shuffle is 0; give samples"):
        DataConfig(tmp_path, buffer=0)
    with pytest.raises(ValueError, match="--tokenizer is for texts"):
        DataConfig(None, tmp_path)


def test_hugging_face_tokenizers(tmp_path: Path) -> None:
    """Words of a tokenizer that was made here, piece after piece."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "the cat sat on the mat and the dog sat on the cat\n" * 60
    made.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=90))
    (tmp_path / "tokens").mkdir()
    made.save(str(tmp_path / "tokens" / "tokenizer.json"))
    (tmp_path / "text").write_text(text)
    ids = made.encode(text).ids
    assert len(ids) < len(text) / 2
    data = DataConfig(tmp_path / "text", tmp_path / "tokens", buffer=1)
    found = rows_of(data, 3)
    for k, row in enumerate(found):
        np.testing.assert_array_equal(row, ids[k * SEQUENCE :][: SEQUENCE + 1])
    with pytest.raises(
        DataError, match=r"text has tokens from \d+ to \d+, the model knows 0 to 19"
    ):
        rows_of(data, 1, plan_of(20))
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        rows_of(DataConfig(tmp_path / "text", tmp_path / "text"), 1)
    # what a tokenizer cuts and fills single texts to is not for the pieces of a long one
    made.enable_truncation(max_length=5)
    made.enable_padding(length=4096, pad_id=1)
    made.save(str(tmp_path / "cutting.json"))
    cutting = DataConfig(tmp_path / "text", tmp_path / "cutting.json", buffer=1)
    np.testing.assert_array_equal(rows_of(cutting, 3), found)


def test_tokens_that_occur_are_those_the_model_must_know(tmp_path: Path) -> None:
    """Few tokens may have high numbers; a high number that no text has harms nobody."""
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {"?": 0, "a": 1, "b": 2, "z": 999}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert made.get_vocab_size() == 4
    (tmp_path / "text").write_text("a b " * 20)
    data = DataConfig(tmp_path / "text", tmp_path / "tokenizer.json", buffer=1)
    assert set(rows_of(data, 1, plan_of(3)).flat) == {1, 2}
    (tmp_path / "text").write_text("a b z " * 20)
    with pytest.raises(DataError, match="text has tokens from 1 to 999, the model knows 0 to 255"):
        rows_of(data, 1)


def test_next_block_is_read_while_one_is_in_use() -> None:
    """One block ahead and no further; nothing before the first is asked for."""
    asked: SimpleQueue[int] = SimpleQueue()

    class Counted:
        def __iter__(self) -> Iterator[str]:
            for number in count():
                asked.put(number)
                yield "x" * SEQUENCE

    before = set(threading.enumerate())
    made = make_microbatches(plan_of(), DataConfig(Counted(), buffer=BATCH))
    assert asked.empty()
    made.tokens(0, 0)
    (reader,) = set(threading.enumerate()) - before
    # a block is BATCH items and the first token of the next one
    assert [asked.get(timeout=60) for _ in range(2 * BATCH + 1)] == list(range(2 * BATCH + 1))
    made.tokens(0, 2)
    assert asked.empty()
    made.tokens(1, 0)
    assert [asked.get(timeout=60) for _ in range(BATCH)][-1] == 3 * BATCH
    made.seek(made.position(0))
    reader.join(timeout=60)
    assert not reader.is_alive()


def test_error_ahead_is_told_when_its_block_is_needed() -> None:
    """And again to who asks again."""

    def texts() -> Iterator[str]:
        yield "x" * (SEQUENCE * BATCH + 1)
        raise OSError("the disk is gone")

    class Torn:
        def __iter__(self) -> Iterator[str]:
            return texts()

    made = make_microbatches(plan_of(), DataConfig(Torn(), buffer=BATCH))
    made.tokens(0, 2)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            made.tokens(1, 0)


def test_the_synthetic_language() -> None:
    """A symbol has four at most that may follow; any microbatch is made anew as it was."""
    for vocabulary, symbols in ((50257, 64), (10, 10)):
        language = Synthetic(vocabulary, 200, 3, seed=5)
        follows: dict[int, set[int]] = {}
        texts = [language.tokens(step, b) for step in range(4) for b in range(4)]
        for rows in texts:
            assert rows.shape == (3, 201) and rows.dtype is torch.int64
            assert int(rows.min()) >= 0 and int(rows.max()) < symbols
            for row in rows.tolist():
                for one, after in pairwise(row):
                    follows.setdefault(one, set()).add(after)
        assert max(map(len, follows.values())) == 4
        assert len({str(rows.tolist()) for rows in texts}) == len(texts)
        assert torch.equal(Synthetic(vocabulary, 200, 3, seed=5).tokens(3, 2), texts[14])
        assert not torch.equal(Synthetic(vocabulary, 200, 3, seed=6).tokens(3, 2), texts[14])
