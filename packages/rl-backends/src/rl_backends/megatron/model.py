"""A Hugging Face model as Megatron lays it over ranks, and how rows of a batch go through it.

Knows groups, microbatches and readers; no loss, no optimizer, no files.

    sizes of the config -> groups -> GPT model of this stage -> weights -> gradient buffers -> read_all(rows)

Axes: B rows of the batch, b of a microbatch, w tokens of its longest row, T of the batch's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from rl_backends.batching.microbatches import (
    Microbatch,
    MicrobatchLimits,
    ModelInputs,
    SequenceShard,
    cut_all,
    make_inputs,
)
from rl_backends.batching.words import require_token_ids
from rl_backends.examples import TokenBatch
from rl_backends.loading.weights import first_names
from rl_backends.megatron.architecture import read_architecture
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.freezing import freeze
from rl_backends.megatron.gpt_model import build_gpt_model
from rl_backends.megatron.groups import ParallelGroups
from rl_backends.megatron.mapping import HeldTensor, held_tensors
from rl_backends.megatron.passes import OutputHead, read_hidden, run_passes, told_by_last_stage
from rl_backends.rank_agreement import on_every_rank, raise_together, require_same_batch
from rl_backends.readers import Reader

__all__ = ["Fill", "MegatronModel"]

Fill = Callable[["MegatronModel"], object]
"""Puts weights into a model's parameters, which are 0 until then; raises on every rank if it fails on one."""


