"""Whether a cell came to what it must, in words that name the cell, the quantity, the figure and the tensor."""

QUANTITIES = ("logits", "logp", "sums", "norm", "gradients", "weights")
NOT_BIT_FOR_BIT = "other bits than the Hugging Face model's"


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
        yield from _not_converted(cell, outcome)


def _not_converted(cell, outcome):
    """What has other bits than in Hugging Face, or is nowhere, or where it should not be."""
    if outcome["exported"]:
        yield f"save_pretrained wrote {NOT_BIT_FOR_BIT} in {outcome['exported']}"
    if outcome["held_wrong"]:
        yield f"shards() hold {NOT_BIT_FOR_BIT} in {outcome['held_wrong']}"
    if outcome["uncovered"]:
        yield f"shards() of all ranks together do not hold all of {outcome['uncovered']}"
    if outcome["held"] > (most := min(1.0, 1.15 * cell.most_held)):
        yield f"this rank holds {outcome['held']:.2f} of the parameters, and {most:.2f} at most were to be expected"


def largest(outcomes, *quantities):
    """Of these quantities over all ranks."""
    return max(outcome["figures"][quantity] for outcome in outcomes for quantity in quantities)
