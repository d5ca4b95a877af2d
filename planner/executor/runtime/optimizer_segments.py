"""Optimizer state in shards, in checkpoints: parts of parameters, each from one device.

The key of a part is ``optimizer@START/FIELD/NAME``, with its first element in the flattened
parameter. The fp32 parameters are a field, too: what all devices have may be rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MASTER = "parameter"
"""Field of the fp32 parameters."""
SEGMENT = "optimizer@"
"""Begins the keys of parts."""


def segment_key(field: str, name: str, start: int) -> str:
    """Key of a part of a field of a parameter."""
    return f"{SEGMENT}{start}/{field}/{name}"


def segment_of(state_dict: Mapping[str, Tensor], field: str, name: str, part: slice) -> Tensor:
    """A part of a field, from the same part or from the field of the whole parameter."""
    if (own := state_dict.get(segment_key(field, name, part.start))) is not None:
        return own
    key = f"{MASTER}/{name}" if field == MASTER else f"optimizer/{field}/{name}"
    whole = state_dict[key].reshape(-1)
    return whole if field == "step" else whole[part]


def joined_segments(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State with whole fields in place of their parts, of which all must be present."""
    tensors = {key: value for key, value in state_dict.items() if not key.startswith(SEGMENT)}
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for key in state_dict.keys() - tensors.keys():
        start, field, name = key.removeprefix(SEGMENT).split("/")
        parts.setdefault((field, name), {})[int(start)] = state_dict[key]
    for (field, name), by_start in parts.items():
        parameter = tensors[f"{MASTER}/{name}"]
        if field == "step":
            tensors[f"optimizer/step/{name}"] = next(iter(by_start.values())).reshape(())
            continue
        whole = torch.cat([by_start[start] for start in sorted(by_start)]).view_as(parameter)
        tensors[f"{MASTER}/{name}" if field == MASTER else f"optimizer/{field}/{name}"] = whole
    return tensors
