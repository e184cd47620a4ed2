"""What a translated Hugging Face plan still lacks: the ends of the vocabulary, and gradients that nothing sums.

Each function adds styles to a plan in the making and returns a note of each thing that the plan's author did not write.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.hugging_face.patterns import refusal
from rl_parallel_plans.hugging_face.strings import translate_parallel_style
from rl_parallel_plans.structure import (
    collapsed,
    direct_parameters,
    head_size,
    joined,
    matching_modules,
    output_head,
    tied_names,
)
from rl_parallel_plans.styles import ReplicatedParallel, VocabularyParallelEmbedding

Styles = dict[str, ParallelStyle]
LATENT_DOWN = "kv_a_proj_with_mqa"


def completed(model: nn.Module, styles: Styles, plan: Mapping[str, str], *, blocks: Sequence[str]) -> list[str]:
    """Complete `styles`, the rules of `plan` with `blocks` among them; a note of each departure from its letter."""
    replicate_in_blocks(model, styles, blocks)
    check_attention(model, styles)
    check_output_projections(model, styles)
    check_norms(model, styles)
    completions = (sum_norm_gradients, sum_rope_gradients, sum_activation_gradients, sum_embedding_gradients)
    notes = shard_head(model, styles, plan) + [note for complete in completions for note in complete(model, styles)]
    check_feed_forward(model, styles)
    return notes


def heads(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Paths of the linear layers that make logits: the model's, and those inside it that the plan calls lm_head."""
    inner = [path for pattern in plan if pattern.endswith(".lm_head") for path, _ in matching_modules(model, pattern)]
    head = output_head(model)
    return list(dict.fromkeys([*([head] if head is not None else []), *inner]))


def shard_head(model: nn.Module, styles: Styles, plan: Mapping[str, str]) -> list[str]:
    """Each lm_head by words, its logits left so, and with it the embeddings that are tied to it."""
    notes = []
    for head in heads(model, plan):
        for pattern in [pattern for pattern in styles if _names(model, pattern, head)]:
            del styles[pattern]
        styles[head] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        was = f"has {plan[head]!r} for it" if head in plan else "leaves it whole"
        notes.append(f"{head} is sharded by words, and so are its logits: the plan {was}")
        tied = {name for names in tied_names(model) if f"{head}.weight" in names for name in names}
        for path in sorted(name.removesuffix(".weight") for name in tied):
            unnamed = not any(_names(model, pattern, path) for pattern in styles)
            if unnamed and isinstance(model.get_submodule(path), nn.Embedding):
                styles[path] = VocabularyParallelEmbedding()
                notes.append(f"{path} is sharded by words with {head}, which it is tied to")
    return notes


def sum_norm_gradients(model: nn.Module, styles: Styles) -> list[str]:
    """A norm over one head sees its rank's heads only: each rank has a term of its gradient."""
    added: Styles = {}
    for path, module, children in _modules(model, styles):
        if not {"q_proj", "k_proj"} <= children.keys() or not _cuts(children["q_proj"]):
            continue
        size = head_size(module, getattr(model, "config", None))
        for name, child in module.named_children():
            over_a_head = {tuple(parameter.shape) for parameter in child.parameters()} == {(size,)}
            if "norm" in name and over_a_head and children[name] is None:
                added[collapsed(joined(path, name))] = ReplicatedParallel(partial_gradient=True)
    return _with(styles, added, "the gradient of {} is summed over the ranks' heads: the plan forgets it")


def sum_rope_gradients(model: nn.Module, styles: Styles) -> list[str]:
    """Latent attention's rope features go straight to each rank's heads (plans before transformers 5.5 forget it)."""
    added: Styles = {}
    for path, _, children in _modules(model, styles):
        if LATENT_DOWN in children and _cuts(children.get("kv_b_proj")) and children[LATENT_DOWN] is None:
            down = collapsed(joined(path, LATENT_DOWN))
            try:
                added[down] = translate_parallel_style("mla_kv_a_proj", config=getattr(model, "config", None))
            except PlanError as error:
                raise refusal(model, down, str(error)) from error
    return _with(styles, added, "the gradient of the rope features of {} is summed: the plan forgets it")


def sum_activation_gradients(model: nn.Module, styles: Styles) -> list[str]:
    """An activation with a parameter, between a layer that cuts features and one that sums them (Apertus' xIELU).

    It sees its rank's features only. A single number is the same for all of them: each rank has a term of its gradient.
    Anything larger is refused.
    """
    added: Styles = {}
    for path, module, children in _modules(model, styles):
        if not _is_feed_forward(children):
            continue
        for name, child in module.named_children():
            if "act" not in name or children[name] is not None or not list(child.parameters()):
                continue
            pattern = collapsed(joined(path, name))
            if any(parameter.numel() > 1 for parameter in child.parameters()):
                raise refusal(model, pattern, "the activation has parameters for features that are cut, and no rule")
            added[pattern] = ReplicatedParallel(partial_gradient=True)
    return _with(styles, added, "the gradient of {} is summed over the ranks' features: the plan forgets it")


