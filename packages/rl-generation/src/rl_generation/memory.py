"""What an engine takes in memory, known before it starts: weights, and key/value cache by the token. No weights needed.

Counts no activations, no CUDA graphs, no adapters and nothing of the driver: those come on top, and vLLM measures them
when it starts. Reads a config and, for the parameters, builds the model on the meta device, where it has no storage.

A layer of attention keeps `2 · kv_heads · head_dim · bytes` of each token, and under tensor parallelism a rank has
`max(1, kv_heads / ranks)` of the heads. Multi-head latent attention (DeepSeek) keeps one vector of
`kv_lora_rank + qk_rope_head_dim` a token, whole on every rank. Names of layers and of config fields are transformers'.

Cache is handed out in blocks of tokens, as vLLM does: layers of one kind (one window) form groups of equally many, and
a block holds its tokens for one group. A layer with a window of W tokens keeps what the window still sees and what one
step may add, W − 1 + step, and a block more, as a window need not start where a block does.
"""

import bisect
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from rl_generation.errors import EngineOptionError, ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL = frozenset({"full_attention", "attention"})
WINDOW = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kind of a layer that looks back on a window → the field of the config with its size."""

CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
CPU_BLOCK_TOKENS = 128
"""Tokens in a block of vLLM's cache on a CPU."""

WHOLE_ON_EVERY_RANK = frozenset({"gate", "router", "kv_a_proj_with_mqa", "q_a_proj"})
KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})
LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
"""In the name of a parameter."""


class CacheLayer(NamedTuple):
    """What one layer keeps, on one rank."""

    token_bytes: int
    """Of one token."""

    window: int | None
    """Tokens that it looks back on; None keeps all."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on one rank; `estimate_memory` makes it."""

    model_type: str
    parameters: int
    """Of the whole model, tied ones once."""

    weight_bytes: int
    """Of the parameters on one rank, of the fullest stage: matrices are cut, vectors and routers are not."""

    layers: tuple[CacheLayer, ...]
    """Those of the fullest stage that keep keys and values; not those that share another layer's."""

    tensor_parallel_size: int = 1
    """Ranks over which every layer is cut."""

    pipeline_parallel_size: int = 1
    """Stages over which the layers are divided."""

    element_bytes: int
    """Of one element of a weight."""

    max_model_len: int
    """Tokens of a prompt and its answer together."""

    max_num_seqs: int | None
    """Answers generated at once; None where nobody said."""

    max_num_batched_tokens: int
    """Tokens that one step computes at most."""

    block_size: int
    """Tokens in a block, the unit in which cache is handed out."""

    kv_cache_bytes: int | None
    """What the cache may take; None where nobody said."""

    notes: tuple[str, ...] = ()
    """What these figures leave out for this model."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one token in all layers, while every window still sees it."""
        return sum(layer.token_bytes for layer in self.layers)

    def sequence_bytes(self, length: int) -> int:
        """Of a prompt and its answer, `length` tokens together, at their fullest, in whole blocks."""
        total = 0
        for layer, count in Counter(self.layers).items():
            kept, extra = length, 0
            if layer.window is not None:
                kept, extra = min(length, layer.window - 1 + self.max_num_batched_tokens), 1
            groups, blocks = -(-count // self._group_size), -(-kept // self.block_size) + extra
            total += groups * self._group_size * blocks * self.block_size * layer.token_bytes
        return total

    @property
    def full_length_sequences(self) -> float | None:
        """How many of `max_model_len` tokens fit at once; None where the size of the cache is not known.

        As vLLM's "maximum concurrency": a fraction means that the last one waits.
        """
        if self.kv_cache_bytes is None or not self.layers:
            return None
        return self._usable_bytes / self.sequence_bytes(self.max_model_len)

    @property
    def kv_cache_tokens(self) -> int | None:
        """How many tokens fit, in sequences of full length where there are windows; None as above."""
        sequences = self.full_length_sequences
        if sequences is None:
            return None
        if len(set(self.layers)) == 1 and self.layers[0].window is None:
            return self._usable_bytes // self.kv_bytes_per_token
        return int(sequences * self.max_model_len)

    @property
    def longest_sequence(self) -> int | None:
        """Tokens of the longest sequence that fits alone, `max_model_len` at most; None as above."""
        if self.kv_cache_bytes is None or not self.layers:
            return None
        # sequence_bytes never falls with the length.
        return bisect.bisect_right(range(1, self.max_model_len + 1), self._usable_bytes, key=self.sequence_bytes)

    @property
    def default_cpu_cache_bytes(self) -> int:
        """Size of vLLM's cache on a CPU where nobody gave one, beside a trainer.

        vLLM itself would take a share of all of the host's memory and refuse to start where other processes use it.
        This is room for eight responses of full length at once (or `max_num_seqs`, if fewer), at least 256 MiB and at
        most 4 GiB, but never less than one response of full length takes; further responses wait for their turn.
        """
        on_cpu = replace(self, block_size=CPU_BLOCK_TOKENS)
        one = on_cpu.sequence_bytes(self.max_model_len)
        wanted = max(one * min(self.max_num_seqs or 8, 8), 256 * 2**20)
        # vLLM keeps one block for itself: a cache of exactly one sequence would not hold it.
        return max(min(wanted, 4 * 2**30), one + on_cpu.sequence_bytes(1))

    def default_gpu_memory_utilization(self, device_bytes: int) -> float:
        """Share of a GPU of `device_bytes` that vLLM takes of an engine which is refitted, where nobody gave one.

        vLLM itself takes 0.92. A refit stages the new weights beside the engine's own, on the same device and outside
        of this share, and they stay allocated for the next one: so it is less by the weights, rounded down to a
        hundredth.
        """
        return max(math.floor(100 * (0.92 - self.weight_bytes / device_bytes)) / 100, 0.01)

    def explain(self) -> str:
        """Say it in a few lines for people."""
        count, stages = self.tensor_parallel_size * self.pipeline_parallel_size, self.pipeline_parallel_size
        ranks = f" on each of {count} ranks" if count > 1 else ""
        ranks += f", at the fullest of {stages} stages" if stages > 1 else ""
        sequence, sequences = self.sequence_bytes(self.max_model_len), self.full_length_sequences
        token = f"{_size(self.kv_bytes_per_token)} a token in {len(self.layers)} layers"
        lines = [
            f"memory of {self.model_type}{ranks}, without activations:",
            f"  weights  {_size(self.weight_bytes)}, {self.parameters:,} parameters in the whole model",
            f"  cache    {token}, {_size(sequence)} for {self.max_model_len:,} tokens",
        ]
        if self.kv_cache_bytes is not None and sequences is not None:
            room = f"{self.kv_cache_tokens:,} tokens, in {_size(self.kv_cache_bytes)}"
            lines.append(f"  fits     {sequences:.1f} of that length, {room}")
            if sequences < 1:
                lines[-1] += f"; vLLM refuses to start: give more, or max_model_len={self.longest_sequence}"
            elif self.max_num_seqs is not None and sequences < self.max_num_seqs:
                lines[-1] += f"; of max_num_seqs={self.max_num_seqs} some wait once they are long"
        elif self.layers and self.max_num_seqs is not None:
            most = _size(self.max_num_seqs * sequence)
            lines.append(f"  at most  {most} for max_num_seqs={self.max_num_seqs} of that length")
        return "\n".join([*lines, *(f"  note     {note}" for note in self.notes)])

    @property
    def _group_size(self) -> int:
        """Layers in a group: as many as the rarest kind has, or the commonest where that wastes less."""
        counts = Counter(self.layers).values()
        return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)

    @property
    def _usable_bytes(self) -> int:
        """What whole blocks take of the cache."""
        assert self.kv_cache_bytes is not None
        block = self._group_size * self.block_size * max(layer.token_bytes for layer in self.layers)
        return self.kv_cache_bytes // block * block


