"""Discrete-event simulation of a plan on a cluster.

Each device works through its operations in the plan's order, one at a time; transfers overlap with
computation. By default a transfer takes ``latency + bytes / bandwidth`` whatever else is on the
way; with ``share_links`` the messages of a device share its up- and downlink fairly, and with
``cores`` operations share so many processors (several ranks on one machine).
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from planner.clock.fluid import Fluid, Forecast
from planner.clock.timeline import Op, Timeline, Transfer, sorted_ops
from planner.network.cluster import Cluster
from planner.network.error import NetworkError
from planner.training_plan.model import Predicted, Schedule, TrainingPlan
from planner.workload.workload import Workload

Floats = NDArray[np.float64]


class SimulationError(ValueError):
    """The plan's order of operations cannot be carried out."""


def simulate(
    plan: TrainingPlan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    schedule: int = 0,
    share_links: bool = False,
    cores: int | None = None,
) -> Timeline:
    """Predict one iteration.

    Parameters
    ----------
    plan
        What to run; its compute times are used.
    cluster, workload
        Where and what to run, by default the plan's own. Device d of the plan is device d of the
        cluster. Both directions of a link are kept apart.
    schedule
        Which of the plan's schedules.
    share_links
        Messages share a device's up- and downlink (max-min fair). A link's capacity is the
        device's stated limit, else the fastest of its measured pairs.
    cores
        Operations that run at full speed at the same time; more slow each other down evenly.

    Raises
    ------
    SimulationError
        The order of operations deadlocks.
    NetworkError
        The cluster has another number of devices, or lacks a pair.
    """
    cluster, workload = cluster or plan.cluster, workload or plan.workload
    if len(cluster) != len(plan.cluster):
        raise NetworkError(
            f"the plan has {len(plan.cluster)} devices, the network {len(cluster)}; give one with "
            "the plan's devices"
        )
    cluster.network.require_complete()
    run = _Run(plan, cluster, workload, plan.schedules[schedule], share_links, cores)
    run.loop()
    pipeline = max((op.end_s for op in run.ops), default=0.0)
    closing = _averaging_ops(plan, cluster, workload, pipeline)
    return Timeline(
        cluster.network.ids,
        sorted_ops(run.ops),
        tuple(run.transfers),
        closing,
        plan.sync.every_steps,
    )


def simulate_cycle(
    plan: TrainingPlan,
    cluster: Cluster | None = None,
    workload: Workload | None = None,
    *,
    share_links: bool = False,
    cores: int | None = None,
) -> tuple[Predicted, tuple[Timeline, ...]]:
    """Predict the mean step over the plan's cycle.

    Parameters
    ----------
    plan, cluster, workload, share_links, cores
        As in `simulate`.

    Returns
    -------
    Predicted
        ``pipeline_s`` is the mean of the makespans over ``plan.cycle``; averaging and optimizer
        step are the same in every iteration.
    tuple of Timeline
        One per schedule.
    """
    timelines = tuple(
        simulate(plan, cluster, workload, schedule=k, share_links=share_links, cores=cores)
        for k in range(len(plan.schedules))
    )
    pipeline = sum(timelines[k].makespan_s for k in plan.cycle) / len(plan.cycle)
    one = timelines[plan.cycle[0]]
    step = pipeline + one.averaging_s / plan.sync.every_steps + one.update_s
    return Predicted(pipeline, one.averaging_s, step), timelines


def pair_bandwidth(cluster: Cluster) -> Floats:
    """N x N bytes per second one message gets, within the limits of devices and sites.

    Parameters
    ----------
    cluster
        Where.

    Returns
    -------
    ndarray
        ``float[N, N]``, infinite on the diagonal.
    """
    return cluster.limited_network().bandwidth_bytes_per_s


