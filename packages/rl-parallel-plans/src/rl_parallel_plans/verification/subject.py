"""The model under test, its tokens, and what an unsharded process makes of them: the truth.

Every parameter is moved away from its initial value, so that nothing is right because it is zero or one. Tokens are
drawn again until no router is near a tie: `topk` is the one place where rounding decides, and every `topk` of the
forward is watched for the gap between what is chosen and what is not. Axes: rows, length, vocabulary.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import broken_tie, tied_names
from rl_parallel_plans.verification.images import image_inputs
from rl_parallel_plans.verification.question import Question, Task

NEAR_TIE = 1e-4
"""Gap to the runner-up, relative to the spread of the scores, below which another rounding may choose otherwise."""
DRAWS = 40
NOTHING: Mapping[str, Tensor] = MappingProxyType({})
ULP = 2.0**-23


@dataclass(slots=True, kw_only=True)
class Batch:
    """Inputs of one task: microbatches of [rows on all data-parallel ranks, length]."""

    ids: list[Tensor]
    masks: list[Tensor | None]
    extra: list[dict[str, Tensor]]
    """Further arguments of forward, their first dim a multiple of the rows."""
    margin: float
    """Smallest relative gap at any `topk`; infinite without one."""

    @property
    def count(self) -> int:
        """Tokens that the loss is divided by."""
        return sum(int(self.targets_at(i).sum()) for i in range(len(self.ids)))

    def targets_at(self, microbatch: int) -> Tensor:
        """Which positions predict a word that counts: bool [rows, length - 1]."""
        mask = self.masks[microbatch]
        if mask is None:
            return torch.ones_like(self.ids[microbatch][:, 1:], dtype=torch.bool)
        return (mask[:, 1:] & mask[:, :-1]).bool()


@dataclass(slots=True, kw_only=True)
class Truth:
    """What one process without sharding found."""

    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]
    by_microbatch: list[dict[str, Tensor]]
    """Gradient of each microbatch alone, for saying what went wrong with their sum."""


def build(question: Question, variant: str, *, seed: int = 0) -> nn.Module:
    """The small model of a variant in fp32, the same numbers at every call."""
    *others, last = question.configs[variant]
    for config in others:
        try:
            model = _built(question, config, seed)
        except PlanError:
            continue
        if broken_tie(model) is None:
            break
    else:
        model = _built(question, last, seed)
    move_parameters(model)
    return model.eval()


def _built(question: Question, config: Any, seed: int) -> nn.Module:
    from rl_parallel_plans.model_source import build as build_model

    torch.manual_seed(seed)
    return build_model(config, device="cpu", dtype=torch.float32, trust_remote_code=question.trust_remote_code)


@torch.no_grad()
def move_parameters(model: nn.Module) -> None:
    """Give every parameter a value that no initialisation gives."""
    generator = torch.Generator().manual_seed(1234)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        trivial = not torch.isfinite(parameter).all() or bool((parameter == 0).all())
        if trivial:
            parameter.copy_(noise * 0.1)
        elif parameter.ndim == 1:
            parameter.add_(noise * 0.1)
        else:
            parameter.copy_(noise * min(0.08, 0.6 / math.sqrt(parameter.shape[-1])))
    for buffer in model.buffers():
        if buffer.is_floating_point() and not torch.isfinite(buffer).all():
            buffer.nan_to_num_(0.0)


def forward(model: nn.Module, ids: Tensor, mask: Tensor | None, *, extra: Mapping[str, Tensor] = NOTHING) -> Tensor:
    """Logits as the model gives them."""
    arguments: dict[str, Any] = {"input_ids": ids, **extra}
    if mask is not None:
        arguments["attention_mask"] = mask
    logits: Tensor = model(**arguments).logits
    return logits


def draw(model: nn.Module, task: Task, *, dp: int) -> Batch:
    """Tokens of a task, far from every tie."""
    best: Batch | None = None
    for seed in range(DRAWS):
        batch = _tokens(model, task, dp=dp, seed=seed)
        with torch.no_grad(), _Ties() as ties:
            for ids, mask, extra in zip(batch.ids, batch.masks, batch.extra, strict=True):
                forward(model, ids, mask, extra=extra)
        batch.margin = ties.smallest
        if best is None or batch.margin > best.margin:
            best = batch
        if best.margin >= NEAR_TIE:
            break
    assert best is not None
    return best


def _tokens(model: nn.Module, task: Task, *, dp: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + seed)
    words = torch.tensor(_ordinary_words(model))
    rows = task.rows * dp
    ids, masks = [], []
    extra: list[dict[str, Tensor]] = []
    for _ in range(task.microbatches):
        ids.append(words[torch.randint(len(words), (rows, task.length), generator=generator)])
        extra.append({})
        if task.image:
            extra[-1], token, count = image_inputs(model, images=rows, generator=generator)
            image = torch.full((rows, count), token)
            ids[-1] = torch.cat([ids[-1][:, :3], image, ids[-1][:, 3:]], dim=1)
            if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                extra[-1]["mm_token_type_ids"] = (ids[-1] == token).long()
        mask = None
        if task.left_padding:
            padding = torch.arange(rows) % 4 + (torch.arange(rows) > 0)
            mask = (torch.arange(task.length)[None] >= padding[:, None]).long()
        masks.append(mask)
    return Batch(ids=ids, masks=masks, extra=extra, margin=math.inf)


def _ordinary_words(model: nn.Module) -> list[int]:
    """Words without a meaning of their own: no padding, no image, no end."""
    config: Any = getattr(model, "config", None)
    special = set()
    for owner in (config, getattr(config, "text_config", None)):
        for name, value in (owner.to_dict() if owner is not None else {}).items():
            if "token" in name and isinstance(value, int):
                special.add(value)
    return [word for word in range(vocabulary_of(model)) if word not in special]


def vocabulary_of(model: nn.Module) -> int:
    """Words that the model embeds."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def run_truth(model: nn.Module, batch: Batch) -> Truth:
    """Forward and backward of every microbatch without sharding; the model's gradients are cleared after."""
    logits, by_microbatch, loss = [], [], 0.0
    for i, (ids, mask, extra) in enumerate(zip(batch.ids, batch.masks, batch.extra, strict=True)):
        model.zero_grad()
        found = forward(model, ids, mask, extra=extra)
        part = token_logp(found, ids)[batch.targets_at(i)].sum() / -batch.count
        part.backward()  # type: ignore[no-untyped-call]
        logits.append(found.detach())
        loss += part.item()
        by_microbatch.append(
            {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    model.zero_grad()
    names = dict.fromkeys(name for gradients in by_microbatch for name in gradients)
    total = {name: sum(g[name] for g in by_microbatch if name in g) for name in names}
    return Truth(logits=logits, loss=loss, gradients=total, by_microbatch=by_microbatch)  # type: ignore[arg-type]


def token_logp(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each next word, from whole logits: [rows, length - 1]."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def rounding_noise(model: nn.Module, batch: Batch, truth: Truth, *, draws: int = 3) -> tuple[float, dict[str, float]]:
    """How far logits and gradients move when every weight moves by its last bit: what no sharding can be blamed for."""
    found = [_moved(model, batch, truth, seed=seed) for seed in range(draws)]
    return max(logits for logits, _ in found), {
        name: max(gradients[name] for _, gradients in found) for name in truth.gradients
    }


def _moved(model: nn.Module, batch: Batch, truth: Truth, *, seed: int) -> tuple[float, dict[str, float]]:
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(99 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            sign = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + sign * ULP)
    try:
        moved = run_truth(model, batch)
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved[name])
    scales = gradient_scales(truth.gradients)
    logits = max(relative_error(m, t) for m, t in zip(moved.logits, truth.logits, strict=True))
    return logits, {
        name: ((moved.gradients[name] - gradient).abs().max() / scales[name]).item()
        for name, gradient in truth.gradients.items()
    }


def gradient_scales(gradients: dict[str, Tensor]) -> dict[str, float]:
    """What an error of each gradient is relative to: its largest entry, unless that is nothing beside the others'."""
    largest = {name: gradient.abs().max().item() for name, gradient in gradients.items()}
    # A key bias without rotary embeddings has a gradient of exactly zero; its rounding is no error.
    floor = max(1e-5 * max(largest.values(), default=0.0), 1e-30)
    return {name: max(value, floor) for name, value in largest.items()}


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Largest deviation, relative to the largest entry of the truth."""
    return ((found - truth).abs().max() / truth.abs().max().clamp_min(1e-30)).item()


def tie_groups(model: nn.Module) -> list[list[str]]:
    """Names that are one parameter."""
    return [sorted(names) for names in tied_names(model)]


class _Ties(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watch every `topk` for the gap between the last chosen and the first left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.smallest = math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0917
        if func is torch.ops.aten.topk.default:
            scores, chosen = args[0].detach().float(), args[1]
            if 0 < chosen < scores.shape[-1]:
                ordered = scores.sort(-1, descending=True).values
                gap = ordered[..., chosen - 1] - ordered[..., chosen]
                spread = (ordered[..., 0] - ordered[..., -1]).clamp(min=1e-30, max=1e30)
                relative = (gap / spread)[gap > 0]  # equal scores are equal on every rank
                if relative.numel():
                    self.smallest = min(self.smallest, relative.min().item())
        return func(*args, **(kwargs or {}))
