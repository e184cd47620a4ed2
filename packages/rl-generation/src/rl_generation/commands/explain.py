"""`rl-generation explain`: the quirks of a model here and what it takes in memory, from its config alone.

Loads no weights; what an engine is once it has started, its `explain()` says, and `serve` prints. Exit codes: 0 it can
be served, 1 its cache does not hold one sequence, 2 refused.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rl_generation.checkpoints import load_config
from rl_generation.commands import show, show_json
from rl_generation.commands.flags import EngineFlags, Flag
from rl_generation.loading import vllm_options_of

OUR_BATCH = 256
"""Answers at once that figures are given for where nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """Say what an engine would do with a model, without loading its weights."""

    engine: EngineFlags

    json: Flag = False
    """End with one line of JSON that holds every figure."""

    def run(self) -> int:
        """Explain, and return the exit code."""
        from rl_generation.memory import estimate_memory
        from rl_generation.model_flags import flags_for, installed_version
        from rl_generation.vllm.preparing import TESTED

        spec = self.engine.spec()
        config = load_config(spec)
        dtype = spec.dtype if spec.dtype != "auto" else str(getattr(config, "dtype", None) or "float32")
        quirks: list[str] = []
        sized: dict[str, Any] = {"max_num_seqs": spec.max_batch_size or OUR_BATCH, "block_size": 1}
        if spec.engine == "vllm":
            version, options = installed_version() or TESTED[-1], vllm_options_of(spec)
            quirks = [f"vLLM {version}: {each.explain()}" for each in flags_for(config.model_type, version=version)]
            sized = options.sizes | {"max_num_seqs": options.max_num_seqs or OUR_BATCH}
            others = ("max_num_batched_tokens", "kv_cache_dtype", "block_size")
            sized |= {name: options.vllm_kwargs[name] for name in others if name in options.vllm_kwargs}
        memory = estimate_memory(config, dtype=dtype.removeprefix("torch."), **sized)
        show("\n".join([*(f"quirk of {quirk}" for quirk in quirks), memory.explain()]))
        sequences = memory.full_length_sequences
        holds = sequences is None or sequences >= 1
        if self.json:
            which = {"engine": spec.engine, "model": spec.model, "model_type": config.model_type, "dtype": dtype}
            show_json({**which, "quirks": quirks, "memory": asdict(memory), "holds": holds})
        return 0 if holds else 1
