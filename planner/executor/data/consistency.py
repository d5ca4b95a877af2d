"""Verifies that all ranks read the same data."""

from __future__ import annotations

from planner.executor.data.microbatches import Microbatches
from planner.executor.data.sources import DataError
from planner.executor.rendezvous.process_group import ProcessGroup


def require_same_data(ranks: ProcessGroup, option: str, mine: Microbatches | None) -> None:
    """Raise if the samples of this rank differ from those of another.

    A collective call, except for a rank that joins late.
    """
    if mine is not None:
        try:  # what is too short is said before the first step
            mine.tokens(0, 0)
        except DataError as error:
            raise DataError(f"{option}: {error}") from None
    said = "" if mine is None else mine.says
    name = f"data{option}"
    if ranks.late:
        # the others have verified it before their first step
        keys = [f"{name}/{rank}" for rank in range(ranks.world)]
        told = [value.decode() for value in ranks.store.multi_get(keys)]
    else:
        told = ranks.all_gather(name, said)
    first = next((rank for rank, says in enumerate(told) if says), 0)
    if mine is not None and mine.says != told[first]:
        raise DataError(
            f"{option}: here are {mine.says}, on device {ranks.name(first)!r} {told[first]}; give "
            "all nodes the same text and tokenizer"
        )
