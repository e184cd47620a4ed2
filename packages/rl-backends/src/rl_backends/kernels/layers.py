"""Let norms, rotary embeddings, MLPs and linear layers of a model run by other code than its own.

What a module computes is not guessed by its name: its own forward runs on a few random numbers and must agree with
what the kernel is made for, else the model is refused. Weights, names and state stay as they are, and the code that
runs a kernel is the same for all kernels of a part:

    norm    op(hidden [..., H], weight [H], eps, offset) -> [..., H]: hidden / rms(hidden) * (offset + weight)
    rope    op(query [B, Q, T, D], key [B, K, T, D], cos [1 or B, T, D], sin) -> query and key, rotated by halves
    mlp     op(gate [..., I], up [..., I], activation) -> activation(gate) * up; "silu", or "gelu" by tanh
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rl_backends.errors import ModelError
from rl_backends.kernels.cpu import rms_norm, rotate, runs_here, swiglu

ROPE = "apply_rotary_pos_emb"
"""What transformers calls the function of queries, keys, cosines and sines, in every modelling module."""


def _gives(run: Callable[[], Any], wanted: Any) -> bool:
    """Whether a module's own code returns these tensors, and raises nothing."""
    try:
        torch.testing.assert_close(run(), wanted, rtol=1e-5, atol=1e-6)
    except (AssertionError, TypeError, RuntimeError, AttributeError, ValueError):
        return False
    return True


# -- RMS norms -------------------------------------------------------------------------------------------


def _norms(model: nn.Module, look: Callable[[str, nn.Module], Any]) -> Iterator[tuple[nn.Module, Any]]:
    """Every RMS norm, and what `look` finds out about the first of its class."""
    found: dict[type[nn.Module], Any] = {}
    for path, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            if type(module) not in found:
                found[type(module)] = look(path, module)
            yield module, found[type(module)]


def replace_norms(model: nn.Module, op: Callable[..., Tensor] | None) -> int:
    """Let every RMS norm run by `op`; return how many.

    op: None for `cpu.rms_norm`, on a CPU, in the place of norms that have the same bits.

    Raises:
        ModelError: a norm of that name computes something else than `op`, or there is none.
    """
    norms = list(_norms(model, _has_bits_of_rms_norm if op is None else _offset_of))
    if op is None:
        norms = [(norm, same) for norm, same in norms if same]
    elif not norms:
        raise ModelError(f"{type(model).__qualname__} has no RMS norm, which kernels.norm is about: choose 'torch'")
    for norm, offset in norms:
        eps = _eps_of(norm)
        made = _to_the_bit(type(norm).forward, eps) if op is None else _norm_forward(op, float(eps), offset)
        norm.forward = types.MethodType(made, norm)
    return len(norms)


@functools.cache
def _norm_forward(op: Callable[..., Tensor], eps: float, offset: float) -> Callable[..., Tensor]:
    """One function for all norms of a kind: torch.compile then compiles one layer for all.

    A lambda, as below: a checker of shapes would wrap a function, and torch.compile cannot trace the checker.
    """
    return lambda self, hidden_states: op(hidden_states, self.weight, eps, offset)


@torch.no_grad()
def _offset_of(path: str, norm: nn.Module) -> float:
    """What is added to the weight: 0, or 1 in the Gemma family."""
    with unset_fake_temporarily():
        hidden = torch.randn(3, 8, device="cpu")
        weight = torch.randn(8, device="cpu")
        twin = copy.copy(norm)
        twin._parameters = {"weight": nn.Parameter(weight)}  # noqa: SLF001 - of a copy, so that a forward reads them
        if isinstance(eps := _eps_of(norm), float):
            normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
            for offset in (0.0, 1.0):
                if _gives(lambda: type(norm).forward(twin, hidden), normed * (offset + weight)):
                    return offset
    raise ModelError(
        f"{path} ({type(norm).__name__}) is not x / rms(x) * weight or * (1 + weight) of one input, which is all that "
        f"kernels.norm computes: choose 'torch'"
    )


@functools.cache
def _to_the_bit(own: Callable[..., Tensor], eps: float) -> Callable[..., Tensor]:
    return lambda self, hidden_states: (
        rms_norm(hidden_states, self.weight, eps) if runs_here(hidden_states, self.weight) else own(self, hidden_states)
    )


def _eps_of(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.enable_grad()
def _has_bits_of_rms_norm(_path: str, norm: nn.Module) -> bool:
    """Of results and of gradients, on random numbers."""
    with unset_fake_temporarily():
        own = torch.Generator().manual_seed(0)  # the program's random numbers stay as they would be
        hidden, grad = (torch.randn(3, 40, device="cpu", generator=own) for _ in range(2))
        hidden, weight = hidden.requires_grad_(), torch.randn(40, device="cpu", generator=own, requires_grad=True)
        twin = copy.copy(norm)
        twin._parameters = {"weight": weight}  # type: ignore[dict-item] # noqa: SLF001 - of a copy, as above
        try:
            results = [type(norm).forward(twin, hidden), rms_norm(hidden, weight, _eps_of(norm))]
            several = [(each, *torch.autograd.grad(each, (hidden, weight), grad)) for each in results]
        except (TypeError, RuntimeError, AttributeError):
            return False
        return all(torch.equal(ours, theirs) for ours, theirs in zip(*several, strict=True))


# -- rotary embeddings -------------------------------------------------------------------------------------


def replace_rope(model: nn.Module, op: Callable[..., tuple[Tensor, Tensor]] | None) -> int:
    """Let every attention rotate its queries and keys by `op`; return how many attentions.

    Only these modules are touched: each runs a copy of its forward whose `apply_rotary_pos_emb` is `op`.

    op: None for `cpu.rotate`, on a CPU, of attentions that rotate by halves.

    Raises:
        ModelError: an attention rotates in another way than `op`, or none calls `apply_rotary_pos_emb`.
    """
    found = 0
    for path, module, own in _rotating(model):
        if _rotates_by_halves(own):
            module.forward = types.MethodType(_with_rope(type(module).forward, op or _in_fewer_passes(own)), module)
            found += 1
        elif op is not None:
            raise ModelError(
                f"{path} ({type(module).__name__}) does not rotate queries and keys by halves, as Llama does and as "
                f"kernels.rope does: choose 'torch'"
            )
    if op is not None and not found:
        raise ModelError(f"{type(model).__qualname__} has no attention that calls {ROPE}: choose kernels.rope='torch'")
    return found


def _rotating(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[..., Any]]]:
    """Attentions with their names, and what they rotate by."""
    for path, module in model.named_modules():
        plain = inspect.unwrap(type(module).forward)  # transformers decorates some with a renaming of arguments
        if isinstance(plain, types.FunctionType) and ROPE in plain.__code__.co_names:
            yield path, module, plain.__globals__[ROPE]


