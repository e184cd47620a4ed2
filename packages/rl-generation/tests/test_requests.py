import pytest
import torch

from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Sampling, make_requests

LIMITS = Limits(vocab_size=40, max_length=64)
SAMPLING = Sampling(max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [1, 3, -7]], r"prompt 1 has token id -7 at position 2.*\[0, 40\)"),
        ([[1, 40]], r"prompt 0 has token id 40 at position 1.*\[0, 40\)"),
        ([[1], [1] * 61], "prompt 1 has 61 tokens.*max_new_tokens=4.*max_position_embeddings=64.*lower.* to 3 or less"),
        ([[1] * 64], "prompt 0 has 64 tokens.*leaves no room for an answer"),
        ([[1], [1.5]], "prompt 1 must be a sequence of integer token ids"),
        ([5, 6, 7], r"prompt 0 is the number 5; prompts are a list of lists of token ids: \[\[5, 6, 7\]\]"),
        ([[1], "ab"], r"prompt 1 is text, 'ab', and engines take token ids: encode_text\(tokenizer, text\)"),
        ([[1], None], "prompt 1 must be a sequence of integer token ids"),
    ],
)
def test_a_bad_prompt_is_refused_by_index_and_value(prompts, words):
    with pytest.raises(PromptError, match=f"(?s){words}"):
        make_requests(prompts, SAMPLING, LIMITS)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"stop_token_ids": (3, 99)}, "stop_token_ids must hold ids .*got 99"),
        ({"stop_token_ids": (40,)}, "stop_token_ids must hold ids .*got 40"),
        ({"stop": ("END",)}, r"prompt 1 asks for stop=\('END',\), which is text, and the engine has no tokenizer"),
        ({"bad_words": ("no",)}, r"prompt 1 asks for bad_words=\('no',\).*no tokenizer: make it with tokenizer="),
    ],
)
def test_what_one_sampling_asks_for_is_checked_against_the_engine(asked, words):
    with pytest.raises(PromptError, match=words):
        make_requests([[1], [2]], [SAMPLING, Sampling(max_new_tokens=4, **asked)], LIMITS)


def test_a_sampling_for_each_prompt_is_taken_as_it_is_and_one_for_all_is_spread():
    seeded = Sampling(max_new_tokens=4, seed=5)
    each = make_requests([[1], [1]], [seeded, seeded], LIMITS)
    assert [request.sampling.seed for request in each] == [5, 5]
    spread = make_requests([[1], [1]], seeded, LIMITS)
    assert [request.sampling for request in spread] == seeded.spread(2)
    assert [request.prompt_index for request in spread] == [0, 1]
    with pytest.raises(PromptError, match=r"sampling must be a Sampling, .* got {'max_new_tokens': 3}"):
        make_requests([[1]], {"max_new_tokens": 3}, LIMITS)
    with pytest.raises(PromptError, match="one for each prompt; got 1 for 2 prompts"):
        make_requests([[1], [1]], [seeded], LIMITS)


def test_prompts_may_be_tensors_and_as_long_as_the_model_admits():
    (request,) = make_requests([torch.ones(60, dtype=torch.int64)], SAMPLING, LIMITS)
    assert request.prompt == (1,) * 60
    assert make_requests([[1] * 999], SAMPLING, Limits(vocab_size=40, max_length=None))[0].prompt == (1,) * 999
