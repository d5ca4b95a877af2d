"""Stochastic wiring in simulated queues: Table 2's conditions, shares of work, plans.

Part of ``python -m benchmarks.swarm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

import planner as pl
from benchmarks.swarm.plan_scene import plan_scenario
from benchmarks.swarm.queueing import (
    Change,
    Chooser,
    FixedPath,
    Log,
    Scenario,
    routers,
    simulate_queues,
)
from benchmarks.swarm.square_cube import BYTES_PER_S, FIGURE_3_S, STAGES, TABLE_1, TOKENS
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.simulator.resources import LinkResources
from planner.swarm.routing import Entry

Floats = NDArray[np.float64]
WORKERS, PIPELINE = 16, 4
RACK_S = 1e-4
LATENCY_S, JITTER_S = 0.1, 0.05
"""``netem delay 100ms 50ms`` on every worker, so for every message one way."""
FORWARD = 0.25
"""Of a stage's work: with checkpointing, B is two forward passes' worth of work and one again."""
MODELS = {"GPT-3": (2, 1), "xxlarge": (1, 4)}
"""Place in Table 1, and samples of a microbatch."""
PAPER_2 = {
    "GPT-3": {"SWARM": (0.619, 0.558), "GPipe": (0.633, 0.477), "1F1B": (0.638, 0.482)},
    "xxlarge": {"SWARM": (2.358, 2.161), "GPipe": (2.541, 0.957), "1F1B": (2.550, 0.987)},
}
WIRINGS = (
    "fixed",
    "planned flow",
    "stochastic",
    "stochastic, told the work",
    "stochastic, through its trainer",
)
IN_FLIGHT = (16, 64, 256)
STREAMS_MBPS = (500, 240, 160, 100)
STREAM_IN_FLIGHT = 64
WARM, MEASURED = 300, 900


def even_links(
    n: int, latency_s: float, bytes_per_s: float, stream_bytes_per_s: float = math.inf
) -> LinkResources:
    """Every pair, every up- and download alike."""
    pair_bytes_per_s = min(bytes_per_s, stream_bytes_per_s)
    network = Network(np.full((n, n), latency_s), np.full((n, n), pair_bytes_per_s))
    devices = Devices(1.0, 1.0, upload_bytes_per_s=bytes_per_s, download_bytes_per_s=bytes_per_s)
    return LinkResources.of(Cluster(network, devices))


def table_2(say: Callable[[str], None]) -> list[str]:
    """The section of the report."""
    lines = [
        "## Table 2's conditions, simulated",
        "",
        f"{WORKERS} workers, {PIPELINE} stages of {WORKERS // PIPELINE}, 500 Mb/s up and down, no "
        f"latency ({RACK_S * 1e3:g} ms) or {LATENCY_S * 1e3:.0f} ± {JITTER_S * 1e3:.0f} ms drawn "
        "for every message. Seconds of computing are Figure 3's for a layer; half precision on the "
        "wire; microbatches follow one another without the breaks between steps. Samples a second "
        "and worker (which is what the paper's figures are by their size). Fixed: four straight "
        "pipelines. Planned flow: the round robin with the plan's weights, which are even here. "
        "Stochastic: a trainer on every worker; through its trainer: Algorithm 1 word for word, "
        "where all outputs come back to it; told the work: see Shares. All have the "
        "same number of microbatches in flight.",
        "",
        "| model | wiring | in flight | no latency | latency | kept |",
        "|---|---|---|---|---|---|",
    ]
    for model, (place, samples) in MODELS.items():
        for system, (without, delayed) in PAPER_2[model].items():
            lines.append(
                f"| {model} | paper: {system} | | {without} | {delayed} | {delayed / without:.0%} |"
            )
        for in_flight in IN_FLIGHT:
            for name in WIRINGS:
                found = [
                    _samples_per_s(place, samples, in_flight, name, latency_s, jitter_s)
                    for latency_s, jitter_s in ((RACK_S, 0.0), (LATENCY_S, JITTER_S))
                ]
                lines.append(
                    f"| {model} | {name} | {in_flight} | {found[0]:.3f} | {found[1]:.3f} | "
                    f"{found[1] / found[0]:.0%} |"
                )
                say(f"table 2: {model}, {name}, {in_flight}: {found[0]:.3f}, {found[1]:.3f}")
    return [
        *lines,
        "",
        "Where messages wait for latency alone, more microbatches in flight hide it, with fixed "
        "pipelines as well; these keep an even load on equal reliable workers, where routers leave "
        "some queues empty by chance. The paper's pipelines lose more of their speed with latency "
        "than waiting for messages explains (xxlarge keeps 38%): a TCP stream's own rate falls "
        "with a round trip of 200 ms, and netem's jitter puts packets out of order. In a measured "
        "network that is part of the pair's bandwidth; here it is not known. Not "
        "stated in the paper: the batch, and how many microbatches are in flight.",
        "",
        *_slow_streams(say),
    ]


def _slow_streams(say: Callable[[str], None]) -> list[str]:
    """What would be kept if a pair carried less with latency than without."""
    wirings = ("fixed", "stochastic")
    lines = [
        "**If a stream carries less with latency.** Part of the speed that is kept, with "
        f"{STREAM_IN_FLIGHT} in flight, where a pair carries at most so much once there is "
        "latency, and devices 500 Mb/s as before: a fixed pipeline has one stream to the next "
        "stage, a router one to each of its peers.",
        "",
        "| Mb/s | " + " | ".join(f"{m}, {w}" for m in MODELS for w in wirings) + " |",
        "|---|" + "---|" * (len(MODELS) * len(wirings)),
    ]
    paper = {"fixed": "GPipe", "stochastic": "SWARM"}
    theirs = [PAPER_2[model][paper[wiring]] for model in MODELS for wiring in wirings]
    lines.append("| paper | " + " | ".join(f"{b / a:.0%}" for a, b in theirs) + " |")
    columns = [(*sizes, STREAM_IN_FLIGHT, w) for sizes in MODELS.values() for w in wirings]
    without = [_samples_per_s(*asked, RACK_S, 0.0) for asked in columns]
    for rate in STREAMS_MBPS:
        cells = []
        for asked, usual in zip(columns, without, strict=True):
            slow = _samples_per_s(*asked, LATENCY_S, JITTER_S, rate * 1e6 / 8)
            cells.append(f"{slow / usual:.0%}")
        lines.append(f"| {rate} | " + " | ".join(cells) + " |")
        say(f"table 2: streams of {rate} Mb/s: {cells}")
    return [
        *lines,
        "",
        "Pipelines lose what a stream loses, routers far less, since they have several. About "
        "160 Mb/s gives three of the paper's four figures within five points, 100 Mb/s the "
        "fourth, xxlarge's pipelines; no rate gives all of them.",
        "",
    ]


def _samples_per_s(
    place: int,
    samples: int,
    in_flight: int,
    wiring: str,
    latency_s: float,
    jitter_s: float,
    stream_bytes_per_s: float = math.inf,
) -> float:
    """Samples a second and worker."""
    layer_s = FIGURE_3_S[place] / STAGES * samples
    stage = tuple(d % PIPELINE for d in range(WORKERS))
    trainers = range(0, WORKERS, PIPELINE) if wiring == "fixed" else range(WORKERS)
    scene = Scenario(
        even_links(WORKERS, latency_s, BYTES_PER_S, stream_bytes_per_s),
        stage,
        np.full(WORKERS, FORWARD * layer_s),
        np.full(WORKERS, (1 - FORWARD) * layer_s),
        TABLE_1[place].value_bytes * TABLE_1[place].units * TOKENS * samples,
        tuple(trainers),
        in_flight // len(trainers),
        relayed="trainer" in wiring,
        told_work="work" in wiring,
        jitter_s=jitter_s,
    )
    chosen: Sequence[Chooser]
    if wiring == "fixed":
        chosen = [FixedPath(range(first, first + PIPELINE)) for first in trainers]
    elif wiring == "planned flow":
        chosen = routers(scene, smoothing=0, estimates_s=dict.fromkeys(range(WORKERS), 1.0))
    else:
        chosen = routers(scene)
    log = simulate_queues(scene, chosen, WARM + MEASURED)
    return log.per_s(WARM) * samples / WORKERS


SPEEDS = ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.0))
LOADS = ((1, 1), (2, 4), (4, 8), (8, 8), (16, 8), (32, 8), (64, 8))
"""Microbatches a trainer, and trainers."""
CHANGED = (1.0, 1.0, 2.0, 4.0)
AT_S, WINDOW_S, RIGHT = 120.0, 10.0, 0.05


def _scene(rows: Sequence[Sequence[float]], latency_s: float, **fields: object) -> Scenario:
    """A microbatch takes 0.1 s forth and 0.2 s back at speed 1."""
    speed = np.array([v for row in rows for v in row])
    stage = tuple(s for s, row in enumerate(rows) for _ in row)
    given = {"links": even_links(len(speed), latency_s, 1e12), "stage": stage}
    given |= {"forward_s": 0.1 / speed, "backward_s": 0.2 / speed, "activation_bytes": 1e3}
    return Scenario(**(given | fields))  # type: ignore[arg-type]


def shares(seeds: Sequence[int], say: Callable[[str], None]) -> list[str]:
    """Steady shares against speeds, and the time until they are right again."""
    lines = [
        "## Shares of work against throughput",
        "",
        "Three stages of four peers of speeds 1, 2, 3, 4: microbatches done, of what the peers "
        "could do, and the largest relative distance of a peer's share of 8000 counted "
        "microbatches from its part of its stage's speed. Answer: estimates are response times, as "
        "in Algorithm 1. Work: peers say with their answer how long they worked on it.",
        "",
        "| in flight | no latency, answer: done | off | work: done | off | 50 ms, answer: done "
        "| off | work: done | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for in_flight, trainers in LOADS:
        cells = []
        for latency_s in (1e-6, 0.05):
            for summary in (False, True):
                homes = tuple(range(trainers))
                scene = _scene(
                    SPEEDS, latency_s, homes=homes, in_flight=in_flight, told_work=summary
                )
                log = simulate_queues(scene, routers(scene), 12_000)
                off = _off(log, log.finished_s[4000])
                cells.append(f"{log.per_s(4000) / (sum(SPEEDS[0]) / 0.3):.1%} | {off:.1%}")
        lines.append(f"| {in_flight * trainers} | {' | '.join(cells)} |")
        say(f"shares: {in_flight * trainers} in flight: {cells}")
    lines += [
        "",
        "A response time has the wait in the peer's queue and the network in it. Shares inverse to "
        "it leave the same number of requests at every peer of a stage (Little's law): with one "
        "microbatch and no latency nobody waits, and with many everybody is busy all the time, so "
        "that in both cases shares are throughputs. In between, and where latency is longer than "
        "the work, slow peers get more than their part. Where routers hear of the work itself, "
        "shares are throughputs at any load, and more is done; what is lost is the preference for "
        "peers that are near.",
        "",
        f"**After a change.** Peers of speeds 1, 1, 2, 4 in each of three stages, 6 microbatches "
        f"in flight, timeout 5 s, announcements every 30 s, latencies 1 ± 0.5 ms. Seconds until "
        f"the shares of {WINDOW_S:.0f} s from then on are within {RIGHT} (total variation) of the "
        f"parts by speed, and stay so for the next three such windows; {len(seeds)} seeds, "
        "mean (largest). Level: a peer enters at the lowest priority in use; epsilon: Algorithm "
        "1's text. (Who is killed has nothing from then on, and requests that waited there are "
        "asked again after the timeout.)",
        "",
        "| what happens | level, work | level, answer | epsilon, answer |",
        "|---|---|---|---|",
    ]
    cases: dict[str, tuple[list[Change], tuple[int, ...], list[float]]] = {
        "a peer of speed 1 is killed": ([Change(AT_S, 4, math.inf)], (), [0, 1, 2, 4]),
        "a peer of speed 2 slows to a third": ([Change(AT_S, 6, 3.0)], (), [1, 1, 2 / 3, 4]),
        "a peer of speed 1 joins": ([Change(AT_S, 5, 1.0)], (5,), [1, 1, 2, 4]),
        "a killed peer of speed 1 returns": (
            [Change(AT_S - 60, 5, math.inf), Change(AT_S, 5, 1.0)],
            (),
            [1, 1, 2, 4],
        ),
    }
    for what, (changes, late, speeds) in cases.items():
        cells = []
        for entry, summary in (
            (Entry.LEVEL, True),
            (Entry.LEVEL, False),
            (Entry.EPSILON, False),
        ):
            found = [_recovered_s(changes, late, speeds, entry, summary, seed) for seed in seeds]
            cells.append(f"{np.mean(found):.1f} ({max(found):.0f})")
        lines.append(f"| {what} | {' | '.join(cells)} |")
        say(f"shares: {what}: {cells}")
    return [*lines, ""]


def _off(log: Log, begin_s: float) -> float:
    counts = log.counts(12, begin_s).reshape(3, 4)
    parts = np.array(SPEEDS) / np.array(SPEEDS).sum(axis=1, keepdims=True)
    return float(np.abs(counts / counts.sum(axis=1, keepdims=True) / parts - 1).max())


def _recovered_s(
    changes: Sequence[Change],
    late: tuple[int, ...],
    speeds: Sequence[float],
    entry: Entry,
    summary: bool,
    seed: int,
) -> float:
    """Seconds until the second stage's shares are right, in steps of one."""
    scene = _scene(
        [CHANGED] * 3,
        1e-3,
        homes=(0, 1),
        in_flight=3,
        jitter_s=5e-4,
        timeout_s=5.0,
        announce_s=30.0,
        told_work=summary,
        late=late,
    )
    last_s = 900.0
    chosen = routers(scene, entry=entry)
    log = simulate_queues(scene, chosen, 10**9, changes=changes, seed=seed, until_s=last_s)
    parts = np.array(speeds) / sum(speeds)

    def right(begin_s: float) -> bool:
        counts = log.counts(12, begin_s, begin_s + WINDOW_S)[4:8]
        return bool(np.abs(counts / counts.sum() - parts).sum() / 2 <= RIGHT)

    after = 0.0
    while AT_S + after + 4 * WINDOW_S <= last_s:
        if all(right(AT_S + after + k * WINDOW_S) for k in range(4)):
            return after
        after += 1.0
    return math.inf


