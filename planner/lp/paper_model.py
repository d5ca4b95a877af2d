"""The paper's programs verbatim as PuLP models: slow and readable, used as test oracles.

Rates are in bytes per second divided by `PaperModel.unit`, so that solvers see numbers near 1; P is
divided alike, so that xi stays in steps per second times `PaperModel.xi_unit`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.lp.dedloc_lp_rows import big_m
from planner.lp.model_file import ModelFormat, model_text
from planner.problems import AveragingProblem, ProblemError
from planner.problems.quantities import choice, instance_of
from planner.search.highs import milp
from planner.utils.atomic_write import write_text

Floats = NDArray[np.float64]

MAX_PEERS = 100
"""Maximum number of peers: a million rows of eq. 4, a hundred megabytes."""
ABOUT = (
    "DeDLOC's averaging (Diskin et al. 2021, eq. 5). a_I_J: rate from peer I to reducer J; g_I_J:",
    "rate of returns from reducer I to peer J; c_I: whether peer I contributes; xi: steps per",
    "second, maximised. Constraints: compute: samples of a step; average_I: what peer I gets in a",
    "step; sender_I_J_K: reducer I returns to J at most what it has from K; upload_I, download_I",
    "and link_I_J: limits.",
)


class Solver(enum.StrEnum):
    """Solver of the models: SciPy's HiGHS or PuLP's CBC."""

    HIGHS = "highs"
    CBC = "cbc"


@dataclass(frozen=True)
class PaperModel:
    """A PuLP model of eq. 2 or 5 with its variables.

    Attributes
    ----------
    xi, a, g, c
        The paper's variables; ``a[i][j]`` goes from i to j.
    unit
        Bytes per second of one rate unit in the model.
    xi_unit
        Steps per second of one unit of xi in the model.
    """

    model: Any
    xi: Any
    a: list[list[Any]]
    g: list[list[Any]]
    c: list[Any]
    unit: float
    xi_unit: float

    def write(self, path: str | Path) -> None:
        """Write the model; the suffix ``.lp`` or ``.mps`` selects the format.

        Solvers disagree on maximisation in MPS, so an MPS file minimises ``-xi``.
        """
        kind = Path(path).suffix.lower()
        if kind not in (".lp", ".mps"):
            raise ProblemError(f"no format for {kind or 'a file without suffix'}; use .lp or .mps")
        write_text(path, self.text(ModelFormat(kind[1:])))

    def text(self, form: ModelFormat) -> str:
        """The model as the text of a file that states its units."""
        units = (
            f"One unit of xi is {self.xi_unit:.12g} steps/s, "
            f"one of a and g {self.unit:.12g} bytes/s.",
        )
        return model_text(self.model, form, (*ABOUT, *units))

    def solve(self, solver: str = Solver.HIGHS) -> PaperModelSolution:
        """Solve the model."""
        cbc = choice(Solver, "solver", solver) is Solver.CBC
        return self._read(self._cbc() if cbc else _highs(self.model))

    def _cbc(self) -> dict[str, float]:
        import pulp

        self.model.solve(pulp.PULP_CBC_CMD(msg=False))
        if pulp.LpStatus[self.model.status] != "Optimal":
            raise RuntimeError(f"CBC ended with {pulp.LpStatus[self.model.status]}")
        return {v.name: float(v.value() or 0.0) for v in self.model.variables()}

    def _read(self, value: dict[str, float]) -> PaperModelSolution:
        n = len(self.c)

        def rates(grid: list[list[Any]]) -> Floats:
            return np.array([[value.get(x.name, 0.0) for x in row] for row in grid]) * self.unit

        contributes = np.array([value.get(x.name, 0.0) for x in self.c])
        a, g = rates(self.a), rates(self.g)
        assert a.shape == (n, n)
        return PaperModelSolution(value[self.xi.name] * self.xi_unit, a, g, contributes)


@dataclass(frozen=True)
class PaperModelSolution:
    """Values of the paper's variables.

    Attributes
    ----------
    a, g
        ``float[n, n]``, bytes per second.
    c
        ``float[n]``, whether a peer contributes.
    """

    xi: float
    a: Floats
    g: Floats
    c: Floats


def _highs(model: Any) -> dict[str, float]:
    """Solve a PuLP model with SciPy's HiGHS."""
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import csr_array

    variables = model.variables()
    column_of = {v.name: k for k, v in enumerate(variables)}
    entries, low, high = [], [], []
    constraints = model.constraints
    for row, constraint in enumerate(
        constraints() if callable(constraints) else constraints.values()
    ):
        entries += [(row, column_of[v.name], w) for v, w in constraint.items()]
        rhs = -float(constraint.constant)
        low.append(rhs if constraint.sense >= 0 else -np.inf)
        high.append(rhs if constraint.sense <= 0 else np.inf)
    rows, columns, values = zip(*entries, strict=True)
    objective = np.zeros(len(variables))
    for v, w in model.objective.items():
        objective[column_of[v.name]] = -float(w)
    solution = milp(
        objective,
        integrality=np.array([v.cat == "Integer" for v in variables], dtype=float),
        bounds=Bounds(
            np.array([-np.inf if v.lowBound is None else v.lowBound for v in variables], float),
            np.array([np.inf if v.upBound is None else v.upBound for v in variables], float),
        ),
        constraints=LinearConstraint(
            csr_array((values, (rows, columns)), shape=(len(low), len(variables))), low, high
        ),
        options={"mip_rel_gap": 1e-9},
    )
    if solution.x is None:
        raise RuntimeError(f"HiGHS ended with: {solution.message}")
    return {v.name: float(x) for v, x in zip(variables, solution.x, strict=True)}


