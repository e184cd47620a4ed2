"""FLOPs that a model takes to be trained on rows of given lengths, as its mathematics needs them.

For a row of T tokens of which n are asked, a parameter W and a layer of
attention with window w and width d = heads · (query width + value width):

    matrix products    2 |W| T forward, 2 |W| T for the gradient of its input, 2 |W| T for its own where it is trained
    head               the same with n in the place of T: logits of other tokens are never made
    attention          2 d · pairs(T, w) forward, twice that backward; pairs(T, w) = sum over t of min(t, w), t = 1 .. T

A mask is counted as what it saves: causal attention over T tokens is T (T + 1) / 2 pairs. Experts count with the share
that sees a token. Norms, rotary angles, softmax and the router's choice are not counted: they are no matrix products.
The convention is that of PaLM's appendix B (arXiv:2204.02311) with the causal half of attention left out; what
activation checkpointing computes again is in hardware FLOPs (arXiv:2205.05198) and not in model FLOPs.

What is multiplied is read from the modules, and not from names in the config; weights may be on the meta device:

    decoder            the module that owns the input embedding; towers of other modalities are outside of it
    matrix products    every parameter of two dims or more that is not an embedding
    experts            a stack [experts, ., .], or a list `experts` of modules: top_k of them see a token
    attention          a module that says `is_causal`; its width is that of what its output projection reads

The scans of state-space layers and of linear attention are left out; their projections and convolutions are not.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from rl_backends.errors import ModelError
from rl_parallel_plans.structure import input_embedding


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Of matrix products, for one token."""

    forward: float
    """2 for each parameter."""
    backward: float
    """2 for the gradient of its input, where anything needs it, and 2 for its own, where it is trained."""


@dataclass(frozen=True, slots=True)
class AttentionFlops:
    """Of all layers with one window."""

    window: int | None
    """Keys that a query sees at most, itself included; None for all before it."""
    per_pair: float
    """Of a query and a key that sees it, forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """What one token, one asked token and one pair of tokens cost. Made by `ModelFlops.of(model)`."""

    layers: TokenFlops
    """Of each token that is read."""
    head: TokenFlops
    """Of each token that is asked about."""
    attention: tuple[AttentionFlops, ...]
    """Of each pair of tokens."""

    @classmethod
    def of(cls, model: nn.Module) -> "ModelFlops":
        """Read a Hugging Face decoder with its head, before it is sharded; its weights may be on the meta device.

        Raises:
            ModelError: a model whose modules do not tell what a token costs.
        """
        get = getattr(model, "get_output_embeddings", None)
        decoder, head = decoder_of(model), None if get is None else get()
        head = getattr(model, "score", None) if head is None else head  # None of a model without either
        hidden_size = int(next(model.get_input_embeddings().parameters()).shape[-1])  # type: ignore[operator]
        trains = any(parameter.requires_grad for parameter in decoder.parameters())
        widths = attention_widths(decoder, hidden_size)
        windows = dict.fromkeys(window for window, _ in widths)
        return cls(
            layers=_token_flops(decoder, gradient_of_input=trains),
            head=TokenFlops(0.0, 0.0) if head is None else _token_flops(head, gradient_of_input=trains),
            attention=tuple(
                AttentionFlops(window, 2.0 * sum(n * width for (each, width), n in widths.items() if each == window))
                for window in windows
            ),
        )

    def of_rows(
        self, lengths: Int[Tensor, " b"], asked: Int[Tensor, " b"], *, recomputed: bool = False
    ) -> Float64[Tensor, " b"]:
        """Of a forward and a backward pass over each row.

        Args:
            lengths: tokens that are read of each row.
            asked: tokens that something is wanted of.
            recomputed: count every layer's forward, and the head's, once more, as checkpointing runs them.
        """
        tokens, wanted = lengths.double(), asked.double()
        again = 1 if recomputed else 0
        total = tokens * (self.layers.forward * (1 + again) + self.layers.backward)
        total += wanted * (self.head.forward * (1 + again) + self.head.backward)
        passes = 1 + again + (2 if self.layers.backward > 0 else 0)
        for each in self.attention:
            total += passes * each.per_pair * _pairs(tokens, each.window)
        return total


def _token_flops(module: nn.Module, *, gradient_of_input: bool) -> TokenFlops:
    forward = backward = 0.0
    for parameter, share in matmul_parameters(module):
        product = 2.0 * parameter.numel() * share
        forward += product
        backward += product * (int(gradient_of_input) + int(parameter.requires_grad))
    return TokenFlops(forward, backward)


def _pairs(tokens: Tensor, window: int | None) -> Tensor:
    """Queries and keys of causal rows: sum over t of min(t, window)."""
    if window is None:
        return tokens * (tokens + 1) / 2
    inside = torch.clamp(tokens, max=window)
    return inside * (inside + 1) / 2 + (tokens - inside) * window


# ---- What is multiplied for each token, read from the modules.

_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "experts_per_token")
"""What modules, or else their config, call the number of experts that see a token. Modules say `top_k` too, which in a
config is an option of sampling."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def decoder_of(model: nn.Module) -> nn.Module:
    """The module whose layers read tokens."""
    path = input_embedding(model)
    if path is None:
        raise ModelError(
            f"{type(model).__name__} has no input embedding, so that nothing tells which layers read tokens"
        )
    return model.get_submodule(path.rpartition(".")[0])


