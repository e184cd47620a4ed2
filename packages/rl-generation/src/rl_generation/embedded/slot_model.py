"""The model as the embedded engine runs it: a key/value cache of static slots, and attention over them.

`SlotModel` runs forwards, of whole prompts (prefill) or of one token a row (decode). `SlotCache` is a transformers
`Cache`, as far as decoder-only models use one: rows being decoded lie in slots 0 to N - 1, so that a layer attends to a
view and copies nothing; what a slot holds beyond its row's length is left over from other rows and never visible.
transformers looks up both the attention and the mask of a model by the name in its config. Under the name registered
here, a model builds its own masks (causal, sliding windows, chunks) from the positions of each row, and attends to keys
without repeating them for the query heads that share them.

That this is right for a model is shown before anything is generated (`why_not_continuous`). Two prompts of different
length are run and continued, over the slot cache and without one, and the logits must agree; every layer must also
attend through transformers' attention interface, once a forward, and store into the cache.

Axes: N rows, P distinct prompts, S queries a row, C cache columns, H query heads, K key heads, D and E head dimensions,
V vocabulary.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from rl_generation.embedded.recorded_forward import RecordedDecoding
from rl_generation.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "rl_generation_slots"

FORWARD_NEEDS = ("input_ids", "position_ids", "use_cache")
RECURRENT = {"conv", "linear_attention", "mamba", "recurrent"}
PROMPT_LENGTHS = (5, 2)
# Of the largest logit; rounding in each dtype is ten times less, another mask or scale is far more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.1
# Arguments of other attention functions that change the result, and that this one does not know.
UNKNOWN = ("s_aux", "sinks", "position_bias", "head_mask", "attention_bias")


@dataclass(slots=True, kw_only=True)
class AttentionStep:
    """One forward: of whole prompts, or of one token of each of the first N slots."""

    positions: Int[Tensor, "positions S"]
    """Of the queries; one row stands for all of them where they are alike."""

    columns: int
    """C: columns of the cache that are looked at; all `positions` are below."""

    dtype: torch.dtype
    """Of the additive masks."""

    softcap: bool
    """Whether to cap scores where the model asks for it; some of transformers' own attention functions do not."""

    prefill: tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]] | None = None
    """Of whole prompts: slots, and of each the prompt of which it keeps a copy."""

    mask_left_out: bool = False
    """Whether the model was told to do without a mask, since it would be the triangle that kernels know."""

    calls: int = 0
    """Layers that have attended so far."""

    places: dict[int, Tensor] = field(default_factory=dict)
    """Where the new token of each head lies among all tokens of a layer, by the number of heads."""


