"""Builds Megatron's model for an architecture, on this rank. Its weights are 0 until they are loaded.

Imports Megatron only when it is used.
"""

import warnings
from typing import TYPE_CHECKING

import torch

from rl_backends.errors import ModelError
from rl_backends.megatron.architecture import Architecture
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.installed import require_megatron
from rl_backends.megatron.layer_spec import block_spec, transformer_engine_available
from rl_backends.megatron.transformer_config import padded_vocab_size, transformer_config

if TYPE_CHECKING:
    from rl_backends.megatron.decoder import Decoder
    from rl_backends.megatron.groups import ParallelGroups

__all__ = ["build_gpt_model"]


def build_gpt_model(
    architecture: Architecture,
    config: MegatronConfig,
    *,
    groups: "ParallelGroups",
    transformer_engine: bool | None = None,
) -> "Decoder":
    """This rank's part of the model: its pipeline stage's layers, its tensor-parallel share of each.

    Matrices are 0 and norms 1, nothing is drawn at random: whoever loads replaces all but the padding of embeddings.

    Args:
        architecture: of `read_architecture`.
        config: the layout; `groups` are joined for the same.
        groups: that the model is laid over.
        transformer_engine: build Transformer Engine's layers. None does where `config.device` is "cuda" and it is
            installed.

    Raises:
        MissingDependencyError: megatron-core is absent, or another release.
        ModelError: the architecture cannot be cut like this, or Transformer Engine is asked for and absent.
    """
    require_megatron()
    from rl_backends.megatron.decoder import Decoder

    engine = _choose(config, asked=transformer_engine)
    layers = transformer_config(architecture, config, transformer_engine=engine)
    with cpu_compat(), warnings.catch_warnings():
        # Said of experts, which are not cut.
        warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`", category=UserWarning)
        model = Decoder(
            architecture.rope,
            config=layers,
            transformer_layer_spec=block_spec(
                architecture, layers, pipeline_rank=groups.pp.rank(), transformer_engine=engine
            ),
            vocab_size=padded_vocab_size(architecture, config),
            max_sequence_length=architecture.max_positions,
            pre_process=groups.pp.rank() == 0,
            post_process=groups.pp.rank() == groups.pp.size() - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
        )
    return model if config.device == "cpu" else model.to(torch.device("cuda", torch.cuda.current_device()))


def _choose(config: MegatronConfig, *, asked: bool | None) -> bool:
    available = config.device == "cuda" and transformer_engine_available()
    if asked and not available:
        raise ModelError(
            f"layers of Transformer Engine were asked for with device={config.device!r}: they need a GPU and "
            f"transformer_engine installed for it; leave transformer_engine at None, which takes plain torch here"
        )
    return available if asked is None else asked