def build_paper_model(
    problem: AveragingProblem, binary: bool = False, names: Sequence[str] | None = None
) -> PaperModel:
    """Eq. 5 as printed: n^3 rows of eq. 4. With ``binary`` c is 0 or 1, which is eq. 2.

    "Some peers are unable to compute gradients or perform aggregation" (Appendix B): such peers
    have c_i = 0 and g_ij = a_ki = 0. The diagonal of a and g uses no network. Equal to eq. 1-5 for
    delayed parameter updates; other problems raise `ProblemError`.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 2-5.
    """
    import pulp

    instance_of(AveragingProblem, problem)
    if not problem.overlap:
        raise ProblemError("eq. 2-5 are for delayed parameter updates, found overlap=False")
    n = len(problem)
    if n > MAX_PEERS:
        raise ProblemError(
            f"eq. 5 as it is printed has a row for any three of {n} peers; give at most "
            f"{MAX_PEERS}, or solve without writing it"
        )
    peers = range(n)
    name = [str(i) for i in peers] if names is None else list(names)
    s, u, d = problem.samples_per_s, problem.upload_bytes_per_s, problem.download_bytes_per_s
    unit = max(float(d.max()), float(u.max()), 1e-300)
    eligible = problem.contributors
    big_ms = [float(m / unit) for m in big_m(problem)]
    # unit of xi: the smaller of the steps per second computed by all and averaged by the fastest
    xi_unit = min(float(s[eligible].sum()) / problem.batch_size, unit / problem.gradient_bytes)
    gradient = problem.gradient_bytes * xi_unit / unit
    model = pulp.LpProblem("DeDLOC", pulp.LpMaximize)
    # PuLP 4 makes variables with the model, earlier versions on their own
    variable = getattr(model, "add_variable", pulp.LpVariable)
    xi = variable("xi", lowBound=0)
    a = [[variable(f"a_{i}_{j}", lowBound=0) for j in name] for i in name]
    g = [[variable(f"g_{i}_{j}", lowBound=0) for j in name] for i in name]
    kind = pulp.LpBinary if binary else pulp.LpContinuous
    c = [variable(f"c_{name[i]}", 0, 1 if eligible[i] else 0, kind) for i in peers]
    for i in peers:
        if not problem.can_aggregate[i]:
            for j in peers:
                a[j][i].upBound = g[i][j].upBound = 0
    total = xi_unit * problem.batch_size
    model += xi
    model += xi <= pulp.lpSum(float(s[i]) / total * c[i] for i in peers if eligible[i]), "compute"
    for i in peers:
        model += gradient * xi <= pulp.lpSum(g[j][i] for j in peers), f"average_{name[i]}"
        for j in peers:
            for k in peers:
                row = f"sender_{name[i]}_{name[j]}_{name[k]}"
                model += g[i][j] <= a[k][i] + (1 - c[k]) * big_ms[i], row
        model += (
            pulp.lpSum(a[j][i] + g[j][i] for j in peers if j != i) <= float(d[i] / unit),
            f"download_{name[i]}",
        )
        model += (
            pulp.lpSum(a[i][j] + g[i][j] for j in peers if j != i) <= float(u[i] / unit),
            f"upload_{name[i]}",
        )
        for j in peers:
            if problem.link_bytes_per_s is not None and np.isfinite(problem.link_bytes_per_s[i, j]):
                limit = float(problem.link_bytes_per_s[i, j] / unit)
                model += a[i][j] + g[i][j] <= limit, f"link_{name[i]}_{name[j]}"
    return PaperModel(model, xi, a, g, c, unit, xi_unit)
