"""Whole plans, evaluated on one simulator: instances and methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.bench.job_generator import places_of, random_job
from planner.bench.method import BenchMethod, MethodKind
from planner.bench.network_generator import random_cluster
from planner.bench.plan_instances import INSTANCES as BENCH
from planner.bench.plan_instances import figures_of
from planner.bench.problem import BenchInstance, PlanProblem, ProblemFamily
from planner.network.catalogue import load_network
from planner.network.cluster import Cluster
from planner.planning.baselines.dtfm import dtfm_rule
from planner.planning.baselines.metis import metis_rule
from planner.planning.baselines.rank_order import one_region, ranks_by_neighbour, ranks_by_region
from planner.planning.baselines.sailor import sailor_rule
from planner.planning.baselines.search import MAX_EVENTS, BaselinePlan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.solve import plan
from planner.problems import ProblemError
from planner.search.stop import Effort
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

VERSION = 2
"""Version of the instances; since 2, memory is modelled as in the executor."""
RANDOM_JOBS = 10
"""Instances of `random_job`."""
EVENTS_PER_EFFORT = MAX_EVENTS / 10
"""Simulated operations and messages of rules, per unit of effort."""


def _instance(
    name: str,
    about: str,
    cluster: Callable[[], Cluster],
    workload: str,
    quick: bool = False,
    **changes: Any,
) -> BenchInstance:
    return BenchInstance(
        f"{ProblemFamily.PLANS}/{name}-{VERSION}",
        about,
        lambda: PlanProblem(cluster(), Workload.preset(workload, **changes)),
        quick,
    )


def _shipped(name: str) -> BenchInstance:
    """Build an instance of ``python -m benchmarks.plans``."""
    shipped = BENCH[name]
    return BenchInstance(
        f"{ProblemFamily.PLANS}/{name}-{VERSION}",
        shipped.about,
        lambda: PlanProblem(shipped.cluster(), shipped.model()),
    )


def _random(number: int) -> BenchInstance:
    """Build an instance of `random_job`."""

    def problem() -> PlanProblem:
        job = random_job(number)
        return PlanProblem(job.cluster, job.workload)

    return BenchInstance(
        f"{ProblemFamily.PLANS}/job{number}-{VERSION}",
        f"random_job({number}): {places_of(number).name}",
        problem,
    )


INSTANCES = (
    _instance(
        "aws4-gpt2",
        "aws4_dtfm_regional_2022, a T4 each, gpt2-small, batch 32",
        lambda: Cluster(load_network("aws4_dtfm_regional_2022"), figures_of("T4")),
        "gpt2-small",
        quick=True,
        batch_samples=32,
    ),
    _instance(
        "world3-12-mixed",
        "random_network(3, 12, seed 10), regions of A100, T4, V100 in turn, gpt2-large, batch 64",
        lambda: random_cluster(3, 12, 10, ("A100", "T4", "V100")),
        "gpt2-large",
        quick=True,
        batch_samples=64,
    ),
    _instance(
        "world6-24",
        "random_network(6, 24, seed 11), V100, llama-500m, batch 256",
        lambda: random_cluster(6, 24, 11, ("V100",)),
        "llama-500m",
        batch_samples=256,
    ),
    _instance(
        "world8-32-mixed",
        "random_network(8, 32, seed 12), regions of A100, A40, T4 in turn, gpt3-1.3b, batch 256",
        lambda: random_cluster(8, 32, 12, ("A100", "A40", "T4")),
        "gpt3-1.3b",
        batch_samples=256,
    ),
    *map(_shipped, ("us", "gcp-t4", "mixed", "fluidstack", "gcp-v100", "aws", "machines-wan")),
    *map(_random, range(RANDOM_JOBS)),
)


def ours(problem: PlanProblem, seed: int, effort: float) -> Any:
    """Run `planner.plan` without constraints."""
    return plan(problem.cluster, problem.workload, stop=Effort(effort), seed=seed)


Rule = Callable[[PlanningProblem, float], TrainingPlan]


def _rule(rule: Rule) -> Any:
    def run(problem: PlanProblem, seed: int, effort: float) -> TrainingPlan:
        question = PlanningProblem.of(problem.cluster, problem.workload, PlanRequest(), seed, {})
        outcome = rule(question, effort)
        used = set(outcome.cluster.network.ids)
        unused = tuple(name for name in problem.cluster.network.ids if name not in used)
        return outcome.replace(left_out=unused)

    return run


def _events(effort: float) -> int:
    return int(min(MAX_EVENTS, EVENTS_PER_EFFORT * effort))


def _require_plan(baseline: BaselinePlan | None) -> TrainingPlan:
    if baseline is None:
        raise ProblemError("nothing fits")
    return baseline.plan()


def _dtfm(question: PlanningProblem, effort: float) -> TrainingPlan:
    return dtfm_rule(question, Effort(effort)).plan.plan()


def _dtfm_tried(question: PlanningProblem, effort: float) -> TrainingPlan:
    return dtfm_rule(question, Effort(effort)).tried.plan()


def _method(
    name: str, rule: Rule, kind: MethodKind, about: str, seeded: bool = False
) -> BenchMethod:
    return BenchMethod.for_family(
        ProblemFamily.PLANS, name, _rule(rule), kind, about, seeded=seeded
    )


METHODS = (
    BenchMethod.for_family(
        ProblemFamily.PLANS,
        "ours",
        ours,
        MethodKind.OURS,
        "planner.plan, all left open",
        seeded=True,
    ),
    _method("DT-FM's rule", _dtfm, MethodKind.PAPER, "eq. 1 decides all", seeded=True),
    _method(
        "DT-FM, stages tried",
        _dtfm_tried,
        MethodKind.PAPER,
        "eq. 1 places, the clock chooses",
        seeded=True,
    ),
    _method(
        "SAILOR's rule",
        lambda question, _: sailor_rule(question).plan.plan(),
        MethodKind.PAPER,
        "rebuilt from paper and code",
    ),
    _method(
        "Metis' rule",
        lambda question, _: metis_rule(question).plan,
        MethodKind.PAPER,
        "rebuilt from paper and code, without tensor parallelism",
    ),
    _method(
        "ranks, a stage near",
        lambda q, e: _require_plan(ranks_by_region(q, _events(e)).pipeline),
        MethodKind.RULE,
        "consecutive ranks by region, pipelines outermost",
    ),
    _method(
        "ranks, a pipeline near",
        lambda q, e: _require_plan(ranks_by_region(q, _events(e)).data),
        MethodKind.RULE,
        "consecutive ranks by region, data outermost",
    ),
    _method(
        "ranks, nearest next",
        lambda q, e: _require_plan(ranks_by_neighbour(q, most_events=_events(e))[0]),
        MethodKind.RULE,
        "the best of ten orders",
    ),
    _method(
        "one region",
        lambda q, e: _require_plan(one_region(q, _events(e)).plan),
        MethodKind.RULE,
        "the fastest region alone, or a part of it",
    ),
)
