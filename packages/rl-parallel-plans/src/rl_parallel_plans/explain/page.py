"""A plan as one HTML page that carries its style and its script inside and loads nothing.

No network, no font, no script but its own, which its Content-Security-Policy names by hash: no name in a model can run.
Without the script it reads the same; with it, the table of parameters is searched and sorted.
"""

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from rl_parallel_plans.explain import report as numbers
from rl_parallel_plans.explain.report import Part, Report, StageRow, report, shape, share, size
from rl_parallel_plans.plan.rows import ParameterRow

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan

# Share of a rank's bytes below which a part of the overview is not shown by itself.
SMALL = 0.002
# Columns that hold numbers.
NUMBERS = frozenset({"times", "count", "shape", "on a tp rank", "bytes a rank", "bytes a token, forward", "backward "})


def as_html(plan: "ParallelPlan", *, dp: int = 1, stages: Sequence[StageRow] = ()) -> str:
    """The plan over `dp` ranks of FSDP as one self-contained page.

    stages: those of a pipeline, by `explain.report.stage_rows`.

    Raises PlanError where dp is no number of ranks.
    """
    facts = report(plan, dp=dp)
    script, style = (resources.files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("js", "css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{plan.model_name.rpartition('.')[2]}, tp={plan.tp}: parallel plan"),
        element("style", Html(style)),
    )
    body = element("body", element("main", *_sections(facts, stages)), element("script", Html(script)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """An element with its children. Every string is escaped, except the elements made here: nothing can be injected.

    Attributes named like words of Python end in `_`; any other `_` becomes `-`; None leaves an attribute out.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in {"input", "meta", "wbr"}:
        return Html(f"<{name}{written}>")
    inner = "".join(child if isinstance(child, Html) else html.escape(child) for child in children if child is not None)
    return Html(f"<{name}{written}>{inner}</{name}>")


def _path(name: str) -> Html:
    """A dotted path that a narrow column breaks after a dot."""
    first, *others = name.split(".")
    return element("code", first, *(piece for token in others for piece in (".", element("wbr"), token)))


def _table(header: Sequence[str], rows: Sequence[Html], *, id_: str | None = None) -> Html:
    cells = (element("th", name, scope="col", class_="number" if name in NUMBERS else None) for name in header)
    table = element("table", element("thead", element("tr", *cells)), element("tbody", *rows), id_=id_)
    return element("div", table, class_="wide")


def _section(title: str, *children: Html | None, class_: str | None = None) -> Html:
    return element("section", element("h2", title), *children, class_=class_)


def _sections(facts: Report, stages: Sequence[StageRow]) -> Iterator[Html]:
    plan = facts.plan
    axes = [f"tp {plan.tp}", f"dp {facts.dp}", *(["sequence parallel"] if plan.sequence_parallel else [])]
    if plan.asked.output_projections != "rowwise":
        axes.append(f"{plan.asked.output_projections} output projections")
    yield element(
        "header",
        element("p", "parallel plan", class_="kicker"),
        element("h1", plan.model_name.rpartition(".")[2]),
        element("p", _path(plan.model_name), class_="quiet"),
        element("p", *(element("span", axis, class_="chip") for axis in axes)),
        element("p", element("span", "source ", class_="quiet"), plan.source),
    )
    if facts.problems:
        problems = element("ul", *(element("li", problem) for problem in facts.problems))
        yield _section("Problems", problems, class_="problems")
    yield _cards(facts)
    yield _overview(facts)
    if facts.collectives:
        yield _collectives(facts)
    if facts.whole:
        details = []
        for part in facts.whole:
            held = element("span", f"{size(part.rank_bytes)} in {part.count}", class_="number")
            rows = element("ul", *(element("li", _path(row.name), f" {shape(row.shape)}") for row in part.rows))
            details.append(element("details", element("summary", _path(part.where), held), rows))
        yield _section("Whole on every tp rank", element("div", *details, class_="folds"))
    yield _parameters(facts)
    entries = [("FSDP units", plan.fsdp_units)]
    entries += [("Tied", " = ".join(names)) for names in plan.ties]
    entries += [("Note", " ".join(note.split())) for note in plan.notes]
    entries += [("Allowed", problem) for problem in facts.allowed]
    entries += [("Passed over", " ".join(reason.split())) for reason in plan.passed_over]
    items = [child for name, text in entries for child in (element("dt", name), element("dd", text))]
    yield _section("Also", element("dl", *items))
    if stages:
        lines = [element("tr", *(element("td", cell) for cell in cells)) for cells in numbers.stage_cells(stages)]
        notes = (element("p", note, class_="quiet") for note in numbers.stage_notes(stages))
        yield _section("Pipeline stages", _table(numbers.STAGE_HEADER, lines), *notes)


def _cards(facts: Report) -> Html:
    """The few figures that matter most."""
    held = f"{share(facts.rank_bytes, facts.global_bytes)} of the parameters"
    cards = [
        (size(facts.rank_bytes), "a rank holds", held),
        (size(facts.global_bytes), "the model", numbers.elements(facts.elements)),
    ]
    if facts.plan.tp > 1:
        note = f"{share(facts.whole_bytes, facts.tp_rank_bytes)} of what a tp rank holds"
        cards.append((size(facts.whole_bytes), "whole on every tp rank", note))
    if layers := [row for row in facts.collectives if row.in_layers]:
        forward = max(sum(row.forward.values()) for row in layers)
        backward = max(sum(row.backward.values()) for row in layers)
        label = "collectives a layer, forward + backward"
        cards.append((f"{forward} + {backward}", label, f"{size(facts.sent_bytes)} sent a token"))
    written = []
    for figure, label, note in cards:
        lines = (("label", label), ("figure", figure), ("quiet", note))
        written.append(element("div", *(element("p", text, class_=kind) for kind, text in lines), class_="card"))
    return element("section", *written, class_="cards")


def _overview(facts: Report) -> Html:
    """Where a rank's bytes are, one bar for each part of the model."""
    largest = max((part.rank_bytes_over(facts.dp) for part in facts.parts), default=0)
    small = [part for part in facts.parts if part.rank_bytes_over(facts.dp) < SMALL * facts.rank_bytes]
    parts = [part for part in facts.parts if part not in small]
    if small:
        rows = tuple(row for part in small for row in part.rows)
        parts.append(Part(where=f"{len(small)} smaller ones", rows=rows))
    lines = []
    for part in parts:
        held = part.rank_bytes_over(facts.dp)
        whole = sum(row.rank_bytes_over(facts.dp) for row in part.rows if not row.sharded) if facts.plan.tp > 1 else 0
        bars = [
            element("span", class_=kind, style=f"width:{100 * amount / max(largest, 1):.3f}%")
            for kind, amount in (("cut", held - whole), ("whole", whole))
            if amount
        ]
        of_them = f", {whole:,} of them whole on every tp rank" if whole else ""
        track = element("span", *bars, class_="track", title=f"{held:,} bytes{of_them}")
        number = element("span", f"{size(held)} · {share(held, facts.rank_bytes)}", class_="number")
        lines.append(element("div", _path(part.where), track, number, class_="line"))
    legend = [element("span", kind, class_=f"key {kind}") for kind in ("cut", "whole")]
    note = element("p", *legend, "over the tp axis", class_="quiet legend") if facts.plan.tp > 1 else None
    return _section("Where a rank’s bytes are", element("div", *lines, class_="bars"), note)


def _collectives(facts: Report) -> Html:
    rows = []
    for row in facts.collectives:
        more = f", and what {', '.join(row.untold)} does not tell" if row.untold else ""
        rows.append(
            element(
                "tr",
                element("td", _path(row.where), f" {', '.join(row.blocks)}", title=", ".join(row.parts)),
                element("td", f"{row.count}", class_="number"),
                element("td", numbers.counts(row.forward) + more),
                element("td", numbers.counts(row.backward) + more),
                element("td", f"{row.forward_bytes:,}", class_="number"),
                element("td", f"{row.backward_bytes:,}", class_="number"),
            )
        )
    header = ("where", "times", "forward", "backward", "bytes a token, forward", "backward ")
    note = "Bytes are those of the tensors, per token; the tp axis only."
    if facts.partial_gradient_bytes:
        summed = size(facts.partial_gradient_bytes)
        note += (
            f" Then one all-reduce at the end of a backward sums {summed} of gradients of which a rank has one term."
        )
    return _section("Collectives", _table(header, rows), element("p", note, class_="quiet"))


def _parameters(facts: Report) -> Html:
    header = ("parameter", "count", "placement", "shape", "on a tp rank", "dtype", "bytes a rank", "rule")
    largest = max((row.rank_bytes_over(facts.dp) for row in facts.plan.parameters), default=0)
    controls = element(
        "p",
        element("input", type="search", id="search", placeholder="Search name, placement, rule", aria_label="Search"),
        element("label", element("input", type="checkbox", id="whole"), " only what is whole"),
        element("span", id="shown", class_="quiet", role="status"),
        class_="controls",
        hidden="",
    )
    rows = [_parameter(row, facts.dp, largest) for row in facts.plan.parameters]
    return _section("Parameters", controls, _table(header, rows, id_="parameters"))


def _parameter(row: ParameterRow, dp: int, largest: int) -> Html:
    held = row.rank_bytes_over(dp)
    marks = []
    if row.partial_gradient:
        marks.append(element("span", "summed", class_="mark", title="each rank has one term of the gradient"))
    if row.reordered:
        why = "rows of a fused weight are in the order of the ranks"
        marks.append(element("span", "reordered", class_="mark", title=why))
    bar = element("span", class_="cut" if row.sharded else "whole", style=f"width:{100 * held / max(largest, 1):.3f}%")
    # The pattern, where it is more than the name of the parameter's module.
    told = row.pattern in {None, row.name.rpartition(".")[0]}
    return element(
        "tr",
        element("td", _path(row.name)),
        element("td", f"{row.count}", class_="number", data_value=row.count),
        element("td", row.placement, *marks),
        element("td", shape(row.shape), class_="number"),
        element("td", shape(row.local_shape), class_="number"),
        element("td", row.dtype),
        element("td", f"{held:,}", element("span", bar, class_="track"), class_="number", data_value=held),
        element("td", row.style or "no rule", None if told else element("small", _path(f"{row.pattern}"))),
        data_whole=None if row.sharded else "",
    )
