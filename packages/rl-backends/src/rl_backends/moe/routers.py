"""The routers of a Hugging Face model, and how to read what each decides: from names and the source of forwards.

A router is the child `gate` or `router` of a block that has `experts`. Since transformers 5 it is a module that returns
logits and the chosen experts; before, mostly an nn.Linear whose logits the block itself turns into a choice.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rl_backends.errors import ModelError

_NAMES = ("gate", "router")
_TOP_K = ("top_k", "moe_top_k", "num_experts_per_tok")
_LOGITS = re.compile(r"logits")
_CHOSEN = re.compile(r"ind(ex|ices)|selected")
_OF_LOGITS = re.compile(r"(softmax|sigmoid)\((?:input=)?\w*logits|logits(?:\.float\(\))?\.(softmax|sigmoid)\(")
_EITHER = re.compile(r"\b(softmax|sigmoid)\(")
_CORRECTED = re.compile(r"correction_bias|moe_statics|expert_bias")


@dataclass(frozen=True, slots=True)
class Router:
    """Where a router stands, and how its output is read."""

    path: str
    """In the model."""
    module: nn.Module
    """Whose output is read."""
    affinity: Literal["softmax", "sigmoid"]
    """What the model makes of a token's logits."""
    logits_at: int | None
    """Place of the logits in what it returns; None where it returns nothing else."""
    chosen_at: int | None
    """Place of the chosen experts; None where they are the `top_k` largest logits."""
    top_k: int | None
    """Experts of a token, where `chosen_at` is None."""

    def read(self, output: object) -> tuple[Tensor, Tensor]:
        """Logits [N, experts] and the experts chosen for each of N tokens [N, K]."""
        logits = output if self.logits_at is None else output[self.logits_at]  # type: ignore[index]
        assert isinstance(logits, Tensor)
        logits = logits.flatten(0, -2)
        if self.chosen_at is not None:
            return logits, output[self.chosen_at].flatten(0, -2)  # type: ignore[index]
        assert self.top_k is not None
        return logits, logits.detach().topk(self.top_k, dim=-1).indices

    def affinities(self, logits: Tensor) -> Tensor:
        """S' of the paper [N, experts]: of each token, and summing to 1, in float32."""
        if self.affinity == "softmax":
            return logits.float().softmax(-1)
        scores = torch.sigmoid(logits.float())
        return scores / scores.sum(-1, keepdim=True)


def find_routers(model: nn.Module) -> list[Router]:
    """Every router of `model`, in its order."""
    found = [
        _router(f"{path}.{name}", child, block)
        for path, block in model.named_modules()
        if "experts" in (children := dict(block.named_children()))
        for name, child in children.items()
        if name in _NAMES
    ]
    if not found:
        raise ModelError(
            f"{type(model).__qualname__} has no router (a block with `experts` and a `gate` or `router`), so that "
            f"router_aux_loss_coef > 0 has nothing to act on; set it to 0"
        )
    return found


def _router(path: str, module: nn.Module, block: nn.Module) -> Router:
    linear = type(module).forward is nn.Linear.forward
    decides = block if linear else module
    affinity = _affinity(path, decides)
    logits_at, chosen_at = (None, None) if linear else _places(path, module)
    if chosen_at is not None:
        return Router(path, module, affinity, logits_at, chosen_at, None)
    if _CORRECTED.search(_source(type(decides))):
        raise _unreadable(path, decides, "corrects its choice by a bias and does not return the experts chosen")
    counts = (getattr(owner, name, None) for owner in (module, block) for name in _TOP_K)
    top_k = next((count for count in counts if isinstance(count, int)), None)
    if top_k is None:
        raise _unreadable(path, decides, "does not say how many experts it chooses (top_k)")
    return Router(path, module, affinity, logits_at, None, top_k)


def _affinity(path: str, decides: nn.Module) -> Literal["softmax", "sigmoid"]:
    source = _source(type(decides).forward)
    of_logits = {name for match in _OF_LOGITS.finditer(source) for name in match.groups() if name}
    either = of_logits or set(_EITHER.findall(source))
    if either == {"softmax"}:
        return "softmax"
    if either == {"sigmoid"}:
        return "sigmoid"
    raise _unreadable(path, decides, "does not show whether scores are a softmax or a sigmoid of its logits")


def _places(path: str, module: nn.Module) -> tuple[int | None, int | None]:
    returned = re.findall(r"^ *return (.+)$", _source(type(module).forward), re.MULTILINE)
    names = [name.strip() for name in returned[-1].split(",")] if returned else []
    logits = next((place for place, name in enumerate(names) if _LOGITS.search(name)), None)
    if logits is None:
        raise _unreadable(path, module, f"returns {', '.join(names) or 'nothing known'}, and no logits")
    if len(names) == 1:
        return None, None
    return logits, next((place for place, name in enumerate(names) if _CHOSEN.search(name)), None)


def _unreadable(path: str, module: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"the router {path} cannot be watched: {type(module).__name__} {why}; set router_aux_loss_coef to 0"
    )


def _source(thing: object) -> str:
    try:
        return inspect.getsource(inspect.unwrap(thing))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