def matmul_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter that tokens are multiplied with, and the share of it that one token meets."""
    shares: dict[int, float] = {}  # of each module inside a list of experts
    for path, each in module.named_modules():
        if isinstance(each, nn.ModuleList) and path.rpartition(".")[2] == "experts":
            share = _chosen(module, path) / len(each)
            shares |= {id(part): share for expert in each for part in expert.modules()}
    for path, each in module.named_modules():
        if isinstance(each, nn.Embedding):
            continue
        parameters = list(each.parameters(recurse=False))
        stacks = [] if isinstance(each, _CONVOLUTIONS) else [p for p in parameters if p.ndim == 3]
        if stacks:  # two dims are their biases then
            share = _chosen(module, path) / stacks[0].shape[0]
            yield from ((stack, share) for stack in stacks)
        else:
            yield from ((p, shares.get(id(each), 1.0)) for p in parameters if p.ndim > 1)


def attention_widths(decoder: nn.Module, hidden_size: int) -> Counter[tuple[int | None, int]]:
    """How many layers there are of each (window, width): keys a query sees at most, and numbers multiplied per pair.

    A query and a key are multiplied over all heads' query width, and the value over all heads' value width.
    """
    layers: Counter[tuple[int | None, int]] = Counter()
    for path, module in decoder.named_modules():
        if isinstance(getattr(module, "is_causal", None), bool):
            layers[_window(module), _width(module, path, hidden_size)] += 1
    return layers


def _chosen(root: nn.Module, path: str) -> int:
    """Experts that see a token, as something around those at `path` says: the nearest first."""
    ancestors = [root.get_submodule(path)]
    while path:
        path = path.rpartition(".")[0]
        ancestors.append(root.get_submodule(path))
    for ancestor in ancestors:
        modules = [(each, ("top_k", *_CHOSEN_EXPERTS)) for each in (ancestor, *ancestor.children())]
        for holder, names in (*modules, (getattr(ancestor, "config", None), _CHOSEN_EXPERTS)):
            for name in names:
                if isinstance(found := getattr(holder, name, None), int):
                    return found
    raise ModelError(
        f"{type(ancestors[0]).__name__} holds experts, and no module around it says how many see a token (looked for "
        f"top_k, {', '.join(_CHOSEN_EXPERTS)})"
    )


def _width(attention: nn.Module, path: str, hidden_size: int) -> int:
    projections = [sizes for module in attention.modules() if (sizes := _sizes(module)) is not None]
    values = max((inputs for inputs, outputs in projections if outputs == hidden_size), default=None)
    if values is None:
        raise ModelError(
            f"{path} ({type(attention).__name__}) has no linear layer to the hidden size {hidden_size}, from which the "
            "width of its heads could be read"
        )
    of_key, of_value = (getattr(attention, name, None) for name in ("qk_head_dim", "v_head_dim"))
    queries = values * of_key // of_value if of_key and of_value else values
    return queries + values


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer; that of GPT-2 is a class of transformers with other names."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    inputs, outputs = getattr(module, "nx", None), getattr(module, "nf", None)
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


def _window(attention: nn.Module) -> int | None:
    """Keys that a query sees at most, itself included; None for all before it."""
    config: Any = getattr(attention, "config", None)
    if hasattr(attention, "sliding_window"):
        window: Any = attention.sliding_window
    else:
        window = getattr(config, "sliding_window", None)
        kinds, layer = getattr(config, "layer_types", None), getattr(attention, "layer_idx", None)
        if kinds is not None and isinstance(layer, int) and kinds[layer] != "sliding_attention":
            return None
    return window if isinstance(window, int) and window > 0 else None


# ---- Peak speed of devices for dense matrix products, from their makers' data sheets.
#
# Data sheets print figures "with sparsity" that no dense product reaches; here are the dense ones, half of those.
# All in 10^12 FLOP/s (a multiplication and an addition are two), for one device as torch names it:
#
#     NVIDIA V100 data sheet (2020), A100 (2021), A30, A10 (2021), A40 (2022), H100 (2022: SXM, PCIe; 2024: NVL),
#     H200 (2024: SXM, NVL), GH200 (2023), L4, L40 (2023), L40S (2023), HGX B200 and GB200 NVL72 (2025, a GPU's share),
#     AMD Instinct MI300X (2023), MI325X (2024)

MatmulDtype = Literal["float32", "tfloat32", "float16", "bfloat16"]

_HOPPER_SXM, _HOPPER_NVL = (989.4, 989.4, 494.7, 66.9), (835.5, 835.5, 417.5, 60.0)
_MI300X = (1307.4, 1307.4, 653.7, 163.4)

# The whole name must fit: a part of a device (MIG) and a namesake of a later year are other devices.
_TFLOPS: dict[str, tuple[float | None, ...]] = {  # bfloat16, float16, tfloat32, float32
    r"Tesla V100-SXM2-\d+GB(-LS)?": (None, 125.0, None, 15.7),
    r"(NVIDIA )?A100-(SXM4|PCIE|PCI)-\d+GB|NVIDIA A100 80GB PCIe": (312.0, 312.0, 156.0, 19.5),
    r"NVIDIA A30": (165.0, 165.0, 82.0, 10.3),
    r"NVIDIA A10": (125.0, 125.0, 62.5, 31.2),
    r"NVIDIA A40": (149.7, 149.7, 74.8, 37.4),
    r"NVIDIA H100 80GB HBM3|NVIDIA H200|NVIDIA GH200 (480GB|144G HBM3e)": _HOPPER_SXM,
    r"NVIDIA H100 PCIe": (756.0, 756.0, 378.0, 51.0),
    r"NVIDIA H100 NVL|NVIDIA H200 NVL": _HOPPER_NVL,
    r"NVIDIA L4": (121.0, 121.0, 60.0, 30.3),
    r"NVIDIA L40": (181.05, 181.05, 90.5, 90.5),
    r"NVIDIA L40S": (362.05, 362.05, 183.0, 91.6),
    r"NVIDIA B200": (2250.0, 2250.0, 1125.0, 75.0),
    r"NVIDIA GB200": (2500.0, 2500.0, 1250.0, 80.0),
    r"AMD Instinct MI3(00|25)X( OAM)?": _MI300X,
}


def peak_flops_per_s(device_name: str, dtype: MatmulDtype) -> float | None:
    """FLOP/s that the device's data sheet promises for dense matrix products; None where this table lacks it.

    Args:
        device_name: as `torch.cuda.get_device_name()` says it.
        dtype: what is multiplied. `float32` products run as `tfloat32` where
            `torch.get_float32_matmul_precision()` is not "highest".
    """
    for pattern, tflops in _TFLOPS.items():
        if re.fullmatch(pattern, device_name.strip()):
            found = tflops[("bfloat16", "float16", "tfloat32", "float32").index(dtype)]
            return None if found is None else found * 1e12
    return None


def peak_of_this_device(device: torch.device, precision: Literal["float32", "bfloat16"]) -> float | None:
    """The same for the GPU under `device`, computing in `precision` as torch is set now; None for a CPU."""
    if device.type != "cuda":
        return None
    fast = precision == "float32" and torch.get_float32_matmul_precision() != "highest"
    return peak_flops_per_s(torch.cuda.get_device_name(device), "tfloat32" if fast else precision)
