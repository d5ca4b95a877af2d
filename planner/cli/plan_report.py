"""Output of ``planner plan``: one dictionary, printed as JSON or as text of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from planner.cli.cycle_report import cycle_data, waves_rows
from planner.cli.output import WIDTH, wrapped
from planner.cli.simulation_report import learning_notes, sync_data, timeline_data
from planner.network.cluster import Cluster
from planner.network.limit_notes import (
    long_latency,
    machine_pairs,
    unlimited_sites,
    unstated_sites,
)
from planner.planning.problem import PlanningProblem
from planner.planning.request import AUTO, Objective, PlanKind, PlanRequest
from planner.planning.straight.parallelism_candidates import ShapeRow
from planner.planning.workers import degrees
from planner.problems import ProblemError
from planner.report.figures import digits, headline, least, memory, seconds
from planner.simulator.timeline import Timeline
from planner.training_plan.averaging_group import is_hierarchical
from planner.training_plan.choices import Wiring
from planner.training_plan.model import MEAN_STEP, TrainingPlan
from planner.utils.text import counted, joined, name_ranges, number_ranges, stage_words

LABEL, LONGEST_LABEL = 16, 30
MAX_LINES = 3
"""Most lines for the device names of a stage; beyond, devices per region are printed."""
SAME = 0.005
"""Relative difference below which two step times count as equal."""
PROVEN = {"OPTIMAL": "proven optimal", "FEASIBLE": "not proven optimal"}
FASTER = {
    "everything": "no plan of its kind is faster",
    "shapes": "no placement in the shapes that were tried is faster",
    "placement": "no placement in this shape is faster",
    "paths": "no arrangement with these stage sizes and layers is faster",
}
"""Meaning of a lower bound, by what was searched."""
Row = tuple[str, str]


SEARCHED = {
    PlanKind.JOINT: "everything",
    PlanKind.STRAIGHT: "placement",
    PlanKind.PARTIAL_PATHS: "paths",
}
"""Value of ``searched`` in the JSON output, for each kind of plan."""


def plan_data(
    plan: TrainingPlan,
    timeline: Timeline,
    candidates: Sequence[ShapeRow],
    problem: PlanningProblem,
    each_device: str,
) -> dict[str, Any]:
    """Return everything that is printed of a plan, JSON-ready."""
    request, ids = problem.request, plan.cluster.network.ids
    certificates = {part: asdict(certificate) for part, certificate in plan.certificates.items()}
    busy = {d for schedule in plan.schedules for path in schedule.paths for d in path}
    data: dict[str, Any] = {
        "content_hash": plan.content_hash,
        **certificates,
        "certificates": certificates,
        "predicted": asdict(plan.predicted),
        **headline(plan),
        "workload": plan.workload.name,
        "network": plan.network_name,
        "searched": "shapes" if request.stages == "auto" else SEARCHED[request.kind],
        "devices": len(plan.cluster),
        "tensor_parallel": plan.workload.tensor_parallel,
        "gpu_counts": sorted({plan.gpu_counts[d] for d in plan.stage_of}),
        "optimizer_shards": plan.workload.optimizer_shards,
        "stages": _stages(plan),
        "averaging_only": [ids[d] for d in sorted(plan.averages_for)],
        "without_microbatches": [ids[d] for d in sorted(set(plan.stage_of) - busy)],
        "left_out": _left_out(plan, problem),
        "microbatches": len(plan.schedules[0].paths),
        "microbatch_samples": plan.workload.microbatch_samples,
        "update_s": max(plan.compute_times.update_s),
        "recompute": list(plan.recompute),
        "candidates": [asdict(candidate) | {"why": candidate.why} for candidate in candidates],
        "alternatives": [
            alternative.to_dict() | {"outcome": alternative.outcome(least(plan))}
            for alternative in plan.alternatives
        ],
        "cost": None if plan.cost is None else plan.cost.to_dict(),
        "objective": str(request.objective),
        **timeline_data(timeline, plan.cluster),
        "long_latency": long_latency(problem.full_cluster or problem.cluster),
        "unstated_sites": unstated_sites(problem.cluster),
        "unlimited_sites": unlimited_sites(problem.cluster),
        "machine_pairs": machine_pairs(problem.full_cluster or problem.cluster),
        "each_device": each_device,
        "notes": list(_notes(plan)),
    }
    if plan.sync.every_steps > 1:
        data["sync"] = sync_data(plan)
    if request.kind is PlanKind.PARTIAL_PATHS:
        data |= cycle_data(plan)
    return data


def _stages(plan: TrainingPlan) -> list[dict[str, Any]]:
    """Return layers, devices and highest memory use of each stage."""
    network, fullest = plan.cluster.network, dict[int, float]()
    for stage in memory(plan):
        j = plan.stage_of[stage.device]
        fullest[j] = max(fullest.get(j, 0.0), stage.need_bytes / stage.have_bytes)
    return [
        {
            "layers": list(layers),
            "head": j == plan.head_stage,
            "memory": fullest[j],
            "devices": [network.ids[d] for d in group],
            "regions": [network.regions[d] for d in group],
        }
        for j, (layers, group) in enumerate(
            zip(plan.stage_layers, plan.assignment.groups, strict=True)
        )
    ]


def not_tried(plan: TrainingPlan, request: PlanRequest, cluster: Cluster) -> list[str]:
    """Return options that change no training result, and that a request leaves at 1."""
    options: list[str] = []
    if request.kind is not PlanKind.JOINT:
        return options
    if request.optimizer_shards == 1 and max(map(len, plan.assignment.groups)) > 1:
        with suppress(ProblemError):  # which does not go with everything
            request.replace(optimizer_shards=AUTO)
            options.append("optimizer state in shards (--optimizer-shards auto)")
    if request.tensor_parallel == 1 and max(degrees(cluster, plan.workload)) > 1:
        with suppress(ProblemError):
            request.replace(tensor_parallel=AUTO)
            options.append("tensor parallelism (--tensor-parallel auto)")
    return options


def _left_out(plan: TrainingPlan, problem: PlanningProblem) -> list[dict[str, Any]]:
    """Group the devices that the plan does not use by the reason."""
    cluster, reasons = problem.full_cluster or problem.cluster, dict[str, list[str]]()
    smallest = min((stage.need_bytes for stage in memory(plan)), default=0.0)
    adverb = "cheaper" if problem.request.objective == "cost" else "faster"
    where = {name: d for d, name in enumerate(cluster.network.ids)}
    for name in plan.left_out:
        d = where[name]
        available = float(cluster.memory_bytes[d])
        if not np.asarray(cluster.devices.can_compute)[d]:
            why = "cannot compute, and as aggregators they would not make averaging faster"
        elif available < smallest:
            why = f"their memory, {available / 1e9:.3g} GB, does not hold a stage of this plan"
        else:
            why = f"no {adverb} plan that uses them was found"
        reasons.setdefault(why, []).append(name)
    return [{"devices": names, "why": why} for why, names in reasons.items()]


def _notes(plan: TrainingPlan) -> Iterator[str]:
    """Yield sentences that explain the plan's decisions."""
    from planner.workload.transformer import active_parameters

    arch, head = plan.workload.architecture, plan.head_stage
    if plan.must_average_tied and plan.averages_tied:
        size = plan.vector_bytes()[-1] / 1e9
        yield (
            f"Stage {head} has a copy of the embedding for its head: its {size:.3g} GB of "
            "gradients are averaged with stage 0's."
        )
    elif plan.must_average_tied:
        yield (
            f"Stage {head} has a copy of the embedding for its head. Keeping both copies equal "
            "between averagings is not priced, and the executor rejects this plan; with --head "
            "first there is no copy."
        )
    elif plan.workload.tied_parameters and head == 0 and len(plan.stage_layers) > 1:
        copies = (
            "the two would diverge" if plan.sync.local_steps else "whose gradients are averaged"
        )
        yield (
            "Stage 0 runs the head too, which shares the embedding's matrix. A head on the last "
            f"stage would need a copy of it, {copies}."
        )
    if arch is not None and arch.sequence > arch.position_rows:
        yield (
            f"Sequences of {arch.sequence:,} tokens are longer than the {arch.position_rows:,} "
            "positions that the model's configuration names."
        )
    if arch is not None and arch.experts is not None:
        yield (
            f"{plan.workload.parameters / 1e9:.4g} billion parameters are stored and averaged; a "
            f"token uses {active_parameters(arch) / 1e9:.4g} billion."
        )
    degree, counts = (
        plan.workload.tensor_parallel,
        sorted({plan.gpu_counts[d] for d in plan.stage_of}),
    )
    if counts[-1] > 1:
        yield (
            f"Each device of the plan is a worker of {_or(counts)} GPUs of a machine, which split "
            f"the stage's matrices (tensor parallelism){_gpu_links(plan)}. Bounds are for such "
            "workers."
        )
        if counts != [degree]:
            ids = plan.cluster.network.ids
            devices = {
                n: [ids[d] for d in plan.stage_of if plan.gpu_counts[d] == n] for n in counts
            }
            each = [f"{counted(n, 'GPU')}: {joined(name_ranges(devices[n]))}" for n in counts]
            yield (
                f"{'; '.join(each)}. Memory is counted as if every worker had {degree} GPUs, of "
                "which each gathers the inputs of operations."
            )
    if (shards := plan.workload.optimizer_shards) > 1:
        copies = ""
        if plan.optimizer_copies > 1:
            copies = f"; {plan.optimizer_copies} groups of each stage have all of them"
        yield (
            f"Each device holds at most 1/{shards} of its stage's fp32 parameters and moments, "
            f"updates them, and sends the parameters to the others{copies}. Bounds are for such "
            "plans."
        )
    if arch is not None and arch.unexecuted:
        yield f"For planning only; the executor does not support: {'; '.join(arch.unexecuted)}."
    if any(plan.recompute):
        stages_by_layers: dict[str, list[int]] = {}
        for j, layers in enumerate(plan.recomputed_layers):
            stages_by_layers.setdefault(layers, []).append(j)
        stages_by_layers.pop("none", None)
        recomputed = (
            f"{layers} of {'stage' if len(stages) == 1 else 'stages'} "
            f"{number_ranges(stages).replace(',', ', ')}"
            for layers, stages in stages_by_layers.items()
        )
        yield f"Layers that the backward pass recomputes: {'; '.join(recomputed)}."
    if plan.two_frequency:
        counts = sorted({len(rounds[0]) for rounds in plan.averaging})
        regions = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        yield f"Gradients are averaged within regions in every step; {regions} regions per stage."
    levels = [j for j, rounds in enumerate(plan.averaging) if is_hierarchical(rounds)]
    if levels and not plan.two_frequency:
        affected = [str(j) for j in levels if j < len(plan.stage_layers)]
        who = f"Stage {', '.join(affected)}" if affected else "Embedding and head"
        who = "Every stage" if len(levels) == len(plan.averaging) else who
        yield f"{who} averages in two levels: within sites or other groups, then between them."
    if plan.wiring is Wiring.STOCHASTIC:
        yield (
            "Devices choose paths at run time, starting from this plan's; the order of operations "
            "is not fixed, and times are predicted for the plan's own paths."
        )
    yield from learning_notes(plan)
    if "paths" in plan.certificates:
        solver_s, simulated_s = plan.certificates["paths"].objective, plan.predicted.pipeline_s
        if solver_s is None or abs(solver_s - simulated_s) > 1e-6 * simulated_s:
            yield (
                "The path solver uses the mean of both directions of a pair and does not share "
                "uplinks and downlinks, so its makespan differs from the pipeline time."
            )


