"""Benchmark of the assignment solvers.

``python -m benchmarks.assignment`` runs the requested tables, prints them, and writes them with
versions and seeds into a dated file. A warm-up run excludes the compilation of kernels from the
times.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.command_line import RESULTS, run
from planner.bench.assignment_instances import dtfm_case, jittered, skyplane
from planner.genetic import solve_assignment
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan
from planner.search.result import Result
from planner.search.stop import MaxIterations, MaxRuntime
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_picture, write_text
from planner.utils.processors import cores

OPTIMA = {1: 3.4397991, 2: 31.6341598, 3: 16.0868397, 4: 34.8020410, 5: 49.2183801}
"""Proven optima of the five cases, for comparison only."""

METHODS = {"genetic": "ours", "kl": "Kernighan-Lin", "random": "random"}


@dataclass(frozen=True)
class Table:
    """One table of the report.

    Attributes
    ----------
    note
        Text above the table.
    header
        Column names.
    rows
        Cells.
    """

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Format as Markdown."""
        lines = [f"## {self.title}", "", self.note, ""]
        lines += ["| " + " | ".join(self.header) + " |", "|" + " --- |" * len(self.header)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _cost(result: Result[AssignmentPlan]) -> float:
    if result.objective is None:
        raise RuntimeError("an assignment always has a plan")
    return result.objective


def five_cases(seeds: Sequence[int], limit_s: float = 15.0) -> Table:
    """Solve every case and seed with the default method."""
    rows = []
    for case, optimum in OPTIMA.items():
        problem = dtfm_case(case)
        for seed in seeds:
            result = solve_assignment(problem, MaxRuntime(limit_s), seed)
            off = abs(_cost(result) - optimum) / optimum
            rows.append(
                (
                    str(case),
                    str(seed),
                    f"{_cost(result):.7f}",
                    str(result.status),
                    f"{off:.1e}",
                    f"{result.runtime_s:.1f}",
                )
            )
    return Table(
        f"Five cases of DT-FM, auto, at most {limit_s:g} s",
        "Optimum: proven by the class model.",
        ("case", "seed", "cost (s)", "status", "distance to optimum", "time (s)"),
        tuple(rows),
    )


def genetic_alone(seeds: Sequence[int], limit_s: float = 10.0) -> Table:
    """Solve with the paper's algorithm, and with our search without the class model."""
    rows = []
    for case, optimum in OPTIMA.items():
        problem = dtfm_case(case)
        for method in ("genetic", "search"):
            costs = [
                _cost(solve_assignment(problem, MaxRuntime(limit_s), seed, method))
                for seed in seeds
            ]
            rows.append(
                (
                    str(case),
                    method,
                    ", ".join(f"{c:.4f}" for c in costs),
                    _percent(max(costs) / optimum - 1),
                )
            )
    return Table(
        f"Without the class model, {limit_s:g} s",
        f"Seeds {', '.join(map(str, seeds))}.",
        ("case", "method", "cost of each seed (s)", "worst above optimum"),
        tuple(rows),
    )


def skyplane_table(seeds: Sequence[int], limit_s: float, gap_s: float, best_s: float) -> Table:
    """Solve 56 regions: variation over seeds, certified gap, and the paper's method."""
    problem = skyplane()
    long = solve_assignment(problem, MaxRuntime(best_s), 100, "search")
    short = [(seed, solve_assignment(problem, MaxRuntime(limit_s), seed)) for seed in seeds]
    proof = solve_assignment(problem, MaxRuntime(gap_s), seeds[0])
    other = solve_assignment(problem, MaxRuntime(limit_s), seeds[0], "genetic")
    greedy = solve_assignment(problem, MaxRuntime(gap_s), seeds[0], "region-greedy")
    named = [(f"auto, {limit_s:g} s, seed {seed}", result) for seed, result in short]
    named += [
        (f"auto, {gap_s:g} s, seed {seeds[0]}", proof),
        (f"search, {best_s:g} s, seed 100", long),
        (f"genetic, {limit_s:g} s, seed {seeds[0]}", other),
        ("region-greedy", greedy),
    ]
    best = min(_cost(result) for _, result in named)
    return Table(
        "Skyplane, 56 regions, 7 pipelines x 8 stages",
        "Best: the smallest cost in this table.",
        ("run", "cost (s)", "above best", "bound (s)", "certified gap", "time (s)"),
        tuple(
            (
                name,
                f"{_cost(result):.4f}",
                _percent(_cost(result) / best - 1),
                f"{result.bound:.4f}",
                _percent(result.gap),
                f"{result.runtime_s:.1f}",
            )
            for name, result in named
        ),
    )


def scale_table(sizes: Sequence[tuple[int, float]], factor: float) -> Table:
    """Solve large networks with the default limit, and with ``factor`` times that limit."""
    rows = []
    for devices, limit_s in sizes:
        problem = jittered(devices)
        result = solve_assignment(problem, MaxRuntime(limit_s))
        long = solve_assignment(problem, MaxRuntime(factor * limit_s)) if factor > 0 else None
        reference = _cost(long) if long else None
        other_costs = [
            _cost(solve_assignment(problem, MaxRuntime(min(limit_s, 30.0)), 0, method))
            for method in ("genetic", "region-greedy")
        ]
        rows.append(
            (
                f"{devices} ({devices // 8} x 8)",
                f"{limit_s:g}",
                f"{_cost(result):.4f}",
                "-" if reference is None else f"{reference:.4f}",
                "-" if reference is None else _percent(_cost(result) / reference - 1),
                _percent(result.gap),
                *(f"{cost:.4f}" for cost in other_costs),
                f"{_peak_gb():.2f}",
            )
        )
    return Table(
        "Scale: jittered copies of the Skyplane regions",
        f"Seed 0. Long run: {factor:g} times the time. The genetic method gets at most 30 s. "
        "Memory: peak of the process so far.",
        (
            "devices",
            "time (s)",
            "auto (s)",
            "long run (s)",
            "above long run",
            "certified gap",
            "genetic (s)",
            "region-greedy (s)",
            "peak memory (GB)",
        ),
        tuple(rows),
    )


def _peak_gb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def convergence_picture(path: Path, seeds: Sequence[int], iterations: int) -> None:
    """Draw DT-FM's Figure 4: best cost over iterations for ours, Kernighan-Lin and random."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(OPTIMA), figsize=(19, 3.6), constrained_layout=True)
    colours = ("tab:blue", "tab:orange", "tab:green")
    for axis, case in zip(axes, OPTIMA, strict=True):
        problem = dtfm_case(case)
        for (method, label), colour in zip(METHODS.items(), colours, strict=True):
            for seed in seeds:
                steps = trajectory(problem, method, seed, iterations)
                axis.step(
                    *zip(*steps, strict=True),
                    where="post",
                    color=colour,
                    alpha=0.8,
                    label=label if seed == seeds[0] else None,
                )
        axis.axhline(OPTIMA[case], color="black", linestyle=":", label="optimum")
        axis.set(title=f"case {case}", xlabel="iteration (offspring)", xscale="log")
    axes[0].set_ylabel("best cost (s)")
    axes[0].legend()
    figure.suptitle(f"Best cost against iterations, seeds {', '.join(map(str, seeds))}")
    write_picture(path, figure, dpi=110)
    plt.close(figure)


def trajectory(
    problem: AssignmentProblem, method: str, seed: int, iterations: int
) -> list[tuple[int, float]]:
    """Return ``(iteration, best cost)`` of a population-based method, from iteration 1 on."""
    from planner.genetic.data import assignment_data
    from planner.genetic.evolution import Evolution
    from planner.genetic.solve import EVOLUTIONS
    from planner.problems.assignment_method import AssignmentMethod
    from planner.search.arrays import Ints
    from planner.search.incumbent import Incumbent

    run = MaxIterations(iterations).start()
    incumbent: Incumbent[Ints] = Incumbent(run, problem, method=method, seed=seed)
    evolution = Evolution(assignment_data(problem), incumbent, EVOLUTIONS[AssignmentMethod(method)])
    evolution.run()
    first = evolution.trace[0][1]
    return [(1, first), *evolution.trace, (iterations, incumbent.objective)]


def scale_picture(path: Path, sizes: Sequence[int], limit_s: float) -> None:
    """Draw quality at a fixed time, and time to within 2% of it, over the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = ("auto", "genetic", "region-greedy")
    costs: dict[str, list[float]] = {method: [] for method in methods}
    reached: list[float] = []
    for devices in sizes:
        problem = jittered(devices)
        for method in methods:
            result = solve_assignment(problem, MaxRuntime(limit_s), 0, method)
            costs[method].append(_cost(result))
            if method == "auto":
                reached.append(
                    next(t for t, cost in result.history if cost <= 1.02 * _cost(result))
                )
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for method in methods:
        left.plot(sizes, costs[method], marker="o", label=method)
    left.set(title=f"cost after {limit_s:g} s", xlabel="devices N", ylabel="cost (s)", xscale="log")
    left.set_ylim(bottom=0)
    left.legend()
    right.plot(sizes, reached, marker="o")
    right.set(
        title=f"auto: time to within 2% of its result at {limit_s:g} s",
        xlabel="devices N",
        ylabel="time (s)",
        xscale="log",
        yscale="log",
    )
    for axis in (left, right):
        axis.set_xticks(list(sizes), [str(n) for n in sizes])
        axis.minorticks_off()
    write_picture(path, figure, dpi=110)
    plt.close(figure)


def _heading(seeds: Sequence[int]) -> str:
    packages = ("numpy", "scipy", "numba", "ortools", "deap")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"# Assignment benchmark, {datetime.date.today()}\n\n"
        "Command: `python -m benchmarks.assignment`\n\n"
        f"Seeds {', '.join(map(str, seeds))}; Python {platform.python_version()}, {versions}; "
        f"{cores()} cores available.\n"
    )


