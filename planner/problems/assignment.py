"""Which device holds which stage: DT-FM's question with its exact cost.

The cost functions here are the definitions: clear, not fast. Solvers have compiled twins, and
`planner.checker.dispatch` recomputes everything on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.network.network import Network
from planner.problems.error import ProblemError
from planner.problems.quantities import device_groups, instance_of, per_item, whole
from planner.utils.text import stage_words
from planner.utils.validate import short_repr

Floats = NDArray[np.float64]


@dataclass(frozen=True, init=False)
class AssignmentProblem:
    """Assign devices to pipeline stages at least communication cost (DT-FM, eq. 1-4).

    Parameters
    ----------
    network
        Complete network of N devices. Both directions are averaged here, as the paper does.
    stage_sizes
        Devices per stage, summing to N; instead of ``stages`` and ``pipelines``.
    activation_bytes
        c_PP, bytes over one boundary: a scalar, or one per boundary (S - 1).
    gradient_bytes
        c_DP, bytes of one stage's gradients: a scalar, or one per stage (S).
    stages, pipelines
        Equal groups: ``stages * pipelines == N``.

    Attributes
    ----------
    network
        The network with both directions averaged.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), section 3, eq. 1-4.
    """

    network: Network
    stage_sizes: tuple[int, ...]
    activation_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]

    def __init__(
        self,
        network: Network,
        stages: int | None = None,
        pipelines: int | None = None,
        activation_bytes: ArrayLike = 0.0,
        gradient_bytes: ArrayLike = 0.0,
        *,
        stage_sizes: Sequence[int] | None = None,
    ) -> None:
        instance_of(Network, network, "network").require_complete()
        n = len(network)
        if stage_sizes is None:
            if stages is None or pipelines is None:
                raise ProblemError(
                    "the shape of the plan is missing; give stages and pipelines, or stage_sizes"
                )
            stages, pipelines = whole("stages", stages), whole("pipelines", pipelines)
            if stages < 1 or pipelines < 1 or stages * pipelines != n:
                raise ProblemError(
                    f"stages x pipelines must be the number of devices, found {stages} x "
                    f"{pipelines} for {n} devices; change one, or give stage_sizes"
                )
            sizes = (pipelines,) * stages
        else:
            if stages is not None or pipelines is not None:
                raise ProblemError(
                    "stage_sizes was given together with stages or pipelines; give one or the other"
                )
            if isinstance(stage_sizes, str) or not isinstance(stage_sizes, Iterable):
                raise ProblemError(
                    "stage_sizes must list the devices of each stage, found "
                    f"{short_repr(stage_sizes)}; give such as (5, 3, 3)"
                )
            sizes = tuple(whole("stage_sizes", s) for s in stage_sizes)
            if not sizes or min(sizes) < 1 or sum(sizes) != n:
                raise ProblemError(
                    f"stage_sizes must be >= 1 and sum to the number of devices, found "
                    f"{list(sizes)} for {n} devices"
                )
        for field, value in (
            ("network", network.symmetrised()),
            ("stage_sizes", sizes),
            (
                "activation_bytes",
                tuple(
                    per_item(
                        "activation_bytes", activation_bytes, len(sizes) - 1, "boundary"
                    ).tolist()
                ),
            ),
            (
                "gradient_bytes",
                tuple(per_item("gradient_bytes", gradient_bytes, len(sizes), "stage").tolist()),
            ),
        ):
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return f"AssignmentProblem({self.network.size_words()}, {stage_words(self.stage_sizes)})"

    @property
    def stages(self) -> int:
        """S, the number of stages (the paper's D_PP)."""
        return len(self.stage_sizes)

    @property
    def pipelines(self) -> int | None:
        """The paper's D_DP, None when the groups differ in size."""
        return self.stage_sizes[0] if len(set(self.stage_sizes)) == 1 else None

    @property
    def uniform(self) -> bool:
        """Equal groups, and the same bytes over every boundary and in every stage.

        Then the data-parallel cost does not depend on the order of the groups.
        """
        return all(
            len(set(values)) <= 1
            for values in (self.stage_sizes, self.activation_bytes, self.gradient_bytes)
        )

    def exchange_s(self, stage: int) -> Floats:
        """N x N: one pair's summand of eq. 2 in ``stage``, 0 on the diagonal."""
        share = self.gradient_bytes[stage] / self.stage_sizes[stage]
        return 2 * self.network.transfer_s(share)

    def hop_s(self, boundary: int) -> Floats:
        """N x N: ``latency + activation_bytes / bandwidth`` between stages j and j + 1."""
        return self.network.transfer_s(self.activation_bytes[boundary])

    def data_parallel_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Eq. 2 and its maximum over the stages."""
        worst = 0.0
        for stage, group in enumerate(groups):
            if len(group) > 1:
                inside = self.exchange_s(stage)[np.ix_(group, group)]
                worst = max(worst, float(inside.sum(axis=1).max()))
        return worst

    def boundary_s(self, boundary: int, left: Sequence[int], right: Sequence[int]) -> float:
        """B_j of eq. 3: smallest largest hop over matchings that cover the smaller side."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_bipartite_matching

        hops = self.hop_s(boundary)[np.ix_(left, right)]
        levels = np.unique(hops)
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            match = maximum_bipartite_matching(csr_array(hops <= levels[middle]), "column")
            if int((match >= 0).sum()) == min(hops.shape):
                high = middle
            else:
                low = middle + 1
        return float(levels[low])

    def pipeline_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Eq. 4 for the groups in the given order: the sum of ``2 B_j``."""
        return sum(2 * self.boundary_s(j, groups[j], groups[j + 1]) for j in range(len(groups) - 1))

    def cost(self, groups: Sequence[Sequence[int]]) -> float:
        """COMM-COST of eq. 1 in seconds for groups in pipeline order.

        Raises
        ------
        ProblemError
            The groups have other sizes than the stages, or not every device once.
        """
        self.require_groups(groups)
        return self.data_parallel_s(groups) + self.pipeline_s(groups)

    def require_groups(self, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """The groups, each sorted; raises `ProblemError` if they are none of this problem."""
        required = device_groups(groups)
        sizes = tuple(map(len, required))
        if sizes != self.stage_sizes:
            raise ProblemError(
                f"groups have {short_repr(sizes)} devices; the problem's stages have "
                f"{short_repr(self.stage_sizes)}"
            )
        devices = sorted(d for group in required for d in group)
        if devices != list(range(len(devices))):
            raise ProblemError(
                f"groups are {short_repr(groups)}; give each device from 0 to "
                f"{len(devices) - 1} once"
            )
        return required

    def replace(self, **changes: Any) -> AssignmentProblem:
        """A copy with some of the constructor's fields changed."""
        return replace(self, **changes)