def plan_lines(data: Mapping[str, Any]) -> list[str]:
    """Format `plan_data` as text, most important first."""
    sizes = [len(stage["devices"]) for stage in data["stages"]]
    shape = f"{counted(len(sizes), 'stage')} x {counted(sizes[0], 'pipeline')}"
    facts = [shape if data["searched"] in ("placement", "shapes") else stage_words(sizes)]
    out = [name for group in data["left_out"] for name in group["devices"]]
    for names, consequence in (
        (data["averaging_only"], "to average only"),
        (data["without_microbatches"], "without microbatches"),
        (out, "left out"),
    ):
        facts += [f"{len(names)} {consequence}"] * bool(names)
    where = f" on {data['network']}" if data["network"] else ""
    devices = counted(data["devices"], "device")
    if max(data["gpu_counts"]) > 1:
        devices = f"{counted(data['devices'], 'worker')} of {_or(data['gpu_counts'])} GPUs"
    title = f"{data['workload']}{where}: {devices}, {', '.join(facts)}"
    undone = [f"not {item}" for item in data["not_done"]]
    by_cost = data["objective"] == Objective.COST
    return [
        *wrapped(title),
        *_section("", _answer(data)),
        *_section("Stages", _holders(data)),
        *_section("How good the plan is", _bounds(data)),
        *_section("Comparison with simple baselines", _comparisons(data)),
        *_section("Evaluated numbers of stages and pipelines", _candidates(data)),
        *_section(
            f"Alternatives, and the {'cost' if by_cost else 'step time'} with each",
            _alternatives(data),
        ),
        *_section("Schedules", _schedules(data)),
        *_section("Notes", (("-", text) for text in data["notes"])),
        *_section("Assumptions", (("-", text) for text in _assumptions(data))),
        "",
        *(line for text in undone for line in wrapped(text)),
        *wrapped(f"wrote {', '.join(data['written'])}  (hash {data['content_hash'][:12]})"),
    ]


