"""The DTensor backend: a Hugging Face model, sharded by FSDP2, tensor, context and expert parallelism, and trained.

`Backend` has the surface and what Megatron shares; here is how a model under FSDP2 computes, steps and is saved.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_backends.backend import WEIGHTS, Backend, asked_of
from rl_backends.batching.microbatches import Microbatch, ModelInputs, make_inputs
from rl_backends.checkpoints.contents import TorchContents
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.dtensor.sharded_model import ShardedModel, copy_of, forget_pass, sizes_of
from rl_backends.errors import ModelError
from rl_backends.examples import BatchT
from rl_backends.export import export_pretrained
from rl_backends.loading.skeleton import without_weights
from rl_backends.loading.source import ModelSource
from rl_backends.loading.weights import initialise
from rl_backends.lora.files import save_adapter
from rl_backends.lora.inject import add_lora, initialise_adapters
from rl_backends.lora.layers import adapters_disabled
from rl_backends.lora.merged import MergedWeights, export_merged
from rl_backends.losses import ROUTER_LOSS, LossFunction, LossOverMicrobatches, Output, Sums
from rl_backends.moe import RouterWatch, router_metrics
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.optimizers import GradientStep, Optimizers, clip_and_step, make_optimizers
from rl_backends.rank_agreement import add_up, largest_on_any_rank, raise_together, sums_of_last_rank
from rl_backends.readers import Head, Reader, has_language_model_head, read_logp
from rl_parallel_plans import NamedShard, get_logprobs_from_vocab_parallel_logits, named_shards, to_local_if_dtensor
from rl_parallel_plans.checkpoints import reshard
from rl_parallel_plans.dtensor import has_numbers


class DTensorBackend(Backend):
    """A policy that trains `model`, sharded over the ranks of this run.

    Args:
        model: a Hugging Face causal LM, or a sequence classifier of one label, with its weights, the same on every
            rank, in any dtype: they are cast to float32. The backend takes it over.
        config: sharding, device, precision, microbatches, adapters.
        seed: of the first values of adapters.
        fill: for a model on the meta device: what puts weights into its parameters once they are sharded.

    Raises:
        PlanError: the model cannot be sharded as asked.
        ModelError: it has no head that can be read here, or cannot be packed or adapted as asked.
        ValueError: no GPU where one was asked for, or ranks that the sizes do not divide.
    """

    config: DTensorConfig
    _distributed: ShardedModel
    _optimizers: Optimizers | None

    def __init__(
        self,
        model: nn.Module,
        config: DTensorConfig,
        *,
        seed: int = 0,
        fill: Callable[[nn.Module], object] | None = None,
    ) -> None:
        if config.lora_cfg is not None:
            add_lora(model, config.lora_cfg, seed=seed)
        else:
            # `from_pretrained` of transformers gives the dtype of the files, mostly bfloat16, in which the update of a
            # step at a usual learning rate is rounded away: it is smaller than half the distance to the next bfloat16.
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.float32)  # ties stay ties

        def fill_all(sharded: nn.Module) -> None:
            assert fill is not None
            fill(sharded)
            if config.lora_cfg is not None:
                initialise_adapters(sharded, seed=seed)

        super().__init__(config, model, filled=fill is not None)
        self._distributed = ShardedModel(model, config, fill=None if fill is None else fill_all)
        with ExitStack() as undo:
            undo.callback(self._distributed.close)
            if has_language_model_head(self.model):
                check_head(self._distributed, self._head)
            watched = config.router_aux_loss_coef > 0
            self._routers = RouterWatch(self.model, plan=self._distributed.plan) if watched else None
            undo.pop_all()
        self._merged: MergedWeights | None = None

    @classmethod
    def _of_source(
        cls, source: ModelSource, config: DTensorConfig, *, random: bool, new_head: bool, seed: int
    ) -> "DTensorBackend":
        load = partial(source.load_into, new_head=new_head, seed=seed)
        fill: Callable[[nn.Module], object] = partial(initialise, seed=seed) if random else load
        return cls(source.skeleton(), config, seed=seed, fill=fill)

    @property
    def model(self) -> nn.Module:
        """The sharded model, an `nn.Module` under its Hugging Face names, for whatever reads or moves its weights."""
        return self._distributed.model

    def _make_optimizers(self, optimizer: OptimizerConfig, *, num_steps: int) -> Optimizers:
        return make_optimizers(self.model, optimizer, num_steps=num_steps)

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
        sharded, routers, config = self._distributed, self._routers, self.config
        loss_of = LossOverMicrobatches(loss, device=config.device, reserved=() if routers is None else (ROUTER_LOSS,))

        def inputs_of(rows: BatchT) -> ModelInputs:
            asked, offset, words = asked_of(rows, output)
            return sharded.inputs(rows, asked, offset=offset, words=words)

        def loss_at(number: int, rows: BatchT, outputs: Tensor) -> Tensor:
            """The caller's loss, whose own backward runs here."""
            outputs = outputs.sum(1) if output == "score" else outputs
            return loss_of(outputs, rows, counted=microbatches[number].counted)

        if sharded.pipeline is not None:
            # The loss is called on the last stage, which tells its sums to all.
            every = [microbatch.of(examples, device="cpu") for microbatch in microbatches]

            def use(number: int, model: Any, each: ModelInputs) -> Tensor:
                counts = number < len(every)
                rows = every[number if counts else 0]
                shape = rows.tokens.shape[0], rows.tokens.shape[1]
                outputs = sharded.read(each, reader, shape=shape, stage=model)[0]
                return loss_at(number, rows, outputs) if counts else outputs.sum() * 0.0

            sharded.run_pipeline([inputs_of(rows) for rows in every], use, backward=True)
            raise_together(loss_of.failure)
            sums = add_up(loss_of.sums, sharded.row_group)
            return sums_of_last_rank(sums, sharded.pipeline.group, device=torch.device(config.device))

        context = sharded.context_group
        for number, microbatch in enumerate(microbatches):
            # Forward: the output of the asked tokens, and the loss of the routers, if that is weighed.
            rows = microbatch.of(examples, device="cpu")
            inputs = inputs_of(rows)
            recording: AbstractContextManager[Any] = nullcontext() if routers is None else routers.recording()
            with recording:
                outputs = sharded.read(inputs, reader, shape=(rows.tokens.shape[0], rows.tokens.shape[1]))[0]

            # The caller's loss, and after it the model's backward, in which gradients add up in the parameters; they
            # are summed over data-parallel ranks at the last microbatch, or at every one.
            total = loss_at(number, rows, outputs)
            if routers is not None:
                counted = microbatch.counted
                router_loss = routers.loss(inputs, rows.lengths, counted=counted, context_group=context)
                loss_of.add({ROUTER_LOSS: router_loss.detach() / num_rows}, counted=counted)
                total = total + router_loss * (counted * config.router_aux_loss_coef / num_rows)
            if isinstance(self.model, FSDPModule):
                last = number == len(microbatches) - 1
                self.model.set_requires_gradient_sync(last or config.reduce_gradients == "every_microbatch")
            torch.autograd.backward(total)
        raise_together(loss_of.failure)
        sums = loss_of.sums
        if routers is not None and context is not None:
            dist.all_reduce(sums[ROUTER_LOSS], group=context)  # each rank holds the term of its own tokens
        return add_up(sums, sharded.row_group)

    def _clear_gradient(self) -> None:
        super()._clear_gradient()
        forget_pass(self.model)
        if self._routers is not None:
            self._routers.take_counts()

    def _clip_and_step(self) -> GradientStep:
        assert self._optimizers is not None
        return clip_and_step(self.model, self._optimizers, version=self.version, pipeline=self._distributed.pipeline)

    @property
    def _always_trains(self) -> bool:
        return self._routers is not None

    def _router_metrics(self) -> Mapping[str, float]:
        counts = {} if self._routers is None else self._routers.take_counts()
        for count in counts.values():
            for group in (self._distributed.row_group, self._distributed.context_group):
                if group is not None:
                    dist.all_reduce(count, group=group)
        return router_metrics(counts) if counts else {}

    def _adapters_off(self) -> AbstractContextManager[None]:
        return adapters_disabled(self.model)

    def _frozen_copy(self, *, offload: bool) -> tuple[ShardedModel, Callable[[], AbstractContextManager[Any]]]:
        # Of one that is offloaded, FSDP lets each layer visit the device when it runs.
        return copy_of(self._distributed, without_weights(self._skeleton), offload=offload), nullcontext

    def shards(self) -> "list[NamedShard]":  # noqa: D102 - as of every backend
        self._require_on_device("shards", WEIGHTS)
        if self.config.lora_cfg is None:
            return list(named_shards(self.model))
        if self._merged is None:
            self._merged = MergedWeights(self.model)
        else:
            self._merged.refresh()
        return list(self._merged.shards())

    def _weights_moved(self, *, away: bool) -> None:
        if self._merged is not None:
            if away:
                self._merged.release()
            else:
                self._merged.refresh()

    def _export(self, folder: str | Path, **asked: Any) -> None:
        if self._distributed.pipeline is not None:
            tensors = self._distributed.pipeline.export_state_dict()
            export_pretrained(self._skeleton, folder, tensors=tensors, **asked)
        else:
            merged = None if self.config.lora_cfg is None else export_merged(self.model, every_rank=True)
            export_pretrained(self.model, folder, tensors=merged, every_rank=True, **asked)

    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None:  # noqa: D102
        self._require_on_device("save_adapter", WEIGHTS)
        save_adapter(self.model, Path(folder), base_model_name=base_model_name)

    def _contents(self) -> TorchContents:
        return TorchContents(self.model, self._optimizers)

    def _explained(self) -> list[str]:
        """The mesh, and which rule shards which parameter and why."""
        sharded, config, model = self._distributed, self.config, self.model
        axes = " x ".join(f"{size} {axis}" for axis, size in sizes_of(sharded.mesh).items())
        wrapped = "under FSDP2" if isinstance(model, FSDPModule) else "without FSDP, which has nothing to shard here"
        # Dtypes of the parameters and of the optimizer's state as they are now, not as they were asked for.
        parameters = [each for each in model.parameters() if each.is_floating_point()]
        states = [state for each in self._torch_optimizers() for state in each.state.values()]
        moments = [each for state in states for each in state.values() if isinstance(each, Tensor)]
        lines = [
            f"DTensor backend on {config.device}: {axes} ranks, {wrapped}, computing in {config.precision}, "
            + _dtypes("trained weights", [each for each in parameters if each.requires_grad])
            + _dtypes(", frozen weights", [each for each in parameters if not each.requires_grad])
            # Not the number of steps, which is one element.
            + _dtypes(", optimizer state", [each for each in moments if each.numel() > 1 and each.is_floating_point()]),
            *sharded.kernels.lines,
            sharded.plan.explain(),
        ]
        if config.device == "cpu" and (num_gpus := torch.cuda.device_count()):
            lines.append(
                f"this machine has {num_gpus} GPUs, which device='cpu' leaves idle: set device='cuda' to use them"
            )
        # What the model's own configuration asks for in training, and this backend does not do.
        whole: Any = model.config
        text = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
        for name, value in sorted(vars(text).items()):
            if re.search(r"dropout|pdrop", name) and isinstance(value, float) and value > 0:
                lines.append(
                    f"ignored: {name}={value:g} of the model: it runs without dropout, so that its log-probabilities "
                    f"repeat"
                )
        coefficient = getattr(text, "router_aux_loss_coef", None)
        if getattr(text, "output_router_logits", False) and coefficient and config.router_aux_loss_coef == 0:
            lines.append(
                f"ignored: router_aux_loss_coef={coefficient:g} of the model: set router_aux_loss_coef of this "
                f"backend, whose loss does not depend on how a batch is cut"
            )
        return lines