def sum_embedding_gradients(model: nn.Module, styles: Styles) -> list[str]:
    """What an embedding does to its words, the rank that has the word does: each rank has a term of the gradient."""
    for pattern in [p for p, style in styles.items() if isinstance(style, VocabularyParallelEmbedding)]:
        for path, embedding in matching_modules(model, pattern):
            for inner, name, _ in direct_parameters(embedding):
                if inner:
                    styles[collapsed(joined(path, inner))] = ReplicatedParallel(partial_gradient=True)
                elif name != "weight":
                    raise refusal(model, pattern, f"the embedding has a parameter {name!r} beside its words")
    return []


def replicate_in_blocks(model: nn.Module, styles: Styles, blocks: Sequence[str]) -> None:
    """What is whole inside a block has a term of its gradient on each rank."""
    styled = {path for pattern in styles for path, _ in matching_modules(model, pattern)}
    borders = [path for block in blocks for path, _ in matching_modules(model, block)]
    for path, _, _ in direct_parameters(model):
        if path not in styled and any(path.startswith(f"{border}.") for border in borders):
            styles[collapsed(path)] = ReplicatedParallel(partial_gradient=True)


def check_norms(model: nn.Module, styles: Styles) -> None:
    """A norm over features that are cut needs those of all ranks (`q_a_layernorm` after a cut `q_a_proj`)."""
    for path, module, children in _modules(model, styles):
        for name, child in module.named_children():
            stem, _, kind = name.rpartition("_")
            projection = getattr(module, f"{stem}_proj", None)
            if kind not in ("norm", "layernorm") or children[name] is not None or not isinstance(projection, nn.Linear):
                continue
            spans = any(parameter.shape == (projection.out_features,) for parameter in child.parameters())
            if spans and _cuts(children.get(f"{stem}_proj")):
                where = collapsed(joined(path, name))
                raise refusal(model, where, f"it spans all features of {stem}_proj, which are cut")


def check_attention(model: nn.Module, styles: Styles) -> None:
    """What attention with cut heads holds itself is of all heads, or sees those of its rank: a rule must say."""
    for path, module, children in _modules(model, styles, unstyled=True):
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and _cuts(children.get("q_proj")) and _cuts(children.get("k_proj")):
            reason = "no rule names it, while the heads of the attention that holds it are cut"
            raise refusal(model, collapsed(joined(path, own[0])), reason)


def check_output_projections(model: nn.Module, styles: Styles) -> None:
    """A layer that sums cut features needs one beside it that cuts them (GLM-5-Next's linear attention has none)."""
    for path, module, children in _modules(model, styles):
        beside = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
        sums = [
            name
            for name in beside
            if isinstance(style := children[name], RowwiseParallel) and style.input_layouts[0].is_shard()
        ]
        whole = [name for name in beside if children[name] is None]
        within = [style for name, style in children.items() if style is not None and name not in sums]
        if sums and whole and not within:
            reason = f"it takes features that are cut, and no rule cuts what is beside it ({', '.join(whole)})"
            raise refusal(model, collapsed(joined(path, sums[0])), reason)


def check_feed_forward(model: nn.Module, styles: Styles) -> None:
    """What stands beside a layer that cuts features and one that sums them sees its rank's: a rule must say."""
    for path, module, children in _modules(model, styles, unstyled=True):
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and _is_feed_forward(children):
            cut = sorted(name for name, style in children.items() if style is not None)
            reason = f"it stands between layers that are cut ({cut}), without a rule"
            raise refusal(model, collapsed(joined(path, own[0])), reason)


def _modules(
    model: nn.Module, styles: Styles, *, unstyled: bool = False
) -> Iterator[tuple[str, nn.Module, dict[str, ParallelStyle | None]]]:
    """Path and module, those without a style alone where `unstyled`, with the style of each child, or None."""
    styled = {path: style for pattern, style in styles.items() for path, _ in matching_modules(model, pattern)}
    for path, module in model.named_modules():
        if not unstyled or path not in styled:
            yield path, module, {name: styled.get(joined(path, name)) for name, _ in module.named_children()}


def _with(styles: Styles, added: Styles, note: str) -> list[str]:
    styles.update(added)
    return [note.format(name) for name in added]


def _names(model: nn.Module, pattern: str, path: str) -> bool:
    return any(found == path for found, _ in matching_modules(model, pattern))


def _is_feed_forward(children: Mapping[str, ParallelStyle | None]) -> bool:
    """Whether one of the children cuts features, and one sums what is cut."""
    rowwise = [style for style in children.values() if isinstance(style, RowwiseParallel)]
    return any(map(_cuts, children.values())) and any(style.input_layouts[0].is_shard() for style in rowwise)


def _cuts(style: ParallelStyle | None) -> bool:
    return isinstance(style, ColwiseParallel) and style.output_layouts[0].is_shard()