def flow(seeds: Sequence[int], say: Callable[[str], None]) -> list[str]:
    """A plan's flow beside what routers find."""
    cluster_words = "aws8_dtfm_worldwide_2022, 2 devices a region"
    network = pl.load_network("aws8_dtfm_worldwide_2022")
    inside = pl.Link(0.005, 2.5e8)
    big = network.replicate(
        dict.fromkeys(network.ids, 2),
        intra_latency_s=inside.latency_s,
        intra_bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s,
    )
    cluster = pl.Cluster(big, pl.Devices.of_gpu("A100"))
    result = pl.plan(
        cluster, pl.Workload.preset("gpt3-1.3b"), stages=4, wiring="flow", stop=pl.Effort(2)
    )
    plan = result.plan
    if plan is None:
        raise RuntimeError(f"no plan was found: {result}")
    many = len(plan.schedules[0].paths)
    found = plan_scenario(plan)
    lines = [
        "## A plan's flow and stochastic wiring",
        "",
        f"The plan of {cluster_words}, A100, gpt3-1.3b, 4 stages, flow (`pl.plan`, effort 2): "
        f"{many} microbatches, whose pipeline part takes {plan.predicted.pipeline_s:.2f} s on the "
        "clock. The same devices and links with routers: one a device, trainers on the first "
        f"stage's devices, {found.scene.in_flight * len(found.scene.homes)} microbatches in "
        f"flight, as the plan has at most. {len(seeds)} seeds (latencies drawn ±10 ms, none below "
        "0); off: the largest distance of a device's part of all microbatches from the plan's; "
        "held: the most microbatches that a device has between F and B, which no router limits "
        f"(the plan: {max(plan.schedules[0].most_live())}).",
        "",
        "| wiring | seconds, mean | least | most | off | held |",
        "|---|---|---|---|---|---|",
    ]
    fixed_weights: dict[str, object] = {"smoothing": 0.0, "estimates_s": found.estimates_s}
    initial_weights: dict[str, object] = {"estimates_s": found.estimates_s}
    with_jitter = replace(found.scene, jitter_s=0.01)
    told_work = replace(with_jitter, told_work=True)
    shared_routers = replace(with_jitter, by_holder=False)
    cases: dict[str, tuple[Scenario, dict[str, object]]] = {
        "the plan's weights, kept": (with_jitter, fixed_weights),
        "stochastic, from nothing": (with_jitter, {}),
        "stochastic, begun at the plan's weights": (with_jitter, initial_weights),
        "stochastic, told the work, from nothing": (told_work, {}),
        "stochastic, told the work, begun at the plan's weights": (told_work, initial_weights),
        "stochastic, from nothing, one router a trainer": (shared_routers, {}),
    }
    for name, (scene, options) in cases.items():
        logs = [
            simulate_queues(
                scene,
                routers(scene, **options),  # type: ignore[arg-type]
                many,
                seed=seed,
                drain=True,
            )
            for seed in seeds
        ]
        times = [log.finished_s[-1] for log in logs]
        counts = np.mean([log.counts(len(plan.cluster)) for log in logs], axis=0) / many
        off = max(abs(counts[d] - part) for d, part in found.parts.items())
        most_in_flight = max(max(log.max_in_flight) for log in logs)
        lines.append(
            f"| {name} | {np.mean(times):.2f} | {min(times):.2f} | {max(times):.2f} | "
            f"{off:.3f} | {most_in_flight} |"
        )
        say(f"flow: {name}: {np.mean(times):.2f} s, off {off:.3f}")
    return [*lines, ""]