# ---- Proof that the head is read as the model itself reads it: log-probabilities of a few tokens, both ways.
#
# An architecture may do to its logits what no field of its configuration tells. One forward of a few tokens with the
# model's own logits finds out, before anything is trained on numbers that are wrong.

NUM_TOKENS = 8
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats. Rounding is far below; a scale that was missed is far above, unless all logits are near 0."""


@torch.no_grad()
def check_head(sharded: ShardedModel, head: Head) -> None:
    """Compare on every rank; all must call it. Weights without numbers, as in a dry run, have nothing to compare.

    Raises:
        ModelError: on every rank; the model's own logits give other log-probabilities on one of them.
    """
    if not all(has_numbers(to_local_if_dtensor(parameter)) for parameter in sharded.model.parameters()):
        return
    shard = sharded.sequence_shard
    length = NUM_TOKENS if shard is None else shard.padded(NUM_TOKENS)
    inputs = make_inputs(
        ((torch.arange(length) * 7 + 3) % sharded.vocabulary_size)[None],
        torch.tensor([length]),
        torch.ones(1, length, dtype=torch.bool),
        layout=sharded.layout,
        offset=0,  # at each token of this rank's own: how likely that token was to follow itself
        shard=shard,
    ).to(sharded.config.device)
    kept: dict[int, Tensor] = {}  # on the last stage

    def keep(_: int, read: Sequence[Tensor]) -> None:
        kept[0] = read[0][0, inputs.into]

    def from_logits(number: int, model: Any, each: ModelInputs) -> Tensor:
        logits = model(**each.as_arguments(), use_cache=False).logits
        found = get_logprobs_from_vocab_parallel_logits(logits, each.targets[None])[0]
        kept[1] = found if number == 0 else kept[1]  # and not of a repetition
        return found.sum()

    sharded._forward([inputs], read_logp(head, temperature=1.0), shapes=[(1, inputs.longest)], keep=keep)  # noqa: SLF001 - ours
    if sharded.pipeline is None:
        from_logits(0, sharded.model, inputs)
    else:
        sharded.run_pipeline([inputs], from_logits, backward=False)
    ours, theirs = sharded._on_every_stage(kept).values()  # noqa: SLF001 - ours
    reshard(sharded.model)
    apart = largest_on_any_rank((ours - theirs).abs().max())
    if apart > TOLERANCE[sharded.config.precision]:
        raise ModelError(
            f"{type(sharded.model).__qualname__} gives log-probabilities from its own logits that differ by "
            f"{apart:.3g} nats from lm_head(hidden states) with logit_scale={head.logit_scale} and "
            f"softcap={head.softcap}: it does something to its logits that this backend does not know; use another "
            f"architecture, or report this one"
        )


def _dtypes(what: str, tensors: list[Tensor]) -> str:
    """Such as "trained weights in float32"; with shares, where there are several dtypes; "" without tensors."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    total = sum(elements.values())
    shares = [f"{dtype} ({count / total:.1%})" for dtype, count in elements.most_common()]
    return f"{what} in {' and '.join(elements if len(elements) == 1 else shares)}" if total else ""