def estimate_memory(
    config: "PretrainedConfig",
    *,
    dtype: str | torch.dtype,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    block_size: int = 16,
    kv_cache_dtype: str | torch.dtype | None = None,
    kv_cache_memory_bytes: int | None = None,
) -> EngineMemory:
    """Say what an engine of this model takes on each rank. Loads no weights and needs no device.

    Args:
        config: Of a causal language model of transformers.
        dtype: Of the weights.
        tensor_parallel_size: Ranks over which every layer is cut.
        pipeline_parallel_size: Stages over which the layers are divided.
        max_model_len: Tokens of a prompt and its answer together; None is the model's own limit.
        max_num_seqs: Answers generated at once, for `explain`.
        max_num_batched_tokens: Tokens that one step computes at most; None is `max_model_len`, a prompt in one step.
        block_size: Tokens in a block of cache: vLLM's is 16 on a GPU and 128 on a CPU, unless told.
        kv_cache_dtype: Of keys and values; None is `dtype`; `"fp8"` as in vLLM.
        kv_cache_memory_bytes: Size of the cache on each rank, where it is given.

    Raises:
        ModelError: transformers has no causal language model of this config.
        EngineOptionError: The heads do not divide over the ranks, there are fewer layers than stages, or a number is
            impossible.
    """
    text = config.get_text_config(decoder=True)
    length = max_model_len or int(getattr(text, "max_position_embeddings", 0) or 0)
    sizes = {
        "max_model_len": length,
        "block_size": block_size,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise EngineOptionError(f"{name} must be at least 1, and the config has no limit of its own; got {value}")
    key_value_heads = _key_value_heads(text)
    parameters, of_a_rank = _count_parameters(
        config, ranks=tensor_parallel_size, stages=pipeline_parallel_size, key_value_heads=key_value_heads
    )

    # What each layer keeps, in transformers' words; one that keeps nothing, or shares another's, is left out.
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds is None:
        windowed = getattr(text, "sliding_window", None) is not None
        kinds = ["sliding_attention" if windowed else "full_attention"] * int(text.num_hidden_layers)
    shared = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    kinds = [kind for kind in kinds[: len(kinds) - shared] if kind not in {"mlp", "moe"}]
    if latent := getattr(text, "kv_lora_rank", None):
        elements = int(latent) + int(text.qk_rope_head_dim)
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        elements = 2 * max(1, key_value_heads // tensor_parallel_size) * int(head_dim)
    element = _dtype(dtype if kv_cache_dtype is None or kv_cache_dtype == "auto" else kv_cache_dtype).itemsize
    layers = [
        CacheLayer(elements * element, None if kind in FULL else int(getattr(text, WINDOW[kind])))
        for kind in kinds
        if kind in FULL or kind in WINDOW
    ]
    notes = []
    if stateful := len(kinds) - len(layers):
        notes.append(
            f"{stateful} layers keep a state in place of keys and values (Mamba, linear attention), not counted"
        )
    if getattr(config, "quantization_config", None):
        notes.append("the config says that the checkpoint is quantised; the weights are counted as if it were not")
    return EngineMemory(
        model_type=config.model_type,
        parameters=parameters,
        weight_bytes=of_a_rank * _dtype(dtype).itemsize,
        layers=tuple(layers[: max(_stage_sizes(len(layers), pipeline_parallel_size))]),
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        element_bytes=_dtype(dtype).itemsize,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or length,
        block_size=block_size,
        kv_cache_bytes=kv_cache_memory_bytes,
        notes=tuple(notes),
    )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, CACHE_DTYPES.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype):
        raise EngineOptionError(f"{dtype!r} is no dtype of torch, nor one of {sorted(CACHE_DTYPES)}")
    return found


def _size(size: int) -> str:
    """Bytes for people, in powers of 1024."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"


def _key_value_heads(text: "PretrainedConfig") -> int:
    for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"):
        if found := getattr(text, name, None):
            return int(found)
    raise ModelError(f"the config of {text.model_type!r} does not say how many attention heads the model has")


def _stage_sizes(num_layers: int, stages: int) -> list[int]:
    """Divide layers among the stages of a pipeline as vLLM does: what is left over goes to the last but one, and on."""
    sizes = [num_layers // stages] * stages
    for index in range(2, num_layers % stages + 2):
        sizes[-index] += 1
    return sizes


def _count_parameters(config: "PretrainedConfig", *, ranks: int, stages: int, key_value_heads: int) -> tuple[int, int]:
    """Count the parameters of the whole model, and those of one rank of the fullest stage.

    Matrices are cut over the ranks, those of keys and values over as many as there are heads; vectors, routers and the
    projections into a latent space are whole on every rank, as in vLLM. Its padding of the vocabulary is left out. The
    first of several stages has the embedding, the last one what comes after the layers, with a copy of an embedding
    that is tied to it.
    """
    import transformers

    text = config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    if heads % ranks:
        raise EngineOptionError(f"{heads} attention heads do not divide over tensor_parallel_size={ranks}")
    # Of the architecture that the config names, or else the causal language model of its type.
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    make: Any = next((each for each in named if each is not None), transformers.AutoModelForCausalLM.from_config)
    try:
        with torch.device("meta"):
            model = make(config)
    except ValueError as error:
        raise ModelError(
            f"transformers knows no causal language model of model_type={config.model_type!r}: {error}"
        ) from error
    except RuntimeError as error:
        raise ModelError(
            f"transformers cannot construct model_type={config.model_type!r} without memory, so its parameters are not "
            f"counted: {error}"
        ) from error
    embedding = model.get_input_embeddings()
    whole, in_layers, before, after = 0, Counter[int](), 0, 0
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2] if "." in name else name
        cut = min(ranks, key_value_heads) if module in KEYS_AND_VALUES else ranks
        if parameter.dim() < 2 or module in WHOLE_ON_EVERY_RANK:
            cut = 1
        whole += parameter.numel()
        of_a_rank = -(-parameter.numel() // cut)
        if layer := LAYER.search(name):
            in_layers[int(layer[1])] += of_a_rank
        elif parameter is getattr(embedding, "weight", None):
            before += of_a_rank
        else:
            after += of_a_rank
    if stages > max(len(in_layers), 1):
        raise EngineOptionError(f"{len(in_layers)} layers are fewer than the stages of pipeline_parallel_size={stages}")
    if stages > 1 and getattr(text, "tie_word_embeddings", False):
        after += before
    layers, of_stages = iter([in_layers[index] for index in sorted(in_layers)]), []
    for stage, size in enumerate(_stage_sizes(len(in_layers), stages)):
        own = sum(next(layers) for _ in range(size))
        of_stages.append(own + before * (stage == 0) + after * (stage == stages - 1))
    return whole, max(of_stages)
