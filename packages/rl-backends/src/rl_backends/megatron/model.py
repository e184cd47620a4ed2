"""A Hugging Face model as Megatron lays it over ranks, and how rows of a batch go through it.

    sizes of the config -> groups -> GPT model of this stage -> weights -> gradient buffers -> read_all(rows)

Axes: B rows of the batch, b of a microbatch, w tokens of its longest row, T of the batch's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.backend import DistributedModel, media_tokens
from rl_backends.batching.microbatches import ModelInputs, SequenceShard
from rl_backends.errors import ModelError
from rl_backends.loading.weights import first_names
from rl_backends.megatron.architecture import read_architecture
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.gpt_model import build_gpt_model
from rl_backends.megatron.groups import ParallelGroups
from rl_backends.megatron.lora import Adapters, add_adapters, bare_shapes
from rl_backends.megatron.mapping import HeldTensor, held_tensors
from rl_backends.megatron.passes import OutputHead, in_rows, run_passes
from rl_backends.rank_agreement import on_every_rank, raise_together, told_by_last_rank
from rl_backends.readers import Reader, has_language_model_head

Fill = Callable[["MegatronModel"], object]
"""Puts weights into a model's parameters, which are 0 until then; if it fails on one rank, all raise."""


class MegatronModel(DistributedModel):
    """The model of this rank's stage, each rank being handed whole batches and reading its own rows.

    skeleton: the Hugging Face model, with adapters if `config` asks for them, whose configuration, names and shapes
        count; its weights are not looked at.
    trainable: with buffers for gradients of what the skeleton does not freeze; False for a reference.
    groups: of a model that is laid out alike and will be there as long as this one; None joins them.
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
        self.architecture = read_architecture(skeleton.config, scores=not has_language_model_head(skeleton))
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
        virtual = config.virtual_pipeline_model_parallel_size
        if virtual is not None:
            self.fewest_microbatches = config.pipeline_model_parallel_size
        names = first_names(skeleton)
        self.shapes = {name: tuple(t.shape) for name, t in skeleton.state_dict().items() if names[name] == name}
        bare = bare_shapes(self.shapes)
        with cpu_compat():
            self.chunks: list[Any] = [
                build_gpt_model(self.architecture, self.config, groups=self.groups, chunk=chunk)
                for chunk in ([None] if virtual is None else range(virtual))
            ]
        self.gpt: nn.Module = self.chunks[0] if virtual is None else nn.ModuleList(self.chunks)
        _leave_out_padding(self.chunks[0], skeleton)
        self.held: list[HeldTensor] = held_tensors(self.chunks, self.architecture, bare, groups=self.groups)
        self.adapters: Adapters | None = None
        if config.lora_cfg is not None:
            tensor_ranks = config.tensor_model_parallel_size
            self.adapters, self.held = add_adapters(self.gpt, self.held, skeleton, tensor_ranks=tensor_ranks)
        on_every_rank(lambda: fill(self))
        on_every_rank(partial(freeze, self.chunks, self.held, skeleton if trainable else None, config=self.config))
        self.ddp: list[Any] = _with_gradients(self.chunks, self.config) if trainable else []
        self._head = OutputHead(self.chunks[-1], self.groups, vocabulary_size=self.architecture.vocab_size)

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
        if self.ddp and self.config.overlap_param_gather:
            # The reader takes the head's weight past the forward of its module, whose hook would wait for it.
            last = self.chunks[-1]
            weight = last.score.weight if self.architecture.num_labels else last.head_weight
            if weight in self.ddp[-1].param_to_bucket_group:
                self.ddp[-1].param_to_bucket_group[weight].finish_param_sync(skip_next_bucket_dispatch=True)
        if self.config.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # The reader gives every rank the whole gradient, of which each keeps its own tokens'.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        num_tokens, num_rows = hidden.shape[:2]
        places = inputs.at % num_tokens * num_rows + inputs.at // num_tokens  # Megatron's have tokens first
        read = reader(self._head, hidden.flatten(0, 1).index_select(0, places), inputs)
        several = (read,) if isinstance(read, Tensor) else tuple(read)
        return tuple(in_rows(each, inputs, shape, context=self.groups.cp) for each in several)

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

        run_passes(self.chunks, inputs, finish, forward_only=True)
        raise_together(failure)

    def _on_every_stage(self, out: dict[int, Tensor]) -> dict[int, Tensor]:
        values = [out[number] for number in sorted(out)] if self.groups.last_stage else []
        return dict(enumerate(told_by_last_rank(values, self.groups.pp, device=self.config.device)))

    def finish_param_gather(self) -> None:
        """Wait for, or make, what overlaps with the next forward: weights of other ranks' shares are stale before.

        Every rank must call it. Without `overlap_param_gather` it does nothing.
        """
        if not self.config.overlap_param_gather:
            return
        with cpu_compat():
            for group in bucket_groups(self.ddp):
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)

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


def _with_gradients(chunks: Sequence[Any], config: MegatronConfig) -> list[Any]:
    """Each in Megatron's DDP, which adds gradients up in float32, and sums them over ranks when asked to."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    class GradientsInPlace(DistributedDataParallel):  # type: ignore[misc]
        """Has no hooks that add gradients to the buffer: autograd does, in `accumulate`."""

        def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
            del param
            return lambda *_: None

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        grad_reduce_in_fp32=True,
    )
    kind = GradientsInPlace if adds_in_place(config) else DistributedDataParallel
    with cpu_compat():
        wrapped = [kind(chunk.config, options, chunk) for chunk in chunks]
        for each in wrapped:
            each.zero_grad_buffer()
    if config.overlap_grad_reduce:  # the schedules reduce with the last microbatch alone
        no_sync = [each.no_sync for each in wrapped]
        for chunk in chunks:
            chunk.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def adds_in_place(config: MegatronConfig) -> bool:
    """Whether autograd can add gradients to Megatron's buffer: they have its dtype, and nobody waits for a hook."""
    apart = config.overlap_grad_reduce or config.gradient_accumulation_fusion
    return config.precision == "float32" and not apart


