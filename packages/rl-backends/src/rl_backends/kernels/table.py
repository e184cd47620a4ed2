# ruff: noqa: PLR0917 - ops are called by position
"""The table of kernels: what each needs, when it is refused, and how a model is made to run it.

A choice of `KernelsConfig` is looked up here. What its entry needs is checked in two steps, each of which lists all
reasons at once: against the configuration when that is made, and against this machine and the model before anything of
the model is changed. `register_kernel` adds an entry, or takes the place of one.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rl_backends.batching.microbatches import ModelInputs
from rl_backends.errors import ModelError
from rl_backends.kernels.layers import (
    float8_linears,
    replace_mlps,
    replace_norms,
    replace_rope,
)
from rl_backends.packing.attention import LARGEST_HEAD, AttentionKernel, block_masks
from rl_backends.packing.enable import attention_modules, enable_packing, enable_padded_kernel
from rl_backends.readers import has_language_model_head
from rl_parallel_plans.structure import head_size

if TYPE_CHECKING:
    from rl_backends.dtensor.config import DTensorConfig

Part = Literal["attention", "loss", "norm", "rope", "mlp", "float8"]
FLOAT8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One entry of the table."""

    part: Part
    name: str
    is_what: str
    """What runs, in a few words for `explain`."""
    devices: tuple[str, ...] = ("cuda",)
    precisions: tuple[str, ...] = ("float32", "bfloat16")
    packages: tuple[tuple[str, str], ...] = ()
    """Modules that must be importable, each with the command that installs it."""
    config_problems: "Callable[[DTensorConfig], Iterable[str]]" = lambda _: ()
    """Reasons against a configuration, beside device and precision."""
    model_problems: "Callable[[nn.Module, DTensorConfig], Iterable[str]]" = lambda _model, _config: ()
    """Reasons against a model, which may be on the meta device."""
    op: Callable[..., Any] | None = None
    """Of "norm", "rope" and "mlp": what computes it; see `rl_backends.kernels.layers`."""


KERNELS: dict[tuple[str, str], Kernel] = {}
"""Part and name -> entry. What runs without a choice ("torch", "auto") has none."""

PLAIN = ("torch", "auto", None)


def register_kernel(kernel: Kernel) -> None:
    """Add an entry to the table, or replace the one of its part and name."""
    KERNELS[kernel.part, kernel.name] = kernel


def static_problems(config: "DTensorConfig") -> Iterator[str]:
    """One sentence for each choice that the rest of the configuration rules out, whatever the machine and model."""

    def reasons(kernel: Kernel) -> Iterator[str]:
        if config.device not in kernel.devices:
            yield f"it runs on {' or '.join(kernel.devices)}, not on a CPU"
        if config.precision not in kernel.precisions:
            yield f"it computes in {' or '.join(kernel.precisions)}, not in {config.precision}"
        yield from kernel.config_problems(config)

    kernels, unknown = _chosen(config)
    yield from unknown
    yield from _refusals(kernels, reasons)


def _chosen(config: "DTensorConfig") -> tuple[list[Kernel], list[str]]:
    """The entry of each choice, and a sentence for each choice that the table lacks."""
    found, unknown = [], []
    for part in ("attention", "loss", "norm", "rope", "mlp", "float8"):
        name = getattr(config.kernels, part)
        if name in PLAIN:
            continue
        if (kernel := KERNELS.get((part, name))) is None:
            choices = " or ".join([repr("torch"), *(repr(each) for of, each in KERNELS if of == part)])
            unknown.append(
                f"kernels.{part}={name!r}: there is no such kernel; choose {choices}, or add one with register_kernel"
            )
        elif part == "float8" and config.kernels.float8_emulate:
            found.append(replace(kernel, devices=("cpu", "cuda")))
        else:
            found.append(kernel)
    return found, unknown


