"""Weights into a Megatron model, from a Hugging Face model in memory, its files or another; proved there; and out.

Each function is a `Fill` once it is told what it reads from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.checkpoints.shards import num_ranks, this_rank
from rl_backends.errors import ModelError, some
from rl_backends.examples import TokenRows
from rl_backends.loading.skeleton import initial_value
from rl_backends.loading.source import ModelSource
from rl_backends.loading.weights import first_names, write_whole
from rl_backends.lora.layers import base_name
from rl_backends.megatron.lora import is_adapter
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.model import MegatronModel
from rl_backends.rank_agreement import gather_text, largest_on_any_rank, on_every_rank
from rl_backends.readers import Head, read_logp, value_reader
from rl_parallel_plans import Box


def from_hugging_face(source: nn.Module, model: MegatronModel) -> None:
    """This rank's parts of the weights of a model in memory."""
    names, tensors = first_names(source), source.state_dict()
    whole = {names[name]: tensor for name, tensor in tensors.items() if names[name] == name}
    for held in model.held:
        write_whole(whole[held.name], [held])


def from_files(
    source: ModelSource, skeleton: nn.Module, model: MegatronModel, *, new_head: bool = False, seed: int = 0
) -> None:
    """This rank's parts, read from the safetensors files of `source` one by one; `skeleton` is its.

    With `new_head` the head is drawn from `seed` where the files have none, as for a reward model from a language
    model; adapters always are.
    """
    source.load_shards(_by_name(model), skeleton, new_head=new_head, seed=seed)
    if model.adapters is not None:
        model.adapters.initialise(seed=seed)


def at_random(skeleton: nn.Module, model: MegatronModel, *, seed: int) -> None:
    """This rank's parts of the weights that transformers would begin with; the same weights in every layout."""
    for name, held in _by_name(model).items():
        write_whole(initial_value(skeleton, name, seed=seed), held)
    if model.adapters is not None:
        model.adapters.initialise(seed=seed)


@torch.no_grad()
def from_megatron(policy: MegatronModel, model: MegatronModel) -> None:
    """A copy of the weights of a model that is laid out alike."""
    for mine, theirs in zip(model.gpt.parameters(), policy.gpt.parameters(), strict=True):
        mine.copy_(theirs)


def _by_name(model: MegatronModel) -> dict[str, list[HeldTensor]]:
    """By the names of the model without adapters, which are left out."""
    shards: dict[str, list[HeldTensor]] = {}
    for held in model.held:
        if not is_adapter(held.name):
            shards.setdefault(base_name(held.name), []).append(held)
    return shards


# ---- Out of a Megatron model: the tensors of the Hugging Face model, unsharded, on every rank, bit for bit.


