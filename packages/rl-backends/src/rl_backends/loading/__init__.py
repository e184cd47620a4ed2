"""Models from a folder or the Hub: whole in one process, or shard by shard, each rank reading only what it holds."""

from rl_backends.errors import ModelError
from rl_backends.loading.skeleton import materialize
from rl_backends.loading.source import (
    ModelSource,
    check_generation_config,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    open_model,
    pad_token_id,
    stop_token_ids,
)
from rl_backends.loading.weights import LoadReport, initialise

__all__ = [
    "LoadReport",
    "ModelError",
    "ModelSource",
    "check_generation_config",
    "check_vocabulary",
    "initialise",
    "load_causal_lm",
    "load_tokenizer",
    "materialize",
    "open_model",
    "pad_token_id",
    "stop_token_ids",
]