def _refusals(kernels: Iterable[Kernel], reasons: Callable[[Kernel], Iterable[str]]) -> Iterator[str]:
    for kernel in kernels:
        if against := "; ".join(dict.fromkeys(reasons(kernel))):  # what holds for all layers once
            remedy = {"attention": "'auto'", "float8": "None, or float8_emulate=True"}.get(kernel.part, "'torch'")
            yield f"kernels.{kernel.part}={kernel.name!r} cannot be used: {against}; choose {remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsInUse:
    """What runs in a model, after `apply_kernels`."""

    attention: AttentionKernel | Literal["model"]
    """The kernel of attention; "model" for the one that the model was loaded with."""
    windows: tuple[int, ...]
    """Of sliding attention in the model, 0 where a layer has none; empty unless attention is "flex"."""
    lines: tuple[str, ...]
    """One for each part, for `explain`."""

    def arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        """What attention is handed beside what every decoder takes, once for all layers, so that none of them waits."""
        starts, lengths = inputs.cu_seq_lens, inputs.row_lengths
        if lengths is None or starts is None:
            return {}
        if self.attention == "flex":
            return {"block_masks": block_masks(starts, num_tokens=sum(lengths), windows=self.windows)}
        return {"row_lengths": lengths} if self.attention == "sdpa" and starts.device.type != "cpu" else {}


def apply_kernels(model: nn.Module, config: "DTensorConfig") -> KernelsInUse:
    """Let `model`, whole and perhaps on the meta device, run the kernels that `config` chooses.

    Raises:
        ModelError: kernels that cannot run on this machine or with this model, all of them with their reasons; nothing
            of the model has changed.
    """
    kernels, _ = _chosen(config)
    reasons: Callable[[Kernel], Iterable[str]] = lambda each: (*_missing(each), *each.model_problems(model, config))  # noqa: E731
    if problems := "; ".join(_refusals(kernels, reasons)):
        raise ModelError(problems)

    attention, reason = _attention_of(model, config)
    if attention != "model":
        enable = enable_packing if config.sequence_packing else enable_padded_kernel
        enable(model, kernel=attention)
    loss, size = config.kernels.loss, config.kernels.loss_chunk_size
    does = f"logits in chunks: {'chosen by their size' if size is None else f'{size} tokens'}"
    if loss != "torch":
        does = "of log-probabilities and entropies; torch for those of given tokens and the top k, which no kernel has"
    lines = [f"kernel of attention: {reason}", f"kernel of the loss: {loss}, {does}"]
    by_part = {kernel.part: kernel for kernel in kernels}
    replacements: tuple[tuple[Part, Callable[[nn.Module, Any], int], str], ...] = (
        ("norm", replace_norms, "RMS norms"),
        ("rope", replace_rope, "attentions"),
        ("mlp", replace_mlps, "MLPs"),
    )
    for part, put, things in replacements:
        if (kernel := by_part.get(part)) is not None:
            assert kernel.op is not None, f"{kernel} has no op"
            lines.append(f"kernel of {part}: {kernel.name}, {kernel.is_what}, in {put(model, kernel.op)} {things}")
        elif config.device == "cpu" and not config.compile:
            found = put(model, None)
            lines.append(
                f"kernel of {part}: torch, the numbers of the model's own code; fewer passes in {found} {things}"
            )
        else:
            lines.append(f"kernel of {part}: torch, the model's own code")
    lines.append(_apply_float8(model, config))
    windows: set[int] = set()
    if attention == "flex":
        windows = {int(getattr(each, "sliding_window", None) or 0) for _, each in attention_modules(model)}
    return KernelsInUse(attention=attention, windows=tuple(sorted(windows)), lines=tuple(lines))


def _missing(kernel: Kernel) -> Iterator[str]:
    for module, install in kernel.packages:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever a package for GPUs raises where there is none
            yield f"it needs {module}, which cannot be imported here ({error}): {install}"


# -- attention -----------------------------------------------------------------------------------------------

AUTO: tuple[AttentionKernel, ...] = ("varlen", "flex")
"""What is tried for packed rows on a GPU, the first first."""
SMALLEST_HEAD_OF_FLEX = 16


