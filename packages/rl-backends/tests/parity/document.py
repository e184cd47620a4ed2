"""The table as Markdown, from what the cells came to."""

import datetime as dt
import re
import textwrap
from importlib.metadata import version

from parity import cases, judge
from rl_backends import DTensorConfig

HEAD = """# Parity with one plain process

Every cell trains a model of two layers (hidden 32, vocabulary 67, weights moved off their initial values) for three
steps of AdamW with clipping, on 7 rows of 5 to 19 tokens with prompts of their own lengths and a loss that has a sign
and a weight for each row: once by `DTensorBackend`, on real processes over gloo, and once by Hugging Face and torch
alone, row by row without padding, on full logits. The figures are the largest errors of

    log-probabilities and metric sums / norm and gradient of every parameter / every parameter after three steps

over all ranks, in float32, as a share of the largest entry of that tensor in the plain process (a gradient's largest
entry counts as 1e-4 of the largest of all gradients at least, and Adam's eps is 1e-4, lest rounding be divided by
rounding). The bar is {bar:.0e}. Whoever refuses does it in the words of the footnote. Compiled cells are traced,
with their autograd graphs, and run without generated code, which `--generate-code` adds. With adapters the plain
process is that of peft. Kernels that run on a GPU alone, and products in 8 bits, have their cells in
`rl-backends verify MODEL --each-kernel --device cuda`.
"""


def document(outcomes, *, before=""):
    """The whole of PARITY.md; `before` is an older one, which has the figures of cells that were not run."""
    notes, known = [], figures_of(before)
    new = f"on {dt.date.today()} with torch {version('torch')} and transformers {version('transformers')}"  # noqa: DTZ011 - the day here
    old = re.search(r"^Made by `.*?` (on .*?)\.$", before, re.DOTALL | re.MULTILINE)
    if old is not None and any(cell.name in known and cell.name not in outcomes for cell in cases.whole()):
        new = f"{old[1]}; {len(outcomes)} cells {new}"
    return "\n".join(
        [
            HEAD.format(bar=cases.BAR),
            *textwrap.wrap(f"Made by `cd tests && python -m parity --write ../PARITY.md` {new}.", 118),
            "",
            *_table(outcomes, notes, known),
            "",
            f"What has no column of its own. The bar of bfloat16 against plain float32 is {cases.BFLOAT16_BAR:.0e}:",
            "",
            *_apart(outcomes, notes, known),
            "",
            "Refused before there is a model or a rank:",
            "",
            *_refused_configurations(),
            "",
            *(f"[{number}] {note}  " for number, note in enumerate(notes, 1)),
            "",
        ]
    )


def figures_of(text):
    """What an older PARITY.md says of each cell, by its name: figures, or the words of a refusal."""
    notes = {f"refused [{number}]": note for number, note in re.findall(r"^\[(\d+)\] (.*?) *$", text, re.MULTILINE)}
    found = {}
    for line in text.splitlines():
        model, second, third, *rest = [*(part.strip() for part in line.strip("|").split("|")), "", ""][:13]
        if second in cases.LAYOUTS:
            for mesh, figures in zip(cases.MESHES, (third, *rest), strict=False):
                found[f"{model}, {mesh}, {second}"] = figures
        elif second in {**cases.MESHES, **cases.OTHER_MESHES} and rest:
            found[f"{model}, {second}, {third}"] = rest[0]
    return {name: notes.get(figures, figures) for name, figures in found.items() if figures not in {"", "not run"}}


def _table(outcomes, notes, known):
    yield f"| model | layout | {' | '.join(cases.MESHES)} |"
    yield "|---" * (len(cases.MESHES) + 2) + "|"
    cells = {(cell.model, cell.mesh, cell.layout): cell for cell in cases.table()}
    for model in cases.MODELS:
        for layout in cases.LAYOUTS:
            found = [cells.get((model, mesh, layout)) for mesh in cases.MESHES]
            texts = ["no experts" if cell is None else _figures(cell, outcomes, notes, known) for cell in found]
            yield f"| {model} | {layout} | {' | '.join(texts)} |"


def _apart(outcomes, notes, known):
    yield "| model | mesh | layout | |"
    yield "|---|---|---|---|"
    for cell in cases.apart():
        yield f"| {cell.model} | {cell.mesh} | {cell.layout} | {_figures(cell, outcomes, notes, known)} |"


def _refused_configurations():
    yield "| configuration | |"
    yield "|---|---|"
    for config, _ in cases.REFUSED_CONFIGURATIONS:
        try:
            message = f"not refused: {DTensorConfig(**config)}"
        except ValueError as error:
            message = str(error)
        yield f"| `{', '.join(f'{name}={value!r}' for name, value in config.items())}` | {message} |"


def _figures(cell, outcomes, notes, known):
    if (ranks := outcomes.get(cell.name)) is None:
        text = known.get(cell.name, "not run")
        return text if cell.refusal is None or text == "not run" else _refused(text, notes)
    if "refused" in ranks[0]:
        text = _refused(" ".join(ranks[0]["refused"].split()), notes)
    elif any("died" in each for each in ranks):
        text = "died"
    else:
        figures = [
            judge.largest(ranks, *quantities) for quantities in (("logp", "sums"), ("norm", "gradients"), ("weights",))
        ]
        text = " / ".join(f"{figure:.0e}" for figure in figures)
    return f"**WRONG** {text}" if judge.complaints(cell, ranks) else text


def _refused(note, notes):
    if note not in notes:
        notes.append(note)
    return f"refused [{notes.index(note) + 1}]"
