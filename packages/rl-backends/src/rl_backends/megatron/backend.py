"""The Megatron backend: a Hugging Face model, laid out by megatron-core, and trained.

`Backend` has the surface and what DTensor shares; here is how Megatron's model computes, steps and is saved.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_backends.backend import WEIGHTS, Backend
from rl_backends.batching.microbatches import Microbatch
from rl_backends.errors import ModelError
from rl_backends.examples import BatchT
from rl_backends.export import export_pretrained
from rl_backends.loading.source import ModelSource
from rl_backends.lora.files import save_adapter
from rl_backends.lora.inject import add_lora
from rl_backends.lora.layers import trained_whole
from rl_backends.losses import LossFunction, Output, Sums
from rl_backends.megatron.checkpoint import MegatronContents
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.gradients import accumulate, clip_and_step, discard
from rl_backends.megatron.lora import Adapters, bare_shapes, is_adapter
from rl_backends.megatron.mapping import HeldTensor, names_in_hugging_face
from rl_backends.megatron.model import Fill, MegatronModel, require_trainable
from rl_backends.megatron.optimizer import MegatronOptimizers, make_optimizers
from rl_backends.megatron.weights import (
    Gatherer,
    at_random,
    from_files,
    from_hugging_face,
    from_megatron,
    prove,
    require_own_code,
)
from rl_backends.offload import Offloader
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.optimizers import GradientStep
from rl_backends.rank_agreement import on_every_rank, require_same_model
from rl_backends.readers import Reader, value_reader


class MegatronBackend(Backend):
    """A policy that trains `model`, laid over the ranks of this run by megatron-core.

    Args:
        model: a Hugging Face causal LM, or a sequence classifier of one label, with its weights, the same on every
            rank; it is copied from, and not kept.
        config: sizes, device, precision, microbatches, optimizer, adapters.
        seed: of the first values of adapters; with `fill` it is `fill` that draws them.
        fill: for a model on the meta device: what puts the weights into Megatron's parameters.
        origin: where the weights come from, for `explain`.

    Raises:
        MissingDependencyError: megatron-core is absent, or a release that this package was not made for.
        ModelError: the architecture is not mapped, or the sizes do not divide it.
        ValueError: no GPU where one was asked for, or ranks that the sizes do not divide.
    """

    config: MegatronConfig
    _distributed: MegatronModel
    _optimizers: MegatronOptimizers | None

    def __init__(
        self,
        model: nn.Module,
        config: MegatronConfig,
        *,
        seed: int = 0,
        fill: Fill | None = None,
        origin: str = "a model in memory",
    ) -> None:
        require_own_code(model)
        if config.lora_cfg is not None:
            add_lora(model, config.lora_cfg, seed=seed, layers_only=True)
        super().__init__(config, model, filled=fill is not None)
        source = partial(from_hugging_face, model) if fill is None else fill

        def fill_alike(distributed: MegatronModel) -> None:
            require_same_model(model)
            source(distributed)

        self._distributed = MegatronModel(self._skeleton, config, fill=fill_alike)
        try:
            if fill is None:
                prove(self._distributed, source=model)
            self._gatherer = Gatherer(self._distributed.held, self._distributed.shapes)
        except BaseException:
            self._distributed.close()
            raise
        self._names = names_in_hugging_face(self._distributed.held)
        self._origin = origin

    @classmethod
    def _of_source(
        cls, source: ModelSource, config: MegatronConfig, *, random: bool, new_head: bool, seed: int
    ) -> "MegatronBackend":
        skeleton, model = source.skeleton(), source.skeleton()  # one of them gets the adapters
        if random:
            draw = partial(at_random, skeleton, seed=seed)
            return cls(model, config, fill=draw, origin=f"random numbers of seed {seed}")
        origin = f"the safetensors files of {source.folder}, each rank its own parts"
        fill = partial(from_files, source, skeleton, new_head=new_head, seed=seed)
        return cls(model, config, fill=fill, origin=origin)

    @property
    def model(self) -> nn.Module:
        """Megatron's model of this pipeline stage, under Megatron's names; a list of its chunks with virtual stages."""
        return self._distributed.gpt

    def _make_optimizers(self, optimizer: OptimizerConfig, *, num_steps: int) -> MegatronOptimizers:
        model = self._distributed
        on_every_rank(partial(require_trainable, model.gpt))
        return make_optimizers(model.ddp, self.config, optimizer, num_steps=num_steps)

    def _accumulate(
        self,
        examples: BatchT,
        microbatches: Sequence[Microbatch],
        loss: LossFunction[BatchT],
        *,
        reader: Reader,
        output: Output,
        num_rows: int,
    ) -> Sums:
        del num_rows
        if self.config.overlap_grad_reduce and self._gradient != "none":
            raise RuntimeError(
                "overlap_grad_reduce=True sums gradients over ranks during backward, so a step has one call of "
                "forward_backward: give it all rows at once, or set overlap_grad_reduce=False; the gradient is cleared"
            )
        return accumulate(self._distributed, examples, microbatches, loss=loss, reader=reader, output=output)

    def _clear_gradient(self) -> None:
        super()._clear_gradient()
        discard(self._distributed)

    def _clip_and_step(self) -> GradientStep:
        assert self._optimizers is not None
        return clip_and_step(self._distributed.ddp, self._optimizers, version=self.version, names=self._names)

    def _value_reader(self) -> Reader:
        return value_reader(self._skeleton)  # the last pipeline stage alone has the head

    def _adapters_off(self) -> AbstractContextManager[None]:
        return self._require_adapters().disabled()

    def _frozen_copy(self, *, offload: bool) -> tuple[MegatronModel, Callable[[], AbstractContextManager[Any]]]:
        model = self._distributed
        model.finish_param_gather()
        fill = partial(from_megatron, model)
        copied = MegatronModel(self._skeleton, self.config, fill=fill, trainable=False, groups=model.groups)
        if not offload:
            return copied, nullcontext
        offloader = Offloader(copied.gpt)
        offloader.offload()
        return copied, partial(_visit, offloader)

    def shards(self) -> list[HeldTensor]:  # noqa: D102
        # A tensor of another pipeline stage is not among them.
        self._require_on_device("shards", WEIGHTS)
        self._distributed.finish_param_gather()
        adapters = self._distributed.adapters
        every = self._distributed.held if adapters is None else adapters.merged()
        return [held for held in every if not held.duplicate]

    def _before_offload(self) -> None:
        self._distributed.finish_param_gather()

    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None:  # noqa: D102
        self._require_on_device("save_adapter", WEIGHTS)
        trainable, whole = self._require_adapters().trainable(), trained_whole(self._skeleton)
        of_all = self._distributed.shapes.items()
        shapes = {name: shape for name, shape in of_all if is_adapter(name) or name in whole}
        self._distributed.finish_param_gather()
        tensors = Gatherer(trainable, shapes).tensors()
        save_adapter(self._skeleton, Path(folder), base_model_name=base_model_name, tensors=tensors)

    def _export(self, folder: str | Path, **asked: Any) -> None:
        self._distributed.finish_param_gather()
        if asked["dtype"] == "auto":
            asked["dtype"] = torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32
        adapters, gatherer = self._distributed.adapters, self._gatherer
        if adapters is not None:
            gatherer = Gatherer(adapters.merged(), bare_shapes(self._distributed.shapes))
        export_pretrained(self._skeleton, folder, tensors=gatherer.tensors(), every_rank=True, **asked)

    def _contents(self) -> MegatronContents:
        model = self._distributed
        model.finish_param_gather()
        return MegatronContents(model.held, self._optimizers, layout=model.groups.sizes)

    def _explained(self) -> list[str]:
        """The layout, what is on which rank, and where the weights came from."""
        model = self._distributed
        config, architecture = model.config, model.architecture
        numbers = sum(parameter.numel() for parameter in model.gpt.parameters())
        chunks = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in model.chunks]
        layers = " and ".join(f"{layers[0]} to {layers[-1]}" for layers in chunks)
        head = ", and the head" if model.groups.last_stage else ""
        return [
            f"Megatron backend on {config.device}: {_ranks(model.groups.sizes)}",
            f"weights in {config.precision}, gradients and optimizer in float32",
            f"{architecture.model_type} of {architecture.num_layers} layers, {_implementation(model)}",
            f"this rank holds {numbers:,} elements, layers {layers}{head}",
            f"weights from {self._origin}",
            f"microbatches of at most {config.micro_batch_size} rows"
            + ("" if config.micro_batch_tokens is None else f" and {config.micro_batch_tokens} tokens")
            + (", packed" if config.sequence_packing else ", padded to their longest")
            + (f", {config.recompute_granularity} recomputation in backward" if config.recompute_granularity else ""),
        ]

    def _weights_moved(self, *, away: bool) -> None:
        if away and self._distributed.adapters is not None:
            self._distributed.adapters.release()

    def _require_adapters(self) -> Adapters:
        if self._distributed.adapters is None:
            raise ModelError("this policy has no adapters: set lora_cfg, and it trains them in the place of weights")
        return self._distributed.adapters


@contextmanager
def _visit(offloader: Offloader) -> Iterator[None]:
    """Have what lies in pinned host memory on its device for a while."""
    offloader.onload()
    try:
        yield
    finally:
        offloader.offload()


def _implementation(model: MegatronModel) -> str:
    """Which attention and which MLP compute, from the modules that are there."""
    config, layer = model.config, model.chunks[0].decoder.layers[0]
    attention, mlp = type(layer.self_attention.core_attention).__name__, layer.mlp
    kind = type(mlp.experts).__name__ if hasattr(mlp, "experts") else type(mlp).__name__
    kernels = {
        "TorchAttention": "torch's scaled_dot_product_attention",
        "TEDotProductAttention": "Transformer Engine's attention",
        "GatedMLP": "torch's SwiGLU",
        "SequentialMLP": "experts one after the other",
        "TEGroupedMLP": "Transformer Engine's grouped GEMM for experts",
    }
    names = [each.name for each in fields(config) if each.name.endswith("_fusion") or each.name.startswith("overlap_")]
    fused = [name for name in names if getattr(config, name)]
    return f"attention {kernels.get(attention, attention)}, MLP {kernels.get(kind, kind)}" + (
        f", with {', '.join(fused)}" if fused else ", no fusions and no overlap"
    )


def _ranks(sizes: Mapping[str, int]) -> str:
    """How they are cut, by axes of more than one; experts lie across those, and are no further cut."""
    axes = [f"{size} {axis}" for axis, size in sizes.items() if axis not in {"ep", "vp"} and size > 1]
    if not axes:
        return "one rank"
    text = f"{' x '.join(axes)} ranks"
    text = text if sizes["ep"] == 1 else f"{text}, experts shared out over {sizes['ep']}"
    return f"{text}, {sizes['vp']} chunks a pipeline stage" if "vp" in sizes else text
