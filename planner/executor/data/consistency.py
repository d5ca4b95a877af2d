"""Verifies that all ranks read the same data."""

from __future__ import annotations

import json

from planner.executor.data.microbatches import Microbatches
from planner.executor.data.sources import DataError
from planner.executor.rendezvous.rank_group import RankGroup


def require_same_data(ranks: RankGroup, option: str, own: Microbatches | None) -> None:
    """Raise if the samples of this rank differ from those of another.

    A collective call, except for a rank that joins late.
    """
    described = None
    if own is not None:
        try:  # a text that is too short is refused before the first step
            described = [own.description, own.digest()]
        except DataError as error:
            raise DataError(f"{option}: {error}") from None
    texts = ranks.all_gather(f"data{option}", json.dumps(described), keep=True)
    by_rank = [json.loads(text) for text in texts]
    first = next((rank for rank, text in enumerate(by_rank) if text), 0)
    if described is not None and described != by_rank[first]:
        theirs = by_rank[first][0]
        raise DataError(
            f"{option}: the text on device {ranks.name(first)!r} "
            + ("has another content" if theirs == described[0] else f"is another ({theirs})")
            + f" than here ({described[0]}); give all nodes the same text and tokenizer"
        )
