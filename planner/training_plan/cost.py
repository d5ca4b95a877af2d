"""Cost of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.network.prices import Prices
from planner.training_plan.error import PlanError
from planner.utils.validate import instance_of, real


@dataclass(frozen=True)
class Cost:
    """Dollars of a step.

    Attributes
    ----------
    devices_usd
        All devices of the plan during the predicted step.
    messages_usd
        Traffic between regions, in the mean over steps.
    hour_usd
        Value of an hour's wait in the objective; 0 if only dollars or only time counted.
    usd_per_billion_tokens
        None if the workload has no sequence length.
    """

    devices_usd: float
    messages_usd: float
    paid_bytes: float
    usd_per_billion_tokens: float | None
    prices: Prices
    hour_usd: float = 0.0

    def __post_init__(self) -> None:
        for name in ("devices_usd", "messages_usd", "paid_bytes", "hour_usd"):
            object.__setattr__(
                self, name, real(f"cost.{name}", getattr(self, name), 0, error=PlanError)
            )
        if self.usd_per_billion_tokens is not None:
            per_billion = real(
                "cost.usd_per_billion_tokens", self.usd_per_billion_tokens, 0, error=PlanError
            )
            object.__setattr__(self, "usd_per_billion_tokens", per_billion)
        instance_of(Prices, self.prices, "cost.prices", error=PlanError)

    @property
    def step_usd(self) -> float:
        """Total dollars of a step."""
        return self.devices_usd + self.messages_usd

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "devices_usd": self.devices_usd,
            "messages_usd": self.messages_usd,
            "step_usd": self.step_usd,
            "paid_bytes": self.paid_bytes,
            "usd_per_billion_tokens": self.usd_per_billion_tokens,
            "hour_usd": self.hour_usd,
            "prices": self.prices.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cost:
        """Inverse of `to_dict`."""
        values = {k: v for k, v in data.items() if k not in ("step_usd", "prices")}
        try:
            cost = cls(prices=Prices.from_dict(data["prices"]), **values)
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"cost.{error}") from None
        if not math.isclose(data["step_usd"], cost.step_usd, rel_tol=1e-9):
            raise PlanError(
                f"cost.step_usd: must be devices_usd + messages_usd, {cost.step_usd:g}, found "
                f"{data['step_usd']:g}; make the plan again"
            )
        return cost
