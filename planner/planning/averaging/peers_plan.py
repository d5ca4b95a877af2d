"""A plan from an averaging problem: each computing peer holds the whole model (DeDLOC, 3.2).

Microbatches of one sample go to the peers in proportion to their speed; shares are the solution's.
A peer that only reduces is an aggregator; one that does neither is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.problems import AveragingProblem, ProblemError
from planner.problems.answers import AssignmentPlan, AveragingPlan
from planner.problems.peers_file import Peers
from planner.simulator.simulator import predict
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Head
from planner.training_plan.model import Predicted, TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.training_plan.shares import integer_parts, shares_of
from planner.workload.compute_times import ComputeTimes
from planner.workload.costs import stage_costs
from planner.workload.workload import Workload


@dataclass(frozen=True)
class _PeerRoles:
    """Peers that take part, by index in the file.

    Attributes
    ----------
    samples
        Per peer, samples of a step.
    shares
        Per peer, its share of the vector.
    trainers, aggregators
        Peers with samples, and aggregators.
    """

    samples: list[int]
    shares: list[float]
    trainers: list[int]
    aggregators: list[int]

    @classmethod
    def of(cls, solved: AveragingPlan, batch: int) -> _PeerRoles:
        samples = integer_parts(solved.samples_per_step, batch).tolist()
        trainers = [i for i, count in enumerate(samples) if count]
        shares = solved.shares if len(trainers) > 1 else np.eye(len(samples))[trainers[0]]
        return cls(
            samples,
            shares.tolist(),
            trainers,
            [i for i in np.flatnonzero(shares > 0).tolist() if not samples[i]],
        )


def peers_plan(
    peers: Peers,
    problem: AveragingProblem,
    solved: AveragingPlan,
    workload: Workload,
    links: Network | None = None,
    seed: int = 0,
) -> TrainingPlan:
    """Data-parallel training with the averaging of a solution."""
    if workload.microbatch_samples != 1:
        raise ProblemError(
            f"microbatch_samples must be 1 in a plan from peers, found "
            f"{workload.microbatch_samples}; leave it out"
        )
    roles = _PeerRoles.of(solved, workload.batch_samples)
    members = sorted({*roles.trainers, *roles.aggregators})
    number = {i: d for d, i in enumerate(members)}
    cluster = _cluster(peers, problem, workload, links, roles, members)
    trainers = tuple(number[i] for i in roles.trainers)
    layers = ((0, len(workload.layers)),)
    plan = TrainingPlan(
        cluster=cluster,
        network_name="",
        workload=workload,
        seed=seed,
        compute_times=ComputeTimes.from_flops(cluster, workload, (trainers,), layers),
        assignment=AssignmentPlan((trainers,), None),
        stage_layers=layers,
        schedules=(_schedule(roles, number),),
        averaging=(((_group(roles, number),),),),
        predicted=Predicted(0.0, 0.0, 0.0),
        certificates={},
        left_out=tuple(name for i, name in enumerate(peers.names) if i not in number),
    )
    return plan.replace(predicted=predict(plan))


def _cluster(
    peers: Peers,
    problem: AveragingProblem,
    workload: Workload,
    links: Network | None,
    roles: _PeerRoles,
    members: list[int],
) -> Cluster:
    """The peers that take part as devices; an aggregator may have no FLOP/s."""
    up, down = problem.upload_bytes_per_s[members], problem.download_bytes_per_s[members]
    names = [peers.names[i] for i in members]
    if links is None:
        no_latency = np.zeros((len(members), len(members)))
        network = Network(no_latency, np.minimum(up[:, None], down[None, :]), names)
    else:
        network = links.subset(names)
    costs = stage_costs(workload, 0, len(workload.layers), with_head=True)
    flops_per_sample = costs.forward_flops + costs.backward_flops + costs.head_flops
    trainers = [i in roles.trainers for i in members]
    return Cluster(
        network,
        Devices(
            [
                peers.samples_per_s[i] * flops_per_sample if i in roles.trainers else 1.0
                for i in members
            ],
            costs.need_bytes(1),
            up,
            down,
            can_compute=trainers,
            can_aggregate=problem.can_aggregate[members],
        ),
    )


def _schedule(roles: _PeerRoles, number: dict[int, int]) -> Schedule:
    """One microbatch after the other, on its peer."""
    paths: list[tuple[int, ...]] = []
    order: list[tuple[tuple[str, int], ...]] = [()] * len(number)
    for i in roles.trainers:
        numbers = range(len(paths), len(paths) + roles.samples[i])
        paths += [(number[i],)] * len(numbers)
        order[number[i]] = tuple((kind, b) for b in numbers for kind in "FHB")
    return Schedule("peers", Head.LAST, tuple(paths), tuple(order))


def _group(roles: _PeerRoles, number: dict[int, int]) -> AveragingGroup:
    members = [*roles.trainers, *roles.aggregators]
    shares = shares_of([roles.shares[i] for i in members])
    flags = (*(True for _ in roles.trainers), *(False for _ in roles.aggregators))
    return AveragingGroup(tuple(number[i] for i in members), shares, flags, flags)
