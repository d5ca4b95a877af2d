"""Plans that ``python -m benchmarks.fidelity`` runs."""

from benchmarks.fidelity.cases import CASES, SETTINGS
from benchmarks.fidelity.random_cases import KEPT, LONGEST_S, MAX_DEVICES, MIN_DEVICES, RandomCase
from planner import check
from planner.emulate.execution import planned_steps
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.choices import Wiring


def test_a_seed_draws_the_same_plan() -> None:
    """Valid, small, and short enough; what was drawn is in its name."""
    names = []
    for seed in (2, 7, 10, 31):
        case = RandomCase(seed)
        plan = case.plan()
        assert RandomCase(seed).plan().content_hash == plan.content_hash
        assert check(plan) == []
        assert MIN_DEVICES <= len(plan.cluster) <= MAX_DEVICES
        assert simulate_cycle(plan)[0].step_s * sum(planned_steps(plan, 5, 5)) <= LONGEST_S
        assert case.key.startswith(f"random/{seed}: ")
        # parts that are learnt while a plan runs are no prediction
        assert plan.wiring is not Wiring.STOCHASTIC or plan.routing == KEPT
        names.append(case.key)
    assert "shared lines" in names[1] and "clip 1.0" in names[1] and "stochastic" in names[3]


def test_fixed_cases_are_of_known_networks() -> None:
    """Each has its own name, so that kept results are told apart."""
    assert len({case.key for case in CASES}) == len(CASES)
    assert {case.setting for case in CASES} == set(SETTINGS)