class Gatherer:
    """Gathers one tensor after the other, in the order of `shapes`; every rank must take part, also in making it.

    Each box comes from the lowest rank that holds it, and every other rank has zeros there. What is summed over the
    ranks are bytes, so that nothing is rounded and -0.0 stays what it is. All tensors have one dtype.
    """

    def __init__(self, held: Sequence[HeldTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._dtype, self._device = held[0].parameter.dtype, held[0].parameter.device
        own = [(each, box) for each in held if not each.duplicate for box in each.parts]
        told = gather_text(json.dumps([[each.name, box.offsets, torch.Size(box.sizes).numel()] for each, box in own]))
        giver: dict[tuple[str, tuple[int, ...]], int] = {}  # of each box
        gathered = dict.fromkeys(self._shapes, 0)  # elements
        for rank, text in enumerate(told):
            for name, offsets, size in json.loads(text):
                if giver.setdefault((name, tuple(offsets)), rank) == rank:
                    gathered[name] = gathered.get(name, 0) + size
        if wrong := [name for name, size in gathered.items() if size != torch.Size(shapes.get(name, (-1,))).numel()]:
            raise ModelError(
                f"the ranks together do not hold the whole of {some(wrong)}: Megatron has no place for it, or it is of "
                f"another model"
            )
        self._given: dict[str, list[tuple[HeldTensor, Box]]] = {}
        for each, box in own:
            if giver[each.name, box.offsets] == this_rank():
                self._given.setdefault(each.name, []).append((each, box))

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor by name, whole, where the parameters lie.

        A rank that stops early still takes part in the rest, when the iterator is closed: none waits for it.

        Raises:
            BaseException: this rank's own: no memory for a tensor.
            RankError: on the ranks that did not fail.
        """
        rounds = self._rounds()
        try:
            for each in rounds:  # not `yield from`, which would close it
                yield each
                del each  # before the next tensor is made
        finally:
            for _ in rounds:
                pass

    def _rounds(self) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self._shapes.items():

            def own_part(name: str = name, shape: tuple[int, ...] = shape) -> Tensor:
                whole = torch.zeros(shape, dtype=self._dtype, device=self._device)
                for each, box in self._given.get(name, ()):
                    box.of_whole(whole).copy_(box.of_local(each.local))
                return whole

            tensor = on_every_rank(own_part)
            if num_ranks() > 1:
                dist.all_reduce(tensor.view(-1).view(torch.uint8))
            yield name, tensor
            del tensor


# ---- Proof that Megatron computes what the Hugging Face model computes, not only that it holds the same weights.
#
# A class of somebody's own, a hook or a changed buffer may make a model compute what its configuration does not tell.

NUM_TOKENS = 48
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats. Rounding is far below; something that was missed is far above, unless all logits are near 0."""


def require_own_code(model: nn.Module) -> None:
    """The model's class is one of transformers."""
    if not type(model).__module__.startswith("transformers."):
        raise ModelError(
            f"{type(model).__module__}.{type(model).__qualname__} is no class of transformers, and Megatron would "
            f"compute what transformers' own does: train it with policy.dtensor_cfg.enabled=true, which runs its code"
        )


def prove(model: MegatronModel, *, source: Any) -> None:
    """Compare log-probabilities of a row, or what a value head says of its tokens, with those of the model in memory.

    Every rank must call it.
    """
    bound = model.config.micro_batch_tokens or NUM_TOKENS  # of a row that fits into a microbatch
    length = min(NUM_TOKENS, model.architecture.max_positions, max(2, bound - bound % model.token_multiple))
    tokens = (torch.arange(length) * 7 + 3) % model.architecture.vocab_size
    rows = TokenRows(tokens=tokens[None], lengths=torch.tensor([length]), trainable=torch.arange(length)[None] > 0)
    scores = model.architecture.num_labels > 0
    reader = value_reader(source) if scores else read_logp(Head.of(source), temperature=1.0)
    ours = model.read_all(rows, reader)[0][0, 1:]
    apart = largest_on_any_rank((ours - _plain(source, tokens, scores=scores)).abs().max().to(model.config.device))
    dtypes = {parameter.dtype for parameter in (*source.parameters(), *model.gpt.parameters())}
    if not apart <= max(TOLERANCE.get(dtype, 0.25) for dtype in dtypes):
        what = "values" if scores else "log-probabilities"
        raise ModelError(
            f"{type(source).__qualname__} gives {what} that differ by {apart:.3g} from those of the same weights on "
            f"Megatron: hooks, buffers or attributes of this model were changed; train it with "
            f"policy.dtensor_cfg.enabled=true, which runs its code"
        )


@torch.no_grad()
def _plain(source: Any, tokens: Tensor, *, scores: bool) -> Tensor:
    """Log-probabilities of all tokens but the first, or what the head says of the state before each, [n - 1]."""
    device, training = next(source.parameters()).device, source.training
    row = tokens[None].to(device)
    source.eval()
    try:
        if scores:
            hidden = source.base_model(input_ids=row, use_cache=False).last_hidden_state
            values: Tensor = source.score(hidden)[0, :-1, 0].float().cpu()
            return values
        logits = source(input_ids=row).logits[0, :-1].float().cpu()
    finally:
        source.train(training)
    logp: Tensor = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logp
