"""What is computed in a cell of the table, and the plain Hugging Face and torch answer to it.

A problem is a model, a batch, a loss and a temperature; its answer is computed once, row by row without padding, on
full logits, and kept on disk for the ranks.
"""

import dataclasses
import functools
import importlib.util
import sys
import zlib
from pathlib import Path
from unittest import mock

import torch

from rl_backends import LoraConfig
from rl_backends.lora.inject import add_lora

SIZES = {
    "vocab_size": 67,  # divides over no mesh
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
FAMILIES = {  # config class, model class, what differs
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "Gemma-3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {  # windows shorter than the rows
            "tie_word_embeddings": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "Mistral, window of 6": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 6}),
    "Gemma-2, capped scores": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": 2.0, "sliding_window": 6, "attn_implementation": "eager"},
    ),
    "GPT-OSS, sinks": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_implementation": "eager",
        },
    ),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "Llama, 1 head": ("LlamaConfig", "LlamaForCausalLM", {"num_attention_heads": 1, "num_key_value_heads": 1}),
}

STEPS = 3
LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
EPS = 1e-4  # large, so that Adam does not blow the rounding of gradients near 0 up to whole steps
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 0.2  # less than any first gradient's norm here, so that clipping is part of every step


@functools.cache
def world():
    """The helpers of this package's conftest: examples, losses and the plain log-probabilities."""
    path = Path(__file__).parents[1] / "conftest.py"
    if (loaded := sys.modules.get("parity_world")) is None:
        spec = importlib.util.spec_from_file_location("parity_world", path)
        loaded = sys.modules["parity_world"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


@dataclasses.dataclass(frozen=True)
class Problem:
    """The numbers of a cell, however they are cut."""

    family: str
    batch: str = "ragged"
    temperature: float = 1.0
    adapters: LoraConfig | None = None

    @property
    def file(self):
        return "".join(c if c.isalnum() else "_" for c in str(self)) + ".pt"

    def model(self):
        import transformers

        config_class, model_class, other = FAMILIES[self.family]
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**{**SIZES, **other})
        model = getattr(transformers, model_class)(config)
        for parameter in model.parameters():  # no norm of ones, no bias of zeros
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model

    def examples(self):
        """Rows of 5 to 19 tokens, prompts of 1 to 3; their count divides over no mesh but where rows are pairs."""
        rows, kind = {"ragged": (7, "Examples"), "pairs": (6, "Pairs"), "one row": (1, "Examples")}[self.batch]
        return world().make_examples(rows=rows, width=19, seed=3, kind=getattr(world(), kind))

    def loss(self):
        loss = world().pair_loss if self.batch == "pairs" else world().token_loss
        return functools.partial(loss, num_tokens=self.examples().trainable.sum())

    @torch.enable_grad()
    def answer(self):
        """Log-probabilities, metric sums, norm and gradients of the first step, and the weights after the last."""
        model, examples, loss = self.model(), self.examples(), self.loss()
        if self.adapters is not None:
            with trained_adapters():
                add_lora(model, self.adapters)  # from here on it is peft that computes
        optimizer = torch.optim.AdamW(
            groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False
        )
        first = {}
        for _ in range(STEPS):
            logp = world().plain_logp(model, examples, temperature=self.temperature)
            value, sums = loss(logp, examples)
            value.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            first = first or {"logp": logp.detach(), "sums": sums, "gradients": gradients, "norm": norm.detach()}
            optimizer.step()
            optimizer.zero_grad()
        assert first["norm"] > MAX_GRAD_NORM, f"{self}: norm {first['norm']} is not clipped"
        return {**first, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


def trained_adapters():
    """Inside, adapters begin with an A and a B as if they had been trained: from a B of zeros, A gets no gradient."""

    def value(name, shape, *, seed):
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        return torch.empty(shape).uniform_(-0.1, 0.1, generator=generator)  # s B A is a few percent of W

    return mock.patch("rl_backends.lora.inject.first_value", value)


def groups(model):
    """No decay of norms and biases, as the backend's default."""
    vectors = {name for name, p in model.named_parameters() if p.ndim < 2 or name.endswith("bias")}  # stacked ones too
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {"params": [named[name] for name in named if name in vectors], "weight_decay": 0.0}
    return [{"params": [named[name] for name in named if name not in vectors]}, kept]


def answers(problems, folder):
    """Compute what is not in `folder` yet."""
    for problem in dict.fromkeys(problems):
        if not (folder / problem.file).exists():
            torch.save(problem.answer(), folder / problem.file)