def _or(numbers: Sequence[int]) -> str:
    """Numbers in words."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _gpu_links(plan: TrainingPlan) -> str:
    """With what links between its GPUs the slowest worker was priced, if that is known."""
    devices = plan.cluster.devices
    rates, delays = devices.gpu_link_bytes_per_s, devices.gpu_link_latency_s
    if rates is None or delays is None:
        return ""
    # workers of one GPU have no such link
    workers = np.array(plan.gpu_counts) > 1
    rate, delay = np.asarray(rates)[workers].min(), np.asarray(delays)[workers].max()
    return (
        f" and exchange {rate / 1e9:.4g} GB/s after {delay * 1e6:.3g} us a collective, as the "
        "devices file or the GPU's model has it"
    )


def ratio(step_s: float, own_s: float) -> str:
    """Describe a step time relative to the plan's."""
    times = step_s / own_s
    if abs(times - 1) < SAME:
        return "as long as this plan"
    shown = f"{times:.2f}" if 0.1 < times < 100 else f"{times:.2g}" if times < 1 else digits(times)
    return f"{shown} times as long as this plan{' (faster)' * (times < 1)}"


def _section(title: str, rows: Iterable[Row]) -> list[str]:
    """Format a heading and aligned rows; return nothing without rows."""
    filled = [(label, text) for label, text in rows if text]
    if not filled:
        return []
    fitting = [len(label) for label, _ in filled if len(label) <= LONGEST_LABEL]
    bullets = all(label == "-" for label, _ in filled)
    width = 2 if bullets else max([LABEL, *(length + 2 for length in fitting)])
    lines = ["", title] if title else [""]
    for label, text in filled:
        if len(label) > LONGEST_LABEL:
            lines += wrapped(label)
            label = ""
        lines += wrapped(text, f"{label:<{width}}", " " * width)
    return lines