def bucket_groups(ddp: Sequence[Any]) -> list[Any]:
    """What Megatron sends of gradients and parameters at a time, of all chunks of a stage."""
    return [group for each in ddp for group in (*each.bucket_groups, *each.expert_parallel_bucket_groups)]


ROUTER = "mlp.router.weight"


def freeze(
    chunks: Sequence[Any], held: Sequence[HeldTensor], skeleton: nn.Module | None, *, config: MegatronConfig
) -> None:
    """Make parameters require a gradient as those of `skeleton` do; none of them where it is None.

    Routers do not where the configuration freezes them.
    """
    if skeleton is None:
        for chunk in chunks:
            chunk.requires_grad_(requires_grad=False)
        return
    first = first_names(skeleton)
    trains = {first[name]: each.requires_grad for name, each in skeleton.named_parameters(remove_duplicate=False)}
    parts: dict[str, list[HeldTensor]] = {}
    for each in held:
        parts.setdefault(each.megatron_name, []).append(each)
    for megatron_name, several in parts.items():
        flags = {trains[each.name] for each in several}
        if len(flags) > 1:
            frozen = ", ".join(each.name for each in several if not trains[each.name])
            raise ModelError(
                f"{frozen} is frozen, and Megatron holds it in {megatron_name} together with what is not: freeze all "
                f"of {', '.join(each.name for each in several)}, or none"
            )
        is_router = config.freeze_moe_router and megatron_name.endswith(ROUTER)
        several[0].parameter.requires_grad = flags.pop() and not is_router
    recomputed, first_chunk = config.recompute_granularity == "full", chunks[0]
    if recomputed and first_chunk.pre_process and not first_chunk.embedding.word_embeddings.weight.requires_grad:
        # A layer is computed again only where its input requires a gradient, which that of a frozen embedding does not.
        first_chunk.embedding.register_forward_hook(
            lambda _module, _arguments, embedded: embedded.requires_grad_() if torch.is_grad_enabled() else embedded
        )


def require_trainable(gpt: nn.Module) -> None:
    """Something on this pipeline stage trains."""
    if not any(parameter.requires_grad for parameter in gpt.parameters()):
        raise ModelError(
            "no parameter of this pipeline stage requires a gradient, so there is nothing to optimize, and nothing "
            "to send back to the stage before it: unfreeze some, or choose other stages"
        )
