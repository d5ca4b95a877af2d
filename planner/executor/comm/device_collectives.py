"""Averaging within a machine by collectives of a library (NCCL), from GPU to GPU.

Each group that averages gradients, and whose members have a GPU each on one machine, gets a process
group. A rank runs its collectives one after the other, in the plan's order, so that no two ranks
wait for each other. All other groups average through host memory (`sharded_allreduce`).
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError, is_nccl_available
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOptions,
    Store,
)

from planner.executor.comm.codec import LEVELS, WireFormat
from planner.executor.comm.device_backend import DeviceBackend
from planner.executor.comm.device_identity import gpu_identity, machine_id, network_namespace_id
from planner.executor.comm.group_roles import member_ranges
from planner.executor.rendezvous.address import NCCL_INTERFACE, require_nccl_interface
from planner.executor.rendezvous.rank_group import LONG_TIMEOUT, RankGroup
from planner.executor.transport.connections import ConnectionLost
from planner.training_plan.averaging_group import AveragingGroup, within
from planner.training_plan.model import TrainingPlan
from planner.utils.refusal import Refusal

LOOPBACK = "127.0.0.1"
NCCL_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable of NCCL that allows several ranks on one GPU, for tests."""
OWN_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of this rank's GPU, whatever the others did."""
UNDESTROYED_GROUPS: list[object] = []
"""Groups kept until the process ends, since destroying one waits for its other members."""


class CollectiveLibrary(enum.StrEnum):
    """Library of collectives between GPUs; gloo does the same in host memory, for tests."""

    NCCL = "nccl"
    GLOO = "gloo"


class DeviceCollectives:
    """A rank's averaging groups that need no host memory.

    Parameters
    ----------
    groups
        A process group of PyTorch by the members of an averaging group; ranks count within it.
    backend
        Backend of the device.
    name
        Names the device of a rank.
    """

    def __init__(
        self,
        groups: Mapping[tuple[int, ...], Any],
        backend: DeviceBackend,
        name: Callable[[int], str] = str,
        library: str = "",
    ) -> None:
        self._groups, self._backend = groups, backend
        self._name, self._library = name, library

    def supports(self, group: AveragingGroup, wire: WireFormat) -> bool:
        """Whether a group averages by collectives; libraries cannot add int8 and int4."""
        return group.members in self._groups and is_uniform(group) and wire not in LEVELS

    def run(self, vector: Tensor, group: AveragingGroup, wire: WireFormat, scale: float) -> float:
        """Average a vector on the device in place; returns the time of its end.

        Parameters
        ----------
        vector
            ``float32[numel]``, of which the group averages its slice.
        wire
            In bf16, sums are computed in bf16.
        scale
            Factor on sums.
        """
        handle, ranges = self._groups[group.members], member_ranges(group, len(vector))
        whole = vector[ranges[0][0] : ranges[-1][1]]
        sent = whole.to(torch.bfloat16) if wire is WireFormat.BF16 else whole
        parts = torch.split(sent, [stop - start for start, stop in ranges])
        with self._named_errors(group):
            if all(group.sends_contributions) and all(group.receives_sums):
                handle.allreduce([sent], AllreduceOptions()).wait()
            else:
                reduces = all(group.sends_contributions)
                options: Any = ReduceOptions() if reduces else BroadcastOptions()
                collective = handle.reduce if reduces else handle.broadcast
                for root, part in enumerate(parts):
                    options.rootRank = root
                    if len(part):
                        collective([part], options).wait()
            if sent is not whole:
                whole.copy_(sent)
            if scale != 1.0:
                whole *= scale
            return self._backend.wait_for_event(self._backend.record_event())

    @contextmanager
    def _named_errors(self, group: AveragingGroup) -> Iterator[None]:
        """Report the errors of a library as lost connections: which end failed is not known."""
        try:
            yield
        except RuntimeError as error:
            # Gloo raises plain RuntimeErrors; NCCL does not, so those are errors of this rank
            is_lost = isinstance(error, DistError) or self._library == CollectiveLibrary.GLOO
            if isinstance(error, OWN_ERRORS) or not is_lost:
                raise
            reason = (str(error).splitlines() or [""])[0]
            names = ", ".join(repr(self._name(member)) for member in group.members)
            raise ConnectionLost(f"{self._library} among {names} has failed ({reason})") from None


