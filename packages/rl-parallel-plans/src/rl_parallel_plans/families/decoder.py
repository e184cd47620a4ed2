"""The plan of a decoder, from its parts: embedding, layers, final norm, lm_head, and whatever stands beside them.

    embedding     words shared out
    layers.*      blocks (attention, feed-forward, mixture of experts) sharded inside;
                  norms and small layers between them whole, or each rank on its part of the sequence
    norm          whole; with sequence parallelism the end of the cut residual stream
    lm_head       words shared out; its output is a DTensor Shard(-1), full logits never exist on a rank

Every parameter of a layer must be of a known block: a plan that is nearly right is wrong. What stands outside of the
text decoder (a vision tower, a projector) stays whole. A layer costs two collectives forward and two backward, four and
four with sequence parallelism.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from rl_parallel_plans.families.layer import layer_styles, stream_styles, why_whole
from rl_parallel_plans.families.parts import Layout, NotRecognizedError, Styles
from rl_parallel_plans.structure import (
    around_layers,
    collapsed,
    input_embedding,
    joined,
    matching_modules,
    output_head,
    text_layers,
)
from rl_parallel_plans.styles import (
    LocalParameters,
    ReplicatedParallel,
    SequenceShardedParallel,
    VocabularyParallelEmbedding,
    WholeLayer,
    WholeMethod,
    WholeParallel,
)

FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "norm_f", "ln_f", "final_layer_norm", "embedding_norm")


def decoder_plan(model: nn.Module, layout: Layout) -> Styles:
    """Pattern of module names to style; NotRecognizedError with the part that no rule knows."""
    stack = text_layers(model)
    if stack is None:
        raise NotRecognizedError("it holds no nn.ModuleList of decoder layers")
    path, layers = stack
    quantized = next((name for name, p in model.named_parameters() if not p.is_floating_point()), None)
    if quantized is not None:
        raise NotRecognizedError(f"it is quantized: {quantized} is {model.get_parameter(quantized).dtype}")
    config = text_config(model)
    backbone = path.rpartition(".")[0]
    if layout.sequence_parallel:
        _refuse_other_lists(model, backbone, path)
    why = _why_whole(model, backbone, path) if layout.sequence_parallel else None
    in_blocks = layout.sequence_parallel and why is None
    by_pattern: dict[str, list[tuple[str, ParallelStyle]]] = defaultdict(list)
    for index, layer in layers.named_children():
        styles = layer_styles(layer, config, replace(layout, sequence_parallel=in_blocks))
        if why is not None:
            styles[""] = _whole_layer(styles.get(""), config, at=(int(index), len(layers)), why=why)
        for inside, style in styles.items():
            end = f".{inside}" if inside else ""  # the layer itself where it is empty
            by_pattern[f"{path}.*{end}"].append((f"{path}.{index}{end}", style))
    return {
        **_embedding(model),
        **_layer_embedding(model, backbone),
        **(_cut_stream(model, backbone, layers=path, in_blocks=in_blocks) if layout.sequence_parallel else {}),
        **_merged(by_pattern),
        **_final_norm(model, backbone, sequence_parallel=in_blocks),
        **_head(model),
    }


def departures(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> Iterator[str]:
    """What a reader of the plan must know: a sentence each."""
    for pattern, style in styles.items():
        if isinstance(style, WholeParallel):
            yield f"{pattern} is computed whole on every rank: no rule shards what is inside"
    whole = [(pattern, style.why) for pattern, style in styles.items() if isinstance(style, WholeLayer)]
    if whole:
        yield (
            f"{collapsed(whole[0][0])} compute on the whole sequence: {whole[0][1]}. The stream is "
            "cut between layers alone, so that sequence parallelism saves memory where layers are recomputed"
        )
    ordered = [pattern for pattern, style in styles.items() if _orders_rows(model, pattern, style)]
    if ordered:
        yield (
            f"rows of {', '.join(ordered)} are dealt to the ranks segment by segment, and registered in a shape of "
            "their own: state dicts and exports have them as the unsharded model does, an optimizer's state does not"
        )
    dropout = {m.p for m in model.modules() if isinstance(m, nn.Dropout) and m.p}
    config = text_config(model)
    names = [name for name in getattr(config, "__dict__", {}) if "dropout" in name or name.endswith("_pdrop")]
    dropout |= {p for name in names if isinstance(p := getattr(config, name), float) and p}
    if dropout:
        yield (
            f"dropout of {sorted(dropout)} in training: outside of blocks the ranks of one tp group must drop "
            "the same, so give them one seed, or train without"
        )


def _orders_rows(model: nn.Module, pattern: str, style: ParallelStyle) -> bool:
    found = matching_modules(model, pattern)[:1] if isinstance(style, LocalParameters) else []
    return any(rule.row_order for _, module in found for rule in style.rules(module).values())  # type: ignore[attr-defined]


def text_config(model: nn.Module) -> Any:
    """The config of the text decoder, which in a model of several modalities is a part of the model's."""
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return config if get_text_config is None else get_text_config()


