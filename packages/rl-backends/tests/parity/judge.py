"""Whether a cell came to what it must, in words that name the cell, the quantity, the figure and the tensor."""

QUANTITIES = ("sums", "logp", "norm", "gradients", "weights")


def complaints(cell, outcomes):
    """What is wrong with a cell, over all its ranks; nothing if it is as it must be."""
    return [
        f"{cell.name}: rank {rank}: {complaint}"
        for rank, outcome in enumerate(outcomes)
        for complaint in _complaints(cell, outcome)
    ]


def _complaints(cell, outcome):
    if "died" in outcome:
        yield outcome["died"]
    elif "refused" in outcome:
        if cell.refusal is None or cell.refusal not in outcome["refused"]:
            yield f"refused, and not with {cell.refusal!r}: {outcome['refused']}"
    elif cell.refusal is not None:
        yield f"it ran, and must be refused with {cell.refusal!r}"
    else:
        for quantity in QUANTITIES:
            if not outcome["figures"][quantity] <= cell.bar:
                figure, where = outcome["figures"][quantity], outcome["worst"][quantity]
                yield f"{quantity} are off by {figure:.1e} in {where}; the bar is {cell.bar:.0e}"
        yield from _not_as_configured(cell, outcome)


def _not_as_configured(cell, outcome):
    """A cell that is exact because it did not do what it says is none."""
    # What does not divide evenly, norms under tensor parallelism, routers.
    if outcome["held"] > (most := min(1.0, 1.15 * cell.most_held)):
        yield f"this rank holds {outcome['held']:.2f} of the parameters, and {most:.2f} at most were to be expected"
    for rows, columns in outcome["read"]:
        if cell.config.get("sequence_packing") and rows != 1:
            yield f"the model read {rows} rows of {columns} tokens, which are not packed"
        if rows * columns > cell.config.get("micro_batch_tokens", rows * columns):
            yield f"the model read {rows} x {columns} tokens, more than {cell.config['micro_batch_tokens']}"
        if not cell.config.get("sequence_packing") and rows > cell.config.get("micro_batch_size", rows):
            yield f"the model read {rows} rows, more than {cell.config['micro_batch_size']}"


def largest(outcomes, *quantities):
    """Of these quantities over all ranks."""
    return max(outcome["figures"][quantity] for outcome in outcomes for quantity in quantities)
