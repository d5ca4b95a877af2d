"""Targets of fuzzing: every file format that is read, command lines, and Python calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.fuzz.errors import is_ours
from benchmarks.fuzz.mutations import (
    NUMBER,
    OBJECTS,
    Random,
    damaged_json,
    damaged_object,
    damaged_table,
    damaged_text,
)
from planner.checker.violation import Violation

Attempt = Callable[[Random], object]
SURVIVORS = 50


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes
    ----------
    prepare
        Makes good inputs in a folder; what it returns damages one and hands it in.
    """

    prepare: Callable[[Path], Attempt]


class RefusedError(ValueError):
    """A command said no, with its exit code, or the checker found something."""


def _file(path: Path, text: str, take: Callable[[Path], object], structure: str) -> Attempt:
    """Half of all as damaged text, half with a value damaged."""
    good = json.loads(text) if structure == "json" else None

    def attempt(random: Random) -> object:
        if random.random() < 0.5:
            path.write_bytes(damaged_text(text, random))
        elif structure == "json":
            path.write_text(json.dumps(damaged_json(good, random)))
        else:
            path.write_text(damaged_table(text, random))
        return take(path)

    return attempt


PLANS: tuple[dict[str, Any], ...] = (
    {"stages": 2, "pipelines": 2},
    {"stages": 2, "pipelines": 2, "codec": "int8", "sync_every": 3},
    {"stages": 2, "wiring": "stochastic", "clip": 1.0},
    {"path_stages": 2, "stage_sizes": (1, 2, 1)},
    {},
)
"""What is asked for; plans have more of their parts so."""


def _plan_texts(folder: Path) -> list[str]:
    """Plans' files."""
    import planner as pl

    network = pl.load_network("aws4_dtfm_regional_2022")
    workload = pl.Workload.preset("gpt2-tiny").replace(batch_samples=8)
    cluster = pl.Cluster(network, pl.Devices.of_gpu("A100"))
    texts = []
    for asked in PLANS:
        made = pl.plan(cluster, workload, stop=pl.MaxIterations(1), **asked).plan
        assert made is not None
        pl.save_plan(made, folder / "good.json")
        texts.append((folder / "good.json").read_text())
    return texts


def _some_of(attempts: list[Attempt]) -> Attempt:
    return lambda random: attempts[int(random.integers(len(attempts)))](random)


def _plan(folder: Path) -> Attempt:
    import planner as pl

    path = folder / "plan.json"
    return _some_of([_file(path, text, pl.load_plan, "json") for text in _plan_texts(folder)])


def _plan_rehashed(folder: Path) -> Attempt:
    """As if whoever changed it had written the right hashes; then checked and simulated."""
    import planner as pl

    path = folder / "plan.json"

    def take(data: object) -> object:
        path.write_text(json.dumps(data))
        with mock.patch("planner.training_plan.file.require_hash"):
            plan = pl.load_plan(path)
        found = pl.check(plan, plan.cluster)
        pl.simulate(plan, plan.cluster, plan.workload)
        return found

    def damaging(good: object) -> Attempt:
        take(good)  # what it compiles is no input's time
        return lambda random: take(damaged_json(good, random))

    return _some_of([damaging(json.loads(text)) for text in _plan_texts(folder)])


def _network_csv(folder: Path) -> Attempt:
    import planner as pl

    path = folder / "net.csv"
    pl.load_network("aws4_dtfm_regional_2022").save(path)
    return _file(path, path.read_text(), lambda p: pl.load_network(p).content_hash, "csv")


def _network_json(folder: Path) -> Attempt:
    import planner as pl

    path = folder / "net.json"
    pl.load_network("aws4_dtfm_regional_2022").save(path)
    return _file(path, path.read_text(), lambda p: pl.load_network(p).content_hash, "json")