def _answer(data: Mapping[str, Any]) -> Iterator[Row]:
    predicted, tokens = data["predicted"], data["tokens_per_step"]
    samples = f"{data['samples_per_step']:,.6g} samples"
    microbatches = f"{data['microbatches']:,} microbatch{'es' * (data['microbatches'] != 1)}"
    batch = (
        f"{samples} of {data['sequence']:,} tokens, {microbatches}"
        if tokens
        else f"{samples}, {microbatches}"
    )
    amount = f"{tokens:,.0f} tokens ({batch})" if tokens else batch
    mean = " in the mean" if "sync" in data else ""
    yield "step time", f"{seconds(predicted['step_s'])}{mean} for {amount}"
    mfu = (
        "MFU not known: give gpu or peak_tflops for every device in the devices file"
        if data["mfu"] is None
        else f"MFU {100 * data['mfu']:.3g}%"
    )
    rate = "tokens not known" if not tokens else f"{data['tokens_per_s']:,.0f} tokens/s"
    yield "throughput", f"{rate}; {mfu}"
    cost = data["cost"]
    if tokens:
        usd = data["dollars"]
        price = "" if usd is None else f" and {usd:,.0f} $" if usd >= 10 else f" and {usd:.2g} $"
        yield (
            "training",
            f"{digits(data['days'], 3)} days{price} for "
            f"{data['training_tokens'] / 1e9:,.4g} billion tokens (100 a parameter)",
        )
    if cost is None:
        yield "cost", "not known: give --usd-per-hour, or usd_per_hour in the devices file"
    else:
        traffic = f"{cost['messages_usd']:.4g} $ for {cost['paid_bytes'] / 1e9:.3g} GB of traffic"
        waiting = cost["hour_usd"] * predicted["step_s"] / 3600
        worth = (
            f"; {cost['step_usd'] + waiting:.4g} $ with waiting, an hour of which is worth "
            f"{cost['hour_usd']:g} $"
        ) * bool(cost["hour_usd"])
        yield (
            "cost of a step",
            f"{cost['step_usd']:.4g} $: {cost['devices_usd']:.4g} $ for devices, {traffic}{worth}",
        )
    averaging = (
        f", and the longest averaging takes {seconds(predicted['averaging_s'])}. They overlap: a "
        "stage averages while others still compute and the next step begins"
        if predicted["averaging_s"] > 0
        else ""
    )
    update = f". Updates take {seconds(data['update_s'])} at most" if data["update_s"] > 0 else ""
    yield (
        "phases",
        f"On an idle network the pipeline takes {seconds(predicted['pipeline_s'])}"
        f"{averaging}{update}.",
    )
    if sync := data.get("sync"):
        between, without = ("", "without averaging")
        if sync["within_regions"]:
            between, without = (" between regions", "averaging within regions only")
        outer = f", then {sync['outer']}" if sync["outer"] else ""
        intervals = ", ".join(f"{h} steps {seconds(s)}" for h, s in sync["instead"].items())
        yield (
            "averaging",
            f"every {counted(sync['every_steps'], 'step')}{between}{outer}. A step takes "
            + f"{seconds(sync['step_alone_s'])} {without}, {seconds(sync['step_that_averages_s'])} "
            + f"with averaging{between}."
            + f" Step time with averaging every {intervals}." * bool(intervals),
        )
    if link := data["fullest_link"]:
        step = "a step that averages" if "sync" in data else "a step"
        yield "busiest link", f"{link['name']}: {seconds(link['busy_s'])} of messages {step}"
    device = data["busiest_device"]
    yield "busiest device", f"{device['name']}: {seconds(device['busy_s'])} of computation a step"


