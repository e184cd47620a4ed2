"""The smallest setup in which a loop still learns: the quickstart's task with a Qwen3 of 0.10 million parameters.

A DTensor policy, an engine with its own weights, and a refit between them. `TinySetup.make` takes a tenth of a second,
`imitate` some seconds on one CPU thread; its result can be copied with `state` and `TinySetup.make(state=...)`.
`InFlightEngine` is the same engine, refitted while it generates.
"""

import copy
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_algorithms import sft
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.data import batches
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig
from rl_generation import Rollout, Sampling, TransformersEngine
from rl_launcher.build.engines import weight_source
from rl_launcher.quickstart.sort_digits import dataset, reward
from rl_launcher.quickstart.tiny_model import character_tokenizer
from rl_refit import CountedRefit, ModuleSink, Refit, RefitReport

SAMPLING = Sampling(max_new_tokens=9, temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySetup:
    """The arguments of a loop."""

    policy: DTensorBackend
    engine: TransformersEngine
    weight_sync: CountedRefit
    environment: RewardFunctionEnvironment
    chat: Chat
    prompts: list[Prompt]
    """8000 prompts to train on."""
    held_out: list[Prompt]
    """1000 prompts that are never trained on."""

    @classmethod
    def make(cls, *, seed: int = 0, state: Mapping[str, Tensor] | None = None) -> "TinySetup":
        """Return a new setup; policy and engine have weights drawn from `seed`, or those of `state`."""
        torch.set_num_threads(1)  # a model this small loses more by waiting threads than it gains
        model, chat = _model(seed), _chat()
        if state is not None:
            model.load_state_dict(state)
        engine = TransformersEngine(copy.deepcopy(model), stop_token_ids=chat.stop_token_ids, pad_token_id=0, seed=seed)
        policy = DTensorBackend(model, DTensorConfig())
        sink = ModuleSink(engine.model, on_commit=engine.commit_version)
        rows = dataset()
        return cls(
            policy=policy,
            engine=engine,
            weight_sync=CountedRefit(Refit(weight_source(policy), sink)),
            environment=RewardFunctionEnvironment(reward=reward),
            chat=chat,
            prompts=[chat.prompt(row) for row in rows.train],
            held_out=[chat.prompt(row) for row in rows.held_out],
        )

    def imitate(self, *, num_steps: int = 150, seed: int = 0) -> None:
        """Run SFT on noisy demonstrations, until two of three greedy and one of four sampled responses are right."""
        optimizer = OptimizerConfig(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=20)
        self.policy.start_training(optimizer, num_steps=num_steps)
        demonstrations = [self.chat.demonstration(row) for row in dataset().demonstrations]
        config = sft.SFTConfig(max_num_steps=num_steps, batch_size=128)
        steps = sft.train(
            policy=self.policy, demonstrations=batches(demonstrations, size=config.batch_size, seed=seed), config=config
        )
        for _ in itertools.islice(steps, num_steps):
            pass
        self.weight_sync(version=0)  # the next loop counts its own steps

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the engine's weights, for other setups to start from."""
        return {name: tensor.detach().clone() for name, tensor in self.engine.model.state_dict().items()}

    def accuracy(self, *, num_prompts: int = 500, greedy: bool = False, seed: int = 1) -> float:
        """Return the share of held-out prompts with a right response, sampled once or greedily."""
        sampling = Sampling(max_new_tokens=9, temperature=0.0 if greedy else 1.0, seed=seed)
        prompts = self.held_out[:num_prompts]
        rollouts = self.engine.generate([prompt.tokens for prompt in prompts], sampling)
        responses = [self.chat.text(rollout.tokens) for rollout in rollouts]
        right = sum(response == prompt.row.answer for response, prompt in zip(responses, prompts, strict=True))
        return right / len(prompts)


class InFlightEngine:
    """An `Engine` for several threads and a `WeightSync` that does not wait for them.

    Another thread takes every other turn of the engine, so that generating takes about as long as training, as it does
    with a large model: most refits find a batch under way, however fast the machine is.
    """

    def __init__(self, setup: TinySetup) -> None:
        self._engine, self._weight_sync = setup.engine, setup.weight_sync
        self.mixed = 0
        """Rollouts that were sampled from weights of several versions."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """Generate as the engine does, and count the rollouts of mixed weights."""
        over = threading.Event()
        neighbour = threading.Thread(target=self._take_turns, args=(over,))
        neighbour.start()
        try:
            rollouts = self._engine.generate(prompts, sampling)
        finally:
            over.set()
            neighbour.join()
        self.mixed += sum(len({span.version for span in rollout.versions}) > 1 for rollout in rollouts)
        return rollouts

    def __call__(self, *, version: int) -> RefitReport:
        """Refit between two steps of the engine, without waiting for requests."""
        with self._engine.between_steps():
            return self._weight_sync(version=version)

    def _take_turns(self, over: threading.Event) -> None:
        while not over.is_set():
            with self._engine.between_steps():
                time.sleep(0.02)


def _chat() -> Chat:
    tokenizer = character_tokenizer()
    assert tokenizer.eos_token_id is not None
    return Chat(tokenizer, prompt_format="chat", stop_token_ids=(tokenizer.eos_token_id,))


def _model(seed: int) -> Qwen3ForCausalLM:
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
