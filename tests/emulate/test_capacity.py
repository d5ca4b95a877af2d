"""Resources of an emulated plan, and the choice of scaling factors."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cli.main import main
from planner.emulate.capacity import CARRIED_BYTES_PER_S, HostNeed, need_of, used_pairs
from planner.emulate.emulation import EmulationSettings, resolve_settings
from planner.emulate.links import emulated_cluster, links_of
from planner.emulate.namespaces import EmulationError
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from tests.conftest import make_plan, random_network


def test_pairs_of_neighbours_and_groups_are_used() -> None:
    """2 x 2: both directions of two pipelines, and of two groups."""
    expected = {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert used_pairs(make_plan([[0, 1], [2, 3]])) == expected | {(j, i) for i, j in expected}


def test_stochastic_wiring_uses_all_pairs_of_neighbouring_stages() -> None:
    """2 x 3: all pairs of consecutive stages, and of the stages with stem and head."""
    for head, ends in (("last", set()), ("first", {(2, 0), (2, 3), (5, 0), (5, 3)})):
        plan = make_plan([[0, 1, 2], [3, 4, 5]], head=head).replace(wiring="stochastic")
        pairs = {
            (i, j)
            for here, there in ((0, 1), (1, 2))
            for i in (here, here + 3)
            for j in (there, there + 3)
        }
        pairs |= ends | {(0, 3), (1, 4), (2, 5)}
        assert used_pairs(plan) == pairs | {(j, i) for i, j in pairs}


def test_links_within_machines_do_not_decide_the_scale() -> None:
    """They are at most 50 times as fast as all others; slower ones stay."""
    network = random_network(4)
    rate = np.array(network.bandwidth_bytes_per_s)
    rate[0, 1] = rate[1, 0] = 1e12
    fast = network.replace(bandwidth_bytes_per_s=rate)
    devices = Devices(1e12, 16e9, machines=["m", "m", "", ""])
    found = emulated_cluster(Cluster(fast, devices)).network.bandwidth_bytes_per_s
    others = np.delete(rate.ravel(), [0, 1, 4, 5, 10, 15])
    assert found[0, 1] == found[1, 0] == 50 * others.max()
    assert found[2:].tolist() == rate[2:].tolist()
    slow = Cluster(network, devices)
    assert emulated_cluster(slow).network == network
    assert emulated_cluster(Cluster(fast, Devices(1e12, 16e9))).network == fast


def test_shrink_follows_throughput() -> None:
    """Rounded up to two digits; a lower speed has the same effect."""
    need = HostNeed(12.34 * CARRIED_BYTES_PER_S, 0.0, 1.0)
    assert need.least_shrink(1.0, 1e9) == pytest.approx(13.0)
    assert need.least_shrink(0.1, 1e9) == pytest.approx(1.3)
    assert need.least_shrink(0.01, 1e9) == 1.0
    with pytest.raises(EmulationError, match="fewer devices"):
        HostNeed(1.0, 2e9, 0.0).least_shrink(1.0, 1e9)


def test_shrink_follows_memory() -> None:
    """A vector four times as large as the available memory."""
    assert HostNeed(1.0, 0.0, 2.8e9).least_shrink(1.0, 1e9) == pytest.approx(4.0)


def test_small_shrink_is_warned_about() -> None:
    """With values that would suffice."""
    plan = make_plan([[0, 1], [2, 3]])
    assert need_of(plan, links_of(plan.cluster)).rate_bytes_per_s > CARRIED_BYTES_PER_S
    lines: list[str] = []
    asked = resolve_settings(plan, EmulationSettings(shrink=1.0), lines.append)
    assert asked.shrink == 1.0
    assert "run with --shrink" in lines[-1]
    assert resolve_settings(plan, EmulationSettings()).shrink > 1.0


def test_steps_too_short_for_this_machine_are_warned_about() -> None:
    """With a speed that suits; not if latencies fill the step."""
    lines: list[str] = []
    far = Network(np.full((2, 2), 1.0), np.full((2, 2), 1e8))
    resolve_settings(make_plan([[0, 1]], network=far), EmulationSettings(), lines.append)
    assert len(lines) == 1
    near = Network(np.full((2, 2), 1e-4), np.full((2, 2), 1e8))
    plan = make_plan([[0, 1]], network=near)
    resolve_settings(plan, EmulationSettings(), lines.append)
    assert "operations of a device" in lines[-1] and len(lines) == 3
    advised = float(lines[-1].rsplit(" ", 1)[1])
    resolve_settings(plan, EmulationSettings(speed=0.99 * advised), lines.append)
    assert len(lines) == 4


@pytest.mark.parametrize("fields", [{"speed": 0.0}, {"shrink": -1.0}, {"speed": float("nan")}])
def test_numbers_must_be_above_zero(fields: dict[str, float]) -> None:
    """One line."""
    with pytest.raises(ValueError, match="above 0"):
        EmulationSettings(**fields)  # type: ignore[arg-type]


def test_real_compute_rejects_speed() -> None:
    """In one line."""
    with pytest.raises(ValueError, match="leave out"):
        EmulationSettings(speed=2.0, real_compute=True)


def test_a_shrink_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    """Other values are rejected."""
    with pytest.raises(SystemExit):
        main(["emulate", "plan.json", "--shrink", "much"])
    assert "--shrink: must be a number or auto, found 'much'" in capsys.readouterr().err