def _attention_of(model: nn.Module, config: "DTensorConfig") -> tuple[AttentionKernel | Literal["model"], str]:
    """Name and reason of the kernel; "model" for what the model was loaded with."""
    asked = config.kernels.attention
    if config.context_parallel_size > 1:
        return "model", "sdpa, over the keys of all context-parallel ranks"
    if asked != "auto":
        return asked, f"{asked}, {KERNELS['attention', asked].is_what}"
    if not config.sequence_packing:
        own = {str(module.config._attn_implementation) for _, module in attention_modules(model)}  # type: ignore[union-attr]  # noqa: SLF001 - as transformers reads it
        return "model", f"{' and '.join(sorted(own)) or 'unknown'}, as the model was loaded (auto, padded rows)"
    if config.device == "cpu":
        return "sdpa", f"sdpa, {KERNELS['attention', 'sdpa'].is_what} (auto, packed rows on a CPU)"
    passed_over: list[str] = []
    for name in AUTO:
        kernel = KERNELS["attention", name]
        reasons = [
            *([] if config.precision in kernel.precisions else [f"computing in {config.precision}"]),
            *_missing(kernel),
            *kernel.model_problems(model, config),
        ]
        if not reasons:
            return name, "; ".join([f"{name}, {kernel.is_what} (auto, packed rows on a GPU)", *passed_over])
        passed_over.append(f"not {name}: {', '.join(dict.fromkeys(reasons))}")
    return "sdpa", "; ".join([f"sdpa, {KERNELS['attention', 'sdpa'].is_what} (auto)", *passed_over])


def _of_flash(model: nn.Module, config: "DTensorConfig", *, caps: bool) -> Iterator[str]:
    """What flash kernels do not compute of a model's attention."""
    del config
    for _, attention in attention_modules(model):
        if any("sink" in name for name, _ in attention.named_parameters(recurse=False)):
            yield "it has no attention sinks, and the model has"
        if not caps and getattr(attention.config, "attn_logit_softcapping", None):
            yield "it does not cap scores, and the model does"
        keys, values = _head_sizes(attention)
        if keys != values:
            yield f"queries and values must be of one size, and are {keys} and {values}"
        if keys > LARGEST_HEAD or keys % 8:
            yield f"heads must be of a multiple of 8 up to {LARGEST_HEAD}, and are {keys}"


def _of_flex(model: nn.Module, config: "DTensorConfig") -> Iterator[str]:
    del config
    smallest = min((min(_head_sizes(attention)) for _, attention in attention_modules(model)), default=0)
    if smallest < SMALLEST_HEAD_OF_FLEX:
        yield f"heads must be of {SMALLEST_HEAD_OF_FLEX} at least, and are {smallest}"


def _head_sizes(attention: Any) -> tuple[int, int]:
    """Of queries and of values."""
    head = head_size(attention, attention.config) or 0
    return int(getattr(attention, "qk_head_dim", head)), int(getattr(attention, "v_head_dim", head))


def _without_context_parallelism(config: "DTensorConfig") -> Iterator[str]:
    if config.context_parallel_size > 1:
        yield "context parallelism gathers keys and values for scaled_dot_product_attention"


def _only_packed(config: "DTensorConfig") -> Iterator[str]:
    yield from _without_context_parallelism(config)
    if not config.sequence_packing:
        yield "it reads packed rows: set sequence_packing=True"


# -- loss ----------------------------------------------------------------------------------------------------


def _needs_a_head(model: nn.Module, config: "DTensorConfig") -> Iterator[str]:
    del config
    if not has_language_model_head(model):
        yield "the model has no language-model head"


# -- norm, rope, mlp -----------------------------------------------------------------------------------------


def _liger_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction  # type: ignore[import-not-found]

    # Not in place: what the gradient comes from may be read again, as the residual of Gemma is.
    normed: Tensor = LigerRMSNormFunction.apply(hidden, weight, eps, offset, "gemma" if offset else "llama", False)
    return normed


def _liger_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerRopeFunction

    rotated: tuple[Tensor, Tensor] = LigerRopeFunction.apply(query, key, cos, sin)
    return rotated


