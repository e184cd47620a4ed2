"""A run small enough for a test: a model of a few thousand weights, a task of eight prompts, a handful of steps."""

import json
import textwrap

import pytest

MODEL = """
    import torch
    from rl_launcher.quickstart.tiny_model import character_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def build(seed, vocabulary=None):
        tokenizer = character_tokenizer()
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=vocabulary or len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        return Qwen3ForCausalLM(config), tokenizer

    def other_vocabulary(seed):
        return build(seed, vocabulary=64)

    def no_template(seed):
        model, tokenizer = build(seed)
        tokenizer.chat_template = None
        return model, tokenizer
"""
REWARD = """
    def score(completions, answer):
        return [(len(set(c)) + (c[:1] == a)) / 5 for c, a in zip(completions, answer)]

    def fails_on_five(prompts, completions):
        return [1 / (prompt != "5+0=") for prompt in prompts]

    def returns_nan(prompts, completions):
        return [float("nan") if prompt == "5+0=" else float(len(c)) for prompt, c in zip(prompts, completions)]

    def wants_more(completions, solution):
        return [0.0] * len(completions)

    not_callable = 3
"""
RECIPE = """
    run_dir: {folder}/run
    cpu_threads: 1
    policy:
      model_name: {folder}/model.py:build
      generation: {{max_new_tokens: 4}}
    data:
      source: {folder}/rows.jsonl
      held_out_share: 0.25
    env:
      reward: {folder}/reward.py:score
    evaluation: {{every: 4, samples: 2}}
    sft:
      max_num_steps: 6
      batch_size: 4
      optimizer: {{lr: 0.01}}
    grpo:
      max_num_steps: 8
      steps_per_generation: 2
      num_prompts: 4
      num_generations_per_prompt: 4
      optimizer: {{lr: 0.01}}
"""


@pytest.fixture
def recipe(tmp_path):
    """The path of a recipe whose model, data and reward lie beside it."""
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "reward.py").write_text(textwrap.dedent(REWARD))
    rows = [{"prompt": f"{digit}+0=", "answer": str(digit)} for digit in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "recipe.yaml"
    file.write_text(textwrap.dedent(RECIPE).format(folder=tmp_path))
    return file
