"""A run small enough for a test: a model of a few thousand weights, a task of eight prompts, a handful of steps."""

import functools
import importlib
import itertools
import json
import textwrap

import pytest
from hypothesis import HealthCheck, settings

from rl_launcher.run.record import Recorder

# Timings decide nothing: by default an example that takes 0.2 s, as any may on a busy machine, fails its test.
settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")


@pytest.fixture(scope="session", autouse=True)
def versions_are_collected_once():
    """Reading what is installed takes as long as all else of a run, and between two runs nothing is installed."""
    run = importlib.import_module("rl_launcher.run.run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "collect_versions", functools.cache(run.collect_versions))
        yield


@pytest.fixture(scope="session", autouse=True)
def runs_are_not_predicted():
    """A run of a test takes less time than its prediction; `test_prediction.py` has both."""
    run = importlib.import_module("rl_launcher.run.run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "predict_in_background", lambda *_, **__: None)
        yield


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


def write(folder):
    (folder / "model.py").write_text(textwrap.dedent(MODEL))
    (folder / "reward.py").write_text(textwrap.dedent(REWARD))
    rows = [{"prompt": f"{digit}+0=", "answer": str(digit)} for digit in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = folder / "recipe.yaml"
    file.write_text(textwrap.dedent(RECIPE).format(folder=folder))
    return file


@pytest.fixture
def recipe(tmp_path):
    """The path of a recipe whose model, data and reward lie beside it."""
    return write(tmp_path)


@pytest.fixture(scope="session")
def write_recipe():
    """Writes the same into any folder, for runs that several tests look at."""
    return write


# What two runs that are the same do not share: clocks and memory.
OF_THE_MACHINE = ("time_s", "tokens_per_s", "refit_s", "phase_s", "memory_")


@pytest.fixture
def curve():
    """All figures of all steps of a run, without those of the machine."""

    def read(run_dir):
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        return [{name: value for name, value in line.items() if not name.startswith(OF_THE_MACHINE)} for line in lines]

    return read


@pytest.fixture
def newest():
    """The newest checkpoint of a run."""
    return lambda run_dir: max((run_dir / "checkpoints").glob("step_*"))


@pytest.fixture
def stop_after():
    """In the place of a signal: end the run at a given number of recorded steps."""

    def stop(monkeypatch, steps):
        left, record = itertools.count(steps, -1), Recorder.step

        def step(recorder, *arguments, **named):
            record(recorder, *arguments, **named)
            if next(left) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(Recorder, "step", step)

    return stop
