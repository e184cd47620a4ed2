"""The Megatron backend: a Hugging Face model, laid out by megatron-core, and trained.

`Backend` has the surface and what DTensor shares; here is how Megatron's model computes, steps and is saved.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_backends.backend import Backend
from rl_backends.batching.microbatches import Microbatch
from rl_backends.checkpoints import CheckpointState, CheckpointWrite
from rl_backends.errors import ModelError
from rl_backends.examples import BatchT
from rl_backends.export import export_pretrained
from rl_backends.loading import open_model
from rl_backends.losses import LossFunction, Output, Sums
from rl_backends.megatron.accumulation import GradientAccumulation
from rl_backends.megatron.checkpoint import load_checkpoint, save_checkpoint
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.describing import describe
from rl_backends.megatron.freezing import require_trainable
from rl_backends.megatron.gradient_step import clip_and_step
from rl_backends.megatron.groups import ParallelGroups
from rl_backends.megatron.loading import conversion_of
from rl_backends.megatron.mapping import Gatherer, HeldTensor, names_in_hugging_face
from rl_backends.megatron.model import Fill, MegatronModel
from rl_backends.megatron.optimizer import MegatronOptimizers, make_optimizers
from rl_backends.megatron.proof import prove, require_own_code
from rl_backends.megatron.weights import at_random, from_hugging_face, from_megatron
from rl_backends.offload import PARTS, OffloadReport, Part
from rl_backends.optimizers import GradientStep, OptimizerConfig
from rl_backends.rank_agreement import on_every_rank, require_same_model
from rl_backends.readers import Reader
from rl_backends.reference import ReferenceModel, without_weights

__all__ = ["MegatronBackend"]


class MegatronBackend(Backend):
    """A policy that trains `model`, laid over the ranks of this run by megatron-core.

    Args:
        model: a Hugging Face causal LM with its weights, the same on every rank; it is copied from, and not kept.
        config: sizes, device, precision, microbatches, optimizer.
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
        self, model: nn.Module, config: MegatronConfig, *, fill: Fill | None = None, origin: str = "a model in memory"
    ) -> None:
        super().__init__(config, without_weights(model))
        require_own_code(model)
        source = from_hugging_face(_with_weights(model)) if fill is None else fill
        self._distributed = MegatronModel(self._skeleton, config, fill=partial(_same_then, source, model))
        try:
            if fill is None:
                prove(self._distributed, self._head, source=model)
            self._gatherer = Gatherer(self._distributed.held, self._distributed.shapes)
        except BaseException:
            self._distributed.close()
            raise
        self._accumulation = GradientAccumulation(self._distributed)
        self._meter = self._make_meter(recomputed=config.recompute_granularity == "full")
        self._names = names_in_hugging_face(self._distributed.held)
        self._origin = origin

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        config: MegatronConfig,
        *,
        weights: Literal["pretrained", "random"] = "pretrained",
        seed: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "MegatronBackend":
        """Load a folder or hub id by way of its conversion to a Megatron checkpoint, which is made once.

        Args:
            model_name: a folder with `config.json` and safetensors weights, or a hub id.
            config: sizes, device, precision, microbatches, optimizer.
            weights: "random" reads the configuration alone and initialises as transformers would, from `seed`, to the
                same weights in every layout; nothing is converted.
            seed: of random weights.
            revision: branch, tag or commit of a hub id; pin it to make a run repeatable.
            trust_remote_code: run the model's own Python code. Only for code that you have read.

        Raises:
            ModelError: what `open_model` refuses: absent files, missing or superfluous tensors, other shapes.
            CheckpointError: the conversion cannot be written or read.
        """
        source = open_model(model_name, revision=revision, trust_remote_code=trust_remote_code)
        if weights == "random":
            skeleton = source.skeleton()
            return cls(skeleton, config, fill=at_random(skeleton, seed=seed), origin=f"random numbers of seed {seed}")
        groups = ParallelGroups.join(config)  # once for the conversion and for the model, which join them again
        try:
            conversion = conversion_of(source, config)
            fill: Fill = lambda model: conversion.load_into(model.gpt)  # noqa: E731
            return cls(source.skeleton(), config, fill=fill, origin=conversion.explain())
        finally:
            groups.leave(collect=False)

    @property
    def model(self) -> nn.Module:
        """Megatron's model of this pipeline stage, under Megatron's names."""
        return self._distributed.gpt  # type: ignore[no-any-return]

    def _make_optimizers(self, optimizer: OptimizerConfig | None, *, num_steps: int) -> MegatronOptimizers:
        model = self._distributed
        on_every_rank(partial(require_trainable, model.gpt))
        return make_optimizers(model.ddp, model.gpt.config, self.config, optimizer, num_steps=num_steps)

    def _accumulate(
        self,
        examples: BatchT,
        microbatches: Sequence[Microbatch],
        loss: LossFunction[BatchT],
        *,
        reader: Reader,
        output: Output,
    ) -> Sums:
        return self._accumulation.run(examples, microbatches, loss, reader=reader, output=output)

    def _clear_gradient(self) -> None:
        super()._clear_gradient()
        self._accumulation.discard()

    def _clip_and_step(self) -> GradientStep:
        assert self._optimizers is not None
        return clip_and_step(self._distributed.ddp, self._optimizers, version=self.version, names=self._names)

    def _value_reader(self, output: str) -> Reader:
        raise ValueError(
            f"output={output!r}: the Megatron backend has language models alone; train reward and value models "
            f"with policy.dtensor_cfg.enabled=true"
        )

    def freeze_reference(self, *, without_adapters: bool = False, offload: bool = False) -> ReferenceModel:
        """As of every backend; a copy that is offloaded visits the device as a whole."""
        if without_adapters:
            raise ModelError("without_adapters=True of a policy without adapters: Megatron trains all weights")
        model = self._distributed
        copied = MegatronModel(
            self._skeleton, self.config, fill=from_megatron(model), trainable=False, groups=model.groups
        )
        if offload:
            copied.gpt.to("cpu")
        visit = copied.visiting_the_device if offload else nullcontext
        return ReferenceModel(copied, self._head, temperature=lambda: self._temperature, as_reference=visit)

    def shards(self) -> list[HeldTensor]:  # noqa: D102
        # A tensor of another pipeline stage is not among them.
        return [held for held in self._distributed.held if not held.duplicate]

    def skeleton_buffers(self) -> dict[str, Tensor]:  # noqa: D102 - as of every backend
        persistent = self._skeleton.state_dict().keys()
        return {name: buffer for name, buffer in self._skeleton.named_buffers() if name not in persistent}

    def offload(self, *, parts: Collection[Part] = PARTS, directory: str | Path | None = None) -> OffloadReport:  # noqa: D102
        raise ModelError(
            f"the Megatron backend cannot give the memory of {', '.join(parts)} to others yet: give the engine devices "
            f"of its own, or train with policy.dtensor_cfg.enabled=true"
        )

    def _require_on_device(self, what: str, parts: Collection[Part] = PARTS) -> None:
        pass  # where everything is, as long as nothing can be offloaded

    def onload(self, *, parts: Collection[Part] = PARTS) -> OffloadReport:  # noqa: D102
        raise RuntimeError("nothing was offloaded; onload() brings back what offload() has moved")

    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None:  # noqa: D102
        raise ModelError("there are no adapters to save: Megatron trains all weights")

    def save_pretrained(self, folder: str | Path) -> None:  # noqa: D102
        dtype = torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32
        export_pretrained(self._skeleton, Path(folder), dtype=dtype, tensors=self._gatherer.tensors())

    def _write_checkpoint(
        self, folder: str | Path, *, weights: bool, asynchronous: bool, extra: Mapping[str, Any] | None
    ) -> CheckpointWrite:
        return save_checkpoint(
            self._distributed.held,
            self._optimizers,
            folder,
            version=self.version,
            layout=self._distributed.groups.sizes,
            weights=weights,
            asynchronous=asynchronous,
            extra=extra,
        )

    def _read_checkpoint(self, folder: str | Path, *, weights: bool, optimizer: bool, verify: bool) -> CheckpointState:
        asked = {"weights": weights, "optimizer": optimizer, "verify": verify}
        return load_checkpoint(self._distributed.held, self._optimizers, folder, **asked)

    def explain(self) -> str:
        """The layout, what is on which rank, where the weights came from, and the optimizer."""
        return describe(self._distributed, origin=self._origin, optimizers=self._optimizers)

    def _release(self) -> None:
        self._distributed.close()


def _with_weights(model: nn.Module) -> nn.Module:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            f"{type(model).__qualname__} is on the meta device, without weights: load it by from_pretrained, or pass "
            f"fill= to put weights into it"
        )
    return model


def _same_then(fill: Fill, source: nn.Module, model: MegatronModel) -> None:
    """Fill, from a source that is the same on every rank."""
    require_same_model(source)
    fill(model)
