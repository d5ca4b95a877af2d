"""Verifies that ranks start from the same files, of which each node may have its own."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from planner.executor.rendezvous.rank_group import RankGroup
from planner.utils.refusal import Refusal

BLOCK_BYTES = 1 << 20
BLOCKS = 256
"""Blocks read of more data, evenly spread: other weights or texts differ nearly everywhere."""


class FileMismatchError(Refusal):
    """Two ranks would start from different files."""


def file_digest(*paths: Path) -> str:
    """Digest of files read one after the other; beyond `BLOCKS`, of samples."""
    ends = list(accumulate(path.stat().st_size for path in paths))
    digest = hashlib.sha256(" ".join(map(str, ends)).encode())
    blocks = min(BLOCKS, -(-ends[-1] // BLOCK_BYTES))
    for k in range(blocks):
        # the last block ends with the last file
        begin = k * max(0, ends[-1] - BLOCK_BYTES) // max(1, blocks - 1)
        digest.update(_read(paths, ends, begin, begin + BLOCK_BYTES))
    return digest.hexdigest()


def _read(paths: Sequence[Path], ends: Sequence[int], begin: int, end: int) -> bytes:
    """Bytes of a range of all files."""
    number, parts = bisect_right(ends, begin), []
    while number < len(paths) and begin < end:
        with paths[number].open("rb") as file:
            file.seek(begin - ends[number], 2)
            parts.append(file.read(end - begin))
        begin, number = ends[number], number + 1
    return b"".join(parts)


def require_same_files(ranks: RankGroup, option: str, own: Mapping[str, str]) -> None:
    """Raise if files differ between this rank and another; a collective call."""
    digests = [
        json.loads(text) for text in ranks.all_gather(f"files{option}", json.dumps(dict(own)))
    ]
    for rank, theirs in enumerate(digests):
        for name in sorted(own.keys() & theirs.keys()):
            if own[name] != theirs[name]:
                raise FileMismatchError(
                    f"{option}: {name} here is another than on device {ranks.name(rank)!r}; give "
                    "all nodes the same files"
                )