@functools.cache
def _with_rope(forward: types.FunctionType, op: Callable[..., tuple[Tensor, Tensor]]) -> types.FunctionType:
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        names, closure = {**forward.__globals__, ROPE: op}, forward.__closure__
    else:  # the same decorator, around a copy of what it decorates
        copied = types.CellType(_with_rope(inner, op))
        names = forward.__globals__
        closure = tuple(copied if cell.cell_contents is inner else cell for cell in forward.__closure__ or ())
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@torch.no_grad()
def _rotates_by_halves(own: Callable[..., Any]) -> bool:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
        query, key = torch.randn(1, 4, 5, 8, device="cpu"), torch.randn(1, 2, 5, 8, device="cpu")
        angles = torch.randn(1, 5, 4, device="cpu").repeat(1, 1, 2)
        given = query, key, angles.cos(), angles.sin()
        return _gives(lambda: own(*given), apply_rotary_pos_emb(*given))


@functools.cache
def _in_fewer_passes(own: Callable[..., Any]) -> Callable[..., Any]:
    def rotate_both(  # noqa: PLR0917 - as transformers calls it
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any, **others: Any
    ) -> Any:
        if more or others or cos.shape[-1] != query.shape[-1] or not runs_here(query, key, cos, sin):
            return own(query, key, cos, sin, *more, **others)
        first, second = sin.chunk(2, dim=-1)
        signed, cos = torch.cat((-first, second), dim=-1).unsqueeze(2), cos.unsqueeze(2)
        # Heads come as views of projections, in which tokens are first.
        return tuple(rotate(each.transpose(1, 2), cos, signed).transpose(1, 2) for each in (query, key))

    return rotate_both


# -- MLPs --------------------------------------------------------------------------------------------------


def replace_mlps(model: nn.Module, op: Callable[..., Tensor] | None) -> int:
    """Let every MLP of gate_proj, up_proj and down_proj multiply by `op`; return how many.

    op: None for `cpu.swiglu`, on a CPU, of MLPs that compute this.

    Raises:
        ModelError: an MLP with these parts computes something else than `op`, or there is none (stacked experts, a
            fused gate_up_proj).
    """
    found = 0
    for path, module in model.named_modules():
        parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
        if not all(isinstance(part, nn.Module) for part in parts) or not hasattr(module, "act_fn"):
            continue
        if (activation := _activation_of(module)) is not None:
            module.forward = types.MethodType(_mlp_forward(op or _activated_in_fewer_passes, activation), module)
            found += 1
        elif op is not None:
            raise ModelError(
                f"{path} ({type(module).__name__}) is not down_proj(act(gate_proj(x)) * up_proj(x)) with SiLU or "
                f"tanh's GELU, which is all that kernels.mlp computes: choose 'torch'"
            )
    if op is not None and not found:
        raise ModelError(
            f"{type(model).__qualname__} has no MLP of gate_proj, up_proj and down_proj, which kernels.mlp is about: "
            f"choose 'torch'"
        )
    return found


@functools.cache
def _mlp_forward(op: Callable[..., Tensor], activation: str) -> Callable[..., Tensor]:
    return lambda self, x: self.down_proj(op(self.gate_proj(x), self.up_proj(x), activation))


@torch.no_grad()
def _activation_of(mlp: nn.Module) -> str | None:
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
        gate, up, down = (nn.Linear(4, 4, bias=False, device="cpu") for _ in range(3))
        twin = copy.copy(mlp)
        twin._modules = {**mlp._modules, "gate_proj": gate, "up_proj": up, "down_proj": down}  # noqa: SLF001 - as above
        x = torch.randn(3, 4, device="cpu")
        for name, activation in (("silu", F.silu), ("gelu", functools.partial(F.gelu, approximate="tanh"))):
            if _gives(lambda: type(mlp).forward(twin, x), down(activation(gate(x)) * up(x))):
                return name
    return None


def _activated_in_fewer_passes(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return swiglu(gate, up) if runs_here(gate, up) else F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up


# -- float8 --------------------------------------------------------------------------------------------------

FLOAT8_MULTIPLE = 16
"""Of both sizes of a linear layer: what the products of tensor cores in 8 bits take."""


def float8_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers inside decoder layers whose sizes are multiples of 16; neither the head nor routers of experts."""
    from rl_parallel_plans.structure import stacked_layers

    for path, layer in stacked_layers(model).items():
        for name, module in layer.named_modules():
            router = name.rpartition(".")[2] in {"gate", "router"}
            if (
                isinstance(module, nn.Linear)
                and not router
                and not any(size % FLOAT8_MULTIPLE for size in (module.in_features, module.out_features))
            ):
                yield f"{path}.{name}", module
