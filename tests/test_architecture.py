"""Imports between packages go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

import planner

PACKAGE = Path(planner.__file__).parent

BASE = {"utils", "network", "workload", "problems", "search"}
SOLVERS = {"matching", "genetic", "mapf", "lp"}
MAY_IMPORT = {
    "utils": set(),
    "network": {"utils"},
    "workload": {"utils", "network"},
    "problems": {"utils", "network", "workload"},
    "search": set(),
    "matching": BASE,
    "genetic": BASE | {"matching"},
    "mapf": BASE,
    "lp": BASE,
    "training_plan": BASE,
    "simulator": BASE | {"training_plan"},
    "swarm": BASE | {"training_plan", "simulator"},
    "checker": BASE | {"training_plan"},
    "planning": BASE | SOLVERS | {"training_plan", "simulator"},
    "executor": {
        *("utils", "network", "workload", "training_plan", "simulator", "swarm"),
        # options of a run, which its set-up adds
        *("huggingface", "profiling", "emulate"),
    },
    "huggingface": {"utils", "workload", "training_plan", "executor"},
    "profiling": {"utils", "workload", "training_plan", "executor"},
    "probe": {"utils", "network", "executor"},
    "emulate": {
        *("utils", "network", "workload", "search", "training_plan", "simulator", "executor"),
    },
    "exports": {
        "utils",
        "network",
        "workload",
        "problems",
        "training_plan",
        "simulator",
        "lp",
        "planning",
    },
    "report": {"utils", "network", "workload", "training_plan", "simulator", "checker"},
    "cli": None,
    "bench": None,
}
"""Packages that a package's files may import; None: all."""


def module_of(path: Path) -> str:
    """Dotted name of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in MODULES}


GRAPH = {name: imports_of(path) for name, path in MODULES.items()}


@pytest.mark.parametrize("name", [name for name in MODULES if name.count(".") > 1])
def test_imports_follow_the_arrows(name: str) -> None:
    """A package imports only those that it may import."""
    package = name.split(".")[1]
    allowed = MAY_IMPORT[package]
    if allowed is not None:
        used = {target.split(".")[1] for target in GRAPH[name] if "." in target}
        assert used - {package} <= allowed, f"{name} imports {sorted(used - {package} - allowed)}"


CORE = ("runtime", "comm", "rendezvous", "fault_tolerance", "transport", "checkpoint", "data")
"""Rooms of the executor that carry out a plan as it was planned."""


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[1:2] == ["executor"]])
def test_the_executors_core_imports_no_option(name: str) -> None:
    """Elastic membership, stochastic wiring, simulated compute and the rest plug into it."""
    core = tuple(f"planner.executor.{package}" for package in CORE)
    if not name.startswith(core):
        return
    packages = ["huggingface", "profiling", "emulate", "swarm"]
    packages += [f"executor.{package}" for package in ("elastic", "swarm", "launch")]
    optional = tuple(f"planner.{package}" for package in packages)
    wrong = [target for target in GRAPH[name] if target.startswith(optional)]
    assert wrong == []


def test_simulated_compute_plugs_in() -> None:
    """The command of a rank alone knows the emulation, and passes what computes instead."""
    executor = [name for name in MODULES if name.startswith("planner.executor")]
    assert [
        name
        for name in executor
        if any(target.startswith("planner.emulate") for target in GRAPH[name])
    ] == ["planner.executor.__main__"]


def test_folders_of_the_executor_import_in_one_direction() -> None:
    """None imports another that imports it, by whatever way; connections and store import none."""
    folders: networkx.DiGraph[str] = networkx.DiGraph()
    for name, targets in GRAPH.items():
        for target in targets:
            ends = [module.split(".")[2:3] for module in (name, target)]
            if name.startswith("planner.executor.") and target.startswith("planner.executor."):
                folders.add_edge(*(end[0] for end in ends))
    folders.remove_edges_from(networkx.selfloop_edges(folders))
    assert [c for c in networkx.strongly_connected_components(folders) if len(c) > 1] == []
    assert list(folders.successors("transport")) == []


@pytest.mark.parametrize("name", [n for n in MODULES if n.startswith("planner.executor.comm.")])
def test_communication_does_not_know_the_step(name: str) -> None:
    """What a rank sends and receives is below what it computes."""
    assert not [target for target in GRAPH[name] if target.startswith("planner.executor.runtime")]


def test_executor_takes_timeline_router_and_moves_alone() -> None:
    """It carries out plans; what they cost is none of its business."""
    used = set().union(*(GRAPH[name] for name in MODULES if name.startswith("planner.executor")))
    assert {name for name in used if name.startswith("planner.simulator")} == {
        "planner.simulator.timeline"
    }
    # and the router and the policies, which the simulators have too
    assert {name for name in used if name.startswith("planner.swarm")} == {
        "planner.swarm.routing",
        "planner.swarm.rebalance_policy",
    }


def test_the_router_stands_alone() -> None:
    """So that executor and simulators use the same one."""
    assert GRAPH["planner.swarm.routing"] == set()
    heavy = HEAVY | {"numpy"}
    assert loaded_by("import planner.swarm.routing") & heavy == set()


def test_every_room_is_named() -> None:
    """What lies in the package is a package of the list."""
    packages = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert packages == set(MAY_IMPORT)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_no_circles_between_files() -> None:
    """Also none that a late import would hide."""
    graph = networkx.DiGraph(
        [(a, b) for a, targets in GRAPH.items() for b in targets if a != "planner"]
    )
    # a package's face imports its files, which do not import the face
    circles = [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert circles == []


def test_no_module_has_the_name_of_a_public_function() -> None:
    """``import planner.plan`` must not shadow ``planner.plan``."""
    names = {name.split(".")[-1] for name in MODULES if "." in name}
    assert names & set(planner.__all__) == set()


def test_every_public_name_is_there() -> None:
    """And ``dir`` lists them."""
    for name in planner.__all__:
        assert getattr(planner, name) is not None
    assert set(dir(planner)) == set(planner.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = planner.nonsense


def loaded_by(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after ``code``."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys\nprint(*{{m.split('.')[0] for m in sys.modules}})",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


HEAVY = {"scipy", "networkx", "numba", "ortools", "pulp", "deap", "torch", "matplotlib", "pandas"}


def test_import_loads_numpy_alone() -> None:
    """Also where networks, problems, plans, simulator and checker are used."""
    assert loaded_by("import planner") & (HEAVY | {"numpy"}) == set()
    used = (
        "import planner as pl; pl.load_network('aws8_dtfm_worldwide_2022'); pl.Cluster; "
        "pl.AssignmentProblem; pl.PathProblem; pl.load_plan; pl.simulate; pl.check; pl.MaxRuntime"
    )
    assert loaded_by(used) & HEAVY == set()


def test_the_command_line_begins_without_torch() -> None:
    """It is there for those who run plans, and takes a second to load."""
    assert "torch" not in loaded_by("import planner.cli.main")


def test_executor_needs_numpy_and_torch_only() -> None:
    """A GPU node has nothing else."""
    assert loaded_by("import planner.executor.__main__") & (HEAVY - {"torch"}) == set()
