"""Mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass

from planner.utils.validate import count, instance_of, sequence


@dataclass(frozen=True)
class Experts:
    """A router and several feed-forward parts in place of one (Shazeer et al. 2017).

    All experts are stored, averaged and checkpointed; a token is computed by ``active`` of them.

    Attributes
    ----------
    count
        Experts per layer.
    active
        Experts to which the router sends each token.
    shared_ffn
        Width of an additional expert for all tokens; 0 if there is none.
    shared_gate
        Whether its output is weighted by a gate, as in Qwen2.
    dense_layers
        Indices of layers with an ordinary feed-forward part.
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
    """Indices of layers, ascending and distinct.

    Returns
    -------
    tuple[int, ...]
        Whole numbers from 0.
    """
    return tuple(sorted({count(f"an entry of {field}", k, 0) for k in sequence(field, values)}))
