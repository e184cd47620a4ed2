"""Text that is given out while a response grows is the text of the whole response, in every scheme of tokenizers."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent / "programs"))

import speaking

from rl_generation.detokenizer import INCOMPLETE, Detokenizer, StopStrings, answer_text

WORDS = ["▁the", "▁cat", "s", "▁", "▁▁", "é", "你", ",", "\N{REPLACEMENT CHARACTER}"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SMILE = "🙂".encode()


def of_words(words, decoder, **others):
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<s>", *words])}, unk_token="s"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", **others)


def byte_fallback(*, strips):
    """As Llama 2 and Mistral have it, whose first space is dropped; Gemma's is not."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return of_words([*WORDS, *BYTES], decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips))


TOKENIZERS = {
    "byte-level": speaking.tokenizer(),
    "llama-2": byte_fallback(strips=True),
    "gemma": byte_fallback(strips=False),
    "metaspace": of_words(WORDS, decoders.Metaspace()),
    "word-piece": of_words(["the", "cat", "##s", ".", ",", "##", "'", "n't"], decoders.WordPiece()),
}
TOKENS = {name: st.integers(0, len(tokenizer) - 1) for name, tokenizer in TOKENIZERS.items()}
# Bytes of a character that follow one another are rare among 256, and what is looked for.
LIKELY = st.one_of(
    st.sampled_from([b"\xc3\xa9", SMILE, SMILE[:2], b"\n", b"\xff", "你好".encode()]).map(
        lambda data: [len(WORDS) + 1 + byte for byte in data]
    ),
    st.integers(0, len(WORDS)).map(lambda token: [token]),
)


def ids(name, *tokens):
    return [TOKENIZERS[name].convert_tokens_to_ids(token) for token in tokens]


def pieces(tokenizer, tokens, prompt=()):
    text = Detokenizer(tokenizer, prompt)
    return [*(text.push(token) for token in tokens), text.pending]


def sequences(name):
    single = st.lists(TOKENS[name], max_size=20)
    if name not in {"llama-2", "gemma"}:
        return single
    return st.one_of(
        single, st.lists(LIKELY, max_size=8).map(lambda parts: [token for part in parts for token in part])
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_pieces_joined_are_the_text_of_the_response(name, data):
    tokenizer, tokens = TOKENIZERS[name], data.draw(sequences(name))
    assert "".join(pieces(tokenizer, tokens)) == answer_text(tokenizer, tokens, prompt=())
    assert answer_text(tokenizer, tokens, prompt=()) == tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_pieces_behind_a_prompt_are_what_the_response_adds_to_its_text(name, data):
    tokenizer, prompt, tokens = TOKENIZERS[name], data.draw(sequences(name)), data.draw(sequences(name))
    assert "".join(pieces(tokenizer, tokens, prompt)) == answer_text(tokenizer, tokens, prompt=prompt)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_response_ends_with_the_token_after_which_its_whole_characters_hold_a_stop_string(name, data):
    tokenizer, tokens = TOKENIZERS[name], data.draw(sequences(name))
    stops = data.draw(st.lists(st.text("thecas é🙂\n你", min_size=1, max_size=3), min_size=1, max_size=3))
    finder = StopStrings(stops, tokenizer, ())
    found = next(((place, stop) for place, token in enumerate(tokens) if (stop := finder.push(token))), None)
    texts = [answer_text(tokenizer, tokens[: end + 1], prompt=()) for end in range(len(tokens))]
    holding = (end for end, text in enumerate(texts) if any(stop in text for stop in stops))
    expected = next((end for end in holding if not texts[end].endswith(INCOMPLETE)), None)
    assert (None if found is None else found[0]) == expected
    if found is not None:
        assert found[1] in texts[found[0]]


def test_bytes_are_given_out_once_another_token_follows():
    """Whatever followed, the last byte might have made replacement characters of all of them."""
    smile = [f"<0x{byte:02X}>" for byte in SMILE]
    tokens = ids("llama-2", "▁the", *smile, "<0x0A>", "▁cat")
    assert pieces(TOKENIZERS["llama-2"], tokens) == ["the", "", "", "", "", "", "🙂\n cat", ""]
    broken = ids("llama-2", "▁the", *smile, "<0xFF>", "▁cat")
    assert pieces(TOKENIZERS["llama-2"], broken)[-2] == "\N{REPLACEMENT CHARACTER}" * 5 + " cat"


def test_a_stop_string_of_bytes_ends_a_response_with_its_last_byte():
    tokens = ids("llama-2", "▁the", *(f"<0x{byte:02X}>" for byte in SMILE))
    finder = StopStrings(["e🙂"], TOKENIZERS["llama-2"], ())
    assert [finder.push(token) for token in tokens] == [None, None, None, None, "e🙂"]


@pytest.mark.parametrize("name", ["byte-level", "gemma"])
def test_a_stop_string_is_not_found_in_a_character_that_is_not_complete(name):
    tokenizer = TOKENIZERS[name]
    if name == "gemma":
        first, second, word = ids(name, "<0xC3>", "<0xA9>", "s")
    else:
        first, second = tokenizer.encode("é", add_special_tokens=False)
        (word,) = tokenizer.encode("s", add_special_tokens=False)
    stop = ["\N{REPLACEMENT CHARACTER}"]
    finder = StopStrings(stop, tokenizer, ())
    assert [finder.push(token) for token in (first, second, word)] == [None, None, None]
    finder = StopStrings(stop, tokenizer, ())
    assert [finder.push(token) for token in (first, first, word)] == [None, None, *stop]