def is_uniform(group: AveragingGroup) -> bool:
    """Whether all members have the same role, as in a collective."""
    roles = set(zip(group.sends_contributions, group.receives_sums, strict=True))
    return len(group.members) > 1 and len(roles) == 1


def open_collectives(
    library: CollectiveLibrary,
    plan: TrainingPlan,
    ranks: RankGroup,
    device: torch.device,
    backend: DeviceBackend,
    store: Store,
) -> DeviceCollectives:
    """Create the process groups of this rank; a collective call."""
    if library is CollectiveLibrary.NCCL and not is_nccl_available():
        raise Refusal("--direct nccl: this PyTorch is built without NCCL; leave it out")
    location = json.dumps(gpu_location(library, ranks.rank, device))
    locations = [json.loads(text) for text in ranks.all_gather("collectives/location", location)]
    # pseudo-gradients are averaged in host memory
    rounds = [
        groups
        for entry in plan.averaging
        for groups in (within(entry) if plan.sync.local_steps else entry)
    ]
    members_of = {
        group.members: None
        for groups in rounds
        for group in groups
        if is_uniform(group) and share_machine([locations[member] for member in group.members])
    }
    if rounds and not members_of:
        raise Refusal(
            f"--direct {library}: no averaging group has a GPU of one machine for each member, so "
            "that nothing could go from GPU to GPU; leave it out"
        )
    # ranks may reach their first collective at very different times
    store.set_timeout(LONG_TIMEOUT)
    groups: dict[tuple[int, ...], Any] = {}
    # in the same order on all ranks, so that connecting cannot deadlock
    for number, members in enumerate(members_of):
        if ranks.rank in members:
            prefixed = PrefixStore(f"collectives/{number}", store)
            groups[members] = make_process_group(
                library, prefixed, members.index(ranks.rank), len(members)
            )
    UNDESTROYED_GROUPS.extend(groups.values())
    opened = DeviceCollectives(groups, backend, ranks.name, library)
    for members in groups:  # connect now rather than in the first step
        values = torch.zeros(len(members), device=device)
        opened.run(values, AveragingGroup.equal(members), WireFormat.FP32, 1.0)
    return opened


def gpu_location(
    library: CollectiveLibrary, rank: int, device: torch.device
) -> tuple[str, str] | None:
    """Machine and GPU of a rank.

    Returns
    -------
    tuple[str, str] or None
        The same for all ranks on the GPU, unless NCCL may share it; None without a GPU.
    """
    # ranks in separate network namespaces cannot reach each other
    here = f"{machine_id()} {network_namespace_id()}"
    if library is CollectiveLibrary.GLOO:
        return here, str(rank)
    if device.type != "cuda":
        return None
    return here, str(rank) if nccl_shares_gpus() else gpu_identity(device)[1]


def nccl_shares_gpus() -> bool:
    """Whether NCCL (2.30 or newer) may run several ranks on one GPU."""
    return os.environ.get(NCCL_SHARED_GPU) == "1"


def share_machine(locations: list[list[str] | None]) -> bool:
    """Whether ranks have a GPU each, all on one machine."""
    known = [tuple(location) for location in locations if location is not None]
    apart = len(set(known)) == len(locations)
    return apart and len({machine_id for machine_id, _ in known}) == 1


def make_process_group(library: CollectiveLibrary, store: Store, rank: int, size: int) -> Any:
    """A process group of PyTorch on this machine."""
    # backends are imported here: builds without one lack its class; members are on one machine
    if library is CollectiveLibrary.GLOO:
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = LONG_TIMEOUT
        return ProcessGroupGloo(store, rank, size, options)
    os.environ.setdefault(NCCL_INTERFACE, "=lo")
    require_nccl_interface()
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    nccl_options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    nccl_options._timeout = LONG_TIMEOUT
    return ProcessGroupNCCL(store, rank, size, nccl_options)
