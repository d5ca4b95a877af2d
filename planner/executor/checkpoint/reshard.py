"""Reshards a checkpoint: state of a rank from the shards of another plan of the same model.

A rank reads each of its parts (embedding, layer, head) from the shard of a device that held it.
Averaged parameters are equal on all of these devices. Moments differ if devices take local steps:
the n-th device of a stage reads those of the n-th holder of the part, cyclically. Devices that
average gradients in every step all read those of the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from planner.executor.runtime.model import EMBEDDING, PROJECTION
from planner.executor.runtime.stage_module import has_head
from planner.training_plan.model import TrainingPlan, lockstep_devices
from planner.utils.refusal import Refusal

LAYER = re.compile(r"stage\.layers\.(\d+)\.")
HEAD = "head."
OMITTED_AT_DEFAULT = (
    "qk_norm",
    "out_bias",
    "ffn_bias",
    "post_norms",
    "full_layers",
    "experts",
    "priced_only",
)
"""Fields of an `Architecture` that are omitted at their default."""


def description(plan: TrainingPlan) -> dict[str, Any]:
    """Description of a plan in a checkpoint, JSON-ready.

    Returns
    -------
    dict[str, Any]
        ``model``: must be equal. ``training``: may differ, with a notice. ``holds``: by device with
        a stage, its range of layers and whether it has the head. ``owns``: the same of devices that
        have optimizer state of a stage alone.
    """
    w = plan.workload
    assert w.architecture is not None
    owners = {
        str(rank): [*plan.stage_layers[stage], stage == plan.head_stage]
        for rank, stage in sorted(plan.averages_for.items())
        if plan.shards_optimizer
    }
    return {
        "model": {
            # checkpoints of older releases lack newer fields
            **{
                name: value
                for name, value in asdict(w.architecture).items()
                if value or name not in OMITTED_AT_DEFAULT
            },
            **{f"precision of {name}": value for name, value in asdict(w.precision).items()},
            "batch_samples": w.batch_samples,
            "seed": plan.seed,
        },
        "training": {
            "sync": plan.sync.to_dict(),
            "clip": plan.clip,
            "codec": plan.codec,
            "boundary_codec": w.boundary_codec,
            "optimizer_shards": w.optimizer_shards,
        },
        "holds": {
            str(rank): [*plan.stage_layers[stage], has_head(plan, rank)]
            for rank, stage in sorted(plan.stage_of.items())
        },
        **({"owns": owners} if owners else {}),
    }


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields with different values: name, value in the checkpoint, value in this run."""
    names = sorted(set(theirs) | set(ours))
    pairs = ((name, theirs.get(name), ours.get(name)) for name in names)
    return [(name, was, now) for name, was, now in pairs if was != now]


def source_shards(
    holds: Mapping[str, Any],
    plan: TrainingPlan,
    rank: int,
    names: Iterable[str],
    *,
    all_holders: bool = False,
) -> dict[int, dict[str, str]]:
    """Shards that contain the parameters of a rank.

    Parameters
    ----------
    all_holders
        Whether all devices are listed that held a parameter, of whose optimizer state each may have
        a part.

    Returns
    -------
    dict[int, dict[str, str]]
        By device of the plan that wrote: name there, and our name of the same parameter.
    """
    try:
        held = sorted((int(d), int(a), int(b), bool(head)) for d, (a, b, head) in holds.items())
    except (AttributeError, TypeError):
        raise Refusal("no layers of devices") from None
    stage, turn = plan.averaged_stage(rank), 0
    start = plan.stage_layers[stage][0]
    if rank in plan.stage_of:
        turn = plan.assignment.groups[stage].index(lockstep_devices(plan, rank)[0])
    arch = plan.workload.architecture
    copied = PROJECTION if arch is not None and arch.tied else None
    sources: dict[int, dict[str, str]] = {}
    for name in names:
        layer = LAYER.match(name)
        if layer is not None:
            number = start + int(layer[1])
            holders = [(d, a) for d, a, b, _ in held if a <= number < b]
        elif name.startswith(HEAD) and name != copied:
            number, holders = -1, [(d, 0) for d, _, _, head in held if head]
        else:  # the embedding, before layer 0
            number, holders = -1, [(d, 0) for d, a, b, _ in held if a == 0]
        if not holders:
            raise Refusal(f"no device that held {name!r}")
        for device, first in holders if all_holders else [holders[turn % len(holders)]]:
            there = EMBEDDING if name == copied else name
            if layer is not None:
                there = f"stage.layers.{number - first}.{name[layer.end() :]}"
            sources.setdefault(device, {})[there] = name
        if all_holders and copied is not None and name in (EMBEDDING, copied):
            for device in (d for d, a, _, head in held if head and a > 0):
                sources.setdefault(device, {})[copied] = name
    return sources
