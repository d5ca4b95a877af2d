"""Replays against a slow reference, trace files, and reproducibility."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.problems.error import ProblemError
from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalancing import (
    NoMoves,
    RebalancePolicy,
    SwarmPolicy,
    SwarmState,
    optimal_rates,
)
from planner.swarm.replay import Enter, Leave, ReplayConfig, replay
from planner.swarm.traces import Market, Trace, load_trace, save_trace

SMALL = Market(peers=(12,), hours=3.0, life_s=3600.0, squeeze_s=3600.0, quiet_s=600.0)


class ReferenceReplay:
    """Reference replay with individual peers ``[stage, kind, ready]``."""

    def __init__(self, setting: ReplayConfig, policy: RebalancePolicy, seed: int) -> None:
        self.setting, self.policy = setting, policy
        self.leaving = np.random.default_rng([seed, 0])
        self.entering = np.random.default_rng([seed, 1])
        self.peers: list[list[float]] = []
        self.moves = 0
        kinds = sorted(range(len(setting.speed)), key=lambda k: -setting.speed[k])
        for k in kinds:
            for _ in range(int(setting.trace.start[k])):
                rates = [self.rate(s, 0.0) for s in range(len(setting.work))]
                self.peers.append([rates.index(min(rates)), k, 0.0])

    def rate(self, stage: int, now: float, coming: bool = False) -> float:
        """Microbatches a second."""
        speed = sum(
            self.setting.speed[int(k)]
            for s, k, ready in self.peers
            if s == stage and (coming or ready <= now)
        )
        return float(speed / self.setting.work[stage])

    def run(self) -> tuple[float, int]:
        """Total microbatches, and number of moves."""
        setting, trace = self.setting, self.setting.trace
        stages = range(len(setting.work))
        done, now, decided, event = 0.0, 0.0, 1, 0
        while now < trace.end_s:
            ahead = [r for _, _, r in self.peers if r > now]
            ahead += [decided * self.policy.every_s, trace.end_s]
            ahead += trace.time_s[event : event + 1].tolist()
            later = min(ahead)
            done += (later - now) * min(self.rate(s, now) for s in stages)
            now = later
            if event < len(trace.time_s) and trace.time_s[event] == now:
                for _ in range(abs(int(trace.change[event]))):
                    (self.enter if trace.change[event] > 0 else self.leave)(
                        int(trace.kind[event]), now
                    )
                event += 1
            elif decided * self.policy.every_s == now:
                decided += 1
                self.decide(now)
        return done, self.moves

    def enter(self, kind: int, now: float) -> None:
        """A peer enters."""
        count = len(self.setting.work)
        rates = [self.rate(s, now, coming=True) for s in range(count)]
        stage = rates.index(min(rates))
        if self.setting.enter is Enter.RANDOM:
            stage = int(self.entering.integers(count))
        self.peers.append([stage, kind, now + self.setting.download_s])

    def leave(self, kind: int, now: float) -> None:
        """A peer leaves; serving peers are numbered before loading ones."""
        draw, which = self.leaving.random(2)
        here = [p for p in self.peers if p[1] == kind]
        here.sort(key=lambda p: p[0])
        if self.setting.leave is Leave.STAGE:
            stage = int(draw * len(self.setting.work))
            while not any(p[0] == stage for p in here):
                stage = (stage + 1) % len(self.setting.work)
        else:
            stage = int(here[int(draw * len(here))][0])
        inside = [p for p in here if p[0] == stage]
        inside.sort(key=lambda p: max(p[2], now))
        self.peers.remove(inside[int(which * len(inside))])

    def decide(self, now: float) -> None:
        """Ask the policy."""
        shape = len(self.setting.work), len(self.setting.speed)
        serving, loading = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for s, k, ready in self.peers:
            (serving if ready <= now else loading)[int(s), int(k)] += 1
        stages = SwarmState(serving, loading, self.setting.work, self.setting.speed)
        for move in self.policy.moves(stages):
            for _ in range(move.number):
                peer = next(
                    p
                    for p in self.peers
                    if p[0] == move.source and p[1] == move.kind and p[2] <= now
                )
                self.peers.remove(peer)
                self.peers.append([move.target, move.kind, now + self.setting.download_s])
                self.moves += 1


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
@pytest.mark.parametrize("download_s", [0.0, 130.0])
@pytest.mark.parametrize(
    "policy", [NoMoves(), SwarmPolicy(60), PlannedMoves(90, horizon_s=900.0, download_s=130.0)]
)
def test_replay_equals_the_reference(policy: RebalancePolicy, download_s: float, seed: int) -> None:
    """Peer by peer: the same microbatches and the same moves."""
    market = replace(SMALL, peers=(12, 6)) if seed % 2 else SMALL
    trace = market.trace(seed)
    setting = ReplayConfig(
        trace,
        np.array([1.0, 2.0, 1.0]),
        np.array([1.0, 2.0])[: len(trace.kinds)],
        download_s,
        1e9,
        [Enter.SLOWEST, Enter.RANDOM][seed // 2],
        [Leave.STAGE, Leave.PEER][seed // 2],
    )
    played = replay(setting, policy, seed)
    done, moves = ReferenceReplay(setting, policy, seed).run()
    assert played.done(0, trace.end_s)[0] == pytest.approx(done, rel=1e-9)
    assert played.moves == moves
    assert played.moved_bytes == moves * 1e9


def test_by_hand() -> None:
    """Two stages of two; one leaves, one comes back: half speed for 100 of 400 s."""
    trace = Trace(
        ("a",), np.array([4]), np.array([100.0, 200.0]), np.zeros(2, int), np.array([-1, 1]), 400.0
    )
    setting = ReplayConfig(trace, np.ones(2), np.ones(1))
    played = replay(setting, NoMoves())
    assert played.time_s == [0.0, 100.0, 200.0]
    assert played.rate == [2.0, 1.0, 2.0]
    # with three peers nobody does better
    assert played.best == [2.0, 1.0, 2.0]
    assert played.share() == 1.0
    slow = replay(replace(setting, download_s=50.0), NoMoves())
    assert slow.rate == [2.0, 1.0, 1.0, 2.0]
    assert slow.share() == pytest.approx(650 / 700)
    assert slow.joins == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 100.0]), st.sampled_from(list(Leave)))
def test_never_above_the_optimum(seed: int, download_s: float, leave: Leave) -> None:
    """No policy exceeds the optimal rate at any time."""
    trace = SMALL.trace(seed)
    setting = ReplayConfig(trace, np.array([1.0, 1.5]), np.ones(1), download_s, 1.0, leave=leave)
    for policy in (SwarmPolicy(120), PlannedMoves(60)):
        played = replay(setting, policy, seed)
        assert np.all(np.array(played.rate) <= np.array(played.best) * (1 + 1e-9))
    best = optimal_rates(setting.work, 12)
    assert set(played.best) <= set(best.tolist())


def test_decisions_after_every_event_are_optimal() -> None:
    """Without downloads the allocation is optimal at any time."""
    setting = ReplayConfig(
        SMALL.trace(3), np.array([1.0, 1.5, 1.0]), np.ones(1), enter=Enter.RANDOM
    )
    always = replay(setting, PlannedMoves(0.0), 3)
    assert always.rate == pytest.approx(always.best)
    assert always.moves > 0
    assert replay(setting, NoMoves(), 3).share() < 0.95


def test_planned_moves_beat_algorithm_2() -> None:
    """Planned moves give more microbatches with fewer bytes than Algorithm 2."""
    market = Market(hours=8.0)
    for seed in range(3):
        for download_s in (0.0, 120.0):
            setting = ReplayConfig(
                market.trace(seed), np.ones(4), np.ones(1), download_s, 3e9, Enter.RANDOM
            )
            ours = replay(
                setting,
                PlannedMoves(60, horizon_s=1800.0, download_s=download_s, state_bytes=3e9),
                seed,
            )
            theirs = replay(setting, SwarmPolicy(60), seed)
            nothing = replay(setting, NoMoves(), seed)
            assert ours.share() > theirs.share() > nothing.share()
            assert ours.moved_bytes < 0.6 * theirs.moved_bytes


def test_same_seed_same_result() -> None:
    """Trace and replay."""
    one, two, other = (Market(hours=4.0).trace(seed) for seed in (7, 7, 8))
    assert one.time_s.tolist() == two.time_s.tolist() != other.time_s.tolist()
    setting = ReplayConfig(one, np.ones(4), np.ones(1), 60.0, 1.0)
    runs = [replay(setting, PlannedMoves(60), seed) for seed in (1, 1, 2)]
    assert runs[0].rate == runs[1].rate != runs[2].rate


def test_generated_traces_respect_the_market() -> None:
    """At most the target number of peers, a quiet start, and preemptions of many at once."""
    trace = Market(peers=(200, 100), hours=24.0, quiet_s=7200.0).trace(5)
    counts = trace.counts()
    assert np.all(counts >= 0) and np.all(counts <= [200, 100])
    assert counts[0].tolist() == [200, 100]
    assert trace.kinds == ("kind0", "kind1")
    assert trace.change[trace.time_s < 7200].min() == -1
    assert trace.change.min() < -20
    assert trace.change.max() == 1


def test_trace_file_round_trip(tmp_path: Path) -> None:
    """A saved trace is loaded unchanged."""
    trace = Market(peers=(20, 10), hours=6.0).trace(1, ("T4", "A100"))
    save_trace(trace, tmp_path / "trace.csv")
    again = load_trace(tmp_path / "trace.csv")
    assert again.kinds == trace.kinds
    assert again.end_s == trace.end_s
    for name in ("start", "time_s", "kind", "change"):
        assert getattr(again, name).tolist() == getattr(trace, name).tolist()


def test_a_short_file(tmp_path: Path) -> None:
    """Two columns are enough."""
    path = tmp_path / "trace.csv"
    path.write_text("time_s,change\n0,4\n10,-2\n20,1\n30,0\n")
    trace = load_trace(path)
    assert (trace.kinds, trace.end_s) == (("peer",), 30.0)
    assert trace.counts()[:, 0].tolist() == [4, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns are missing; give time_s,change"),
        ("time,change\n0,4\n", "columns are time,change; give time_s,change"),
        ("time_s,change\n0,4\nx,1\n", "line 3: time_s is 'x'; give a finite number"),
        ("time_s,change\n0,4\n5,1.5\n", "line 3: change is '1.5'; give a whole number"),
        ("time_s,change\n0,4\n5\n", "line 3 has 1 cells, the header 2; fill the row"),
        ("time_s,change\n0,4\n5,1,2\n", "line 3 has 3 cells, the header 2"),
        ("time_s,change\n0,4\n5,nan\n", "line 3: change is 'nan'; give a finite number"),
        ("time_s,change\n0,4\n9,1\n5,1\n", "line 4: time_s 5 is before 9; sort the rows"),
        ("time_s,change\n-1,4\n", "line 2: time_s -1 is before 0"),
        ("time_s,change\n0,4\n9,-5\n", "at 9 s more peers of kind 'peer' leave than there are"),
        ("time_s,change\n0,4\n", "has no peers at time 0 or nothing after it"),
        ("time_s,change\n5,4\n6,0\n", "has no peers at time 0 or nothing after it"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    """One line: the file, where, what, and what to do."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ProblemError) as error:
        load_trace(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    """A missing file and a binary file raise."""
    with pytest.raises(ProblemError, match=r"cannot be read .*; check the path"):
        load_trace(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match="is not UTF-8 text"):
        load_trace(tmp_path / "bytes.csv")


def test_invalid_configurations_raise() -> None:
    """One line each."""
    trace = SMALL.trace(0)
    with pytest.raises(ProblemError, match="12 peers cannot hold 13 stages; give fewer"):
        ReplayConfig(trace, np.ones(13), np.ones(1))
    with pytest.raises(ProblemError, match="2 speeds for 1 kinds of peers"):
        ReplayConfig(trace, np.ones(2), np.ones(2))
    with pytest.raises(ProblemError, match="life_s is 0; give a number above 0"):
        Market(life_s=0)
    with pytest.raises(ProblemError, match=r"least is 1\.5, quiet_s"):
        Market(least=1.5)
    with pytest.raises(ProblemError, match="work and speed must be above 0"):
        ReplayConfig(trace, np.zeros(2), np.ones(1))
