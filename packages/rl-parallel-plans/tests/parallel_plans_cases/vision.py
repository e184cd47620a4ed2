"""Models that see: the language model sharded, the vision tower whole, with an image in the prompt and without."""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import rl_parallel_plans as plans
from parallel_plans_cases.cases import error, gradient_errors, kinds, whole
from parallel_plans_cases.models import SHAPE

TEXT = {name: value for name, value in SHAPE.items() if name != "use_cache"} | {"tie_word_embeddings": False}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1}
IMAGE = 120
"""Token that stands where the image's features go."""


def gemma3():
    config = transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16},
        vision_config=SIGLIP,
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )
    return transformers.Gemma3ForConditionalGeneration, config, {"pixel_values": torch.randn(2, 3, 16, 16)}, 4


def llava():
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**SIGLIP, "model_type": "clip_vision_model"},
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )
    return transformers.LlavaForConditionalGeneration, config, {"pixel_values": torch.randn(2, 3, 16, 16)}, 16


def mistral3():
    vision = {**SIGLIP, "model_type": "pixtral", "head_dim": 16}
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config=vision,
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    image = {"pixel_values": torch.randn(2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]] * 2)}
    return transformers.Mistral3ForConditionalGeneration, config, image, 4


def qwen2_5_vl():
    vision = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE, "rope_scaling": MROPE},
        vision_config={**vision, "fullatt_block_indexes": [0]},
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration, config, _patches(), 4


def qwen3_vl():
    vision = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE, "rope_scaling": MROPE},
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3VLForConditionalGeneration, config, _patches(), 4


def _patches():
    return {"pixel_values": torch.randn(2 * 16, 3 * 16), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}


def parity(architecture, *, with_image=True, sequence_parallel=False, fsdp=False, accumulate=1):
    """Logits and every gradient on (dp, tp) ranks against one process."""
    torch.manual_seed(2)
    model_class, config, image, image_tokens = globals()[architecture]()
    inputs = _inputs(image if with_image else {}, image_tokens)
    reference, model = _made(model_class, config), _made(model_class, config)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    plan = plans.plan_for(model, tp=mesh.size(1), sequence_parallel=sequence_parallel)
    (plans.parallelize if fsdp else plans.apply_tensor_parallel)(model, mesh, plan)
    logits = []
    for each in (reference, model):
        for _ in range(accumulate):
            found = each(**inputs).logits
            found = whole(found)
            torch.nn.functional.cross_entropy(
                found[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten()
            ).backward()
        logits.append(found)
    return {
        "source": plan.source,
        "logits_error": error(logits[1], logits[0]),
        "gradient_errors": gradient_errors(model, reference, share=1e-3),
        "kinds": kinds(model),
        "whole": sorted(
            {row.name.split(".")[1] for row in plan.parameters if not row.sharded and "layers" not in row.name}
        ),
    }


def _inputs(image, image_tokens):
    ids = torch.randint(100, (2, 23), generator=torch.Generator().manual_seed(1))
    if not image:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ids[:, 2 : 2 + image_tokens] = IMAGE
    where = "mm_token_type_ids" if "image_grid_thw" in image else "token_type_ids"
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), where: (ids == IMAGE).long(), **image}


def _made(model_class, config):
    torch.manual_seed(0)
    model = model_class(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model
