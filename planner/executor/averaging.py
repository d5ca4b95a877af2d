"""Averaging within a group as planned: member k sums share k and returns it to everybody.

Microbatch losses are already divided by the samples of the whole step, so that the sum of the
contributions is the mean over samples, whoever gave how many.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from planner.executor.transport import Transport
from planner.plan import AveragingGroup

TAG = 1 << 28
"""Above all tags of the pipeline."""


def share_ranges(length: int, shares: Iterable[float]) -> list[tuple[int, int]]:
    """Consecutive slices of a vector in proportion to the shares, covering it exactly."""
    ends = [0]
    total = 0.0
    for share in shares:
        total += share
        ends.append(min(length, round(total * length)))
    ends[-1] = length
    return list(pairwise(ends))


def average_gradients(
    parameters: list[nn.Parameter], group: AveragingGroup, rank: int, transport: Transport
) -> None:
    """Replace this rank's gradients by the group's sum, equal on all members bit for bit."""
    if len(group.members) == 1:
        return
    vector = torch.cat([_gradient(p).reshape(-1) for p in parameters]).cpu()
    me = group.members.index(rank)
    ranges = share_ranges(len(vector), group.shares)
    others = [k for k in range(len(group.members)) if k != me]
    mine = ranges[me]
    incoming = {
        k: transport.receive((mine[1] - mine[0],), group.members[k], TAG)
        for k in others
        if group.contributes[k] and mine[1] > mine[0]
    }
    returned = {
        k: transport.receive((ranges[k][1] - ranges[k][0],), group.members[k], TAG + 1)
        for k in others
        if ranges[k][1] > ranges[k][0]
    }
    if group.contributes[me]:
        for k in returned:
            transport.send(vector[slice(*ranges[k])], group.members[k], TAG)
    own = vector[slice(*mine)].clone()
    total = torch.zeros_like(own)
    for k in range(len(group.members)):  # a fixed order makes the sum reproducible
        if k == me:
            total += own if group.contributes[me] else 0.0
        elif k in incoming:
            total += incoming[k].wait().cpu()
    if mine[1] > mine[0]:
        for k in others:
            transport.send(total, group.members[k], TAG + 1)
    vector[slice(*mine)] = total
    for k, pending in returned.items():
        vector[slice(*ranges[k])] = pending.wait().cpu()
    _scatter(vector, parameters)
    transport.drain()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _scatter(vector: Tensor, parameters: list[nn.Parameter]) -> None:
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.grad = vector[start:stop].view_as(parameter).to(parameter.device)
        start = stop