def _holders(data: Mapping[str, Any]) -> Iterator[Row]:
    yield "stage  layers    memory", "devices"
    for j, stage in enumerate(data["stages"]):
        start, stop = stage["layers"]
        layers = f"{start}-{stop - 1}" if stop - start > 1 else f"{start}"
        layers += "+head" * (stage["head"] and j < len(data["stages"]) - 1)
        names = ", ".join(name_ranges(stage["devices"]))
        if len(names) > MAX_LINES * (WIDTH - 24):
            regions = stage["regions"]
            names = ", ".join(f"{regions.count(r)} of {r}" for r in dict.fromkeys(regions))
        yield f"{j:<5}  {layers:<8}  {stage['memory']:>6.0%}", names
    if data["averaging_only"]:
        yield "average only", ", ".join(name_ranges(data["averaging_only"]))
    if idle := data["without_microbatches"]:
        yield "without microbatches", ", ".join(name_ranges(idle))
    for group in data["left_out"]:
        yield "left out", f"{', '.join(name_ranges(group['devices']))}: {group['why']}"


def _bounds(data: Mapping[str, Any]) -> Iterator[Row]:
    certificates = data["certificates"]
    if of_mean := certificates.get(MEAN_STEP):
        yield (
            "lower bound",
            f"{seconds(of_mean['bound'])} in the mean: no plan of its kind is faster (gap "
            f"{of_mean['gap']:.1%})",
        )
    for part, unit in (("step", "s"), ("cost", "$")):
        if (entry := certificates.get(part)) is None:
            continue
        if entry["bound"] is not None:
            bound = seconds(entry["bound"]) if unit == "s" else f"{entry['bound']:.4g} $"
            meaning = FASTER[data["searched"]]
            if unit == "$":
                meaning = meaning.replace("faster", "cheaper")
                waiting = ", waiting included" * bool((data["cost"] or {}).get("hour_usd"))
                yield "bound of cost", f"{bound}{waiting}: {meaning} (gap {entry['gap']:.1%})"
            elif of_mean is None:
                yield "lower bound", f"{bound}: {meaning} (gap {entry['gap']:.1%})"
            else:
                yield "of any one step", f"{bound} (gap {entry['gap']:.1%})"
        else:
            yield "lower bound", "none for this kind of plan"
        yield (
            "search",
            f"{entry['status']}, {PROVEN.get(entry['status'], '')}: {entry['stop_reason']}, "
            f"{entry['runtime_s']:.1f} s",
        )
    for part, label in (("assignment", "assignment cost"), ("paths", "paths")):
        if (entry := certificates.get(part)) is None:
            continue
        bound = "no bound" if entry["bound"] is None else f"bound {seconds(entry['bound'])}"
        gap = "" if entry["gap"] is None else f", gap {entry['gap']:.1%}"
        meaning = "DT-FM's, not a step time" if part == "assignment" else "makespan as placed"
        value = "none" if entry["objective"] is None else seconds(entry["objective"])
        yield (
            label,
            f"{value} ({meaning}), {bound}{gap}; {entry['status']}, {entry['stop_reason']}, "
            f"{entry['runtime_s']:.1f} s",
        )