def _hf_config(folder: Path) -> Attempt:
    import planner as pl
    from benchmarks.fuzz.configs import good_configs

    def take(path: Path) -> object:
        # what is priced is written into plans, and read again
        found = pl.Workload.from_hf_config(path)
        return pl.Workload.from_dict(json.loads(json.dumps(found.to_dict())))

    attempts = [
        _file(folder / f"{k}.json", json.dumps(config), take, "json")
        for k, config in enumerate(good_configs())
    ]
    return _some_of(attempts)


def _calibration(folder: Path) -> Attempt:
    import planner as pl

    device = {"layers": [0, 6], "forward_s": 0.01, "backward_s": 0.02, "head_s": 0.001}
    good = {
        "format": "planner.calibration",
        "schema_version": 1,
        "date": "2026-01-02",
        "software": {"cores": 2, "threads_per_rank": 1},
        "workload": "gpt2-tiny",
        "microbatch_samples": 1,
        "devices": {
            name: device
            | {"forward_per_layer_s": 0.002, "backward_per_layer_s": 0.003, "update_s": 0.01}
            for name in ("a", "b")
        },
        "link_latency_s": 1e-4,
        "link_bandwidth_bytes_per_s": 1e9,
    }
    return _file(folder / "times.json", json.dumps(good), pl.Calibration.load, "json")


def _devices(folder: Path) -> Attempt:
    import planner as pl

    text = (
        "name,count,gpu,memory_gb,tflops,upload_mbps,download_mbps,site,site_upload_mbps,"
        "site_download_mbps,can_compute,can_aggregate,usd_per_hour,interface,"
        "peak_tflops\nOregon,4,A100,,,,,,,,,,1.3,eth1,\n"
        "Virginia,2,T4,15,,900,900,office,1000,1000,,,0.4,,60\n"
    )
    network = pl.load_network("aws8_dtfm_worldwide_2022")
    inside = pl.Link(0.005, 2.5e8)
    return _file(
        folder / "devices.csv", text, lambda p: pl.load_devices(p, network, inside=inside), "csv"
    )


def _peers(folder: Path) -> Attempt:
    import planner as pl
    from planner.problems.peers_file import load_peers

    text = (
        "name,samples_per_s,upload_mbps,download_mbps,can_compute,can_aggregate\n"
        "lab,2,200,200,yes,yes\nhome,1,50,400,yes,no\nserver,0,2500,2500,no,yes\n"
    )

    def take(path: Path) -> object:
        problem = load_peers(path).problem(64, 1e8, None, False)
        return pl.check(pl.solve_averaging(problem), problem)

    return _file(folder / "peers.csv", text, take, "csv")


def _probe_log(folder: Path) -> Attempt:
    import planner as pl
    from planner.network.probe_log import ALL, FORMAT, LinkFinding

    rates, trips = {1: (1e6, 9e5, 2e6), 2: (1e6, 1e6, 1e6)}, (0.01, 0.02, 0.03)
    lines = [json.dumps({"format": FORMAT, "schema_version": 1, "devices": ["a", "b"]})]
    for ends, back in ((("a", "b"), trips), (("b", "a"), trips), (("a", ALL), None)):
        lines.append(LinkFinding(*ends, "2026-01-02", rates, back, {1024: 0.1}, 1).to_line())
    text = "\n".join(lines) + "\n"
    return _file(folder / "log.jsonl", text, lambda p: pl.load_network(p).content_hash, "csv")


