"""The flow's linear program as a readable PuLP model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from planner.lp.flow import FlowLinearProgram, RowKind, StageFlow


def flow_model(flow: StageFlow, program: FlowLinearProgram, names: Sequence[str]) -> Any:
    """Build a PuLP model to write to a file, or to solve with another solver."""
    import pulp

    pair = [f"{names[u]}_{names[v]}" for u, v in zip(flow.source, flow.target, strict=True)]
    model = pulp.LpProblem("flow", pulp.LpMinimize)
    # PuLP 4 makes variables with the model, earlier versions on their own
    variable = getattr(model, "add_variable", pulp.LpVariable)
    columns = [
        *(variable(f"through_{name}", lowBound=0) for name in names),
        *(variable(f"over_{name}", lowBound=0) for name in pair),
        variable("period", lowBound=0),
        variable("lack", lowBound=0),
    ]
    model += pulp.lpSum(
        float(value) * columns[k] for k, value in enumerate(program.cost) if value != 0
    )

    def expressions(matrix: Any) -> list[Any]:
        """Left-hand side of every row."""
        ends = matrix.indptr
        entries = list(zip(matrix.indices.tolist(), matrix.data.tolist(), strict=True))
        return [
            pulp.lpSum(value * columns[k] for k, value in entries[a:b] if value != 0)
            for a, b in pairwise(ends)
        ]

    entity_names = {RowKind.PAIR: pair, RowKind.SPARE: pair, RowKind.LINE: None}
    for lhs, (kind, index) in zip(expressions(program.a_ub), program.rows, strict=True):
        entity = entity_names.get(kind, names)
        model += lhs <= 0, f"{kind}_{index if entity is None else entity[index]}"
    equality_names = [f"{side}_{name}" for side in ("out", "in") for name in names] + ["all"]
    for lhs, rhs, name in zip(
        expressions(program.a_eq),
        np.asarray(program.b_eq).tolist(),
        equality_names,
        strict=True,
    ):
        if len(lhs):  # the last stage has no outgoing edges, the first no incoming ones
            model += lhs == rhs, name
    return model
