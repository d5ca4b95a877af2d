"""Transfer of state to a device that joins a stage (SWARM, 3.2).

A list of names, shapes and formats as JSON, then the values, tensor by tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from planner.executor.comm.connections import (
    ChannelKind,
    Connection,
    as_bytes,
    receive_into,
    send_all,
)
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.process_group import ProcessGroup
from planner.executor.runtime.stage_module import StageModule

LENGTH = struct.Struct("!Q")
DTYPES = {
    str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16)
}


def transfer_state(
    ranks: ProcessGroup, giver: int, taker: int, stage_module: StageModule | None, steps: int
) -> None:
    """Transfer parameters, optimizer state and position in the data; a collective call."""
    other = {giver: taker, taker: giver}.get(ranks.rank)
    channels = [] if other is None else [(ChannelKind.STATE, other)]
    with connections_to(ranks, channels, f"move/{steps}/{taker}") as connections:
        if other is None or stage_module is None:
            return
        connection = connections[ChannelKind.STATE, other]
        if ranks.rank == giver:
            data = stage_module.data
            place = None if data is None else list(data.position(steps))
            _send(connection, stage_module.state(), place)
            receive_into(connection, memoryview(bytearray(1)))  # until all is there
        else:
            state, place = _receive(connection)
            stage_module.load_state(state)
            if stage_module.data is not None and place is not None:
                stage_module.data.seek(place)
            send_all(connection, memoryview(b"!"))


def _send(connection: Connection, state: Mapping[str, Tensor], place: list[int] | None) -> None:
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in state.items()}
    says = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    head = json.dumps({"place": place, "tensors": says}).encode()
    send_all(connection, memoryview(LENGTH.pack(len(head))), memoryview(head))
    for tensor in tensors.values():
        send_all(connection, as_bytes(tensor))


def _receive(connection: Connection) -> tuple[dict[str, Tensor], list[int] | None]:
    length = bytearray(LENGTH.size)
    receive_into(connection, memoryview(length))
    head = bytearray(LENGTH.unpack(length)[0])
    receive_into(connection, memoryview(head))
    header = json.loads(head.decode())
    state = {}
    for name, (dtype, shape) in header["tensors"].items():
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        receive_into(connection, as_bytes(tensor))
        state[name] = tensor
    return state, header["place"]
