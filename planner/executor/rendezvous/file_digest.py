"""Verifies that ranks start from the same files, of which each node may have its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from planner.executor.rendezvous.rank_group import RankGroup
from planner.utils.refusal import Refusal

BLOCK_BYTES = 1 << 20
BLOCKS = 256
"""Blocks read of a large file, evenly spread: different weights differ nearly everywhere."""


class FileMismatchError(Refusal):
    """Two ranks would start from different files."""


def file_digest(path: Path) -> str:
    """Digest of a file; beyond `BLOCKS`, of samples."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest = hashlib.sha256(str(size).encode())
        blocks = min(BLOCKS, -(-size // BLOCK_BYTES))
        for k in range(blocks):
            # the last block ends with the file
            file.seek(k * max(0, size - BLOCK_BYTES) // max(1, blocks - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


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
