"""The examples run, and what they print is true."""

from __future__ import annotations

import re
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def found(pattern: str, text: str) -> list[float]:
    """Numbers that a pattern has in groups, in the order of the lines."""
    groups = [m if isinstance(m, tuple) else (m,) for m in re.findall(pattern, text, re.M)]
    return [float(one) for group in groups for one in group]


def one(pattern: str, text: str) -> float:
    """The only one."""
    (number,) = found(pattern, text)
    return number


def ping_table(text: str) -> None:
    """What was not measured is said; the plan passes the check and survives its file."""
    assert "assumed: bandwidth of 12 ordered pairs, 1 Gb/s" in text
    assert "Cluster(6 devices in 4 regions" in text
    assert one(r"bound ([\d.]+) s\)", text) <= one(r"step ([\d.]+) s", text)
    assert "read back: []" in text and "the same plan: True" in text


def dedloc(text: str) -> None:
    """No averaging beats the relaxation, and neither rule beats the exact one."""
    exact, rule = found(r"objective=([\d.]+)", text)
    equal = one(r"equal shares: +([\d.]+)", text)
    assert max(rule, equal) < exact <= one(r"at most ([\d.]+)", text)
    assert "violations: []" in text


def dtfm(text: str) -> None:
    """Below chance, the rule of thumb and the paper's search, above the bound."""
    ours, genetic = found(r"objective=([\d.]+)", text)
    by_region, chance = one(r"by region: ([\d.]+)", text), one(r"random: +([\d.]+)", text)
    assert found(r"bound=([\d.]+)", text)[0] <= ours <= genetic <= by_region < chance
    assert "violations: []" in text


def skippipe(text: str) -> None:
    """Each search beats the one before."""
    straight, cbs, ours = found(r"objective=([\d.]+)", text)
    assert ours <= cbs < straight
    assert all(b <= ours * (1 + 1e-6) for b in found(r"bound=([\d.]+)", text))
    assert "violations: []" in text and "microbatch 0: stages 0" in text


def swarm(text: str) -> None:
    """Shares follow speeds, also after a change; planned moves are fewer."""
    for done, true in re.findall(r"did \[([\d. ]+)\], by speed \[([\d. ]+)\]", text):
        parts = zip(map(float, done.split()), map(float, true.split()), strict=True)
        assert all(abs(a - b) < 0.03 for a, b in parts)
    nobody, rule, planned = found(r"([\d.]+)% of the best", text)
    _, rule_moves, planned_moves = found(r"(\d+) moves", text)
    assert nobody < rule and nobody < planned and planned_moves < rule_moves


def diloco(text: str) -> None:
    """Steps fall with H, and cost what is listed; the front has no plan that another beats."""
    steps = found(r"^H = \d+ +step +([\d.]+) s", text)
    dollars, rented, sent = (
        found(rf"^H = .*{before} ([\d.]+) \$", text) for before in (" s,", "devices", "regions")
    )
    assert len(steps) == 3 and steps == sorted(steps, reverse=True)
    for total, *parts in zip(dollars, rented, sent, strict=True):
        assert sum(parts) == pytest.approx(total, abs=2e-4)
    points = re.findall(r"FrontPoint\(([\d.]+) s, ([\d.]+) \$ a step, on the front", text)
    front = [(float(s), float(usd)) for s, usd in points]
    assert front and front == sorted(front)
    assert [usd for _, usd in front] == sorted((usd for _, usd in front), reverse=True)


def own_solver(text: str) -> None:
    """The checker accepts five answers, prices them, and says what is wrong with the sixth."""
    own = found(r"own +([\d.]+) s \(0 violations\)", text)
    ours, bounds = found(r"planner +([\d.]+) s", text), found(r"bound +([\d.]+) s", text)
    assert len(own) == len(ours) == 5
    assert all(b <= p <= o for b, p, o in zip(bounds, ours, own, strict=True))
    assert "every device must be in exactly one group" in text


def locally(text: str) -> None:
    """Two processes train, and send each other what the plan says."""
    losses = found(r"loss ([\d.]+)", text)
    assert len(losses) == 4 and losses[-1] < losses[0] < 6
    sent = found(r"sent \{'\w+': (\d+)\}", text)
    assert len(sent) == 2 and sent[0] == sent[1] > 0


SAYS: dict[str, Callable[[str], None]] = {
    "ping_table_to_plan": ping_table,
    "dedloc_averaging": dedloc,
    "dtfm_assignment": dtfm,
    "skippipe_paths": skippipe,
    "swarm_routing": swarm,
    "diloco_money": diloco,
    "own_solver": own_solver,
    "run_locally": locally,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_example(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends, and its figures hold what the text beside it says."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    SAYS[name](capsys.readouterr().out)
