"""The table as Markdown, from what the cells came to."""

import datetime as dt
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
with their autograd graphs, and run without generated code, which `--generate-code` adds.
"""


def document(outcomes):
    """The whole of PARITY.md."""
    notes = []
    return "\n".join(
        [
            HEAD.format(bar=cases.BAR),
            f"Made by `cd tests && python -m parity --write ../PARITY.md` on {dt.date.today()} with torch",  # noqa: DTZ011 - the day here
            f"{version('torch')} and transformers {version('transformers')}.",
            "",
            *_table(outcomes, notes),
            "",
            f"What has no column of its own. The bar of bfloat16 against plain float32 is {cases.BFLOAT16_BAR:.0e}:",
            "",
            *_apart(outcomes, notes),
            "",
            "Refused before there is a model or a rank:",
            "",
            *_refused_configurations(),
            "",
            *(f"[{number}] {note}  " for number, note in enumerate(notes, 1)),
            "",
        ]
    )


def _table(outcomes, notes):
    yield f"| model | layout | {' | '.join(cases.MESHES)} |"
    yield "|---" * (len(cases.MESHES) + 2) + "|"
    cells = {(cell.model, cell.mesh, cell.layout): cell for cell in cases.table()}
    for model in cases.MODELS:
        for layout in cases.LAYOUTS:
            found = [cells.get((model, mesh, layout)) for mesh in cases.MESHES]
            texts = ["no experts" if cell is None else _figures(cell, outcomes, notes) for cell in found]
            yield f"| {model} | {layout} | {' | '.join(texts)} |"


def _apart(outcomes, notes):
    yield "| model | mesh | layout | |"
    yield "|---|---|---|---|"
    for cell in cases.apart():
        yield f"| {cell.model} | {cell.mesh} | {cell.layout} | {_figures(cell, outcomes, notes)} |"


def _refused_configurations():
    yield "| configuration | |"
    yield "|---|---|"
    for config, _ in cases.REFUSED_CONFIGURATIONS:
        try:
            message = f"not refused: {DTensorConfig(**config)}"
        except ValueError as error:
            message = str(error)
        yield f"| `{', '.join(f'{name}={value!r}' for name, value in config.items())}` | {message} |"


def _figures(cell, outcomes, notes):
    if (ranks := outcomes.get(cell.name)) is None:
        return "not run"
    if "refused" in ranks[0]:
        note = " ".join(ranks[0]["refused"].split())
        if note not in notes:
            notes.append(note)
        text = f"refused [{notes.index(note) + 1}]"
    elif any("died" in each for each in ranks):
        text = "died"
    else:
        figures = [
            judge.largest(ranks, *quantities) for quantities in (("logp", "sums"), ("norm", "gradients"), ("weights",))
        ]
        text = " / ".join(f"{figure:.0e}" for figure in figures)
    return f"**WRONG** {text}" if judge.complaints(cell, ranks) else text
