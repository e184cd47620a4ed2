"""Start vLLM with dummy weights, and print as JSON what that leaves in buffers, and what the engine says of its cache.

In a process of its own, as vLLM in process patches torch and never leaves; `report` runs it once for all tests.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

CACHE_BYTES = (3 << 20) + 12345  # no whole number of blocks
SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 32}  # vLLM's attention on a CPU needs 32 or more
FAMILIES = ("llama", "gemma3_text", "gemma4_text", "apertus")


@functools.cache
def report():
    """What this program prints."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(Path(__file__).resolve())]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=540)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def config(family):
    """A tiny model of it, as transformers describes it."""
    import transformers

    windows = {"sliding_window": 32}
    shared = {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    name, special = {
        "llama": ("Llama", {}),
        "gemma3_text": ("Gemma3", HEAD | windows | {"num_hidden_layers": 6, "query_pre_attn_scalar": 32}),
        "gemma4_text": ("Gemma4", HEAD | windows | shared | {"layer_types": ["sliding_attention", "full_attention"]}),
        "apertus": ("Apertus", HEAD),
    }[family]
    kind = f"{name}TextConfig" if family.endswith("_text") else f"{name}Config"
    made = getattr(transformers, kind)(**SHAPE | special)
    made.architectures = [f"{name}ForCausalLM"]
    return made


def main():
    found = {"engines": {family: look(family) for family in FAMILIES}}
    found.update(modules(), processor=processor())
    print(json.dumps(found))


def look(family):
    """The small buffers of a model after a dummy start, and the size of the cache."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config(family).save_pretrained(folder)
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=4,
            kv_cache_memory_bytes=CACHE_BYTES,
            disable_log_stats=True,
        )
    try:
        (buffers,) = llm.collective_rpc(small_buffers)
        cache = llm.llm_engine.vllm_config.cache_config
        return {
            "buffers": buffers,
            "block_size": cache.block_size,
            "blocks": cache.num_gpu_blocks,
            "sequences": cache.kv_cache_max_concurrency,
            "tokens": cache.kv_cache_size_tokens,
            "in_flight": llm.llm_engine.vllm_config.max_in_flight_tokens,
        }
    finally:
        llm.llm_engine.engine_core.shutdown()


def small_buffers(worker):
    buffers = worker.model_runner.model.named_buffers()
    return {name: each.flatten().tolist() for name, each in buffers if each.is_floating_point() and each.numel() <= 4}


def modules():
    """What the dummy loader does to modules whose models are too much for a test."""
    import torch
    from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.models.radio import RadioModel
    from vllm.transformers_utils.configs.radio import RadioConfig

    loader = DummyModelLoader(LoadConfig(load_format="dummy"))
    with set_current_vllm_config(VllmConfig()):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")
            initialize_model_parallel()
        norm = []
        if find_spec("vllm.model_executor.layers.fusion.mm_input_norm"):  # since 0.31
            from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

            images = FusedMMInputNorm([0.5] * 3, [0.5] * 3, 1 / 255)
            loader.load_weights(images, None)
            norm = images.weight.tolist() + images.bias.tolist()
        vision = RadioModel(RadioConfig("vit_small_patch16_224"), num_hidden_layers_override=1)
        loader.load_weights(vision, None)
    parameters = dict(vision.named_parameters())
    fed = vision.load_weights([(checkpoint_name(name), each.detach().clone()) for name, each in parameters.items()])
    return {
        "image_norm": norm,
        "radio_unfed": {name: parameters[name].abs().max().item() for name in sorted(set(parameters) - set(fed))},
    }


def checkpoint_name(name):
    """As the checkpoint of a C-RADIO vision tower has it."""
    return "radio_model." + re.sub(r"^model\.encoder\.layers\.", "model.blocks.", name)


def processor():
    """What vLLM says to a processor of images that has no tokenizer, and which models' processors need none."""
    import vllm
    from vllm.multimodal.processing.processor import BaseMultiModalProcessor

    class Processor(BaseMultiModalProcessor):
        _get_mm_fields_config = _get_prompt_updates = None

    try:
        Processor(SimpleNamespace(ctx=SimpleNamespace(tokenizer=None)), None)
    except ValueError as error:
        said = str(error)
    else:
        said = None
    sources = Path(vllm.__file__).parent.rglob("*.py")
    exempt = [path.stem for path in sources if "requires_tokenizer = False" in path.read_text(encoding="utf-8")]
    return {"said": said, "exempt": exempt}


if __name__ == "__main__":
    main()
