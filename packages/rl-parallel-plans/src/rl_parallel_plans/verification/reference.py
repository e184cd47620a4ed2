"""The small model, its inputs, and what it computes without sharding: the reference for every comparison.

Every parameter is moved away from its initial value, so that nothing is right because it is zero or one. Tokens are
drawn again until no router is near a tie: `topk` is the one place where rounding decides, so every `topk` of the
forward is watched for the gap between what is chosen and what is not. Axes: rows, length, vocabulary.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.errors import PlanError, UnusableModelError
from rl_parallel_plans.model_source import build
from rl_parallel_plans.structure import broken_tie, output_head, tied_names
from rl_parallel_plans.verification.tasks import BAR, Request, Task

SURELY_WRONG = 1e-2
"""Relative error that no rounding causes."""
NEAR_TIE = 1e-4
"""Gap to the runner-up, relative to the spread of the scores, below which another rounding may choose otherwise."""
DRAWS = 40
ULP = 2.0**-23


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Inputs of one forward: [rows, length]."""

    ids: Tensor
    mask: Tensor | None
    extra: dict[str, Tensor]  # further arguments of forward, whose first dim is a multiple of the rows

    @property
    def counted(self) -> Tensor:
        """Which positions predict a token that counts: bool [rows, length - 1]."""
        if self.mask is None:
            return torch.ones_like(self.ids[:, 1:], dtype=torch.bool)
        return (self.mask[:, 1:] & self.mask[:, :-1]).bool()

    def rows_of(self, dp_rank: int, dp: int) -> "Microbatch":
        """The rows of one data-parallel rank."""
        ids, *rest = (value.chunk(dp)[dp_rank] for value in (self.ids, *self.extra.values()))
        mask = None if self.mask is None else self.mask.chunk(dp)[dp_rank]
        return Microbatch(ids=ids, mask=mask, extra=dict(zip(self.extra, rest, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one task, with the rows of all data-parallel ranks."""

    microbatches: list[Microbatch]
    margin: float = math.inf  # smallest relative gap at any `topk`

    @property
    def count(self) -> int:
        """Tokens that the loss is divided by."""
        return sum(int(microbatch.counted.sum()) for microbatch in self.microbatches)


@dataclass(slots=True, kw_only=True)
class Truth:
    """What the unsharded model computes from a batch."""

    batch: Batch
    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]
    by_microbatch: list[dict[str, Tensor]]  # gradients of each microbatch alone, to diagnose a wrong sum


@dataclass(slots=True)
class Subject:
    """The model of one variant, with the truth of each task."""

    model: nn.Module
    truths: dict[str, Truth] = field(default_factory=dict)


def build_subjects(request: Request) -> tuple[dict[str, Subject], dict[str, str]]:
    """The model of each variant, and the tasks of variants that transformers cannot build, with the reason.

    Raises UnusableModelError if the first variant, the model as it is, cannot be built.
    """
    subjects: dict[str, Subject] = {}
    skipped: dict[str, str] = {}
    for variant, configs in request.configs.items():
        try:
            subjects[variant] = Subject(_build_small(configs, trust_remote_code=request.trust_remote_code))
        except UnusableModelError as reason:
            if not subjects:
                raise
            skipped |= {task.name: str(reason)[:300] for task in request.tasks if task.variant == variant}
    return subjects, skipped


def _build_small(configs: Any, *, trust_remote_code: bool) -> nn.Module:
    """The first configuration that builds and ties what it promises, in fp32, with the same numbers at every call."""
    for i, config in enumerate(configs):
        torch.manual_seed(0)
        try:
            model = build(config, device="cpu", dtype=torch.float32, trust_remote_code=trust_remote_code)
        except PlanError:
            if i == len(configs) - 1:
                raise
            continue
        if broken_tie(model) is None or i == len(configs) - 1:
            break
    move_parameters(model)
    return model.eval()


@torch.no_grad()
def move_parameters(model: nn.Module) -> None:
    """Give every parameter a value that no initialisation gives."""
    generator = torch.Generator().manual_seed(1234)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if not torch.isfinite(parameter).all() or bool((parameter == 0).all()):
            parameter.copy_(noise * 0.1)
        elif parameter.ndim == 1:
            parameter.add_(noise * 0.1)
        else:
            parameter.copy_(noise * min(0.08, 0.6 / math.sqrt(parameter.shape[-1])))
    for buffer in model.buffers():
        if buffer.is_floating_point() and not torch.isfinite(buffer).all():
            buffer.nan_to_num_(0.0)


def run_unsharded(request: Request, subjects: Mapping[str, Subject]) -> dict[str, str]:
    """Draw the batch of every task and run the unsharded model on it; tasks with the same inputs share both.

    Returns the tasks that the unsharded model itself cannot do, with the reason. Raises UnusableModelError if it
    cannot do the first one.
    """
    skipped = {}
    same: dict[tuple[Any, ...], Truth] = {}
    for task in request.tasks:
        if task.measure not in {"step", "outputs"} or task.variant not in subjects:
            continue
        subject = subjects[task.variant]
        key = (task.variant, task.length, task.rows, task.microbatches, task.left_padding, task.image)
        try:
            if key not in same:
                same[key] = run_truth(subject.model, draw(subject.model, task, dp=request.dp))
        except Exception as error:  # the code of a model may raise anything
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if task is request.tasks[0]:
                raise UnusableModelError(
                    f"the small {type(subject.model).__name__} does not run without sharding either, so that there is "
                    f"nothing to compare with: {message[:400]}"
                ) from error
            skipped[task.name] = f"the unsharded model cannot do this: {message[:240]}"
            continue
        subject.truths[task.name] = same[key]
        if task.loss == "hidden" and (reason := _linear_logp_misfit(subject.model, same[key].batch)) is not None:
            skipped[task.name] = reason
    return skipped


@torch.no_grad()
def _linear_logp_misfit(model: nn.Module, batch: Batch) -> str | None:
    """Why `linear_logp` does not compute what the unsharded model computes; None if it does."""
    microbatch = batch.microbatches[0]
    try:
        logp = hidden_logp(model, microbatch.ids)
    except Exception as error:  # noqa: BLE001 - the code of a model may raise anything
        return f"hidden states and lm_head of this model do not fit linear_logp: {' '.join(str(error).split())[:160]}"
    if (logp - token_logp(forward(model, microbatch), microbatch.ids)).abs().max() > 1e-4:
        return "this model does more to its logits after the lm_head than linear_logp is told"
    return None


# -- Computing with the model --------------------------------------------------------------------


def forward(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """Logits as the model returns them."""
    mask = {} if microbatch.mask is None else {"attention_mask": microbatch.mask}
    logits: Tensor = model(input_ids=microbatch.ids, **mask, **microbatch.extra).logits
    return logits


def token_logp(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each next token, from whole logits: [rows, length - 1]."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def hidden_logp(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probability of each next token by `linear_logp`, without logits: [rows, length - 1]."""
    from rl_parallel_plans.logp import linear_logp

    whole: Any = model
    backbone = whole.base_model if whole.base_model is not model else whole.get_decoder()
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return linear_logp(
        hidden.flatten(0, 1),
        model.get_submodule(output_head(model) or "lm_head"),
        ids[:, 1:].flatten(),
        chunk_size=7,
        softcap=getattr(config, "final_logit_softcapping", None) or None,
        logit_scale=scale,
    ).view(len(ids), -1)


def run_truth(model: nn.Module, batch: Batch) -> Truth:
    """Forward and backward of every microbatch without sharding; clears the model's gradients afterwards."""
    all_logits, by_microbatch, loss = [], [], 0.0
    for microbatch in batch.microbatches:
        model.zero_grad()
        logits = forward(model, microbatch)
        part = token_logp(logits, microbatch.ids)[microbatch.counted].sum() / -batch.count
        part.backward()  # type: ignore[no-untyped-call]
        all_logits.append(logits.detach())
        loss += part.item()
        by_microbatch.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    names = dict.fromkeys(name for gradients in by_microbatch for name in gradients)
    total: Any = {name: sum(g[name] for g in by_microbatch if name in g) for name in names}
    return Truth(batch=batch, logits=all_logits, loss=loss, gradients=total, by_microbatch=by_microbatch)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest deviation, relative to the largest entry of the truth."""
    return ((value - truth).abs().max() / truth.abs().max().clamp_min(1e-30)).item()


def gradient_scales(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """What an error of each gradient is relative to: its largest entry, unless others are far larger."""
    largest = {name: gradient.abs().max().item() for name, gradient in gradients.items()}
    # A key bias without rotary embeddings has a gradient of exactly zero; its rounding is no error.
    floor = max(1e-5 * max(largest.values(), default=0.0), 1e-30)
    return {name: max(value, floor) for name, value in largest.items()}


def tie_groups(model: nn.Module) -> list[list[str]]:
    """Groups of parameter names that are one parameter."""
    return [sorted(names) for names in tied_names(model)]


def frozen_parameters(model: nn.Module, *, freeze: bool) -> set[str]:
    """Parameters that the model never trains, such as a router's bias (Afmoe), and with `freeze` every third one.

    Tied parameters and the lm_head are not among the latter.
    """
    names = [name for name, _ in model.named_parameters()]
    kept = {name for group in tie_groups(model) for name in group} | {f"{output_head(model)}.weight"}
    chosen = {name for name in names[1::3] if name not in kept} if freeze else set()
    return chosen | {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def add_rounding_noise(task: Task, facts: dict[str, Any], subject: Subject) -> None:
    """Where something is off by little, add how far the unsharded model moves when every weight moves by its last bit.

    No sharding can be blamed for errors of that size.
    """
    errors = [facts.get("logits", 0.0), *(row["error"] for row in facts.get("rows", ()))]
    if not any(BAR < error < SURELY_WRONG for error in errors):
        return
    model, truth = subject.model, subject.truths[task.name]
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    scales = gradient_scales(truth.gradients)
    for seed in range(3):
        generator = torch.Generator().manual_seed(99 + seed)
        with torch.no_grad():
            for parameter in model.parameters():
                sign = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + sign * ULP)
        try:
            moved = run_truth(model, truth.batch)
        finally:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(saved[name])
        noises = [relative_error(m, t) for m, t in zip(moved.logits, truth.logits, strict=True)]
        facts["logits_noise"] = max(facts["logits_noise"], *noises)
        for row in facts["rows"]:
            if (name := row["name"]) in truth.gradients:
                noise = (moved.gradients[name] - truth.gradients[name]).abs().max() / scales[name]
                row["noise"] = max(row["noise"], noise.item())


# -- Inputs --------------------------------------------------------------------------------------


def draw(model: nn.Module, task: Task, *, dp: int) -> Batch:
    """Inputs of a task, far from every tie of a router."""
    best: Batch | None = None
    for seed in range(DRAWS):
        microbatches = _inputs(model, task, dp=dp, seed=seed)
        with torch.no_grad(), _TopKGaps() as gaps:
            for microbatch in microbatches:
                forward(model, microbatch)
        if best is None or gaps.smallest > best.margin:
            best = Batch(microbatches=microbatches, margin=gaps.smallest)
        if best.margin >= NEAR_TIE:
            break
    assert best is not None
    return best


class _TopKGaps(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


def _inputs(model: nn.Module, task: Task, *, dp: int, seed: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(1000 + seed)
    config: Any = getattr(model, "config", None)
    special = set()  # tokens with a meaning of their own: padding, image, end
    for owner in (config, getattr(config, "text_config", None)):
        for name, value in (owner.to_dict() if owner is not None else {}).items():
            if "token" in name and isinstance(value, int):
                special.add(value)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    tokens = torch.tensor([token for token in range(vocabulary) if token not in special])
    rows = task.rows * dp
    microbatches = []
    for _ in range(task.microbatches):
        ids = tokens[torch.randint(len(tokens), (rows, task.length), generator=generator)]
        extra: dict[str, Tensor] = {}
        if task.image:
            extra, image_token, count = _image_inputs(model, images=rows, generator=generator)
            ids = torch.cat([ids[:, :3], torch.full((rows, count), image_token), ids[:, 3:]], dim=1)
            if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                extra["mm_token_type_ids"] = (ids == image_token).long()
        mask = None
        if task.left_padding:
            padding = torch.arange(rows) % 4 + (torch.arange(rows) > 0)
            mask = (torch.arange(task.length)[None] >= padding[:, None]).long()
        microbatches.append(Microbatch(ids=ids, mask=mask, extra=extra))
    return microbatches


@torch.no_grad()
def _image_inputs(model: nn.Module, *, images: int, generator: torch.Generator) -> tuple[dict[str, Tensor], int, int]:
    """Arguments of forward for `images` random images, the id of an image token, and how many of them make an image.

    Models take images as [images, channels, height, width], or as patches in rows with a grid that says where they
    lie. Raises PlanError for a model that takes them in another way.
    """
    config: Any = getattr(model, "config", None)
    tokens = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    token = next((token for token in tokens if token is not None), None)
    vision = getattr(config, "vision_config", None)
    if token is None or vision is None or not hasattr(model, "get_image_features"):
        raise PlanError("this model names no image token, or does not say what it makes of an image")
    parameters = inspect.signature(model.forward).parameters
    if "image_grid_thw" in parameters:
        side = 2 * int(getattr(vision, "spatial_merge_size", 2))  # two by two merged patches: four tokens an image
        channels = int(getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3)
        features = channels * int(getattr(vision, "temporal_patch_size", 1)) * int(vision.patch_size) ** 2
        pixels = torch.randn(images * side * side, features, generator=generator)
        extra = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]] * images)}
    else:
        size = getattr(vision, "image_size", None)
        size = size[0] if isinstance(size, list | tuple) else size
        if not isinstance(size, int):
            raise PlanError("this model does not say how large its images are")
        extra = {"pixel_values": torch.randn(images, 3, size, size, generator=generator)}
        if "image_sizes" in parameters:
            extra["image_sizes"] = torch.tensor([[size, size]] * images)

    def vectors(features: Any) -> int:  # the form of this result has changed between releases
        pooled = getattr(features, "pooler_output", None)
        features = features if pooled is None else pooled
        if isinstance(features, Tensor):
            return features.numel() // features.shape[-1]
        return sum(map(vectors, features)) if isinstance(features, tuple | list) else 0

    count = vectors(model.get_image_features(**extra))  # type: ignore[operator]
    if not count or count % images:
        raise PlanError(f"this model makes {count} tokens of {images} images of one size")
    return extra, int(token), count // images
