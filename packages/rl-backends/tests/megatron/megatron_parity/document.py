"""The table as Markdown, a section of PARITY.md, from what the cells came to."""

import datetime as dt
from importlib.metadata import version

from megatron_parity import cases, judge

TITLE = "# The Megatron backend"
HEAD = """{title}

The same claims of `MegatronBackend`, on megatron-core {megatron}, with the model, batch, loss and plain answer of the
table above, models tied and untied. The figures are

    log-softmax over the vocabulary at 359 tokens of two rows of up to 200, log-probabilities and metric sums
    / norm and gradient of every parameter / every parameter after three steps

Both ways between the layouts of Hugging Face and Megatron are bit for bit in every cell: what `save_pretrained` writes,
and what `shards()` of all ranks hold, which together are the whole of every tensor. The bar is {bar:.0e}.

Made by `cd tests/megatron && python -m megatron_parity --write ../../PARITY.md` on {today} with torch
{torch} and transformers {transformers}, in processes over gloo.
"""


def write(outcomes, file):
    """Put the section where it was, or at the end; the rest of the file stays."""
    before = file.read_text().partition(f"\n{TITLE}\n")[0].rstrip("\n")
    file.write_text(f"{before}\n\n{document(outcomes)}")


def document(outcomes):
    """The whole section."""
    notes = []
    head = HEAD.format(
        title=TITLE,
        bar=cases.BAR,
        megatron=version("megatron-core"),
        torch=version("torch"),
        transformers=version("transformers"),
        today=dt.date.today(),  # noqa: DTZ011 - the day here
    )
    return "\n".join(
        [
            head,
            *_table(outcomes, notes),
            "",
            f"What has no column of its own. The bar of bfloat16 against plain float32 is {cases.BFLOAT16_BAR:.0e}:",
            "",
            *_apart(outcomes, notes),
            "",
            *(f"[{number}] {note}  " for number, note in enumerate(notes, 1)),
            "",
        ]
    )


def _table(outcomes, notes):
    yield f"| model | | layout | {' | '.join(cases.MESHES)} |"
    yield "|---" * (len(cases.MESHES) + 3) + "|"
    cells = {
        (cell.model, "tied" if cell.problem.tied else "untied", cell.mesh, cell.layout): cell for cell in cases.table()
    }
    for model in cases.MODELS:
        for tied in cases.TIES:
            for layout in cases.LAYOUTS:
                found = [cells.get((model, tied, mesh, layout)) for mesh in cases.MESHES]
                texts = ["no experts" if cell is None else _figures(cell, outcomes, notes) for cell in found]
                yield f"| {model} | {tied} | {layout} | {' | '.join(texts)} |"


def _apart(outcomes, notes):
    yield "| model | | mesh | layout | |"
    yield "|---|---|---|---|---|"
    for cell in cases.apart():
        tied = "tied" if cell.problem.tied else "untied"
        layout = cell.layout.replace("|", r"\|")
        yield f"| {cell.model} | {tied} | {cell.mesh} | {layout} | {_figures(cell, outcomes, notes)} |"


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
        quantities = (("logits", "logp", "sums"), ("norm", "gradients"), ("weights",))
        text = " / ".join(f"{judge.largest(ranks, *each):.0e}" for each in quantities)
    return f"**WRONG** {text}" if judge.complaints(cell, ranks) else text
