"""A plan as one self-contained HTML page.

The page loads nothing from elsewhere, and every string from input files is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from planner.checker.bound_basis import bound_bases
from planner.network.limit_notes import (
    assumed_limits,
    machine_pairs,
    unlimited_sites,
    unstated_sites,
)
from planner.report.critical import critical_path
from planner.report.drawing import placement_svg, stage_colour
from planner.report.executed_steps import Executed
from planner.report.figures import (
    StageMemory,
    digits,
    headline,
    least,
    memory,
    parameters,
    utilization,
)
from planner.report.sensitivity import MAX_PAIRS, MAX_REGIONS, MAX_SINGLE, SLOWER, Slower
from planner.simulator.simulator import predicted_timeline
from planner.simulator.timeline import COLOURS, NAMES, Op, Timeline
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.validation import contradictions
from planner.utils.html import table
from planner.utils.text import counted, name_ranges

GENERATOR = '<meta name="generator" content="planner report">'
"""Tag that identifies pages written by this command."""
MORE = (
    "planner report --sensitivity adds step times with slower links and devices; --run adds "
    "executed steps."
)
HELP = "Move: drag or arrow keys. Zoom: buttons, + and -, or the wheel after a click. Reset: 0."
FULLEST = 8
FULL = 0.8999
"""Memory use above which a bar is amber."""
HERE = Path(__file__).parent


def report_html(
    plan: TrainingPlan,
    *,
    tokens: float | None = None,
    run: Sequence[Executed] = (),
    slower: Sequence[Slower] | None = None,
) -> str:
    """Render the page.

    Parameters
    ----------
    plan
        A valid plan.
    tokens
        Tokens of the training run whose duration and cost are shown; None: 100 per parameter.
    run
        Executed steps to compare with the prediction.
    slower
        Results of `sensitivity`; None: no such section.

    Raises
    ------
    PlanError
        The plan contradicts itself or has no step time.
    """
    for problem in contradictions(plan):
        raise PlanError(problem)
    if plan.predicted.step_s <= 0:
        raise PlanError(f"predicted.step_s is {plan.predicted.step_s:g}; make the plan again")
    timeline = predicted_timeline(plan)
    critical = critical_path(timeline)
    name = plan.network_name or "a network"
    title = escape(f"{plan.workload.name} on {name}")
    data = json.dumps(timeline_data(timeline, critical, plan), allow_nan=False, ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        data = data.replace(char, f"\\u{ord(char):04x}")
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            GENERATOR,
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            f"<title>{title}</title><style>{(HERE / 'page.css').read_text()}</style></head><body>",
            f"<h1>{title}</h1>",
            _note(f"plan {plan.content_hash[:12]}, made with planner {plan.package_version}"),
            _head(plan, tokens),
            _section("Comparison with baselines", _comparison(plan)),
            _section("Placement", _picture(plan, timeline), _note(_placement_note(plan))),
            _section("Stages", _stages(plan)),
            _section("Memory", _memory(plan)),
            _section("Timeline of a step on an idle system", _timeline(timeline, critical)),
            _section("Busiest links", _links(plan, timeline)),
            _section("Lower bounds", _bounds(plan)),
            _section("Alternatives", _alternatives(plan)),
            _section("Averaging and message encodings", _sync(plan)),
            _section("Cost", _cost(plan)),
            "" if slower is None else _section("Sensitivity", _sensitivity(plan, slower)),
            _section("Predicted and executed", _executed(plan, run)) if run else "",
            _note(MORE),
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{(HERE / 'page.js').read_text()}</script></body></html>\n",
        ]
    )


def timeline_data(
    timeline: Timeline, critical: Sequence[Any], plan: TrainingPlan
) -> dict[str, Any]:
    """Return what the page's script draws.

    Each operation is ``[start_s, end_s, kind, microbatch, critical]``. Devices are ordered by
    stage, those without a stage last.
    """
    marked = {op for op in critical if isinstance(op, Op)}
    rows: list[list[list[Any]]] = [[] for _ in timeline.ids]
    events = sorted((*timeline.ops, *timeline.closing), key=lambda op: (op.end_s, op.start_s))
    for op in events:
        row = [op.start_s, op.end_s, op.kind, op.microbatch, int(op in marked)]
        rows[op.device].append(row)
    stage_of, stages, idle = plan.stage_of, len(plan.stage_layers), timeline.idle()
    return {
        "end_s": max((op.end_s for op in events), default=0.0),
        "colours": COLOURS,
        "names": NAMES,
        "help": HELP,
        "stages": [stage_colour(j, stages) for j in range(stages)],
        "devices": [
            {"name": timeline.ids[d], "stage": stage_of.get(d), "idle": idle[d], "ops": rows[d]}
            for d in sorted(range(len(rows)), key=lambda d: (stage_of.get(d, stages), d))
        ],
    }


def _head(plan: TrainingPlan, tokens: float | None) -> str:
    figures = headline(plan, tokens)
    rate, used, took, price = (figures[k] for k in ("tokens_per_s", "mfu", "days", "dollars"))
    batch = f"{figures['samples_per_step']:,.6g} samples"
    if figures["sequence"]:
        batch = f"{figures['tokens_per_step']:,.0f} tokens: {batch} of {figures['sequence']:,}"
    amount = f"{figures['training_tokens'] / 1e9:,.4g} billion tokens"
    amount += f", {price:,.0f} $" if price is not None else "; prices not known"
    cells = [
        ("step time", f"{digits(figures['step_s'])} s", batch),
        ("tokens/s", "not known" if rate is None else f"{rate:,.0f}", ""),
        ("MFU", "not known" if used is None else f"{used:.1%}", "of the devices' peak FLOP/s"),
        ("training", "not known" if took is None else f"{digits(took, 3)} days", amount),
    ]
    inner = "".join(
        f'<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd><dd class="more">{escape(c)}</dd></div>'
        for a, b, c in cells
    )
    return f'<dl class="head">{inner}</dl>' + _note(
        f"Devices compute {utilization(plan):.1%} of the time, at the FLOP/s that they attain in "
        "training: 40% of a GPU's peak unless stated otherwise."
    )


def _comparison(plan: TrainingPlan) -> str:
    """Render step times of this plan, its lower bound and the baselines as bars."""
    step_s, step = plan.predicted.step_s, plan.step_certificate
    rows: list[tuple[str, float, str]] = [("this plan", step_s, "")]
    if step is not None and step.bound is not None:
        text = f"no plan of this kind is faster: gap {step.gap:.1%}"
        rows.insert(0, ("lower bound", step.bound, text))
    rows += [(x.taken, x.value, x.instead) for x in plan.baselines if x.value is not None]
    slowest = max(seconds for _, seconds, _ in rows)
    cells = [
        [
            escape(name),
            f"{digits(seconds)} s",
            f"{seconds / step_s:.2f}",
            f'<span class="bar" style="width:{max(100 * seconds / slowest, 1):.0f}%"></span>'
            f'<span class="note">{escape(text)}</span>',
        ]
        for name, seconds, text in rows
    ]
    why = "".join(_note(f"{x.taken}: {x.why}") for x in plan.baselines if x.value is None)
    if not plan.baselines:
        why = _note(
            "Not compared with baselines: the plan was made with --no-compare or by an older "
            "release."
        )
    return table(["plan", "step time", "relative to this plan", ""], cells) + why


def _picture(plan: TrainingPlan, timeline: Timeline) -> str:
    """Render the placement in a container that scrolls on narrow screens."""
    return f'<div class="wide" tabindex="0">{placement_svg(plan, timeline)}</div>'


def _placement_note(plan: TrainingPlan) -> str:
    out = f"left out: {', '.join(name_ranges(plan.left_out))}" if plan.left_out else ""
    sentences = [
        "Regions are laid out by latency and devices coloured by stage. Lines mark the busiest "
        "pairs, rings the devices with the busiest uplinks or downlinks",
        out,
        *(
            hint(plan.cluster)
            for hint in (assumed_limits, machine_pairs, unstated_sites, unlimited_sites)
        ),
    ]
    return " ".join(f"{text[:1].upper()}{text[1:]}." for text in sentences if text)


def _stages(plan: TrainingPlan) -> str:
    ids, counts = plan.cluster.network.ids, parameters(plan)
    rows = []
    for j, ((start, stop), group) in enumerate(
        zip(plan.stage_layers, plan.assignment.groups, strict=True)
    ):
        colour = stage_colour(j, len(plan.stage_layers))
        first = f'<span class="key" style="background:{colour}"></span>{j}'
        suffix = " + head" if j == plan.head_stage else ""
        cells = [
            f"{start} to {stop - 1}{suffix}",
            f"{counts[j] / 1e6:,.1f}",
            plan.recomputed_layers[j],
        ]
        rows.append([first, *map(escape, cells), _names(name_ranges(ids[d] for d in group))])
    stages = table(["stage", "layers", "million parameters", "recomputed layers", "devices"], rows)
    if not plan.shards_optimizer:
        return stages
    return stages + _note(
        f"Each device holds at most 1/{plan.workload.optimizer_shards} of its stage's fp32 "
        "parameters and moments, updates them, and sends the parameters to the others."
    )


def _memory(plan: TrainingPlan) -> str:
    """Render one row per stage, with a bar for its fullest device."""
    ids, by_stage = plan.cluster.network.ids, dict[int, list[StageMemory]]()
    for m in memory(plan):
        by_stage.setdefault(plan.stage_of[m.device], []).append(m)
    rows = []
    for stage, mine in sorted(by_stage.items()):
        fullest = max(mine, key=lambda m: m.need_bytes / m.have_bytes)
        fraction = fullest.need_bytes / fullest.have_bytes
        bar = (
            f'<meter min="0" max="1" low="0" optimum="0" high="{FULL}" value="{fraction:.4f}">'
            f"</meter> {fraction:.0%}"
        )
        rows.append(
            [
                str(stage),
                _range([m.live for m in mine], "d"),
                _range([m.need_bytes / 1e9 for m in mine], ".1f"),
                _range([m.have_bytes / 1e9 for m in mine], ".1f"),
                bar,
                _names(name_ranges(ids[m.device] for m in mine)),
            ]
        )
    heads = ["stage", "microbatches held", "needs GB", "has GB", "fullest device", "devices"]
    return table(heads, rows)


def _range(values: Sequence[float], spec: str) -> str:
    """Format lowest and highest value, or the common one."""
    low, high = format(min(values), spec), format(max(values), spec)
    return low if low == high else f"{low} to {high}"


def _names(devices: Sequence[str]) -> str:
    """Render device names in a cell that does not shrink to one name per line."""
    return f'<span class="names">{escape(", ".join(devices))}</span>'


def _timeline(timeline: Timeline, critical: Sequence[Any]) -> str:
    seconds = dict.fromkeys((*"FHB", "messages"), 0.0)
    for item in critical:
        kind = item.kind if isinstance(item, Op) else "messages"
        seconds[kind] += item.end_s - item.start_s
    totals = ", ".join(f"{NAMES.get(k, k)} {digits(s)} s" for k, s in seconds.items())
    acts = (("in", "+"), ("out", "\u2212"), ("left", "\u2190"), ("right", "\u2192"), ("all", "all"))
    buttons = "".join(
        f'<button type="button" data-act="{a}" aria-label="{a}">{b}</button>' for a, b in acts
    )
    keys = " ".join(
        f'<span class="key" style="background:{c}"></span>{escape(NAMES[k])}'
        for k, c in COLOURS.items()
    )
    return (
        f'<p class="note">{keys}</p><div>{buttons}</div>'
        '<canvas id="timeline" tabindex="0" role="img" aria-label="timeline of all devices">'
        f'</canvas><p class="note" id="says" aria-live="polite">{escape(HELP)}</p>'
        + _note(
            f"Underlined: the critical path of the pipeline, {timeline.makespan_s:.4g} s: "
            f"{totals}. The time of a message includes waiting for its link. Where operations are "
            "narrower than a pixel, bars show the fraction of time of each kind. Idle: fraction "
            "of the step in which a device does not compute."
        )
    )


def _links(plan: TrainingPlan, timeline: Timeline) -> str:
    rows = [
        [escape(x.name), f"{x.pipeline_s:.4g}", f"{x.averaging_s:.4g}"]
        for x in timeline.loads[:FULLEST]
    ]
    return table(["link", "pipeline s", "averaging s"], rows)


def _bounds(plan: TrainingPlan) -> str:
    rows = []
    for basis in bound_bases(plan):
        certificate, unit = plan.certificates[basis.part], "$" if basis.part == "cost" else "s"
        verification = f"not verified; the solver states: {basis.basis or 'no reason'}"
        if basis.recomputed is not None:
            verification = (
                f"verified: recomputed by planner check ({basis.argument.split(' (')[0]})"
            )
        row, bound = (
            "none" if x is None else f"{x:.4g} {unit}" for x in (certificate.objective, basis.bound)
        )
        gap = "" if certificate.gap is None else f"{certificate.gap:.1%}"
        rows.append(
            [basis.part, row, bound, gap, escape(verification if basis.bound is not None else "")]
        )
    return table(["certificate", "found", "lower bound", "gap", "basis of the bound"], rows)


def _alternatives(plan: TrainingPlan) -> str:
    if not plan.alternatives:
        return _note(
            "The plan lists none: its decisions were given, no alternatives were evaluated, or it "
            "was made by an older release. planner compare shows two plans side by side."
        )
    cells = [
        [
            escape(alternative.taken),
            escape(alternative.instead),
            escape(alternative.outcome(least(plan))),
        ]
        for alternative in plan.alternatives
    ]
    return table(["decision", "alternative", "step time or cost with it"], cells)


def _sync(plan: TrainingPlan) -> str:
    outer = plan.sync.outer
    rows = [
        [
            "averaging interval",
            counted(plan.sync.every_steps, "step") + ", delayed" * plan.sync.delayed,
        ],
        ["gradients in every step", _every_step(plan)],
        [
            "outer optimizer",
            "none" if outer is None else f"{outer.optimizer}, {outer.learning_rate:g}",
        ],
        ["gradient codec", str(plan.codec)],
        ["precision", str(plan.workload.precision.compute)],
        ["activation codec", str(plan.workload.boundary_codec)],
        ["wiring", str(plan.wiring)],
        ["gradient clipping", "none" if plan.clip is None else f"{plan.clip:g}"],
        ["pipeline time", f"{digits(plan.predicted.pipeline_s)} s"],
        ["longest averaging time", f"{digits(plan.predicted.averaging_s)} s"],
    ]
    if plan.averages_tied:
        size = plan.vector_bytes()[-1] / 1e9
        shared = f"{size:.3g} GB, by stages 0 and {plan.head_stage} after their own averaging"
        rows.append(["tied embedding and head", shared])
    return table(["what", "value"], [[escape(c) for c in row] for row in rows])


def _every_step(plan: TrainingPlan) -> str:
    if plan.two_frequency:
        return "averaged within regions"
    return "not averaged" if plan.sync.local_steps else "averaged"


def _cost(plan: TrainingPlan) -> str:
    cost = plan.cost
    if cost is None:
        return _note("The plan has no cost, since the price of its devices is unknown.")
    tokens = cost.usd_per_billion_tokens
    rows = [
        ["devices", f"{cost.devices_usd:.4g} $ a step"],
        ["messages", f"{cost.messages_usd:.4g} $ a step, {cost.paid_bytes / 1e9:.4g} GB charged"],
        ["a billion tokens", "not known" if tokens is None else f"{tokens:.4g} $"],
    ]
    return table(["what", "price"], [[escape(c) for c in row] for row in rows])


def _sensitivity(plan: TrainingPlan, slower: Sequence[Slower]) -> str:
    merged: dict[tuple[str, str, str], list[str]] = {}
    for x in slower:
        change = f"{x.step_s / plan.predicted.step_s - 1:+.1%}"
        merged.setdefault((x.kind, f"{x.step_s:.4g}", change), []).append(x.name)
    rows = [
        [escape(f"{kind} {'; '.join(names)}"), step, change]
        for (kind, step, change), names in merged.items()
    ]
    regions = len(set(plan.cluster.network.regions))
    cut = (
        ""
        if regions * (regions + 1) // 2 <= MAX_PAIRS
        else (
            f" Only the {MAX_PAIRS} pairs of regions and the {MAX_REGIONS} regions with most "
            "devices are evaluated."
        )
    )
    return _note(
        f"Step time of this plan if one part of the cluster runs at {SLOWER:.0%} of its speed. In "
        f"regions with several devices, also for the {MAX_SINGLE} busiest single links, the "
        "uplinks "
        f"and downlinks of the {MAX_SINGLE} busiest devices, and the {MAX_SINGLE} devices that "
        "compute "
        f'longest. "Without" a device, others of its stage take over its microbatches.{cut}'
    ) + table(["slowed part", "step s", "change"], rows)


def _executed(plan: TrainingPlan, run: Sequence[Executed]) -> str:
    rows, has_predictions = [], all(x.predicted_s is not None for x in run)
    for x in run:
        predicted = plan.predicted.step_s if x.predicted_s is None else x.predicted_s
        change = f"{x.took_s / predicted - 1:+.1%}" if predicted > 0 else "-"
        rows.append([str(x.step), f"{predicted:.4g}", f"{x.took_s:.4g}", change])
    where = (
        "the machine it ran on" if has_predictions else "the plan's own network, mean over steps"
    )
    return _note(f"The prediction is for {where}.") + table(
        ["step", "predicted s", "executed s", "change"], rows
    )


def _section(title: str, *inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(inner)}</section>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
