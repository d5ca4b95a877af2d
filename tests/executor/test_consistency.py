"""Ranks compare their files and data before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from planner.executor.data.data_config import DataConfig
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan

torch = pytest.importorskip("torch")

from planner.executor.data.consistency import require_same_data  # noqa: E402
from planner.executor.data.microbatches import make_microbatches  # noqa: E402
from planner.executor.data.sources import DataError  # noqa: E402
from planner.executor.rendezvous import file_digest  # noqa: E402
from planner.executor.rendezvous.rank_group import RankGroup  # noqa: E402

ARCHITECTURE = Architecture(Family.LLAMA, 2, 16, 2, 2, 16, 256, 8)


def require_same(data: Sequence[DataConfig | None]) -> list[str]:
    """What each rank refuses; empty if it does not."""
    workload = Workload.transformer("bytes", ARCHITECTURE, batch_samples=4, microbatch_samples=2)
    plan, store = make_plan([[0, 1]], workload=workload), torch.distributed.HashStore()

    def refused(rank: int) -> str:
        own = data[rank]
        made = None if own is None else make_microbatches(plan, own)
        try:
            require_same_data(RankGroup(rank, len(data), store), "--data", made)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(data)) as ranks:
        return list(ranks.map(refused, range(len(data))))


def test_texts_of_the_same_size(tmp_path: Path) -> None:
    """They are compared by content: one letter is enough, wherever it is."""
    for name, text in (("a", "same text\n" * 50), ("b", "same text\n" * 49 + "sane text\n")):
        (tmp_path / name).write_text(text)
    a, b = DataConfig(tmp_path / "a"), DataConfig(tmp_path / "b")
    assert require_same([a, None, a]) == ["", "", ""]
    assert require_same([a, None, b]) == [
        "",
        "",
        "--data: the text on device '0' has another content than here (1 files, 500 bytes, bytes, "
        "1024 shuffled); give all nodes the same text and tokenizer",
    ]


def test_items_are_compared_by_the_first_microbatch() -> None:
    """An iterable has neither size nor files."""
    a, b = ["same text"] * 9, ["sane text"] * 9
    assert require_same([DataConfig(a), DataConfig(list(a))]) == ["", ""]
    first, second = require_same([DataConfig(a), DataConfig(b)])
    assert not first
    assert "has another content than here (items, bytes" in second


def test_texts_of_other_sizes(tmp_path: Path) -> None:
    """The refusal has both."""
    for name, count in (("a", 50), ("b", 51)):
        (tmp_path / name).write_text("text\n" * count)
    _, second = require_same([DataConfig(tmp_path / name) for name in ("a", "b")])
    assert second.startswith(
        "--data: the text on device '0' is another (1 files, 250 bytes, bytes, 1024 shuffled) than "
        "here (1 files, 255 bytes"
    )


def test_digest_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows all bytes and where files end; of many bytes, spread blocks with both ends."""
    monkeypatch.setattr(file_digest, "BLOCK_BYTES", 4)
    texts = [b"0123456", b"", b"789", b"abcdefghijkl"]

    def digest(texts: Sequence[bytes]) -> str:
        paths = [tmp_path / str(number) for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text)
        return file_digest.file_digest(*paths)

    def changed(at: int) -> list[bytes]:
        new, begin = list(texts), 0
        for number, text in enumerate(texts):
            if 0 <= at - begin < len(text):
                new[number] = text[: at - begin] + b"!" + text[at - begin + 1 :]
            begin += len(text)
        return new

    total = sum(map(len, texts))
    assert all(digest(changed(at)) != digest(texts) for at in range(total))
    assert digest([texts[0] + texts[2], b"", b"", texts[3]]) != digest(texts)
    assert digest([b""]) == digest([b""]) != digest([b"", b""])
    monkeypatch.setattr(file_digest, "BLOCKS", 3)
    seen = [at for at in range(total) if digest(changed(at)) != digest(texts)]
    assert seen == [0, 1, 2, 3, 9, 10, 11, 12, 18, 19, 20, 21]
