"""Schedule: paths of microbatches, and the order of operations on each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.training_plan import coercion
from planner.training_plan.choices import Head
from planner.training_plan.encoding import order_of, order_text, paths_of, route_fields
from planner.training_plan.error import PlanError
from planner.utils.text import counted
from planner.utils.validate import choice, instance_of, sequence

Operation = tuple[str, int]
"""``("F" | "H" | "B", microbatch)``."""


@dataclass(frozen=True)
class Schedule:
    """Paths of microbatches, and the order of operations on each device.

    Attributes
    ----------
    name
        Name for people.
    head
        The device of each path that runs head and loss.
    paths
        Per microbatch, devices in the order visited.
    order
        Per device, its operations in execution order.
    """

    name: str
    head: Head
    paths: tuple[tuple[int, ...], ...]
    order: tuple[tuple[Operation, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", choice(Head, "head", self.head, error=PlanError))
        object.__setattr__(self, "paths", coercion.lists_of_numbers("paths", self.paths))
        rows = sequence("order", self.order, error=PlanError)
        object.__setattr__(self, "order", tuple(coercion.operations("order", row) for row in rows))
        instance_of(str, self.name, "name", error=PlanError)
        if () in self.paths:
            raise PlanError(
                f"paths[{self.paths.index(())}] visits no device; let it visit stage 0 at least"
            )

    def head_device(self, microbatch: int) -> int:
        """The device that runs H of a microbatch."""
        return self.paths[microbatch][-1 if self.head is Head.LAST else 0]

    def __repr__(self) -> str:
        count = sum(map(len, self.order))
        counts = counted(len(self.paths), "microbatch"), counted(count, "operation")
        return f"Schedule({self.name!r}, {', '.join(counts)})"

    def most_live(self) -> list[int]:
        """Per device, the largest number of microbatches between forward and backward."""
        peaks = []
        for ops in self.order:
            live = peak = 0
            for kind, _ in ops:
                live += {"F": 1, "H": 0, "B": -1}[kind]
                peak = max(peak, live)
            peaks.append(peak)
        return peaks

    def visits(self, devices: int) -> list[dict[str, list[int]]]:
        """Per device and kind of operation, its microbatches on the paths, ascending."""
        by_device: list[dict[str, list[int]]] = [
            {"F": [], "H": [], "B": []} for _ in range(devices)
        ]
        for b in range(len(self.paths)):
            for kind, d in self.chain(b):
                if d < devices:
                    by_device[d][kind].append(b)
        return by_device

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        visits = self.visits(len(self.order))
        return {
            "name": self.name,
            "head": self.head,
            **route_fields(self.paths),
            "order": [order_text(*device) for device in zip(self.order, visits, strict=True)],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Schedule:
        """Inverse of `to_dict`."""
        bare = cls(data["name"], Head(data["head"]), paths_of(data, where), ())
        visits = bare.visits(len(data["order"]))
        texts = enumerate(zip(data["order"], visits, strict=True))
        order = (order_of(*device, f"{where}.order[{d}]") for d, device in texts)
        return replace(bare, order=tuple(order))

    def chain(self, microbatch: int) -> list[tuple[str, int]]:
        """``(kind, device)`` in dependency order: F along the path, H, B back."""
        path = self.paths[microbatch]
        return [
            *(("F", d) for d in path),
            ("H", self.head_device(microbatch)),
            *(("B", d) for d in reversed(path)),
        ]
