"""Summary of a run: quality by family and method, and relative speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from planner.bench.bestknown import BestKnown
from planner.bench.problem import ProblemFamily
from planner.bench.result_rows import BenchRow

OURS = "ours"


@dataclass(frozen=True)
class Known:
    """Best known solution and bound of an instance, including this run.

    Attributes
    ----------
    objective, method
        Best objective and its method; ``on record`` if only the table has it.
    bound, bound_recomputed
        Best bound, and whether the checker recomputed it.
    recorded
        Objective in the table; None without an entry for this problem.
    """

    instance: str
    objective: float | None
    method: str
    bound: float | None
    bound_recomputed: bool
    recorded: float | None

    @property
    def family(self) -> ProblemFamily:
        """Family of the instance."""
        return ProblemFamily(self.instance.partition("/")[0])

    @property
    def gap(self) -> float | None:
        """Gap between objective and bound; None if the objective is beyond the bound."""
        if self.objective is None or self.bound is None or self.contradicted:
            return None
        # equal up to rounding
        return max(0.0, self.family.gap(self.objective, self.bound))

    @property
    def contradicted(self) -> bool:
        """Whether a solution is better than the bound allows, so that one of them is wrong."""
        if self.objective is None or self.bound is None:
            return False
        return self.family.better(self.objective, self.bound)

    @property
    def improved(self) -> bool:
        """Whether the run found a better solution than the table's."""
        if self.objective is None or self.recorded is None:
            return False
        return self.family.better(self.objective, self.recorded)


@dataclass(frozen=True)
class MethodStanding:
    """Results of a method in a family.

    Attributes
    ----------
    method, kind
        Name and origin of the method.
    asked, solved
        Instances that it ran on, and those with an accepted solution.
    wins
        Instances where no other method of the run was better with any seed.
    gaps, bound_gaps
        By instance, mean over seeds: gap to the best known solution, and to the best bound.
    seconds
        By instance, mean over seeds.
    over_ours
        Median ratio of its seconds to ours; None if ours did not run.
    """

    method: str
    kind: str
    asked: int
    solved: int
    wins: int
    gaps: Mapping[str, float]
    bound_gaps: Mapping[str, float]
    seconds: Mapping[str, float]
    over_ours: float | None

    def words(self) -> tuple[str, ...]:
        """Format the table cells: solved, wins, gaps."""
        return (
            f"{self.solved}/{self.asked}",
            str(self.wins),
            *(
                percent(mean(gaps.values())) if gaps else "-"
                for gaps in (self.gaps, self.bound_gaps)
                for mean in (fmean, median)
            ),
        )


@dataclass(frozen=True)
class Summary:
    """Summary of a run.

    Attributes
    ----------
    families
        Results of the methods by family, best first.
    """

    known: Mapping[str, Known]
    families: Mapping[ProblemFamily, Sequence[MethodStanding]]
    rows: Sequence[BenchRow] = field(default=())


def percent(fraction: float | None) -> str:
    """Format a gap in percent, or as a factor above 10,000%."""
    if fraction is None:
        return "-"
    if fraction > 100:
        return f"{fraction + 1:.3g} x"
    return f"{fraction:.2%}"


def summarise(rows: Sequence[BenchRow], table: Mapping[str, BestKnown]) -> Summary:
    """Summarize the rows of a run."""
    best_known = {
        name: _best_known(name, [row for row in rows if row.instance == name], table.get(name))
        for name in dict.fromkeys(row.instance for row in rows)
    }
    families = {}
    for family in ProblemFamily:
        mine = [row for row in rows if best_known[row.instance].family is family]
        if mine:
            families[family] = _standings(family, mine, best_known)
    return Summary(best_known, families, rows)


def _best_known(name: str, rows: Sequence[BenchRow], entry: BestKnown | None) -> Known:
    family = ProblemFamily(name.partition("/")[0])
    if entry is not None and entry.problem != rows[0].problem:
        entry = None
    best, method = (None, "") if entry is None else (entry.objective, "on record")
    bound, recomputed = (None, False) if entry is None else (entry.bound, entry.bound_recomputed)
    for row in rows:
        if row.objective is not None and (
            family.better(row.objective, best)
            or (
                method == "on record"
                and best is not None
                and not family.better(best, row.objective)
            )
        ):
            best, method = row.objective, row.method
        if row.bound is not None and (bound is None or family.better(bound, row.bound)):
            bound, recomputed = row.bound, row.bound_recomputed
    recorded = None if entry is None else entry.objective
    return Known(name, best, method, bound, recomputed, recorded)


def _standings(
    family: ProblemFamily, rows: Sequence[BenchRow], best_known: Mapping[str, Known]
) -> list[MethodStanding]:
    methods = {row.method: row.kind for row in rows}
    best: dict[str, dict[str, float]] = {}
    for row in rows:
        by_method = best.setdefault(row.instance, {})
        if row.objective is not None and family.better(row.objective, by_method.get(row.method)):
            by_method[row.method] = row.objective
    seconds = {
        method: {name: fmean(r.seconds for r in runs) for name, runs in _by_instance(rows, method)}
        for method in methods
    }
    standings = []
    for method, kind in methods.items():
        gaps, bound_gaps, wins, asked = {}, {}, 0, 0
        for name, runs in _by_instance(rows, method):
            asked += 1
            reached = [r.objective for r in runs if r.objective is not None]
            if not reached:
                continue
            reference, bound = best_known[name].objective, best_known[name].bound
            assert reference is not None
            gaps[name] = fmean(max(0.0, family.gap(x, reference)) for x in reached)
            if bound is not None and not best_known[name].contradicted:
                bound_gaps[name] = fmean(max(0.0, family.gap(x, bound)) for x in reached)
            # compare over all seeds, otherwise methods with more seeds would win more
            other_bests = [b for m, b in best[name].items() if m != method]
            wins += not any(family.better(b, x) for b in other_bests for x in reached)
        ours = seconds.get(OURS, {})
        ratios = [s / ours[name] for name, s in seconds[method].items() if ours.get(name)]
        standings.append(
            MethodStanding(
                method,
                kind,
                asked,
                len(gaps),
                wins,
                gaps,
                bound_gaps,
                seconds[method],
                median(ratios) if ratios else None,
            )
        )
    return sorted(
        standings,
        key=lambda s: (-s.solved / s.asked, fmean(s.gaps.values()) if s.gaps else math.inf),
    )


def _by_instance(rows: Sequence[BenchRow], method: str) -> list[tuple[str, list[BenchRow]]]:
    mine: dict[str, list[BenchRow]] = {}
    for row in rows:
        if row.method == method:
            mine.setdefault(row.instance, []).append(row)
    return list(mine.items())


def profile(standing: MethodStanding) -> list[tuple[float, float]]:
    """Return the performance profile: fraction of instances solved within each gap."""
    ordered = sorted(standing.gaps.values())
    return [(gap, (k + 1) / standing.asked) for k, gap in enumerate(ordered)]