def _warm_up() -> None:
    """Compile all kernels before times are measured."""
    for method in ("auto", "search", "genetic", "kl", "region-greedy"):
        solve_assignment(jittered(32), MaxIterations(2), method=method)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested tables and charts; return the exit code."""
    parser = OneLineParser(
        prog="python -m benchmarks.assignment", description="Benchmark of the assignment solvers."
    )
    parts = ("five", "genetic", "skyplane", "scale", "figure4", "scale-picture")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(parts)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="default: assignment-DATE.md in folder")
    parser.add_argument("--best-s", type=float, default=300.0, help="long run on Skyplane")
    parser.add_argument("--factor", type=float, default=10.0, help="length of long scale runs")
    parser.add_argument("--iterations", type=int, default=3000, help="of Figure 4")
    parser.add_argument("--picture-s", type=float, default=10.0, help="per point of the picture")
    options = parser.parse_args(arguments)
    chosen = options.parts or list(parts)
    unknown = sorted(set(chosen) - set(parts))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; choose from {', '.join(parts)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    output = options.out or options.folder / f"assignment-{datetime.date.today()}.md"
    tables: dict[str, Callable[[], Table]] = {
        "five": lambda: five_cases(options.seeds),
        "genetic": lambda: genetic_alone(options.seeds[:1]),
        "skyplane": lambda: skyplane_table(options.seeds, 10.0, 60.0, options.best_s),
        "scale": lambda: scale_table([(256, 30.0), (1024, 120.0)], options.factor),
    }
    _warm_up()
    started = time.perf_counter()
    sections = [_heading(options.seeds)]
    print(sections[0], flush=True)
    for section in _sections(chosen, tables, options):
        sections.append(section)
        print(section, flush=True)
        write_text(output, "\n".join(sections))
    print(f"{output}: {time.perf_counter() - started:.0f} s")
    return 0


def _sections(
    chosen: Sequence[str], tables: dict[str, Callable[[], Table]], options: argparse.Namespace
) -> Iterator[str]:
    for part in chosen:
        if part in tables:
            yield tables[part]().markdown()
        elif part == "figure4":
            picture = options.folder / "assignment-figure4.png"
            convergence_picture(picture, (0, 1, 2), options.iterations)
            yield f"## Figure 4\n\n![best cost against iterations]({picture.name})\n"
        else:
            picture = options.folder / "assignment-scale.png"
            scale_picture(picture, (64, 128, 256, 512, 1024), options.picture_s)
            yield f"## Time and quality against N\n\n![time and quality]({picture.name})\n"


if __name__ == "__main__":
    run(main)