class SlotCache:
    """Keys and values of all layers, `slots` × `columns` tokens of each; storage appears with the first forward."""

    step: AttentionStep
    """The forward that runs, or the last one."""

    def __init__(self) -> None:
        self.slots = self.columns = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._token_bytes: dict[int, int] = {}

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers; 0 before the first forward."""
        return sum(self._token_bytes.values())

    @property
    def layer_indices(self) -> set[int]:
        """Layers that have stored something."""
        return set(self._layers)

    @property
    def storage(self) -> list[Tensor]:
        """Keys and values of one layer after the other, each [slots, K, columns, D]."""
        return [kept for layer in self._layers.values() for kept in layer]

    def resize(self, *, slots: int, columns: int) -> None:
        """Change the storage, layer by layer; what fits stays."""
        self.slots, self.columns = slots, columns
        for index, layer in self._layers.items():
            self._layers[index] = (self._resized(layer[0]), self._resized(layer[1]))

    def clear(self) -> None:
        """Give the storage back."""
        self._layers.clear()
        self.slots = self.columns = 0

    def move(self, *, to: Int[Tensor, " rows"], source: Int[Tensor, " rows"], columns: int) -> None:
        """Copy the first `columns` of slots `source` to slots `to`, all at once."""
        for layer in self._layers.values():
            for kept in layer:
                kept[to, :, :columns] = kept[source, :, :columns]

    # -- what models call

    def update(
        self,
        key: Float[Tensor, "rows K S D"],
        value: Float[Tensor, "rows K S E"],
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return those to attend to."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._allocate(key), self._allocate(value))
            self._token_bytes[layer_idx] = key[0, :, 0].nbytes + value[0, :, 0].nbytes
        keys, values = self._layers[layer_idx]
        step = self.step
        if step.prefill is not None:
            slots, prompts = step.prefill
            keys[slots, :, : key.shape[2]] = key[prompts]
            values[slots, :, : key.shape[2]] = value[prompts]
            return key, value
        num_rows, num_heads = key.shape[:2]
        place = step.places.get(num_heads)
        if place is None:  # layers with as many heads share it
            firsts = torch.arange(0, num_rows * num_heads * self.columns, self.columns, device=key.device)
            place = step.places[num_heads] = firsts + step.positions.expand(-1, num_heads).reshape(-1)
        keys.view(-1, key.shape[3]).index_copy_(0, place, key.reshape(-1, key.shape[3]))
        values.view(-1, value.shape[3]).index_copy_(0, place, value.reshape(-1, value.shape[3]))
        return keys[:num_rows, :, : step.columns], values[:num_rows, :, : step.columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this forward's; 0 for a prefill."""
        return 0 if self.step.prefill is not None else self.step.columns - 1

    # The same, by its newer name.
    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: object, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that a mask covers, and the first of them."""
        return self.step.columns, 0

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros: a NaN in what nobody has written yet would pass through the mask.
        return like.new_zeros(self.slots, like.shape[1], self.columns, like.shape[3])

    def _resized(self, kept: Tensor) -> Tensor:
        larger = self._allocate(kept)
        slots, columns = min(self.slots, kept.shape[0]), min(self.columns, kept.shape[2])
        larger[:slots, :, :columns] = kept[:slots, :, :columns]
        return larger


# Of the forward that runs in this thread: transformers calls the functions below by name and passes them no such thing.
_STEP: ContextVar[AttentionStep] = ContextVar("rl_generation_attention_step")


def _mask(
    *, mask_function: Callable[..., Tensor], allow_is_causal_skip: bool = False, **_: object
) -> Float[Tensor, "rows 1 S C"] | None:
    """Return 0 where the model's own predicate (row, head, query position, column) lets a query look, else -inf."""
    from transformers.masking_utils import causal_mask_function

    causal: Any = causal_mask_function
    step = _STEP.get()
    if allow_is_causal_skip and mask_function is causal and step.prefill and step.columns > 1 and not step.softcap:
        step.mask_left_out = True
        return None
    queries = step.positions[:, None, :, None]
    rows = torch.arange(len(queries), device=queries.device)[:, None, None, None]
    columns = torch.arange(step.columns, device=queries.device)[None, None, None]
    visible = mask_function(rows, rows.new_zeros(()), queries, columns)
    return torch.where(visible, 0.0, -torch.inf).to(step.dtype)


def _attention(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: Float[Tensor, "N H S D"],
    key: Float[Tensor, "N K C D"],
    value: Float[Tensor, "N K C E"],
    attention_mask: Float[Tensor, "rows 1 S C"] | None,
    **options: Any,
) -> tuple[Float[Tensor, "N S H E"], None]:
    """Attend as `transformers.AttentionInterface` asks for."""
    step = _STEP.get()
    unknown = [name for name in UNKNOWN if options.get(name) is not None]
    if unknown or (attention_mask is None and not step.mask_left_out):
        raise ModelError(
            f"{type(module).__name__} attends with {', '.join(unknown)}"
            if unknown
            else f"{type(module).__name__} attends without the mask that transformers' mask functions build"
        )
    step.calls += 1
    scale, softcap = options.get("scaling"), options.get("softcap") if step.softcap else None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    num_rows, num_heads, num_queries, _ = query.shape
    num_shared = num_heads // key.shape[1]
    mask = None if attention_mask is None else attention_mask.to(query.dtype)
    if softcap is None and num_queries > 1:
        # Where each query sees what is not after it, kernels that are told so skip the rest instead of masking it.
        attended = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=num_shared > 1
        )
        return attended.transpose(1, 2).contiguous(), None
    # Heads that share a key become queries of one head, instead of copies of the cache.
    query = query.reshape(num_rows, key.shape[1], num_shared * num_queries, -1)
    if softcap is None:
        attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    else:
        scores = softcap * ((query * scale @ key.transpose(2, 3)).float() / softcap).tanh()
        masked = scores if mask is None else scores + mask.repeat(1, 1, num_shared, 1)
        attended = masked.softmax(-1).to(value.dtype) @ value
    return attended.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None


