"""How a trainer or an engine cuts a model over its GPUs, and the layout of every tensor that follows.

Knows sizes, not frameworks. Ranks are numbered stage by stage of the pipeline; inside a stage, tensor parallelism is
the innermost axis, then FSDP, then replicas. With `ep`, experts lie whole on consecutive ranks, whatever `tp` is
(Megatron with expert tensor parallelism 1, vLLM with expert parallelism); without, tensor parallelism cuts them like
any MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refit_simulator.models import ModelTensor, SimulatedModel
from rl_refit.layout import Layout

__all__ = ["AXES", "Parallelism"]

AXES = ("tp", "pp", "ep", "fsdp")
"""Axes of a layout, as `--train-layout` and `--engine-layout` name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes of the axes; what they leave of the GPUs are replicas."""

    gpus: int
    """All GPUs of this side."""

    tp: int = 1
    """Ranks that a matrix is cut over."""

    pp: int = 1
    """Stages that the layers are cut into."""

    ep: int = 1
    """Ranks that the experts are dealt to."""

    fsdp: int = 1
    """Ranks that dim 0 of what tensor parallelism leaves is cut over."""

    def __post_init__(self) -> None:
        if min(self.gpus, self.tp, self.pp, self.ep, self.fsdp) < 1:
            raise ValueError(f"every size of a layout must be at least 1; got {self}")
        for what, size in (
            ("pp", self.pp),
            ("pp·tp·fsdp", self.pp * self.tp * self.fsdp),
            ("pp·ep", self.pp * self.ep),
        ):
            if self.gpus % size:
                raise ValueError(
                    f"{what}={size} must divide the {self.gpus} GPUs of its side (layout {self.describe()})"
                )
        if self.fsdp > 1 and (self.tp * self.fsdp) % self.ep:
            raise ValueError(f"with fsdp, ep={self.ep} must divide tp·fsdp={self.tp * self.fsdp}")

    @classmethod
    def parse(cls, text: str, *, gpus: int) -> Parallelism:
        """The layout that `text`, such as "tp=8" or "ep=64,pp=8" or "replicated", means on `gpus`.

        Raises:
            ValueError: Names the part that is wrong and what is allowed.
        """
        sizes: dict[str, int] = {}
        for part in text.split(",") if text != "replicated" else ():
            axis, _, size = part.partition("=")
            if axis not in AXES or not size.isdecimal() or axis in sizes:
                raise ValueError(
                    f"{part!r} in layout {text!r}: expected each of {', '.join(AXES)} at most once, with a size, "
                    f"as in 'ep=64,pp=8', or 'replicated'"
                )
            sizes[axis] = int(size)
        return cls(gpus=gpus, **sizes)

    def describe(self) -> str:
        """The text that `parse` reads."""
        named = [f"{axis}={size}" for axis in AXES if (size := int(getattr(self, axis))) > 1]
        return ",".join(named) or "replicated"

    @property
    def stage_size(self) -> int:
        """Ranks of one stage of the pipeline."""
        return self.gpus // self.pp

    @property
    def replica_size(self) -> int:
        """Ranks that hold the model once."""
        return self.pp * math.lcm(self.tp * self.fsdp, self.ep)

    def check(self, model: SimulatedModel) -> None:
        """Refuse a layout that the model's heads, layers or experts do not allow.

        Raises:
            ValueError: Names the number and what it must divide.
        """
        if self.pp > model.num_layers:
            raise ValueError(f"pp={self.pp} is more than the {model.num_layers} layers of {model.name}")
        if model.heads % self.tp:
            raise ValueError(f"tp={self.tp} must divide the {model.heads} attention heads of {model.name}")
        if model.kv_heads and self.tp % model.kv_heads and model.kv_heads % self.tp:
            raise ValueError(
                f"tp={self.tp} and the {model.kv_heads} KV heads of {model.name}: one must divide the other"
            )
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            raise ValueError(f"ep={self.ep} must divide the experts of {model.name}; it has {model.experts or 'none'}")

    def stage_of(self, tensor: ModelTensor, model: SimulatedModel) -> int:
        """The stage that holds `tensor`: layers evenly, the embedding first, norm and head last."""
        layer = 0 if tensor.layer is None else min(tensor.layer, model.num_layers - 1)
        return layer * self.pp // model.num_layers

    def layout(self, tensor: ModelTensor, model: SimulatedModel, *, stacked_experts: bool) -> Layout:
        """Where a stack of tensors like `tensor` lies.

        Args:
            tensor: One of them; of a routed expert, any.
            model: What it belongs to.
            stacked_experts: Whether the experts of a layer are one tensor, so that FSDP deals whole experts.

        Returns:
            A layout for shape [tensors, *shape], or [tensors, experts, *shape] of routed experts; dim 0 is never cut.
        """
        first = self.stage_of(tensor, model) * self.stage_size
        rows = 1 if tensor.expert is None else 2
        axes = self._tensor_axes(tensor, model, rows)
        fsdp = self.fsdp
        if tensor.expert is not None and self.ep > 1:
            axes = [(self.ep, 1)]
            fsdp = self.fsdp * self.tp // self.ep if self.fsdp > 1 else 1
        fsdp_dim = 1 if stacked_experts else rows
        inner = math.prod(size for size, _ in axes)
        axes = [(self.stage_size // (fsdp * inner), None), (fsdp, fsdp_dim), *axes]
        return Layout(
            mesh_shape=tuple(size for size, _ in axes),
            sharded_dims=tuple(dim for _, dim in axes),
            strided_axes=(1,) if fsdp > 1 and any(dim == fsdp_dim for _, dim in axes[2:]) else (),
            ranks=tuple(range(first, first + self.stage_size)),
        )

    def _tensor_axes(self, tensor: ModelTensor, model: SimulatedModel, rows: int) -> list[tuple[int, int | None]]:
        """Tensor parallelism's axes of the mesh, each with the dim that it cuts; `rows` is the dim of the rows."""
        if tensor.role == "kv":
            cut = min(self.tp, model.kv_heads)
            return [(cut, rows), (self.tp // cut, None)]
        return [(self.tp, {"replicated": None, "column": rows, "row": rows + 1}[tensor.role])]
