"""Episodes with tools over a real engine: each goes on by itself, and gets the tokens that it would get in step."""

import dataclasses
import json
import string

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl_algorithms.chat import Chat
from rl_algorithms.contracts import ConversationEnvironment, EnvironmentReturn, RequestEngine
from rl_algorithms.data import make_row
from rl_algorithms.environments import ToolEnvironment
from rl_algorithms.rollouts import collect
from rl_generation import Sampling, TransformersEngine
from rl_generation.seeding import CallSeeds, SeededEngine

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}{{ eos_token }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>"]
# Whole calls as single tokens, so that a model with random weights makes some.
CALLS = [
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'a': number}})}\n</tool_call>"
    for name in ("double", "nothing_of_this_name")
    for number in range(12)
]


def double(a: int) -> int:
    """Twice the number.

    Args:
        a: the number.
    """
    return 2 * a


class Length:
    """Judges a final answer by its length."""

    def step(self, conversations):
        return [EnvironmentReturn(reward=float(len(each.answer)), terminated=True) for each in conversations]


class InStep:
    """An environment without a form for one conversation: all episodes then march in step."""

    def __init__(self, inner):
        self._inner = inner

    def reset(self, rows, *, seeds):
        return self._inner.reset(rows, seeds=seeds)

    def step(self, conversations):
        return self._inner.step(conversations)


class Generating:
    """An engine that is asked for whole batches alone."""

    def __init__(self, engine):
        self._engine = engine

    def generate(self, prompts, sampling):
        return self._engine.generate(prompts, sampling)


@pytest.fixture(scope="module")
def tokenizer():
    characters = [*string.printable, *CALLS]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate([*SPECIAL, *characters])}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def make_engine(tokenizer):
    def make():
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.1,
        )
        model = LlamaForCausalLM(config)
        # Else most responses are cut off, which ends their episodes.
        likelier = torch.nn.functional.one_hot(torch.tensor(2), len(tokenizer)) * 2.5
        model.lm_head.register_forward_hook(lambda *call: call[-1] + likelier)
        return TransformersEngine(model, stop_token_ids=[2], pad_token_id=0)

    return make


@pytest.fixture
def play(tokenizer):
    chat = Chat(tokenizer, prompt_format="chat", stop_token_ids=(tokenizer.eos_token_id,))
    prompts = [chat.prompt(make_row({"prompt": f"{number} and {number}?"}, where="a row")) for number in range(6)]

    def run(engine, environment, *, temperature=1.0):
        return collect(
            prompts,
            group_size=4,
            engine=engine,
            sampling=Sampling(max_new_tokens=40, temperature=temperature),
            environment=environment,
            chat=chat,
            max_turns=5,
            max_length=900,
            seed=7,
        )

    return run


@pytest.fixture
def environment():
    made = ToolEnvironment([double], reward=Length(), max_calls=10)
    assert isinstance(made, ConversationEnvironment)
    yield made
    made.close()


def same(one, other):
    for field in dataclasses.fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, torch.Tensor) and left.is_floating_point():
            torch.testing.assert_close(left, right, atol=1e-4, rtol=0, msg=field.name)
        else:
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, field.name


def test_episodes_with_tools_get_the_tokens_of_lock_step(make_engine, play, environment):
    engine = make_engine()
    assert isinstance(engine, RequestEngine)
    expected = play(make_engine(), InStep(environment))
    assert int((expected.turns.amax(dim=1) >= 1).sum()) >= 4, "too few conversations call a tool to show anything"
    same(play(engine, environment), expected)
    engine.close()


def test_greedy_episodes_are_those_of_an_engine_that_takes_batches_alone(make_engine, play, environment):
    engine = make_engine()
    assert not isinstance(Generating(engine), RequestEngine)
    expected = play(Generating(make_engine()), environment, temperature=0.0)
    same(play(engine, environment, temperature=0.0), expected)


def test_what_wraps_an_engine_hands_requests_on(make_engine, play, environment):
    expected = play(make_engine(), environment)
    seeded = SeededEngine(make_engine(), seeds=CallSeeds(1))
    same(play(seeded, environment), expected)
    assert seeded.seeds.calls == 0, "a request has its own seed, which is no call of the run"