class SlotModel:
    """A model, its cache, and how to run it. Holds nothing made from weights but the cache.

    The modules of `model` get a deep copy of their configs. While it runs it attends by another name, read from
    there, and a model that was made from the same config may run in another thread meanwhile.
    """

    def __init__(self, model: "PreTrainedModel", *, pad_token_id: int, record_decoding: bool) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(ATTENTION, _attention)  # doing so again is harmless
        AttentionMaskInterface.register(ATTENTION, _mask)
        self.model = model
        self.cache = SlotCache()
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self._pad_token_id = pad_token_id
        # What was one config, or part of one, is so again.
        copies: dict[int, Any] = {}
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if hasattr(value, "_attn_implementation"):
                    setattr(module, name, copy.deepcopy(value, copies))
        self._configs = _distinct_configs(model)
        # Answers agree with the model's own forward, which under this name leaves the cap out.
        self._softcap = model.config._attn_implementation != "sdpa"  # noqa: SLF001
        self.decoding = RecordedDecoding(
            model, why_not=_unknown_module(model) if record_decoding else "record_decoding=False"
        )

    # Not inference_mode: some rotary embeddings replace their buffers inside forward, and an inference tensor left
    # there would refuse the in-place copy of the next refit.
    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[tuple[int, ...]], *, slots: Int[Tensor, " rows"], sources: Int[Tensor, " rows"]
    ) -> Float[Tensor, "P V"]:
        """Run each prompt once, keep prompt `sources[i]` in slot `slots[i]`; return the logits of their ends."""
        lengths = [len(prompt) for prompt in prompts]
        columns = max(lengths)
        # Padded on the right, where causal attention does not look; what is kept of it is written over in time.
        tokens = torch.tensor(
            [[*prompt, *[self._pad_token_id] * (columns - len(prompt))] for prompt in prompts], device=self.model.device
        )
        positions = torch.arange(columns, device=tokens.device)[None]
        ends = sorted(set(lengths))
        keep = torch.tensor([end - 1 for end in ends], device=tokens.device)
        logits = self._forward(tokens, positions, columns=columns, logits_to_keep=keep, prefill=(slots, sources))
        if not self._keeps_logits:
            logits = logits[:, keep]
        return logits[torch.arange(len(prompts)), [ends.index(length) for length in lengths]]

    @torch.no_grad()
    def decode(self, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"], *, columns: int) -> Float[Tensor, "N V"]:
        """Run one token of each of the first N slots; all `positions` are below `columns`."""

        def forward(tokens: Tensor, positions: Tensor, *_: Tensor) -> Tensor:
            return self._forward(tokens[:, None], positions[:, None], columns=columns, logits_to_keep=1)[:, -1]

        # The strides of the cache are part of what is recorded.
        shape = (len(tokens), columns, self.cache.columns)
        return self.decoding(shape, forward, [tokens, positions, *self.cache.storage])

    def _forward(
        self,
        tokens: Int[Tensor, "rows S"],
        positions: Int[Tensor, "positions S"],
        *,
        columns: int,
        logits_to_keep: int | Tensor,
        prefill: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "rows kept V"]:
        if self._configs[0] is not self.model.config:  # another engine over this model has copied them since
            self._configs = _distinct_configs(self.model)
        self.cache.step = AttentionStep(
            positions=positions, columns=columns, dtype=self.model.dtype, softcap=self._softcap, prefill=prefill
        )
        token = _STEP.set(self.cache.step)
        # transformers' own way in, `set_attn_implementation`, looks for kernels and warns.
        before = [(config, config._attn_implementation) for config in self._configs]  # noqa: SLF001
        try:
            for config, _ in before:
                config._attn_implementation = ATTENTION  # noqa: SLF001
            output = self.model(
                input_ids=tokens,
                position_ids=positions.expand(len(tokens), -1),
                use_cache=True,
                **{self._cache_argument: self.cache},
                **({"logits_to_keep": logits_to_keep} if self._keeps_logits else {}),
            )
        finally:
            for config, implementation in before:
                config._attn_implementation = implementation  # noqa: SLF001
            _STEP.reset(token)
        logits: Tensor = output.logits
        return logits


def cache_argument(model: "PreTrainedModel") -> str:
    """Return what forward calls its key/value cache: `cache` since transformers 5.24, and `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _unknown_module(model: "PreTrainedModel") -> str | None:
    """Name a module whose Python may do something else at another step, since it is not torch's or transformers'.

    An adapter, for one, is turned off by a flag, of which a replay would not know.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] not in {"torch", "transformers"}:
            return f"{kind.__module__}.{kind.__qualname__} is no module of torch or transformers"
    return None


def _distinct_configs(model: "PreTrainedModel") -> list[Any]:
    """Every config that a part of the model may read its attention from, outer ones first."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


# -- Whether a model can be run so ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What one model offers to the engine."""

    vocab_size: int
    """Ids that can be both read and drawn: embeddings may be padded, heads may leave special tokens out."""

    max_positions: int | None
    """`max_position_embeddings`; None where the config states none."""

    quirks: tuple[str, ...]
    """What is special about this model here, a sentence each."""