def _measured(folder: Path) -> Attempt:
    """Tables, iperf3's and nccl-tests' files, with a name for a host."""
    from planner.network.measured.reading import read_measured

    part = {"bits_per_second": 1e9}
    run = {
        "start": {
            "connected": [{"local_host": "10.0.0.1", "remote_host": "10.0.0.2"}] * 2,
            "system_info": "Linux a 6.1",
            "connecting_to": {"host": "b"},
            "test_start": {"protocol": "TCP", "num_streams": 1, "reverse": 0},
        },
        "end": {"sum_received": part, "sum_received_bidir_reverse": part},
    }
    ranks = "".join(
        f"#  Rank  {k} Group  0 Pid 1 on {h} device 0 [0] A100\n" for k, h in enumerate("ab")
    )
    row = "  {}  2  float  sum  -1  {}  0.1  0.2  0  30.0  0.1  0.2  0\n"
    columns = f"#  size  count  type  redop  root {2 * '  time  algbw  busbw  #wrong'}\n"
    footer = "# Out of bounds values : 0 OK\n"
    nccl = ranks + columns + row.format(8, 30.0) + row.format(2**27, 40.0) + footer

    def take(path: Path) -> object:
        made = read_measured([path], names={"a": "x"}, latency_s=0.1, bandwidth_bytes_per_s=1e6)
        return made.network.content_hash

    attempts = [
        _file(folder / "pairs.csv", "source,destination,rtt_ms\na,b,1\nb,a,2\n", take, "csv"),
        _file(folder / "matrix.csv", "bandwidth_mbps,a,b\na,,1\nb,2,\n", take, "csv"),
        _file(folder / "run.json", json.dumps(run), take, "json"),
        _file(folder / "nccl.txt", nccl, take, "csv"),
    ]
    return _some_of(attempts)


def _paths(folder: Path) -> Attempt:
    import planner as pl
    from planner.problems.path_file import load_path_file

    good = {
        "transfer_s": [[0 if i == j else 1 + i + j for j in range(4)] for i in range(4)],
        "stage_devices": [[0, 1], [2], [3]],
        "forward_s": 1.0,
        "backward_s": 2.0,
        "head_s": 0.5,
        "path_stages": 2,
        "memory": 4,
        "microbatches_per_start": 1,
        "max_swaps": 1,
    }

    def take(path: Path) -> object:
        problem = load_path_file(path).problem()
        return pl.check(pl.solve_paths(problem, pl.MaxIterations(1)), problem)

    (folder / "good.json").write_text(json.dumps(good))
    take(folder / "good.json")  # what it compiles is no input's time
    return _file(folder / "paths.json", json.dumps(good), take, "json")


COMMANDS = (
    (
        "plan",
        "--network {net}",
        "--workload gpt2-tiny",
        "--effort 0.01",
        "--batch-samples 8",
        "--no-compare",
        "--out {folder}/made.json",
    ),
    (
        "plan",
        "--network {net}",
        "--workload gpt2-tiny",
        "--stages 2",
        "--batch-samples 8",
        "--no-compare",
        "--effort 0.01",
    ),
    (
        "assign",
        "--network {net}",
        "--stages 2",
        "--pipelines 2",
        "--activation-bytes 1e6",
        "--gradient-bytes 1e6",
        "--effort 0.01",
    ),
    ("average", "{peers}", "--batch-samples 64", "--gradient-bytes 1e8"),
    ("paths", "{paths}", "--effort 0.01"),
    ("check", "{plan}"),
    ("simulate", "{plan}", "--schedule 0"),
    ("compare", "{plan}", "{plan}"),
    ("export", "{plan}", "--to ranks", "--port 29500", "--pipeline 0"),
    ("networks", "{net}", "--latency-ms 1", "--bandwidth-gbps 1"),
    ("networks",),
)
WORDS = (
    *NUMBER,
    "-1",
    "1e9",
    "10000000000000000000",
    "--json",
    "--stages",
    "--help",
    "auto",
    "/dev/null",
    ".",
    "--stage-sizes 0",
    "--full-every 99999999999999999999",
    "--path-stages 2",
    "--recompute 0,9",
    "--wiring flow",
    "--averaging adaptive",
    "--sync-every 0",
    "--in-flight 0",
    "--clip nan",
    "--devices-per-region 0",
    "--microbatch-samples 3",
    "--sequence 0",
    "--seconds 0",
    "--stage-layers 1,2",
)


