"""Mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass

from planner.utils.validate import count, instance_of, sequence


@dataclass(frozen=True)
class Experts:
    """A router and several feed-forward parts in place of one (Shazeer et al. 2017).

    All of them are stored, averaged and kept in checkpoints; a token is computed by ``active``.

    Attributes
    ----------
    count
        Experts of a layer.
    active
        Of these, how many the router sends a token to.
    shared_ffn
        Width of an expert that all tokens visit beside; 0: there is none.
    shared_gate
        Whether a gate weighs what that one gives, as in Qwen2's.
    dense_layers
        Numbers of the layers that have a usual feed-forward part instead.
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("active", 1), ("ffn", 1), ("shared_ffn", 0)):
            value = count(f"experts {name}", getattr(self, name), least, 10**9)
            object.__setattr__(self, name, value)
        if self.active > self.count:
            raise ValueError(
                f"experts active is {self.active}, more than the {self.count} that a layer has; "
                "give at most as many"
            )
        instance_of(bool, self.shared_gate, "experts shared_gate")
        if self.shared_gate and not self.shared_ffn:
            raise ValueError("experts shared_gate is true without a shared expert; give shared_ffn")
        dense = layer_numbers("experts dense_layers", self.dense_layers)
        object.__setattr__(self, "dense_layers", dense)


def layer_numbers(field: str, values: object) -> tuple[int, ...]:
    """Numbers of layers, ascending, each once.

    Returns
    -------
    tuple[int, ...]
        Whole numbers from 0.
    """
    return tuple(sorted({count(f"an entry of {field}", k, 0) for k in sequence(field, values)}))