def averaging_s(plan: TrainingPlan, cluster: Cluster, workload: Workload) -> dict[int, float]:
    """Seconds of averaging per stage: eq. 2 of DT-FM with both directions kept apart.

    In the first half every contributor sends each member its share, in the second every member
    sends its sum to all others; a device's messages go one after the other.

    Parameters
    ----------
    plan
        What is simulated.
    cluster
        Where.
    workload
        What is trained.

    Returns
    -------
    dict[int, float]
        Seconds by stage.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 2.
    """
    bandwidth, latency = pair_bandwidth(cluster), cluster.network.latency_s
    gradient = workload.gradient_bytes(plan.stage_layers, plan.head_stage)
    seconds: dict[int, float] = {}
    for stage, rounds in enumerate(plan.averaging):
        sent = gradient[stage] * plan.codec.wire_ratio
        seconds[stage] = sum(
            max(
                _group_s(g.members, g.shares, g.contributes, sent, latency, bandwidth)
                for g in groups
            )
            for groups in rounds
        )
    return seconds


def _group_s(
    members: tuple[int, ...],
    shares: tuple[float, ...],
    contributes: tuple[bool, ...],
    gradient_bytes: float,
    latency: Floats,
    bandwidth: Floats,
) -> float:
    pick = np.ix_(members, members)
    share = np.array(shares)
    gives = np.array(contributes)
    off = ~np.eye(len(members), dtype=bool)
    # [i, k]: member i sends member k the share that k sums
    to_reducer = latency[pick] + share[None, :] * gradient_bytes / bandwidth[pick]
    to_reducer = np.where(off & gives[:, None] & (share > 0)[None, :], to_reducer, 0.0)
    # [k, j]: reducer k returns its share to member j
    from_reducer = latency[pick] + share[:, None] * gradient_bytes / bandwidth[pick]
    from_reducer = np.where(off & (share > 0)[:, None], from_reducer, 0.0)
    return sum(
        float(max(phase.sum(axis=0).max(), phase.sum(axis=1).max()))
        for phase in (to_reducer, from_reducer)
    )


def _averaging_ops(
    plan: TrainingPlan, cluster: Cluster, workload: Workload, start_s: float
) -> tuple[Op, ...]:
    ops = []
    seconds = averaging_s(plan, cluster, workload)
    longest = max(seconds.values(), default=0.0)
    for stage, group in enumerate(plan.assignment.groups):
        for d in group:
            if seconds[stage] > 0:
                ops.append(Op(-1, d, "A", start_s, start_s + seconds[stage]))
            update = plan.compute_times.update_s[d]
            if update > 0:
                ops.append(Op(-1, d, "U", start_s + longest, start_s + longest + update))
    return sorted_ops(ops)


class _Event(enum.Enum):
    """What happens to the operation at one place of a microbatch's chain."""

    COMPUTED = 0  # it is done
    SENT = 1  # the message it waits for has left its sender
    ARRIVED = 2  # the message it waits for is there


