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

__all__ = ["build_gpt_model", "uses_transformer_engine"]


def build_gpt_model(
    architecture: Architecture,
    config: MegatronConfig,
    *,
    groups: "ParallelGroups",
) -> "Decoder":
    """This rank's part of the model: its pipeline stage's layers, its tensor-parallel share of each.

    Matrices are 0 and norms 1, nothing is drawn at random: whoever loads replaces all but the padding of embeddings.

    Args:
        architecture: of `read_architecture`.
        config: the layout; `groups` are joined for the same.
        groups: that the model is laid over.

    Raises:
        MissingDependencyError: megatron-core is absent, or another release.
        ModelError: the architecture cannot be laid out like this, or Transformer Engine is absent and not waived.
    """
    require_megatron()
    from rl_backends.megatron.decoder import Decoder

    engine = uses_transformer_engine(config)
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
    if architecture.num_labels and model.post_process:
        # A value or reward head in the place of the output layer; the same on every tensor-parallel rank, each of
        # which reads whole hidden states and so has the whole gradient of it.
        del model.output_layer
        model.score = torch.nn.Linear(
            architecture.hidden_size, architecture.num_labels, bias=False, dtype=layers.params_dtype
        )
        torch.nn.init.zeros_(model.score.weight)
    return model if config.device == "cpu" else model.to(torch.device("cuda", torch.cuda.current_device()))


def uses_transformer_engine(config: MegatronConfig) -> bool:
    """Whether layers are Transformer Engine's. They are on a GPU, unless `transformer_impl` says otherwise.

    Raises:
        ModelError: they would be, and Transformer Engine is not installed.
    """
    if config.device == "cpu" or config.transformer_impl == "local":
        return False
    if not transformer_engine_available():
        raise ModelError(
            "device='cuda' builds Transformer Engine's layers, and transformer_engine is not installed for this GPU: "
            "install it, or set transformer_impl='local' for plain torch (scaled_dot_product_attention, and experts "
            "one after the other, which is slower)"
        )
    return True
