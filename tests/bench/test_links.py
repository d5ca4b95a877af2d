"""Emulated links: the shaping lines, the fair parts, and (as root) what flows really get."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest

from planner.bench.links import MBIT, PAYLOAD, fair_rates, goodput, namespaces, shape


@pytest.fixture
def two_links() -> Any:
    """Peers with 20 and 10 Mb/s."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root and iproute2")
    try:
        with namespaces((20.0, 10.0)) as names:
            yield names
    except ValueError as error:
        pytest.skip(f"this kernel cannot shape links: {error}")


def test_every_other_peer_has_a_class_and_the_link_a_ceiling() -> None:
    """Equal parts of the link, each of which may have all of it; the whole has the link's rate."""
    text = shape("eth0", 20.0, "dst", [1, 2, 3, 9])
    assert "classid 1:1 htb rate 20mbit" in text
    assert text.count("htb rate 5.000000mbit ceil 20mbit") == 4
    assert "match ip dst 10.77.0.10/32 flowid 1:19" in text
    # numbers of classes are hexadecimal
    assert "flowid 1:1c\n" in shape("eth0", 20.0, "src", [12])


def test_fair_rates_of_fast_and_slow_links() -> None:
    """Two flows halve a slow uplink; what they leave of a fast downlink goes to the third."""
    rates = fair_rates([10.0, 50.0, 50.0, 10.0], [(0, 1), (0, 3), (2, 1)])
    speed = {flow: rate / MBIT / PAYLOAD for flow, rate in rates.items()}
    assert speed == pytest.approx({(0, 1): 5.0, (0, 3): 5.0, (2, 1): 45.0})


def test_a_flow_gets_its_link_and_no_more(two_links: Any) -> None:
    """The slower end decides, in either direction."""
    for flow in ((0, 1), (1, 0)):
        found = goodput(two_links, [flow], 3.0)[flow]
        # a loaded machine may deliver less, but the link never lets more through
        assert 0.8 < found / (10 * MBIT * PAYLOAD) < 1.02


def test_namespaces_are_gone_afterwards() -> None:
    """Also when what ran in them fails."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root and iproute2")
    made: list[str] = []
    with pytest.raises((RuntimeError, ValueError)), namespaces((10.0, 10.0)) as names:
        made += names
        raise RuntimeError("inside")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not set(made) & set(left.stdout.split())