class _Run:
    """State of one simulation."""

    def __init__(
        self,
        plan: TrainingPlan,
        cluster: Cluster,
        workload: Workload,
        schedule: Schedule,
        share_links: bool,
        cores: int | None,
    ) -> None:
        self.schedule = schedule
        self.ids = cluster.network.ids
        self.latency = cluster.network.latency_s
        self.bandwidth = pair_bandwidth(cluster)
        times = plan.compute_times
        self.seconds = {"F": times.forward_s, "B": times.backward_s, "H": times.head_s}
        stages = [workload.stage(*part) for part in plan.stage_layers]
        self.sent_bytes = {
            d: stages[j].output_bytes * workload.microbatch_samples
            for d, j in plan.stage_of.items()
        }
        self.chains = [schedule.chain(b) for b in range(len(schedule.paths))]
        # place of (kind, device) in each chain
        self.place = [{op: k for k, op in enumerate(chain)} for chain in self.chains]
        self.arrived = [{0} for _ in self.chains]
        self.pointer = [0] * len(cluster)
        self.busy = [False] * len(cluster)
        self.started: dict[tuple[int, int], float] = {}
        self.ops: list[Op] = []
        self.transfers: list[Transfer] = []
        self.events: list[tuple[float, int, _Event, int, int, Forecast | None]] = []
        self.serial = 0
        self.compute = None if cores is None else Fluid({"cores": float(cores)})
        self.links = Fluid(_link_capacities(cluster)) if share_links else None

    def _push(
        self, time: float, event: _Event, b: int, k: int, forecast: Forecast | None = None
    ) -> None:
        heapq.heappush(self.events, (time, self.serial, event, b, k, forecast))
        self.serial += 1

    def _push_all(self, forecasts: list[Forecast], event: _Event) -> None:
        for forecast in forecasts:
            self._push(forecast.time, event, *forecast.key, forecast)

    def loop(self) -> None:
        """Run until nothing more can happen."""
        for d in range(len(self.pointer)):
            self._start_next(d, 0.0)
        while self.events:
            now, _, event, b, k, forecast = heapq.heappop(self.events)
            if forecast is not None:
                pool = self.compute if event is _Event.COMPUTED else self.links
                assert pool is not None
                if not pool.is_due(forecast):
                    continue
                self._push_all(pool.remove(forecast.key, now), event)
            if event is _Event.COMPUTED:
                self._computed(now, b, k)
            elif event is _Event.SENT:
                self._sent(now, b, k)
            else:
                self._arrived(now, b, k)
        self._require_done()

    def _start_next(self, d: int, now: float) -> None:
        order = self.schedule.order[d]
        if self.busy[d] or self.pointer[d] == len(order):
            return
        kind, b = order[self.pointer[d]]
        k = self.place[b][kind, d]
        if k not in self.arrived[b]:
            return
        self.busy[d] = True
        self.started[b, k] = now
        seconds = self.seconds[kind][d]
        if self.compute is None:
            self._push(now + seconds, _Event.COMPUTED, b, k)
        else:
            started = self.compute.add((b, k), seconds, 1.0, ("cores",), now)
            self._push_all(started, _Event.COMPUTED)

    def _computed(self, now: float, b: int, k: int) -> None:
        kind, d = self.chains[b][k]
        self.ops.append(Op(b, d, kind, self.started.pop((b, k)), now))
        self.busy[d] = False
        self.pointer[d] += 1
        if k + 1 < len(self.chains[b]):
            receiver = self.chains[b][k + 1][1]
            if receiver == d:
                self._arrived(now, b, k + 1)
            else:
                self._send(now, b, k + 1, d, receiver)
        self._start_next(d, now)

    def _send(self, now: float, b: int, k: int, source: int, destination: int) -> None:
        self.started[b, k] = now
        size = self._message_bytes(b, k)
        rate = float(self.bandwidth[source, destination])
        if self.links is None:
            flight = float(self.latency[source, destination]) + size / rate
            self._push(now + flight, _Event.ARRIVED, b, k)
        else:
            ends = (("up", source), ("down", destination))
            self._push_all(self.links.add((b, k), size, rate, ends, now), _Event.SENT)

    def _message_bytes(self, b: int, k: int) -> float:
        """Activations of the sender, or their gradient on the way back to it."""
        kind = self.chains[b][k][0]
        owner = self.chains[b][k][1] if kind == "B" else self.chains[b][k - 1][1]
        return self.sent_bytes[owner]

    def _sent(self, now: float, b: int, k: int) -> None:
        source, destination = self.chains[b][k - 1][1], self.chains[b][k][1]
        self._push(now + float(self.latency[source, destination]), _Event.ARRIVED, b, k)

    def _arrived(self, now: float, b: int, k: int) -> None:
        kind, d = self.chains[b][k]
        if (b, k) in self.started:
            source = self.chains[b][k - 1][1]
            start = self.started.pop((b, k))
            self.transfers.append(
                Transfer(b, kind, source, d, self._message_bytes(b, k), start, now)
            )
        self.arrived[b].add(k)
        self._start_next(d, now)

    def _require_done(self) -> None:
        for d, order in enumerate(self.schedule.order):
            if self.pointer[d] < len(order):
                kind, b = order[self.pointer[d]]
                raise SimulationError(
                    f"deadlock: device {d} ({self.ids[d]}) waits for {kind}{b}, which can never "
                    "start; reorder its operations so that no two devices wait for each other"
                )


def _link_capacities(cluster: Cluster) -> dict[Hashable, float]:
    """Up- and downlink of each device: its limit, else its fastest measured pair."""
    pairs = np.where(np.eye(len(cluster), dtype=bool), 0.0, cluster.network.bandwidth_bytes_per_s)
    up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
    ups = pairs.max(axis=1, initial=0.0) if up is None else up
    downs = pairs.max(axis=0, initial=0.0) if down is None else down
    capacity: dict[Hashable, float] = {("up", d): float(x) for d, x in enumerate(ups)}
    return capacity | {("down", d): float(x) for d, x in enumerate(downs)}