def _command_lines(folder: Path) -> Attempt:
    import planner as pl
    from planner.cli.main import main

    net, plan = folder / "net.csv", folder / "plan.json"
    pl.load_network("aws4_dtfm_regional_2022").save(net)
    plan.write_text(_plan_texts(folder)[0])
    _peers(folder)
    (folder / "peers.csv").write_text(
        "name,samples_per_s,upload_mbps,download_mbps\nlab,2,200,200\nhome,1,50,400\n"
    )
    (folder / "paths.json").write_text(
        json.dumps(
            {
                "transfer_s": [[0, 1], [1, 0]],
                "stage_devices": [[0], [1]],
                "forward_s": 1,
                "backward_s": 1,
                "head_s": 1,
                "path_stages": 2,
                "memory": 2,
                "microbatches_per_start": 1,
            }
        )
    )
    known = {
        "net": str(net),
        "plan": str(plan),
        "peers": str(folder / "peers.csv"),
        "paths": str(folder / "paths.json"),
        "folder": str(folder),
    }

    for command in COMMANDS:  # what they compile is no input's time
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            main(" ".join(command).format(**known).split(" "))

    def attempt(random: Random) -> object:
        command = COMMANDS[int(random.integers(len(COMMANDS)))]
        words = " ".join(command).format(**known).split(" ")
        for _ in range(int(random.integers(1, 3))):
            k = int(random.integers(1, len(words) + 1))
            other = WORDS[int(random.integers(len(WORDS)))].split(" ")
            words[k : k + (1 if random.random() < 0.6 else 0)] = other
        try:
            code = main(words)
        except SystemExit as error:
            code = int(error.code or 0)
        if code == 2:
            raise RefusedError(" ".join(words))
        if code not in (0, 1):
            raise RuntimeError(f"exit code {code}: {' '.join(words)}")
        return code

    return attempt


