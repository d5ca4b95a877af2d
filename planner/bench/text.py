"""Results of a run as text for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.bench.summary import Summary, percent

HEADS = (
    "method",
    "from",
    "solved",
    "wins",
    "mean gap to best",
    "median",
    "mean gap to bound",
    "median",
)
NOTE = (
    "Solved: instances with an answer that the checker accepts. Wins: no other method of the run "
    "was better, in any of its seeds. Gap to the best known, and to the best bound known: so much "
    "more time, or so much less rate (half the rate is 100%); means over seeds, then over the "
    "instances solved. Gaps to a bound say as much about the bound."
)
SPEED = (
    "Median, over the instances, of the method's seconds over those of `ours` in the same run. "
    "Methods had the same effort where they take one; seconds are of this run and machine, beside "
    "whatever else it did, and are good for these ratios only."
)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> Iterator[str]:
    """Format a table as lines."""
    if markdown:
        yield f"| {' | '.join(heads)} |"
        yield f"|{'---|' * len(heads)}"
        for row in rows:
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        return
    wide = [max(len(row[k]) for row in (heads, *rows)) for k in range(len(heads))]
    for row in (heads, *rows):
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip()


def count_of(instances: int) -> str:
    """Format a number of instances."""
    return f"{instances} instance{'s' * (instances != 1)}"


def quality(summary: Summary, *, markdown: bool) -> Iterator[str]:
    """Format one table per family."""
    for family, standings in summary.families.items():
        count = sum(entry.family is family for entry in summary.known.values())
        yield f"{'### ' if markdown else ''}{family}: {count_of(count)}"
        yield from [""] * markdown
        rows = [(s.method, s.kind, *s.words()) for s in standings]
        yield from table(HEADS, rows, markdown=markdown)
        yield ""


def speed(summary: Summary, *, markdown: bool) -> Iterator[str]:
    """Format one table of speed ratios."""
    rows = [
        (str(family), s.method, "-" if s.over_ours is None else f"{s.over_ours:.3g}")
        for family, standings in summary.families.items()
        for s in standings
    ]
    yield from table(("family", "method", "time over ours"), rows, markdown=markdown)


def instances(summary: Summary, *, markdown: bool) -> Iterator[str]:
    """Format one line per instance: best known solution, bound and gap."""
    rows = [
        (
            name,
            "-" if k.objective is None else f"{k.objective:.7g} {k.family.unit}",
            k.method + " (new)" * k.improved,
            "-" if k.bound is None else f"{k.bound:.7g}" + "*" * (not k.bound_recomputed),
            percent(k.gap),
        )
        for name, k in summary.known.items()
    ]
    heads = ("instance", "best known", "reached by", "bound", "gap")
    yield from table(heads, rows, markdown=markdown)


def contradictions(summary: Summary) -> list[str]:
    """Format one sentence per instance whose best solution is beyond its bound."""
    return [
        f"WRONG: {name}: {k.objective:.9g} {k.family.unit} ({k.method}) is beyond the bound "
        f"{k.bound:.9g}: the bound or the answer is wrong; report this"
        for name, k in summary.known.items()
        if k.contradicted
    ]


def refusals(summary: Summary, *, markdown: bool) -> Iterator[str]:
    """Format one line per rejected solution, with the reason."""
    rows = [(r.instance, r.method, str(r.seed), r.reason) for r in summary.rows if not r.accepted]
    if rows:
        yield from table(("instance", "method", "seed", "reason"), rows, markdown=markdown)


def terminal(summary: Summary) -> str:
    """Format the results for the terminal."""
    refused = sum(not row.accepted for row in summary.rows)
    new = [name for name, k in summary.known.items() if k.improved or k.recorded is None]
    wrong = contradictions(summary)
    lines = [
        *wrong,
        *[""] * bool(wrong),
        *quality(summary, markdown=False),
        "Time over ours, median (this run only):",
    ]
    lines += [*speed(summary, markdown=False), ""]
    if refused:
        lines.append(f"{refused} of {len(summary.rows)} rows refused:")
        lines += [*refusals(summary, markdown=False), ""]
    if new:
        lines.append(
            f"better than on record in {len(new)} instances: {', '.join(new)}; --keep FOLDER and "
            "planner bench --record FOLDER put them on record"
        )
    return "\n".join(lines)


def markdown(summary: Summary, title: str, description: Sequence[str]) -> str:
    """Format a dated report."""
    lines = [f"# {title}", ""]
    for paragraph in description:
        lines += [paragraph, ""]
    for wrong in contradictions(summary):
        lines += [f"**{wrong}**", ""]
    lines += ["## Quality", "", NOTE, "", *quality(summary, markdown=True)]
    lines += ["## Speed", "", SPEED, "", *speed(summary, markdown=True), ""]
    lines += [
        "## Instances",
        "",
        "Best known: on record or of this run. A bound with a star is stated by its "
        "method and not verified; the checker has recomputed the others.",
        "",
        *instances(summary, markdown=True),
        "",
    ]
    refused = list(refusals(summary, markdown=True))
    if refused:
        lines += ["## Refused", "", *refused, ""]
    return "\n".join(lines)