def inspect_model(model: "PreTrainedModel") -> Support:
    """Return what `model` offers, or raise ModelError where it is no causal language model of transformers."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False) or not hasattr(model, "generate"):
        raise ModelError(
            f"{name} cannot be served: the engine needs a decoder-only causal language model of transformers, with its "
            f"head, and {'this one has an encoder' if config and hasattr(model, 'generate') else 'this is none'}. "
            f"Pass the bare model, without a wrapper"
        )
    head_of: Any = model.get_output_embeddings
    weights = [getattr(part, "weight", None) for part in (model.get_input_embeddings(), head_of())]
    text = config.get_text_config(decoder=True)
    max_positions = getattr(text, "max_position_embeddings", None)
    quirks = ["the model's generation_config is not read: Sampling alone decides"]
    if model.dtype.itemsize < 4:
        quirks.append(f"weights are {model.dtype}: logp carries its rounding, which a float32 forward does not share")
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()) or getattr(text, "sliding_window", None):
        quirks.append("sliding windows are masked: their layers keep all keys and values, as the others do")
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        quirks.append(
            f"{rope['rope_type']} frequencies change once the longest row of a batch passes the original length: from "
            f"there an answer depends on its batch, and its logp on keys rotated before; see verify_logp"
        )
    if max_positions is None:
        quirks.append("the config has no max_position_embeddings: the length of an answer is not checked")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        quirks.append("forward has no logits_to_keep: prefill holds the logits of every prompt token")
    if model.device.type == "mps":
        quirks.append("mps has no float64: tokens rarer than 6e-8 are drawn with a rounded probability")
    vocab_size = min(len(weight) for weight in weights if weight is not None)
    return Support(vocab_size=vocab_size, max_positions=max_positions, quirks=tuple(quirks))


def why_not_continuous(slots: SlotModel, *, vocab_size: int) -> str | None:
    """Return why the model is not decoded over its slot cache, or None where it is. Leaves the cache empty."""
    model, cache, name = slots.model, slots.cache, type(slots.model).__name__
    text, parameters = model.config.get_text_config(decoder=True), inspect.signature(model.forward).parameters
    layer_types, num_layers = getattr(text, "layer_types", None) or (), getattr(text, "num_hidden_layers", 0)
    if missing := [needed for needed in (*FORWARD_NEEDS, cache_argument(model)) if needed not in parameters]:
        return f"{name}'s forward has no {', '.join(missing)}"
    if getattr(model, "_is_stateful", False) or not RECURRENT.isdisjoint(layer_types):
        return f"{name} keeps recurrent states, which have no place in a key/value cache"
    sequences = [
        tuple((7 * i + 3 * row + 1) % vocab_size for i in range(n + 1)) for row, n in enumerate(PROMPT_LENGTHS)
    ]
    last = torch.tensor([sequence[-1] for sequence in sequences], device=model.device)
    lengths, rows = torch.tensor(PROMPT_LENGTHS, device=model.device), torch.arange(len(sequences), device=model.device)
    columns, attended = max(PROMPT_LENGTHS) + 1, []
    try:
        cache.resize(slots=len(sequences), columns=columns)
        prefilled = slots.prefill([sequence[:-1] for sequence in sequences], slots=rows, sources=rows)
        attended.append(cache.step.calls)
        decoded = slots.decode(last, lengths, columns=columns)
        attended.append(cache.step.calls)
        if attended != [num_layers] * 2 or cache.layer_indices != set(range(num_layers)):
            return (
                f"of its {num_layers} layers, {min(attended)} attend through the attention interface and "
                f"{len(cache.layer_indices)} keep keys and values"
            )
        plain = torch.stack([plain_logits(model, sequence, count=2) for sequence in sequences])
    except Exception as error:  # noqa: BLE001 - of a cache, mask or argument that the model was not written for
        return f"{name} does not run over a slot cache: {type(error).__name__}: {error}"
    finally:
        cache.clear()
    difference = what_differs(torch.stack([prefilled, decoded], 1), plain)
    return (
        None
        if difference is None
        else f"its logits over a slot cache differ from a plain forward's by {difference:.1e}"
    )


def what_differs(logits: Float[Tensor, "*shape V"], plain: Float[Tensor, "*shape V"]) -> float | None:
    """Return the largest difference where it is more than rounding."""
    # Weights that are still to come may be anything.
    if not plain.isfinite().all():
        return None
    largest = float((logits.float() - plain.float()).abs().max())
    allowed = TOLERANCE.get(plain.dtype, LOW_PRECISION_TOLERANCE) * max(1.0, float(plain.abs().max()))
    return None if largest <= allowed else largest


@torch.no_grad()
def plain_logits(model: "PreTrainedModel", sequence: Sequence[int], *, count: int) -> Float[Tensor, "count V"]:
    """Return the last logits of one forward without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False).logits[0, -count:]
    return logits
