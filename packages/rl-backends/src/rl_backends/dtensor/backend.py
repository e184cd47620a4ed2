"""The DTensor backend: a Hugging Face model, sharded by FSDP2, tensor, context and expert parallelism, and trained.

Every rank is given the whole batch and works on its own rows; gradients and sums are added up, never averaged, so that
a loss which divides by the step's global count gives the same gradient however the batch was cut.

Axes: B rows, T tokens, k words.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_backends.batching.microbatches import moved
from rl_backends.batching.words import token_ids_of
from rl_backends.checkpoints import CheckpointState, CheckpointWrite, load_checkpoint, save_checkpoint
from rl_backends.choices import require_temperature
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.dtensor.describing import describe
from rl_backends.dtensor.head_check import check_head
from rl_backends.dtensor.recovery import forget_pass
from rl_backends.dtensor.reference import copy_of
from rl_backends.dtensor.sharded_model import ShardedModel
from rl_backends.examples import BatchT, TokenBatch
from rl_backends.export import export_pretrained
from rl_backends.loading import initialise, open_model
from rl_backends.lora import (
    MergedWeights,
    adapters_disabled,
    add_lora,
    export_merged,
    fill_with_adapters,
    load_adapter,
    save_adapter,
)
from rl_backends.losses import ROUTER_LOSS, LossFunction, Output, Sums, last_tokens, through_outputs
from rl_backends.metering import make_meter
from rl_backends.metrics import StepMetrics
from rl_backends.moe import RouterWatch, router_metrics
from rl_backends.offload import PARTS, Offloader, OffloadReport, Part
from rl_backends.optimizers import OptimizerConfig, Optimizers, clip_and_step, make_optimizers
from rl_backends.rank_agreement import add_up, raise_together
from rl_backends.readers import (
    Head,
    Reader,
    has_language_model_head,
    read_entropy,
    read_logp,
    read_top_k,
    token_logp_reader,
    value_reader,
)
from rl_backends.reference import ReferenceModel, without_weights
from rl_parallel_plans import NamedShard, TopKLogp, named_shards

__all__ = ["DTensorBackend"]

WEIGHTS: tuple[Part, ...] = ("weights",)
PASSES: tuple[Part, ...] = ("weights", "gradients")
"""What a forward and a backward need on the device."""


class DTensorBackend:
    """A policy that trains `model`, sharded over the ranks of this run.

    Args:
        model: a Hugging Face causal LM, or a sequence classifier of one label, with its weights, the same on every
            rank. The backend takes it over.
        config: sharding, device, precision, microbatches, adapters.
        seed: of the first values of adapters.
        fill: for a model on the meta device: what puts weights into its parameters once they are sharded.

    Raises:
        PlanError: the model cannot be sharded as asked.
        ModelError: it has no head that can be read here, or cannot be packed or adapted as asked.
        ValueError: no GPU where one was asked for, or ranks that the sizes do not divide.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DTensorConfig,
        *,
        seed: int = 0,
        fill: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.config = config
        if config.lora_cfg is not None:
            add_lora(model, config.lora_cfg, seed=seed)
            fill = None if fill is None else partial(fill_with_adapters, fill=fill, seed=seed)
        self._skeleton = without_weights(model)
        self._sharded = ShardedModel(model, config, fill=fill)
        self.model: nn.Module = self._sharded.model
        """The sharded model, an `nn.Module` under its Hugging Face names, for whatever reads or moves its weights."""
        with self._sharded.closed_on_failure():
            if has_language_model_head(self.model):
                check_head(self._sharded, self._head)
            watched = config.router_aux_loss_coef > 0
            self._routers = RouterWatch(self.model, plan=self._sharded.plan) if watched else None
            self._meter = make_meter(
                self._skeleton,
                config,
                token_multiple=self._sharded.token_multiple,
                recomputed=config.activation_checkpointing == "full",
                memory_of=self._held,
            )
        self._offloader: Offloader | None = None
        self._offload_directory: Path | None = None
        self._merged: MergedWeights | None = None
        self._optimizers: Optimizers | None = None
        self._last_write: CheckpointWrite | None = None
        self._temperature = 1.0
        self.version = 0
        """Optimizer steps that the weights have seen."""

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        config: DTensorConfig,
        *,
        head: Literal["causal_lm", "sequence_classification"] = "causal_lm",
        weights: Literal["pretrained", "random"] = "pretrained",
        new_head: bool = False,
        seed: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "DTensorBackend":
        """Load a folder or hub id, each rank reading its own shards: no rank ever holds the whole model.

        Args:
            model_name: a folder with `config.json` and safetensors weights, or a hub id.
            config: sharding, device, precision, microbatches, adapters.
            head: what the model ends in; "sequence_classification" is a reward or value model of one number.
            weights: "random" reads the configuration alone and initialises as transformers would, from `seed`, to the
                same weights on every mesh.
            new_head: let a reward or value model's head begin at random, where the folder is a language model's.
            seed: of random weights, of a new head and of adapters.
            revision: branch, tag or commit of a hub id; pin it to make a run repeatable.
            trust_remote_code: run the model's own Python code. Only for code that you have read.

        Raises:
            ModelError: what `open_model` refuses: absent files, missing or superfluous tensors, other shapes.
        """
        source = open_model(model_name, head=head, revision=revision, trust_remote_code=trust_remote_code)
        load = partial(source.load_into, new_head=new_head, seed=seed)
        fill: Callable[[nn.Module], object] = partial(initialise, seed=seed) if weights == "random" else load
        return cls(source.skeleton(), config, seed=seed, fill=fill)

    def start_training(self, optimizer: OptimizerConfig, *, num_steps: int, temperature: float = 1.0) -> None:
        """Begin a stage with a fresh optimizer, a schedule of `num_steps` and no gradient; weights and version go on.

        `temperature` divides the logits before every log-probability: set it to the engine's, or ratios are wrong.
        """
        require_temperature(temperature)
        self._require_here("start_training")
        self._optimizers = make_optimizers(self.model, optimizer, num_steps=num_steps)
        self.model.zero_grad()
        self._optimizer_config = optimizer
        self._temperature = temperature

    @property
    def learning_rate(self) -> float:
        """Of the next step.

        Raises:
            RuntimeError: `start_training` was not called.
        """
        return self._require_optimizers().learning_rate

    def logp(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each trainable token given those before it; 0 elsewhere. All rows, on every rank."""
        return self._read(examples, read_logp(self._head, self._temperature))[0]

    def entropy(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """Entropy in nats of the distribution that each trainable token was drawn from; 0 elsewhere."""
        return self._read(examples, read_entropy(self._head, self._temperature))[0]

    def topk_logits(self, examples: TokenBatch, k: int) -> TopKLogp:
        """The k most probable words in each trainable token's place: `.logp` and `.token_ids` of [B, T, k].

        Normalised over the whole vocabulary: `.logp` are logits less their log-sum-exp. 0 where nothing is trainable.
        """
        read = self._read(examples, read_top_k(self._head, self._temperature, k))
        return TopKLogp(logp=read[0], token_ids=read[1])

    def value(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """What a value head says of the state before each trainable token, in that token's place; 0 elsewhere."""
        return self._read(examples, value_reader(self.model))[0]

    def score(self, examples: TokenBatch) -> Float[Tensor, " B"]:
        """What a reward head says of each row, at its last token."""
        return self._read(examples, value_reader(self.model), asked=last_tokens(examples), offset=0)[0].sum(1)

    def forward_backward(self, examples: BatchT, loss: LossFunction[BatchT], *, output: Output = "logp") -> Sums:
        """Accumulate the gradient of `loss` over all of `examples`; return its metric sums over all of them.

        Args:
            examples: the whole batch, the same on every rank.
            loss: of the output of some rows and those rows, to a scalar and named scalars that are added up.
            output: what `loss` is given: "logp" or "value" [b, w]; "logp_and_entropy" [b, w, 2], as the methods give
                them; "logp_of_token_ids" [b, w, k], of the words `examples.token_ids`; or "score" [b].

        Raises:
            BatchError: the examples cannot be cut into microbatches; no gradient has changed.
            RankError: another rank's loss raised. Whatever raises, on whichever rank, clears the gradient on all of
                them, also what earlier calls have left, so that a retry does not start from a part of it.
        """
        self._require_here("forward_backward", PASSES)
        if output in {"value", "score"}:
            reader = value_reader(self.model)
        else:
            reader = token_logp_reader(output, self._head, self._temperature)
        of_words, of_rows = output == "logp_of_token_ids", output == "score"
        sharded, routers, config = self._sharded, self._routers, self.config
        cut = sharded.cut(examples, with_token_ids=of_words)
        own, num_rows = cut[sharded.rank_of_rows], len(examples.lengths)
        sums: Sums = {}
        failure: Exception | None = None
        with self._meter.forward_backward(examples, cut, asked=torch.ones_like(examples.lengths) if of_rows else None):
            try:
                for number, microbatch in enumerate(own):
                    # Forward: the output of the asked tokens, and the loss of the routers, if that is weighed.
                    rows = microbatch.of(examples, device="cpu")
                    asked = last_tokens(rows) if of_rows else rows.trainable
                    words = token_ids_of(rows) if of_words else None
                    inputs = sharded.inputs(rows, asked, offset=0 if of_rows else 1, words=words)
                    recording: AbstractContextManager[Any] = nullcontext() if routers is None else routers.recording()
                    with recording:
                        outputs = sharded.read(inputs, reader, shape=(rows.tokens.shape[0], rows.tokens.shape[1]))[0]
                    if of_rows:
                        outputs = outputs.sum(1)
                    router_loss: Tensor | None = None
                    if routers is not None:
                        group = sharded.group("cp")
                        router_loss = routers.loss(
                            inputs, rows.lengths, counted=microbatch.counted, context_group=group
                        )

                    # The caller's loss, whose own backward runs here. A rank whose loss raised continues with a loss
                    # of 0: the collectives of the model's backward need every rank.
                    total, parts = outputs.sum() * 0.0, Sums()
                    if failure is None:
                        try:
                            leaf = outputs.detach().requires_grad_(outputs.requires_grad)
                            result = loss(leaf, rows if config.device == "cpu" else moved(rows, device=config.device))
                            total, parts = through_outputs(
                                result,
                                leaf=leaf,
                                outputs=outputs,
                                counted=microbatch.counted,
                                reserved=() if routers is None else (ROUTER_LOSS,),
                            )
                        except Exception as error:  # noqa: BLE001 - anybody's loss; raised below, on all ranks
                            failure = error
                    if router_loss is not None:
                        parts[ROUTER_LOSS] = router_loss.detach() / num_rows
                        total = total + router_loss * (microbatch.counted * config.router_aux_loss_coef / num_rows)

                    # Backward: gradients add up in the parameters, and are summed over data-parallel ranks at the last
                    # microbatch, or at every one.
                    if isinstance(self.model, FSDPModule):
                        last = number == len(own) - 1
                        self.model.set_requires_gradient_sync(last or config.reduce_gradients == "every_microbatch")
                    torch.autograd.backward(total)
                    for name, part in parts.items():
                        sums[name] = sums.get(name, 0.0) + (part if microbatch.counted else torch.zeros_like(part))

                raise_together(failure)
                if ROUTER_LOSS in sums and (group := sharded.group("cp")) is not None:
                    dist.all_reduce(sums[ROUTER_LOSS], group=group)  # each rank holds the term of its own tokens
                return add_up(sums, sharded.rows.get_group(), device=torch.device(config.device))
            except BaseException:
                forget_pass(self.model)
                if routers is not None:
                    routers.take_counts()
                raise

    def optim_step(self) -> float:
        """Clip, update, clear the gradient; return its norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is not finite, and the optimizer was not told to skip such steps. No
                update was made.
            RuntimeError: `start_training` was not called, or there is no gradient.
        """
        self._require_here("optim_step")
        optimizers = self._require_optimizers()
        with self._meter.optim_step() as outcome:
            step = clip_and_step(self.model, optimizers, self._optimizer_config, version=self.version)
            outcome.grad_norm, outcome.skipped = step.norm, step.skipped
            # How evenly experts were used since the last step, over all ranks; empty without a router's loss.
            counts = {} if self._routers is None else self._routers.take_counts()
            for count in counts.values():
                for group in (self._sharded.group("rows"), self._sharded.group("cp")):
                    if group is not None:
                        dist.all_reduce(count, group=group)
            outcome.router = router_metrics(counts) if counts else {}
        if not step.skipped:
            self.version += 1
        return step.norm

    def metrics(self) -> StepMetrics | None:
        """Tokens, FLOPs, seconds, padding, balance and memory of the last step; None before the first."""
        return self._meter.metrics()

    def freeze_reference(self, *, without_adapters: bool = False, offload: bool = False) -> ReferenceModel:
        """The policy as it is now, frozen: `reference.logp(examples)`.

        Args:
            without_adapters: the model that low-rank adapters were put into, whenever it is asked for: the policy with
                its adapters off, without memory of its own. Otherwise a copy is made, sharded as the policy is.
            offload: keep the copy in host memory; each layer visits the device when it runs.

        Raises:
            ModelError: `without_adapters` of a policy that has none, or that trains other weights too.
        """
        self._require_here("freeze_reference", WEIGHTS)
        temperature = lambda: self._temperature  # noqa: E731 - of the stage
        if without_adapters:
            with adapters_disabled(self.model):  # refuses now, and not at the first question
                pass
            off = partial(adapters_disabled, self.model)
            return ReferenceModel(self._sharded, self._head, temperature=temperature, as_reference=off)
        copied = copy_of(self._sharded, without_weights(self._skeleton), offload=offload)
        return ReferenceModel(copied, self._head, temperature=temperature)

    def shards(self) -> "list[NamedShard]":
        """This rank's part of every weight under its Hugging Face name, adapters merged: what an engine is fed from.

        Nothing is gathered but the few rows of adapters. `NamedShard.boxes` tells which parts of the whole they are.
        Every rank must call it. The tensors are the same at every call, and hold the weights of the latest.
        """
        self._require_here("shards", WEIGHTS)
        if self.config.lora_cfg is None:
            return list(named_shards(self.model))
        if self._merged is None:
            self._merged = MergedWeights(self.model)
        else:
            self._merged.refresh()
        return list(self._merged.shards())

    def skeleton_buffers(self) -> dict[str, Tensor]:
        """Buffers of the Hugging Face model that no file holds, such as rotary frequencies; the same on every rank."""
        transient = {
            f"{path}.{name}" if path else name
            for path, module in self.model.named_modules()
            for name in module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public one
        }
        return {name: buffer for name, buffer in self.model.named_buffers() if name in transient}

    def offload(self, *, parts: Collection[Part] = PARTS, directory: str | Path | None = None) -> OffloadReport:
        """Give the device's memory of weights, gradients and optimizer state to others, such as a colocated engine.

        Args:
            parts: of "weights", "gradients" and "optimizer".
            directory: write them there; None copies them to host memory.

        Raises:
            ValueError: a part that is none, or another place than where some parts are already.
        """
        place = None if directory is None else Path(directory)
        if self._offloader is None or place != self._offload_directory:
            if self._offloader is not None:
                if self._offloader.away:
                    raise ValueError(
                        f"directory={place}, and {', '.join(self._offloader.away)} went to "
                        f"{self._offload_directory or 'the host'}: call onload() before choosing another place"
                    )
                self._offloader.close()
            self._offloader = Offloader(self.model, to="host" if place is None else "disk", directory=place)
            self._offload_directory = place  # kept, and its memory used again, until another place is chosen
        report = self._offloader.offload(self._held()[1], parts=parts)
        if "weights" in parts and self._merged is not None:
            self._merged.release()
        return report

    def onload(self, *, parts: Collection[Part] = PARTS) -> OffloadReport:
        """Bring back what `offload` moved, bit for bit.

        Raises:
            RuntimeError: nothing was offloaded, or the device's memory is taken by somebody else.
        """
        if self._offloader is None:
            raise RuntimeError("nothing was offloaded; onload() brings back what offload() has moved")
        report = self._offloader.onload(parts)
        if "weights" in parts and self._merged is not None:
            self._merged.refresh()
        return report

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder, adapters merged, tensor by tensor; every rank must call it.

        Whole or not at all.

        Raises:
            FileExistsError: `folder` is there already; nothing is overwritten.
            OSError: the disk is full or read-only; `folder` does not exist afterwards.
        """
        self._require_here("save_pretrained", WEIGHTS)
        if self.config.lora_cfg is None:
            export_pretrained(self.model, Path(folder))
        else:
            export_pretrained(self.model, Path(folder), tensors=export_merged(self.model))

    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None:
        """Write the adapters in PEFT's format, whole or not at all; every rank must call it.

        Args:
            folder: where to; it must not exist.
            base_model_name: of the model that they adapt, a folder or hub id, for whoever loads them.
        """
        self._require_here("save_adapter", WEIGHTS)
        save_adapter(self.model, Path(folder), base_model_name=base_model_name)

    def load_adapter(self, folder: str | Path) -> None:
        """Put adapters that `save_adapter` or peft wrote in the place of this policy's; every rank must call it.

        Raises:
            CheckpointError: they are damaged, or another model's; nothing has changed.
        """
        self._require_here("load_adapter", WEIGHTS)
        load_adapter(self.model, Path(folder))

    def save_checkpoint(
        self,
        folder: str | Path,
        *,
        weights: bool = True,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> CheckpointWrite:
        """Write weights, optimizer, schedule and version into a new folder, from which any mesh can go on.

        Arguments and errors are those of `rl_backends.checkpoints.save_checkpoint`; every rank must call it.
        """
        self._require_here("save_checkpoint")
        asked: dict[str, Any] = {"weights": weights, "asynchronous": asynchronous, "extra": extra}
        self._last_write = save_checkpoint(self.model, self._optimizers, folder, version=self.version, **asked)
        return self._last_write

    def load_checkpoint(
        self, folder: str | Path, *, weights: bool = True, optimizer: bool = True, verify: bool = True
    ) -> CheckpointState:
        """Go on from a checkpoint, after `start_training` as before if it has an optimizer; every rank must call it.

        Arguments and errors are those of `rl_backends.checkpoints.load_checkpoint`; the gradient is cleared.
        """
        self._require_here("load_checkpoint")
        asked = {"weights": weights, "optimizer": optimizer, "verify": verify}
        state = load_checkpoint(self.model, self._optimizers, folder, **asked)
        self.version = state.version
        return state

    def explain(self) -> str:
        """The mesh, which rule shards which parameter and why, the adapters and the optimizer."""
        return describe(self._sharded, optimizers=self._optimizers)

    def close(self) -> None:
        """Leave the process group, which the last backend destroys if one made it; nothing can be computed after.

        Raises:
            CheckpointError: the asynchronous save that was awaited first could not be written.
        """
        write, self._last_write = self._last_write, None
        with closing(self._sharded), nullcontext() if self._offloader is None else closing(self._offloader):
            if write is not None:
                write.wait()

    def _read(self, examples: TokenBatch, reader: Reader, **where: Any) -> dict[int, Tensor]:
        self._require_here("reading", WEIGHTS)
        return self._sharded.read_all(examples, reader, **where)

    def _held(self) -> tuple[nn.Module, tuple[torch.optim.Optimizer, ...]]:
        return self.model, () if self._optimizers is None else self._optimizers.each

    def _require_here(self, what: str, parts: Collection[Part] = PARTS) -> None:
        """RuntimeError where any of `parts`, which `what` needs, is offloaded."""
        if self._offloader is not None:
            self._offloader.require(what, parts)

    def _require_optimizers(self) -> Optimizers:
        if self._optimizers is None:
            raise RuntimeError("there is no optimizer yet; call start_training(optimizer, num_steps=...) first")
        return self._optimizers

    @cached_property
    def _head(self) -> Head:
        """How logits are read; ModelError without a language-model head."""
        return Head.of(self.model, self.config.kernels)
