"""Prices of traffic between regions: rules, providers, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.network.gpus import GPUS
from planner.network.prices import BETWEEN_PROVIDERS, BETWEEN_REGIONS, Prices


def test_regions_and_providers() -> None:
    """Free within a region; two prices beyond, by default list prices."""
    regions = ["aws:a", "aws:a", "aws:b", "gcp:a", "plain"]
    each = Prices().usd_per_byte(regions) * 1e9
    assert each[0].tolist() == pytest.approx(
        [0, 0, BETWEEN_REGIONS, BETWEEN_PROVIDERS, BETWEEN_PROVIDERS]
    )
    assert pytest.approx(each) == each.T


def test_first_matching_rule_applies() -> None:
    """By name or wildcard, per direction; within a region only if it is named twice."""
    prices = Prices(0.5, 9.0, (("a", "b", 1.0), ("a", "*", 2.0), ("*", "*", 3.0), ("b", "b", 4.0)))
    each = prices.usd_per_byte(["a", "b", "c"]) * 1e9
    assert each.tolist() == pytest.approx(np.array([[0, 1.0, 2.0], [3.0, 4.0, 3.0], [3.0, 3.0, 0]]))
    assert Prices.from_dict(prices.to_dict()) == prices


def test_prices_file(tmp_path: Path) -> None:
    """Its rows are rules in order."""
    path = tmp_path / "prices.csv"
    path.write_text("from,to,usd_per_gb\nTokyo, *, 0.09\n*,Tokyo ,0.08\n")
    rules = (("Tokyo", "*", 0.09), ("*", "Tokyo", 0.08))
    assert Prices.load(path, between_regions=0.1) == Prices(0.1, rules=rules)
    assert Prices.load(path, regions=["Tokyo"]).rules == rules
    with pytest.raises(pl.NetworkError, match=r"line 2: 'Tokyo' is no region .*mean 'tokyo'"):
        Prices.load(path, regions=["tokyo", "Oregon"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from,to\na,b\n", "must have the columns from, to, usd_per_gb, found from, to"),
        ("", "must have the columns"),
        ("from,to,usd_per_gb\na,b,x\n", "line 2: usd_per_gb must be a number >= 0, found 'x'"),
        ("from,to,usd_per_gb\na,b,1\na,c,-1\n", "line 3: usd_per_gb must be a number >= 0"),
        ("from,to,usd_per_gb\na,b\n", "line 2 has 2 cells, the header 3; fill the row"),
        (
            "from,to,usd_per_gb\nTokyo,*,0,09\n",
            "line 2 has 4 cells, the header 3; write decimals with a point",
        ),
        ("from,to,usd_per_gb\na,b,0.05 $\n", "found '0.05 [$]'; give the number alone"),
        ("from,to,usd_per_gb\na,b,1\na,b,2\n", "line 3: 'a' to 'b' has a price in line 2 already"),
        ("from,to,to,usd_per_gb\na,b,c,1\n", "column 'to' is named twice"),
        ("from,to,usd_per_gb\n,b,1\n", "line 2: from and to must name regions"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, words: str) -> None:
    """One line each, with the position."""
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(pl.NetworkError, match=words):
        Prices.load(path)
    with pytest.raises(pl.NetworkError, match="cannot be read"):
        Prices.load(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"between_regions": -1}, "prices.between_regions is -1"),
        ({"between_providers": "x"}, "prices.between_providers is 'x'"),
        ({"rules": ["ab"]}, "must be two regions and a price"),
        ({"rules": [(1, "b", 0.1)]}, "must be two regions and a price"),
        ({"rules": [("a", "b", float("nan"))]}, "price is nan"),
    ],
)
def test_invalid_prices(fields: dict[str, Any], words: str) -> None:
    """One line each."""
    with pytest.raises(ValueError, match=words):
        Prices(**fields)


def test_gpus_have_dated_prices() -> None:
    """With provider and date."""
    for gpu in GPUS.values():
        assert (gpu.usd_per_hour is None) == (not gpu.price_source)
    assert pl.Devices.of_gpu("V100").usd_per_hour == 3.06
