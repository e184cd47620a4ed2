"""What is computed in a cell of the table, and the plain Hugging Face and torch answer to it."""

import dataclasses

import torch
from parity import problems

LONG = 200
"""Tokens of the longest row on which logits are compared: what is wrong with positions, shows there."""
SIZES = {**problems.SIZES, "max_position_embeddings": 256}  # with a padding word, which rows hold like any other
FAMILIES = {  # config class, model class, what differs
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Llama, rope of Llama 3": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {  # of the four wavelengths 6, 17, 44 and 118 one is kept, one is between, and two are divided by 8
            "rope_theta": 50.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "Llama, yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_theta": 50.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "Mistral, window of 6": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 6}),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"rope_theta": 1e6}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"rope_theta": 1e6}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
        },
    ),
    "Qwen3-MoE, 4 layers": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 4},
    ),
    "Qwen3-MoE, router as it is": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "Mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "Llama, 1 head": ("LlamaConfig", "LlamaForCausalLM", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "Llama, 4 layers": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 4}),
    "Llama, 6 layers": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 6}),
    "Gemma-3": problems.FAMILIES["Gemma-3"],
}


@dataclasses.dataclass(frozen=True)
class Problem(problems.Problem):
    """The numbers of a cell, however they are cut."""

    tied: bool = False
    """The output layer is the embedding."""

    @property
    def file(self):
        return f"{'tied' if self.tied else 'untied'}_{super().file}"

    def model(self):
        import transformers

        config_class, model_class, other = FAMILIES[self.family]
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**{**SIZES, "tie_word_embeddings": self.tied, **other})
        model = getattr(transformers, model_class)(config)
        for parameter in model.parameters():  # no norm of ones, no bias of zeros
            parameter.data += 0.05 * torch.randn_like(parameter)
        return model.eval()

    def long_examples(self):
        """Two long rows of unequal lengths, all of whose tokens but the first are asked for."""
        world = problems.world()
        examples = world.make_examples(rows=2, width=LONG, seed=5)
        lengths = torch.tensor([LONG, LONG - 39])
        trainable = (torch.arange(LONG) > 0) & (torch.arange(LONG) < lengths[:, None])
        return dataclasses.replace(examples, lengths=lengths, trainable=trainable)

    def answer(self):
        """As every answer, and `logits`: the log-softmax over the vocabulary that predicts each token of long rows."""
        model, examples = self.model(), self.long_examples()
        logits = torch.zeros(*examples.tokens.shape, SIZES["vocab_size"])
        with torch.no_grad():
            for row, length in enumerate(examples.lengths.tolist()):
                found = model(input_ids=examples.tokens[row : row + 1, :length]).logits[0, :-1].float()
                logits[row, 1:length] = (found / self.temperature).log_softmax(-1)
        return {**super().answer(), "logits": logits}
