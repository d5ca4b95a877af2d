"""``planner networks``."""

from __future__ import annotations

import argparse

from planner.cli.output import show
from planner.network.catalogue import list_networks, load_network

NAME = "networks"
ABOUT = "list the measured networks that ship with the package"


def add_arguments(_: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> int:
    """Names, sizes and what they are."""
    named = list_networks()
    rows = [f"{name:<32}{len(load_network(name)):>4}  {about}" for name, about in named.items()]
    show(args.json, named, [f"{'name':<32}   N  what", *rows])
    return 0