class MegatronModel:
    """The model of this rank's stage, each rank being handed whole batches and reading its own rows.

    Args:
        skeleton: the Hugging Face model, whose configuration, names and shapes count; its weights are not looked at.
        config: sizes, device, precision, microbatches.
        fill: puts the weights in.
        trainable: with buffers for gradients of what the skeleton does not freeze; False for a reference.
        groups: of a model that is laid out alike and will be there as long as this one; None joins them.

    Raises:
        ModelError: an architecture that is not mapped, or sizes that do not divide it.
        MissingDependencyError: megatron-core is absent, or another release.
        ValueError: no GPU where one was asked for, or ranks that the sizes do not divide.
    """

    def __init__(
        self,
        skeleton: Any,
        config: MegatronConfig,
        *,
        fill: Fill,
        trainable: bool = True,
        groups: ParallelGroups | None = None,
    ) -> None:
        self.config = config
        self.architecture = read_architecture(skeleton.config)
        self._joined = groups is None
        self.groups = ParallelGroups.join(config) if groups is None else groups
        try:
            self._build(skeleton, fill, trainable=trainable)
        except BaseException:
            self.close()
            raise

    def _build(self, skeleton: nn.Module, fill: Fill, *, trainable: bool) -> None:
        names = first_names(skeleton)
        self.shapes = {name: tuple(t.shape) for name, t in skeleton.state_dict().items() if names[name] == name}
        with cpu_compat():
            self.gpt: Any = build_gpt_model(self.architecture, self.config, groups=self.groups)
        _leave_out_padding(self.gpt, skeleton)
        self.held: list[HeldTensor] = held_tensors(self.gpt, self.architecture, self.shapes, groups=self.groups)
        fill(self)
        on_every_rank(partial(freeze, self.gpt, self.held, skeleton if trainable else None, config=self.config))
        self.ddp: Any = _with_gradients(self.gpt, self.config) if trainable else None
        self._head = OutputHead(self.gpt, self.groups, vocabulary_size=self.architecture.vocab_size)

    @property
    def rank_of_rows(self) -> int:
        """This rank's place in what `cut` returns."""
        return self.groups.rows.rank()

    @property
    def token_multiple(self) -> int:
        """What the length of rows is rounded up to; sequence parallelism rounds what is read of a whole pack."""
        context = self.config.context_parallel_size
        chunks = 2 * context if context > 1 else 1
        return chunks if self.config.sequence_packing else lcm(chunks, context * self._multiple)

    @property
    def _multiple(self) -> int:
        return self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    def cut(self, examples: TokenBatch, *, with_token_ids: bool = False) -> list[list[Microbatch]]:
        """The microbatches of every rank that has rows of its own, in the order of `rank_of_rows`.

        with_token_ids: `examples.token_ids` will be asked about.

        Raises:
            BatchError: on every rank; the examples cannot be cut or read, or are not the same on every rank.
        """
        if self.groups.left:
            raise RuntimeError("this backend is closed: its process groups are gone; make another one")
        require_same_batch(examples, with_token_ids=with_token_ids)
        if with_token_ids:
            require_token_ids(examples, vocabulary_size=self.architecture.vocab_size)
        limits = MicrobatchLimits(
            rows=self.config.micro_batch_size,
            tokens=self.config.micro_batch_tokens,
            layout="packed" if self.config.sequence_packing else "padded",
        )
        return cut_all(
            examples,
            limits=limits,
            num_ranks=self.groups.rows.size(),
            token_multiple=self.token_multiple,
            vocabulary_size=self.architecture.vocab_size,
        )

    def inputs(
        self, rows: TokenBatch, asked: Shaped[Tensor, "b w"], *, words: Shaped[Tensor, "b w k"] | None = None
    ) -> ModelInputs:
        """What the model reads of rows on the host, on the device."""
        context = self.groups.cp
        made = make_inputs(
            rows.tokens,
            rows.lengths,
            asked,
            layout="packed" if self.config.sequence_packing else "padded",
            shard=None if context.size() == 1 else SequenceShard(context.rank(), context.size()),
            multiple=self._multiple,
            words=words,
        )
        return made.to(self.config.device)

    def read(
        self, hidden: Tensor, inputs: ModelInputs, reader: Reader, *, shape: tuple[int, int]
    ) -> tuple[Tensor, ...]:
        """On the last stage, what the reader reads, each in its place of `[b, w, ...]`, 0 elsewhere; differentiable."""
        return read_hidden(
            hidden,
            inputs,
            reader,
            head=self._head,
            groups=self.groups,
            sequence_parallel=self.config.sequence_parallel,
            shape=shape,
        )

    @torch.inference_mode(mode=False)  # Megatron keeps buffers for the next pass, in which its tensors would be refused
    @torch.no_grad()
    def read_all(self, examples: TokenBatch, reader: Reader) -> dict[int, Tensor]:
        """What `reader` reads of every trainable token, on every rank: by the number of its output, `[B, T, ...]`."""
        microbatches = self.cut(examples)[self.rank_of_rows]
        rows = [microbatch.of(examples, device="cpu") for microbatch in microbatches]
        inputs = [self.inputs(each, each.trainable) for each in rows]
        out: dict[int, Tensor] = {}
        failure: Exception | None = None

        def keep(number: int, hidden: Tensor) -> Tensor:
            nonlocal failure
            try:
                shape = (rows[number].tokens.shape[0], rows[number].tokens.shape[1])
                for output, each in enumerate(self.read(hidden, inputs[number], reader, shape=shape)):
                    whole = out.setdefault(output, each.new_zeros(*examples.tokens.shape, *each.shape[2:]))
                    if microbatches[number].counted:
                        whole[microbatches[number].rows.to(whole.device), : microbatches[number].width] = each
            except Exception as error:  # noqa: BLE001 - the other stages are waiting; raised below, on every rank
                failure = error
            return hidden.sum() * 0.0

        run_passes(self.gpt, inputs, keep, forward_only=True)
        raise_together(failure)
        return self._on_every_rank(out, device=examples.tokens.device)

    def _on_every_rank(self, out: dict[int, Tensor], *, device: torch.device) -> dict[int, Tensor]:
        last = self.groups.last_stage
        told = told_by_last_stage(_values(out) if last else None, self.groups, device=self.config.device)
        for whole in told:
            if self.groups.rows.size() > 1:
                dist.all_reduce(whole, group=self.groups.rows)
        return {number: whole.to(device) for number, whole in enumerate(told)}

    @contextmanager
    def visiting_the_device(self) -> Iterator[None]:
        """The weights are on the device inside, and in host memory after."""
        self.gpt.to(self.config.device)
        try:
            yield
        finally:
            self.gpt.to("cpu")

    def close(self, *, collect: bool = True) -> None:
        """Leave Megatron's process groups, if this model joined them; nothing can be computed after."""
        if self._joined:
            self._joined = False
            self.groups.leave(collect=collect)


def _leave_out_padding(gpt: Any, skeleton: Any) -> None:
    """As torch's embedding does in the Hugging Face model: looking up the padding token gives its row no gradient."""
    padding = skeleton.get_input_embeddings().padding_idx
    if padding is None or not gpt.pre_process:
        return

    def detach_padding(module: Any, arguments: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        tokens = arguments[0]
        if module.reduce_scatter_embeddings:  # [s / tp, b, H], of this rank's share of the tokens
            tokens = tokens.t().contiguous().chunk(module.tp_group.size())[module.tp_group.rank()]
        return torch.where((tokens == padding)[..., None], embedded.detach(), embedded)

    gpt.embedding.word_embeddings.register_forward_hook(detach_padding)


def _values(out: dict[int, Tensor]) -> Sequence[Tensor]:
    return [out[number] for number in sorted(out)]


def _with_gradients(gpt: Any, config: MegatronConfig) -> Any:
    """Megatron's DDP, which adds gradients up in float32 and sums them over ranks when asked to, never by itself."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        grad_reduce_in_fp32=True,
    )
    with cpu_compat():
        wrapped = DistributedDataParallel(gpt.config, options, gpt)
        wrapped.zero_grad_buffer()
    return wrapped