def _merged(by_pattern: dict[str, list[tuple[str, ParallelStyle]]]) -> Styles:
    """One pattern for the same place in every layer, unless its style differs from layer to layer."""
    styles: Styles = {}
    for pattern, found in by_pattern.items():
        alike = len({repr(style) for _, style in found}) == 1
        styles |= {pattern: found[0][1]} if alike else dict(found)
    return styles


def _refuse_other_lists(model: nn.Module, backbone: str, layers: str) -> None:
    """NotRecognizedError where items of other lists run between those of `layers`: the stream is cut between layers."""
    owner, own = model.get_submodule(backbone), layers.rpartition(".")[2]
    around = around_layers(owner, own)
    lists = {name: len(child) for name, child in owner.named_children() if isinstance(child, nn.ModuleList)}
    # A single item may run after the last layer, where the stream is whole (BLT's cross-attention).
    others = sorted(name for name in (around.inside if around else ()) if lists.get(name, 0) > 1)
    if others and lists[own] > 1:
        raise NotRecognizedError(
            f"{type(owner).__name__}.forward calls items of {', '.join(others)} between those of {own}, where the "
            "residual stream would be cut along the sequence; plan with sequence_parallel=False"
        )


def _why_whole(model: nn.Module, backbone: str, layers: str) -> str | None:
    """Why each layer must compute on the whole sequence under sequence parallelism; None where it need not."""
    stack, owner = model.get_submodule(layers), model.get_submodule(backbone)
    assert isinstance(stack, nn.ModuleList)
    if (why := next(filter(None, map(why_whole, stack)), None)) is not None:
        return why
    forward = f"{type(owner).__name__}.forward"
    norms = [name for name, _ in owner.named_children() if name in FINAL_NORMS]
    if len(norms) != 1:
        return f"{forward} has no one norm after its layers, where the stream could be joined, but {norms}"
    around = around_layers(owner, layers.rpartition(".")[2])
    if around is not None and norms[0] in around.before | around.inside:
        return f"{forward} calls {norms[0]} before its layers or between them as well, where the stream is whole"
    return f"{forward} runs its layers more than once" if around is not None and around.repeated else None


def _whole_layer(own: ParallelStyle | None, config: Any, *, at: tuple[int, int], why: str) -> ParallelStyle:
    """The style of a layer, `at` its index and how many there are, that computes on the whole sequence."""
    width = int(getattr(config, "hidden_size", 0)) * int(getattr(config, "altup_num_inputs", 1))  # Gemma 3n's streams
    ends = {"first": at[0] == 0, "last": at[0] == at[1] - 1}
    return WholeLayer(**ends, why=why, elements_per_token=width, children=getattr(own, "children", ()))


def _cut_stream(model: nn.Module, backbone: str, *, layers: str, in_blocks: bool) -> Styles:
    """Where the residual stream is cut along the sequence, and what must see it whole on the way."""
    stack = model.get_submodule(layers)
    assert isinstance(stack, nn.ModuleList)
    styles = stream_styles(stack, layers) if in_blocks else {}
    if hasattr(model.get_submodule(backbone), "_deepstack_process"):  # Qwen3-VL adds image features between layers
        styles[backbone] = WholeMethod("_deepstack_process")
    return styles


def _embedding(model: nn.Module) -> Styles:
    path = input_embedding(model)
    if path is None:
        raise NotRecognizedError("it has no input embedding that is an nn.Embedding")
    if not isinstance(embedding := model.get_submodule(path), nn.Embedding):
        raise NotRecognizedError(f"its input embedding {path} is a {type(embedding).__name__} and not an nn.Embedding")
    if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
        raise NotRecognizedError(f"{path} has max_norm, sparse or scale_grad_by_freq, which need all words on one rank")
    return {path: VocabularyParallelEmbedding()}


def _layer_embedding(model: nn.Module, backbone: str) -> Styles:
    """The embedding of the inputs that each layer has for itself: Gemma 4's, larger than the model's own."""
    embedding = getattr(model.get_submodule(backbone), "embed_tokens_per_layer", None)
    found = isinstance(embedding, nn.Embedding)
    return {joined(backbone, "embed_tokens_per_layer"): VocabularyParallelEmbedding()} if found else {}


def _final_norm(model: nn.Module, backbone: str, *, sequence_parallel: bool) -> Styles:
    children = dict(model.get_submodule(backbone).named_children())  # one without a weight too (OLMo)
    names = [name for name in FINAL_NORMS if name in children]
    if len(names) != 1:
        return {}
    style = SequenceShardedParallel(gather=True) if sequence_parallel else ReplicatedParallel()
    return {joined(backbone, names[0]): style}


def _head(model: nn.Module) -> Styles:
    path = output_head(model)
    if path is None:
        return {}
    if not isinstance(head := model.get_submodule(path), nn.Linear):
        raise NotRecognizedError(f"its output head {path} is a {type(head).__name__} and not an nn.Linear")
    return {path: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