def _calls(folder: Path) -> Attempt:
    """Public functions with one or two arguments that are something else."""
    import planner as pl

    eye = np.eye(4, dtype=bool)
    latency, bandwidth = np.where(eye, 0.0, 0.05), np.where(eye, np.inf, 1e8)
    network = pl.Network(latency, np.where(eye, 1.0, 1e8), ["a", "b", "c", "d"])
    cluster = pl.Cluster(network, pl.Devices(1e12, 16e9))
    work = pl.Workload.preset("gpt2-tiny").replace(batch_samples=8)
    plan = pl.load_plan(_written(folder, _plan_texts(folder)[0]))
    assign = pl.AssignmentProblem(network, 2, 2, 1e6, 1e6)
    effort = pl.MaxIterations(1)
    path = pl.PathProblem(np.ones((2, 2)), [[0], [1]], 1.0, 1.0, 1.0, 2, 2, 1)
    averaging = pl.AveragingProblem([1.0, 2.0], [1e6, 2e6], [1e6, 2e6], 8, 1e6)

    def checked_assignment(groups: Any, grid: Any) -> object:
        return pl.check(pl.AssignmentPlan(groups, grid), assign)

    def checked_paths(paths: Any, ops: Any) -> object:
        return pl.check(pl.PathPlan(paths, ops), path)

    def checked_averaging(computes: Any, rates: Any, steps_per_s: Any, samples: Any) -> object:
        return pl.check(pl.AveragingPlan(computes, rates, steps_per_s, samples), averaging)

    calls: tuple[tuple[Callable[..., object], dict[str, Any]], ...] = (
        (
            pl.Network,
            {
                "latency_s": latency,
                "bandwidth_bytes_per_s": bandwidth,
                "ids": list("abcd"),
                "regions": list("aabb"),
            },
        ),
        (
            network.replicate,
            {
                "counts": {"a": 2, "b": 1},
                "intra_latency_s": 0.001,
                "intra_bandwidth_bytes_per_s": 1e9,
            },
        ),
        (network.subset, {"devices": [0, 1]}),
        (network.transfer_s, {"message_bytes": 100.0}),
        (
            pl.Devices,
            {
                "flops": 1e12,
                "memory_bytes": 16e9,
                "upload_bytes_per_s": 1e8,
                "download_bytes_per_s": [1e8] * 4,
                "usd_per_hour": 1.0,
                "peak_flops": 2e12,
            },
        ),
        (pl.Devices.of_gpu, {"name": "A100", "utilization": 0.4}),
        (pl.Cluster, {"network": network, "devices": pl.Devices(1e12, 16e9)}),
        (pl.Workload.preset, {"name": "gpt2-tiny", "batch_samples": 8, "microbatch_samples": 1}),
        (work.replace, {"batch_samples": 8, "microbatch_samples": 2}),
        (
            pl.AssignmentProblem,
            {
                "network": network,
                "stages": 2,
                "pipelines": 2,
                "activation_bytes": 1e6,
                "gradient_bytes": 1e6,
            },
        ),
        (pl.solve_assignment, {"problem": assign, "stop": effort, "seed": 0, "method": "auto"}),
        (
            pl.AveragingProblem,
            {
                "samples_per_s": [1.0, 2.0],
                "upload_bytes_per_s": [1e6, 2e6],
                "download_bytes_per_s": [1e6, 2e6],
                "batch_size": 8,
                "gradient_bytes": 1e6,
                "can_compute": [True, True],
            },
        ),
        (
            pl.PathProblem,
            {
                "transfer_s": np.ones((3, 3)),
                "stage_devices": [[0], [1], [2]],
                "forward_s": 1.0,
                "backward_s": 1.0,
                "head_s": 1.0,
                "path_stages": 2,
                "memory": 2,
                "microbatches_per_start": 1,
            },
        ),
        (pl.bottleneck_assignment, {"cost": np.arange(6.0).reshape(2, 3)}),
        (pl.open_path, {"cost": np.arange(9.0).reshape(3, 3), "stop": effort}),
        (pl.optimal_group_size, {"peers": 10, "failure_probability": 0.1}),
        (
            pl.PlanRequest,
            {
                "stages": 2,
                "pipelines": 2,
                "averaging": "equal",
                "in_flight": 4,
                "sync_every": 2,
                "clip": 1.0,
                "recompute": "none",
                "codec": "int8",
                "hour_usd": 1.0,
                "objective": "cost",
                "path_stages": None,
                "group_size": 2,
            },
        ),
        (pl.plan, {"cluster": cluster, "workload": work, "stop": effort, "seed": 0, "stages": 2}),
        (pl.check, {"plan": plan, "problem_or_cluster": plan.cluster}),
        (
            pl.simulate,
            {
                "plan": plan,
                "cluster": plan.cluster,
                "workload": plan.workload,
                "schedule": 0,
                "links": "queued",
                "cores": 2,
            },
        ),
        (pl.simulate_cycle, {"plan": plan, "links": "unlimited", "cores": 1}),
        (checked_assignment, {"groups": ((0, 1), (2, 3)), "grid": None}),
        (checked_paths, {"paths": ((0, 1),), "ops": ()}),
        (
            checked_averaging,
            {"computes": [True, True], "rates": [1.0, 1.0], "steps_per_s": 0.1, "samples": [4, 4]},
        ),
        (pl.MaxRuntime, {"max_runtime_s": 1.0}),
        (pl.MaxIterations, {"max_iterations": 1}),
        (pl.TargetGap, {"gap": 0.1}),
        (pl.NoImprovement, {"max_iterations": 3}),
        (pl.Effort, {"units": 0.01}),
        (pl.AnyOf, {"first": effort, "second": effort}),
        (
            pl.Prices,
            {"between_regions": 0.02, "between_providers": 0.09, "rules": (("a", "b", 0.1),)},
        ),
        (pl.load_network, {"name_or_path": "aws4_dtfm_regional_2022"}),
        (pl.load_plan, {"path": folder / "written.json"}),
        (pl.export_plan, {"plan": plan, "to": "ranks"}),
    )

    def attempt(random: Random) -> object:
        function, fields = calls[int(random.integers(len(calls)))]
        options = dict(fields)
        for _ in range(int(random.integers(1, 3))):
            name = list(options)[int(random.integers(len(options)))]
            options[name] = OBJECTS[int(random.integers(len(OBJECTS)))]
        if function is pl.AnyOf:
            return pl.AnyOf(*options.values())
        return _call(function, options)

    return attempt


