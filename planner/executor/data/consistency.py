"""Verifies that all ranks read the same data."""

from __future__ import annotations

from planner.executor.data.microbatches import Microbatches
from planner.executor.data.sources import DataError
from planner.executor.rendezvous.rank_group import RankGroup


def require_same_data(ranks: RankGroup, option: str, own: Microbatches | None) -> None:
    """Raise if the samples of this rank differ from those of another.

    A collective call, except for a rank that joins late.
    """
    if own is not None:
        try:  # a text that is too short is refused before the first step
            own.tokens(0, 0)
        except DataError as error:
            raise DataError(f"{option}: {error}") from None
    description = "" if own is None else own.description
    descriptions = ranks.all_gather(f"data{option}", description, keep=True)
    first = next((rank for rank, text in enumerate(descriptions) if text), 0)
    if own is not None and own.description != descriptions[first]:
        raise DataError(
            f"{option}: here are {own.description}, on device {ranks.name(first)!r} "
            f"{descriptions[first]}; give all nodes the same text and tokenizer"
        )
