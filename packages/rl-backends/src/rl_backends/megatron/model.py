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
from torch import Tensor, nn

from rl_backends.backend import DistributedModel, media_tokens
from rl_backends.batching.microbatches import ModelInputs, SequenceShard
from rl_backends.loading.shards_by_name import first_names
from rl_backends.megatron.architecture import read_architecture
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.freezing import freeze
from rl_backends.megatron.gpt_model import build_gpt_model
from rl_backends.megatron.groups import ParallelGroups
from rl_backends.megatron.mapping import HeldTensor, held_tensors
from rl_backends.megatron.passes import OutputHead, read_hidden, run_passes, told_by_last_stage
from rl_backends.rank_agreement import on_every_rank, raise_together
from rl_backends.readers import Reader

__all__ = ["Fill", "MegatronModel"]

Fill = Callable[["MegatronModel"], object]
"""Puts weights into a model's parameters, which are 0 until then; raises on every rank if it fails on one."""


class MegatronModel(DistributedModel):
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
        self.config: MegatronConfig = config
        self.architecture = read_architecture(skeleton.config)
        self.vocabulary_size, self.max_positions = self.architecture.vocab_size, None
        self.media_tokens = media_tokens(skeleton)
        self._joined = groups is None
        self.groups = ParallelGroups.join(config) if groups is None else groups
        try:
            self._build(skeleton, fill, trainable=trainable)
        except BaseException:
            self.close()
            raise

    def _build(self, skeleton: nn.Module, fill: Fill, *, trainable: bool) -> None:
        config, context = self.config, self.groups.cp
        self.sequence_shard = None if context.size() == 1 else SequenceShard(context.rank(), context.size())
        self.length_multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        chunks = 2 * context.size() if context.size() > 1 else 1
        # Sequence parallelism rounds what is read of a whole pack, and every padded row.
        rounded = lcm(chunks, context.size() * self.length_multiple)
        self.token_multiple = chunks if config.sequence_packing else rounded
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
    def row_group(self) -> dist.ProcessGroup:
        """The ranks among which the rows of a batch are shared out."""
        return self.groups.rows

    @property
    def closed(self) -> bool:
        """Whether it has left Megatron's process groups."""
        return self.groups.left

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

    def _forward(
        self,
        inputs: Sequence[ModelInputs],
        reader: Reader,
        *,
        shapes: Sequence[tuple[int, int]],
        keep: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        failure: Exception | None = None

        def finish(number: int, hidden: Tensor) -> Tensor:
            nonlocal failure
            try:
                keep(number, self.read(hidden, inputs[number], reader, shape=shapes[number]))
            except Exception as error:  # noqa: BLE001 - the other stages are waiting; raised below, on every rank
                failure = error
            return hidden.sum() * 0.0

        run_passes(self.gpt, inputs, finish, forward_only=True)
        raise_together(failure)

    def _on_every_stage(self, out: dict[int, Tensor]) -> dict[int, Tensor]:
        values = [out[number] for number in sorted(out)] if self.groups.last_stage else None
        return dict(enumerate(told_by_last_stage(values, self.groups, device=self.config.device)))

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
