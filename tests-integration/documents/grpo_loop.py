"""A tiny policy and its engine, as a reader has them who puts GRPO into a trainer."""

from tiny_setup import SAMPLING, TinySetup

from rl_algorithms import grpo
from rl_algorithms.chat import Chat
from rl_algorithms.data import batches, read_jsonl
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.observation import ObservedPolicy
from rl_backends import OptimizerConfig
from rl_launcher.quickstart.tiny_model import character_tokenizer

setup = TinySetup.make()
policy, engine, refit = setup.policy, setup.engine, setup.weight_sync
policy.start_training(OptimizerConfig(lr=1e-3), num_steps=200)
tokenizer, sampling, log = character_tokenizer(), SAMPLING, print


def reward(completions, answer, **columns):
    return [float(text[:1].isdigit()) for text in completions]
