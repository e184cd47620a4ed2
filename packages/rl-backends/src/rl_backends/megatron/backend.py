"""The Megatron backend: a Hugging Face model, laid out by megatron-core, and trained.

The same surface as `DTensorBackend`, and the same meanings: every rank is handed the whole batch and works on its own
rows; gradients and sums are added up, never averaged, so that a loss which divides by the step's global count gives the
same gradient however the batch was cut.

Axes: B rows, T tokens, k words.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl_backends.checkpoints import CheckpointState, CheckpointWrite
from rl_backends.choices import require_temperature
from rl_backends.errors import ModelError
from rl_backends.examples import BatchT, TokenBatch
from rl_backends.export import export_pretrained
from rl_backends.loading import open_model
from rl_backends.losses import LossFunction, Output, Sums
from rl_backends.megatron.accumulation import GradientAccumulation
from rl_backends.megatron.checkpoint import load_checkpoint, save_checkpoint
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.describing import describe
from rl_backends.megatron.freezing import require_trainable
from rl_backends.megatron.gradient_step import clip_and_step
from rl_backends.megatron.mapping import Gatherer, HeldTensor, names_in_hugging_face
from rl_backends.megatron.model import Fill, MegatronModel
from rl_backends.megatron.optimizer import MegatronOptimizers, make_optimizers
from rl_backends.megatron.proof import prove, require_own_code
from rl_backends.megatron.weights import at_random, from_files, from_hugging_face, from_megatron
from rl_backends.metering import make_meter
from rl_backends.metrics import StepMetrics
from rl_backends.optimizers import OptimizerConfig
from rl_backends.rank_agreement import on_every_rank, require_same_model
from rl_backends.readers import Head, read_entropy, read_logp, read_top_k, token_logp_reader
from rl_backends.reference import ReferenceModel, without_weights
from rl_parallel_plans import TopKLogp

__all__ = ["MegatronBackend"]


class MegatronBackend:
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

    def __init__(
        self, model: nn.Module, config: MegatronConfig, *, fill: Fill | None = None, origin: str = "a model in memory"
    ) -> None:
        self.config = config
        self._skeleton = without_weights(model)
        self._head = Head.of(self._skeleton)
        require_own_code(model)
        source = from_hugging_face(_with_weights(model)) if fill is None else fill
        self._laid_out: MegatronModel | None = MegatronModel(
            self._skeleton, config, fill=partial(_same_then, source, model)
        )
        try:
            if fill is None:
                prove(self._model, self._head, source=model)
            self._gatherer = Gatherer(self._model.held, self._model.shapes)
        except BaseException:
            self._model.close()
            raise
        self._accumulation = GradientAccumulation(self._model)
        self._meter = make_meter(
            self._skeleton,
            config,
            token_multiple=self._model.token_multiple,
            recomputed=config.recompute_granularity == "full",
            memory_of=self._held,
        )
        self._names = names_in_hugging_face(self._model.held)
        self._optimizers: MegatronOptimizers | None = None
        self._last_write: CheckpointWrite | None = None
        self._temperature = 1.0
        self._origin = origin
        self.version = 0
        """Optimizer steps that the weights have seen."""

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
        """Load a folder or hub id: every rank reads from the safetensors files the parts that it holds.

        Args:
            model_name: a folder with `config.json` and safetensors weights, or a hub id.
            config: sizes, device, precision, microbatches, optimizer.
            weights: "random" reads the configuration alone and initialises as transformers would, from `seed`, to the
                same weights in every layout.
            seed: of random weights.
            revision: branch, tag or commit of a hub id; pin it to make a run repeatable.
            trust_remote_code: run the model's own Python code. Only for code that you have read.

        Raises:
            ModelError: what `open_model` refuses: absent files, missing or superfluous tensors, other shapes.
        """
        source = open_model(model_name, revision=revision, trust_remote_code=trust_remote_code)
        skeleton = source.skeleton()
        if weights == "random":
            return cls(skeleton, config, fill=at_random(skeleton, seed=seed), origin=f"random numbers of seed {seed}")
        origin = f"the safetensors files of {source.folder}, each rank its own parts"
        return cls(skeleton, config, fill=from_files(source, skeleton), origin=origin)

    @property
    def model(self) -> nn.Module:
        """Megatron's model of this pipeline stage, under Megatron's names."""
        return self._model.gpt  # type: ignore[no-any-return]

    def start_training(
        self, optimizer: OptimizerConfig | None = None, *, num_steps: int, temperature: float = 1.0
    ) -> None:
        """Begin a stage with a fresh optimizer, a schedule of `num_steps` and no gradient; weights and version go on.

        Args:
            optimizer: taken where the configuration has no `optimizer` of Megatron's own, which comes first.
            num_steps: of the stage.
            temperature: divides the logits before every log-probability: the engine's, or ratios are wrong.

        Raises:
            ValueError: neither is given, or Megatron has no counterpart of what `optimizer` asks for.
        """
        require_temperature(temperature)
        model = self._model
        on_every_rank(partial(require_trainable, model.gpt))
        self._accumulation.discard()
        self._optimizers = make_optimizers(model.ddp, model.gpt.config, self.config, optimizer, num_steps=num_steps)
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
        return self._model.read_all(examples, read_logp(self._head, self._temperature))[0]

    def entropy(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """Entropy in nats of the distribution that each trainable token was drawn from; 0 elsewhere."""
        return self._model.read_all(examples, read_entropy(self._head, self._temperature))[0]

    def topk_logits(self, examples: TokenBatch, k: int) -> TopKLogp:
        """The k most probable words in each trainable token's place: `.logp` and `.token_ids` of [B, T, k].

        Normalised over the whole vocabulary: `.logp` are logits less their log-sum-exp. 0 where nothing is trainable.
        """
        if not 1 <= k <= self._model.architecture.vocab_size:
            raise ValueError(f"k={k} must be from 1 to the {self._model.architecture.vocab_size} words of the model")
        read = self._model.read_all(examples, read_top_k(self._head, self._temperature, k))
        return TopKLogp(logp=read[0], token_ids=read[1])

    def forward_backward(self, examples: BatchT, loss: LossFunction[BatchT], *, output: Output = "logp") -> Sums:
        """Accumulate the gradient of `loss` over all of `examples`; return its metric sums over all of them.

        Args:
            examples: the whole batch, the same on every rank.
            loss: of the output of some rows and those rows, to a scalar and named scalars that are added up.
            output: what `loss` is given: "logp" [b, w]; "logp_and_entropy" [b, w, 2]; or "logp_of_token_ids" [b, w, k],
                of the words `examples.token_ids`. Value and reward heads are the DTensor backend's.

        Raises:
            BatchError: the examples cannot be cut into microbatches; no gradient has changed.
            RankError: another rank's loss raised. Whatever raises, on whichever rank, clears the gradient on all of
                them, also what earlier calls have left, so that a retry does not start from a part of it.
        """
        if output in {"value", "score"}:
            raise ValueError(
                f"output={output!r}: the Megatron backend has language models alone; train reward and value models "
                f"with policy.dtensor_cfg.enabled=true"
            )
        reader = token_logp_reader(output, self._head, self._temperature)
        cut = self._model.cut(examples, with_token_ids=output == "logp_of_token_ids")
        with self._meter.forward_backward(examples, cut, asked=None):
            own = cut[self._model.rank_of_rows]
            return self._accumulation.run(examples, own, loss, reader=reader, output=output)

    def optim_step(self) -> float:
        """Clip, update, clear the gradient; return its norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is not finite, and the optimizer was not told to skip such steps. No
                update was made.
            RuntimeError: `start_training` was not called, or there is no gradient.
        """
        optimizers = self._require_optimizers()
        if not self._accumulation.started:
            raise RuntimeError("there is no gradient to step along; call forward_backward(examples, loss) first")
        with self._meter.optim_step() as outcome:
            self._accumulation.started = False
            step = clip_and_step(self._model.ddp, optimizers, version=self.version, names=self._names)
            outcome.grad_norm, outcome.skipped = step.norm, step.skipped
        if not step.skipped:
            self.version += 1
        return step.norm

    def metrics(self) -> StepMetrics | None:
        """Tokens, FLOPs, seconds, padding, balance and memory of the last step; None before the first."""
        return self._meter.metrics()

    def freeze_reference(self, *, offload: bool = False) -> ReferenceModel:
        """A copy of the policy as it is now, laid out alike and frozen: `reference.logp(examples)`.

        offload: keep the copy in host memory; it visits the device while it is asked.
        """
        copied = MegatronModel(
            self._skeleton, self.config, fill=from_megatron(self._model), trainable=False, groups=self._model.groups
        )
        if offload:
            copied.gpt.to("cpu")
        visit = copied.visiting_the_device if offload else nullcontext
        return ReferenceModel(copied, self._head, temperature=lambda: self._temperature, as_reference=visit)

    def shards(self) -> list[HeldTensor]:
        """This rank's part of every weight under its Hugging Face name: what an engine is fed from.

        Nothing is gathered. `HeldTensor.boxes` tells which parts of the whole they are. A tensor of another pipeline
        stage is not among them.
        """
        return [held for held in self._model.held if not held.duplicate]

    def skeleton_buffers(self) -> dict[str, Tensor]:
        """Buffers of the Hugging Face model that no file holds, such as rotary frequencies; the same on every rank."""
        persistent = self._skeleton.state_dict().keys()
        return {name: buffer for name, buffer in self._skeleton.named_buffers() if name not in persistent}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder, tensor by tensor; every rank must call it. Whole or not at all.

        Raises:
            FileExistsError: `folder` is there already; nothing is overwritten.
            OSError: the disk is full or read-only; `folder` does not exist afterwards.
        """
        dtype = torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32
        export_pretrained(self._skeleton, Path(folder), dtype=dtype, tensors=self._gatherer.tensors())

    def save_checkpoint(
        self,
        folder: str | Path,
        *,
        weights: bool = True,
        asynchronous: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> CheckpointWrite:
        """Write weights, optimizer, schedule and version into a new folder, from which any layout can go on.

        Arguments and errors are those of `rl_backends.checkpoints.save_checkpoint`; every rank must call it.
        """
        self._last_write = save_checkpoint(
            self._model.held,
            self._optimizers,
            folder,
            version=self.version,
            layout=self._model.groups.sizes,
            weights=weights,
            asynchronous=asynchronous,
            extra=extra,
        )
        return self._last_write

    def load_checkpoint(
        self, folder: str | Path, *, weights: bool = True, optimizer: bool = True, verify: bool = True
    ) -> CheckpointState:
        """Go on from a checkpoint, after `start_training` as before if it has an optimizer; every rank must call it.

        Arguments and errors are those of `rl_backends.checkpoints.load_checkpoint`; the gradient is cleared.
        """
        asked = {"weights": weights, "optimizer": optimizer, "verify": verify}
        state = load_checkpoint(self._model.held, self._optimizers, folder, **asked)
        self._accumulation.discard()
        self.version = state.version
        return state

    def explain(self) -> str:
        """The layout, what is on which rank, where the weights came from, and the optimizer."""
        return describe(self._model, origin=self._origin, optimizers=self._optimizers)

    def close(self) -> None:
        """Leave the process groups; nothing can be computed after, also by references. A second time does nothing.

        Raises:
            CheckpointError: the asynchronous save that was awaited first could not be written.
        """
        model, self._laid_out = self._laid_out, None
        if model is None:
            return
        try:
            if self._last_write is not None:
                self._last_write.wait()
        finally:
            model.close()

    @property
    def _model(self) -> MegatronModel:
        if self._laid_out is None:
            raise RuntimeError("this backend is closed: its process groups are gone; make another one")
        return self._laid_out

    def _held(self) -> tuple[nn.Module, tuple[torch.optim.Optimizer, ...]]:
        return self.model, () if self._optimizers is None else self._optimizers.each

    def _require_optimizers(self) -> MegatronOptimizers:
        if self._optimizers is None:
            raise RuntimeError("there is no optimizer yet; call start_training(optimizer, num_steps=...) first")
        return self._optimizers


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
