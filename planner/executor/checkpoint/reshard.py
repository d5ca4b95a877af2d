"""What a rank needs of a checkpoint that another plan of the same model has written.

Parts of the model lie where that plan had them: a rank finds each of its own, the embedding, a
layer or the head, in the shard of a device that held it. What is averaged is the same on all of
those. What is not, the moments of devices that update by themselves, comes from one of them: the
n-th device of a stage takes those of the part's n-th holder, and again from the first. Devices that
are as one take what the first of them takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from planner.executor.huggingface.names import EMBEDDING, PROJECTION
from planner.executor.runtime.stage_module import has_head
from planner.training_plan.model import TrainingPlan, as_one

LAYER = re.compile(r"stage\.layers\.(\d+)\.")
HEAD = "head."
LATER = ("qk_norm", "out_bias", "ffn_bias", "post_norms", "full_layers", "experts", "priced_only")
"""Fields of an `Architecture` that are left out where they say nothing."""


def description(plan: TrainingPlan) -> dict[str, Any]:
    """What a checkpoint tells those who go on from it, JSON-ready.

    Returns
    -------
    dict[str, Any]
        ``model``: what must be alike. ``training``: what another plan may decide otherwise, to be
        said. ``holds``: by device with a stage, its first layer, the one after its last, and
        whether it has the head.
    """
    w = plan.workload
    assert w.architecture is not None
    return {
        "model": {
            # checkpoints of older releases have none of what came later
            **{
                name: value
                for name, value in asdict(w.architecture).items()
                if value or name not in LATER
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
        },
        "holds": {
            str(rank): [*plan.stage_layers[stage], has_head(plan, rank)]
            for rank, stage in sorted(plan.stage_of.items())
        },
    }


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields with other values: name, theirs, ours."""
    names = sorted(set(theirs) | set(ours))
    pairs = ((name, theirs.get(name), ours.get(name)) for name in names)
    return [(name, was, now) for name, was, now in pairs if was != now]


def source_shards(
    holds: Mapping[str, Any], plan: TrainingPlan, rank: int, names: Iterable[str]
) -> dict[int, dict[str, str]]:
    """In which shards a rank's parameters lie.

    Returns
    -------
    dict[int, dict[str, str]]
        By device of the plan that wrote: names there, and ours of the same parameter.
    """
    try:
        held = sorted((int(d), int(a), int(b), bool(head)) for d, (a, b, head) in holds.items())
    except (AttributeError, TypeError):
        raise ValueError("no layers of devices") from None
    stage = plan.stage_of[rank]
    start = plan.stage_layers[stage][0]
    turn = plan.assignment.groups[stage].index(as_one(plan, rank)[0])
    arch = plan.workload.architecture
    copied = PROJECTION if arch is not None and arch.tied else None
    found: dict[int, dict[str, str]] = {}
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
            raise ValueError(f"no device that held {name!r}")
        device, first = holders[turn % len(holders)]
        there = EMBEDDING if name == copied else name
        if layer is not None:
            there = f"stage.layers.{number - first}.{name[layer.end() :]}"
        found.setdefault(device, {})[there] = name
    return found
