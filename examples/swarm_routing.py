"""Route microbatches to heterogeneous peers and rebalance stages (SWARM).

Part 1: two stages of four peers with speeds 1 to 4, in the eight regions of DT-FM's Table 2.
Routers (Algorithm 1) learn the speeds; then one peer slows down. Part 2: spot instances join and
leave for eight hours. Algorithm 2, which moves one peer at a time, is compared with planned moves.
"""

from __future__ import annotations

import numpy as np

import planner as pl
from benchmarks.swarm.queueing import Change, Scenario, routers, simulate_queues
from planner.simulator.resources import LinkResources
from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalancing import NoMoves, SwarmPolicy
from planner.swarm.replay import Enter, ReplayConfig, replay
from planner.swarm.traces import Market

np.set_printoptions(precision=3)
network = pl.load_network("aws8_dtfm_worldwide_2022")
speed = np.array([1.0, 2.0, 3.0, 4.0] * 2)
scene = Scenario(
    LinkResources.of(pl.Cluster(network, pl.Devices(1e12, 16e9))),
    stage=(0, 0, 0, 0, 1, 1, 1, 1),
    forward_s=0.5 / speed,
    backward_s=1.0 / speed,
    activation_bytes=1e6,
    homes=(0, 1, 2, 3),
    in_flight=8,
    told_work=True,
)
slows_s = 300.0
log = simulate_queues(
    scene, routers(scene), 4000, changes=[Change(slows_s, 3, 4.0)], until_s=2 * slows_s
)
for words, begin_s, end_s, true in (
    ("at first", 100.0, slows_s, speed[:4]),
    ("a peer slows", slows_s + 100, 2 * slows_s, np.array([1.0, 2.0, 3.0, 1.0])),
):
    done = log.counts(8, begin_s, end_s)[:4]
    print(f"{words}: stage 0's peers did {done / done.sum()}, by speed {true / true.sum()}")

trace = Market(peers=(60,), hours=8.0).trace(seed=0)
download_s = 120.0
setting = ReplayConfig(trace, np.ones(4), np.ones(1), download_s, enter=Enter.RANDOM)
for name, policy in (
    ("nobody moves", NoMoves()),
    ("Algorithm 2, T = 300 s", SwarmPolicy(300.0)),
    ("planned together", PlannedMoves(300.0, download_s=download_s)),
):
    played = replay(setting, policy, seed=0)
    print(f"{name:<24} {played.share():.1%} of the best allocation, {played.moves} moves")