def _objects(folder: Path) -> Attempt:
    """Plans, parts of plans and results, as a solver of somebody else's may make them."""
    import planner as pl
    from planner.exports.formats import FORMATS
    from planner.report.page import report_html

    wholes = [pl.load_plan(_written(folder, text)) for text in _plan_texts(folder)]
    network = wholes[0].cluster.network
    problems: tuple[tuple[Callable[..., Any], Any], ...] = (
        (pl.solve_assignment, pl.AssignmentProblem(network, 2, 2, 1e6, 1e6)),
        (pl.solve_averaging, pl.AveragingProblem([1.0, 2.0], [1e6, 2e6], [1e6, 2e6], 8, 1e6)),
        (pl.solve_paths, pl.PathProblem(np.ones((2, 2)), [[0], [1]], 1.0, 1.0, 1.0, 2, 2, 1)),
    )
    results = [(solve(problem, stop=pl.MaxIterations(1)), problem) for solve, problem in problems]
    uses: tuple[Callable[[Any], object], ...] = (
        lambda plan: _require_none(pl.check(plan)),
        pl.simulate,
        pl.simulate_cycle,
        repr,
        lambda plan: plan._repr_html_(),
        report_html,
        lambda plan: pl.save_plan(plan, folder / "object.json"),
        *(partial(pl.export_plan, to=to) for to in FORMATS),
        lambda plan: plan in wholes,
        hash,
    )
    can = [
        (valid_input, [use for use in uses if _taken(use, valid_input)]) for valid_input in wholes
    ]

    def attempt(random: Random) -> object:
        if random.random() < 0.7:
            valid_input, known = can[int(random.integers(len(can)))]
            damaged = _survivor(valid_input, random)
            _every(known, damaged)
            return damaged
        result, problem = results[int(random.integers(len(results)))]
        answer = result if random.random() < 0.5 else result.plan
        _require_none(pl.check(damaged_object(answer, random), problem))
        return answer

    return attempt


def _require_none(violations: list[Violation]) -> None:
    if violations:
        raise RefusedError(str(violations[0]))


def _survivor(good: Any, random: Random) -> Any:
    """Damaged, and not refused by a constructor, if there is such among so many."""
    refused: Exception | None = None
    for _ in range(SURVIVORS):
        try:
            return damaged_object(good, random)
        except (ValueError, TypeError) as error:
            if not is_ours(error):
                raise
            refused = error
    assert refused is not None
    raise refused


def _taken(use: Callable[[Any], object], good: Any) -> bool:
    """Whether a format can express it at all, such as a plan whose devices route."""
    try:
        use(good)
    except ValueError:
        return False
    return True


def _every(uses: list[Callable[[Any], object]], subject: Any) -> None:
    """Refused if one refuses."""
    refused: Exception | None = None
    for use in uses:
        try:
            use(subject)
        except (ValueError, TypeError) as error:
            if not is_ours(error):
                raise
            refused = error
    if refused is not None:
        raise refused


def _call(function: Callable[..., object], options: dict[str, Any]) -> object:
    """By position, since parameters' names are not the matter."""
    import inspect

    known = inspect.signature(function).parameters
    names = [n for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    keywords = {n: v for n, v in options.items() if n in known or _takes_any(known)}
    rest = [v for n, v in options.items() if n not in keywords]
    free = [n for n in names if n not in keywords]
    return function(**dict(zip(free, rest, strict=False)), **keywords)


def _takes_any(known: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in known.values())


def _written(folder: Path, text: str) -> Path:
    path = folder / "written.json"
    path.write_text(text)
    return path


TARGETS = {
    "plan": Target(_plan),
    "plan, rehashed": Target(_plan_rehashed),
    "network csv": Target(_network_csv),
    "network json": Target(_network_json),
    "hf config": Target(_hf_config),
    "calibration": Target(_calibration),
    "devices": Target(_devices),
    "probe log": Target(_probe_log),
    "measured": Target(_measured),
    "peers": Target(_peers),
    "paths": Target(_paths),
    "command lines": Target(_command_lines),
    "calls": Target(_calls),
    "objects": Target(_objects),
}