def _comparisons(data: Mapping[str, Any]) -> Iterator[Row]:
    own, faster = data["predicted"]["step_s"], False
    for name, text, step_s in baselines(data):
        yield name, text if step_s is None else f"{seconds(step_s)}, {ratio(step_s, own)}: {text}"
        faster |= step_s is not None and step_s < own * (1 - SAME)
    if random := data.get("random"):
        mean_s, refused = random["mean_step_s"], random["refused"]
        refusals = f"; {refused} more do not fit the devices' memory" if refused else ""
        if mean_s is None or random["mean_cost_s"] is None:
            yield "random", f"none of {refused} random placements fits the devices' memory"
        else:
            cost = data.get("assignment", {}).get("objective")
            times = f" ({random['mean_cost_s'] / cost:.2f} times)" if cost else ""
            yield (
                "random",
                f"{seconds(mean_s)}, {ratio(mean_s, own)}: mean of {random['count']} random "
                f"placements; assignment cost {seconds(random['mean_cost_s'])}{times}{refusals}",
            )
    if faster and data["objective"] == "time":
        fixed = "--stages and --wiring"
        if data["searched"] == "everything":
            fixed = "what was fixed, such as --stages or --in-flight,"
        yield "", f"A faster plan exists: leave out {fixed} to search all layouts."


