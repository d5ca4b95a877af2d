"""The store through which ranks meet: where it is, and connections to it.

``torchrun`` and ``planner run`` serve it themselves and say so; else rank 0 does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""In the environment, "True" where whoever started the ranks serves the store."""
BEGUN, OVER = "roll/0", "roll/over"
"""Keys of an elastic run that has begun, and of one that has done all steps."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class StoreMissingError(RuntimeError):
    """Nobody answers where the store should be."""


class PortTakenError(StoreMissingError):
    """The store cannot be served."""


@dataclass(frozen=True)
class StoreAddress:
    """Where the store is.

    Attributes
    ----------
    host, port
        Of its server.
    by_starter
        Whether whoever started the ranks serves it, and not rank 0.
    attempt
        Which start of the ranks this is; each has its own names in the store.
    """

    host: str
    port: int
    by_starter: bool
    attempt: str = "0"

    @classmethod
    def of_environment(cls) -> StoreAddress:
        """As ``torchrun`` tells it.

        Raises
        ------
        ValueError
            A variable is missing.
        """
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"MASTER_ADDR and MASTER_PORT must say where the store is, found {error}; start "
                "with torchrun, or set both on every node"
            ) from None
        served = os.environ.get(SERVED) == "True"
        return cls(host, port, served, os.environ.get(ATTEMPT, "0"))

    def __str__(self) -> str:
        return f"the store at {self.host}:{self.port}"

    def connect(self, timeout_s: float, *, serve: bool = False) -> Store:
        """A connection of its own: what blocks on it blocks nobody else.

        Parameters
        ----------
        timeout_s
            How long to try.
        serve
            Serve the store too, from this process.

        Returns
        -------
        Store
            With the names of this attempt.

        Raises
        ------
        StoreMissingError
            Nobody answers, or it cannot be served.
        """
        try:
            store = TCPStore(
                self.host,
                self.port,
                is_master=serve,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=serve,
            )
        except DistError as error:
            if serve:
                said = str(error).splitlines()[0]
                raise PortTakenError(f"{self} cannot be served here ({said})") from None
            raise StoreMissingError(f"{self} did not answer within {timeout_s:g} s") from None
        return PrefixStore(f"planner/{self.attempt}", store)
