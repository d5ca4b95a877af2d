"""Optimizer state in shards, in checkpoints: parts of parameters, each from one device.

The key of a part is ``optimizer@START/FIELD/NAME``, with its first element in the flattened
parameter. The fp32 parameters are a field, too: what all devices have may be rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from planner.training_plan.shares import Range

MASTER = "parameter"
"""Field of the fp32 parameters."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Fields of AdamW's moments."""
SEGMENT = "optimizer@"
"""Begins the keys of parts."""


class Segment(NamedTuple):
    """A part of a parameter.

    Attributes
    ----------
    part
        Of the flattened parameter.
    range
        Its place in the stage's vector.
    """

    name: str
    part: slice
    range: Range

    def key(self, field: str) -> str:
        """Its key for a field."""
        return f"{SEGMENT}{self.part.start}/{field}/{self.name}"

    def find(self, state_dict: Mapping[str, Tensor], field: str) -> Tensor:
        """Its field, or the same part of the whole parameter's."""
        if (own := state_dict.get(self.key(field))) is not None:
            return own
        key = f"{MASTER}/{self.name}" if field == MASTER else f"optimizer/{field}/{self.name}"
        whole = state_dict[key].reshape(-1)
        return whole if field == "step" else whole[self.part]


def segments_of(named: Mapping[str, Tensor], ranges: Iterable[Range]) -> list[Segment]:
    """Parts of parameters in parts of the vector in which these follow each other."""
    segments = []
    for start, stop in ranges:
        offset = 0
        for name, parameter in named.items():
            begin, end = max(start, offset), min(stop, offset + parameter.numel())
            if begin < end:
                part = slice(begin - offset, end - offset)
                segments.append(Segment(name, part, (begin, end)))
            offset += parameter.numel()
    return segments


def fields_in(state_dict: Mapping[str, Tensor]) -> list[str]:
    """Fields of AdamW's state that it has; none before the first step."""
    kinds = {key.rpartition("/")[0].rpartition("/")[2] for key in state_dict}
    return [field for field in ("step", *MOMENTS) if field in kinds]


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
