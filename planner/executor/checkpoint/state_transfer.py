"""Transfer of state to a device that joins a stage (SWARM, 3.2).

A list of names, shapes and formats as JSON, then the values, tensor by tensor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from planner.executor.checkpoint.safetensors_io import DTYPE_OF_NAME, NAME_OF_DTYPE
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.model_stage import ModelStage
from planner.executor.transport.connections import (
    ChannelKind,
    Connection,
    as_bytes,
    receive_into,
    send_all,
)

LENGTH = struct.Struct("!Q")


def transfer_state(
    ranks: RankGroup, source: int, target: int, model_stage: ModelStage | None, steps: int
) -> None:
    """Transfer parameters, optimizer state and position in the data; a collective call."""
    peer = {source: target, target: source}.get(ranks.rank)
    channels = [] if peer is None else [(ChannelKind.STATE, peer)]
    with connections_to(ranks, channels, f"move/{steps}/{target}") as connections:
        if peer is None or model_stage is None:
            return
        connection = connections[ChannelKind.STATE, peer]
        if ranks.rank == source:
            data = model_stage.data
            data_position = None if data is None else list(data.position(steps))
            _send(connection, model_stage.joining_state(), data_position)
            receive_into(connection, memoryview(bytearray(1)))  # until all is there
        else:
            state, data_position = _receive(connection)
            model_stage.load_joining_state(state)
            if model_stage.data is not None and data_position is not None:
                model_stage.seek(data_position)
            send_all(connection, memoryview(b"!"))


def _send(
    connection: Connection, state: Mapping[str, Tensor], data_position: list[int] | None
) -> None:
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in state.items()}
    formats = {name: [NAME_OF_DTYPE[t.dtype], list(t.shape)] for name, t in tensors.items()}
    header = json.dumps({"data_position": data_position, "tensors": formats}).encode()
    send_all(connection, memoryview(LENGTH.pack(len(header))), memoryview(header))
    for tensor in tensors.values():
        send_all(connection, as_bytes(tensor))


def _receive(connection: Connection) -> tuple[dict[str, Tensor], list[int] | None]:
    length = bytearray(LENGTH.size)
    receive_into(connection, memoryview(length))
    text = bytearray(LENGTH.unpack(length)[0])
    receive_into(connection, memoryview(text))
    header = json.loads(text.decode())
    state = {}
    for name, (dtype, shape) in header["tensors"].items():
        tensor = torch.empty(shape, dtype=DTYPE_OF_NAME[dtype])
        receive_into(connection, as_bytes(tensor))
        state[name] = tensor
    return state, header["data_position"]
