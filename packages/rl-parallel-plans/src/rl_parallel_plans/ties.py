"""Parameters that two modules share (`lm_head` and `embed_tokens`), which sharding would silently part.

Each end is sharded by itself and becomes a parameter of its own; the ties found before are made again after, and
checked. Without that, half of the embedding's gradient is lost and the two ends differ after one optimizer step.
"""

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import direct_parameters, input_embedding, joined, output_head


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of two or more parameter names that are one parameter."""
    groups: dict[int, list[str]] = {}
    for path, name, parameter in direct_parameters(model):
        groups.setdefault(id(parameter), []).append(joined(path, name))
    return [names for names in groups.values() if len(names) > 1]


def retie(model: nn.Module, groups: list[list[str]]) -> None:
    """Make the names of each group one parameter again: the first name's."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for other in others:
            path, _, name = other.rpartition(".")
            model.get_submodule(path).register_parameter(name, parameter)
    if tied_names(model) != groups:
        raise PlanError(f"ties were {groups} before sharding and are {tied_names(model)} after: report this plan")


def broken_tie(model: nn.Module) -> str | None:
    """The sentence that says so where the config promises tied embeddings and the model's are two parameters."""
    promised = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    embedding, head = input_embedding(model), output_head(model)
    if not promised or embedding is None or head is None:
        return None
    if any("pipeline_path" in model.get_submodule(path).__dict__ for path in (embedding, head)):
        return None  # a pipeline stage that holds one end: the pipeline keeps both equal
    ends = [f"{path}.weight" for path in (embedding, head)]
    if model.get_parameter(ends[0]) is model.get_parameter(ends[1]):
        return None
    return (
        f"config.tie_word_embeddings is True, but {ends[1]} and {ends[0]} are two parameters: call model.tie_weights() "
        "before planning, or set tie_word_embeddings=False"
    )
