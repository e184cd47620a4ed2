# ruff: noqa: D102 - the methods of the Protocol are documented by `Backend`
"""What every training backend is and does: the surface that drivers type against, and the half that all of them share.

`TrainingBackend` is the Protocol: a backend in this process, or a group of ranks that each hold one, such as on Ray.
`Backend` is the base class of `DTensorBackend` and `MegatronBackend`. It cuts batches into microbatches, reads
log-probabilities, accumulates gradients, steps, measures, saves and closes; a subclass says how its model computes.
`DistributedModel` is the model of a backend, laid out over ranks.

Every rank is given the whole batch and works on its own rows; or it is given those alone, as `DealtRows`, and what it
reads is of them. Gradients and sums are added up, never averaged, so that a loss which divides by the step's global
count gives the same gradient however the batch was cut.

Axes: B rows, T tokens, k tokens of the vocabulary; b rows of a microbatch, w tokens of its longest row.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from rl_backends.batching.dealing import DealtRows, RowDealing, trainable_of
from rl_backends.batching.microbatches import (
    Layout,
    Microbatch,
    ModelInputs,
    SequenceShard,
    lengths_read,
    make_inputs,
    make_shared_inputs,
)
from rl_backends.checkpoints.contents import CheckpointContents
from rl_backends.checkpoints.loading import CheckpointState, read_checkpoint
from rl_backends.checkpoints.saving import CheckpointWrite, release_staging_buffers, write_checkpoint
from rl_backends.checkpoints.shards import tensor_digests
from rl_backends.config import BackendConfig
from rl_backends.errors import ModelError
from rl_backends.examples import BatchT, TokenBatch, token_ids_of
from rl_backends.loading.skeleton import without_weights
from rl_backends.loading.source import ModelSource, open_model
from rl_backends.lora.layers import adapter_size
from rl_backends.losses import LossFunction, Output, Sums, last_tokens
from rl_backends.metrics.flops import ModelFlops, decoder_of, peak_of_this_device
from rl_backends.metrics.memory import memory_by_category
from rl_backends.metrics.step import StepMeter, StepMetrics
from rl_backends.offload import PARTS, Offloader, OffloadReport, Part
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.optimizers import GradientStep, StageOptimizers
from rl_backends.rank_agreement import host_group, on_every_rank, require_same_batch, require_same_deal
from rl_backends.readers import Head, Reader, read_entropy, read_logp, read_top_k, token_logp_reader, value_reader
from rl_parallel_plans import TopKLogp

WEIGHTS: tuple[Part, ...] = ("weights",)
PASSES: tuple[Part, ...] = ("weights", "gradients")
"""What a forward and a backward need on the device."""

POSITION_TABLE = re.compile(r"wpe|embed_positions?|position_embeddings?|pos_embeddings?")
"""How transformers call a table of learned positions."""

MEDIA_TOKEN = re.compile(r"(image|video|audio)_token_(id|index)")
"""How the configurations of transformers call the tokens that stand for images."""


class TrainingBackend(Protocol):
    """What a driver, such as rl-launcher, calls: either backend, or a group of ranks that each hold one.

    The methods are those of `Backend`, which documents them. Results are the same on every rank.
    """

    version: int
    """Optimizer steps that the weights have seen."""

    @property
    def learning_rate(self) -> float: ...
    def start_training(self, optimizer: OptimizerConfig, *, num_steps: int, temperature: float = 1.0) -> None: ...
    def logp(self, examples: Any) -> Tensor: ...
    def entropy(self, examples: Any) -> Tensor: ...
    def topk_logits(self, examples: Any, k: int) -> TopKLogp: ...
    def value(self, examples: Any) -> Tensor: ...
    def score(self, examples: Any) -> Tensor: ...
    def forward_backward(self, examples: Any, loss: Any, *, output: Any = "logp") -> dict[str, Tensor]: ...
    def row_dealing(self) -> Any: ...
    def optim_step(self) -> float: ...
    def metrics(self, *, memory: bool = True) -> Any: ...
    def freeze_reference(self, *, without_adapters: bool = False, offload: bool = False) -> Any: ...
    def offload(self, *, parts: Collection[Part] = PARTS) -> Any: ...
    def onload(self, *, parts: Collection[Part] = PARTS) -> Any: ...
    def save_pretrained(self, folder: str | Path) -> None: ...
    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None: ...
    def save_checkpoint(self, folder: str | Path) -> Any: ...
    def load_checkpoint(self, folder: str | Path, *, optimizer: bool = True) -> Any: ...
    def explain(self) -> str: ...
    def close(self) -> None: ...


class DistributedModel(ABC):
    """A model laid out over all ranks of this run, each of which is given whole batches and reads its own rows."""

    config: BackendConfig
    vocabulary_size: int
    """Rows of the embedding: token ids are below it."""
    max_positions: int | None
    """Tokens of the longest row that the model has positions for; None where it has no table of them."""
    media_tokens: Mapping[int, str]
    """Ids of tokens in whose place a vision-language model puts what it has made of an image, and their names."""
    sequence_shard: SequenceShard | None
    """This rank's part of every row; None without context parallelism."""
    token_multiple: int
    """What the length of padded rows is rounded up to."""
    length_multiple: int = 1
    """What the length of what the model reads at a time is rounded up to."""
    fewest_microbatches: int = 1
    """What a batch is cut into at least, on each rank."""
    reads_whole_rows: bool = False
    """Whether tokens are read that no asked token depends on, as the loss of a router wants them."""
    shares_prefixes: bool = False
    """Whether what rows of a pack begin with alike is read once."""

    @property
    @abstractmethod
    def row_group(self) -> dist.ProcessGroup:
        """The ranks among which the rows of a batch are shared out."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it has left its process groups."""

    @property
    def layout(self) -> Layout:
        """How rows of a microbatch lie."""
        return "packed" if self.config.sequence_packing else "padded"

    @property
    def row_dealing(self) -> RowDealing:
        """How the rows of a batch are shared out among the ranks that have rows of their own."""
        config = self.config
        return RowDealing(
            rank=self.row_group.rank(),
            num_ranks=self.row_group.size(),
            micro_batch_size=config.micro_batch_size,
            micro_batch_tokens=config.micro_batch_tokens,
            layout=self.layout,
            fewest_microbatches=self.fewest_microbatches,
            token_multiple=self.token_multiple,
            vocabulary_size=self.vocabulary_size,
            max_positions=self.max_positions,
            media_tokens=self.media_tokens,
        )

    def take(
        self, examples: BatchT | DealtRows[BatchT], *, with_token_ids: bool = False
    ) -> tuple[BatchT, list[Microbatch], list[list[Microbatch]]]:
        """The rows that this rank was given, its microbatches of them, and those of all ranks in numbers of the batch.

        with_token_ids: `examples.token_ids` will be asked about.

        Raises:
            BatchError: on every rank; the examples cannot be cut or read, are not the same on every rank, or were dealt
                to another one.
            RuntimeError: the model is closed.
        """
        if self.closed:
            raise RuntimeError("this backend is closed: it has left its process groups; make another one")
        dealing = self.row_dealing
        if not isinstance(examples, DealtRows):
            require_same_batch(examples, with_token_ids=with_token_ids)
            whole = dealing.cut(examples, with_token_ids=with_token_ids)
            return examples, whole[dealing.rank], whole
        cut, own = on_every_rank(lambda: dealing.cut_of(examples))  # others would wait in the model's collectives
        require_same_deal(examples)
        return examples.examples, own, cut

    def inputs(
        self,
        rows: TokenBatch,
        asked: Shaped[Tensor, "b w"],
        *,
        offset: int = 1,
        words: Shaped[Tensor, "b w k"] | None = None,
    ) -> ModelInputs:
        """What the model reads of rows on the host, on the device; see `make_inputs` and `make_shared_inputs`."""
        lengths = rows.lengths if self.reads_whole_rows else lengths_read(rows.lengths, asked, offset=offset)
        if self.shares_prefixes:
            made = make_shared_inputs(rows.tokens, lengths, asked, offset=offset, words=words)
        else:
            made = make_inputs(
                rows.tokens,
                lengths,
                asked,
                layout=self.layout,
                offset=offset,
                shard=self.sequence_shard,
                multiple=self.length_multiple,
                words=words,
            )
        return made.to(self.config.device)

    @torch.inference_mode(mode=False)  # Megatron keeps buffers for the next pass, in which its tensors would be refused
    @torch.no_grad()
    def read_all(
        self,
        examples: TokenBatch | DealtRows[Any],
        reader: Reader,
        *,
        asked: Callable[[TokenBatch], Tensor] | None = None,
        offset: int = 1,
    ) -> dict[int, Tensor]:
        """What `reader` reads of every asked token, on every rank: by the number of its output, `[B, T, ...]`.

        Of dealt rows each rank is told its own alone, `[b, T, ...]`.

        asked: gives bool [B, T] of rows; None asks for the trainable tokens.
        """
        dealt = isinstance(examples, DealtRows)
        given, microbatches, _ = self.take(examples)
        wanted = (given.trainable if asked is None else asked(given)).cpu()
        rows = [microbatch.of(given, device="cpu") for microbatch in microbatches]
        inputs = [
            self.inputs(each, wanted[microbatch.rows, : microbatch.width], offset=offset)
            for microbatch, each in zip(microbatches, rows, strict=True)
        ]
        out: dict[int, Tensor] = {}

        def keep(number: int, outputs: Sequence[Tensor]) -> None:
            microbatch = microbatches[number]
            for index, each in enumerate(outputs):
                whole = out.setdefault(index, each.new_zeros(*given.tokens.shape, *each.shape[2:]))
                if microbatch.counted:
                    whole[microbatch.rows.to(whole.device), : microbatch.width] = each

        self._forward(inputs, reader, shapes=[(each.tokens.shape[0], each.tokens.shape[1]) for each in rows], keep=keep)
        out = self._on_every_stage(out)
        for whole in out.values():
            if self.row_group.size() > 1 and not dealt:
                dist.all_reduce(whole, group=self.row_group)
        return {number: whole.to(given.tokens.device) for number, whole in out.items()}

    @abstractmethod
    def _forward(
        self,
        inputs: Sequence[ModelInputs],
        reader: Reader,
        *,
        shapes: Sequence[tuple[int, int]],
        keep: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        """Run every microbatch forward; give `keep` its number and what `reader` reads of it, each `[b, w, ...]`."""

    def _on_every_stage(self, out: dict[int, Tensor]) -> dict[int, Tensor]:
        """What the last pipeline stage has read, on every stage."""
        return out

    @abstractmethod
    def close(self) -> None:
        """Leave the process groups; nothing can be computed after. Once is enough."""


class ReferenceModel:
    """Log-probabilities, and the most probable tokens, of the frozen model that a policy is compared with.

    It has parameters of its own, so that nothing which fails can leave its weights in the policy; or it is the policy
    with its adapters off, inside of `as_reference`.
    """

    def __init__(
        self,
        model: DistributedModel,
        head: Head,
        *,
        temperature: Callable[[], float],
        as_reference: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model = model
        self._head = head
        self._temperature = temperature
        self._as_reference = as_reference

    def row_dealing(self) -> RowDealing:
        """As the policy's."""
        return self._model.row_dealing

    def logp(self, examples: TokenBatch | DealtRows[Any]) -> Float[Tensor, "B T"]:
        """As the policy's `logp`, at the policy's temperature; float32."""
        with self._as_reference():
            return self._model.read_all(examples, read_logp(self._head, self._temperature()))[0]

    def topk_logits(self, examples: TokenBatch | DealtRows[Any], k: int) -> TopKLogp:
        """As the policy's `topk_logits`, at the policy's temperature: a policy's teacher may be what it was before."""
        with self._as_reference():
            read = self._model.read_all(examples, read_top_k(self._head, self._temperature(), k))
        return TopKLogp(logp=read[0], token_ids=read[1])


def media_tokens(model: nn.Module) -> dict[int, str]:
    """Ids, and names in the configuration, of the tokens that stand for images, video or sound; none of a text model.

    Read as text they would get the embeddings of tokens that the model was never trained on.
    """
    config: Any = model.config
    if not any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")):
        return {}
    found = {name: value for name, value in vars(config).items() if MEDIA_TOKEN.fullmatch(name)}
    return {value: name for name, value in found.items() if isinstance(value, int)}


def max_positions(model: nn.Module) -> int | None:
    """Tokens of the longest row that a table of learned positions (GPT-2, OPT) has room for; None without one.

    The table is a sibling of the embedding of tokens. Beyond its end a lookup fails, on a GPU by an assertion in a
    kernel, after which the process cannot use the device any more.
    """
    for name, table in decoder_of(model).named_children():
        if POSITION_TABLE.fullmatch(name) and isinstance(table, nn.Embedding):
            # OPT leaves the first rows out, RoBERTa those up to that of padding.
            left_out = int(getattr(table, "offset", 0)) if table.padding_idx is None else table.padding_idx + 1
            return table.num_embeddings - left_out
    return None


class Backend(ABC):
    """A policy that is trained: the half that DTensor and Megatron share.

    Args:
        config: of the backend.
        model: the Hugging Face model.
        filled: whether something puts weights into a model that is on the meta device.
    """

    _distributed: DistributedModel

    def __init__(self, config: BackendConfig, model: nn.Module, *, filled: bool) -> None:
        if not filled and any(parameter.is_meta for parameter in model.parameters()):
            raise ModelError(
                f"{type(model).__qualname__} is on the meta device, without weights: load it by from_pretrained, or "
                f"pass fill= to put weights into it"
            )
        self.config: BackendConfig = config
        self._skeleton = without_weights(model)
        self._optimizers: StageOptimizers | None = None
        self._last_write: CheckpointWrite | None = None
        self._temperature = 1.0
        self._offloader: Offloader | None = None
        self._frozen: dict[str, int] | None = None
        """Digests of the weights under adapters, which a checkpoint leaves out."""
        self._gradient: Literal["none", "zero", "some"] = "none"
        """What `forward_backward` has accumulated since the last step; "zero" of batches with nothing trainable."""
        self.version = 0
        """Optimizer steps that the weights have seen."""

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        config: Any,
        *,
        head: Literal["causal_lm", "sequence_classification"] = "causal_lm",
        weights: Literal["pretrained", "random"] = "pretrained",
        new_head: bool = False,
        seed: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a folder or hub id, each rank reading its own shards: no rank ever holds the whole model.

        Args:
            model_name: a folder with `config.json` and safetensors weights, or a hub id.
            config: of the backend.
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
        return cls._of_source(source, config, random=weights == "random", new_head=new_head, seed=seed)

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """This rank's part of the model."""

    # -- Reading ------------------------------------------------------------------------------------------------------

    def row_dealing(self) -> RowDealing:
        """Which rows of a batch are this rank's. Whoever sends batches deals them: `row_dealing().deal(examples)`."""
        return self._distributed.row_dealing

    def logp(self, examples: TokenBatch | DealtRows[Any]) -> Float[Tensor, "B T"]:
        """Log-probability of each trainable token given those before it; 0 elsewhere. All rows, on every rank."""
        return self._read(examples, read_logp(self._head, self._temperature))[0]

    def entropy(self, examples: TokenBatch | DealtRows[Any]) -> Float[Tensor, "B T"]:
        """Entropy in nats of the distribution that each trainable token was drawn from; 0 elsewhere."""
        return self._read(examples, read_entropy(self._head, self._temperature))[0]

    def topk_logits(self, examples: TokenBatch | DealtRows[Any], k: int) -> TopKLogp:
        """The top-k tokens in each trainable token's place: `.logp` and `.token_ids` of [B, T, k].

        Normalised over the whole vocabulary: `.logp` are logits less their log-sum-exp. 0 where nothing is trainable.

        Raises:
            ValueError: k is less than 1 or more than the vocabulary has.
        """
        if not 1 <= k <= self._distributed.vocabulary_size:
            raise ValueError(
                f"k={k} must be from 1 to the {self._distributed.vocabulary_size} tokens of the vocabulary"
            )
        read = self._read(examples, read_top_k(self._head, self._temperature, k))
        return TopKLogp(logp=read[0], token_ids=read[1])

    def value(self, examples: TokenBatch | DealtRows[Any]) -> Float[Tensor, "B T"]:
        """What a value head says of the state before each trainable token, in that token's place; 0 elsewhere."""
        return self._read(examples, self._value_reader())[0]

    def score(self, examples: TokenBatch | DealtRows[Any]) -> Float[Tensor, " B"]:
        """What a reward head says of each row, at its last token."""
        return self._read(examples, self._value_reader(), asked=last_tokens, offset=0)[0].sum(1)

    # -- Training -----------------------------------------------------------------------------------------------------

    def start_training(self, optimizer: OptimizerConfig, *, num_steps: int, temperature: float = 1.0) -> None:
        """Begin a stage with a fresh optimizer, a schedule of `num_steps` and no gradient; weights and version go on.

        Args:
            optimizer: its learning rate over the steps, and what happens to gradients.
            num_steps: of the stage.
            temperature: divides the logits before every log-probability: the engine's, or ratios are wrong.

        Raises:
            ValueError: an optimizer that this backend has no counterpart of.
        """
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be a finite number > 0: it divides the logits")
        self._require_on_device("start_training")
        self._optimizers = self._make_optimizers(optimizer, num_steps=num_steps)
        self._clear_gradient()
        self._temperature = temperature

    @property
    def learning_rate(self) -> float:
        """Of the next step.

        Raises:
            RuntimeError: `start_training` was not called.
        """
        return self._require_optimizers().learning_rate

    def forward_backward(
        self, examples: BatchT | DealtRows[BatchT], loss: LossFunction[BatchT], *, output: Output = "logp"
    ) -> Sums:
        """Accumulate the gradient of `loss` over all of `examples`; return its metric sums over all of them.

        Args:
            examples: the whole batch, the same on every rank; or what was dealt of it to this one.
            loss: of the output of some rows and those rows, to a scalar and named scalars that are added up.
            output: what `loss` is given: "logp" or "value" [b, w]; "logp_and_entropy" [b, w, 2], as the methods give
                them; "logp_of_token_ids" [b, w, k], of the tokens `examples.token_ids`; or "score" [b].

        Raises:
            BatchError: the examples cannot be cut into microbatches; no gradient has changed.
            RankError: another rank's loss raised. Whatever raises, on whichever rank, clears the gradient on all of
                them, also what earlier calls have left, so that a retry does not start from a part of it.
        """
        self._require_on_device("forward_backward", PASSES)
        if output in {"value", "score"}:
            reader = self._value_reader()
        else:
            reader = token_logp_reader(output, self._head, self._temperature)
        of_rows = output == "score"
        rows, own, cut = self._distributed.take(examples, with_token_ids=output == "logp_of_token_ids")
        with self._meter.forward_backward(examples, cut, asked=torch.ones_like(examples.lengths) if of_rows else None):
            try:
                num_rows = len(examples.lengths)
                sums = self._accumulate(rows, own, loss, reader=reader, output=output, num_rows=num_rows)
            except BaseException:
                self._clear_gradient()
                raise
        if of_rows or self._always_trains or bool(trainable_of(examples).any()):
            self._gradient = "some"
        elif self._gradient == "none":
            self._gradient = "zero"
        return sums

    def optim_step(self) -> float:
        """Clip, update, clear the gradient; return its norm before clipping.

        A step for which no token was trainable in any batch leaves weights, optimizer and version as they are, since
        weight decay and momentum would move weights that nothing was learned for; `metrics().skipped` says so.

        Raises:
            NonFiniteGradientError: the norm is not finite, and the optimizer was not told to skip such steps. No
                update was made.
            RuntimeError: `start_training` was not called, or there is no gradient.
        """
        self._require_on_device("optim_step")
        optimizers = self._require_optimizers()
        gradient, self._gradient = self._gradient, "none"
        if gradient == "none":
            raise RuntimeError("there is no gradient to step along; call forward_backward(examples, loss) first")
        with self._meter.optim_step() as outcome:
            if gradient == "zero":
                self._clear_gradient()
                optimizers.num_steps_skipped += 1
                step = GradientStep(norm=0.0, clipped=False, skipped=True)
            else:
                step = self._clip_and_step()
            outcome.grad_norm, outcome.skipped = step.norm, step.skipped
            outcome.router = self._router_metrics()
        if not step.skipped:
            self.version += 1
        return step.norm

    def metrics(self, *, memory: bool = True) -> StepMetrics | None:
        """Tokens, FLOPs, seconds, padding and balance of the last step; None before the first.

        Args:
            memory: add the account of memory as it is now, which looks at every parameter.
        """
        found = self._meter.metrics()
        if found is None or not memory:
            return found
        return replace(found, memory=memory_by_category(self.model, self._torch_optimizers()))

    def freeze_reference(self, *, without_adapters: bool = False, offload: bool = False) -> ReferenceModel:
        """The policy as it is now, frozen: `reference.logp(examples)`.

        Args:
            without_adapters: the model that low-rank adapters were put into, whenever it is asked for: the policy with
                its adapters off, without memory of its own. Otherwise a copy is made, laid out as the policy is.
            offload: keep the copy in host memory; it visits the device when it runs.

        Raises:
            ModelError: `without_adapters` of a policy that has none, or that trains other weights too.
        """
        self._require_on_device("freeze_reference", WEIGHTS)
        temperature = lambda: self._temperature  # noqa: E731 - of the stage
        if without_adapters:
            with self._adapters_off():  # refuses now, and not at the first question
                pass
            off = self._adapters_off
            return ReferenceModel(self._distributed, self._head, temperature=temperature, as_reference=off)
        copied, as_reference = self._frozen_copy(offload=offload)
        return ReferenceModel(copied, self._head, temperature=temperature, as_reference=as_reference)

    # -- Weights ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def shards(self) -> Sequence[Any]:
        """This rank's part of every weight under its Hugging Face name, adapters merged: what an engine is fed from.

        Nothing is gathered but the few rows of adapters. `.boxes` of each tells which slices of the unsharded tensor it
        is. Every rank must call it. The tensors are the same at every call, and hold the weights of the latest.
        """

    def skeleton_buffers(self) -> dict[str, Tensor]:
        """Buffers of the Hugging Face model that no file holds, such as rotary frequencies; the same on every rank."""
        held, device = self._skeleton.state_dict().keys(), self.config.device
        return {name: buffer.to(device) for name, buffer in self._skeleton.named_buffers() if name not in held}

    def offload(self, *, parts: Collection[Part] = PARTS, directory: str | Path | None = None) -> OffloadReport:
        """Give the device's memory of weights, gradients and optimizer state to others, such as a colocated engine.

        Args:
            parts: of "weights", "gradients" and "optimizer".
            directory: write them there; None copies them to host memory.

        Raises:
            ValueError: a part that is none.
            RuntimeError: another place than where some parts are already.
        """
        place = None if directory is None else Path(directory)
        if self._offloader is None or place != self._offloader.directory:
            self._require_on_device(f"offload(directory={place})")
            # Kept, and its memory used again, until another place is chosen.
            self._offloader = Offloader(self.model, directory=place)
        self._before_offload()
        report = self._offloader.offload(self._torch_optimizers(), parts=parts)
        if "weights" in parts:
            self._weights_moved(away=True)
        return report

    def onload(self, *, parts: Collection[Part] = PARTS) -> OffloadReport:
        """Bring back what `offload` moved, bit for bit.

        Raises:
            RuntimeError: nothing was offloaded, or the device's memory is taken by somebody else.
        """
        if self._offloader is None:
            raise RuntimeError("nothing was offloaded; onload() brings back what offload() has moved")
        report = self._offloader.onload(parts)
        if "weights" in parts:
            self._weights_moved(away=False)
        return report

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | Literal["auto"] | None = "auto", tokenizer: Any = None
    ) -> None:
        """Write a Hugging Face model folder, adapters merged, completely or not at all; every rank must call it.

        Arguments and errors are those of `rl_backends.export_pretrained`.
        """
        self._require_on_device("save_pretrained", WEIGHTS)
        self._export(folder, dtype=dtype, tokenizer=tokenizer)

    @abstractmethod
    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None:
        """Write the adapters in PEFT's format, whole or not at all; every rank must call it.

        Arguments and errors are those of `rl_backends.lora.files.save_adapter`.
        """

    def save_checkpoint(
        self, folder: str | Path, *, asynchronous: bool = False, extra: Mapping[str, Any] | None = None
    ) -> CheckpointWrite:
        """Write weights, optimizer, schedule and version into a new folder, from which any layout can go on.

        Arguments and errors are those of `rl_backends.save_checkpoint`; every rank must call it.
        """
        self._require_on_device("save_checkpoint")
        contents = self._contents()
        if self.config.lora_cfg is not None and self._frozen is None:  # once: these weights never change
            self._frozen = tensor_digests(contents.held(frozen=True), group=host_group())
        asked: dict[str, Any] = {"asynchronous": asynchronous, "extra": extra, "frozen": self._frozen}
        self._last_write = write_checkpoint(contents, folder, version=self.version, **asked)
        return self._last_write

    def load_checkpoint(self, folder: str | Path, *, optimizer: bool = True, verify: bool = True) -> CheckpointState:
        """Go on from a checkpoint, after `start_training` as before if it has an optimizer; every rank must call it.

        Arguments and errors are those of `rl_backends.load_checkpoint`; the gradient is cleared.
        """
        self._require_on_device("load_checkpoint")
        self._frozen = None
        state = read_checkpoint(self._contents(), folder, optimizer=optimizer, verify=verify)
        self._clear_gradient()
        self.version = state.version
        return state

    # -- Life ---------------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Which part of the model is where and why, in which dtypes, the adapters and the optimizer."""
        lines = self._explained()
        if self.config.lora_cfg is not None:
            lines.append(adapter_size(self._skeleton).explain())
        return "\n".join([*lines, *([] if self._optimizers is None else [self._optimizers.explain()])])

    def close(self) -> None:
        """Leave the process groups; nothing can be computed after, also by references. A second time does nothing.

        Raises:
            CheckpointError: an asynchronous save, awaited first, could not be written, and nobody was told by its
                `wait()`.
        """
        write, self._last_write = self._last_write, None
        try:
            if write is not None and write.unseen_error() is not None:
                write.wait()
        finally:
            release_staging_buffers()
            with closing(self._offloader) if self._offloader is not None else nullcontext():
                self._distributed.close()

    # -- What a subclass says -----------------------------------------------------------------------------------------

    @abstractmethod
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
        """Add the gradient of `loss` over this rank's `microbatches` of `examples`; return the sums of all ranks.

        num_rows: of the batch, over all ranks.

        Whatever it raises is raised on every rank; the caller clears the gradient.
        """

    @abstractmethod
    def _explained(self) -> list[str]:
        """What `explain` says of the model."""

    @classmethod
    @abstractmethod
    def _of_source(cls, source: ModelSource, config: Any, *, random: bool, new_head: bool, seed: int) -> Self:
        """Arguments are those of `from_pretrained`."""

    @abstractmethod
    def _adapters_off(self) -> AbstractContextManager[None]:
        """Inside, the model computes without its adapters; ModelError where it has none."""

    @abstractmethod
    def _frozen_copy(self, *, offload: bool) -> "tuple[DistributedModel, Callable[[], AbstractContextManager[Any]]]":
        """A copy of the model that nothing trains, and what to be in while it reads."""

    @abstractmethod
    def _make_optimizers(self, optimizer: OptimizerConfig, *, num_steps: int) -> StageOptimizers:
        """Fresh optimizers."""

    @abstractmethod
    def _clip_and_step(self) -> GradientStep:
        """Sum gradients over ranks where that is left to do, clip, update, clear; the same on every rank."""

    def _clear_gradient(self) -> None:
        """Forget every gradient, wherever a pass that failed half-way has left it. A subclass adds where that is."""
        self._gradient = "none"

    @abstractmethod
    def _export(self, folder: str | Path, **asked: Any) -> None:
        """Write the folder of `save_pretrained`."""

    @abstractmethod
    def _contents(self) -> CheckpointContents:
        """What a checkpoint is written from and read into."""

    @property
    def _always_trains(self) -> bool:
        """Whether every batch has a gradient, also one without a trainable token: that of a router's loss."""
        return False

    def _router_metrics(self) -> Mapping[str, float]:
        """How evenly experts were used since the last step; empty where nobody counts."""
        return {}

    def _value_reader(self) -> Reader:
        """Reads the number of a value or reward head; ModelError where the model has none."""
        return value_reader(self.model)

    def _before_offload(self) -> None:  # noqa: B027 - nothing, unless a subclass says otherwise
        """Let communication end that writes what is to be moved."""

    def _weights_moved(self, *, away: bool) -> None:  # noqa: B027
        """Give up, or make anew, what was derived from the weights."""

    # -- Helpers of this class and its subclasses ---------------------------------------------------------------------

    def _require_on_device(self, what: str, parts: Collection[Part] = PARTS) -> None:
        """RuntimeError where any of `parts`, which `what` needs, is offloaded."""
        if self._offloader is not None:
            self._offloader.require(what, parts)

    @cached_property
    def _meter(self) -> StepMeter:
        device, config, flops = torch.device(self.config.device), self.config, None
        with suppress(ModelError):  # of a model whose modules do not tell
            flops = ModelFlops.of(self._skeleton)
        return StepMeter(
            flops,
            device=device,
            num_ranks=dist.get_world_size(),
            layout=self._distributed.layout,
            token_multiple=self._distributed.token_multiple,
            peak_flops_per_s=config.peak_flops_per_s or peak_of_this_device(device, config.precision),
        )

    def _read(self, examples: TokenBatch | DealtRows[Any], reader: Reader, **where: Any) -> dict[int, Tensor]:
        self._require_on_device("reading", WEIGHTS)
        return self._distributed.read_all(examples, reader, **where)

    def _torch_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return () if self._optimizers is None else self._optimizers.each

    def _require_optimizers(self) -> StageOptimizers:
        if self._optimizers is None:
            raise RuntimeError("there is no optimizer yet; call start_training(optimizer, num_steps=...) first")
        return self._optimizers

    @cached_property
    def _head(self) -> Head:
        """How logits are read, and by which kernel; ModelError without a language-model head."""
        return Head.of(self._skeleton, getattr(self.config, "kernels", None))  # Megatron has no choice of kernels


def asked_of(rows: TokenBatch, output: Output) -> tuple[Tensor, int, Tensor | None]:
    """What `DistributedModel.inputs` is asked for to give `output`: places, offset, and tokens asked about."""
    asked = last_tokens(rows) if output == "score" else rows.trainable
    return asked, 0 if output == "score" else 1, token_ids_of(rows) if output == "logp_of_token_ids" else None