def baselines(data: Mapping[str, Any]) -> Iterator[tuple[str, str, float | None]]:
    """Yield name, decisions and step time of each baseline, or the reason why there is none."""
    ranks, region = data.get("ranks_by_region"), data.get("one_region")
    if ranks is not None:
        outermost = ranks["outermost"]
        parallel = f"{outermost} parallel" if outermost == "data" else outermost
        best = ranks[outermost]
        text = f"{_decisions(best)}, {parallel} outermost{_untried(ranks)}"
        yield "ranks by region", text, best["step_s"]
    elif why := data.get("ranks_by_region_refused"):
        yield "ranks by region", why, None
    if region is not None:
        text = f"{_decisions(region['plan'])}{_untried(region)}"
        yield f"{region['name']} alone", text, region["plan"]["step_s"]
    elif why := data.get("one_region_refused"):
        yield "one region alone", why, None


def _decisions(plan: Mapping[str, Any]) -> str:
    samples = plan["microbatch_samples"]
    return (
        f"{counted(plan['stages'], 'stage')} x {counted(plan['pipelines'], 'pipeline')}"
        f"{f', microbatches of {samples}' * (samples > 1)}, {plan['order']}"
        f"{', recomputing' * plan['recompute']}"
        f"{', head first' * (plan['head'] == 'first')}"
    )


def _untried(search: Mapping[str, Any]) -> str:
    count = search["tally"]["left_out"]
    return f"; {count} more {'was' if count == 1 else 'were'} not tried" if count else ""


def _candidates(data: Mapping[str, Any]) -> Iterator[Row]:
    for row in data["candidates"]:
        shape = f"{row['stages']} x {row['pipelines']}, microbatch {row['microbatch_samples']}"
        if row["step_s"] is None:
            yield shape, f"refused: {row['why']}"
        else:
            bound = "no bound" if row["bound_s"] is None else f"bound {seconds(row['bound_s'])}"
            yield shape, f"{seconds(row['step_s'])}, {bound}"


def _alternatives(data: Mapping[str, Any]) -> Iterator[Row]:
    if not data["candidates"]:  # whose table has them
        for alternative in data["alternatives"]:
            yield _change(alternative["taken"], alternative["instead"]), alternative["outcome"]
    yield "not tried", ", ".join(data.get("not_tried", ()))


def _change(chosen: str, instead: str) -> str:
    """Describe what an alternative changes in the plan, such as ``3 stages instead of 2``."""
    number, _, unit = chosen.partition(" ")
    if unit in ("stage", "stages"):
        return f"{counted(int(instead), 'stage')} instead of {number}"
    if unit == "without a stage":
        return f"all devices, none of {number} left out" if number != "1" else "all devices"
    if chosen.endswith("recomputation"):
        return "no recomputation" if instead == "none" else f"recomputation {instead}"
    if chosen.startswith("head on"):
        return f"head on {instead}"
    return "equal shares" if instead == "equal" else instead


def _schedules(data: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the schedules of a plan whose microbatches skip stages."""
    if "waves" not in data:
        return
    for schedule in data["schedules"]:
        yield (
            schedule["name"],
            f"{seconds(schedule['pipeline_s'])} pipeline in {schedule['iterations']} of "
            f"{len(data['cycle'])} iterations",
        )
    layers = data["stage_layers"]
    yield (
        "layers visited",
        f"{data['visited_layers']:.2f} of {sum(layers)} in the mean, in stages of "
        f"{', '.join(map(str, layers))}",
    )
    yield from waves_rows(data["waves"])


def _assumptions(data: Mapping[str, Any]) -> Iterator[str]:
    if data["each_device"]:
        yield f"Each device is {data['each_device']}."
    if data.get("sequence_capped"):
        yield (
            f"Samples have {data['sequence']:,} tokens, though the model has "
            f"{data['positions']:,} positions; --sequence sets another length."
        )
    yield from (f"{text}." for text in data.get("assumed_links", ()))
    hints = (
        *("utilization", "traffic_price", "assumed_limits", "tight_limits", "long_latency"),
        *("machine_pairs", "unstated_sites", "unlimited_sites"),
    )
    for hint in hints:
        if text := data[hint]:
            text = text.removeprefix("assumed: ")
            yield f"{text[:1].upper()}{text[1:]}."
