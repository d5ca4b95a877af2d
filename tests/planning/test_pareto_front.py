"""Plans between the fastest and the cheapest, from Python and from the command line."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

import planner as pl
from planner.cli.main import main
from planner.planning.pareto_front import FrontPoint
from tests.conftest import regional_network, tiny_workload


def cluster(price: float | None = 1.0) -> pl.Cluster:
    """Two regions, slow enough that a second device helps."""
    return pl.Cluster(regional_network([3, 3]), pl.Devices(1e8, 16e9, usd_per_hour=price))


def test_no_point_of_a_front_is_beaten() -> None:
    """By one that trains the same way; the ends are the fastest and the cheapest."""
    front = pl.pareto(
        cluster(),
        tiny_workload(batch_samples=16),
        sync_every=(1, 5),
        codecs=("none", "int8"),
        worth=(math.inf, 0.1, 0.0),
        prices=pl.Prices(1000.0),
        stop=pl.Effort(0.2),
    )
    points = front.points
    assert front.refused == ()
    assert len({point.plan.content_hash for point in points}) == len(points)
    assert [p.step_s for p in points] == sorted(p.step_s for p in points)
    kinds = {point.training_settings for point in points}
    assert kinds == {(h, codec, "none", "none") for h in (1, 5) for codec in ("none", "int8")}

    def beaten(one: FrontPoint, by: FrontPoint) -> bool:
        no_worse = by.step_s <= one.step_s and by.step_usd <= one.step_usd
        better = by.step_s < one.step_s or by.step_usd < one.step_usd * (1 - 1e-9)
        return no_worse and better

    for kind in kinds:
        some = [point for point in points if point.training_settings == kind]
        for point in some:
            assert point.on_front != any(beaten(point, other) for other in some)
            assert pl.check(point.plan) == []
        assert some[0].on_front and min(some, key=lambda p: p.step_usd).on_front


def test_regions_that_average_in_every_step() -> None:
    """Another way to train, where not all average in every step anyway."""
    front = pl.pareto(
        cluster(),
        tiny_workload(batch_samples=16),
        sync_every=(1, 5),
        within=("none", "region"),
        worth=(math.inf,),
        stop=pl.Effort(0.2),
    )
    assert front.refused == ()
    kinds = {point.training_settings: point.plan.two_frequency for point in front.points}
    assert kinds == {(1, *["none"] * 3): False, (5, *["none"] * 3): False} | {
        (5, "none", "none", "region"): True
    }
    with pytest.raises(pl.ProblemError, match="found sync_every 1"):
        pl.pareto(cluster(), tiny_workload(), within=("region",), stop=pl.Effort(0.1))


def test_what_cannot_be_asked() -> None:
    """One line each."""
    work, stop = tiny_workload(), pl.Effort(0.1)
    with pytest.raises(pl.ProblemError, match="needs what devices cost"):
        pl.pareto(cluster(None), work, stop=stop)
    for wrong in ({"codecs": ("none", "foo")}, {"boundary_codecs": ("foo",)}, {"within": ("foo",)}):
        with pytest.raises(pl.ProblemError, match="'foo' is unknown; choose one of"):
            pl.pareto(cluster(), work, stop=stop, **wrong)
    for one in ({"sync_every": 4}, {"codecs": "int8"}, {"worth": 0.2}, {"within": "region"}):
        with pytest.raises(pl.ProblemError, match=r"^\w+ must be a list, found .*; give "):
            pl.pareto(cluster(), work, stop=stop, **one)
    with pytest.raises(pl.ProblemError, match="no combination is given"):
        pl.pareto(cluster(), work, sync_every=(), stop=stop)
    with pytest.raises(pl.ProblemError, match="memory"):
        small = pl.Cluster(regional_network([2]), pl.Devices(1e8, 10.0, usd_per_hour=1.0))
        pl.pareto(small, work, stop=stop)


ASKED = [
    *("pareto", "--network", "aws8_dtfm_worldwide_2022", "--workload", "gpt2-tiny"),
    *("--sequence", "64", "--batch-samples", "8", "--effort", "0.3", "--sync-every", "1,4"),
    *("--worth", "inf,0"),
]


def test_the_command_writes_table_picture_and_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every plan on a front has a file that passes its check."""
    out = tmp_path / "front"
    assert main([*ASKED, "--out", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    table = list(csv.DictReader((out / "front.csv").read_text().splitlines()))
    assert [float(row["step_s"]) for row in table] == [row["step_s"] for row in rows]
    files = sorted(path.name for path in out.iterdir())
    assert files == sorted(["front.csv", "front.png", *(r["plan"] for r in rows if r["plan"])])
    for row in rows:
        if row["plan"]:
            plan = pl.load_plan(out / row["plan"])
            assert pl.check(plan) == [] and plan.cost is not None
            assert plan.cost.step_usd == pytest.approx(row["step_usd"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--worth", "inf,x"], "must be numbers >= 0 such as inf,1,0, found 'inf,x'"),
        (["--codecs", "int9"], "codec 'int9' is unknown"),
        (["--sync-every", "0"], "--sync-every is 0; it must be at least 1"),
        (["--within", "site"], "within 'site' is unknown; choose one of region"),
        (["--prices", "none.csv"], "none.csv: cannot be read"),
        (["--effort", "-1"], "effort"),
    ],
)
def test_bad_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2."""
    try:
        code = main([*ASKED, *words])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err
