"""Collectives of texts over the store, whose keys are deleted after use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import Store


class StoreCollectives:
    """All-gather and barrier of ranks, from the view of one of them.

    Parameters
    ----------
    wait
        Waits until keys have values.
    get
        Waits likewise, and returns the values.
    delete
        Deletes keys, now or soon.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        wait: Callable[[Sequence[str]], None],
        get: Callable[[Sequence[str]], list[bytes]],
        delete: Callable[[Sequence[str]], None],
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._wait, self._get, self._delete = wait, get, delete
        self._used_keys: list[str] = []

    def all_gather(self, name: str, text: str, *, keep: bool = False) -> list[str]:
        """See `planner.executor.rendezvous.rank_group.RankGroup.all_gather`."""
        used_keys, own_key = list(self._used_keys), f"{name}/{self._rank}"
        if not keep:
            self._used_keys.append(own_key)
        self._store.set(own_key, text)
        values = self._get([f"{name}/{rank}" for rank in range(self._world_size)])
        self._delete_used(used_keys)
        return [value.decode() for value in values]

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called this; ``name`` is used once."""
        used_keys, count_key, all_key = list(self._used_keys), f"{name}/count", f"{name}/all"
        if self._store.add(count_key, 1) == self._world_size:
            self._used_keys += [count_key, all_key]
            self._store.set(all_key, "")
        self._wait([all_key])
        self._delete_used(used_keys)

    def delete_used_keys(self) -> None:
        """Delete the keys of the last call, once all ranks have returned from it or given it up."""
        self._delete_used(list(self._used_keys))

    def _delete_used(self, keys: Sequence[str]) -> None:
        # all ranks have entered the present call, so all have returned from the previous one
        if keys:
            self._delete(keys)
            self._used_keys = [key for key in self._used_keys if key not in keys]