def _liger_mlp(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from liger_kernel import ops  # type: ignore[import-not-found]

    function = ops.LigerSiLUMulFunction if activation == "silu" else ops.LigerGELUMulFunction
    product: Tensor = function.apply(gate, up)
    return product


@functools.cache
def _hub_norm_layer() -> Any:
    from kernels import LayerRepository  # type: ignore[import-not-found]

    return LayerRepository(repo_id="kernels-community/liger-kernels", layer_name="LigerRMSNorm", version=3).load()


def _hub_norm(hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    said = {"weight": weight, "variance_epsilon": eps, "offset": offset, "in_place": False, "row_mode": None}
    normed: Tensor = _hub_norm_layer().forward(
        SimpleNamespace(**said, casting_mode="gemma" if offset else "llama"), hidden
    )
    return normed


# -- float8 --------------------------------------------------------------------------------------------------


def _float8_config(config: "DTensorConfig") -> Iterator[str]:
    if config.tensor_parallel_size > 1:
        yield "torchao's linear layers do not know the shards of tensor_parallel_size > 1"
    if config.lora_cfg is not None:
        yield "adapters stand in the place of linear layers (lora_cfg)"


def _float8_model(model: nn.Module, config: "DTensorConfig") -> Iterator[str]:
    if next(float8_linears(model), None) is None:
        yield "no linear layer of a decoder layer has sizes that are multiples of 16"
    if not config.kernels.float8_emulate and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < FLOAT8_CAPABILITY:
            yield f"this GPU has compute capability {capability[0]}.{capability[1]}, and 8 bits need 8.9"


def _apply_float8(model: nn.Module, config: "DTensorConfig") -> str:
    kernels = config.kernels
    if kernels.float8 is None:
        return f"kernel of linear layers: torch, in {config.precision}"
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(kernels.float8)
    if kernels.float8_emulate:
        recipe = replace(recipe, emulate=True)
    chosen = dict(float8_linears(model))
    others = sum(isinstance(module, nn.Linear) for module in model.modules()) - len(chosen)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name in chosen)
    how = ", emulated" if kernels.float8_emulate else ""
    return (
        f"kernel of linear layers: torchao's float8 {kernels.float8}{how} in {len(chosen)}; torch in {others} others "
        f"(head, routers, sizes that 16 does not divide), and in stacked experts"
    )


# -- the table -----------------------------------------------------------------------------------------------

LIGER = (("liger_kernel.ops", "pip install 'liger-kernel>=0.8.3', which needs triton and so a GPU"),)
for _kernel in (
    Kernel(
        part="attention",
        name="sdpa",
        is_what="torch's scaled_dot_product_attention, capped scores and sinks in blocks of queries",
        devices=("cpu", "cuda"),
    ),
    Kernel(
        part="attention",
        name="flex",
        is_what="torch's flex_attention, compiled",
        packages=(("triton", "install torch for CUDA, which brings it"),),
        config_problems=_without_context_parallelism,
        model_problems=_of_flex,
    ),
    Kernel(
        part="attention",
        name="varlen",
        is_what="torch's variable-length flash attention",
        precisions=("bfloat16",),
        config_problems=_only_packed,
        model_problems=functools.partial(_of_flash, caps=False),
    ),
    Kernel(
        part="attention",
        name="flash",
        is_what="flash_attn_varlen_func of the package flash-attn",
        precisions=("bfloat16",),
        packages=(("flash_attn", "pip install flash-attn"),),
        config_problems=_only_packed,
        model_problems=functools.partial(_of_flash, caps=True),
    ),
    Kernel(
        part="loss",
        name="liger",
        is_what="LigerFusedLinearScaledCrossEntropyFunction",
        packages=LIGER,
        model_problems=_needs_a_head,
    ),
    Kernel(
        part="loss",
        name="verl",
        is_what="verl.utils.kernel.linear_cross_entropy",
        packages=(("verl.utils.kernel.linear_cross_entropy", "pip install verl"),),
        model_problems=_needs_a_head,
    ),
    Kernel(part="norm", name="liger", is_what="LigerRMSNormFunction", packages=LIGER, op=_liger_norm),
    Kernel(
        part="norm",
        name="hub",
        is_what="LigerRMSNorm of kernels-community/liger-kernels on the Hub",
        packages=(("kernels", "pip install 'kernels>=0.18.2,<0.19'"), ("triton", "install torch for CUDA")),
        op=_hub_norm,
    ),
    Kernel(part="rope", name="liger", is_what="LigerRopeFunction", packages=LIGER, op=_liger_rope),
    Kernel(part="mlp", name="liger", is_what="LigerSiLUMulFunction or GELU", packages=LIGER, op=_liger_mlp),
    *(
        Kernel(
            part="float8",
            name=recipe,
            is_what=f"torchao's Float8Linear, {recipe}",
            packages=(("torchao.float8", "pip install 'torchao>=0.18'"),),
            config_problems=_float8_config,
            model_problems=_float8_model,
        )
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ),
):
    register_kernel(_kernel)
