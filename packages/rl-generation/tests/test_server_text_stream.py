"""Text that is given out while an answer grows is the text of the whole answer."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent / "programs"))

pytest.importorskip("starlette", reason="the server needs rl-generation[server]")

import speaking

from rl_generation.chat import decode_rollout
from rl_generation.engine import RolloutDelta
from rl_generation.requests import Request, Sampling
from rl_generation.rollout import Rollout, VersionSpan
from rl_generation.server.answers import AnswerText
from rl_generation.server.generation_request import CompletionBody, GenerationRequest

TOKENIZER = speaking.tokenizer()
WORDS = TOKENIZER.encode("hello there, 你好 🙂 hello", add_special_tokens=False)


def rollout(tokens, stop_reason=None):
    return Rollout(
        tokens=tuple(tokens),
        logp=(-1.0,) * len(tokens),
        logp_of="sampled",
        finish_reason="length" if stop_reason is None else "stop",
        stop_reason=stop_reason,
        versions=(VersionSpan(version=0, start=0, end=len(tokens)),),
    )


def stopped(tokens, stop):
    """The answer as an engine would leave it: it ends with the token that completes one of the stop strings."""
    for end in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:end], skip_special_tokens=True)
        found = [each for each in stop if each in text]
        if found:
            return rollout(tokens[:end], stop_reason=found[0])
    return rollout(tokens)


def pieces(answer, stop=(), *, include=False, tokenizer=TOKENIZER, prompt=()):
    """What each token gives out, and then the end of the answer."""
    body = CompletionBody.of({"prompt": [5], "include_stop_str_in_output": include})
    request = Request(prompt=tuple(prompt), sampling=Sampling(max_new_tokens=99, stop=tuple(stop)))
    text = AnswerText(tokenizer, GenerationRequest(body=body, requests=[request], logp=False), request)
    deltas = [RolloutDelta(sample_index=0, tokens=(token,), logp=(-1.0,)) for token in answer.tokens]
    return [text.take(each)[0] for each in (*deltas, RolloutDelta(sample_index=0, tokens=(), logp=(), rollout=answer))]


@given(
    tokens=st.lists(st.one_of(st.integers(0, len(TOKENIZER) - 1), st.sampled_from(WORDS)), max_size=30),
    stop=st.lists(st.text("helo tr,你", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_pieces_joined_are_the_text_of_the_answer(tokens, stop, include):
    answer = stopped(tokens, stop)
    assert "".join(pieces(answer, stop, include=include)) == decode_rollout(
        TOKENIZER, answer, include_stop_string=include
    )


def test_a_character_is_given_out_when_its_last_byte_came():
    tokens = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "ðŁĻĤ"]  # the bytes of a smile
    assert pieces(rollout([*tokens, *WORDS[:1]])) == ["", "", "", "🙂", "hello", ""]


def test_what_may_begin_a_stop_string_is_held_until_it_does_not():
    tokens = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "hexhelp"]
    assert pieces(rollout(tokens), stop=["hello"]) == ["", "", "hex", "", "", "", "help", ""]


def test_text_is_not_given_out_past_the_beginning_of_a_stop_string():
    tokens = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "wahel"]
    answer = rollout(tokens, stop_reason="hel")
    assert pieces(answer, stop=["hel"]) == ["w", "a", "", "", "", ""]
    assert pieces(answer, stop=["hel"], include=True) == ["w", "a", "", "", "", "hel"]


@pytest.mark.parametrize("behind", [[0], [0, 1, 2, 3], [0, 1, 2, 3] * 20])
@pytest.mark.parametrize("stop", [(), (" the",), ("the",), (" cat the",)])
def test_the_first_space_is_given_out_where_the_prompt_has_text(behind, stop):
    words = ["<s>", "▁the", "▁cat", "s"]  # as SentencePiece has them: the first space of a text is dropped
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="s"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    whole = " cats the" if len(behind) > 1 else "cats the"
    answer = rollout([2, 3, 1], stop_reason=next((each for each in stop if each in whole), None))
    given = "".join(pieces(answer, stop, tokenizer=tokenizer, prompt=behind))
    assert given == decode_rollout(tokenizer, answer, prompt=behind)
    assert given == (whole.partition(answer.stop_reason)[0] if answer.stop_reason else whole)


def test_a_character_that_the_prompt_began_is_given_out_whole():
    smile = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "ðŁĻĤ"]
    assert pieces(rollout(smile[2:]), prompt=[*WORDS, *smile[:2]]) == ["", "🙂", ""]
