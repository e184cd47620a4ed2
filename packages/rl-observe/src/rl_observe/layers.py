"""What each layer of a model put out in one forward pass, as one number per layer, so that a replay can name the layer.

    layers = LayerNorms(model)
    layers.expect()
    with layers.watching():
        model(**batch)
    layers.take()  # {"model.embed_tokens": 31.2, "model.layers.0": 35.9, ...}

A number is the Euclidean norm of all that the layer put out in its first call, in float64: equal weights and inputs
give equal bits on the same machine. Embeddings, the members of module lists (the decoder layers), and norms beside them
are layers. Hooks are on the model only while it is watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["LayerNorms", "first_layer_that_differs"]


class LayerNorms:
    """Norms of the layers of `model`, a `torch.nn.Module`; with None, or a model in other processes, there are none."""

    def __init__(self, model: Any) -> None:
        self._layers: dict[str, Any] = {}
        modules = dict(model.named_modules()) if hasattr(model, "named_modules") else {}
        for name, module in modules.items():
            parent = modules.get(name.rpartition(".")[0])
            kind, beside = type(module).__name__, type(parent).__name__
            is_final_norm = "norm" in kind.lower() and any(
                type(each).__name__ == "ModuleList" for each in (parent.children() if parent is not None else ())
            )
            if kind == "Embedding" or beside == "ModuleList" or is_final_norm:
                inside = [outer for outer in self._layers if name.startswith(f"{outer}.")]
                if not inside:  # experts are a module list inside of a layer
                    self._layers[name] = module
        self._norms: dict[str, Any] = {}
        self._waiting = False

    def expect(self) -> None:
        """Forget what was seen; the next pass that is watched is looked at."""
        self._norms, self._waiting = {}, bool(self._layers)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the first call of each layer within the block, once after each `expect`."""
        if not self._waiting:
            yield
            return
        self._waiting = False
        hooks = [module.register_forward_hook(self._hook(name)) for name, module in self._layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> dict[str, float]:
        """The norm of each layer, in the order in which they were called; empty if none was."""
        norms, self._norms = self._norms, {}
        return {name: float(norm) for name, norm in norms.items()}

    def _hook(self, name: str) -> Any:
        def look(module: Any, given: Any, output: Any) -> None:
            del module, given
            first = output[0] if isinstance(output, tuple) else output
            if name not in self._norms and hasattr(first, "detach"):
                self._norms[name] = first.detach().double().norm()  # stays on the device: no synchronisation here

        return look


def first_layer_that_differs(
    recorded: Mapping[str, float], recomputed: Mapping[str, float], *, bound: float
) -> tuple[str, float, float] | None:
    """The first layer whose norms differ by more than `bound` of the recorded one, with both; None if there is none."""
    for name, value in recorded.items():
        other = recomputed.get(name)
        if other is not None and not abs(other - value) <= bound * abs(value):  # also if one is NaN
            return name, value, other
    return None
